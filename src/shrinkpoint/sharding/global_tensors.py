"""A global view of tensors that are sharded over ranks: their shapes, and statistics merged over all shards.

What crosses between ranks are sums by row and by column, counts and single numbers, never values. Every rank merges
the reports of all ranks in rank order, in float64 or in integers, so all of them get the same bits."""

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

from shrinkpoint.codec.lattice import matrix_shape
from shrinkpoint.errors import MismatchError
from shrinkpoint.sharding.collectives import gather_single
from shrinkpoint.sharding.shard_spec import ShardLayout, ShardSpec
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

T = TypeVar("T")


@dataclass(frozen=True)
class TensorShard:
    """A box of a whole tensor, on some rank.

    Attributes:
        spec: of which tensor, and where in it.
        sizes: of the box.
        dtype, role: of the tensor, as `TensorInfo` has them.
        is_primary: no rank before has the same box; only then it counts.
    """

    spec: ShardSpec
    sizes: tuple[int, ...]
    dtype: str
    role: Role
    is_primary: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Marginals:
    """Sums over a whole tensor, seen as a matrix.

    Attributes:
        shape: of the tensor.
        total: of all its values.
        rows, columns: of each row and each column, float64; empty of a matrix of one row, or where not asked for.
    """

    shape: tuple[int, ...]
    total: float
    row_sums: Tensor = field(repr=False)
    column_sums: Tensor = field(repr=False)

    @property
    def mean(self) -> float:
        return self.total / max(1, math.prod(self.shape))

    def mean_along(self, axis: int) -> Tensor:
        """Along an axis, as `Tensor.mean` counts them: 1 gives one of each row; float64."""
        rows, columns = matrix_shape(self.shape)
        if rows == 1:
            return torch.tensor([self.mean], dtype=torch.float64)
        return self.row_sums / max(1, columns) if axis == 1 else self.column_sums / rows


