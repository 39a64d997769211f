"""A checkpoint that is a directory: what holds tensors is read, every other file is taken along as it is.

So it is one reader for the directories of the Hugging Face Trainer, Accelerate, Lightning, `save_pretrained` and
torch.distributed.checkpoint, which differ in the names of their files only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.errors import CorruptError, NotFoundError, StateError
from shrinkpoint.foreign import dcp_folder, safetensors_file, sharded, torch_file
from shrinkpoint.foreign.part import Part, contents, inside
from shrinkpoint.state import flatten
from shrinkpoint.store.folder import is_checkpoint, own_files

OPAQUE = 1 << 20
"""Bytes up to which a file that cannot be read without running it is taken along as it is, without being asked."""

_LEFT_BEHIND = (".shrinkpoint-",)
_LOG = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class Listing:
    """What a directory holds, unread.

    Attributes:
        parts: the path of the file that leads each part (of shards the index, of DCP its metadata), and its form.
        files: all files.
        folders: directories without a file.
        skipped: links to directories, which are not followed, and to nothing.
    """

    parts: dict[Path, str]
    files: list[Path]
    folders: list[Path]
    skipped: list[Path]

    @property
    def holds_tensors(self) -> bool:
        return any(form != "bytes" for form in self.parts.values())


def scan(folder: Path) -> Listing:
    """Look at the names and the first bytes of all files.

    Raises:
        CorruptError: an index or a metadata file is damaged, or names files outside its directory.
        StorageError: reading failed.
    """
    found, folders, skipped = _walk(folder)
    parts: dict[Path, str] = {}
    taken: set[Path] = set()
    for path in found:
        if path.name == dcp_folder.METADATA and is_ours(path.parent):
            parts[path] = "shrunk"
            taken.update(own_files(path.parent))
        elif path.name == dcp_folder.METADATA:
            parts[path] = "dcp"
            taken.update(dcp_folder.files(path.parent, dcp_folder.plan(path.parent)))
        elif sharded.is_index(path):
            parts[path] = "sharded"
            taken.update(sharded.shards(path))
    for path in found:
        if path not in parts and path not in taken:
            parts[path] = _form(path)
    return Listing(dict(sorted(parts.items())), found, folders, skipped)


def files(folder: Path) -> list[Path]:
    """Every file below a directory."""
    return _walk(folder)[0]


def read(folder: Path, *, opaque: bool = False) -> Part:
    """Every part of a directory, by the name of the file that leads it.

    A directory of torch.distributed.checkpoint with nothing beside is that one part itself.

    Args:
        opaque: take files that cannot be read without running them along as they are, however large.

    Raises:
        NotFoundError: there is nothing in it that holds tensors, or a shard is missing.
        StateError: a file needs more than tensors and plain values.
        FormatError: a file is damaged.
        StorageError: reading failed.
    """
    found = scan(folder)
    if not found.holds_tensors:
        raise nothing(folder)
    for link in found.skipped:
        _LOG.warning("%s: left out, a link to %s", link, "a directory" if link.is_dir() else "nothing")
    if list(found.parts.values()) == ["dcp"] and next(iter(found.parts)).parent == folder:
        return _read(next(iter(found.parts)), "dcp")
    parts = {path.relative_to(folder).as_posix(): _read(path, form, opaque) for path, form in found.parts.items()}
    facts: dict[str, Any] = {"parts": {name: part.said for name, part in parts.items()}}
    facts["folders"] = [path.relative_to(folder).as_posix() for path in found.folders]
    return Part("folder", {name: part.content for name, part in parts.items()}, facts)


def beside(folder: Path, *, opaque: bool = False) -> dict[str, Part]:
    """The parts of a directory of ours that are its framework's own: small files, adapters."""
    own = own_files(folder)
    found = scan(folder)
    return {
        path.relative_to(folder).as_posix(): _read(path, form, opaque)
        for path, form in found.parts.items()
        if path not in own
    }


