"""The files that a framework would have written itself, built from what our integration wrote in their place.

The directory of a framework has its own small files, and one payload of ours with the rest. Here the rest gets back the
names and the layout under which the framework looks for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from shrinkpoint.convert import directory as folders
from shrinkpoint.convert.part import Part
from shrinkpoint.errors import PolicyError, StateError
from shrinkpoint.store.manifest import DirectoryManifest

_DCP_KEY = "torch.distributed.checkpoint"
_LIGHTNING_PREFIX = "shrinkpoint:"
"""How the keys begin under which the Lightning integration keeps values that are not plain."""


def framework_of(manifest: DirectoryManifest) -> str:
    """Which integration wrote a directory; "" where it does not say so."""
    extra = manifest.extra if isinstance(manifest.extra, dict) else {}
    known = {_DCP_KEY: "dcp", "lightning": "lightning"}
    return next((name for key, name in known.items() if key in extra), str(extra.get("framework", "")))


def to_framework_part(path: Path, manifest: DirectoryManifest, state: Any, *, opaque: bool = False) -> Part | None:
    """The checkpoint as its framework writes it; None: nobody knows which one that is.

    Args:
        state: what the payload holds.

    Raises:
        StateError: it holds values that only the framework itself can make again.
        PolicyError: it is not laid out as the integration does it.
    """
    framework = framework_of(manifest)
    if framework == "dcp":
        return Part("dcp", state)
    if framework == "lightning":
        _check_plain(state, ())
        return Part("torch", state)
    if framework not in _LAYOUTS:
        return None
    if not isinstance(state, dict):
        raise _layout_error(path, framework)
    try:
        made = dict(_LAYOUTS[framework](state))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _layout_error(path, framework) from error
    beside = folders.read_framework_parts(path, opaque=opaque)
    parts = {**beside, **made}  # what lies beside under the same name is of an older save by the framework itself
    facts = {"parts": {name: parts[name].description for name in sorted(parts)}, "folders": []}
    return Part("folder", {name: parts[name].content for name in sorted(parts)}, facts)


def _trainer_files(state: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    """The files of the Hugging Face Trainer."""
    if "model" in state:
        yield "model.safetensors", _weights_part(state["model"])
    for name in ("optimizer", "scheduler", "scaler"):
        if name in state:
            yield f"{name}.pt", Part("torch", state[name])
    ranks = _as_list(state.get("rng"))
    for rank, one in enumerate(ranks):
        held = {"python": _python_rng_state(one), "numpy": _numpy_rng_state(one), "cpu": one["torch"]}
        if "cuda" in one:
            held["cuda"] = one["cuda"] if len(ranks) > 1 else one["cuda"][0]
        yield "rng_state.pth" if len(ranks) == 1 else f"rng_state_{rank}.pth", Part("torch", held)


def _accelerate_files(state: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    """The files of `Accelerator.save_state`."""
    for index, one in enumerate(_as_list(state.get("model"))):
        yield f"model{_index_suffix(index)}.safetensors", _weights_part(one)
    for name in ("optimizer", "scheduler"):
        for index, one in enumerate(_as_list(state.get(name))):
            yield f"{name}{_index_suffix(index)}.bin", Part("torch", one)
    for index, one in enumerate(state.get("objects", [])):
        yield f"custom_checkpoint_{index}.pkl", Part("torch", one)
    if "scaler" in state:
        yield "scaler.pt", Part("torch", state["scaler"])
    for rank, own in enumerate(state["ranks"]):
        one = own["rng"]
        held = {
            "step": state["step"],
            "random_state": _python_rng_state(one),
            "numpy_random_seed": _numpy_rng_state(one),
        }
        held["torch_manual_seed"] = one["torch"]
        if "cuda" in one:
            held["torch_cuda_manual_seed"] = one["cuda"]
        yield f"random_states_{rank}.pkl", Part("torch", held)


_LAYOUTS = {"transformers": _trainer_files, "accelerate": _accelerate_files}


def _weights_part(state: Any) -> Part:
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    if len(tensors) < len(state):
        return Part("torch", state)
    return Part("safetensors", tensors, {"metadata": {"format": "pt"}})


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _index_suffix(index: int) -> str:
    return f"_{index}" if index else ""


def _python_rng_state(rng_states: dict[str, Any]) -> tuple[Any, ...]:
    """As `random.getstate` gives it."""
    python = rng_states["python"]
    return python["version"], tuple(int(word) for word in python["words"]), python["gauss"]


def _numpy_rng_state(rng_states: dict[str, Any]) -> tuple[Any, ...]:
    """As `numpy.random.get_state` gives it."""
    numpy = rng_states["numpy"]
    inner = numpy["state"]
    return numpy["bit_generator"], inner["key"], inner["pos"], numpy["has_gauss"], numpy["gauss"]


def _check_plain(value: Any, path: tuple[Any, ...]) -> None:
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str) and re.match(_LIGHTNING_PREFIX, key):
                where, expected = "".join(f"[{one!r}]" for one in path), "plain values"
                do = "load it with the integration, and save it with Lightning's own CheckpointIO"
                raise StateError(
                    f"state{where}", found=f"a value that needs Lightning ({key})", expected=expected, do=do
                )
            _check_plain(item, (*path, key))


def _layout_error(path: Path, framework: str) -> PolicyError:
    expected, do = f"a checkpoint as the integration of {framework} writes it", "say --to torch"
    return PolicyError(str(path), found="other contents", expected=expected, do=do)
