"""What one payload holds: decoded as a whole, or box by box."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shrinkpoint.errors import CorruptError
from shrinkpoint.record import JSON
from shrinkpoint.state.dtypes import dtype_name
from shrinkpoint.state.grow import Grower
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import folder as folders
from shrinkpoint.store.foldermanifest import FolderManifest
from shrinkpoint.store.partial import Boxes
from shrinkpoint.store.unfold import decode
from shrinkpoint.train.dcp.description import Chunk, Item, Offsets, chunk_name
from shrinkpoint.train.dcp.values import unstored

_DO = "restore another checkpoint"


def check_kind(where: str, name: str, kind: tuple[Offsets, str] | None, item: Item, chunk: Chunk) -> None:
    """Raises CorruptError where a stored tensor is not the box that a manifest says it is.

    Args:
        kind: shape and dtype of what is stored; None: nothing is.
    """
    if kind != (chunk.sizes, item.dtype):
        found = "no such tensor" if kind is None else f"{kind[1]} of shape {kind[0]}"
        raise CorruptError(f"{where}: {name!r}", found=found, expected=f"{item.dtype} of shape {chunk.sizes}", do=_DO)


def check_kinds(folder: Path, manifest: FolderManifest, at: int, boxes: Iterable[tuple[Item, Chunk]]) -> None:
    """As `check_kind`, of all boxes in a payload, of which only the header is read.

    Raises:
        ChainError, FormatError, StorageError: as `folder.check`.
    """
    payload = manifest.payloads[at]
    where = str(folder / payload.name)
    with LocalStorage(folder).open(payload.name) as source:
        head = folders.vouched(source, where, payload.digest, payload.size)
    kinds = {info.name: (info.shape, info.dtype) for record in head.records for info in record.infos}
    for item, chunk in boxes:
        name = chunk_name(item.fqn, chunk.offsets, chunk.sizes, item.size)
        check_kind(where, name, kinds.get(name), item, chunk)


class Contents(ABC):
    """One payload, open.

    Raises:
        ChainError, FormatError, StorageError: as `folder.check`.
    """

    def __init__(self, folder: Path, manifest: FolderManifest, at: int, threads: int | None) -> None:
        self._payload, self._folder = manifest.payloads[at], folder
        self._where = str(folder / self._payload.name)

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Free what was decoded."""

    @abstractmethod
    def _tensor(self, name: str) -> Tensor | None: ...

    @abstractmethod
    def _part(self, name: str, starts: Offsets, sizes: Offsets) -> Tensor: ...

    @property
    @abstractmethod
    def _tree(self) -> JSON: ...

    @abstractmethod
    def _kind(self, name: str) -> tuple[Offsets, str] | None:
        """Shape and dtype of a stored tensor."""

    def box(self, item: Item, chunk: Chunk, starts: Offsets, sizes: Offsets) -> Tensor:
        """A part of what this payload has of a tensor.

        Args:
            starts: where it begins, in `chunk`.
        """
        name = chunk_name(item.fqn, chunk.offsets, chunk.sizes, item.size)
        check_kind(self._where, name, self._kind(name), item, chunk)
        if any(start + size > side for start, size, side in zip(starts, sizes, chunk.sizes, strict=True)):
            raise CorruptError(f"{self._where}: {name!r}", found=f"a box at {starts}", expected=f"within {chunk.sizes}")
        return self._part(name, starts, sizes)

    def value(self, fqn: str) -> Any:
        """What is no tensor, as it was saved."""
        grower = Grower(_Stored(self), tie=True, where=self._where)
        return unstored(grower.grow(_branch(self._tree, fqn, self._where), (fqn,)))


class Whole(Contents):
    """All of it in memory."""

    def __init__(self, folder: Path, manifest: FolderManifest, at: int, threads: int | None) -> None:
        super().__init__(folder, manifest, at, threads)
        decoded = decode(folder, at, threads=threads)
        self._decoded, self._tensors = decoded, dict(decoded.reference.tensors)

    def close(self) -> None:
        self._tensors = {}
        del self._decoded

    @property
    def _tree(self) -> JSON:
        return self._decoded.tree

    def _tensor(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def _kind(self, name: str) -> tuple[Offsets, str] | None:
        x = self._tensors.get(name)
        return None if x is None else (tuple(x.shape), dtype_name(x.dtype))

    def _part(self, name: str, starts: Offsets, sizes: Offsets) -> Tensor:
        return self._tensors[name][tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]


class Pieces(Contents):
    """What is asked for alone."""

    def __init__(self, folder: Path, manifest: FolderManifest, at: int, threads: int | None) -> None:
        super().__init__(folder, manifest, at, threads)
        with LocalStorage(folder).open(self._payload.name) as source:  # each file below is vouched for by the next one
            self._head = folders.vouched(source, self._where, self._payload.digest, self._payload.size)
        self._boxes = Boxes(folders.chain_of(folder, self._payload), threads)

    def close(self) -> None:
        self._boxes.close()

    @property
    def _tree(self) -> JSON:
        return self._head.tree

    def _tensor(self, name: str) -> Tensor | None:
        info = self._boxes.infos.get(name)
        return None if info is None else self._boxes.read(name, (0,) * len(info.shape), info.shape)

    def _kind(self, name: str) -> tuple[Offsets, str] | None:
        info = self._boxes.infos.get(name)
        return None if info is None else (info.shape, info.dtype)

    def _part(self, name: str, starts: Offsets, sizes: Offsets) -> Tensor:
        return self._boxes.read(name, starts, sizes)


class _Stored(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def __getitem__(self, name: str) -> Tensor:
        x = self._contents._tensor(name)
        if x is None:
            raise KeyError(name)
        return x

    def __iter__(self) -> Iterator[str]:  # nobody asks
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def _branch(tree: JSON, fqn: str, where: str) -> JSON:
    """The part of a payload's tree that an entry has."""
    pairs = tree.get("$d") if isinstance(tree, dict) and len(tree) == 1 else None
    if isinstance(pairs, list):  # a name that begins with "$", or with lone surrogates
        spelled = (fqn, {"$s": fqn.encode("utf-8", "surrogatepass").hex()})
        found = [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and pair[0] in spelled]
    else:
        found = [tree[fqn]] if isinstance(tree, dict) and fqn in tree else []
    if not found:
        raise CorruptError(f"{where}: {fqn!r}", found="no such entry", expected="what its manifest names", do=_DO)
    return found[0]
