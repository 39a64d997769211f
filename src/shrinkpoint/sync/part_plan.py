"""Which rank writes which pieces of a sharded model: every value once, the work balanced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

import torch

from shrinkpoint._native import xxh3_128
from shrinkpoint.errors import MismatchError
from shrinkpoint.sharding.global_tensors import check_disjoint
from shrinkpoint.sync.local_tensors import LocalTensor, Piece, Sizes
from shrinkpoint.sync.part_tree import TensorSpec, part_state
from shrinkpoint.sync.ranks import Ranks
from shrinkpoint.tensors.dtypes import dtype_name, tensor_bytes, torch_dtype
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import ITEMSIZE

_CUTS = (8, 4, 2)
"""Along each axis a large shard is cut at multiples of an eighth of the global tensor, a quarter or a half. So a rank
that follows with another sharding reads and holds little beyond its own shard, where it has one of 2, 4 or 8."""
_MIN_CUT_NUMEL = 1 << 19
"""Values that a piece has at least after a cut: each has entropy-coding tables, which take 3% of a delta then."""
_Box = tuple[Sizes, Sizes]
"""Offsets and sizes."""


class Row(NamedTuple):
    """The description of one tensor by a rank.

    Attributes:
        boxes: that the rank has.
        tied_to: the first name of the same memory, perhaps this one; None if the rank has no value of it.
    """

    name: str
    spec: TensorSpec
    boxes: tuple[_Box, ...]
    tied_to: str | None


@dataclass(frozen=True)
class PartPlan:
    """The tensors of all ranks, and the pieces that this rank writes.

    Attributes:
        tensors: by name, of all ranks.
        ties: names of tied tensors, each with the name whose pieces are written.
        own: boxes by name.
        replicated: names of tensors of which several ranks have the same box.
    """

    tensors: Mapping[str, TensorSpec] = field(repr=False)
    ties: Mapping[str, str] = field(repr=False)
    own: Mapping[str, Sequence[_Box]] = field(repr=False)
    replicated: frozenset[str] = field(repr=False)

    def state(self, local: Mapping[str, LocalTensor]) -> FlatState:
        """The state of this rank's part; its tensors are views of the model's memory."""
        pieces = {name: [_piece(local[name], *box) for box in boxes] for name, boxes in self.own.items()}
        return part_state(self.tensors, self.ties, pieces)


class PartPlanner:
    """Makes the plan of all ranks that publish, again when a rank's tensors have changed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._rows: list[Row] | None = None
        self._plan: PartPlan | None = None

    def plan(self, rows: list[Row]) -> PartPlan:
        """A collective operation.

        Raises:
            MismatchError: ranks have different tensors of one name, boxes that overlap, or lack values.
        """
        is_known = all(self._ranks.gather(lambda: rows == self._rows and self._plan is not None))
        if not is_known or self._plan is None:
            self._rows, self._plan = rows, None
            plan = make_plan(self._ranks.gather(lambda: rows), self._ranks.rank)
            self._plan = plan
        return self._plan

    def check_equal(self, plan: PartPlan, local: Mapping[str, LocalTensor]) -> None:
        """Compare the plain tensors that several ranks have, by digests; a collective operation.

        Raises:
            MismatchError: ranks have different values of one of them.
        """
        if not plan.replicated:
            return
        by_rank = self._ranks.gather(lambda: _digests(plan, local))
        first: dict[str, tuple[int, str]] = {}
        for rank, digests in enumerate(by_rank):
            for name, digest in digests.items():
                other, expected = first.setdefault(name, (rank, digest))
                if digest != expected:
                    found, do = f"other values on rank {rank} than on rank {other}", "give all ranks the same values"
                    expected = "plain tensors that are equal on all ranks"
                    raise MismatchError(f"model[{name!r}]", found=found, expected=expected, do=do)


def _digests(plan: PartPlan, local: Mapping[str, LocalTensor]) -> dict[str, str]:
    """Digests of the values that are published of plain tensors, by name."""
    digests: dict[str, str] = {}
    for name in plan.replicated & local.keys():
        if local[name].owner is None:
            values = local[name].tensor.to(torch_dtype(plan.tensors[name].dtype))
            digests[name] = xxh3_128(tensor_bytes(values))
    return digests


def describe(local: Mapping[str, LocalTensor], dtypes: Mapping[str, torch.dtype]) -> list[Row]:
    """The descriptions of this rank's tensors.

    Args:
        dtypes: in which they are published, by name.
    """
    first: dict[tuple[object, ...], str] = {}
    rows = []
    for name, tensor in local.items():
        memory, spec = tensor.memory, TensorSpec(dtype_name(dtypes[name]), tensor.shape)
        boxes = tuple((piece.offsets, piece.sizes) for piece in tensor.pieces if piece.tensor.numel())
        key = None if memory is None else (*memory, spec)
        rows.append(Row(name, spec, boxes, None if key is None else first.setdefault(key, name)))
    return rows


