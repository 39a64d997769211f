"""Quantization lattices, grids whose steps vary by row and column, and tensors quantized on them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.device import run_kernels

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

Spacing = Literal["linear", "relative", "log"]
"""The spacing of the points of a lattice.

"linear": multiples of a step; "relative": multiples of a step times the square root of a second moment; "log": powers
of two, and zero."""
SPACINGS: tuple[Spacing, ...] = get_args(Spacing)

STEPS_PER_OCTAVE = 8  # Scales are powers of two in steps of 1/8 octave
MAX_SCALE_EXPONENT = 120 * STEPS_PER_OCTAVE
"""Largest absolute exponent of a row, of a column and of their sum: no scale is denormal or infinite."""
MAX_LATTICE_CODE = (1 << 15) - 2  # Largest absolute code; up to it, adding dither is exact in float32
MIN_GAIN, MAX_GAIN = 1 / 16, 16.0
"""The least and the largest gain of a tensor."""
ZERO_CODE = -127  # With spacing "log", the code that stands for zero; the smallest code of a power of two is one above
_POWERS = tuple(float(np.float32(2.0 ** (k / STEPS_PER_OCTAVE))) for k in range(STEPS_PER_OCTAVE))
_DITHER_LEVELS = 256
_DECODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that kernels decode to
_HEAD_CODES = 1 << 12  # codes that are compared first: those of a tensor that trains differ there already
_MASK_32_BITS = (1 << 32) - 1
_INDEX_FACTOR = 0x9E3779B1
SLAB_VALUES = 1 << 22
"""The most values that torch operations on a device take at once; temporary tensors take up to 64 bytes for each."""
_NATIVE_FORM = "_native_form"  # the attribute that caches the native core's form of a lattice
_MIN_VALUES_PER_EXPONENT = 32  # of a tensor whose lattice is cached: the form takes ten bytes an exponent
_MAX_SMALL_EXPONENTS = 256  # of a lattice that is cached in any case: it takes little more than its Python objects


@dataclass(frozen=True, eq=False)
class Lattice:
    """The quantization lattice of one tensor, viewed as a matrix: its first axes by all others, a vector as one row.

    Mostly it is the first axis alone. Stacked matrices (experts, out, in) have two: the number of rows says how many.

    With `s = 2^((rows[i] + columns[j]) / 8)`, the code `q` in row i and column j stands for

    * linear: `(q + u) s`;
    * relative: `(q + u) s sqrt(v[i, j])`, where v is the second moment that belongs to the tensor;
    * log: `s 2^(q step / 8)`, or 0 where q is `ZERO_CODE`.

    u is 0, or with a seed a pseudo-random number in (-1/2, 1/2) that depends on the seed and the index (subtractive
    dither). The rounding error is then uniformly distributed with mean 0, whatever the values are, even if they come
    from another lattice.
    """

    spacing: Spacing  # "linear", "relative" or "log"
    # `rows`, `columns`: int16, 1-d, on the CPU: exponents in eighths of an octave, as many as the matrix has rows and
    # columns; one column for a single row or spacing "relative".
    rows: Tensor = field(repr=False)
    columns: Tensor = field(repr=False)
    step: int = 1  # with spacing "log", the distance of two codes in eighths of an octave; else 1
    seed: int = 0  # seed of the dither, below 2^32; 0: no dither

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lattice):
            return NotImplemented
        return self is other or (self.seed == other.seed and self.has_equal_steps(other))

    __hash__ = None  # type: ignore[assignment]

    def has_equal_steps(self, other: Lattice) -> bool:
        """True if two lattices differ in nothing but their seeds."""
        if (self.spacing, self.step) != (other.spacing, other.step):
            return False
        return torch.equal(self.rows, other.rows) and torch.equal(self.columns, other.columns)

    def is_like(self, other: Lattice) -> bool:
        """True if two lattices differ in nothing but their exponents and seeds."""
        same_counts = self.rows.shape == other.rows.shape and self.columns.shape == other.columns.shape
        return same_counts and (self.spacing, self.step) == (other.spacing, other.step)

    def rounded(self, parent: Lattice | None, tolerance: tuple[int, int]) -> Lattice:
        """Return this lattice with exponents that take fewer bits, each within the tolerance of its own.

        They are multiples of twice the tolerance and 1; or differ by such from those of a parent of the same kind, so
        that most of them are the parent's.

        Args:
            tolerance: of rows and of columns, in eighths of an octave.
        """
        known = parent if parent is not None and self.is_like(parent) else None
        centers = (None, None) if known is None else (known.rows, known.columns)
        rows, columns = torch.empty_like(self.rows), torch.empty_like(self.columns)
        same_rows = _native.round_exponents(self.rows, centers[0], tolerance[0], rows)
        same_columns = _native.round_exponents(self.columns, centers[1], tolerance[1], columns)
        if known is not None and same_rows and same_columns and known.seed == self.seed:
            return known  # which has its native form already
        return Lattice(self.spacing, rows, columns, self.step, self.seed)

    def exponents(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the exponents of `s` in eighths of an octave: int32, of shape (rows, columns) or (rows, 1)."""
        rows, columns = (exponents.to(device, torch.int32) for exponents in (self.rows, self.columns))
        return rows[:, None] + columns[None, :]

    def scales(self, second_moments: Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the distance of neighbouring points, float32; broadcastable to the matrix's shape.

        Args:
            second_moments: float32, of the matrix's shape; needed with spacing "relative".
        """
        rows, columns = (exp2_eighths(exponents.to(device, torch.int32)) for exponents in (self.rows, self.columns))
        out = rows[:, None] * columns[None, :]
        if second_moments is None:
            return out
        # torch's float32 roots on the CPU depend on the library and instructions, and can be off by a rounding.
        # Computed in float64, such an error does not reach the rounding to float32.
        return out * second_moments.to(torch.float64).sqrt().to(torch.float32)

    def row_steps(self, shape: tuple[int, ...], rows: slice, device: torch.device | str = "cpu") -> Tensor:
        """Return the distance of neighbouring points in some rows of a tensor viewed as a matrix, float32.

        Args:
            shape: of the tensor, which the lattice may fold otherwise.
            rows: of that matrix.
        """
        if self.rows.numel() == matrix_shape(shape)[0]:
            return replace(self, rows=self.rows[rows]).scales(device=device)
        scales = self.scales(device=device).expand(self.matrix_shape(shape))
        return as_matrix(scales.reshape(shape))[rows]

    def dither(self, shape: tuple[int, int], device: torch.device | str = "cpu", first: int = 0) -> Tensor | float:
        """Return the dither u of every element from index `first` on, float32; 0.0 without a seed."""
        return dither(self.seed, shape, device, first) if self.seed else 0.0

    def to_native(self, shape: tuple[int, ...]) -> _native.Lattice:
        """Return the native core's form of this lattice, for tensors of `shape`.

        It is made once, unless it would take more memory than the codes of a tensor with few values.

        Raises:
            ValueError: the numbers of rows or columns do not fit the shape.
        """
        cached: tuple[tuple[int, ...], _native.Lattice] | None = self.__dict__.get(_NATIVE_FORM)
        if cached is not None and cached[0] == shape:
            return cached[1]
        matrix = self.matrix_shape(shape)
        form = _native.Lattice(
            self.rows, self.columns, *matrix, powers=self.spacing == "log", step=self.step, seed=self.seed
        )
        limit = max(_MAX_SMALL_EXPONENTS, matrix[0] * matrix[1] // _MIN_VALUES_PER_EXPONENT)
        if self.rows.numel() + self.columns.numel() <= limit:
            self.__dict__[_NATIVE_FORM] = shape, form
        return form

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the matrix that a tensor of this shape is viewed as.

        Raises:
            ValueError: a tensor of this shape has no such number of rows.
        """
        rows = self.rows.numel()
        if len(shape) == 2 and rows == shape[0]:
            return rows, shape[1]
        if rows not in row_counts(shape):
            raise ValueError(f"a lattice of {rows} rows for a tensor of shape {list(shape)}")
        return rows, math.prod(shape) // rows

    def has_counts_for(self, shape: tuple[int, ...]) -> bool:
        """True if this lattice has as many exponents as a tensor of this shape needs."""
        rows = self.rows.numel()
        return rows in row_counts(shape) and self.columns.numel() == scale_counts(self.spacing, shape, rows)[1]

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != _NATIVE_FORM}


