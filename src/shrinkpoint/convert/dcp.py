"""Reads directories of torch.distributed.checkpoint as nested states, without running anything that is in them.

The `.metadata` file is a pickle of a few plain classes. Here each of these is unpickled as an inert stub, any other
name is refused, and the result is validated before it is used.
"""

from __future__ import annotations

import io
import math
import mmap
import reprlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from shrinkpoint import validate
from shrinkpoint.convert import torch_file
from shrinkpoint.convert.inert_pickle import InertUnpickler, Stub
from shrinkpoint.convert.part import Part, read_bytes, safe_join, write_error
from shrinkpoint.errors import CorruptError, NotFoundError, PolicyError, TruncatedError
from shrinkpoint.sharding.global_tensors import check_disjoint
from shrinkpoint.storage import storage_error
from shrinkpoint.tensors.dtypes import DTYPE_NAMES, empty

METADATA_FILE = ".metadata"

MAX_METADATA_BYTES = 1 << 30  # Largest `.metadata` that is read, in bytes

NestPath = tuple[Any, ...]
"""Keys of dicts (text) and indices of lists (int) that lead from the top of a nest to a value."""

_MAX_PATH_KEYS = 128  # Length of the longest path in a nest


class StorageEntry(NamedTuple):
    """The bytes of one saved item: `length` bytes of `file` from `offset` on."""

    file: str
    offset: int
    length: int


