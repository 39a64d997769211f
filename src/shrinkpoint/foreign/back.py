"""Checkpoints of ours, in the form in which others read them."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shrinkpoint.errors import CorruptError, PolicyError, ShrinkpointError
from shrinkpoint.foreign import dcp_folder, folder, safetensors_file, torch_file
from shrinkpoint.foreign.checkpoint import STATE, source_of
from shrinkpoint.foreign.leaves import named, tensor_of, valued
from shrinkpoint.storage import storage_error

FORMS = ("original", "torch", "safetensors", "dcp")


def form_of(state: Any, wanted: str, where: str) -> dict[str, Any]:
    """How a state is to be written: its form and the facts that go with it.

    Args:
        wanted: one of FORMS; "original" is what it was before it was converted.

    Raises:
        PolicyError: it never was anything else.
    """
    said = source_of(state)
    if wanted == "original":
        if said is None:
            expected, do = "a converted checkpoint, which knows what it was", "say --to torch, safetensors or dcp"
            raise PolicyError(where, found="a checkpoint that was not converted", expected=expected, do=do)
        return said
    if said is not None and said["form"] == wanted:
        return said
    return {"form": wanted, "name": "" if said is None else said["name"]}


def content_of(state: Any) -> Any:
    """What was in a checkpoint, without what it was."""
    return state if source_of(state) is None else state[STATE]


def write(out: Path, state: Any, said: Mapping[str, Any]) -> int:
    """Write `out`, a file or a directory, all or nothing; what was there is replaced.

    Returns:
        how many plain values were left out, which safetensors cannot hold.

    Raises:
        PolicyError: the form cannot hold it.
        CorruptError: it says of itself what no release writes, or names files outside of `out`.
        StorageError: writing failed.
    """
    try:
        return _written(out, state, said)
    except (KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ShrinkpointError):
            raise
        found = f"a converted checkpoint that contradicts itself ({type(error).__name__}: {error!s:.80})"
        raise CorruptError(str(out), found=found, expected="as convert writes it", do="say --to torch") from error


def _written(out: Path, state: Any, said: Mapping[str, Any]) -> int:
    form, content, left_out = said["form"], content_of(state), 0
    facts = dict(said)
    if form == "safetensors" and (source_of(state) or {}).get("form") != "safetensors":
        content, left_out = tensors_of(content)
        facts["metadata"] = {"format": "pt"}
    with _replacing(out) as temporary:
        if form in ("folder", "dcp"):
            temporary.mkdir()
        if form == "folder":
            folder.write(temporary, content, facts)
        elif form == "dcp":
            dcp_folder.write(temporary, content)
        elif form == "safetensors":
            safetensors_file.write(temporary, content, facts)
        elif form == "torch":
            torch_file.write(temporary, content)
        else:
            do = "use a newer release, or say --to torch"
            raise CorruptError(str(out), found=f"the form {form!r:.40}", expected="a known one", do=do)
    return left_out


def reread(out: Path, said: Mapping[str, Any]) -> Any:
    """What `write` wrote, read again."""
    if said["form"] == "torch":
        return torch_file.read(out).content
    if said["form"] == "safetensors":
        return safetensors_file.read(out).content
    return folder.read(out, opaque=True).content


def tensors_of(content: Any) -> tuple[dict[str, torch.Tensor], int]:
    """All tensors and arrays of a nest by their names in it, and how many other leaves there are."""
    if isinstance(content, dict) and all(isinstance(value, torch.Tensor) for value in content.values()):
        return dict(content), 0
    leaves = named(content)
    tensors = {name: tensor_of(leaf) for name, leaf in leaves.items() if valued(leaf)}
    return tensors, len(leaves) - len(tensors)


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A temporary name beside `out`, renamed when the block ends well."""
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
            _flush(path)
        if out.is_dir():
            shutil.rmtree(out)
        temporary.replace(out)
    except OSError as error:
        raise storage_error(str(out), "writing", error) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
