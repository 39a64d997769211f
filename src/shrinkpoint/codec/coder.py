"""Entropy coding of an array of numbers: how tensors are packed into it, number format, configuration and context.

The tensors of a record (members) are packed into one array: they follow each other, each in row-major order. A tap is
one position of the axes after the second, such as one of the nine of a 3 x 3 convolution. With taps, the array is
ordered tap by tap: tap 0 of every member, then tap 1 of every member, and so on, so that a tap can be predicted from
the previous one."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint._native import Companion, Predictor, Tokens
from shrinkpoint.tensors.dtypes import joined_bytes
from shrinkpoint.tensors.info import DTYPES, TensorInfo


@dataclass(frozen=True)
class NumberFormat:
    """The layout of one coded number: a complex value is two numbers, a pair of 4-bit floats is one."""

    width: int  # bits of a number
    mantissa: int = 0  # explicit mantissa bits of a float whose exponent is coded separately; 0 for all other numbers

    @cached_property
    def itemsize(self) -> int:
        return self.width // 8

    @property
    def has_float_exponent(self) -> bool:
        """True if its exponent has the width and bias of a float32 exponent, so that the two can be compared."""
        return self.width - self.mantissa == 9


BYTE_FORMAT = NumberFormat(8)  # The numbers of byte streams: codes, tokens, one-byte dtypes
NUMBER_FORMATS = {name: NumberFormat(dtype.number_width, dtype.mantissa) for name, dtype in DTYPES.items()}
"""The number format of every dtype in `tensors.info.DTYPES`."""


Bytes: TypeAlias = NDArray[np.uint8]
Shapes: TypeAlias = list[tuple[int, int]]

MAX_CHUNK = 1 << 18
"""Largest number of values that are coded together, independently of all others (docs/format.md, "Chunks")."""
MIN_CHUNK_BYTES = 4 + 4 * 4 + 8
"""Fewest bytes of a coded chunk: its header, the states of four lanes, the padding behind the extra bits.

