"""Boxes of tensors out of a chain of files: what one rank needs of what other ranks saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torch import Tensor

from shrinkpoint.codec import Reference
from shrinkpoint.container import Reader
from shrinkpoint.record import TensorInfo
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store.file import read_file


class Boxes:
    """An opened chain: keyframe first, the payload last."""

    def __init__(self, chain: Sequence[Path], threads: int | None = None) -> None:
        self._chain, self._threads = [Path(p).absolute() for p in chain], threads
        self._reference: Reference | None = None
        self.decoded = 0
        path = self._chain[-1]
        with LocalStorage(path.parent).open(path.name) as source:
            reader = Reader(source, str(path))
        self.infos: dict[str, TensorInfo] = {info.name: info for head in reader.records for info in head.infos}

    def read(self, name: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        if self._reference is None:
            reference: Reference | None = None
            for path in self._chain:
                with LocalStorage(path.parent).open(path.name) as source:
                    reference = read_file(source, str(path), reference, threads=self._threads).reference
            self._reference = reference
        assert self._reference is not None
        box = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
        return self._reference.tensors[name][box].clone()

    def close(self) -> None:
        self._reference = None

    def __enter__(self) -> Boxes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
