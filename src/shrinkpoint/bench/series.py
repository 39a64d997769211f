"""Series of checkpoints that can be read repeatedly, once for each system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shrinkpoint.errors import NotFoundError
from shrinkpoint.store import Store
from shrinkpoint.store.single_file import load


@dataclass(frozen=True)
class SeriesEntry:
    """One checkpoint of a series.

    Attributes:
        step: its training step; steps rise along a series.
        state: any nest of tensors and plain values, as it was saved.
    """

    step: int
    state: Any = field(repr=False)


class Series(Protocol):
    """Checkpoints in order, of which one at a time is in memory."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[SeriesEntry]: ...


@dataclass(frozen=True)
class StoreSeries:
    """The checkpoints of a store, which should be lossless."""

    store: Store
    name: str = "store"

    def __len__(self) -> int:
        return len(self.store.steps())

    def __iter__(self) -> Iterator[SeriesEntry]:
        for step in self.store.steps():
            yield SeriesEntry(step, self.store.load(step, keep=False))


@dataclass(frozen=True)
class FileSeries:
    """Checkpoint files in the given order: those of this library, or any safetensors files."""

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        return self.paths[0].parent.name or str(self.paths[0])

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[SeriesEntry]:
        for step, path in enumerate(self.paths, 1):
            yield SeriesEntry(step, load(path))


def open_series(paths: Sequence[Path]) -> Series:
    """Opens one store, or several files, as a series.

    Raises:
        NotFoundError: a path does not exist, or the store has no checkpoints.
    """
    if len(paths) == 1 and paths[0].is_dir():
        series = StoreSeries(Store(paths[0]), paths[0].name)
        if not len(series):
            raise NotFoundError(str(paths[0]), found="no checkpoint", expected="a store with some", do="save one first")
        return series
    for path in paths:
        if not path.is_file():
            found = "a directory" if path.is_dir() else "nothing"
            expected = "one store, or files of checkpoints in their order"
            raise NotFoundError(str(path), found=found, expected=expected, do="name one store, or files")
    return FileSeries(tuple(paths))