class TensorChunk(NamedTuple):
    """A box of a tensor, given by its offsets and sizes along each axis, and the entry that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    entry: StorageEntry


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that is saved in chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]


class ParsedMetadata(NamedTuple):
    """The items of a directory by the names that DCP gives them, and the path of each in the nest."""

    items: Mapping[str, TensorEntry | StorageEntry]
    paths: Mapping[str, NestPath]


def read_metadata(directory: Path) -> ParsedMetadata:
    """Reads and validates the metadata of a directory.

    Raises:
        CorruptError: the metadata needs what DCP does not write, or contradicts itself.
        StorageError: reading failed.
    """
    path = directory / METADATA_FILE
    if path.stat().st_size > MAX_METADATA_BYTES:
        found, expected = f"{path.stat().st_size} bytes of metadata", f"at most {MAX_METADATA_BYTES}"
        raise CorruptError(str(path), found=found, expected=expected, do="split it into several directories")
    return parse_metadata(read_bytes(path), str(path))


def data_files(directory: Path, metadata: ParsedMetadata) -> list[Path]:
    """The files of a directory that hold its items."""
    names: set[str] = set()
    for item in metadata.items.values():
        names.update([item.file] if isinstance(item, StorageEntry) else [chunk.entry.file for chunk in item.chunks])
    return [safe_join(directory, name, str(directory / METADATA_FILE)) for name in sorted(names)]


def read(directory: Path, metadata: ParsedMetadata) -> Part:
    """Reads every tensor, put together from its chunks, and every plain value, nested as they were saved.

    Raises:
        NotFoundError: a file is missing.
        TruncatedError, CorruptError: a file is shorter than the metadata says, or holds something else.
        StateError: a value is neither a tensor nor plain. Nothing of it has been run.
    """
    with closing(_MappedFiles(directory)) as files:
        values = {name: _read_item(name, item, files) for name, item in metadata.items.items()}
    content = _build_nest(values, metadata.paths, str(directory))
    return Part("dcp", content, unchecked=(METADATA_FILE, *sorted(files.unchecked)))


def write(directory: Path, content: Any) -> None:
    """Writes a directory with `dcp.save`, in one process.

    Raises:
        PolicyError: DCP cannot save it.
        StorageError: writing failed.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(content, dict):
        found, do = f"a state that is {validate.type_name(content)}", "write a torch file"
        raise PolicyError(str(directory), found=found, expected="a dict", do=do)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        try:
            dcp.save(content, checkpoint_id=directory, no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            disk_error = write_error(directory, cause)
            if disk_error is not None:
                raise disk_error from error
            found = f"a state that DCP does not take ({type(cause).__name__}: {cause!s:.160})"
            where, expected = str(directory), "a name for each value"
            raise PolicyError(where, found=found, expected=expected, do="write a torch file") from error


def parse_metadata(data: bytes, where: str) -> ParsedMetadata:
    """Parses and validates the bytes of a `.metadata` file.

    Raises:
        CorruptError: it needs a class that DCP does not write, is damaged, or contradicts itself.
    """
    try:
        return _Validator(_MetadataUnpickler(data, where).load(), where).validate()
    except CorruptError:
        raise
    except Exception as error:  # pickle raises errors of many types for damaged bytes
        found = f"a pickle that cannot be read ({type(error).__name__}: {error!s:.120})"
        _raise_corrupt(where, found, "DCP's metadata", error)


class _Validator:
    """Turns unpickled stubs into `ParsedMetadata`; checks the type and the range of every value."""

    def __init__(self, metadata: Any, where: str) -> None:
        self._where, self._metadata = where, metadata

    def validate(self) -> ParsedMetadata:
        found = self._dict("state_dict_metadata")
        entries = {index: self._storage_entry(info) for index, info in self._dict("storage_data").items()}
        items: dict[str, TensorEntry | StorageEntry] = {}
        for name, item in found.items():
            if type(name) is not str:
                self._reject(f"the name {_short_repr(name)}", "text")
            items[name] = self._check_item(name, item, entries)
        planner_data = self._metadata.get("planner_data")
        paths = planner_data if isinstance(planner_data, dict) else {}
        nest_paths: dict[str, NestPath] = {}
        for name in items:
            path = nest_paths[name] = paths.get(name, (name,))
            is_path = isinstance(path, tuple) and all(type(key) is str or _is_count(key) for key in path)
            if not is_path or not 0 < len(path) <= _MAX_PATH_KEYS:
                self._reject(f"the place {_short_repr(path)} of {name!r:.80} in the nest", "keys and indices")
        return ParsedMetadata(items, nest_paths)

    def _dict(self, name: str) -> dict[Any, Any]:
        value = self._metadata.get(name) if isinstance(self._metadata, Stub) else None
        if not isinstance(value, dict):
            self._reject(f"no {name}", "a checkpoint of torch.distributed.checkpoint")
        return value

    def _storage_entry(self, info: Any) -> StorageEntry:
        values = [info.get(name) for name in ("relative_path", "offset", "length")] if isinstance(info, Stub) else []
        if len(values) != 3 or type(values[0]) is not str or not all(_is_count(value) for value in values[1:]):
            self._reject(f"the place {_short_repr(values)}", "a file, an offset and a length")
        if info.get("transform_descriptors"):
            do = "load it with torch.distributed.checkpoint and save it again without the extension"
            found = f"entries that went through {_short_repr(info.get('transform_descriptors'))}"
            raise CorruptError(self._where, found=found, expected="entries as torch.save writes them", do=do)
        return StorageEntry(*values)

    def _check_item(
        self, name: str, item_metadata: Any, entries: Mapping[tuple[str, str], StorageEntry]
    ) -> TensorEntry | StorageEntry:
        if isinstance(item_metadata, StubBytesMetadata):
            return self._find_entry(name, None, entries)
        if not isinstance(item_metadata, StubTensorMetadata):
            self._reject(f"{name!r:.80} is {validate.type_name(item_metadata)}", "a tensor or bytes")
        properties, shape = item_metadata.get("properties"), self._check_sizes(item_metadata.get("size"))
        state = properties.state if isinstance(properties, Stub) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, torch.dtype):
            self._reject(f"{name!r:.80} of dtype {_short_repr(dtype)}", "a dtype of torch")
        chunks = item_metadata.get("chunks")
        if not isinstance(chunks, list) or not all(isinstance(chunk, Stub) for chunk in chunks):
            self._reject(f"{name!r:.80} without chunks", "its chunks")
        boxes = [(self._check_sizes(chunk.get("offsets")), self._check_sizes(chunk.get("sizes"))) for chunk in chunks]
        tensor_chunks = (
            TensorChunk(offsets, sizes, self._find_entry(name, offsets, entries)) for offsets, sizes in boxes
        )
        tensor = TensorEntry(dtype, shape, tuple(tensor_chunks))
        self._check_coverage(name, tensor)
        return tensor

    def _find_entry(self, name: str, offset: Any, entries: Mapping[tuple[str, str], StorageEntry]) -> StorageEntry:
        entry = entries.get(_entry_key(name, offset))
        if entry is None:
            self._reject(f"no place for {name!r:.80} at {offset}", "one for every chunk")
        return entry

    def _check_coverage(self, name: str, tensor: TensorEntry) -> None:
        """Rejects chunks that do not cover the tensor exactly once, or that are larger than their entries."""
        count = math.prod(tensor.shape)
        fits = all(
            len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape)
            and all(a + b <= size for a, b, size in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True))
            for chunk in tensor.chunks
        )
        found, expected = f"{name!r:.80} in chunks that do not make up {list(tensor.shape)}", "each value once"
        if not fits or sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != count:
            self._reject(found, expected)
        try:
            check_disjoint([chunk.offsets for chunk in tensor.chunks], [chunk.sizes for chunk in tensor.chunks])
        except ValueError as error:
            _raise_corrupt(self._where, found, expected, error)
        if count * tensor.dtype.itemsize > sum(chunk.entry.length for chunk in tensor.chunks if all(chunk.sizes)):
            self._reject(f"{name!r:.80} of {count} values in fewer bytes", "an entry with all of them")

    def _check_sizes(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, tuple) or not all(_is_count(size) for size in value) or len(value) > 64:
            self._reject(f"the sizes {_short_repr(value)}", "counts")
        return value

    def _reject(self, found: str, expected: str) -> NoReturn:
        _raise_corrupt(self._where, found, expected)


