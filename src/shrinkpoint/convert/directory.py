"""Reads and writes checkpoints that are directories: files of tensors are read, every other file is kept as its bytes.

One reader serves the directories of the Hugging Face Trainer, Accelerate, Lightning, `save_pretrained` and
torch.distributed.checkpoint, which differ only in the names of their files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shrinkpoint.convert import dcp, safetensors_file, sharded_index, torch_file
from shrinkpoint.convert.part import Part, read_bytes, safe_join
from shrinkpoint.errors import CorruptError, NotFoundError, StateError
from shrinkpoint.storage.base import RESERVED
from shrinkpoint.store.directory import own_files
from shrinkpoint.store.identify import is_checkpoint
from shrinkpoint.tensors.flat_state import flatten

MAX_OPAQUE_BYTES = 1 << 20
"""Bytes up to which a file that cannot be read without running it is kept as its bytes without `opaque`."""

_LOG = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class DirectoryContents:
    """The files of a directory and their forms, without their content."""

    # Form of each part by the path of its leading file (of shards the index, of DCP the metadata).
    parts: dict[Path, str]
    files: list[Path]  # all files
    empty_directories: list[Path]  # directories without a file
    ignored_links: list[Path]  # links to directories, which are not followed, and links to nothing

    @property
    def holds_tensors(self) -> bool:
        return any(form != "bytes" for form in self.parts.values())


def scan_directory(directory: Path) -> DirectoryContents:
    """Scans the names and the first bytes of all files below a directory.

    Raises:
        CorruptError: an index or a metadata file is damaged, or names files outside its directory.
        StorageError: reading failed.
    """
    files, empty_directories, ignored_links = list_files(directory)
    parts: dict[Path, str] = {}
    covered: set[Path] = set()
    for path in files:
        if path.name == dcp.METADATA_FILE and is_ours(path.parent):
            parts[path] = "shrunk"
            covered.update(own_files(path.parent))
        elif path.name == dcp.METADATA_FILE:
            parts[path] = "dcp"
            covered.update(dcp.data_files(path.parent, dcp.read_metadata(path.parent)))
        elif sharded_index.is_index(path):
            parts[path] = "sharded"
            covered.update(sharded_index.shard_files(path))
    for path in files:
        if path in parts or path in covered:
            continue
        if path.suffix == ".safetensors":  # our files stay as bytes: a manifest may hold their digest
            parts[path] = "bytes" if safetensors_file.is_ours(path) else "safetensors"
        else:
            parts[path] = "torch" if torch_file.is_torch_file(path) else "bytes"
    return DirectoryContents(dict(sorted(parts.items())), files, empty_directories, ignored_links)


def read(directory: Path, *, opaque: bool = False) -> Part:
    """Reads every part of a directory, by the relative path of its leading file.

    A directory of torch.distributed.checkpoint with nothing else in it is that one part itself.

    Args:
        opaque: keep files that cannot be read without running them as their bytes, however large.

    Raises:
        NotFoundError: no file in it holds tensors, or a shard is missing.
        StateError: a file needs more than tensors and plain values.
        FormatError: a file is damaged.
        StorageError: reading failed.
    """
    contents = scan_directory(directory)
    if not contents.holds_tensors:
        raise no_checkpoint_error(directory)
    for link in contents.ignored_links:
        _LOG.warning("%s: left out, a link to %s", link, "a directory" if link.is_dir() else "nothing")
    if contents.parts == {directory / dcp.METADATA_FILE: "dcp"}:
        return _read_part(directory / dcp.METADATA_FILE, "dcp")
    parts = {
        path.relative_to(directory).as_posix(): _read_part(path, form, opaque) for path, form in contents.parts.items()
    }
    return folder_part(parts, [path.relative_to(directory).as_posix() for path in contents.empty_directories])


def folder_part(parts: Mapping[str, Part], empty_directories: Sequence[str] = ()) -> Part:
    """One part of several, by their relative paths."""
    info = {"parts": {name: part.description for name, part in parts.items()}, "folders": [*empty_directories]}
    content = {name: part.content for name, part in parts.items()}
    unchecked = [str(PurePosixPath(name).parent / file) for name, part in parts.items() for file in part.unchecked]
    return Part("folder", content, info, unchecked=tuple(unchecked))


def read_framework_parts(directory: Path, *, opaque: bool = False) -> dict[str, Part]:
    """Reads the parts that a framework itself wrote in a directory of its integration: small files, adapters."""
    own = own_files(directory)
    contents = scan_directory(directory)
    return {
        path.relative_to(directory).as_posix(): _read_part(path, form, opaque)
        for path, form in contents.parts.items()
        if path not in own
    }


def write(directory: Path, content: dict[str, Any], info: dict[str, Any]) -> None:
    """Writes the parts of a directory back; the directory must exist and be empty."""
    where = str(directory)
    for name in info.get("folders", ()):
        safe_join(directory, name, where).mkdir(parents=True, exist_ok=True)
    for name, description in info["parts"].items():
        path = safe_join(directory, name, where)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_part(path, content[name], description)


def write_part(path: Path, content: Any, description: dict[str, Any]) -> None:
    """Writes one part at the path of its leading file.

    Raises:
        CorruptError: the description has a form that no release writes.
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
    """True if an integration of this library wrote the checkpoint in a directory, and torch has not replaced it."""
    if not is_checkpoint(directory) or not (directory / dcp.METADATA_FILE).is_file():
        return is_checkpoint(directory)
    from shrinkpoint.train.dcp.checkpoint_metadata import is_overwritten_by_torch  # needs torch.distributed

    return not is_overwritten_by_torch(directory)