@dataclass(frozen=True)
class LatticeTensor:
    """A tensor quantized on a lattice."""

    # int8 or int16, contiguous, of the tensor's shape; int8 where all codes fit, wherever many are held.
    codes: Tensor = field(repr=False)
    lattice: Lattice  # the lattice that the codes index
    relative_to: str = ""  # with spacing "relative", the name of the second moment in the same state; else ""
    # The codes of the checkpoint with which this lattice began in its chain, of the shape of `codes`, int8 or int16, on
    # the CPU; None: these codes themselves.
    origin: Tensor | None = field(default=None, repr=False)
    # How many times as far from the points of `origin` as the points of `codes` the values are; a float32 from
    # `MIN_GAIN` to `MAX_GAIN`. Other than 1 with an origin and spacing "linear" only.
    gain: float = 1.0

    @property
    def first_codes(self) -> Tensor:
        """The codes with which this lattice began in its chain."""
        return self.codes if self.origin is None else self.origin

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, and of those of the origin."""
        return self.codes.nbytes + (0 if self.origin is None else self.origin.nbytes)

    def points(self) -> LatticeTensor:
        """Return the same codes without a gain: the values are the lattice's points."""
        return self if self.origin is None else LatticeTensor(self.codes, self.lattice, self.relative_to)

    def has_origin_of(self, parent: object) -> bool:
        """True if this tensor has an origin, and another one is on the same lattice and has the same origin."""
        if self.origin is None or not isinstance(parent, LatticeTensor) or parent.lattice != self.lattice:
            return False
        return equal_codes(parent.first_codes, self.origin)

    def to_native(self) -> _native.Lattice:
        """Return the native core's form of the lattice, by which these codes are decoded."""
        form = self.lattice.to_native(tuple(self.codes.shape))
        return form if self.origin is None or self.gain == 1 else form.with_gain(code_bytes(self.origin), self.gain)

    def native_values(self) -> tuple[_native.Lattice, Tensor]:
        """Return the values as the native core takes them: a lattice, and codes on it."""
        return self.to_native(), self.codes

    def cpu(self) -> LatticeTensor:
        """Return the same tensor in CPU memory."""
        return self if self.codes.is_cpu else replace(self, codes=self.codes.cpu())

    def narrow(self) -> LatticeTensor:
        """Return the same tensor with codes of one byte, if all of them fit."""
        codes = narrow_codes(self.codes)
        return self if codes is self.codes else replace(self, codes=codes)

    def has_equal_codes(self, other: LatticeTensor) -> bool:
        """True if the codes, of either width, the lattices, the gains and the origins are equal."""
        if self.lattice != other.lattice or self.gain != other.gain or not equal_codes(self.codes, other.codes):
            return False
        return equal_codes(self.first_codes, other.first_codes)

    def dequantize(self, dtype: torch.dtype, second_moments: Tensor | None = None) -> Tensor:
        """Return the values that a reader gets; of the shape and on the device of `codes`.

        Every operation is rounded once to float32, so the values are the same on all machines.

        Args:
            dtype: of the result.
            second_moments: the tensor named by `relative_to`, of the same shape.
        """
        excess = 0.0 if self.gain == 1 else float(np.float32(self.gain) - np.float32(1))
        if self.lattice.spacing == "linear" and self.codes.numel() and dtype in _DECODED_DTYPES:
            arguments = self.codes, self.lattice, dtype, self.origin if excess else None, excess
            decoded: Tensor | None = run_kernels(self.codes.device, operator.methodcaller("decode_points", *arguments))
            if decoded is not None:
                return decoded
        if self.codes.is_cpu:
            out = _native.empty(4 * self.codes.numel())
            stored = None if second_moments is None else second_moments.to(torch.float32)
            _native.lattice_values(*self.native_values(), out, squares=stored, threads=torch.get_num_threads())
            return torch.from_numpy(out.view(np.float32)).reshape(self.codes.shape).to(dtype)
        decoded = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        shape = self.lattice.matrix_shape(tuple(self.codes.shape))
        for slab in slabs(shape):
            slab.of(decoded.view(shape)).copy_(self.slab_values(slab, second_moments))
        return decoded

    def slab_values(self, slab: Slab, second_moments: Tensor | None = None) -> Tensor:
        """Return the values of some codes by torch operations, float32, of the slab's shape; as `dequantize`."""
        lattice, shape = slab.of_lattice(self.lattice), self.lattice.matrix_shape(tuple(self.codes.shape))
        codes = slab.of(self.codes.reshape(shape))
        if lattice.spacing == "log":
            values = exp2_eighths(lattice.exponents(codes.device) + lattice.step * codes.to(torch.int32))
            return values.masked_fill(codes == ZERO_CODE, 0.0)
        squares = None if second_moments is None else slab.of(second_moments.reshape(shape)).to(torch.float32)
        dithered = codes.to(torch.float32) + lattice.dither((codes.shape[0], codes.shape[1]), codes.device, slab.first)
        if self.origin is not None and self.gain != 1:
            moved = codes.to(torch.float32) - slab.of(self.origin.reshape(shape)).to(codes.device, torch.float32)
            dithered = dithered + moved * float(np.float32(self.gain) - np.float32(1))
        return dithered * lattice.scales(squares, codes.device)

    def starts_with(self, values: Tensor, count: int) -> bool:
        """True if the first `count` values are these bits.

        Args:
            values: float32, contiguous, of the shape of `codes`, on the CPU. Neither spacing is "relative".
        """
        return _native.lattice_starts_with(*self.native_values(), values, count)

    def runs(self, rows: slice) -> tuple[_native.LatticeRun, int]:
        """Return some rows of the tensor viewed as a matrix as the native core takes them, and their length."""
        height, width = matrix_shape(tuple(self.codes.shape))
        indices = range(height)[rows]
        return (*self.native_values(), indices.start * width, width, indices.step * width, len(indices)), width

    def dequantize_rows(self, rows: slice, dtype: torch.dtype, second_moments: Tensor | None = None) -> Tensor:
        """Return the values of some rows of the tensor viewed as a matrix; codes are on the CPU.

        Args:
            rows: of any stride above 0.
            dtype: of the result.
            second_moments: the same rows of the tensor named by `relative_to`.
        """
        (lattice, codes, first, length, stride, count), width = self.runs(rows)
        out = torch.empty((count, width), dtype=torch.float32, device="cpu")
        if out.numel():
            squares = None if second_moments is None else second_moments.to(torch.float32)
            _native.lattice_run_values(
                lattice, codes, out, squares=squares, first=first, length=length, stride=stride, count=count
            )
        return out.to(dtype)