Readers check it before they allocate memory, so that a short record cannot ask for a lot of it."""
_SIZE_DTYPE = np.dtype("<u4")  # of the bytes of a chunk, in the side data


@dataclass(frozen=True)
class CodingContext:
    """Side information that both encoder and decoder hold; arrays are viewed as uint8, with one entry per number."""

    # Numbers of the same format that the coded ones are close to, such as the parent's; or None.
    base: Bytes | None = None
    moment1: Bytes | None = None  # first moments of the same parameters, float32; or None
    moment2: Bytes | None = None  # second moments, float32; or None
    moment1_base: Bytes | None = None  # the parent's first moments, float32; or None
    hint: Bytes | None = None  # uint8, five bits of context for each number; or None
    shapes: Shapes | None = None  # (rows, columns) of each matrix among the numbers; needed for factors only
    # Row and column factors fitted by an encoder, by the mantissa bits of their levels.
    factor_cache: dict[int, _native.Factors] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class CoderConfig:
    """The configuration of the entropy coder for one array; docs/format.md, "Coded", defines every field."""

    tokens: str  # "level", "delta", "planes" or "codes"
    predictor: str = "none"  # "none", "base", "tap", "adam" or "square" (delta only; codes: "none" or "base")
    companion: str = "none"  # "none", "base" or "moment1" (level only)
    moments: bool = False  # True if contexts of deltas and codes are computed from the moments
    factors: bool = False  # True if row and column factors predict the level
    fine: int = 0  # mantissa bits in a level
    shift: int = 0  # low bits that are zero in every number and are not stored
    sign: bool = True  # True if some number has its sign bit set (level only)
    bias: int = 0  # the level of symbol 128 where no factors predict one
    # The largest exponent that delta contexts distinguish; for codes, the largest code of the base (0: any). Fewer
    # codes leave more contexts to the moments.
    top: int = 0
    parameters: tuple[float, ...] = ()  # four numbers of the predictor "adam" or "square"; else ()
    chunk: int = MAX_CHUNK  # numbers in a chunk

    @property
    def needs_base(self) -> bool:
        """True if a decoder needs `CodingContext.base`."""
        return self.predictor in ("base", "adam", "square") or self.companion == "base"

    def encode(
        self, number_format: NumberFormat, values: Bytes, context: CodingContext, threads: int
    ) -> tuple[Bytes, Bytes]:
        """Encode `values` to (side data, codes), both uint8.

        Raises:
            _native.DropsBits: this configuration would lose bits of these values, so it never becomes a checkpoint.
        """
        model = self.native_model(number_format)
        factors = self._fit_factors(model, values, context)
        return _native.encode(
            model, values, **self._native_arrays(context), factors=factors, chunk=self.chunk, threads=threads
        )

    def estimate_bytes(
        self, number_format: NumberFormat, values: Bytes, context: CodingContext, stride: int, threads: int
    ) -> float:
        """Estimate how many bytes `encode` would return, from every `stride`-th tile."""
        model = self.native_model(number_format)
        factors = self._fit_factors(model, values, context)
        bits = _native.estimate_bits(
            model, values, **self._native_arrays(context), factors=factors, stride=stride, threads=threads
        )
        return bits / 8

    def decode(
        self,
        number_format: NumberFormat,
        side: Bytes,
        codes: Bytes,
        out: Bytes,
        context: CodingContext,
        threads: int,
        *,
        count: int | None = None,
        first_chunk: int = 0,
    ) -> None:
        """Decode the consecutive chunks from `first_chunk` on that fill `out`; by default all of them.

        Args:
            side: the side data of the whole array.
            codes: the bytes of these chunks alone.
            context: the context of these chunks alone, except for `shapes`, which are those of the whole array.
            count: numbers in the whole array; None: as many as `out` has.

        Raises:
            _native.Corrupt, _native.Truncated: the bytes are damaged.
        """
        _native.decode_chunks(
            self.native_model(number_format),
            side,
            codes,
            out,
            out.nbytes // number_format.itemsize if count is None else count,
            first_chunk,
            **self._native_arrays(context),
            shapes=context.shapes if self.factors else None,
            chunk=self.chunk,
            threads=threads,
        )

    def _fit_factors(self, model: _native.Model, values: Bytes, context: CodingContext) -> _native.Factors | None:
        if self.factors and self.fine not in context.factor_cache:
            context.factor_cache[self.fine] = _native.fit_factors(model, values, context.shapes or [])
        return context.factor_cache[self.fine] if self.factors else None

    def native_model(self, number_format: NumberFormat) -> _native.Model:
        """Return what the native core calls this configuration.

        Raises:
            ValueError: it names what this release does not know.
        """
        model = _native.Model()
        try:
            model.tokens = Tokens[self.tokens.upper()]
            model.predictor = Predictor["BASE" if self.predictor == "tap" else self.predictor.upper()]
            model.companion = Companion[self.companion.upper()]
        except KeyError as unknown:
            raise ValueError(f"a run names {unknown}, which this release does not know") from None
        model.width, model.mantissa = number_format.width, number_format.mantissa
        model.fine, model.shift, model.has_sign = self.fine, self.shift, self.sign
        model.bias, model.top = self.bias, self.top
        if self.parameters:
            model.parameters = list(self.parameters)
        return model

    def _native_arrays(self, context: CodingContext) -> dict[str, Bytes | None]:
        predicted = self.predictor in ("adam", "square")
        with_moments = self.moments or predicted or self.companion == "moment1"
        return {
            "base": context.base if self.predictor != "none" or self.companion == "base" else None,
            "moment1": context.moment1 if with_moments else None,
            "moment2": context.moment2 if with_moments else None,
            "moment1_base": context.moment1_base if self.predictor == "square" else None,
            "hint": context.hint,
        }


@dataclass(frozen=True)
class CodedChunks:
    """The coded chunks of one array, within a part of a record.

    Raises:
        _native.Truncated: the codes are too short for as many chunks; so no memory is allocated by a wrong `count`.
    """

    config: CoderConfig  # how the array was coded
    side: Bytes  # side data of the whole array
    # `begin`, `end`: where its codes begin and end in the part.
    begin: int
    end: int
    count: int  # numbers in the array

    def __post_init__(self) -> None:
        if self.end - self.begin < self._num_chunks * MIN_CHUNK_BYTES:
            raise _native.Truncated("the codes are too short for the tensors' shapes")

    def byte_range(self, lo: int, hi: int) -> tuple[int, int]:
        """Return (begin, end) in the part of the chunks that hold the numbers [lo, hi)."""
        if (lo, hi) == (0, self.count):
            return self.begin, self.end
        return int(self._starts[lo // self.config.chunk]), int(self._starts[-(-hi // self.config.chunk)])

    def decode(
        self, number_format: NumberFormat, codes: Bytes, out: Bytes, context: CodingContext, lo: int, threads: int
    ) -> None:
        """Decode the numbers from `lo` on into `out`, from the bytes of their chunks."""
        first_chunk = lo // self.config.chunk
        self.config.decode(
            number_format, self.side, codes, out, context, threads, count=self.count, first_chunk=first_chunk
        )

    @property
    def _num_chunks(self) -> int:
        return -(-self.count // self.config.chunk)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The offset of each chunk in the part, and the end of the last one."""
        nbytes = self._num_chunks * _SIZE_DTYPE.itemsize
        if self.side.nbytes < nbytes:
            raise _native.Truncated("the side data end too early")
        sizes = np.frombuffer(self.side[self.side.nbytes - nbytes :].tobytes(), _SIZE_DTYPE)
        starts = np.concatenate([[self.begin], self.begin + np.cumsum(sizes, dtype=np.int64)])
        if starts[-1] != self.end:
            raise _native.Truncated("the codes are shorter or longer than their chunks")
        return starts