def make_plan(rows_by_rank: Sequence[Sequence[Row]], rank: int) -> PartPlan:
    """The same plan on every rank, and the pieces of this one."""
    tensors: dict[str, TensorSpec] = {}
    holders: dict[str, dict[_Box, list[int]]] = {}
    tied: dict[str, set[str | None]] = {}
    for number, rows in enumerate(rows_by_rank):
        for row in rows:
            if tensors.setdefault(row.name, row.spec) != row.spec:
                raise _mismatch(row.name, f"{row.spec} on rank {number} and {tensors[row.name]}", "one shape and dtype")
            tied.setdefault(row.name, set()).add(row.tied_to)
            for box in row.boxes:
                holders.setdefault(row.name, {}).setdefault(box, []).append(number)
    for name, spec in tensors.items():
        boxes = list(holders.get(name, {}))
        count, expected = sum(math.prod(sizes) for _, sizes in boxes), math.prod(spec.shape)
        if count < expected:
            raise _mismatch(name, f"{count} of {expected} values", "every value on a rank of the group")
        try:
            check_disjoint([offsets for offsets, _ in boxes], [sizes for _, sizes in boxes])
        except ValueError as error:
            raise _mismatch(name, str(error), "shards that are apart, or replicas of one") from error
    ties: dict[str, str] = {}
    for name, firsts in tied.items():  # tied on every rank that has values, to one and the same other name
        others = [first for first in firsts if first is not None]
        if len(others) == 1 and name not in others:
            ties[name] = others[0]
    own = _assign({name: boxes for name, boxes in holders.items() if name not in ties}, tensors, len(rows_by_rank))
    replicated = frozenset(name for name, boxes in holders.items() if any(len(ranks) > 1 for ranks in boxes.values()))
    return PartPlan(tensors, ties, own[rank], replicated)


def _mismatch(name: str, found: str, expected: str) -> MismatchError:
    do = "pass as ranks= the group that shards the model, and the same model on each of its ranks"
    return MismatchError(f"model[{name!r}]", found=found, expected=expected, do=do)


def _assign(
    holders: Mapping[str, Mapping[_Box, Sequence[int]]], tensors: Mapping[str, TensorSpec], count: int
) -> list[dict[str, list[_Box]]]:
    """The boxes that each rank writes; what several ranks have goes to the one that writes the least so far."""
    loads = [0] * count
    chosen: list[dict[str, list[_Box]]] = [{} for _ in range(count)]
    shared: list[tuple[int, str, _Box, Sequence[int]]] = []
    for name, boxes in holders.items():
        spec = tensors[name]
        for box, ranks in boxes.items():
            for piece in _cut(*box, spec.shape):
                shared.append((math.prod(piece[1]) * ITEMSIZE[spec.dtype], name, piece, ranks))
    for nbytes, name, piece, ranks in sorted(shared, key=lambda row: (len(row[3]) > 1, -row[0])):
        rank = min(ranks, key=lambda rank: loads[rank])
        loads[rank] += nbytes
        chosen[rank].setdefault(name, []).append(piece)
    return [{name: own[name] for name in tensors if name in own} for own in chosen]  # in the order of the model


def _cut(offsets: Sizes, sizes: Sizes, shape: Sizes) -> Iterator[_Box]:
    """A box in pieces, along the second axis first, since FSDP cuts the first one already."""
    numel, axes = math.prod(sizes), [[(start, size)] for start, size in zip(offsets, sizes, strict=True)]
    for axis in sorted(range(len(shape)), key=lambda axis: (axis != 1, axis)) if len(shape) > 1 else ():
        start, end = offsets[axis], offsets[axis] + sizes[axis]
        for step in (-(-shape[axis] // cuts) for cuts in _CUTS):
            edges = [start, *range((start // step + 1) * step, end, step), end]
            if numel // (len(edges) - 1) >= _MIN_CUT_NUMEL:
                numel //= len(edges) - 1
                axes[axis] = [(begin, stop - begin) for begin, stop in pairwise(edges)]
                break
    for box in product(*axes):
        yield tuple(start for start, _ in box), tuple(size for _, size in box)


def _piece(local: LocalTensor, offsets: Sizes, sizes: Sizes) -> Piece:
    source = next(piece for piece in local.pieces if piece.overlap(offsets, sizes) == (offsets, sizes))
    return Piece(offsets, source.view(offsets, sizes))
