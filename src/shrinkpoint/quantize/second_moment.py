"""Statistics of an optimizer's second moments, and their quantization to powers of two.

Both are computed where the tensors are: by the native core in host memory, by torch elsewhere. Logarithms are computed
with integers, so their sums, and the codes, are the same on all devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import (
    STEPS_PER_OCTAVE,
    ZERO_CODE,
    Lattice,
    LatticeTensor,
    as_matrix,
    exp2_eighths,
    matrix_shape,
)
from shrinkpoint.tensors.dtypes import tensor_bytes

LOG_UNITS_PER_OCTAVE = 1 << 12
"""The unit of logarithms is 1/4096 of an octave."""
_SMALLEST_BITS = (127 - 120) << 23  # of 2^-120, which smaller second moments count as
_INFINITY_BITS, _MAGNITUDE_MASK = 0x7F800000, 0x7FFFFFFF
_LOG2_COEFFICIENTS = (14376, -7833, 2691)  # of log2(1 + f) = f + f (1 - f) (c0 + c1 f + c2 f^2), times 2^15


@dataclass(frozen=True)
class MatrixSums:
    """Sums by row and by column of a matrix, float64 on the CPU; `columns` is empty if it was not asked for."""

    rows: Tensor = field(repr=False)
    columns: Tensor = field(repr=False)

    def scaled(self, factor: float) -> MatrixSums:
        return self if factor == 1 else MatrixSums(self.rows * factor, self.columns * factor)


@dataclass(frozen=True)
class SecondMomentSums:
    """Sums over a second moment v, seen as a matrix; a value is present if it, or its first moment, is not zero.

    Attributes:
        is_finite: of all second and first moments.
        has_negative: some second moment is below zero.
        logs: of log2 of the values that are present, in 1/4096 of an octave; below 2^-120 they count as that.
        counts: of the values that are present.
        values: of v.
    """

    is_finite: bool
    has_negative: bool
    logs: MatrixSums
    counts: MatrixSums
    values: MatrixSums

    def has_absent(self, numel: int) -> bool:
        """Whether some of the `numel` values are not present."""
        return int(self.counts.rows.sum()) < numel


def second_moment_sums(
    v: Tensor, m: Tensor | None = None, *, by_column: bool = True, threads: int | None = None
) -> SecondMomentSums:
    """Sum a second moment, its logarithms and what is present, by row and by column, in one pass.

    Args:
        v: float32 or bfloat16, of any shape.
        m: the first moment, of the same shape, float32 or bfloat16; None: unknown.
        by_column: also sum by column.
        threads: native threads; None: as many as torch uses.
    """
    if v.device.type != "cpu":
        return _second_moment_sums_torch(v, m, by_column)
    rows, columns = matrix_shape(tuple(v.shape))
    is_finite, has_negative, sums = _native.second_moment_sums(
        tensor_bytes(v),
        rows,
        columns,
        firsts=None if m is None else tensor_bytes(m),
        by_column=by_column,
        threads=threads or torch.get_num_threads(),
    )
    tensors = torch.split(torch.from_numpy(sums), 3 * [rows, columns if by_column else 0])
    logs, counts, values = (MatrixSums(*tensors[i : i + 2]) for i in (0, 2, 4))
    return SecondMomentSums(is_finite, has_negative, logs, counts, values)


def _second_moment_sums_torch(v: Tensor, m: Tensor | None, by_column: bool) -> SecondMomentSums:
    bits, magnitudes = _bits(v), _bits(v if m is None else m) & _MAGNITUDE_MASK
    present = (bits > 0) | (magnitudes != 0)
    is_finite = not bool((((bits & _MAGNITUDE_MASK) >= _INFINITY_BITS) | (magnitudes >= _INFINITY_BITS)).any())
    has_negative = bool(((bits < 0) & (bits & _MAGNITUDE_MASK != 0)).any())
    logs = _log2_units(bits) * present

    def sums(matrix: Tensor) -> MatrixSums:
        columns = matrix.sum(0, dtype=torch.float64).cpu() if by_column else torch.zeros(0, dtype=torch.float64)
        return MatrixSums(matrix.sum(1, dtype=torch.float64).cpu(), columns)

    return SecondMomentSums(is_finite, has_negative, sums(logs), sums(present), sums(as_matrix(v)))


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a matrix of float32, int32."""
    return as_matrix(tensor).to(torch.float32).contiguous().view(torch.int32)