def no_checkpoint_error(directory: Path) -> NotFoundError:
    """The error to raise for a directory without a checkpoint."""
    found = "no file that holds tensors" if any(directory.iterdir()) else "an empty directory"
    expected = "torch or safetensors files, a DCP directory, or directories of them"
    do = "name the directory of a checkpoint or a run"
    return NotFoundError(str(directory), found=found, expected=expected, do=do)


def list_files(directory: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Lists files, empty directories and ignored links below a directory, each sorted by path."""
    files: list[Path] = []
    empty_directories: list[Path] = []
    ignored_links: list[Path] = []
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and not path.is_file():
            ignored_links.append(path)
        elif path.is_dir():
            inner_files, inner_empty, inner_links = list_files(path)
            is_empty = not (inner_files or inner_empty or inner_links)
            files += inner_files
            empty_directories += [path] if is_empty else inner_empty
            ignored_links += inner_links
        elif path.is_file() and not path.name.startswith(RESERVED):
            files.append(path)
    return files, empty_directories, ignored_links


def _read_part(path: Path, form: str, opaque: bool = False) -> Part:
    if form == "dcp":
        return dcp.read(path.parent, dcp.read_metadata(path.parent))
    if form == "shrunk":
        from shrinkpoint.train.dcp import load  # needs torch.distributed

        return Part("dcp", load(path.parent))
    if form == "sharded":
        return sharded_index.read(path)
    if form == "safetensors":
        return safetensors_file.read(path)
    if form == "bytes":
        return Part("bytes", read_bytes(path), unchecked=(path.name,))
    try:
        part = torch_file.read(path)
        flatten(part.content)
        return part
    except StateError as error:  # its bytes, if its content cannot be stored otherwise
        size = path.stat().st_size
        if not opaque and size > MAX_OPAQUE_BYTES:
            where = str(path) if error.where == str(path) else f"{path}: {error.where}"
            do = error.do or "convert it first, or keep it as bytes with --opaque"
            raise StateError(where, found=error.found, expected=error.expected, do=do) from error
        _LOG.info("%s: kept as %d bytes, unread (%s)", path, size, error.found)
        return Part("bytes", read_bytes(path), {"opaque": True}, unchecked=(path.name,))
