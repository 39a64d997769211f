"""Reads a payload of a checkpoint, all of it or box after box, and its objects that are not tensors."""

from __future__ import annotations

import io
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.errors import CorruptError, StateError
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store.chain import directory_chain
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.directory import chain_paths
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.store.partial_reader import PartialReader
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.tree import TreeDecoder
from shrinkpoint.train.dcp.checkpoint_metadata import ChunkMetadata, EntryMetadata, Offsets, chunk_name

_ADVICE = "restore another checkpoint"


def check_stored_tensor(
    where: str, name: str, shape_and_dtype: tuple[Offsets, str] | None, entry: EntryMetadata, chunk: ChunkMetadata
) -> None:
    """Raise if a stored tensor is not the chunk that the manifest declares.

    Args:
        where: the payload's file, for messages.
        name: the tensor's name in the payload.
        shape_and_dtype: of the stored tensor; None if there is none.

    Raises:
        CorruptError: it is missing, or has another shape or dtype.
    """
    if shape_and_dtype != (chunk.sizes, entry.dtype):
        found = "no such tensor" if shape_and_dtype is None else f"{shape_and_dtype[1]} of shape {shape_and_dtype[0]}"
        raise CorruptError(
            f"{where}: {name!r}", found=found, expected=f"{entry.dtype} of shape {chunk.sizes}", do=_ADVICE
        )


def check_stored_tensors(
    directory: Path,
    manifest: DirectoryManifest,
    payload_index: int,
    chunks: Iterable[tuple[EntryMetadata, ChunkMetadata]],
) -> None:
    """Raise if one of several chunks is not in a payload; reads the header of the payload only.

    Raises:
        ChainError, FormatError, StorageError: as `verify_directory`.
    """
    payload = manifest.payloads[payload_index]
    where = str(directory / payload.name)
    with LocalStorage(directory).open(payload.name) as source:
        header = directory_chain(directory, payload)[-1].verify(source, where)
    stored = {info.name: (info.shape, info.dtype) for record in header.records for info in record.infos}
    for entry, chunk in chunks:
        name = chunk_name(entry.fqn, chunk.offsets, chunk.sizes, entry.size)
        check_stored_tensor(where, name, stored.get(name), entry, chunk)


class PayloadReader(ABC):
    """An open payload.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        payload_index: index of the payload in the manifest.
        threads: native threads for decoding; None: every core.

    Raises:
        ChainError, FormatError, StorageError: as `verify_directory`.
    """

    def __init__(self, directory: Path, manifest: DirectoryManifest, payload_index: int, threads: int | None) -> None:
        self._payload, self._directory = manifest.payloads[payload_index], directory
        self._where = str(directory / self._payload.name)

    def __enter__(self) -> PayloadReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Free the decoded tensors."""

    @abstractmethod
    def _get_tensor(self, name: str) -> Tensor | None:
        """A stored tensor; None if there is none of this name."""

    @abstractmethod
    def _read_unchecked(self, name: str, starts: Offsets, sizes: Offsets) -> Tensor:
        """A box of a stored tensor."""

    @property
    @abstractmethod
    def _tree(self) -> JSON:
        """The tree of the payload, in which objects are stored."""

    @abstractmethod
    def _shape_and_dtype(self, name: str) -> tuple[Offsets, str] | None:
        """Shape and dtype of a stored tensor; None if there is none of this name."""

    def read_box(self, entry: EntryMetadata, chunk: ChunkMetadata, starts: Offsets, sizes: Offsets) -> Tensor:
        """The values of a box within a chunk of this payload.

        Args:
            starts: offsets of the box in the chunk, one for each axis.
            sizes: of the box.

        Raises:
            CorruptError: the chunk is not stored as the manifest declares, or the box is not within it.
        """
        name = chunk_name(entry.fqn, chunk.offsets, chunk.sizes, entry.size)
        check_stored_tensor(self._where, name, self._shape_and_dtype(name), entry, chunk)
        if any(start + size > side for start, size, side in zip(starts, sizes, chunk.sizes, strict=True)):
            raise CorruptError(f"{self._where}: {name!r}", found=f"a box at {starts}", expected=f"within {chunk.sizes}")
        return self._read_unchecked(name, starts, sizes)

    def load_object(self, fqn: str) -> Any:
        """An entry that is not a tensor."""
        decoder = TreeDecoder(_LazyPayloadTensors(self), tie=True, where=self._where)
        return decode_buffers(decoder.decode(_subtree(self._tree, fqn, self._where), (fqn,)))


class FullPayload(PayloadReader):
    """A payload that is decoded at once and held in memory."""

    def __init__(self, directory: Path, manifest: DirectoryManifest, payload_index: int, threads: int | None) -> None:
        super().__init__(directory, manifest, payload_index, threads)
        decoded = decode_directory(directory, payload_index, threads=threads)
        self._decoded, self._tensors = decoded, dict(decoded.reference.tensors)

    def close(self) -> None:
        self._tensors = {}
        del self._decoded

    @property
    def _tree(self) -> JSON:
        return self._decoded.tree

    def _get_tensor(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def _shape_and_dtype(self, name: str) -> tuple[Offsets, str] | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else (tuple(tensor.shape), dtype_name(tensor.dtype))

    def _read_unchecked(self, name: str, starts: Offsets, sizes: Offsets) -> Tensor:
        return self._tensors[name][tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


class LazyPayload(PayloadReader):
    """A payload of which only the requested boxes are decoded."""

    def __init__(self, directory: Path, manifest: DirectoryManifest, payload_index: int, threads: int | None) -> None:
        super().__init__(directory, manifest, payload_index, threads)
        # The digest of each base is verified through the file that depends on it.
        with LocalStorage(directory).open(self._payload.name) as source:
            self._header = directory_chain(directory, self._payload)[-1].verify(source, self._where)
        self._reader = PartialReader(chain_paths(directory, self._payload), threads)

    def close(self) -> None:
        self._reader.close()

    @property
    def _tree(self) -> JSON:
        return self._header.tree

    def _get_tensor(self, name: str) -> Tensor | None:
        info = self._reader.infos.get(name)
        return None if info is None else self._reader.read(name, (0,) * len(info.shape), info.shape)

    def _shape_and_dtype(self, name: str) -> tuple[Offsets, str] | None:
        info = self._reader.infos.get(name)
        return None if info is None else (info.shape, info.dtype)

    def _read_unchecked(self, name: str, starts: Offsets, sizes: Offsets) -> Tensor:
        return self._reader.read(name, starts, sizes)


class _LazyPayloadTensors(Mapping[str, Tensor]):
    """The tensors of a payload by name, each read when it is requested; they cannot be listed."""

    def __init__(self, payload: PayloadReader) -> None:
        self._payload = payload

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._payload._get_tensor(name)
        if tensor is None:
            raise KeyError(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def _subtree(tree: JSON, fqn: str, where: str) -> JSON:
    """The subtree of an entry in the tree of a payload."""
    pairs = tree.get("$d") if isinstance(tree, dict) and len(tree) == 1 else None
    if isinstance(pairs, list):  # a name that begins with "$", or with lone surrogates
        keys = (fqn, {"$s": fqn.encode("utf-8", "surrogatepass").hex()})
        matches = [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and pair[0] in keys]
    else:
        matches = [tree[fqn]] if isinstance(tree, dict) and fqn in tree else []
    if not matches:
        raise CorruptError(f"{where}: {fqn!r}", found="no such entry", expected="what its manifest names", do=_ADVICE)
    return matches[0]


_NUMPY_GLOBALS = [np._core.multiarray._reconstruct, np._core.multiarray.scalar, np.ndarray, np.dtype]  # type: ignore[attr-defined]
_NUMPY_GLOBALS += [type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"]
_BUFFER_KEY = "shrinkpoint:buffer"
"""The only key of a dict that represents a BytesIO; a user's dict with this key gets a colon at its end."""
_MAX_DEPTH = 64
_LOCK = threading.Lock()  # `safe_globals` is one list for the whole process


