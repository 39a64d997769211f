"""The tensors of all ranks: their shapes, which shards this rank has, and reductions by tensor over all shards.

A shard is a box in its global tensor. Ranks exchange sums by row and by column, counts and single numbers, never
values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_SCALE_EXPONENT, Lattice, matrix_shape, scale_counts
from shrinkpoint.errors import MismatchError, StateError
from shrinkpoint.sharding.collectives import (
    CELL_BITS,
    ArrayReduction,
    Collectives,
    LocalCollectives,
    split_cells,
)
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role, TensorInfo

_INDEX_MULTIPLIER = 0x9E3779B1  # The factor of a value's index in `codec.lattice.dither`


@dataclass(frozen=True)
class ShardSpec:
    """Offset of a shard in its global tensor; with the shard's sizes, that is a box."""

    global_name: str  # the name of the global tensor, the same on every rank
    global_shape: tuple[int, ...]  # the shape of the global tensor
    offsets: tuple[int, ...]  # the index of the shard's first value, one number for each axis

    @property
    def global_numel(self) -> int:
        return math.prod(self.global_shape)

    @property
    def first_row(self) -> int:
        """The shard's first row in the global tensor seen as a matrix; a vector is one row."""
        return self.offsets[0] if len(self.global_shape) > 1 and self.global_shape[0] > 1 else 0

    def sampled_rows(self, max_numel: int) -> slice:
        """Rows of the shard that are every n-th of the global matrix: about `max_numel` values of all of it."""
        stride = max(1, self.global_numel // max_numel)
        return slice(-self.first_row % stride, None, stride)

    def columns(self, sizes: tuple[int, ...]) -> slice | Tensor:
        """The columns that a shard of these sizes has in the global tensor seen as a matrix."""
        if len(self.global_shape) < 2 or sizes[1:] == self.global_shape[1:]:
            start = 0 if len(self.global_shape) != 1 else self.offsets[0]
            return slice(start, start + matrix_shape(sizes)[1])
        indices = torch.arange(math.prod(self.global_shape[1:])).reshape(self.global_shape[1:])
        for axis, (start, size) in enumerate(zip(self.offsets[1:], sizes[1:], strict=True)):
            indices = indices.narrow(axis, start, size)
        return indices.reshape(-1)

    def slice_lattice(self, lattice: Lattice, sizes: tuple[int, ...]) -> Lattice:
        """The part of a global tensor's lattice that a shard of these sizes has.

        A shard of one row has a single step for all its columns, as in files: the geometric mean of theirs.
        """
        if sizes == self.global_shape:
            return lattice
        rows, columns = lattice.rows, lattice.columns
        if rows.numel() > 1:
            rows = rows[self.offsets[0] : self.offsets[0] + sizes[0]]
        if columns.numel() > 1:
            columns = columns[self.columns(sizes)]
        if columns.numel() > 1 and scale_counts(lattice.spacing, sizes)[1] == 1:
            mean = round(float(columns.to(torch.float64).mean()))
            rows = (rows + mean).clamp(-MAX_SCALE_EXPONENT, MAX_SCALE_EXPONENT).to(torch.int16)
            columns = torch.zeros(1, dtype=torch.int16)
        return replace(lattice, rows=rows.contiguous(), columns=columns.contiguous())

    def dither_seed(self, global_seed: int, sizes: tuple[int, ...]) -> int:
        """The dither seed of a shard, given that of the global tensor: the same dither if the shard is whole rows.

        The dither of a value is a hash of its index times a constant, plus the seed, so a shard that begins later has
        a larger seed. In other shards indices count differently, so their dither differs; it is as good.
        """
        if not global_seed:
            return 0
        strides = [math.prod(self.global_shape[axis + 1 :]) for axis in range(len(self.global_shape))]
        first = sum(start * stride for start, stride in zip(self.offsets, strides, strict=True))
        return (global_seed + first * _INDEX_MULTIPLIER) % (1 << 32) or 1

    def check(self, name: str, sizes: tuple[int, ...]) -> None:
        """Check that a shard of these sizes lies within the global tensor; raises StateError if it does not."""
        fits = len(self.global_shape) == len(self.offsets) == len(sizes)
        if not fits or any(
            start < 0 or start + size > global_size
            for start, size, global_size in zip(self.offsets, sizes, self.global_shape, strict=True)
        ):
            found = f"{list(sizes)} at offsets {list(self.offsets)} of {self.global_name!r}, {list(self.global_shape)}"
            raise StateError(name, found=found, expected="a shard within the tensor", do="correct its offsets")


@dataclass(frozen=True)
class ShardLayout:
    """Boxes of a rank's tensors in the tensors of all ranks that write a checkpoint together."""

    # By name of a tensor in the rank's state; a tensor without a spec is a whole one, on this rank alone.
    specs: Mapping[str, ShardSpec] = field(repr=False)
    collectives: Collectives = field(repr=False)  # of all these ranks


_MAX_PAIRWISE = 1 << 10
"""Maximum number of boxes without a separating plane that are compared pairwise; torch's layouts have far fewer."""
_MAX_SPLITS = 64


def check_disjoint(offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if two boxes that are not empty overlap, or if that cannot be decided quickly.

    Boxes are split by separating planes recursively, which always succeeds for shards.

    Args:
        offsets, sizes: of each box, all with the same number of axes; below 2**62.
    """
    nonempty = [index for index, shape in enumerate(sizes) if all(shape)]
    if len(nonempty) < 2:
        return
    starts = np.array([offsets[index] for index in nonempty], np.int64)
    ends = starts + np.array([sizes[index] for index in nonempty], np.int64)
    groups = [np.arange(len(nonempty))]
    for _ in range(_MAX_SPLITS):
        groups = [part for group in groups for part in _split_by_plane(starts, ends, group) if part.size > 1]
        if not groups:
            return
    raise ValueError("boxes that no planes separate")


def _split_by_plane(
    starts: NDArray[np.int64], ends: NDArray[np.int64], boxes: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Groups of boxes with planes between them; none if a pairwise comparison shows that the boxes do not overlap."""
    for axis in range(starts.shape[1]):
        order = boxes[np.argsort(starts[boxes, axis], kind="stable")]
        max_ends = np.maximum.accumulate(ends[order, axis])
        cuts = np.flatnonzero(starts[order[1:], axis] >= max_ends[:-1]) + 1
        if cuts.size:
            return np.split(order, cuts)
    if boxes.size > _MAX_PAIRWISE:
        raise ValueError(f"{boxes.size} boxes that no plane separates")
    box_starts, box_ends = starts[boxes], ends[boxes]
    common = np.minimum(box_ends[:, None], box_ends[None]) > np.maximum(box_starts[:, None], box_starts[None])
    if int(common.all(2).sum()) > boxes.size:  # each box overlaps itself
        raise ValueError("boxes that overlap")
    return []


T = TypeVar("T")
R = TypeVar("R")
X = TypeVar("X")


@dataclass(frozen=True)
class TensorShard:
    """A box of a global tensor that this rank has."""

    spec: ShardSpec  # the global tensor, and where in it the box begins
    sizes: tuple[int, ...]  # the shape of the box
    # The box has values, and no rank before has the same box; sums over ranks count only such shards.
    is_primary: bool = True


@dataclass(frozen=True)
class Marginals:
    """Sums over a global tensor, seen as a matrix."""

    shape: tuple[int, ...]  # the shape of the tensor
    total: float  # the sum of all values
    # `row_sums`, `column_sums`: of each row and each column, float64; empty for a matrix of one row.
    row_sums: Tensor = field(repr=False)
    column_sums: Tensor = field(repr=False)

    @property
    def mean(self) -> float:
        return self.total / max(1, math.prod(self.shape))

    def mean_along(self, axis: int) -> Tensor:
        """Means along an axis as `Tensor.mean` counts them, 1 for one mean per row; float64."""
        rows, columns = matrix_shape(self.shape)
        if rows == 1:
            return torch.tensor([self.mean], dtype=torch.float64)
        return self.row_sums / max(1, columns) if axis == 1 else self.column_sums / rows


class _ShardReport(NamedTuple):
    """Report of a rank about one of its shards."""

    global_name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    role: str


class _TensorSummary(NamedTuple):
    """Description of a global tensor, equal on all ranks."""

    first: tuple[int, int]  # rank and position of the shard that was reported first
    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str  # of the shard that was reported last
    num_nonempty: int  # number of shards that have values
    conflict: str  # another dtype and shape that a rank gives the tensor, as text; "" if there is none


class GlobalTensors:
    """The tensors that all ranks have together. Making it is a collective, as is every reduction.

    Args:
        state: this rank's state.
        layout: where its tensors lie in global tensors, and the collectives of all ranks.

    Attributes:
        collectives: of the layout.
        local_shards: this rank's shards, by local name.
        global_names: the global tensor that each of them is a shard of, by local name.
        whole: local names of the shards that are all of their global tensor.
        primary: local names of the shards that count in sums over ranks: no rank before has the same values.
        shapes, roles: of each global tensor, by global name, in the order in which ranks name them.

    Raises:
        MismatchError: two ranks give a tensor of one name different shapes or dtypes.
        StateError: a box is not within its tensor, on this rank.
    """

    _last: ClassVar[tuple[list[tuple[str, TensorInfo]], GlobalTensors] | None] = None  # of a single process

    def __init__(self, state: FlatState, layout: ShardLayout) -> None:
        self.collectives = layout.collectives
        reports, specs = [], []
        for name, info in state.infos.items():
            sizes = tuple(state.tensors[name].shape)
            spec = layout.specs.get(name) or ShardSpec(name, sizes, (0,) * len(sizes))
            spec.check(name, sizes)
            specs.append(spec)
            reports.append(
                _ShardReport(spec.global_name, spec.global_shape, spec.offsets, sizes, info.dtype, info.role.value)
            )
        summaries, duplicates = self._register(reports)
        for summary in summaries:
            if summary.conflict:
                found = f"{summary.dtype} {list(summary.shape)} and {summary.conflict}"
                do = "give tensors the same names on all ranks"
                raise MismatchError(summary.name, found=found, expected="one shape and dtype", do=do)
        self.shapes = {summary.name: summary.shape for summary in summaries}
        self.roles = {summary.name: Role(summary.role) for summary in summaries}
        self._num_nonempty = {summary.name: summary.num_nonempty for summary in summaries}
        self._names = [*self.shapes]
        self._index = {name: index for index, name in enumerate(self._names)}
        self.local_shards: dict[str, TensorShard] = {}
        for position, (name, spec, report) in enumerate(zip(state.infos, specs, reports, strict=True)):
            is_primary = position not in duplicates and math.prod(report.sizes) > 0
            self.local_shards[name] = TensorShard(spec, report.sizes, is_primary)
        self.global_names = {name: shard.spec.global_name for name, shard in self.local_shards.items()}
        shards = self.local_shards
        self.whole = frozenset(name for name, shard in shards.items() if shard.sizes == shard.spec.global_shape)
        self.primary = frozenset(name for name, shard in self.local_shards.items() if shard.is_primary)
        self._nonempty = frozenset(name for name, shard in shards.items() if math.prod(shard.sizes))
        self._name_of_box = {
            (shard.spec.global_name, shard.spec.offsets, shard.sizes): name for name, shard in self.local_shards.items()
        }

    @classmethod
    def from_state(cls, state: FlatState) -> GlobalTensors:
        """The tensors of a single process: each is one shard, the whole tensor. Of a state like the last, the same."""
        infos, last = [*state.infos.items()], cls._last
        if last is None or last[0] != infos:
            cls._last = last = infos, cls(state, ShardLayout({}, LocalCollectives()))
        return last[1]

    def _register(self, reports: Sequence[_ShardReport]) -> tuple[list[_TensorSummary], frozenset[int]]:
        """Summaries of all tensors, and positions of this rank's shards that a rank before has, too.

        Each tensor is summarized by one rank, which the ranks find by its name.
        """
        collectives = self.collectives
        outgoing: list[list[tuple[Any, ...]]] = [[] for _ in range(collectives.world_size)]
        for position, report in enumerate(reports):
            outgoing[collectives.owner(report.global_name)].append((position, *report))
        by_name: dict[str, list[tuple[int, int, _ShardReport]]] = {}
        duplicates: list[list[int]] = [[] for _ in outgoing]
        boxes = set()
        for rank, items in enumerate(collectives.all_to_all(outgoing)):
            for position, *fields in items:
                report = _ShardReport(*fields)
                by_name.setdefault(report.global_name, []).append((rank, position, report))
                box = report.global_name, report.offsets, report.sizes
                if box in boxes:
                    duplicates[rank].append(position)
                boxes.add(box)
        summaries: list[tuple[Any, ...]] = [tuple(_summarize(shards)) for shards in by_name.values()]
        answers = collectives.all_to_all([(summaries, positions) for positions in duplicates])
        in_order = sorted(chain.from_iterable(part for part, _ in answers), key=lambda fields: fields[0])
        return [_TensorSummary(*fields) for fields in in_order], frozenset(
            chain.from_iterable(positions for _, positions in answers)
        )

    # this rank's shards

    @property
    def is_complete(self) -> bool:
        """True if this rank has every tensor, and all of each: then no other rank has a shard that it does not see."""
        return {self.global_names[name] for name in self.whole} == self.shapes.keys()

    def global_numel(self, name: str) -> int:
        return self.local_shards[name].spec.global_numel

    def colocated_name(self, name: str, global_name: str) -> str | None:
        """The local tensor that is the same box of another global tensor; None if there is none."""
        shard = self.local_shards[name]
        return self._name_of_box.get((global_name, shard.spec.offsets, shard.sizes))

    def is_colocated(self, name: str, other: str) -> bool:
        """True if two local tensors are the same box of different global tensors of the same shape."""
        a, b = self.local_shards[name], self.local_shards[other]
        same_box = a.sizes == b.sizes and a.spec.offsets == b.spec.offsets
        return same_box and a.spec.global_shape == b.spec.global_shape and a.spec.global_name != b.spec.global_name

    # collectives: all ranks call each of these in the same order

    def reduce(self, reports: Mapping[str, T], merge: Callable[[list[T]], R]) -> dict[str, R]:
        """Merge the reports of the shards of each tensor.

        Args:
            reports: what this rank reports of its shards, by local name; small, as one rank gets all of a tensor.
            merge: merges the reports of one tensor, in rank order; its result is small, too.

        Returns:
            By global name, in the order in which ranks report; without the tensors of which none reports a shard.
        """
        indexed = [(self._index[self.global_names[name]], report) for name, report in reports.items()]
        return {self._names[index]: result for index, result in self.collectives.reduce(indexed, merge).items()}

    def reduce_primary(self, reports: Mapping[str, T], merge: Callable[[list[T]], R]) -> dict[str, R]:
        """`reduce` the reports of primary shards: each box counts once, even if several ranks have it."""
        return self.reduce({name: report for name, report in reports.items() if name in self.primary}, merge)

    def reduce_statistic(
        self,
        tensors: Mapping[str, X],
        compute: Callable[[X], R],
        compute_part: Callable[[X], T],
        merge: Callable[[list[T]], R],
    ) -> dict[str, R]:
        """A statistic of each global tensor: computed by a rank that has all of it, else merged from its shards."""

        def merge_reports(reports: list[tuple[R | None, list[T]]]) -> R:
            result = reports[0][0]
            return merge([part for _, parts in reports for part in parts]) if result is None else result

        return self.reduce(
            {
                name: (compute(x), []) if name in self.whole else (None, [compute_part(x)])
                for name, x in tensors.items()
                if name in self.primary
            },
            merge_reports,
        )

    def reduce_arrays(self, arrays: Mapping[str, R], kind: ArrayReduction[R]) -> dict[str, R]:
        """Merge the arrays that primary shards report, cell by cell; by global name."""
        reports: dict[int, list[R]] = {}
        for name, array in arrays.items():
            if name in self.primary:
                reports.setdefault(self._index[self.global_names[name]], []).append(array)
        merged = self.collectives.reduce_arrays(reports, kind)
        return {self._names[index]: array for index, array in merged.items()}

    def tensors_where_all(self, flags: Mapping[str, bool]) -> set[str]:
        """Global names of the tensors whose shards are all flagged; shards without values do not count."""
        flagged = (name for name, flag in flags.items() if flag and name in self._nonempty)
        counts = self.collectives.count_keys(self._index[self.global_names[name]] for name in flagged)
        names = {self._names[index]: count for index, count in counts.items()}
        return {name for name, count in names.items() if count == self._num_nonempty[name]}

    def union(self, names: Iterable[str]) -> set[str]:
        """Global names of the tensors of which any rank names a shard."""
        keys = self.collectives.count_keys(self._index[self.global_names[name]] for name in names)
        return {self._names[key] for key in keys}

    def marginals(
        self, names: Iterable[str], local_sums: Callable[[str], tuple[Tensor, Tensor]]
    ) -> dict[str, Marginals]:
        """Sums by row and by column of global tensors, by global name.

        Args:
            names: local names.
            local_sums: returns the sums by row and by column of a local tensor, seen as a matrix, float64 on the CPU;
                called once for each name.
        """
        cells, values = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for name in (name for name in names if name in self.primary):
            shard, (row_sums, column_sums) = self.local_shards[name], local_sums(name)
            nrows, ncolumns = matrix_shape(shard.spec.global_shape)
            if nrows == 1:  # the total only
                indices, sums = np.zeros(1, np.int64), row_sums.sum().reshape(1)
            else:  # columns follow the rows of the global tensor
                rows = np.arange(shard.spec.first_row, shard.spec.first_row + matrix_shape(shard.sizes)[0])
                columns = torch.arange(ncolumns)[shard.spec.columns(shard.sizes)].numpy()
                indices, sums = np.concatenate([rows, nrows + columns]), torch.cat([row_sums, column_sums])
            cells.append((self._index[shard.spec.global_name] << CELL_BITS) + indices)
            values.append(sums.float().numpy())
        all_cells, (totals,) = self.collectives.reduce_cells(np.concatenate(cells), [np.concatenate(values)], [np.add])
        out = {}
        for key, indices, where in split_cells(all_cells):
            shape = self.shapes[self._names[key]]
            nrows, ncolumns = matrix_shape(shape)
            dense = torch.zeros(nrows + ncolumns, dtype=torch.float64)
            dense[torch.from_numpy(indices)] = torch.from_numpy(totals[where])
            by_row, by_column = (dense[:nrows], dense[nrows:]) if nrows > 1 else (dense[:0], dense[:0])
            out[self._names[key]] = Marginals(shape, float(dense[:nrows].sum()), by_row, by_column)
        return out


def _summarize(shards: Sequence[tuple[int, int, _ShardReport]]) -> _TensorSummary:
    """The summary of one tensor, from rank, position and report of each of its shards in rank order."""
    rank, position, first = shards[0]
    reports = [report for *_, report in shards]
    layouts = ((report.dtype, report.global_shape) for report in reports)
    other = next((layout for layout in layouts if layout != (first.dtype, first.global_shape)), None)
    conflict = "" if other is None else f"{other[0]} {list(other[1])}"
    num_nonempty = sum(math.prod(report.sizes) > 0 for report in reports)
    name, shape, dtype, role = first.global_name, first.global_shape, first.dtype, reports[-1].role
    return _TensorSummary((rank, position), name, shape, dtype, role, num_nonempty, conflict)


def count_mean_m2(tensor: Tensor) -> tuple[int, float, float]:
    """The number of values, their mean, and the sum of their squared distances from it, computed in float64."""
    values = tensor.detach().to(torch.float64)
    mean = float(values.mean()) if values.numel() else 0.0
    return values.numel(), mean, float((values - mean).square().sum())


def merge_mean_std(parts: Iterable[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean and standard deviation of all values, from `count_mean_m2` of parts (Chan, Golub and LeVeque, 1979)."""
    parts = list(parts)
    count = max(1, sum(numel for numel, *_ in parts))
    mean = math.fsum(numel * part_mean for numel, part_mean, _ in parts) / count
    m2 = math.fsum(part_m2 + numel * (part_mean - mean) ** 2 for numel, part_mean, part_m2 in parts)
    return mean, math.sqrt(m2 / count)


def recorder_values(
    global_tensors: GlobalTensors, recordings: Mapping[str, Tensor], state: FlatState
) -> dict[str, Tensor]:
    """A recorder's values of this rank's tensors, by local name, cut to the shard if they are of the whole tensor.

    A tensor's values are those of the parameter whose name its global name ends with.
    """
    values = {}
    for name, tensor in state.tensors.items():
        spec = global_tensors.local_shards[name].spec
        matches = (value for parameter, value in recordings.items() if matches_parameter(spec.global_name, parameter))
        value: Any = next(matches, None)
        if value is None:
            continue
        value = value.to_local() if hasattr(value, "to_local") else value
        if tuple(value.shape) == spec.global_shape:
            for axis, (start, size) in enumerate(zip(spec.offsets, tensor.shape, strict=True)):
                value = value.narrow(axis, start, size)
        if value.shape == tensor.shape:
            values[name] = value
    return values


def matches_parameter(global_name: str, parameter: str) -> bool:
    """True if a global tensor is, by its name, a parameter of a model."""
    return global_name == parameter or global_name.endswith((f".{parameter}", f"/{parameter}"))
