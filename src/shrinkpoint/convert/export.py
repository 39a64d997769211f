"""Writes checkpoints of this library in the formats that others read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from shrinkpoint.convert import dcp, directory, safetensors_file, torch_file
from shrinkpoint.convert.discover import STATE_KEY, origin_info
from shrinkpoint.convert.part import TENSOR_SUFFIXES
from shrinkpoint.errors import CorruptError, PolicyError, ShrinkpointError
from shrinkpoint.storage import atomic_replace
from shrinkpoint.tensors.names import as_tensor, is_array, named_leaves

_SUFFIXES = {"torch": ".pt", "safetensors": ".safetensors"}
FORMS = ("original", "torch", "safetensors", "dcp")
"""Forms that can be asked for; "original" is the form that a checkpoint had before it was converted."""


def target_form(state: Any, requested_form: str, where: str) -> dict[str, Any]:
    """Decides how a state is written: the form, the name, and what else the form needs.

    Args:
        requested_form: one of `FORMS`.

    Raises:
        PolicyError: the original form is asked for, and the state was not converted.
    """
    origin = origin_info(state)
    if requested_form == "original":
        if origin is None:
            expected, do = "a converted checkpoint, which knows what it was", "say --to torch, safetensors or dcp"
            raise PolicyError(where, found="a checkpoint that was not converted", expected=expected, do=do)
        return origin
    if origin is not None and origin["form"] == requested_form:
        return origin
    return {"form": requested_form, "name": "" if origin is None else origin["name"]}


def unique_name(name: str, step: int, form: str, used_names: Collection[str]) -> str:
    """The name to write one of several checkpoints under: its old one, with the step added if that is used already.

    Names are compared without case, as some file systems do.

    Args:
        form: the form that was asked for.
        used_names: case-folded names of the checkpoints written before.

    >>> unique_name("v1.0-step=10.ckpt", 10, "torch", ()), unique_name("v1.0-step=10.ckpt", 10, "dcp", ())
    ('v1.0-step=10.pt', 'v1.0-step=10')
    >>> unique_name("Last.pt", 20, "original", {"last.pt"})
    'Last-step-20.pt'
    """
    old_suffix = next((suffix for suffix in TENSOR_SUFFIXES if name.endswith(suffix)), "")
    stem = name.removesuffix(old_suffix) or f"step-{step}"
    suffix = old_suffix if form == "original" else _SUFFIXES.get(form, "")
    while f"{stem}{suffix}".casefold() in used_names:
        stem += f"-step-{step}"
    return f"{stem}{suffix}"


def content_of(state: Any) -> Any:
    """The content of a converted checkpoint without its origin; any other state unchanged."""
    return state if origin_info(state) is None else state[STATE_KEY]


def write_checkpoint(out: Path, state: Any, description: Mapping[str, Any]) -> int:
    """Writes a checkpoint to `out`, a file or a directory, atomically; existing files of the same names are replaced.

    Returns:
        the number of plain values left out, which safetensors cannot hold.

    Raises:
        PolicyError: the form cannot hold the state; `out` has other files, or is a directory instead of a file.
        CorruptError: the stored origin is one that no release writes, or names files outside of `out`.
        StorageError: writing failed.
    """
    try:
        return _write_form(out, state, description)
    except (KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ShrinkpointError):
            raise
        found = f"a converted checkpoint that contradicts itself ({type(error).__name__}: {error!s:.80})"
        raise CorruptError(str(out), found=found, expected="as convert writes it", do="say --to torch") from error


def _write_form(out: Path, state: Any, description: Mapping[str, Any]) -> int:
    form, content, left_out = description["form"], content_of(state), 0
    info = dict(description)
    if form == "safetensors" and (origin_info(state) or {}).get("form") != "safetensors":
        content, left_out = tensors_of(content)
        info["metadata"] = {"format": "pt"}
    if out.name in ("", ".."):
        raise PolicyError(str(out), found="a directory that is in use", expected="a new name", do="name a new one")
    with atomic_replace(out) as temporary:
        out.parent.mkdir(parents=True, exist_ok=True)
        if form in ("folder", "dcp"):
            temporary.mkdir()
        if form == "folder":
            directory.write(temporary, content, info)
        elif form == "dcp":
            dcp.write(temporary, content)
        elif form == "safetensors":
            safetensors_file.write(temporary, content, info)
        elif form == "torch":
            torch_file.write(temporary, content)
        else:
            do = "use a newer release, or say --to torch"
            raise CorruptError(str(out), found=f"the form {form!r:.40}", expected="a known one", do=do)
        _check_no_loss(out, temporary)
    return left_out


def reread(out: Path, description: Mapping[str, Any]) -> Any:
    """Reads again what `write_checkpoint` wrote."""
    if description["form"] == "torch":
        return torch_file.read(out).content
    if description["form"] == "safetensors":
        return safetensors_file.read(out).content
    return directory.read(out, opaque=True).content


def tensors_of(content: Any) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors and arrays of a nest by name, and the number of its other leaves."""
    if isinstance(content, dict) and all(isinstance(value, torch.Tensor) for value in content.values()):
        return dict(content), 0
    leaves = named_leaves(content)
    tensors = {name: as_tensor(leaf) for name, leaf in leaves.items() if is_array(leaf)}
    return tensors, len(leaves) - len(tensors)


def _check_no_loss(out: Path, replacement: Path) -> None:
    """Raises `PolicyError` where files would go that nothing replaces: a directory is easily named by mistake."""
    if not out.is_dir():
        return
    if not replacement.is_dir():
        do = f"name a file, such as {out / 'checkpoint'}"
        raise PolicyError(str(out), found="a directory", expected="the name of a file", do=do)
    if out.is_symlink():
        raise PolicyError(str(out), found="a link", expected="a new name", do="name another place")
    for path in sorted(out.rglob("*")):
        if not path.is_dir() and not (replacement / path.relative_to(out)).is_file():
            expected, do = "no file that would be lost", "choose a new name, or remove it first"
            raise PolicyError(str(out), found=f"another file there, {path.name}", expected=expected, do=do)
