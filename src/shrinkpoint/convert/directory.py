"""A checkpoint that is a directory: files of tensors are read, every other file is kept as its bytes.

One reader serves the directories of the Hugging Face Trainer, Accelerate, Lightning, `save_pretrained` and
torch.distributed.checkpoint, which differ only in the names of their files."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.convert import dcp, safetensors_file, sharded_index, torch_file
from shrinkpoint.convert.part import Part, read_bytes, safe_join
from shrinkpoint.errors import CorruptError, NotFoundError, StateError
from shrinkpoint.store.directory import is_checkpoint, own_files
from shrinkpoint.tensors.flatten import flatten

MAX_OPAQUE_BYTES = 1 << 20
"""Bytes up to which a file that cannot be read without running it is taken along as it is, without being asked."""

_TEMPORARY_PREFIXES = (".shrinkpoint-",)
_LOG = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class DirectoryContents:
    """What a directory holds, unread.

    Attributes:
        parts: the path of the file that leads each part (of shards the index, of DCP its metadata), and its form.
        files: all files.
        empty_directories: directories without a file.
        ignored_links: links to directories, which are not followed, and to nothing.
    """

    parts: dict[Path, str]
    files: list[Path]
    empty_directories: list[Path]
    ignored_links: list[Path]

    @property
    def holds_tensors(self) -> bool:
        return any(form != "bytes" for form in self.parts.values())


def scan_directory(directory: Path) -> DirectoryContents:
    """Look at the names and the first bytes of all files.

    Raises:
        CorruptError: an index or a metadata file is damaged, or names files outside its directory.
        StorageError: reading failed.
    """
    found, folders, skipped = _walk(directory)
    parts: dict[Path, str] = {}
    taken: set[Path] = set()
    for path in found:
        if path.name == dcp.METADATA_FILE and is_ours(path.parent):
            parts[path] = "shrunk"
            taken.update(own_files(path.parent))
        elif path.name == dcp.METADATA_FILE:
            parts[path] = "dcp"
            taken.update(dcp.data_files(path.parent, dcp.read_metadata(path.parent)))
        elif sharded_index.is_index(path):
            parts[path] = "sharded"
            taken.update(sharded_index.shard_files(path))
    for path in found:
        if path not in parts and path not in taken:
            parts[path] = _detect_form(path)
    return DirectoryContents(dict(sorted(parts.items())), found, folders, skipped)


def list_files(directory: Path) -> list[Path]:
    """Every file below a directory."""
    return _walk(directory)[0]


def read(directory: Path, *, opaque: bool = False) -> Part:
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
    found = scan_directory(directory)
    if not found.holds_tensors:
        raise no_checkpoint_error(directory)
    for link in found.ignored_links:
        _LOG.warning("%s: left out, a link to %s", link, "a directory" if link.is_dir() else "nothing")
    if list(found.parts.values()) == ["dcp"] and next(iter(found.parts)).parent == directory:
        return _read_part(next(iter(found.parts)), "dcp")
    parts = {
        path.relative_to(directory).as_posix(): _read_part(path, form, opaque) for path, form in found.parts.items()
    }
    facts: dict[str, Any] = {"parts": {name: part.description for name, part in parts.items()}}
    facts["folders"] = [path.relative_to(directory).as_posix() for path in found.empty_directories]
    return Part("folder", {name: part.content for name, part in parts.items()}, facts)


def read_framework_parts(directory: Path, *, opaque: bool = False) -> dict[str, Part]:
    """The parts of a directory of ours that are its framework's own: small files, adapters."""
    own = own_files(directory)
    found = scan_directory(directory)
    return {
        path.relative_to(directory).as_posix(): _read_part(path, form, opaque)
        for path, form in found.parts.items()
        if path not in own
    }


def write(directory: Path, content: dict[str, Any], info: dict[str, Any]) -> None:
    """The directory as it was; it must be there, and empty."""
    where = str(directory)
    for name in info.get("folders", ()):
        safe_join(directory, name, where).mkdir(parents=True, exist_ok=True)
    for name, said in info["parts"].items():
        path = safe_join(directory, name, where)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_part(path, content[name], said)


