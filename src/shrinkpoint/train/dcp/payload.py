"""Reads a payload of a checkpoint, all of it or box after box, and its objects that are not tensors."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.container import FileReader
from shrinkpoint.errors import VERIFY_ADVICE, CorruptError, StateError
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.store.chain import directory_chain
from shrinkpoint.store.decode import decode_payload
from shrinkpoint.store.directory import chain_places
from shrinkpoint.store.manifest import DirectoryManifest, Payload
from shrinkpoint.store.partial_reader import PartialReader
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.info import TensorInfo
from shrinkpoint.tensors.tree_decoder import TreeDecoder
from shrinkpoint.threads import ForkSafeLock
from shrinkpoint.train.dcp.checkpoint_metadata import ChunkMetadata, EntryMetadata, Offsets, box_slices, chunk_name

_NUMPY_GLOBALS = [np._core.multiarray._reconstruct, np._core.multiarray.scalar, np.ndarray, np.dtype]  # type: ignore[attr-defined]
_NUMPY_GLOBALS += [type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"]
_LOCK = ForkSafeLock()  # `safe_globals` is one list for the whole process


class PayloadReader:
    """An open payload.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        payload_index: index of the payload in the manifest.
        threads: native threads for decoding; None: every core.
        whole: decode all of it at once, and hold it in memory; False: decode only the boxes that are read.
        max_bytes: how much memory the tensors of one file may take; None: as for `shrinkpoint.load`.

    Raises:
        ChainError, FormatError, StorageError: as `verify_directory`.
    """

    def __init__(
        self,
        directory: Path | ObjectUrl,
        manifest: DirectoryManifest,
        payload_index: int,
        threads: int | None,
        *,
        whole: bool,
        max_bytes: int | None = None,
    ) -> None:
        payload = manifest.payloads[payload_index]
        self._where = str(directory / payload.name)
        self._tensors: _DecodedTensors | PartialReader
        if whole:
            decoded = decode_payload(directory, payload, threads=threads, max_bytes=max_bytes)
            self._tree, self._tensors = decoded.tree, _DecodedTensors(decoded.reference.tensors)
        else:
            self._tree = _verify_header(directory, payload).tree
            self._tensors = PartialReader(chain_places(directory, payload), threads, max_bytes=max_bytes)

    def __enter__(self) -> PayloadReader:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the decoded tensors."""
        self._tensors.close()

    def read_box(self, entry: EntryMetadata, chunk: ChunkMetadata, starts: Offsets, sizes: Offsets) -> Tensor:
        """The values of a box within a chunk of this payload.

        Args:
            starts: offsets of the box in the chunk, one for each axis.
            sizes: of the box.

        Raises:
            CorruptError: the chunk is not stored as the manifest declares, or the box is not within it.
        """
        name = chunk_name(entry.fqn, chunk.offsets, chunk.sizes, entry.size)
        where = f"{self._where}: {name!r}"
        _check_stored_tensor(where, self._tensors.infos.get(name), entry, chunk)
        if any(start + size > side for start, size, side in zip(starts, sizes, chunk.sizes, strict=True)):
            raise CorruptError(where, found=f"a box at {starts}", expected=f"one in {chunk.sizes}", do=VERIFY_ADVICE)
        return self._tensors.read(name, starts, sizes)

    def load_object(self, fqn: str) -> Any:
        """An entry that is not a tensor."""
        tree, where = self._tree, self._where
        pairs = tree.get("$d") if isinstance(tree, dict) and len(tree) == 1 else None
        if isinstance(pairs, list):  # a name that begins with "$", or with lone surrogates
            keys = (fqn, {"$s": fqn.encode("utf-8", "surrogatepass").hex()})
            matches = [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and pair[0] in keys]
        else:
            matches = [tree[fqn]] if isinstance(tree, dict) and fqn in tree else []
        if not matches:
            expected = "what its manifest names"
            raise CorruptError(f"{where}: {fqn!r}", found="no such entry", expected=expected, do=VERIFY_ADVICE)
        return TreeDecoder(_TensorsByName(self._tensors), tie=True, where=where).decode(matches[0], (fqn,))


