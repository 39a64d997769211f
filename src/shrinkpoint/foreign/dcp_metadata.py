"""The `.metadata` of a torch.distributed.checkpoint directory, read without running anything that is in it.

The file is a pickle of a few plain classes. Here each of their names stands for an inert class, any other name is
refused, and what comes out is checked before it is believed.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shrinkpoint.errors import CorruptError
from shrinkpoint.state.dtypes import NAMES

LIMIT = 1 << 30
"""Bytes of the largest `.metadata` that is read."""

Name = tuple[Any, ...]

_DEEPEST = 128
"""Keys of the longest path in a nest."""


@dataclass(frozen=True)
class Entry:
    """Where bytes lie: `length` of them in `file`, from `offset` on."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the entry that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    entry: Entry


@dataclass(frozen=True)
class Whole:
    """A tensor in chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Plan:
    """What a directory holds, by the names that DCP gives it.

    Attributes:
        items: tensors, and plain values (their entry).
        paths: where in the nest each stands; a name that is missing stands at the top.
    """

    items: Mapping[str, Whole | Entry]
    paths: Mapping[str, Name]


class Inert:
    """Stands for a class of DCP: takes whatever state a pickle gives it."""

    state: Any = None  # pickles make objects without calling __init__

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


class Index(Inert):
    """MetadataIndex: a key of `storage_data`, so it must have its state before it is hashed, as pickles write it."""

    def __hash__(self) -> int:
        name = self.get("fqn")
        return hash(name) if type(name) is str else 0


class Tensors(Inert):
    """TensorStorageMetadata."""


class Bytes(Inert):
    """BytesStorageMetadata."""


_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    (_METADATA, "Metadata"): Inert,
    (_METADATA, "MetadataIndex"): Index,
    (_METADATA, "TensorStorageMetadata"): Tensors,
    (_METADATA, "BytesStorageMetadata"): Bytes,
    (_METADATA, "ChunkStorageMetadata"): Inert,
    (_METADATA, "StorageMeta"): Inert,
    (_METADATA, "TensorProperties"): Inert,
    (_METADATA, "_MEM_FORMAT_ENCODING"): Inert,
    (_SHARDED, "TensorProperties"): Inert,
    (_SHARDED, "MEM_FORMAT_ENCODING"): Inert,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Inert,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): Inert,
    ("torch.serialization", "_get_layout"): Inert,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): Inert,
    ("pathlib", "WindowsPath"): Inert,
    ("pathlib._local", "PosixPath"): Inert,
    ("pathlib._local", "WindowsPath"): Inert,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
_OPCODES = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "MEMOIZE", "NONE", "NEWTRUE", "NEWFALSE", "INT", "LONG",
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "DICT", "LIST", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "GET",
    "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT",
})  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """One that knows the classes of DCP, as inert ones, and the dtypes of torch; and no other name."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in _KNOWN:
            found = f"a pickle that needs {module}.{name}, which would be run to read it"
            _refuse(self._where, found, "the classes of torch.distributed.checkpoint, and no others")
        return _KNOWN[module, name]


def parse(data: bytes, where: str) -> Plan:
    """Read a `.metadata`.

    Raises:
        CorruptError: it needs a class that DCP does not write, is damaged, or contradicts itself.
    """
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES or ("PUT" in opcode.name and int(argument or 0) > len(data)):
                _refuse(where, f"the opcode {opcode.name} {argument!r:.40}", "what pickling DCP's metadata writes")
        return _Checked(_Unpickler(data, where).load(), where).plan()
    except CorruptError:
        raise
    except Exception as error:  # pickle raises whatever comes
        _refuse(
            where, f"a pickle that cannot be read ({type(error).__name__}: {error!s:.120})", "DCP's metadata", error
        )