def unpickle_plain(data: io.BytesIO, fqn: str) -> Any:
    """Unpickle an object that consists of plain values, tensors, numpy arrays and buffers.

    Args:
        data: the bytes of `torch.save`.
        fqn: the object's name, for messages.

    Raises:
        StateError: it consists of anything else.
    """
    data.seek(0)
    with _LOCK:
        allowed = set(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals(
            [obj for obj in [*_NUMPY_GLOBALS, bytes, io.BytesIO] if obj not in allowed]
        ):
            try:
                return encode_buffers(torch.load(data, map_location="cpu", weights_only=True))
            except Exception as error:
                raise StateError(
                    f"state[{fqn!r}]",
                    found=_describe_unsupported(data),
                    expected="tensors, numpy arrays, plain values and BytesIO, in dicts, lists and tuples",
                    do="convert it, or leave it out of the state dict",
                ) from (error if isinstance(error, StateError) else None)  # torch's own message is about loading


def _describe_unsupported(data: io.BytesIO) -> str:
    """The kind of the value that cannot be stored."""
    data.seek(0)
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(data))
    except Exception:  # torch reads such a value in another way
        names = []
    return f"a value made with {', '.join(names)}" if names else "a value of a kind that is not stored"


def encode_buffers(value: Any, depth: int = 0) -> Any:
    """The same nest with a plain value for every `io.BytesIO`: its position and its bytes."""
    if type(value) is io.BytesIO:
        return {_BUFFER_KEY: [value.tell(), value.getvalue()]}
    return _map_container(value, encode_buffers, depth, lambda key: f"{key}:")


def decode_buffers(value: Any, depth: int = 0) -> Any:
    """The inverse of `encode_buffers`.

    Raises:
        CorruptError: a plain value that no release writes.
    """
    if type(value) is dict and [*value] == [_BUFFER_KEY]:
        return _decode_buffer(value[_BUFFER_KEY])
    return _map_container(value, decode_buffers, depth, lambda key: key[:-1])


def _map_container(value: Any, transform: Callable[[Any, int], Any], depth: int, rename: Callable[[str], str]) -> Any:
    """A container with transformed parts; the same object if none of them changes."""
    if depth > _MAX_DEPTH:  # flattening refuses it later
        return value
    if type(value) in (list, tuple):
        parts = [transform(part, depth + 1) for part in value]
        return type(value)(parts) if any(new is not old for new, old in zip(parts, value, strict=True)) else value
    if type(value) in (dict, OrderedDict):
        is_escaped = len(value) == 1 and _is_escaped_key(next(iter(value)))
        items = {rename(key) if is_escaped else key: transform(part, depth + 1) for key, part in value.items()}
        is_same = all(key in items and items[key] is part for key, part in value.items())
        return value if is_same else type(value)(items)
    return value


def _is_escaped_key(key: Any) -> bool:
    return type(key) is str and key.startswith(_BUFFER_KEY) and not key[len(_BUFFER_KEY) :].strip(":")


def _decode_buffer(value: Any) -> io.BytesIO:
    if type(value) is list and [type(part) for part in value] == [int, bytes] and 0 <= value[0] < 2**62:
        buffer = io.BytesIO(value[1])
        buffer.seek(value[0])
        return buffer
    raise CorruptError("state", found=f"{value!r:.80} as a BytesIO", expected="a position and bytes")


def pickle_plain(value: Any) -> io.BytesIO:
    """The bytes of `torch.save`, which a planner passes to `torch.load`; they are never stored."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
