"""Boxes of the shards of several ranks in the global tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_SCALE_EXPONENT, Lattice, matrix_shape, scale_counts
from shrinkpoint.errors import StateError
from shrinkpoint.sharding.collectives import Collectives

_INDEX_MULTIPLIER = 0x9E3779B1  # The factor of a value's index in `codec.lattice.dither`


@dataclass(frozen=True)
class ShardSpec:
    """Offset of a shard in its global tensor; with the shard's sizes, that is a box."""

    global_name: str  # the name of the global tensor, the same on every rank
    global_shape: tuple[int, ...]  # the shape of the global tensor
    offsets: tuple[int, ...]  # the index of the shard's first value, one number for each axis

    @property
    def global_numel(self) -> int:
        """The number of values of the global tensor."""
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
            found = f"{list(sizes)} at {list(self.offsets)} of {self.global_name!r}, which is {list(self.global_shape)}"
            raise StateError(name, found=found, expected="a box within the whole tensor", do="say where it begins")


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
