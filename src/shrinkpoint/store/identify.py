"""Finds checkpoints below a directory, and identifies what else a path may be. No unpickling; no torch."""

from __future__ import annotations

import os
import re
import shlex
import struct
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import overload

from shrinkpoint.container.header import MAX_HEADER_BYTES, PREFIX
from shrinkpoint.errors import MismatchError
from shrinkpoint.storage import (
    AnyDirectory,
    LocalStorage,
    ObjectUrl,
    Storage,
    directory_storage,
    local_path,
    natural_key,
    resolve_directory,
)
from shrinkpoint.storage.local import os_errors
from shrinkpoint.store import layout
from shrinkpoint.store.file_place import place_file

MANIFEST = layout.DIRECTORY_MANIFEST  # Name of the manifest of a framework's directory
EMPTY_DIRECTORY = "an empty directory"
MAX_ENTRIES = 1000  # Number of names of a directory that are looked at
_MAX_LOOKS = 100  # How often a run is listed whose checkpoints vanish
_HEAD_BYTES = 512
_MARK = 8 + PREFIX.index(b"shrinkpoint")
"""Offset of the name by which a file is ours; what is before it, other programs write too."""
_CHECKPOINT_NAME = re.compile(
    r"(|.*[^a-z])(checkpoint|ckpt|step|epoch|iter|version)[-_=]?\d.*|\d+|.*\.ckpt|checkpoint|ckpt|last|latest|best|final"
)
"""Names that frameworks and people give to the checkpoints of a run."""
_RUN_FOLDER = re.compile(r"checkpoints?|ckpts?|lightning_logs|version_\d+")
"""Directories of a run in which its checkpoints are."""
_RUN = re.compile(r"(checkpoint|step|epoch|global_step|version|iter)[-_=]?[0-9].*|checkpoints|lightning_logs")
_MAGIC = (
    (b"PK\x03\x04", "a zip archive, such as torch.save writes", "torch.load(path, weights_only=True)"),
    (b"PK\x05\x06", "an empty zip archive", ""),
    (b"\x93NUMPY", "a numpy file", "numpy.load"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "h5py"),
    (b"GGUF", "a GGUF file", "the program that wrote it"),
)
_PICKLE = re.compile(rb"\x80[\x02-\x05][\x8a\x95}cX(\x8c\]K].*", re.DOTALL)
_TENSOR_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def is_checkpoint(directory: AnyDirectory) -> bool:
    """True if a directory has a manifest of ours; its files are not looked at."""
    return has_file(directory, MANIFEST)


def has_file(directory: AnyDirectory, name: str) -> bool:
    """True if a directory has a file of this name; one of a bucket, an object."""
    return place_file(str(resolve_directory(directory) / name)).exists


def refuse_store_checkpoint(directory: AnyDirectory) -> None:
    """Raise a MismatchError if a directory is that of a checkpoint in a store: frameworks do not read or write it."""
    place = resolve_directory(directory)
    if layout.step_of_dir(place.name) is None or not has_file(place, layout.MANIFEST) or is_checkpoint(place):
        return
    found, expected = "a checkpoint in a store", "a directory for a framework's checkpoint"
    do = f"restore it by a CheckpointManager of {place.parent}, and save to another directory"
    raise MismatchError(str(directory), found=found, expected=expected, do=do)


def refuse_store(root: Path) -> None:
    """Raise a MismatchError if a directory is a store, from which a framework would not resume."""
    for place in _visible_dirs(root) if root.is_dir() else ():
        refuse_store_checkpoint(place)


