"""What one payload holds: decoded as a whole, or box by box."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shrinkpoint.errors import CorruptError
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import directory as folders
from shrinkpoint.store.chain import directory_chain
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.store.partial_reader import PartialReader
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.tree_decode import TreeDecoder
from shrinkpoint.train.dcp.checkpoint_metadata import ChunkMetadata, EntryMetadata, Offsets, chunk_name
from shrinkpoint.train.dcp.objects import decode_buffers

_ADVICE = "restore another checkpoint"


def check_stored_tensor(
    where: str, name: str, shape_and_dtype: tuple[Offsets, str] | None, entry: EntryMetadata, chunk: ChunkMetadata
) -> None:
    """Raises CorruptError where a stored tensor is not the box that a manifest says it is.

    Args:
        shape_and_dtype: shape and dtype of what is stored; None: nothing is.
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
    """As `check_stored_tensor`, of all boxes in a payload, of which only the header is read.

    Raises:
        ChainError, FormatError, StorageError: as `folder.check`.
    """
    payload = manifest.payloads[payload_index]
    where = str(directory / payload.name)
    with LocalStorage(directory).open(payload.name) as source:
        head = directory_chain(directory, payload)[-1].verify(source, where)
    kinds = {info.name: (info.shape, info.dtype) for record in head.records for info in record.infos}
    for item, chunk in chunks:
        name = chunk_name(item.fqn, chunk.offsets, chunk.sizes, item.size)
        check_stored_tensor(where, name, kinds.get(name), item, chunk)


class PayloadReader(ABC):
    """One payload, open.

    Raises:
        ChainError, FormatError, StorageError: as `folder.check`.
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
        """Free what was decoded."""

    @abstractmethod
    def _get_tensor(self, name: str) -> Tensor | None: ...

    @abstractmethod
    def _read_unchecked(self, name: str, starts: Offsets, sizes: Offsets) -> Tensor: ...

    @property
    @abstractmethod
    def _tree(self) -> JSON: ...

    @abstractmethod
    def _shape_and_dtype(self, name: str) -> tuple[Offsets, str] | None:
        """Shape and dtype of a stored tensor."""

    def read_box(self, entry: EntryMetadata, chunk: ChunkMetadata, starts: Offsets, sizes: Offsets) -> Tensor:
        """A part of what this payload has of a tensor.

        Args:
            starts: where it begins, in `chunk`.
        """
        name = chunk_name(entry.fqn, chunk.offsets, chunk.sizes, entry.size)
        check_stored_tensor(self._where, name, self._shape_and_dtype(name), entry, chunk)
        if any(start + size > side for start, size, side in zip(starts, sizes, chunk.sizes, strict=True)):
            raise CorruptError(f"{self._where}: {name!r}", found=f"a box at {starts}", expected=f"within {chunk.sizes}")
        return self._read_unchecked(name, starts, sizes)

    def load_object(self, fqn: str) -> Any:
        """What is no tensor, as it was saved."""
        grower = TreeDecoder(_LazyPayloadTensors(self), tie=True, where=self._where)
        return decode_buffers(grower.decode(_subtree(self._tree, fqn, self._where), (fqn,)))


class FullPayload(PayloadReader):
    """All of it in memory."""

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
        x = self._tensors.get(name)
        return None if x is None else (tuple(x.shape), dtype_name(x.dtype))

    def _read_unchecked(self, name: str, starts: Offsets, sizes: Offsets) -> Tensor:
        return self._tensors[name][tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]


class LazyPayload(PayloadReader):
    """What is asked for alone."""

    def __init__(self, directory: Path, manifest: DirectoryManifest, payload_index: int, threads: int | None) -> None:
        super().__init__(directory, manifest, payload_index, threads)
        with LocalStorage(directory).open(
            self._payload.name
        ) as source:  # each file below is vouched for by the next one
            self._header = directory_chain(directory, self._payload)[-1].verify(source, self._where)
        self._reader = PartialReader(folders.chain_paths(directory, self._payload), threads)

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
    """Tensors by name, each read when it is asked for."""

    def __init__(self, payload: PayloadReader) -> None:
        self._payload = payload

    def __getitem__(self, name: str) -> Tensor:
        x = self._payload._get_tensor(name)
        if x is None:
            raise KeyError(name)
        return x

    def __iter__(self) -> Iterator[str]:  # nobody asks
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def _subtree(tree: JSON, fqn: str, where: str) -> JSON:
    """The part of a payload's tree that an entry has."""
    pairs = tree.get("$d") if isinstance(tree, dict) and len(tree) == 1 else None
    if isinstance(pairs, list):  # a name that begins with "$", or with lone surrogates
        spelled = (fqn, {"$s": fqn.encode("utf-8", "surrogatepass").hex()})
        found = [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and pair[0] in spelled]
    else:
        found = [tree[fqn]] if isinstance(tree, dict) and fqn in tree else []
    if not found:
        raise CorruptError(f"{where}: {fqn!r}", found="no such entry", expected="what its manifest names", do=_ADVICE)
    return found[0]
