"""Uniform grids whose steps vary by row and by column, and the points of a tensor on one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.tensors.dtypes import tensor_bytes

Spacing = Literal["linear", "relative", "log"]
"""What points stand for: multiples of a step; the same, times the square root of another tensor; powers of two."""
SPACINGS: tuple[Spacing, ...] = get_args(Spacing)

STEPS_PER_OCTAVE = 8
"""Steps are powers of two, of so many parts of an octave."""
MAX_SCALE_EXPONENT = 120 * STEPS_PER_OCTAVE
"""Of a row, a column and their sum: no step is denormal, or infinite."""
MAX_LATTICE_CODE = (1 << 15) - 2
"""Of a point: what is added to it for dither is exact in float32."""
ZERO_CODE = -127
"""The code that stands for zero where points stand for powers of two; the least of those that do is one above."""
_POWERS = tuple(
    float(torch.tensor(2.0 ** (k / STEPS_PER_OCTAVE), dtype=torch.float32)) for k in range(STEPS_PER_OCTAVE)
)
_DITHER_LEVELS = 256
_MASK_32_BITS = (1 << 32) - 1


@dataclass(frozen=True, eq=False)
class Lattice:
    """Where the points of one tensor lie, seen as a matrix: its first axis by all others, a vector as one row.

    With `s = 2^((rows[i] + columns[j]) / 8)`, the point `q` in row i and column j is

    * linear: `(q + u) s`;
    * relative: `(q + u) s sqrt(other[i, j])`, other being the tensor of second moments that belongs to it;
    * log: `s 2^(q step / 8)`, or 0 where q is `NOTHING`.

    u is 0, or with a seed a number in (-1/2, 1/2) that depends on it and on the place: subtractive dither. What is
    rounded to such points has an error that is evenly distributed whatever the values are, even if they came from
    another grid, and 0 on average.

    Attributes:
        rows, columns: int16, 1-d, on the CPU; as many as `spans` says.
        step: of the law "log", in eighths of an octave; else 1.
        seed: of the dither, below 2^32; 0: none.
    """

    spacing: Spacing
    rows: Tensor = field(repr=False)
    columns: Tensor = field(repr=False)
    step: int = 1
    seed: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lattice):
            return NotImplemented
        alike = (self.spacing, self.step, self.seed) == (other.spacing, other.step, other.seed)
        return alike and torch.equal(self.rows, other.rows) and torch.equal(self.columns, other.columns)

    __hash__ = None  # type: ignore[assignment]

    def exponents(self, device: torch.device | str = "cpu") -> Tensor:
        """Of `s`, in eighths of an octave; int32, of shape (rows, columns) or (rows, 1)."""
        rows, columns = (one.to(device, torch.int32) for one in (self.rows, self.columns))
        return rows[:, None] + columns[None, :]

    def scales(self, second_moments: Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
        """What a step is, float32; of the matrix's shape or one that is broadcast to it.

        Args:
            second_moments: second moments, where the law is "relative"; of the matrix's shape, float32.
        """
        rows, columns = (exp2_eighths(one.to(device, torch.int32)) for one in (self.rows, self.columns))
        out = rows[:, None] * columns[None, :]
        return out if second_moments is None else out * ieee_sqrt(second_moments)

    def dither(self, shape: tuple[int, int], device: torch.device | str = "cpu") -> Tensor | float:
        """u of every place, float32; 0 without a seed."""
        return dither(self.seed, shape, device) if self.seed else 0.0

    def to_native(self, shape: tuple[int, int]) -> _native.Lattice:
        """The same for the native core, and for matrices of this shape.

        Raises:
            ValueError: it is of another shape.
        """
        rows, columns = tensor_bytes(self.rows), tensor_bytes(self.columns)
        return _native.Lattice(rows, columns, *shape, powers=self.spacing == "log", step=self.step, seed=self.seed)


@dataclass(frozen=True)
class LatticeTensor:
    """One tensor as points of a lattice.

    Attributes:
        codes: int16, contiguous, of the tensor's shape.
        relative_to: where the law is "relative", the name of the tensor of the same state that it is relative to.
    """

    codes: Tensor = field(repr=False)
    lattice: Lattice
    relative_to: str = ""

    def cpu(self) -> LatticeTensor:
        """The same, where a store holds them."""
        return replace(self, codes=self.codes.cpu())

    def dequantize(self, dtype: torch.dtype, second_moments: Tensor | None = None) -> Tensor:
        """What a reader gets; of the shape of `codes`, on their device. Every step of it is one rounding of float32.

        Args:
            second_moments: the tensor named so.
        """
        if self.codes.device.type == "cpu":
            return self._dequantize_native(second_moments).to(dtype)
        lattice, codes = self.lattice, as_matrix(self.codes)
        if lattice.spacing == "log":
            made = exp2_eighths(lattice.exponents(codes.device) + lattice.step * codes.to(torch.int32))
            made = made.masked_fill(codes == ZERO_CODE, 0.0)
        else:
            beside = None if second_moments is None else as_matrix(second_moments).to(torch.float32)
            moved = codes.to(torch.float32) + lattice.dither(_shape(codes), codes.device)
            made = moved * lattice.scales(beside, codes.device)
        return made.reshape(self.codes.shape).to(dtype)

    def _dequantize_native(self, second_moments: Tensor | None) -> Tensor:
        lattice, made = self.lattice.to_native(_shape(as_matrix(self.codes))), _native.empty(4 * self.codes.numel())
        codes, squares = (
            tensor_bytes(self.codes),
            None if second_moments is None else tensor_bytes(second_moments.to(torch.float32)),
        )
        _native.lattice_values(lattice, codes, made, squares=squares, threads=torch.get_num_threads())
        return torch.from_numpy(made.view(np.float32)).reshape(self.codes.shape)


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor as lattices see it."""
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() >= 2 and tensor.numel() else tensor.reshape(1, -1)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of what `matrix` makes of a tensor."""
    count = math.prod(shape)
    return (shape[0], count // shape[0]) if len(shape) >= 2 and count else (1, count)


def scale_counts(spacing: Spacing, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns that a tensor's lattice tells apart: one column where there is one row, or another tensor."""
    rows, columns = matrix_shape(shape)
    return (rows, 1) if rows == 1 or spacing == "relative" else (rows, columns)