def refuse_run(storage: Storage, *, to_write: bool = True) -> None:
    """Raise a MismatchError if a framework has saved where a store would: a store would write over its files.

    Args:
        to_write: False: also for names that no store writes, as there is a run that a restore would not find.

    Raises:
        StorageError: the place cannot be listed.
    """
    if isinstance(storage, LocalStorage):
        names = [name for name in storage.list_dirs() if is_checkpoint(storage.path / name)]
    else:
        keys = (key.partition("/") for key in storage.list())
        names = [head for head, _, name in keys if name == MANIFEST]
    is_checkpoint_name = layout.step_of_dir if to_write else lambda name: _CHECKPOINT_NAME.fullmatch(name.lower())
    steps = [name for name in names if is_checkpoint_name(name) is not None]
    if steps:
        found, expected = (
            f"the run of a framework, with {max(steps, key=natural_key)}",
            "a store, or an empty directory",
        )
        do = "restore it by what saved it, such as dcp.Manager, or name another directory"
        raise MismatchError(storage.describe(), found=found, expected=expected, do=do)


def is_stock_dcp(directory: Path) -> bool:
    """True if a directory holds tensors that torch.distributed.checkpoint's own writer has written."""
    return any(directory.glob("*.distcp"))


@overload
def find_checkpoints(root: str | Path) -> list[Path]: ...


@overload
def find_checkpoints(root: ObjectUrl) -> list[ObjectUrl]: ...


def find_checkpoints(root: str | Path | ObjectUrl) -> list[Path] | list[ObjectUrl]:
    """The checkpoints of a run: the directory itself, else those in it, at most two levels down, in the order of the
    numbers in their names.

    Hidden directories do not count, and those that vanish meanwhile are passed over.

    Raises:
        StorageError: the directory itself, or the bucket, cannot be listed.
    """
    if isinstance(root, ObjectUrl):
        return _find_in_bucket(root)
    path = local_path(root)
    if is_checkpoint(path):
        return [path]
    for _ in range(_MAX_LOOKS):
        places: list[Path] = []
        with os_errors(str(path), "listing"), suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            places += _visible_dirs(path)
        for child in [*places]:
            with suppress(OSError):  # it vanishes meanwhile, or may not be read
                places += _visible_dirs(child)
        found = [place for place in places if os.path.isfile(place / MANIFEST)]  # noqa: PTH113 (it raises no error)
        if found or all(map(os.path.lexists, places)):
            break  # else retention has deleted all that were listed, and there are newer ones
    return sorted(found, key=lambda place: natural_key(place.relative_to(path).as_posix()))