def write_part(path: Path, content: Any, description: dict[str, Any]) -> None:
    """One part at the path of the file that leads it.

    Raises:
        CorruptError: a form that no release writes.
        StorageError: writing failed.
    """
    form = description.get("form")
    if form == "torch":
        torch_file.write(path, content)
    elif form == "safetensors":
        safetensors_file.write(path, content, description)
    elif form == "sharded":
        sharded_index.write(path, content, description)
    elif form == "dcp":
        dcp.write(path.parent, content)
    elif form == "bytes":
        path.write_bytes(content)
    else:
        raise CorruptError(str(path), found=f"the form {form!r:.40}", expected="a known one", do="use a newer release")


def is_ours(directory: Path) -> bool:
    """Whether the checkpoint in a directory is one of our integrations', and nobody has saved into it since."""
    if not is_checkpoint(directory) or not (directory / dcp.METADATA_FILE).is_file():
        return is_checkpoint(directory)
    from shrinkpoint.train.dcp.checkpoint_metadata import is_overwritten_by_torch  # needs torch.distributed

    return not is_overwritten_by_torch(directory)


def no_checkpoint_error(directory: Path) -> NotFoundError:
    """What to raise of a directory without a checkpoint."""
    empty = not any(directory.iterdir())
    expected = "torch or safetensors files, a DCP directory, or directories of them"
    found = "an empty directory" if empty else "no file that holds tensors"
    return NotFoundError(
        str(directory), found=found, expected=expected, do="name the directory of a checkpoint or a run"
    )


def _walk(directory: Path) -> tuple[list[Path], list[Path], list[Path]]:
    files: list[Path] = []
    folders: list[Path] = []
    skipped: list[Path] = []
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and not path.is_file():
            skipped.append(path)
        elif path.is_dir():
            inner = _walk(path)
            for all_, new in zip((files, folders, skipped), inner, strict=True):
                all_ += new
            if not any(inner):
                folders.append(path)
        elif path.is_file() and not path.name.startswith(_TEMPORARY_PREFIXES):
            files.append(path)
    return files, folders, skipped


def _detect_form(path: Path) -> str:
    if path.suffix == ".safetensors":  # what is ours is packed, and a digest of its bytes may stand somewhere
        return "bytes" if safetensors_file.is_ours(path) else "safetensors"
    return "torch" if torch_file.is_torch_file(path) else "bytes"


def _read_part(path: Path, form: str, opaque: bool = False) -> Part:
    if form == "dcp":
        return dcp.read(path.parent, dcp.read_metadata(path.parent))
    if form == "shrunk":
        from shrinkpoint.train.dcp import load  # of many ranks; needs torch.distributed

        return Part("dcp", load(path.parent))
    if form == "sharded":
        return sharded_index.read(path)
    if form == "safetensors":
        return safetensors_file.read(path)
    if form == "bytes":
        return Part("bytes", read_bytes(path))
    return _read_torch_file(path, opaque)


def _read_torch_file(path: Path, opaque: bool) -> Part:
    """A torch file, or its bytes where what it holds cannot be stored otherwise."""
    try:
        part = torch_file.read(path)
        flatten(part.content)
        return part
    except StateError as error:
        size = path.stat().st_size
        if not opaque and size > MAX_OPAQUE_BYTES:
            raise _error_with_path(path, error) from error
        _LOG.info("%s: taken along as its %d bytes (%s)", path, size, error.found)
        return Part("bytes", read_bytes(path), {"opaque": True})


def _error_with_path(path: Path, error: StateError) -> StateError:
    where = str(path) if error.where == str(path) else f"{path}: {error.where}"
    do = error.do or "convert it first, or take it along as it is with --opaque"
    return StateError(where, found=error.found, expected=error.expected, do=do)