def check_stored_tensors(
    directory: Path | ObjectUrl,
    manifest: DirectoryManifest,
    payload_index: int,
    chunks: Iterable[tuple[EntryMetadata, ChunkMetadata]],
) -> None:
    """Raise if one of several chunks is not in a payload; reads the header of the payload only.

    Raises:
        ChainError, FormatError, StorageError: as `verify_directory`.
    """
    payload = manifest.payloads[payload_index]
    infos = {info.name: info for record in _verify_header(directory, payload).records for info in record.infos}
    for entry, chunk in chunks:
        name = chunk_name(entry.fqn, chunk.offsets, chunk.sizes, entry.size)
        _check_stored_tensor(f"{directory / payload.name}: {name!r}", infos.get(name), entry, chunk)


def _verify_header(directory: Path | ObjectUrl, payload: Payload) -> FileReader:
    """The header of a payload; the digest of each base is verified through the file that depends on it."""
    (own,) = directory_chain(directory, replace(payload, bases=()))
    with own.storage.open(payload.name) as source:
        return own.verify(source, str(directory / payload.name))


def _check_stored_tensor(where: str, info: TensorInfo | None, entry: EntryMetadata, chunk: ChunkMetadata) -> None:
    if info is None or (info.shape, info.dtype) != (chunk.sizes, entry.dtype):
        found = "no such tensor" if info is None else f"{info.dtype} of shape {info.shape}"
        raise CorruptError(where, found=found, expected=f"{entry.dtype} of shape {chunk.sizes}", do=VERIFY_ADVICE)


class _DecodedTensors:
    """Tensors in memory, with the methods of a `PartialReader`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()
        }

    def read(self, name: str, starts: Offsets, sizes: Offsets) -> Tensor:
        tensor = self._tensors[name]
        return tensor if sizes == tensor.shape else tensor[box_slices(starts, sizes)]

    def close(self) -> None:
        self._tensors = {}


class _TensorsByName(Mapping[str, Tensor]):
    """The tensors of a payload, each read when it is looked up."""

    def __init__(self, tensors: _DecodedTensors | PartialReader) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        shape = self._tensors.infos[name].shape
        return self._tensors.read(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors.infos)

    def __len__(self) -> int:
        return len(self._tensors.infos)


# Objects that are not tensors, which torch passes and expects as the bytes of `torch.save`


def unpickle_plain(data: io.BytesIO, fqn: str) -> Any:
    """Unpickle an object that a planner made bytes of: plain values, tensors, numpy arrays and buffers.

    Args:
        data: the bytes of `torch.save`.
        fqn: the object's name, for messages.

    Raises:
        StateError: it consists of anything else.
    """
    data.seek(0)
    with _LOCK.lock:
        allowed = set(torch.serialization.get_safe_globals())
        added = [obj for obj in [*_NUMPY_GLOBALS, bytes, io.BytesIO] if obj not in allowed]
        with torch.serialization.safe_globals(added):
            try:
                return torch.load(data, map_location="cpu", weights_only=True)
            except Exception:
                expected = "tensors, numpy arrays, plain values and BytesIO, in dicts, lists and tuples"
                found, do = _describe_unsupported(data), "convert it, or leave it out of the state dict"
                # torch's own message is about loading
                raise StateError(f"state[{fqn!r}]", found=found, expected=expected, do=do) from None


def _describe_unsupported(data: io.BytesIO) -> str:
    data.seek(0)
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(data))
    except Exception:  # torch reads such a value in another way
        names = []
    return f"a value made with {', '.join(names)}" if names else "a value of a kind that is not stored"


def pickle_plain(value: Any) -> io.BytesIO:
    """The bytes of `torch.save`, which a planner passes to `torch.load`; they are never stored."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