def _log2_units(bits: Tensor) -> Tensor:
    """log2 of positive floats, given their bits, in 1/4096 of an octave; within 1.2e-4 of an octave. int32."""
    bits = bits.clamp(min=_SMALLEST_BITS)
    f = bits >> 8 & 0x7FFF
    c0, c1, c2 = _LOG2_COEFFICIENTS
    slope = (((f * c2 >> 15) + c1) * f >> 15) + c0
    log = ((bits >> 23) - 127) * (1 << 15) + f + ((f * (0x8000 - f) >> 15) * slope >> 15)
    return log + 4 >> 3


def quantize_second_moment(
    v: Tensor, m: Tensor | None, lattice: Lattice, dead_zone: float, threads: int | None = None
) -> tuple[LatticeTensor, Tensor | None]:
    """Quantize a finite second moment to powers of two; where it is not present it stays zero.

    Args:
        v: float32 or bfloat16, from zero on.
        m: the first moment, of the same shape: what is not zero there counts as present in `v`. None: unknown.
        lattice: of spacing "log".
        dead_zone: half the width of what becomes the mean of row and column, in steps.
        threads: native threads; None: as many as torch uses.

    Returns:
        The quantized tensor, and the sums by row (float64) of `m^2 / v'` where that is finite, v' being the decoded
        second moment; None without `m`.
    """
    if v.device.type != "cpu":
        return _quantize_torch(v, m, lattice, dead_zone)
    codes = _native.empty(v.numel())
    sums = _native.quantize_second_moments(
        tensor_bytes(v),
        *matrix_shape(tuple(v.shape)),
        tensor_bytes(lattice.rows),
        tensor_bytes(lattice.columns),
        codes,
        firsts=None if m is None else tensor_bytes(m),
        step=lattice.step,
        dead_zone=dead_zone,
        threads=threads or torch.get_num_threads(),
    )
    quantized = LatticeTensor(torch.from_numpy(codes).view(torch.int8).reshape(v.shape), lattice)
    return quantized, None if m is None else torch.from_numpy(sums)


def _quantize_torch(
    v: Tensor, m: Tensor | None, lattice: Lattice, dead_zone: float
) -> tuple[LatticeTensor, Tensor | None]:
    bits = _bits(v)
    present = (bits > 0) | (_bits(v if m is None else m) & _MAGNITUDE_MASK != 0)
    exponents = lattice.exponents(v.device)
    distances = _log2_units(bits) * STEPS_PER_OCTAVE - exponents * LOG_UNITS_PER_OCTAVE
    # Times a float32 reciprocal, as the native core does, so that the same values are rounded up.
    scale = torch.tensor(1.0, device=v.device) / (lattice.step * LOG_UNITS_PER_OCTAVE)
    positions = distances.to(torch.float32) * scale
    codes = positions.clamp(-200, 200).round().clamp(ZERO_CODE + 1, -ZERO_CODE)
    codes = codes.masked_fill(positions.abs() < dead_zone, 0).to(torch.int32)
    decoded = exp2_eighths(exponents + lattice.step * codes).masked_fill(~present, 0)
    codes = codes.masked_fill(~present, ZERO_CODE).to(torch.int8).reshape(v.shape)
    sums = None if m is None else relative_squares(m, decoded).sum(1, dtype=torch.float64).cpu()
    return LatticeTensor(codes, lattice), sums


def relative_squares(m: Tensor, v: Tensor) -> Tensor:
    """The squares of a first moment divided by the second one, 0 where that is not finite; a float32 matrix."""
    return as_matrix(m).to(torch.float32).square().div_(as_matrix(v)).nan_to_num_(0.0, 0.0, 0.0)


def square_sums(tensor: Tensor) -> MatrixSums:
    """Sums by row and by column of the squares of a tensor, rounded to float32, seen as a matrix."""
    squares = as_matrix(tensor).to(torch.float32).square()
    return second_moment_sums(squares).values