def write(folder: Path, content: dict[str, Any], facts: dict[str, Any]) -> None:
    """The directory as it was; it must be there, and empty."""
    where = str(folder)
    for name in facts.get("folders", ()):
        inside(folder, name, where).mkdir(parents=True, exist_ok=True)
    for name, said in facts["parts"].items():
        path = inside(folder, name, where)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_part(path, content[name], said)


def write_part(path: Path, content: Any, said: dict[str, Any]) -> None:
    """One part at the path of the file that leads it.

    Raises:
        CorruptError: a form that no release writes.
        StorageError: writing failed.
    """
    form = said.get("form")
    if form == "torch":
        torch_file.write(path, content)
    elif form == "safetensors":
        safetensors_file.write(path, content, said)
    elif form == "sharded":
        sharded.write(path, content, said)
    elif form == "dcp":
        dcp_folder.write(path.parent, content)
    elif form == "bytes":
        path.write_bytes(content)
    else:
        raise CorruptError(str(path), found=f"the form {form!r:.40}", expected="a known one", do="use a newer release")


def is_ours(folder: Path) -> bool:
    """Whether the checkpoint in a directory is one of our integrations', and nobody has saved into it since."""
    if not is_checkpoint(folder) or not (folder / dcp_folder.METADATA).is_file():
        return is_checkpoint(folder)
    from shrinkpoint.train.dcp.marker import is_foreign  # needs torch.distributed

    return not is_foreign(folder)


def nothing(folder: Path) -> NotFoundError:
    """What to raise of a directory without a checkpoint."""
    empty = not any(folder.iterdir())
    expected = "torch or safetensors files, a DCP directory, or directories of them"
    found = "an empty directory" if empty else "no file that holds tensors"
    return NotFoundError(str(folder), found=found, expected=expected, do="name the directory of a checkpoint or a run")


def _walk(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    files: list[Path] = []
    folders: list[Path] = []
    skipped: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.is_file():
            skipped.append(path)
        elif path.is_dir():
            inner = _walk(path)
            for all_, new in zip((files, folders, skipped), inner, strict=True):
                all_ += new
            if not any(inner):
                folders.append(path)
        elif path.is_file() and not path.name.startswith(_LEFT_BEHIND):
            files.append(path)
    return files, folders, skipped


def _form(path: Path) -> str:
    if path.suffix == ".safetensors":  # what is ours is packed, and a digest of its bytes may stand somewhere
        return "bytes" if safetensors_file.is_ours(path) else "safetensors"
    return "torch" if torch_file.is_torch(path) else "bytes"


def _read(path: Path, form: str, opaque: bool = False) -> Part:
    if form == "dcp":
        return dcp_folder.read(path.parent, dcp_folder.plan(path.parent))
    if form == "shrunk":
        from shrinkpoint.train.dcp import load  # of many ranks; needs torch.distributed

        return Part("dcp", load(path.parent))
    if form == "sharded":
        return sharded.read(path)
    if form == "safetensors":
        return safetensors_file.read(path)
    if form == "bytes":
        return Part("bytes", contents(path))
    return _torch(path, opaque)


def _torch(path: Path, opaque: bool) -> Part:
    """A torch file, or its bytes where what it holds cannot be stored otherwise."""
    try:
        part = torch_file.read(path)
        flatten(part.content)
        return part
    except StateError as error:
        size = path.stat().st_size
        if not opaque and size > OPAQUE:
            raise _named(path, error) from error
        _LOG.info("%s: taken along as its %d bytes (%s)", path, size, error.found)
        return Part("bytes", contents(path), {"opaque": True})


def _named(path: Path, error: StateError) -> StateError:
    where = str(path) if error.where == str(path) else f"{path}: {error.where}"
    do = error.do or "convert it first, or take it along as it is with --opaque"
    return StateError(where, found=error.found, expected=error.expected, do=do)