def _short_repr(value: Any) -> str:
    """At most 80 characters of a value: a nest that refers to itself many times has an endless `repr`."""
    return f"{reprlib.repr(value):.80}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _raise_corrupt(where: str, found: str, expected: str, cause: Exception | None = None) -> NoReturn:
    do = "do not use this directory, or fetch it again"
    raise CorruptError(where, found=found, expected=expected, do=do) from cause


class StubIndex(Stub):
    """Stands for MetadataIndex, the keys of `storage_data`."""


class StubTensorMetadata(Stub):
    """Stands for TensorStorageMetadata."""


class StubBytesMetadata(Stub):
    """Stands for BytesStorageMetadata."""


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_SHARDED_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_INERT_CLASSES = {
    _METADATA_MODULE: "Metadata ChunkStorageMetadata StorageMeta TensorProperties _MEM_FORMAT_ENCODING",
    _SHARDED_MODULE: "TensorProperties MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",
    "builtins": "getattr",  # of members of enums, as Python 3.11.0 to 3.11.3 pickle them; what stands for it gets none
    "__builtin__": "getattr",
}
_STUB_CLASSES: dict[tuple[str, str], Callable[..., Any]] = {
    **{(module, name): Stub for module, names in _INERT_CLASSES.items() for name in names.split()},
    (_METADATA_MODULE, "MetadataIndex"): StubIndex,
    (_METADATA_MODULE, "TensorStorageMetadata"): StubTensorMetadata,
    (_METADATA_MODULE, "BytesStorageMetadata"): StubBytesMetadata,
    ("torch", "Size"): lambda values: (*values,),
    ("collections", "OrderedDict"): dict,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


def _entry_key(name: str, offset: tuple[int, ...] | None) -> tuple[str, str]:
    """The key of an entry; texts, since hashes of numbers and tuples are known and can be made to collide."""
    return name, repr(offset)


class _MetadataUnpickler(InertUnpickler):
    """Unpickles the classes of DCP as stubs, and the dtypes of torch; refuses any other name, and other keys."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), len(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in _STUB_CLASSES:
            found = f"a pickle that needs {module}.{name}, which would be run to read it"
            _raise_corrupt(self._where, found, "the classes of torch.distributed.checkpoint, and no others")
        return _STUB_CLASSES[module, name]

    def check_key(self, target: Any, key: Any) -> Any:
        if type(key) is str:
            return key
        name, offset = (key.get("fqn"), key.get("offset")) if isinstance(key, StubIndex) else (None, None)
        is_offset = offset is None or (isinstance(offset, tuple) and all(map(_is_count, offset)))
        if type(name) is not str or not is_offset:
            _raise_corrupt(self._where, f"the key {_short_repr(key)}", "text, or a MetadataIndex")
        return _entry_key(name, offset)


class _MappedFiles:
    """Maps the files of a directory when they are first read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}
        self.unchecked: set[str] = set()  # names of files with entries that have no checksum

    def close(self) -> None:
        for mapped in self._maps.values():
            mapped.close()

    def read_entry(self, entry: StorageEntry) -> bytes:
        path = safe_join(self._directory, entry.file, str(self._directory / METADATA_FILE))
        if entry.file not in self._maps:
            self._maps[entry.file] = _map_file(path)
        data = self._maps[entry.file]
        if entry.offset + entry.length > len(data):
            found, expected = f"a file of {len(data)} bytes", f"{entry.length} bytes from byte {entry.offset} on"
            raise TruncatedError(str(path), found=found, expected=expected, do="fetch it again")
        return data[entry.offset : entry.offset + entry.length]

    def load_entry(self, name: str, entry: StorageEntry) -> Any:
        where = f"{self._directory / entry.file}: {name:.120}"
        value, has_checksums = torch_file.load_checked(io.BytesIO(self.read_entry(entry)), where)
        if not has_checksums:
            self.unchecked.add(entry.file)
        return value


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        expected, do = f"one that {METADATA_FILE} names", "fetch the missing file"
        raise NotFoundError(str(path), found="no such file", expected=expected, do=do) from None
    except ValueError as error:  # an empty file cannot be mapped
        raise TruncatedError(str(path), found="an empty file", expected="entries", do="fetch it again") from error
    except OSError as error:
        raise storage_error(str(path), "reading", error) from error