class GlobalTensors:
    """What all ranks have together; made by one exchange.

    Args:
        state: this rank's state.
        layout: where its tensors lie.

    Attributes:
        shards_by_rank: of every rank, in the order of its tensors.
        shapes: of every whole tensor, by its name; in the order in which ranks name them.

    Raises:
        MismatchError: two ranks give a tensor of one name different shapes or dtypes.
        StateError: a box is not within its tensor, on this rank.
    """

    def __init__(self, state: FlatState, layout: ShardLayout) -> None:
        self._all_gather = layout.all_gather
        self.names = [*state.infos]
        self.index = {name: i for i, name in enumerate(self.names)}
        mine = []
        for name, info in state.infos.items():
            sizes = tuple(state.tensors[name].shape)
            place = layout.specs.get(name) or ShardSpec(name, sizes, (0,) * len(sizes))
            place.check(name, sizes)
            mine.append((place.global_name, place.global_shape, place.offsets, sizes, info.dtype, info.role.value))
        token = uuid.uuid4().hex
        answers = self._all_gather((token, mine))
        self.rank, self.world_size = [told for told, _ in answers].index(token), len(answers)
        self.shards_by_rank = _build_shards([said for _, said in answers])
        self.local_shards = dict(zip(self.names, self.shards_by_rank[self.rank], strict=True))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._num_nonempty: Counter[str] = Counter()
        for piece in (one for pieces in self.shards_by_rank for one in pieces):
            self._register(piece)
        self._name_of_box = {
            (one.spec.global_name, one.spec.offsets, one.sizes): name for name, one in self.local_shards.items()
        }

    @classmethod
    def from_state(cls, state: FlatState) -> GlobalTensors:
        """The tensors of a single process: each is one shard, the whole tensor."""
        return cls(state, ShardLayout({}, gather_single))

    @property
    def is_unsharded(self) -> bool:
        """Whether this is the only rank, and all its tensors are whole ones."""
        return self.world_size == 1 and all(one.sizes == one.spec.global_shape for one in self.local_shards.values())

    def global_name(self, name: str) -> str:
        """The name of the whole tensor that a tensor of this rank is of."""
        return self.local_shards[name].spec.global_name

    def colocated_name(self, name: str, global_name: str) -> str | None:
        """This rank's tensor that is the same box of another whole tensor; None: it has none."""
        piece = self.local_shards[name]
        return self._name_of_box.get((global_name, piece.spec.offsets, piece.sizes))

    def is_colocated(self, name: str, other: str) -> bool:
        """Whether two of this rank's tensors are the same box of wholes of the same shape."""
        one, two = self.local_shards[name], self.local_shards[other]
        alike = (one.sizes, one.spec.global_shape, one.spec.offsets) == (
            two.sizes,
            two.spec.global_shape,
            two.spec.offsets,
        )
        return alike and one.spec.global_name != two.spec.global_name

    def is_primary(self, name: str) -> bool:
        """Whether this rank's tensor has values, and no rank before has the same ones."""
        return self.local_shards[name].is_primary and self.local_shards[name].numel > 0

    # what ranks tell each other; all of them call each of these, in the same order

    def all_gather(self, obj: T) -> list[T]:
        """What every rank says, by rank."""
        return self._all_gather(obj)

    def sum_over_ranks(self, *numbers: float) -> tuple[float, ...]:
        """Sums over ranks."""
        answers = self._all_gather(numbers)
        return tuple(math.fsum(column) for column in zip(*answers, strict=True))

    def gather_by_tensor(self, reports: Mapping[str, T]) -> dict[str, list[T]]:
        """What ranks say of their pieces, by whole tensor; a tensor of which nothing is said is missing."""
        answers = self._all_gather([(self.index[name], note) for name, note in reports.items()])
        out: dict[str, list[T]] = {}
        for pieces, said in zip(self.shards_by_rank, answers, strict=True):
            for index, note in said:
                out.setdefault(pieces[index].spec.global_name, []).append(note)
        return out

    def tensors_where_all(self, flags: Mapping[str, bool]) -> set[str]:
        """Names of those whole tensors of which every piece is flagged; pieces without values have no say."""
        said = self.gather_by_tensor({name: flag for name, flag in flags.items() if self.local_shards[name].numel})
        return {title for title, found in said.items() if all(found) and len(found) == self._num_nonempty[title]}

    def union(self, names: Iterable[str]) -> set[str]:
        """Names of the whole tensors of which some rank names a piece."""
        return set().union(*self._all_gather([self.global_name(name) for name in names]))

    def marginals(
        self, names: Iterable[str], matrices: Callable[[str], Tensor], *, columns: bool = True
    ) -> dict[str, Marginals]:
        """Sums by row and by column of whole tensors.

        Args:
            names: of this rank's tensors.
            matrices: gives what is summed, one matrix after the other.
            columns: False: only rows are wanted.
        """
        counted = [name for name in names if self.is_primary(name)]
        answers = self._all_gather(
            _pack_sums(
                [(self.index[name], _local_sums(matrices(name), self.local_shards[name], columns)) for name in counted]
            )
        )
        sums: dict[str, _MarginalSums] = {}
        for pieces, answer in zip(self.shards_by_rank, answers, strict=True):
            places, values = answer
            for index in places.tolist():
                piece = pieces[index]
                taken = sums.setdefault(piece.spec.global_name, _MarginalSums(piece.spec.global_shape, columns)).add(
                    piece, values
                )
                values = values[taken:]
        return {title: one.marginals() for title, one in sums.items()}

    def _register(self, shard: TensorShard) -> None:
        place = shard.spec
        self._num_nonempty[place.global_name] += shard.numel > 0
        shape, dtype = (
            self.shapes.setdefault(place.global_name, place.global_shape),
            self.dtypes.setdefault(place.global_name, shard.dtype),
        )
        if (shape, dtype) != (place.global_shape, shard.dtype):
            found, expected = (
                f"{dtype} {list(shape)} and {shard.dtype} {list(place.global_shape)}",
                "one shape and dtype",
            )
            raise MismatchError(place.global_name, found=found, expected=expected, do="name tensors alike on all ranks")


def _build_shards(answers: Iterable[Sequence[tuple[Any, ...]]]) -> list[list[TensorShard]]:
    seen: set[tuple[Any, ...]] = set()
    out: list[list[TensorShard]] = []
    for said in answers:
        out.append([])
        for whole, shape, offsets, sizes, dtype, role in said:
            box = (whole, offsets, sizes)
            out[-1].append(TensorShard(ShardSpec(whole, shape, offsets), sizes, dtype, Role(role), box not in seen))
            seen.add(box)
    return out