def _visible_dirs(directory: Path) -> list[Path]:
    """The directories in a directory, and symbolic links, which may lead to one or to nothing."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if not entry.is_file(follow_symlinks=False)]
    return [directory / name for name in names if not name.startswith(".")]


def is_of_run(root: Path | ObjectUrl, place: Path | ObjectUrl) -> bool:
    """True if a checkpoint below a directory has a name that says that it belongs to a run there."""
    if place == root:
        return True
    *folders, name = str(place)[len(str(root)) :].strip("/").split("/")
    return _CHECKPOINT_NAME.fullmatch(name.lower()) is not None and all(map(_RUN_FOLDER.fullmatch, folders))


def _find_in_bucket(root: ObjectUrl) -> list[ObjectUrl]:
    keys = [key for key in directory_storage(root).list() if key.rpartition("/")[2] == MANIFEST]
    if MANIFEST in keys:
        return [root]
    parts = [key.split("/")[:-1] for key in keys]
    names = ["/".join(name) for name in parts if len(name) <= 2 and not any(part.startswith(".") for part in name)]
    return [root / name for name in sorted(names, key=natural_key)]


@dataclass(frozen=True)
class Identification:
    """Kind of a path, and advice on what reads it."""

    description: str  # in words, "a file of torch.save"
    do: str  # what to do with it
    is_foreign: bool = True  # another program wrote it; False if that is not certain


def identify(path: Path) -> Identification | None:
    """Identify a file or a directory; None for a file of ours, intact or damaged, and if unknown.

    None also where reading fails: the caller's own attempt reports that error.
    """
    try:
        return _identify_directory(path) if path.is_dir() else _identify_file(path) if path.is_file() else None
    except OSError:
        return None


def _identify_file(path: Path) -> Identification | None:
    size = path.stat().st_size
    if size == 0:
        do = "fetch the file again, or restore another checkpoint"
        return Identification("an empty file", do, is_foreign=False)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if _is_ours(head):
        return None
    for magic, what, reader in _MAGIC:
        if head.startswith(magic):
            return Identification(what, _reading_advice(path, reader))
    if _PICKLE.match(head):
        return Identification("a pickle, such as torch.save wrote before 1.6", _reading_advice(path, "torch.load"))
    if len(head) > 8 and _is_safetensors(head, size):
        do = _reading_advice(path, "safetensors.torch.load_file")
        return Identification("a safetensors file of another program", do)
    if all(32 <= byte < 127 or byte in b"\t\n\r" for byte in head):
        return Identification("a text file", "name the checkpoint beside it")
    return None


def _is_ours(head: bytes) -> bool:
    """True if a header begins with our name, some bits of which may be damaged."""
    name = head[_MARK:][: len(PREFIX) - _MARK + 8]
    return sum(a == b for a, b in zip(name, PREFIX[_MARK - 8 :], strict=False)) > (len(PREFIX) - _MARK + 8) // 2


def _is_safetensors(head: bytes, size: int) -> bool:
    (length,) = struct.unpack("<Q", head[:8])
    return 2 <= length <= min(MAX_HEADER_BYTES, size - 8) and head[8:9] == b"{" and head[9:10] in (b'"', b"}", b" ")


def _reading_advice(path: Path, reader: str) -> str:
    ours = f"convert it: `shrinkpoint convert {shlex.quote(str(path))} DST`"
    return f"read it with {reader}, or {ours}" if reader else "fetch an intact copy"


def _identify_directory(path: Path) -> Identification:
    with os.scandir(path) as entries:
        names = [entry.name for entry in islice(entries, MAX_ENTRIES)]
    if is_checkpoint(path):
        do = f"load it with the framework that saved it, or with shrinkpoint.load({str(path)!r})"
        return Identification("a framework's checkpoint", do, is_foreign=False)
    if checkpoints := find_checkpoints(path):
        do = f"name one checkpoint, such as {checkpoints[-1]}, and load it with the framework that saved it"
        is_run = any(is_of_run(path, checkpoint) for checkpoint in checkpoints)
        what = "a framework's run" if is_run else "a directory with checkpoints in it"
        return Identification(what, do, is_foreign=False)
    if any(layout.step_of_dir(name) is not None and not is_checkpoint(path / name) for name in names):
        do = f"load it with shrinkpoint.load({str(path)!r}), or with a CheckpointManager"
        return Identification("a store", do, is_foreign=False)
    if any(layout.PAYLOAD.fullmatch(name) for name in names):
        what, do = "the directory of a store's checkpoint", f"load it with shrinkpoint.load({str(path)!r})"
        if layout.MANIFEST not in names:
            what, do = f"{what} without {layout.MANIFEST}", "copy all its files, or load another step: its save was cut"
        return Identification(what, do, is_foreign=False)
    description = _identify_foreign_dir(path, {*names})
    if description is None:
        visible = [name for name in names if not name.startswith(".")]
        return Identification("a directory without a checkpoint" if visible else EMPTY_DIRECTORY, "check the path")
    do = f"`shrinkpoint convert {shlex.quote(str(path))} --dry-run` lists what it holds"
    return Identification(description, do)


def _identify_foreign_dir(path: Path, names: set[str]) -> str | None:
    """Kind of directory that another framework wrote, in words; None if unknown."""
    if ".metadata" in names:
        return "a checkpoint of torch.distributed.checkpoint"
    tensors = sorted(name for name in names if name.endswith(_TENSOR_SUFFIXES))
    if tensors and names & {"config.json", "trainer_state.json", "adapter_config.json", "training_args.bin"}:
        return f"a checkpoint of Hugging Face ({tensors[0]})"
    if tensors:
        return f"a directory with files of other programs ({tensors[0]})"
    runs = sorted(name for name in names if _RUN.fullmatch(name) and (path / name).is_dir())
    return f"a run of another program ({runs[0]})" if runs else None