def _read_item(name: str, item: TensorEntry | StorageEntry, mapped_files: _MappedFiles) -> Any:
    if isinstance(item, StorageEntry):
        return mapped_files.load_entry(name, item)
    chunks = [chunk for chunk in item.chunks if 0 not in chunk.sizes]
    if len(chunks) == 1:
        return _read_chunk(name, chunks[0], item.dtype, mapped_files)
    tensor = empty(item.shape, item.dtype)
    for chunk in chunks:
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        tensor[box] = _read_chunk(name, chunk, item.dtype, mapped_files)
    return tensor


def _read_chunk(name: str, chunk: TensorChunk, dtype: torch.dtype, mapped_files: _MappedFiles) -> torch.Tensor:
    value = mapped_files.load_entry(name, chunk.entry)
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != chunk.sizes or value.dtype != dtype:
        is_tensor = isinstance(value, torch.Tensor)
        found = f"{value.dtype} of shape {list(value.shape)}" if is_tensor else type(value).__name__
        where, expected = f"{chunk.entry.file}: {name}", f"{dtype} of shape {list(chunk.sizes)}"
        raise CorruptError(where, found=found, expected=expected, do="fetch it again")
    return value.detach()


def _build_nest(values: Mapping[str, Any], paths: Mapping[str, NestPath], where: str) -> dict[str, Any]:
    """Builds the nest of the values at their paths; an int in a path is an index of a list."""
    root: dict[Any, Any] = {}
    leaf_ids = {id(value) for value in values.values() if isinstance(value, dict)}
    for name, value in values.items():
        *parents, last = paths[name]
        nest: Any = root
        for key in parents:
            nest = nest.setdefault(key, {})
            if not isinstance(nest, dict) or id(nest) in leaf_ids:
                break
        if not isinstance(nest, dict) or id(nest) in leaf_ids or last in nest:
            found, expected = f"{name!r:.80} at the path of another value", "a path for each value"
            raise CorruptError(where, found=found, expected=expected, do="fetch it again")
        nest[last] = value
    state: dict[str, Any] = _dicts_to_lists(root, leaf_ids, where)
    return state


def _dicts_to_lists(value: Any, leaf_ids: set[int], where: str) -> Any:
    """Replaces dicts with the keys 0, 1, 2, ... by lists, except dicts that are saved values themselves."""
    if not isinstance(value, dict) or id(value) in leaf_ids:
        return value
    items = {key: _dicts_to_lists(item, leaf_ids, where) for key, item in value.items()}
    numbers = [key for key in items if type(key) is int]
    if not numbers:
        return items
    if sorted(numbers) != list(range(len(items))):
        found = f"a list with the indices {numbers!r:.80}"
        raise CorruptError(where, found=found, expected="indices from 0 without a gap", do="fetch it again")
    return [items[index] for index in range(len(items))]
