"""Checkpoints of ours, in the form in which others read them."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shrinkpoint.errors import CorruptError, PolicyError, ShrinkpointError
from shrinkpoint.foreign import dcp_folder, folder, safetensors_file, torch_file
from shrinkpoint.foreign.checkpoint import STATE, source_of
from shrinkpoint.foreign.leaves import named, tensor_of, valued
from shrinkpoint.foreign.part import TENSORS
from shrinkpoint.storage import storage_error

_ENDS = {"torch": ".pt", "safetensors": ".safetensors"}
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


def free_name(name: str, step: int, form: str, taken: Collection[str]) -> str:
    """The name of one of several: its old one, unless another one has it, on a disk that takes A for a, too.

    Args:
        form: what was asked for.
        taken: names in lower case.

    >>> free_name("v1.0-step=10.ckpt", 10, "torch", ()), free_name("v1.0-step=10.ckpt", 10, "dcp", ())
    ('v1.0-step=10.pt', 'v1.0-step=10')
    >>> free_name("Last.pt", 20, "original", {"last.pt"})
    'Last-step-20.pt'
    """
    end = next((end for end in TENSORS if name.endswith(end)), "")
    stem = name.removesuffix(end) or f"step-{step}"
    end = end if form == "original" else _ENDS.get(form, "")
    while f"{stem}{end}".casefold() in taken:
        stem += f"-step-{step}"
    return f"{stem}{end}"


def content_of(state: Any) -> Any:
    """What was in a checkpoint, without what it was."""
    return state if source_of(state) is None else state[STATE]


def write(out: Path, state: Any, said: Mapping[str, Any]) -> int:
    """Write `out`, a file or a directory, all or nothing; what was there is replaced by what has the same names.

    Returns:
        how many plain values were left out, which safetensors cannot hold.

    Raises:
        PolicyError: the form cannot hold it; there are other files at `out`, or a directory in the place of a file.
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
    if out.name in ("", ".."):
        raise PolicyError(str(out), found="a directory that is in use", expected="a new name", do="name a new one")
    temporary, old = (out.with_name(f".{out.name}.{secrets.token_hex(4)}.{end}") for end in ("tmp", "old"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _check_lost(out, temporary)
        for path in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
            _flush(path)
        if out.is_dir():
            out.rename(old)
        temporary.replace(out)
        _flush(out.parent)
    except OSError as error:
        if isinstance(error, ShrinkpointError):
            raise
        raise storage_error(str(out), "writing", error) from error
    finally:
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True) if out.exists() else old.rename(out)
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _check_lost(out: Path, new: Path) -> None:
    """Raises `PolicyError` where files would go that nothing replaces: a directory is easily named by mistake."""
    if not out.is_dir():
        return
    if not new.is_dir():
        do = f"name a file, such as {out / 'checkpoint'}"
        raise PolicyError(str(out), found="a directory", expected="the name of a file", do=do)
    if out.is_symlink():
        raise PolicyError(str(out), found="a link", expected="a new name", do="name another place")
    for path in sorted(out.rglob("*")):
        if not path.is_dir() and not (new / path.relative_to(out)).is_file():
            expected, do = "no file that would be lost", "choose a new name, or remove it first"
            raise PolicyError(str(out), found=f"another file there, {path.name}", expected=expected, do=do)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