def _local_sums(x: Tensor, shard: TensorShard, columns: bool) -> Tensor:
    """What a piece adds: float32, rows first; one number of a tensor of one row."""
    wide = torch.float64
    if matrix_shape(shard.spec.global_shape)[0] == 1:
        return x.sum(dtype=wide).reshape(1).float().cpu()
    both = [x.sum(1, dtype=wide)] + ([x.sum(0, dtype=wide)] if columns else [])
    return torch.cat(both).float().cpu()


def _pack_sums(sums: Sequence[tuple[int, Tensor]]) -> tuple[Any, Any]:
    """Small to pickle: which of a rank's tensors, and all their numbers."""
    places = np.array([index for index, _ in sums], np.int32)
    return places, np.concatenate([np.empty(0, np.float32), *(x.numpy() for _, x in sums)])


class _MarginalSums:
    """One whole tensor's sums, while they grow."""

    def __init__(self, shape: tuple[int, ...], columns: bool) -> None:
        self._shape = shape
        rows, ncolumns = matrix_shape(shape)
        self._is_vector, self._with_columns = rows == 1, columns
        self._rows = torch.zeros(0 if self._is_vector else rows, dtype=torch.float64)
        self._columns = torch.zeros(0 if self._is_vector or not columns else ncolumns, dtype=torch.float64)
        self._total = 0.0

    def add(self, shard: TensorShard, values: Any) -> int:
        """Take what a piece adds from the front of `values`; how many numbers that was."""
        if self._is_vector:
            self._total += float(values[0])
            return 1
        nrows, ncolumns = matrix_shape(shard.sizes)
        taken = torch.from_numpy(values[: nrows + (ncolumns if self._with_columns else 0)]).double()
        first = shard.spec.first_row
        self._rows[first : first + nrows] += taken[:nrows]
        if self._with_columns:
            self._columns[shard.spec.columns(shard.sizes)] += taken[nrows:]
        return taken.numel()

    def marginals(self) -> Marginals:
        total = self._total if self._is_vector else float(self._rows.sum())
        return Marginals(self._shape, total, self._rows, self._columns)


def count_mean_m2(tensor: Tensor) -> tuple[int, float, float]:
    """How many values there are, their mean, and the sum of their squared distances to it; in float64."""
    wide = tensor.detach().to(torch.float64)
    mean = float(wide.mean()) if wide.numel() else 0.0
    return wide.numel(), mean, float((wide - mean).square().sum())


def merge_mean_std(parts: Iterable[tuple[int, float, float]]) -> tuple[float, float]:
    """Mean and standard deviation of all values, from `moments_of` of their parts (Chan, Golub and LeVeque, 1979)."""
    parts = list(parts)
    count = max(1, sum(part[0] for part in parts))
    mean = math.fsum(n * one for n, one, _ in parts) / count
    apart = math.fsum(squares + n * (one - mean) ** 2 for n, one, squares in parts)
    return mean, math.sqrt(apart / count)


def recorder_values(
    global_tensors: GlobalTensors, recordings: Mapping[str, Tensor], state: FlatState
) -> dict[str, Tensor]:
    """What a recorder has of parameters, by the names of this rank's tensors; its box where that is of whole ones.

    A parameter is that of a whole tensor whose name ends with the parameter's.
    """
    out = {}
    for name, x in state.tensors.items():
        place = global_tensors.local_shards[name].spec
        one = next((x for parameter, x in recordings.items() if matches_parameter(place.global_name, parameter)), None)
        one = getattr(one, "to_local", lambda one=one: one)()  # of a parameter in parts
        if one is not None and tuple(one.shape) == place.global_shape:
            for axis, (start, size) in enumerate(zip(place.offsets, x.shape, strict=True)):
                one = one.narrow(axis, start, size)
        if one is not None and one.shape == x.shape:
            out[name] = one
    return out


def matches_parameter(global_name: str, parameter: str) -> bool:
    """Whether a whole tensor is, by its name, a parameter of a model."""
    return global_name == parameter or global_name.endswith((f".{parameter}", f"/{parameter}"))