class _Checked:
    """The plain classes as a plan; nothing in them is believed."""

    def __init__(self, metadata: Any, where: str) -> None:
        self._where, self._metadata = where, metadata

    def plan(self) -> Plan:
        names = self._dict("state_dict_metadata")
        stored = {self._key(index): self._entry(info) for index, info in self._dict("storage_data").items()}
        items = {self._name(name): self._item(name, said, stored) for name, said in names.items()}
        return Plan(items, self._paths(items))

    def _dict(self, name: str) -> dict[Any, Any]:
        found = self._metadata.get(name) if isinstance(self._metadata, Inert) else None
        if not isinstance(found, dict):
            self._wrong(f"no {name}", "a checkpoint of torch.distributed.checkpoint")
        return found

    def _name(self, name: Any) -> str:
        if type(name) is not str:
            self._wrong(f"the name {_told(name)}", "text")
        return name

    def _key(self, index: Any) -> tuple[str, Any]:
        if not isinstance(index, Index):
            self._wrong(f"the index {_told(index)}", "a MetadataIndex")
        offset = index.get("offset")
        return self._name(index.get("fqn")), None if offset is None else self._sizes(offset)

    def _entry(self, info: Any) -> Entry:
        found = [info.get(name) for name in ("relative_path", "offset", "length")] if isinstance(info, Inert) else []
        if len(found) != 3 or type(found[0]) is not str or not all(_is_count(value) for value in found[1:]):
            self._wrong(f"the place {_told(found)}", "a file, an offset and a length")
        if info.get("transform_descriptors"):
            do = "load it with torch.distributed.checkpoint and save it again without the extension"
            found_ = f"entries that went through {_told(info.get('transform_descriptors'))}"
            raise CorruptError(self._where, found=found_, expected="entries as torch.save writes them", do=do)
        return Entry(*found)

    def _item(self, name: str, said: Any, stored: Mapping[tuple[str, Any], Entry]) -> Whole | Entry:
        if isinstance(said, Bytes):
            return self._found(name, None, stored)
        if not isinstance(said, Tensors):
            self._wrong(f"{name!r:.80} is a {type(said).__name__}", "a tensor or bytes")
        properties, shape = said.get("properties"), self._sizes(said.get("size"))
        state = properties.state if isinstance(properties, Inert) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, torch.dtype):
            self._wrong(f"{name!r:.80} of dtype {_told(dtype)}", "a dtype of torch")
        chunks = said.get("chunks")
        if not isinstance(chunks, list) or not all(isinstance(chunk, Inert) for chunk in chunks):
            self._wrong(f"{name!r:.80} without chunks", "its chunks")
        boxes = [(self._sizes(chunk.get("offsets")), self._sizes(chunk.get("sizes"))) for chunk in chunks]
        whole = Whole(dtype, shape, tuple(Chunk(a, b, self._found(name, a, stored)) for a, b in boxes))
        self._check(name, whole)
        return whole

    def _found(self, name: str, offset: Any, stored: Mapping[tuple[str, Any], Entry]) -> Entry:
        entry = stored.get((name, offset))
        if entry is None:
            self._wrong(f"no place for {name!r:.80} at {offset}", "one for every chunk")
        return entry

    def _check(self, name: str, whole: Whole) -> None:
        """Chunks must cover the tensor once, and its size must not be more than their files can hold."""
        count = math.prod(whole.shape)
        inside = all(
            len(chunk.offsets) == len(chunk.sizes) == len(whole.shape)
            and all(a + b <= size for a, b, size in zip(chunk.offsets, chunk.sizes, whole.shape, strict=True))
            for chunk in whole.chunks
        )
        chunks = [chunk for chunk in whole.chunks if math.prod(chunk.sizes)]
        if not inside or sum(math.prod(chunk.sizes) for chunk in chunks) != count or _meet(chunks):
            self._wrong(f"{name!r:.80} in chunks that do not make up {list(whole.shape)}", "each value once")
        if count * whole.dtype.itemsize > sum(chunk.entry.length for chunk in chunks):
            self._wrong(f"{name!r:.80} of {count} values in fewer bytes", "room for each")

    def _paths(self, items: Mapping[str, Any]) -> Mapping[str, Name]:
        given = self._metadata.get("planner_data")
        paths = given if isinstance(given, dict) else {}
        out: dict[str, Name] = {}
        for name in items:
            path = paths.get(name, (name,))
            if (
                not isinstance(path, tuple)
                or not 0 < len(path) <= _DEEPEST
                or not all(type(key) in (str, int) for key in path)
            ):
                self._wrong(f"the place {_told(path)} of {name!r:.80} in the nest", "keys and indices")
            out[name] = path
        return out

    def _sizes(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, tuple) or not all(_is_count(size) for size in value) or len(value) > 64:
            self._wrong(f"the sizes {_told(value)}", "counts")
        return value

    def _wrong(self, found: str, expected: str) -> NoReturn:
        _refuse(self._where, found, expected)


def _meet(chunks: list[Chunk]) -> bool:
    """Whether two boxes overlap. Boxes are sorted along their first axis, so that few pairs are looked at."""
    boxes = sorted((chunk.offsets, chunk.sizes) for chunk in chunks)
    for at, (offsets, sizes) in enumerate(boxes):
        for others, lengths in boxes[at + 1 :]:
            if offsets and others[0] >= offsets[0] + sizes[0]:
                break
            if all(a < b + n and b < a + m for a, m, b, n in zip(offsets, sizes, others, lengths, strict=True)):
                return True
    return False


def _told(value: Any) -> str:
    """What a pickle made, in a few words: it may be a nest that is small in memory and endless when it is printed."""
    return f"{reprlib.repr(value):.80}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _refuse(where: str, found: str, expected: str, cause: Exception | None = None) -> NoReturn:
    do = "do not use this directory, or fetch it again"
    raise CorruptError(where, found=found, expected=expected, do=do) from cause
