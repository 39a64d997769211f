"""Builds the files that a framework would have written itself from what its integration wrote in their place.

A directory of an integration has the framework's own small files, and one payload of ours with all other values. Here
these values get back the file names and the layout that the framework expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from shrinkpoint.convert import directory
from shrinkpoint.convert.part import Part
from shrinkpoint.errors import PolicyError
from shrinkpoint.store.manifest import DirectoryManifest


def framework_of(manifest: DirectoryManifest) -> str:
    """Name of the integration that wrote a directory; "" if the manifest does not have it."""
    if manifest.is_dcp:
        return "dcp"
    extra = manifest.extra if isinstance(manifest.extra, dict) else {}
    return "lightning" if "lightning" in extra else str(extra.get("framework", ""))


def to_framework_part(path: Path, manifest: DirectoryManifest, state: Any, *, opaque: bool = False) -> Part | None:
    """Builds the checkpoint as its framework writes it; None if the framework is unknown.

    Args:
        path: the directory of the checkpoint.
        state: content of its payload.
        opaque: keep files that cannot be read without running them as their bytes, however large.

    Raises:
        PolicyError: the state is not laid out as the integration does it.
    """
    framework = framework_of(manifest)
    if framework == "dcp":
        return Part("dcp", state)
    if framework == "lightning":
        return Part("torch", state)
    if framework not in _LAYOUTS:
        return None
    if not isinstance(state, dict):
        raise _layout_error(path, framework)
    try:
        files = dict(_LAYOUTS[framework](state))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _layout_error(path, framework) from error
    # a file of the same name in the directory is of an older save by the framework itself
    parts = {**directory.read_framework_parts(path, opaque=opaque), **files}
    return directory.folder_part(dict(sorted(parts.items())))


def _trainer_files(state: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    if "model" in state:
        yield "model.safetensors", _weights_part(state["model"])
    for name in ("optimizer", "scheduler", "scaler"):
        if name in state:
            yield f"{name}.pt", Part("torch", state[name])
    ranks = _as_list(state.get("rng"))
    for rank, rng in enumerate(ranks):
        content = {"python": _python_rng_state(rng), "numpy": _numpy_rng_state(rng), "cpu": rng["torch"]}
        if "cuda" in rng:
            content["cuda"] = rng["cuda"] if len(ranks) > 1 else rng["cuda"][0]
        yield "rng_state.pth" if len(ranks) == 1 else f"rng_state_{rank}.pth", Part("torch", content)


def _accelerate_files(state: dict[str, Any]) -> Iterator[tuple[str, Part]]:
    for index, model in enumerate(_as_list(state.get("model"))):
        yield f"model{_index_suffix(index)}.safetensors", _weights_part(model)
    for name in ("optimizer", "scheduler"):
        for index, content in enumerate(_as_list(state.get(name))):
            yield f"{name}{_index_suffix(index)}.bin", Part("torch", content)
    for index, content in enumerate(state.get("objects", [])):
        yield f"custom_checkpoint_{index}.pkl", Part("torch", content)
    if "scaler" in state:
        yield "scaler.pt", Part("torch", state["scaler"])
    for rank, rank_state in enumerate(state["ranks"]):
        rng = rank_state["rng"]
        content = {
            "step": state["step"],
            "random_state": _python_rng_state(rng),
            "numpy_random_seed": _numpy_rng_state(rng),
            "torch_manual_seed": rng["torch"],
        }
        if "cuda" in rng:
            content["torch_cuda_manual_seed"] = rng["cuda"]
        yield f"random_states_{rank}.pkl", Part("torch", content)


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
    """The state of Python's generator as `random.getstate` returns it."""
    python = rng_states["python"]
    return python["version"], tuple(int(word) for word in python["words"]), python["gauss"]


def _numpy_rng_state(rng_states: dict[str, Any]) -> tuple[Any, ...]:
    """The state of numpy's generator as `numpy.random.get_state` returns it."""
    numpy = rng_states["numpy"]
    inner = numpy["state"]
    return numpy["bit_generator"], inner["key"], inner["pos"], numpy["has_gauss"], numpy["gauss"]


def _layout_error(path: Path, framework: str) -> PolicyError:
    expected, do = f"a checkpoint that shrinkpoint wrote for {framework}", "add --to torch"
    return PolicyError(str(path), found="other contents", expected=expected, do=do)
