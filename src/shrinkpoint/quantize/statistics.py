"""Statistics of values, codes and second moments: sums, quantile sketches with a bounded relative error, entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import as_matrix, matrix_shape, slabs
from shrinkpoint.device import run_kernels
from shrinkpoint.device.reads import Reading, Reads
from shrinkpoint.errors import PolicyError, StateError
from shrinkpoint.tensors.dtypes import as_native_float

HistogramArray: TypeAlias = Tensor | npt.NDArray[Any]  # Values or counts of a histogram's cells: 1-d, on any device


def to_float64(values: HistogramArray) -> Tensor:
    """Convert to float64 on the CPU."""
    return torch.as_tensor(values).detach().to("cpu", torch.float64)


MIN_MAGNITUDE = 1e-30  # Smaller nonzero magnitudes are counted as this one
_MAX_FLOAT32 = float(torch.finfo(torch.float32).max)
_MIN_ALPHA, _MAX_ALPHA = 1e-4, 0.5
# Largest error of log |x| in float32, where its magnitude is at most 88.8: one unit in the last place of the logarithm
# (7.7e-6), half a unit in that of 1 / log(gamma) and of the product (5.3e-6 each).
_LOG_ERROR = 2e-5
_BLOCK_VALUES = {"cpu": 1 << 16}  # values per block; measured twice as fast as one large block
_MAX_BLOCK_VALUES = 1 << 24


@dataclass(frozen=True)
class LogHistogram:
    """A quantile sketch: the number of values in each bucket of a logarithmic histogram.

    The simplified parallel DDSketch of arXiv 2306.11800: a value x falls into bucket `ceil(log_gamma |x|)`, and buckets
    never collapse. Here they range from 1e-30 to the largest float32, so that a sketch is a dense vector of the same
    length for every tensor. The sum of sketches of the same `alpha` is the sketch of all their values, which must be
    finite.
    """

    alpha: float  # the largest relative error of a quantile whose magnitude is at least `MIN_MAGNITUDE`
    # int64, of shape (2 * max_bucket(alpha) + 1,), in the order of the values: negative buckets from the largest
    # magnitude down, zeros, positive buckets from the smallest magnitude up. The index of a value is its bucket id plus
    # `max_bucket(alpha)`.
    counts: Tensor = field(repr=False)

    @staticmethod
    def from_tensor(
        tensor: Tensor, alpha: float = 0.01, mask: Tensor | None = None, *, where: str = "values"
    ) -> LogHistogram:
        """Return the sketch of a tensor, on its device.

        Args:
            tensor: floats of any dtype and shape; float64 values must be finite in float32.
            alpha: relative error, 1e-4 to 0.5.
            mask: bool, of the same shape: count only where it is true. All of `tensor` must be finite nevertheless.
            where: the name of the tensor in errors.

        Raises:
            PolicyError: `alpha` is not between 1e-4 and 0.5.
            StateError: a value is not finite, or `tensor` holds no floats.
        """
        return LogHistogram.from_bucket_ids(LogHistogram.bucket_ids(tensor, alpha, where=where), alpha, mask)

    @staticmethod
    def bucket_ids(tensor: Tensor, alpha: float = 0.01, *, where: str = "values") -> Tensor:
        """Return the bucket of each value, which sketches under different masks can share.

        Returns:
            int16, or int32 if `alpha` is below about 0.005; contiguous, of the shape of `tensor`. 0 for zero, else 1 to
            `max_bucket(alpha)` with the sign of the value, so ids are in the order of the values.

        Raises:
            PolicyError: `alpha` is not between 1e-4 and 0.5.
            StateError: a value is not finite, or `tensor` holds no floats.
        """
        if not tensor.is_floating_point():
            do = "pass float16, bfloat16, float32 or float64"
            raise StateError(where, found=f"a tensor of {tensor.dtype}", expected="real floating-point values", do=do)
        fits_int16 = 2 * max_bucket(alpha) + 1 <= torch.iinfo(torch.int16).max
        dtype = torch.int16 if fits_int16 else torch.int32
        ids, flat = torch.empty(tensor.shape, dtype=dtype, device=tensor.device), tensor.detach().reshape(-1)
        step = _BLOCK_VALUES.get(tensor.device.type, _MAX_BLOCK_VALUES)
        for start in range(0, flat.numel(), step):
            block = flat[start : start + step]
            if tensor.dtype != torch.float64:  # float64 values may be too small for float32
                block = block.to(torch.float32)
            # Both limits are nan if any value is; this is faster than `isfinite`
            low, high = (float(limit) for limit in torch.aminmax(block))
            if not -_MAX_FLOAT32 <= low <= high <= _MAX_FLOAT32:
                found = "nan" if math.isnan(low) else f"{low if low < -_MAX_FLOAT32 else high}"
                do = "leave this tensor as it is, or find out where it diverged"
                raise StateError(where, found=f"the value {found}", expected="values that are finite in float32", do=do)
            logs = block.abs().clamp_(min=MIN_MAGNITUDE).log_().mul_(1 / _log_gamma(alpha)).ceil_()
            ids.view(-1)[start : start + step] = logs.sub_(_bucket_offset(alpha)).mul_(block.sign())
        return ids

    @staticmethod
    def from_bucket_ids(ids: Tensor, alpha: float = 0.01, mask: Tensor | None = None) -> LogHistogram:
        """Return the sketch of values whose bucket ids were computed with the same `alpha`.

        Args:
            ids: as from `bucket_ids`.
            mask: bool, of the same shape: count only where it is true.
        """
        if mask is not None and ids.is_cuda:  # many atomic additions to one counter would be slow
            ids, mask = ids[mask], None
        indices = ids.reshape(-1) + (max_bucket(alpha) + 1)
        if mask is not None:  # count masked values at index 0: three times as fast as gathering the others
            indices.mul_(mask.reshape(-1))
        return LogHistogram(alpha, torch.bincount(indices, minlength=2 * max_bucket(alpha) + 2)[1:].clone())

    def __add__(self, other: LogHistogram) -> LogHistogram:
        """Return the sketch of the values of both, on the device of the first.

        Raises:
            PolicyError: they differ in `alpha`.
        """
        if self.alpha != other.alpha:
            found = f"sketches of alpha {self.alpha} and {other.alpha}"
            raise PolicyError("sketch", found=found, expected="the same alpha", do="make both with one alpha")
        return LogHistogram(self.alpha, self.counts + other.counts.to(self.counts.device))

    @property
    def count(self) -> int:
        """Number of values, zeros included."""
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        return int(self.counts[self._max_bucket])

    def magnitudes(self) -> LogHistogram:
        """Return the sketch of the absolute values."""
        counts = self.counts.clone()
        counts[self._max_bucket + 1 :] += counts[: self._max_bucket].flip(0)
        counts[: self._max_bucket] = 0
        return LogHistogram(self.alpha, counts)

    def quantile(self, q: float) -> float:
        """Return the value of rank `floor(q * (count - 1))` in ascending order, signs included; ranks start at 0.

        This is the lower quantile of the DDSketch paper, and numpy's `method="lower"`.

        Raises:
            PolicyError: `q` is not between 0 and 1, or nothing was counted.
        """
        if not 0 <= q <= 1:
            raise PolicyError("q", found=f"{q}", expected="a share from 0 to 1", do="pass e.g. 0.99")
        return self.value_at_rank(math.floor(q * (self.count - 1)))

    def value_at_rank(self, rank: int) -> float:
        """Return the value of a rank from 0 to `count - 1`, with a relative error of at most `alpha`; zero is exact.

        For a magnitude below `MIN_MAGNITUDE`, `MIN_MAGNITUDE` within that error is returned.

        Raises:
            PolicyError: there is no such rank.
        """
        cumulative = self.counts.cumsum(0)
        if not 0 <= rank < int(cumulative[-1]):
            expected = f"one of {int(cumulative[-1])} values"
            raise PolicyError("rank", found=f"{rank}", expected=expected, do="pass a rank below count")
        position = torch.searchsorted(cumulative, rank, right=True)
        return float(self._bucket_values(position.cpu()))

    def buckets(self) -> tuple[Tensor, Tensor]:
        """Return the representative value and the count of each nonempty bucket, except for zeros.

        Returns:
            values: float64, on the CPU, ascending: `2 * gamma**i / (gamma + 1)` with the sign of the bucket.
            counts: int64, on the CPU, of the same shape.
        """
        counts = self.counts.cpu()
        positions = counts.nonzero().view(-1)
        positions = positions[positions != self._max_bucket]
        return self._bucket_values(positions), counts[positions]

    @property
    def _max_bucket(self) -> int:
        return self.counts.numel() // 2

    def _bucket_values(self, positions: Tensor) -> Tensor:
        """Return the representative values, float64, of the buckets at positions (int64) of `counts`."""
        ids, step = positions - self._max_bucket, _log_gamma(self.alpha)
        sizes = torch.exp((ids.abs() + _bucket_offset(self.alpha)) * torch.tensor(step, dtype=torch.float64))
        return sizes * (2 / (math.exp(step) + 1)) * ids.sign()


def max_bucket(alpha: float) -> int:
    """Return the largest bucket id, which is the number of buckets of either sign.

    Raises:
        PolicyError: `alpha` is not between 1e-4 and 0.5.
    """
    return math.ceil(math.log(_MAX_FLOAT32) / _log_gamma(alpha)) + 1 - _bucket_offset(alpha)


def _log_gamma(alpha: float) -> float:
    """Return log((1 + a) / (1 - a)) for an `a` slightly below `alpha`, which allows for errors of float32 logarithms.

    A value that lands in the bucket next to its own is still within `alpha` of that bucket's representative, if
    `(1 + a) * exp(_LOG_ERROR) <= 1 + alpha`.
    """
    if not _MIN_ALPHA <= alpha <= _MAX_ALPHA:
        expected = f"a relative error from {_MIN_ALPHA} to {_MAX_ALPHA}"
        raise PolicyError("alpha", found=f"{alpha}", expected=expected, do="pass e.g. 0.01")
    return 2 * math.atanh((1 + alpha) * math.exp(-_LOG_ERROR) - 1)


def _bucket_offset(alpha: float) -> int:
    """Return what is subtracted from `ceil(log_gamma |x|)`: the smallest id is 1, with a spare bucket for rounding."""
    return math.ceil(math.log(MIN_MAGNITUDE) / _log_gamma(alpha)) - 2


CODE_LIMIT = 4096  # Codes from -4096 to 4095 are counted separately; codes beyond are counted as the nearest of these


@dataclass(frozen=True)
class ValueSums:
    """The largest magnitude of a tensor (nan if a value is), the mean, and the sum of squared distances from it."""

    max_magnitude: float
    mean: float
    squared_deviations: float
    count: int  # of the values

    @property
    def std(self) -> float:
        """The population standard deviation."""
        return math.sqrt(self.squared_deviations / max(1, self.count))


@Reading
def value_sums(tensor: Tensor, threads: int | None = None) -> Reads[ValueSums]:
    """Compute the largest magnitude, mean and squared deviations of a floating-point tensor in one pass, in float64.

    Args:
        threads: native threads; None: as many as torch uses.
    """
    count = tensor.numel()
    if count and (parts := run_kernels(tensor.device, lambda kernels: kernels.sum_values(tensor))) is not None:
        table = yield parts
        distance, squares = table[:, 1:3].sum(0).tolist()
        largest = float(table[:, 0].max().to(torch.int32).view(torch.float32))
        mean, squares = float(table[0, 3]) + distance / count, squares - distance / count * distance
        return ValueSums(largest, mean, max(0.0, squares), count)
    values = as_native_float(tensor)
    if values.is_cpu:
        threads = threads or torch.get_num_threads()
        return ValueSums(*_native.value_sums(values, count, threads=threads), count)
    if not count:
        return ValueSums(0.0, 0.0, 0.0, 0)
    low, high = (float(end) for end in torch.aminmax(values))
    largest = math.nan if math.isnan(low) else max(-low, high)
    parts = [slab.of(values.reshape(1, -1)) for slab in slabs((1, count))]
    mean = torch.stack([part.sum(dtype=torch.float64) for part in parts]).sum() / count
    squares = torch.stack([(part.to(torch.float64) - mean).square().sum() for part in parts]).sum()
    return ValueSums(largest, float(mean), float(squares), count)


def count_codes(codes: Tensor) -> Tensor:
    """Return how often each code from `-CODE_LIMIT` to `CODE_LIMIT - 1` occurs: int64, 1-d."""
    indices = codes.reshape(-1).to(torch.int64).clamp(-CODE_LIMIT, CODE_LIMIT - 1) + CODE_LIMIT
    return torch.bincount(indices, minlength=2 * CODE_LIMIT)


def entropy_bits(counts: Tensor) -> float:
    """Return the bits of all values of a histogram, each coded by how often it occurs."""
    counts = counts.double()
    counts = counts[counts > 0]
    return float((counts * (counts.sum() / counts).log2()).sum())


def code_entropy(codes: Tensor) -> float:
    """Return the bits per code of codes from zero on, each coded by how often it occurs; 0 without codes."""
    return entropy_per_value(torch.bincount(codes.reshape(-1)))


def entropy_per_value(counts: Tensor) -> float:
    """Return the bits per value of a histogram; 0 for an empty one."""
    counts = counts.double()
    shares = counts[counts > 0] / counts.sum()
    return max(0.0, -float((shares * shares.log2()).sum()))


LOG_UNITS_PER_OCTAVE = 1 << 12  # The unit of logarithms is 1/4096 of an octave
_SMALLEST_BITS = (127 - 120) << 23  # of 2^-120, which smaller second moments count as
_INFINITY_BITS, MAGNITUDE_MASK = 0x7F800000, 0x7FFFFFFF  # of float32
_LOG2_COEFFICIENTS = (14376, -7833, 2691)  # of log2(1 + f) = f + f (1 - f) (c0 + c1 f + c2 f^2), times 2^15


class MatrixSums(NamedTuple):
    """Sums by row and by column of a matrix, float64 on the CPU; `columns` is empty if it was not asked for."""

    rows: Tensor
    columns: Tensor

    def scaled(self, factor: float) -> MatrixSums:
        return self if factor == 1 else MatrixSums(self.rows * factor, self.columns * factor)


class SecondMomentSums(NamedTuple):
    """Sums over a second moment v, seen as a matrix; a value is present if it, or its first moment, is not zero."""

    is_finite: bool  # of all second and first moments
    has_negative: bool  # some second moment is below zero
    logs: MatrixSums  # of log2 of the values that are present, in 1/4096 of an octave; below 2^-120 they count as that
    counts: MatrixSums  # of the values that are present
    values: MatrixSums  # of v

    def has_absent(self, numel: int) -> bool:
        """True if some of the `numel` values are not present."""
        return int(self.counts.rows.sum()) < numel


@Reading
def second_moment_sums(
    v: Tensor,
    m: Tensor | None = None,
    *,
    by_column: bool = True,
    squared: bool = False,
    threads: int | None = None,
) -> Reads[SecondMomentSums]:
    """Sum a second moment, its logarithms and what is present, by row and by column, in one pass.

    Args:
        v: float32 or bfloat16, of any shape.
        m: the first moment, of the same shape, float32 or bfloat16; None: unknown.
        by_column: also sum by column.
        squared: sum the squares of `v`, rounded to float32, as second moments.
        threads: native threads; None: as many as torch uses.
    """
    rows, columns = shape = matrix_shape(tuple(v.shape))
    has_columns = by_column or rows > 1
    sum_moments = methodcaller("sum_moments", v, m, shape, squared, has_columns)
    if v.numel() and (found := run_kernels(v.device, sum_moments)) is not None:
        table = yield found
        if not has_columns:
            table = torch.cat([table[:3].sum(1), table[3]])
        sizes = 3 * [rows] + 3 * [columns if has_columns else 0]
        *sums, flags = table.split_with_sizes([*sizes, table.numel() - sum(sizes)])
        pairs = zip(sums[:3], sums[3:], strict=True)
        logs, counts, values = (MatrixSums(row, column if by_column else column[:0]) for row, column in pairs)
        flags = flags.to(torch.int32)
        return SecondMomentSums(not bool((flags & 1).any()), bool((flags & 2).any()), logs, counts, values)
    if not v.is_cpu:
        return _second_moment_sums_torch(v, m, by_column, squared)
    v = v.to(torch.float32).square() if squared else v
    is_finite, has_negative, sums = _native.second_moment_sums(
        v,
        rows,
        columns,
        firsts=m,
        by_column=by_column,
        threads=threads or torch.get_num_threads(),
    )
    tensors = torch.from_numpy(sums).split_with_sizes(3 * [rows, columns if by_column else 0])
    logs, counts, values = (MatrixSums(*tensors[i : i + 2]) for i in (0, 2, 4))
    return SecondMomentSums(is_finite, has_negative, logs, counts, values)


def _second_moment_sums_torch(v: Tensor, m: Tensor | None, by_column: bool, squared: bool = False) -> SecondMomentSums:
    v, m, (rows, columns) = as_matrix(v), None if m is None else as_matrix(m), matrix_shape(tuple(v.shape))
    sums = torch.zeros(3 * (rows + columns * by_column) + 2, dtype=torch.float64, device=v.device)
    *sides, flags = sums.split([*3 * [rows], *3 * [columns * by_column], 2])
    for slab in slabs((rows, columns)):
        x = slab.of(v).to(torch.float32).square() if squared else slab.of(v)
        bits, magnitudes = float_bits(x), float_bits(x if m is None else slab.of(m)) & MAGNITUDE_MASK
        present = (bits > 0) | (magnitudes != 0)
        flags[0].add_((((bits & MAGNITUDE_MASK) >= _INFINITY_BITS) | (magnitudes >= _INFINITY_BITS)).any())
        flags[1].add_(((bits < 0) & (bits & MAGNITUDE_MASK != 0)).any())
        for index, matrix in enumerate((log2_units(bits) * present, present, x)):
            sides[index][slab.rows].add_(matrix.sum(1, dtype=torch.float64))
            if by_column:
                sides[index + 3][slab.columns].add_(matrix.sum(0, dtype=torch.float64))
    *sides, flags = sums.cpu().split([len(side) for side in (*sides, flags)])
    not_finite, has_negative = (flag > 0 for flag in flags.tolist())
    return SecondMomentSums(not not_finite, has_negative, *map(MatrixSums, sides[:3], sides[3:]))


def float_bits(tensor: Tensor) -> Tensor:
    """The bits of a matrix of float32, int32."""
    return as_matrix(tensor).to(torch.float32).contiguous().view(torch.int32)


def log2_units(bits: Tensor) -> Tensor:
    """log2 of positive floats, given their bits, in 1/4096 of an octave; within 1.2e-4 of an octave. int32."""
    bits = bits.clamp(min=_SMALLEST_BITS)
    f = bits >> 8 & 0x7FFF
    c0, c1, c2 = _LOG2_COEFFICIENTS
    slope = (((f * c2 >> 15) + c1) * f >> 15) + c0
    log = ((bits >> 23) - 127) * (1 << 15) + f + ((f * (0x8000 - f) >> 15) * slope >> 15)
    return log + 4 >> 3


def relative_squares(m: Tensor, v: Tensor) -> Tensor:
    """The squares of a first moment divided by the second one, 0 where that is not finite; a float32 matrix."""
    return as_matrix(m).to(torch.float32).square().div_(as_matrix(v)).nan_to_num_(0.0, 0.0, 0.0)


@Reading
def square_sums(tensor: Tensor) -> Reads[MatrixSums]:
    """Sums by row and by column of the squares of a tensor, rounded to float32, seen as a matrix."""
    return (yield from second_moment_sums.together(as_matrix(tensor), squared=True)).values