def default_threads(threads: int | None) -> int:
    """`threads`, or one for every core this process may use."""
    if threads is not None:
        return max(1, threads)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


TAP_SIZES = struct.Struct("<IQ")  # Bytes of a tap's side data and of its codes; stored before each tap's side data
_ITEMSIZES = {dtype: number.itemsize for dtype, number in NUMBER_FORMATS.items()}


def num_numbers(info: TensorInfo) -> int:
    """Return how many coded numbers a tensor has."""
    return info.nbytes // _ITEMSIZES[info.dtype]


def num_taps(info: TensorInfo) -> int:
    """Return the product of the sizes after the second axis: 9 for a 3 x 3 convolution, 1 for a matrix or vector."""
    return math.prod(info.shape[2:]) if len(info.shape) > 2 else 1


def pack_tensors(infos: Sequence[TensorInfo], source: Mapping[str, Tensor], taps: int) -> Bytes:
    """Return the numbers of all members as uint8, in coding order; shares memory with a single member without taps."""
    values = joined_bytes([source[info.name] for info in infos])
    return taps_outermost(values, _ITEMSIZES[infos[0].dtype], taps)


def taps_outermost(values: Bytes, itemsize: int, taps: int) -> Bytes:
    """Reorder row-major numbers of `itemsize` bytes tap by tap; returns the same array for one tap."""
    return _transpose(values, itemsize, (-1, taps)) if taps > 1 else values


def taps_innermost(values: Bytes, itemsize: int, taps: int) -> Bytes:
    """Invert `taps_outermost`."""
    return _transpose(values, itemsize, (taps, -1)) if taps > 1 else values


def _transpose(values: Bytes, itemsize: int, shape: tuple[int, int]) -> Bytes:
    return np.ascontiguousarray(values.view(f"u{itemsize}").reshape(shape).T).reshape(-1).view(np.uint8)


def pack_float32(names: Sequence[str], source: Mapping[str, Tensor], taps: int) -> Bytes:
    """Like `pack_tensors`, of float tensors converted to float32 (exact for the narrower dtypes)."""
    tensors = [source[name] for name in names]
    floats = [tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32) for tensor in tensors]
    return taps_outermost(joined_bytes(floats), torch.float32.itemsize, taps)


def matrix_shapes(infos: Sequence[TensorInfo], taps: int) -> Shapes:
    """Return (rows, columns) of every member's numbers within one tap; a vector is one row."""
    out = []
    for info in infos:
        count = num_numbers(info) // taps
        rows = info.shape[0] if len(info.shape) > 1 and count else 1
        out.append((rows, count // rows))
    return out


def digest_arrays(arrays: Iterable[Bytes | Tensor | _native.LatticeValues]) -> str:
    """Return the xxh3-128 digest of arrays, and of the values of tensors, one after the other, in hex."""
    return _native.digest(arrays)


def tap(array: Bytes | None, index: int, taps: int) -> Bytes | None:
    """Return the `index`-th tap of a packed array; None for None."""
    if array is None:
        return None
    size = array.nbytes // taps
    return array[index * size : (index + 1) * size]


def tap_context(
    number_format: NumberFormat, values: Bytes, context: CodingContext, config: CoderConfig, index: int, taps: int
) -> CodingContext:
    """Return the coding context of one tap, given the previous taps in `values`.

    The predictor "base" predicts from the parent's tap, and its hint is how the previous tap differs from *its*
    parent; "tap" predicts from the previous tap, and its hint is how that one differs from its own predecessor. The
    first tap has no hint.

    Raises:
        ValueError: the first tap has the predictor "tap".
    """
    if index == 0 and config.predictor == "tap":
        raise ValueError("the first tap cannot be predicted from a tap before it")
    if taps == 1:
        return context
    context_of_tap = CodingContext(
        base=tap(context.base, index, taps),
        moment1=tap(context.moment1, index, taps),
        moment2=tap(context.moment2, index, taps),
        moment1_base=tap(context.moment1_base, index, taps),
        shapes=context.shapes,
    )
    if index == 0:
        return context_of_tap
    previous = tap(values, index - 1, taps)
    if config.predictor == "base":
        return replace(
            context_of_tap, hint=_difference_classes(number_format, previous, tap(context.base, index - 1, taps))
        )
    if config.predictor == "tap":
        return replace(
            context_of_tap,
            base=previous,
            hint=_difference_classes(number_format, previous, tap(values, index - 2, taps)) if index > 1 else None,
        )
    return context_of_tap


def _difference_classes(number_format: NumberFormat, values: Bytes | None, reference: Bytes | None) -> Bytes | None:
    if values is None or reference is None:
        return None
    model = _native.Model()
    model.width, model.mantissa = number_format.width, number_format.mantissa
    return _native.difference_classes(model, values, reference)