def all_exponents(lattices: Sequence[Lattice]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the exponents of all lattices, each one's rows and then its columns."""
    sides = [side.numpy() for lattice in lattices for side in (lattice.rows, lattice.columns)]
    return np.concatenate(sides).astype(np.int32)


def code_bytes(codes: Tensor) -> Bytes:
    """Return codes or exponents as bytes, in row-major order; shares memory if they are contiguous and on the CPU."""
    return np.ascontiguousarray((codes if codes.is_cpu else codes.cpu()).numpy()).reshape(-1).view(np.uint8)


def narrow_codes(codes: Tensor) -> Tensor:
    """Codes in one byte each, if all of them fit; else the same tensor."""
    if codes.dtype == torch.int8:
        return codes
    low, high = torch.aminmax(codes) if codes.numel() else (0, 0)
    limits = torch.iinfo(torch.int8)
    return codes.to(torch.int8) if limits.min <= int(low) and int(high) <= limits.max else codes


def equal_codes(codes: Tensor, others: Tensor) -> bool:
    """True if two tensors of codes on the CPU, of either width, are equal."""
    if codes is others or codes.shape != others.shape:
        return codes is others
    if codes.dtype != others.dtype:
        codes, others = codes.to(torch.int16), others.to(torch.int16)
    if codes.numel() > _HEAD_CODES:  # a difference is mostly found before torch wakes its threads
        head, other_head = codes.view(-1)[:_HEAD_CODES], others.view(-1)[:_HEAD_CODES]
        return torch.equal(head, other_head) and torch.equal(codes, others)
    return torch.equal(codes, others)


def as_matrix(tensor: Tensor) -> Tensor:
    """Reshape a tensor to the matrix that lattices mostly use: the first axis by all others, a vector as one row."""
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() >= 2 and tensor.numel() else tensor.reshape(1, -1)


@lru_cache
def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of `as_matrix` of a tensor of this shape."""
    count = math.prod(shape)
    return (shape[0], count // shape[0]) if len(shape) >= 2 and count else (1, count)


@lru_cache
def row_counts(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many rows the matrices have that a tensor of this shape may be viewed as: by one leading axis, by two,
    and so on, without the last one."""
    if len(shape) < 2 or not math.prod(shape):
        return (1,)
    return (*accumulate(shape[:-1], operator.mul),)


@lru_cache
def scale_counts(spacing: Spacing, shape: tuple[int, ...], rows: int | None = None) -> tuple[int, int]:
    """Return how many row and column exponents a lattice has; one column for a single row or spacing "relative".

    Args:
        rows: of the matrix; None: those of the first axis.
    """
    rows = matrix_shape(shape)[0] if rows is None else rows
    return (rows, 1) if rows == 1 or spacing == "relative" else (rows, math.prod(shape) // rows)


def exp2_eighths(exponents: Tensor) -> Tensor:
    """Return `2^(n / 8)` of int32 n as float32; a table of eight times exact powers of two, the same everywhere."""
    table = torch.tensor(_POWERS, dtype=torch.float32, device=exponents.device)
    octaves = (exponents >> 3).clamp_(-126, 127)
    return ((octaves + 127) << 23).view(torch.float32) * table[(exponents & (STEPS_PER_OCTAVE - 1)).long()]


def dither(seed: int, shape: tuple[int, int], device: torch.device | str = "cpu", first: int = 0) -> Tensor:
    """Return pseudo-random odd multiples of 1/512 in (-1/2, 1/2), float32: a hash of the seed and each index.

    Args:
        first: the first index.
    """
    if (count := shape[0] * shape[1]) > SLAB_VALUES:
        out = torch.empty(count, dtype=torch.float32, device=device)
        for index, part in enumerate(out.split(SLAB_VALUES)):
            part.copy_(dither(seed, (1, part.numel()), device, first + index * SLAB_VALUES)[0])
        return out.view(shape)
    # int32 wraps as unsigned words of 32 bits do; a shift must not bring down the sign.
    start = (first * _INDEX_FACTOR + seed) & _MASK_32_BITS
    hashes = torch.arange(count, dtype=torch.int32, device=device)
    hashes.mul_(_signed(_INDEX_FACTOR)).add_(_signed(start))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        hashes.bitwise_xor_((hashes >> shift).bitwise_and_(_MASK_32_BITS >> shift)).mul_(_signed(factor))
    hashes.bitwise_right_shift_(24).bitwise_and_(0xFF)  # the last shift of the hash changes lower bits alone
    return hashes.to(torch.float32).add_(0.5).div_(_DITHER_LEVELS).sub_(0.5).reshape(shape)


def _signed(word: int) -> int:
    return word - (word >> 31 << 32)


class Slab(NamedTuple):
    """Rows of a matrix, or a part of one row: values that torch operations on a device take at once."""

    rows: slice
    columns: slice
    first: int  # the index of the first value

    def of(self, matrix: Tensor) -> Tensor:
        return matrix[self.rows, self.columns]

    def of_lattice(self, lattice: Lattice) -> Lattice:
        """The lattice of these values, whose dither begins at `first`."""
        columns = lattice.columns[self.columns] if lattice.columns.numel() > 1 else lattice.columns
        return replace(lattice, rows=lattice.rows[self.rows], columns=columns)


def slabs(shape: tuple[int, int], size: int | None = None) -> Iterator[Slab]:
    """Split a matrix into slabs of at most `SLAB_VALUES` values, or of `size`, in the order of memory."""
    (rows, columns), size = shape, size or SLAB_VALUES
    tall, wide = max(1, size // max(columns, 1)), max(1, min(columns, size))
    for row in range(0, rows, tall):
        for column in range(0, columns, wide):
            ends = min(rows, row + tall), min(columns, column + wide)
            yield Slab(slice(row, ends[0]), slice(column, ends[1]), row * columns + column)


def slab_pairs(shape: tuple[int, int], points: LatticeTensor | None) -> Iterator[tuple[Slab, Slab]]:
    """`slabs` of a matrix, each with that of the same values of other points; one of each if these have other rows."""
    other = shape if points is None else points.lattice.matrix_shape(tuple(points.codes.shape))
    size = None if other == shape else max(1, shape[0] * shape[1])
    return zip(slabs(shape, size), slabs(other, size), strict=True)
