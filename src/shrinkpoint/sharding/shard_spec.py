"""Where the shards of tensors on several ranks lie in the global tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_SCALE_EXPONENT, Lattice, matrix_shape, scale_counts
from shrinkpoint.errors import StateError
from shrinkpoint.sharding.collectives import AllGather


@dataclass(frozen=True)
class ShardSpec:
    """Where a tensor of one rank lies: a box in a tensor of all ranks.

    Attributes:
        global_name: the name of the whole tensor, on every rank the same.
        global_shape: of the whole tensor.
        offsets: where this box begins in it; one number for each axis.
    """

    global_name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def global_numel(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.global_shape)

    @property
    def first_row(self) -> int:
        """Of the whole tensor, seen as a matrix; a vector is one row."""
        return self.offsets[0] if matrix_shape(self.global_shape)[0] > 1 else 0

    def columns(self, sizes: tuple[int, ...]) -> slice | Tensor:
        """Which of the whole matrix's columns a box of these sizes has."""
        if len(self.global_shape) < 2 or sizes[1:] == self.global_shape[1:]:
            start = 0 if len(self.global_shape) != 1 else self.offsets[0]
            return slice(start, start + matrix_shape(sizes)[1])
        places = torch.arange(math.prod(self.global_shape[1:])).reshape(self.global_shape[1:])
        for axis, (start, size) in enumerate(zip(self.offsets[1:], sizes[1:], strict=True)):
            places = places.narrow(axis, start, size)
        return places.reshape(-1)

    def slice_lattice(self, lattice: Lattice, sizes: tuple[int, ...]) -> Lattice:
        """The part of a whole tensor's lattice that a box of these sizes has.

        A box of one row has one column for all its places, as files have it: then its step is the geometric mean.
        """
        wanted, rows, columns = scale_counts(lattice.spacing, sizes), lattice.rows, lattice.columns
        if rows.numel() > 1:
            rows = rows[self.offsets[0] : self.offsets[0] + sizes[0]]
        if columns.numel() > 1:
            columns = columns[self.columns(sizes)]
        if columns.numel() > 1 and wanted[1] == 1:
            mean = round(float(columns.to(torch.float64).mean()))
            rows = (rows + mean).clamp(-MAX_SCALE_EXPONENT, MAX_SCALE_EXPONENT).to(torch.int16)
            columns = torch.zeros(1, dtype=torch.int16)
        return replace(lattice, rows=rows.contiguous(), columns=columns.contiguous())

    def dither_seed(self, global_seed: int, sizes: tuple[int, ...]) -> int:
        """Of the box's dither, from that of the whole tensor: the same dither, where the box is whole rows.

        A place's dither is a hash of its number times a constant, plus the seed: so numbers that begin later are a
        larger seed. Other boxes have numbers of their own, and dither that is as good.
        """
        if not global_seed:
            return 0
        strides = [math.prod(self.global_shape[axis + 1 :]) for axis in range(len(self.global_shape))]
        first = sum(start * stride for start, stride in zip(self.offsets, strides, strict=True))
        return (global_seed + first * _INDEX_MULTIPLIER) % (1 << 32) or 1

    def check(self, name: str, sizes: tuple[int, ...]) -> None:
        """Raises `StateError` where a box of these sizes is not within the whole."""
        fits = len(self.global_shape) == len(self.offsets) == len(sizes)
        if not fits or any(
            start < 0 or start + size > whole
            for start, size, whole in zip(self.offsets, sizes, self.global_shape, strict=True)
        ):
            found = f"{list(sizes)} at {list(self.offsets)} of {self.global_name!r}, which is {list(self.global_shape)}"
            raise StateError(name, found=found, expected="a box within the whole tensor", do="say where it begins")


_INDEX_MULTIPLIER = 0x9E3779B1  # of `codec.lattice.dither`


@dataclass(frozen=True)
class ShardLayout:
    """What a rank has of the tensors of all ranks that write a checkpoint together.

    Attributes:
        specs: by name of a tensor in the rank's state; what is missing here is a whole tensor, on this rank alone.
        all_gather: a collective of all these ranks: see `make_all_gather`.
    """

    specs: Mapping[str, ShardSpec] = field(repr=False)
    all_gather: AllGather = field(repr=False)
