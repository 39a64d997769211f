"""Entropy coding of one array of numbers: its number format, the coder's configuration, the context of a decoder."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shrinkpoint import _native
from shrinkpoint._native import Companion, Predictor, Tokens
from shrinkpoint.tensors.info import DTYPES


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
