"""The whole tensors of all ranks, as every rank knows them: what they have in common, and their statistics.

What crosses between ranks are sums by row and by column, counts and single numbers, never values. Every rank merges
what all of them said, in rank order and in float64 or in integers, so all of them get the same bits.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec.lattice import sides
from shrinkpoint.errors import MismatchError
from shrinkpoint.record import Role
from shrinkpoint.schemes.shards import Shard, Shards
from shrinkpoint.state import FlatState

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor, on some rank.

    Attributes:
        place: of which tensor, and where in it.
        sizes: of the box.
        dtype, role: of the tensor, as `TensorInfo` has them.
        first: no rank before has the same box; only then it counts.
    """

    place: Shard
    sizes: tuple[int, ...]
    dtype: str
    role: Role
    first: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Margins:
    """Sums over a whole tensor, seen as a matrix.

    Attributes:
        shape: of the tensor.
        total: of all its values.
        rows, columns: of each row and each column, float64; empty of a matrix of one row, or where not asked for.
    """

    shape: tuple[int, ...]
    total: float
    rows: Tensor = field(repr=False)
    columns: Tensor = field(repr=False)

    @property
    def mean(self) -> float:
        return self.total / max(1, math.prod(self.shape))

    def means(self, axis: int) -> Tensor:
        """Along an axis, as `Tensor.mean` counts them: 1 gives one of each row; float64."""
        rows, columns = sides(self.shape)
        if rows == 1:
            return torch.tensor([self.mean], dtype=torch.float64)
        return self.rows / max(1, columns) if axis == 1 else self.columns / rows


class Wholes:
    """What all ranks have together; made by one exchange.

    Args:
        flat: this rank's state.
        shards: where its tensors lie.

    Attributes:
        pieces: of every rank, in the order of its tensors.
        shapes: of every whole tensor, by its name; in the order in which ranks name them.

    Raises:
        MismatchError: two ranks give a tensor of one name different shapes or dtypes.
        StateError: a box is not within its tensor, on this rank.
    """

    def __init__(self, flat: FlatState, shards: Shards) -> None:
        self._gather = shards.gather
        self.names = [*flat.infos]
        self.index = {name: i for i, name in enumerate(self.names)}
        mine = []
        for name, info in flat.infos.items():
            place = shards.places.get(name) or Shard(name, info.shape, (0,) * len(info.shape))
            sizes = tuple(flat.tensors[name].shape)
            place.check(name, sizes)
            mine.append((place.whole, place.shape, place.offsets, sizes, info.dtype, info.role.value))
        token = uuid.uuid4().hex
        answers = self._gather((token, mine))
        self.rank, self.width = [told for told, _ in answers].index(token), len(answers)
        self.pieces = _pieces([said for _, said in answers])
        self.mine = dict(zip(self.names, self.pieces[self.rank], strict=True))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._filled: Counter[str] = Counter()
        for piece in (one for pieces in self.pieces for one in pieces):
            self._join(piece)
        self._boxes = {(one.place.whole, one.place.offsets, one.sizes): name for name, one in self.mine.items()}

    @property
    def alone(self) -> bool:
        """Whether this is the only rank, and all its tensors are whole ones."""
        return self.width == 1 and all(one.sizes == one.place.shape for one in self.mine.values())

    def title(self, name: str) -> str:
        """The name of the whole tensor that a tensor of this rank is of."""
        return self.mine[name].place.whole

    def beside(self, name: str, title: str) -> str | None:
        """This rank's tensor that is the same box of another whole tensor; None: it has none."""
        piece = self.mine[name]
        return self._boxes.get((title, piece.place.offsets, piece.sizes))

    def is_beside(self, name: str, other: str) -> bool:
        """Whether two of this rank's tensors are the same box of wholes of the same shape."""
        one, two = self.mine[name], self.mine[other]
        alike = (one.sizes, one.place.shape, one.place.offsets) == (two.sizes, two.place.shape, two.place.offsets)
        return alike and one.place.whole != two.place.whole

    def counts(self, name: str) -> bool:
        """Whether this rank's tensor has values, and no rank before has the same ones."""
        return self.mine[name].first and self.mine[name].numel > 0

    # what ranks tell each other; all of them call each of these, in the same order

    def gather(self, thing: T) -> list[T]:
        """What every rank says, by rank."""
        return self._gather(thing)

    def total(self, *numbers: float) -> tuple[float, ...]:
        """Sums over ranks."""
        answers = self._gather(numbers)
        return tuple(math.fsum(column) for column in zip(*answers, strict=True))

    def told(self, notes: Mapping[str, T]) -> dict[str, list[T]]:
        """What ranks say of their pieces, by whole tensor; a tensor of which nothing is said is missing."""
        answers = self._gather([(self.index[name], note) for name, note in notes.items()])
        out: dict[str, list[T]] = {}
        for pieces, said in zip(self.pieces, answers, strict=True):
            for index, note in said:
                out.setdefault(pieces[index].place.whole, []).append(note)
        return out

    def all(self, flags: Mapping[str, bool]) -> set[str]:
        """Names of those whole tensors of which every piece is flagged; pieces without values have no say."""
        said = self.told({name: flag for name, flag in flags.items() if self.mine[name].numel})
        return {title for title, found in said.items() if all(found) and len(found) == self._filled[title]}

    def anywhere(self, names: Iterable[str]) -> set[str]:
        """Names of the whole tensors of which some rank names a piece."""
        return set().union(*self._gather([self.title(name) for name in names]))

    def margins(
        self, names: Iterable[str], matrices: Callable[[str], Tensor], *, columns: bool = True
    ) -> dict[str, Margins]:
        """Sums by row and by column of whole tensors.

        Args:
            names: of this rank's tensors.
            matrices: gives what is summed, one matrix after the other.
            columns: False: only rows are wanted.
        """
        counted = [name for name in names if self.counts(name)]
        answers = self._gather(
            _packed([(self.index[name], _sums(matrices(name), self.mine[name], columns)) for name in counted])
        )
        sums: dict[str, _Sum] = {}
        for pieces, answer in zip(self.pieces, answers, strict=True):
            places, values = answer
            for index in places.tolist():
                piece = pieces[index]
                taken = sums.setdefault(piece.place.whole, _Sum(piece.place.shape, columns)).add(piece, values)
                values = values[taken:]
        return {title: one.margins() for title, one in sums.items()}

    def _join(self, piece: Piece) -> None:
        place = piece.place
        self._filled[place.whole] += piece.numel > 0
        shape, dtype = (
            self.shapes.setdefault(place.whole, place.shape), self.dtypes.setdefault(place.whole, piece.dtype)
        )  # fmt: skip
        if (shape, dtype) != (place.shape, piece.dtype):
            found, expected = f"{dtype} {list(shape)} and {piece.dtype} {list(place.shape)}", "one shape and dtype"
            raise MismatchError(place.whole, found=found, expected=expected, do="name tensors alike on all ranks")


