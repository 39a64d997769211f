"""Decodes ranges of records of entropy-coded numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shrinkpoint import _native
from shrinkpoint.codec.coder import MIN_CHUNK_BYTES, NUMBER_FORMATS, Bytes, CoderConfig, CodingContext, NumberFormat
from shrinkpoint.codec.decoder import (
    ByteRange,
    DecodedRange,
    FetchParams,
    FetchRange,
    QuantizerParams,
    RecordView,
    base_ranges,
    cast,
    common_chunk,
    concat,
    has_same_layout,
    moment_pairs,
    moment_ranges,
)
from shrinkpoint.codec.pack import TAP_SIZES, matrix_shapes, num_numbers, tap, tap_context
from shrinkpoint.codec.recipe import CodedRecipe
from shrinkpoint.tensors.info import TensorInfo

_SIZE_DTYPE = np.dtype("<u4")


@dataclass(frozen=True)
class Chunks:
    """The coded chunks of one array, within a part of a record.

    Attributes:
        config: how the array was coded.
        side: side data of the whole array.
        starts: int64, the offset of each chunk in the part, and the end of the last one.
        count: numbers in the array.
    """

    config: CoderConfig
    side: Bytes
    starts: NDArray[np.int64]
    count: int

    @classmethod
    def from_part(cls, config: CoderConfig, side: Bytes, begin: int, end: int, count: int) -> Chunks:
        """Locate the chunks of an array whose codes are the bytes [begin, end) of a part.

        Raises:
            _native.Truncated: side data or codes are too short.
        """
        chunks = -(-count // config.chunk)
        if end - begin < chunks * MIN_CHUNK_BYTES:  # before memory is allocated by `count`
            raise _native.Truncated("the codes are too short for the tensors' shapes")
        if side.nbytes < chunks * _SIZE_DTYPE.itemsize:
            raise _native.Truncated("the side data end too early")
        sizes = np.frombuffer(side[side.nbytes - chunks * _SIZE_DTYPE.itemsize :].tobytes(), _SIZE_DTYPE)
        starts = np.concatenate([[begin], begin + np.cumsum(sizes, dtype=np.int64)])
        if starts[-1] != end:
            raise _native.Truncated("the codes are shorter or longer than their chunks")
        return cls(config, side, starts, count)

    def byte_range(self, lo: int, hi: int) -> tuple[int, int]:
        """Return (begin, end) in the part of the chunks that hold the numbers [lo, hi)."""
        return int(self.starts[lo // self.config.chunk]), int(self.starts[-(-hi // self.config.chunk)])

    def decode(
        self, number_format: NumberFormat, codes: Bytes, out: Bytes, context: CodingContext, lo: int, threads: int
    ) -> None:
        """Decode the numbers from `lo` on into `out`, from the bytes of their chunks."""
        first_chunk = lo // self.config.chunk
        self.config.decode_chunks(number_format, self.side, codes, out, context, self.count, first_chunk, threads)


class CodedDecoder:
    """A `PartialDecoder` of coded numbers whose unit is one number, or with taps one number of each tap."""

    merge_gap, cacheable = 0, True

    def __init__(self, view: RecordView, recipe: CodedRecipe) -> None:
        infos, self.taps = view.infos, recipe.taps
        if any(info.dtype != infos[0].dtype for info in infos) or any(num_numbers(info) % self.taps for info in infos):
            raise ValueError("its tensors cannot have been coded together")
        self._view, self._number_format = view, NUMBER_FORMATS[infos[0].dtype]
        self.unit = self._number_format.itemsize * self.taps
        self.count = sum(num_numbers(info) for info in infos) // self.taps
        self._chunks = self._read_chunks(recipe)
        configs = [chunks.config for chunks in self._chunks]
        self.chunk = common_chunk([config.chunk for config in configs], self.count)
        self._uses_base = recipe.base and any(config.needs_base for config in configs)
        self._moments = moment_pairs(view, recipe.moments) if any(map(_uses_moments, configs)) else []
        uses_square = any(config.predictor == "square" for config in configs)
        self._uses_moments_base = uses_square and recipe.base and self._parent_has_moments()
        self._shapes = matrix_shapes(infos, self.taps)

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        start, stop = lo * self.unit, hi * self.unit
        out = base_ranges(self._view, start, stop) if self._uses_base else []
        for side, own in self._moment_sources():
            out += [span for span, _ in moment_ranges(self._view, self._moment_infos(side), start, stop, same_file=own)]
        return out

    def required_parents(self) -> Sequence[str]:
        return ()

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        return {}

    def decode(self, lo: int, hi: int, fetch: FetchRange, threads: int) -> DecodedRange:
        context = self._coding_context(lo, hi, fetch)
        values = _native.empty((hi - lo) * self.unit)
        for index, chunks in enumerate(self._chunks):
            context_of_tap = tap_context(self._number_format, values, context, chunks.config, index, self.taps)
            out = tap(values, index, self.taps)
            assert out is not None
            codes = self._view.read_array("codes", *chunks.byte_range(lo, hi))
            chunks.decode(self._number_format, codes, out, context_of_tap, lo, threads)
        return DecodedRange(self._taps_innermost(values))

    def _read_chunks(self, recipe: CodedRecipe) -> list[Chunks]:
        sides, end = self._view.read_array("side"), 0
        out = []
        for index in range(self.taps):
            side, size = TAP_SIZES.unpack(sides[: TAP_SIZES.size].tobytes())
            sides = sides[TAP_SIZES.size :]
            begin, end = end, end + size
            if side > sides.nbytes or end > self._view.sizes["codes"]:
                raise _native.Truncated("a tap is longer than the rest of its record")
            config = recipe.runs[min(index, len(recipe.runs) - 1)]
            out.append(Chunks.from_part(config, sides[:side], begin, end, self.count))
            sides = sides[side:]
        if sides.nbytes or end != self._view.sizes["codes"]:
            raise ValueError("a record is longer than its taps")
        return out

    def _parent_has_moments(self) -> bool:
        """Whether the parent has all first moments, of the same shapes and dtypes."""
        parents = self._view.parent_tensors or {}
        return bool(self._moments) and all(
            has_same_layout(parents.get(first.name), first) for first, _ in self._moments
        )

    def _moment_sources(self) -> list[tuple[int, bool]]:
        """Return the moments that are used: (0 for first or 1 for second, whether of this file)."""
        if not self._moments:
            return []
        return [(0, True), (1, True), *([(0, False)] if self._uses_moments_base else [])]

    def _moment_infos(self, index: int) -> list[TensorInfo]:
        return [pair[index] for pair in self._moments]

    def _coding_context(self, lo: int, hi: int, fetch: FetchRange) -> CodingContext:
        start, stop = lo * self.unit, hi * self.unit
        base = concat([fetch(span) for span in base_ranges(self._view, start, stop)]) if self._uses_base else None
        moments: dict[tuple[int, bool], Bytes] = {}
        for side, own in self._moment_sources():
            spans = moment_ranges(self._view, self._moment_infos(side), start, stop, same_file=own)
            floats = concat([cast(fetch(span), dtype, "F32") for span, dtype in spans])
            moments[side, own] = self._taps_outermost(floats, 4)
        return CodingContext(
            base=None if base is None else self._taps_outermost(base, self._number_format.itemsize),
            moment1=moments.get((0, True)),
            moment2=moments.get((1, True)),
            moment1_base=moments.get((0, False)),
            shapes=self._shapes,
        )

    def _taps_outermost(self, values: Bytes, width: int) -> Bytes:
        """Reorder row-major numbers of `width` bytes tap by tap."""
        if self.taps == 1:
            return values
        return np.ascontiguousarray(values.view(f"u{width}").reshape(-1, self.taps).T).reshape(-1).view(np.uint8)

    def _taps_innermost(self, values: Bytes) -> Bytes:
        """Invert `_taps_outermost`."""
        if self.taps == 1:
            return values
        words = values.view(f"u{self._number_format.itemsize}").reshape(self.taps, -1)
        return np.ascontiguousarray(words.T).reshape(-1).view(np.uint8)


def _uses_moments(config: CoderConfig) -> bool:
    return config.moments or config.predictor in ("adam", "square") or config.companion == "moment1"
