"""Directories of torch.distributed.checkpoint, as one nest."""

from __future__ import annotations

import io
import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shrinkpoint.errors import CorruptError, NotFoundError, PolicyError, ShrinkpointError, TruncatedError
from shrinkpoint.foreign import torch_file
from shrinkpoint.foreign.dcp_metadata import LIMIT, Entry, Name, Plan, Whole, parse
from shrinkpoint.foreign.part import Part, contents, inside, unreadable, unwritable
from shrinkpoint.state import empty

METADATA = ".metadata"


def plan(folder: Path) -> Plan:
    """What a directory holds, from its metadata alone.

    Raises:
        CorruptError: the metadata needs what DCP does not write, or contradicts itself.
        StorageError: reading failed.
    """
    path = folder / METADATA
    if path.stat().st_size > LIMIT:
        found = f"{path.stat().st_size} bytes of metadata"
        raise CorruptError(str(path), found=found, expected=f"at most {LIMIT}", do="save it in several directories")
    return parse(contents(path), str(path))


def files(folder: Path, found: Plan) -> list[Path]:
    """The files in which a directory keeps its items."""
    entries = [entry for item in found.items.values() for entry in _entries(item)]
    return [inside(folder, name, str(folder / METADATA)) for name in sorted({entry.file for entry in entries})]


def read(folder: Path, found: Plan) -> Part:
    """Every tensor whole, and every plain value, nested as they were saved.

    Raises:
        NotFoundError: a file is missing.
        TruncatedError, CorruptError: a file is shorter than the metadata says, or holds something else.
        StateError: a plain value is neither a tensor nor plain. Nothing of it has been run.
    """
    with _Files(folder) as opened:
        values = {name: _item(name, item, opened) for name, item in found.items.items()}
    return Part("dcp", _nested(values, found.paths, str(folder)))


def write(folder: Path, content: Any) -> None:
    """`dcp.save` in one process.

    Raises:
        PolicyError: DCP cannot save it.
        StorageError: writing failed.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(content, dict):
        found, do = f"a state that is a {type(content).__name__}", "write a torch file"
        raise PolicyError(str(folder), found=found, expected="a dict", do=do)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        try:
            dcp.save(content, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
        except CheckpointException as error:
            raise _refusal(folder, next(iter(error.failures.values()))[0]) from error


def _refusal(folder: Path, cause: BaseException) -> ShrinkpointError:
    found = f"a state that DCP does not take ({type(cause).__name__}: {cause!s:.160})"
    refused = PolicyError(str(folder), found=found, expected="names of their own", do="write a torch file")
    return unwritable(folder, cause) or refused


class _Files:
    """The files of a directory, each mapped once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._maps.values():
            one.close()

    def bytes(self, entry: Entry) -> bytes:
        where = inside(self._folder, entry.file, str(self._folder / METADATA))
        if entry.file not in self._maps:
            self._maps[entry.file] = _mapped(where)
        data = self._maps[entry.file]
        if entry.offset + entry.length > len(data):
            expected = f"{entry.length} bytes from byte {entry.offset} on"
            raise TruncatedError(
                str(where), found=f"a file of {len(data)} bytes", expected=expected, do="fetch it again"
            )
        return data[entry.offset : entry.offset + entry.length]

    def load(self, name: str, entry: Entry) -> Any:
        return torch_file.load(io.BytesIO(self.bytes(entry)), f"{self._folder / entry.file}: {name}")


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        do = "fetch the missing file"
        raise NotFoundError(str(path), found="no such file", expected=f"one that {METADATA} names", do=do) from None
    except ValueError as error:  # an empty file cannot be mapped
        raise TruncatedError(str(path), found="an empty file", expected="entries", do="fetch it again") from error
    except OSError as error:
        raise unreadable(path, error) from error


def _entries(item: Whole | Entry) -> list[Entry]:
    return [chunk.entry for chunk in item.chunks] if isinstance(item, Whole) else [item]


def _item(name: str, item: Whole | Entry, opened: _Files) -> Any:
    if isinstance(item, Entry):
        return opened.load(name, item)
    chunks = [chunk for chunk in item.chunks if 0 not in chunk.sizes]
    if len(chunks) == 1:
        return _piece(name, chunks[0].sizes, item.dtype, chunks[0].entry, opened)
    whole = empty(item.shape, item.dtype)
    for chunk in chunks:
        box = tuple(slice(a, a + b) for a, b in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = _piece(name, chunk.sizes, item.dtype, chunk.entry, opened)
    return whole


def _piece(name: str, sizes: tuple[int, ...], dtype: torch.dtype, entry: Entry, opened: _Files) -> torch.Tensor:
    found = opened.load(name, entry)
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != sizes or found.dtype != dtype:
        is_ = f"{found.dtype} of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        where, expected = f"{entry.file}: {name}", f"{dtype} of shape {list(sizes)}"
        raise CorruptError(where, found=is_, expected=expected, do="fetch it again")
    return found.detach()


def _nested(values: Mapping[str, Any], paths: Mapping[str, Name], where: str) -> dict[str, Any]:
    """The values at their paths; an index of a list is an int in a path."""
    root: dict[Any, Any] = {}
    leaves = {id(value) for value in values.values() if isinstance(value, dict)}
    for name, value in values.items():
        at = root
        for key in paths[name][:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict) or id(at) in leaves:
                raise _collision(where, name)
        if paths[name][-1] in at:
            raise _collision(where, name)
        at[paths[name][-1]] = value
    made: dict[str, Any] = _lists(root, leaves, where)
    return made


def _lists(value: Any, leaves: set[int], where: str) -> Any:
    """The nest with dicts under 0, 1, 2, ... as lists, but for dicts that are values themselves."""
    if not isinstance(value, dict) or id(value) in leaves:
        return value
    items = {key: _lists(item, leaves, where) for key, item in value.items()}
    numbers = [key for key in items if type(key) is int]
    if not numbers:
        return items
    if sorted(numbers) != list(range(len(items))):
        found = f"a list with the indices {numbers!r:.80}"
        raise CorruptError(where, found=found, expected="all from 0 on", do="fetch it again")
    return [items[index] for index in range(len(items))]


def _collision(where: str, name: str) -> CorruptError:
    found, expected = f"{name!r:.80} at a place of the nest that is taken", "a place of its own"
    return CorruptError(where, found=found, expected=expected, do="fetch it again")