def exp2_eighths(exponents: Tensor) -> Tensor:
    """`2^(n / 8)` of int32 n: float32, of a table of eight and exact powers of two, so the same everywhere."""
    table = torch.tensor(_POWERS, dtype=torch.float32, device=exponents.device)
    octaves = (exponents >> 3).clamp_(-126, 127)
    return ((octaves + 127) << 23).view(torch.float32) * table[(exponents & (STEPS_PER_OCTAVE - 1)).long()]


def ieee_sqrt(tensor: Tensor) -> Tensor:
    """What steps of the law "relative" are multiplied by: float32, each rounded as IEEE 754 says.

    torch's own roots on the CPU are those of the library it was built with, which are a rounding off where that library
    finds other instructions: so by way of float64, in which such an error does not reach the rounding to float32.
    """
    return tensor.to(torch.float64).sqrt().to(torch.float32)


def dither(seed: int, shape: tuple[int, int], device: torch.device | str = "cpu") -> Tensor:
    """A number of (-1/2, 1/2) for every place, float32: odd multiples of 1/512, by a hash of the place's number."""
    count = shape[0] * shape[1]
    x = torch.arange(count, dtype=torch.int64, device=device).mul_(0x9E3779B1).add_(seed).bitwise_and_(_MASK_32_BITS)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x.bitwise_xor(x >> shift).mul_(factor).bitwise_and_(_MASK_32_BITS)
    x = x.bitwise_xor_(x >> 16) >> 24
    return x.to(torch.float32).add_(0.5).div_(_DITHER_LEVELS).sub_(0.5).reshape(shape)


def _shape(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.shape[1]