def _pieces(answers: Iterable[Sequence[tuple[Any, ...]]]) -> list[list[Piece]]:
    seen: set[tuple[Any, ...]] = set()
    out: list[list[Piece]] = []
    for said in answers:
        out.append([])
        for whole, shape, offsets, sizes, dtype, role in said:
            box = (whole, offsets, sizes)
            out[-1].append(Piece(Shard(whole, shape, offsets), sizes, dtype, Role(role), box not in seen))
            seen.add(box)
    return out


def _sums(x: Tensor, piece: Piece, columns: bool) -> Tensor:
    """What a piece adds: float32, rows first; one number of a tensor of one row."""
    wide = torch.float64
    if sides(piece.place.shape)[0] == 1:
        return x.sum(dtype=wide).reshape(1).float().cpu()
    both = [x.sum(1, dtype=wide)] + ([x.sum(0, dtype=wide)] if columns else [])
    return torch.cat(both).float().cpu()


def _packed(parts: Sequence[tuple[int, Tensor]]) -> tuple[Any, Any]:
    """Small to pickle: which of a rank's tensors, and all their numbers."""
    places = np.array([index for index, _ in parts], np.int32)
    return places, np.concatenate([np.empty(0, np.float32), *(x.numpy() for _, x in parts)])


class _Sum:
    """One whole tensor's sums, while they grow."""

    def __init__(self, shape: tuple[int, ...], columns: bool) -> None:
        self._shape = shape
        rows, ncolumns = sides(shape)
        self._lone, self._wide = rows == 1, columns
        self._rows = torch.zeros(0 if self._lone else rows, dtype=torch.float64)
        self._columns = torch.zeros(0 if self._lone or not columns else ncolumns, dtype=torch.float64)
        self._total = 0.0

    def add(self, piece: Piece, values: Any) -> int:
        """Take what a piece adds from the front of `values`; how many numbers that was."""
        if self._lone:
            self._total += float(values[0])
            return 1
        nrows, ncolumns = sides(piece.sizes)
        taken = torch.from_numpy(values[: nrows + (ncolumns if self._wide else 0)]).double()
        first = piece.place.first_row
        self._rows[first : first + nrows] += taken[:nrows]
        if self._wide:
            self._columns[piece.place.columns(piece.sizes)] += taken[nrows:]
        return taken.numel()

    def margins(self) -> Margins:
        total = self._total if self._lone else float(self._rows.sum())
        return Margins(self._shape, total, self._rows, self._columns)


def moments_of(x: Tensor) -> tuple[int, float, float]:
    """How many values there are, their mean, and the sum of their squared distances to it; in float64."""
    wide = x.detach().to(torch.float64)
    mean = float(wide.mean()) if wide.numel() else 0.0
    return wide.numel(), mean, float((wide - mean).square().sum())


def merged_moments(parts: Iterable[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean and standard deviation of all values, from `moments_of` of their parts (Chan, Golub and LeVeque, 1979)."""
    parts = list(parts)
    count = max(1, sum(part[0] for part in parts))
    mean = math.fsum(n * one for n, one, _ in parts) / count
    apart = math.fsum(squares + n * (one - mean) ** 2 for n, one, squares in parts)
    return mean, math.sqrt(apart / count)


def recorded(wholes: Wholes, found: Mapping[str, Tensor], flat: FlatState) -> dict[str, Tensor]:
    """What a recorder has of parameters, by the names of this rank's tensors; its box where that is of whole ones.

    A parameter is that of a whole tensor whose name ends with the parameter's.
    """
    out = {}
    for name, x in flat.tensors.items():
        place = wholes.mine[name].place
        one = next((x for parameter, x in found.items() if is_of(place.whole, parameter)), None)
        one = getattr(one, "to_local", lambda one=one: one)()  # of a parameter in parts
        if one is not None and tuple(one.shape) == place.shape:
            for axis, (start, size) in enumerate(zip(place.offsets, x.shape, strict=True)):
                one = one.narrow(axis, start, size)
        if one is not None and one.shape == x.shape:
            out[name] = one
    return out


def is_of(title: str, parameter: str) -> bool:
    """Whether a whole tensor is, by its name, a parameter of a model."""
    return title == parameter or title.endswith((f".{parameter}", f"/{parameter}"))
