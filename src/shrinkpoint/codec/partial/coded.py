"""Chunks of entropy-coded numbers, decoded without the others."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shrinkpoint import _native
from shrinkpoint.codec.coder import NUMBER_FORMATS, Bytes, CoderConfig, CodingContext, NumberFormat
from shrinkpoint.codec.pack import matrix_shapes, num_numbers, tap, tap_context
from shrinkpoint.codec.partial.interface import (
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
    moment_pairs,
    moment_ranges,
)
from shrinkpoint.codec.recipe import CodedRecipe
from shrinkpoint.tensors.info import TensorInfo

_TAP_SIZES = struct.Struct("<IQ")  # bytes of a run's side and of its codes
_SIZE_DTYPE = np.dtype("<u4")
_MIN_CHUNK_BYTES = 4 + 4 * 4 + 8  # its header, the states of four lanes, the slack behind the extra bits


@dataclass(frozen=True)
class Chunks:
    """The chunks of one run, in a part of a record.

    Attributes:
        side: the run's.
        starts: of each chunk in the part, and where the last one ends.
        count: of numbers.
    """

    config: CoderConfig
    side: Bytes
    starts: NDArray[np.int64]
    count: int

    @classmethod
    def from_part(cls, config: CoderConfig, side: Bytes, begin: int, end: int, count: int) -> Chunks:
        """Of the run whose codes stand in the bytes [begin, end) of a part."""
        chunks = -(-count // config.chunk)
        if end - begin < chunks * _MIN_CHUNK_BYTES:  # before any memory is taken by the count
            raise _native.Truncated("the codes are too short for the tensors' shapes")
        if side.nbytes < chunks * _SIZE_DTYPE.itemsize:
            raise _native.Truncated("the side data end too early")
        sizes = np.frombuffer(side[side.nbytes - chunks * _SIZE_DTYPE.itemsize :].tobytes(), _SIZE_DTYPE)
        starts = np.concatenate([[begin], begin + np.cumsum(sizes, dtype=np.int64)])
        if starts[-1] != end:
            raise _native.Truncated("the codes are shorter or longer than their chunks")
        return cls(config, side, starts, count)

    def byte_range(self, lo: int, hi: int) -> tuple[int, int]:
        """Where the chunks of the numbers [lo, hi) stand in the part."""
        return int(self.starts[lo // self.config.chunk]), int(self.starts[-(-hi // self.config.chunk)])

    def decode(
        self, number_format: NumberFormat, codes: Bytes, out: Bytes, context: CodingContext, lo: int, threads: int
    ) -> None:
        """Fill `out` with the numbers from `lo` on, of the bytes at their `place`."""
        first = lo // self.config.chunk
        self.config.decode_chunks(number_format, self.side, codes, out, context, self.count, first, threads)


class CodedDecoder:
    """As `partial.Pieces`. A unit is a position: one number, or with taps one of each."""

    merge_gap, cacheable = 0, True

    def __init__(self, view: RecordView, recipe: CodedRecipe) -> None:
        infos, self.taps = view.infos, recipe.taps
        if any(info.dtype != infos[0].dtype for info in infos) or any(num_numbers(info) % self.taps for info in infos):
            raise ValueError("its tensors cannot have been coded together")
        self._view, self._number_format = view, NUMBER_FORMATS[infos[0].dtype]
        self.unit = self._number_format.itemsize * self.taps
        self.count = sum(num_numbers(info) for info in infos) // self.taps
        self._chunks = self._read_chunks(recipe)
        runs = [one.config for one in self._chunks]
        self.chunk = common_chunk([run.chunk for run in runs], self.count)
        self._uses_base = recipe.base and any(run.needs_base for run in runs)
        moments = any(run.moments or run.predictor in ("adam", "square") or run.companion == "moment1" for run in runs)
        self._moments = moment_pairs(view, recipe.moments) if moments else []
        self._uses_moments_base = (
            any(run.predictor == "square" for run in runs) and recipe.base and self._parent_has_moments()
        )
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
        known = self._coding_context(lo, hi, fetch)
        values = _native.empty((hi - lo) * self.unit)
        for index, one in enumerate(self._chunks):
            here = tap_context(self._number_format, values, known, one.config, index, self.taps)
            out = tap(values, index, self.taps)
            assert out is not None
            one.decode(
                self._number_format, self._view.read_array("codes", *one.byte_range(lo, hi)), out, here, lo, threads
            )
        return DecodedRange(self._taps_innermost(values))

    def _read_chunks(self, recipe: CodedRecipe) -> list[Chunks]:
        sides, end = self._view.read_array("side"), 0
        out = []
        for index in range(self.taps):
            side, size = _TAP_SIZES.unpack(sides[: _TAP_SIZES.size].tobytes())
            sides = sides[_TAP_SIZES.size :]
            begin, end = end, end + size
            if side > sides.nbytes or end > self._view.sizes["codes"]:
                raise _native.Truncated("a run is longer than what is left of its record")
            run = recipe.runs[min(index, len(recipe.runs) - 1)]
            out.append(Chunks.from_part(run, sides[:side], begin, end, self.count))
            sides = sides[side:]
        if sides.nbytes or end != self._view.sizes["codes"]:
            raise ValueError("a record is longer than its runs")
        return out

    def _parent_has_moments(self) -> bool:
        """Whether the parent has the first moments."""
        before = self._view.parent_tensors or {}
        found = [before.get(first.name) for first, _ in self._moments]
        return bool(found) and all(
            one is not None and (one.shape, one.dtype) == (first.shape, first.dtype)
            for one, (first, _) in zip(found, self._moments, strict=True)
        )

    def _moment_sources(self) -> list[tuple[int, bool]]:
        """Which moments are known: (first or second, of this file)."""
        if not self._moments:
            return []
        return [(0, True), (1, True), *([(0, False)] if self._uses_moments_base else [])]

    def _moment_infos(self, index: int) -> list[TensorInfo]:
        return [pair[index] for pair in self._moments]

    def _coding_context(self, lo: int, hi: int, fetch: FetchRange) -> CodingContext:
        start, stop = lo * self.unit, hi * self.unit
        base = concat([fetch(span) for span in base_ranges(self._view, start, stop)]) if self._uses_base else None
        found: dict[tuple[int, bool], Bytes] = {}
        for side, own in self._moment_sources():
            spans = moment_ranges(self._view, self._moment_infos(side), start, stop, same_file=own)
            floats = concat([cast(fetch(span), dtype, "F32") for span, dtype in spans])
            found[side, own] = self._taps_outermost(floats, 4)
        return CodingContext(
            base=None if base is None else self._taps_outermost(base, self._number_format.itemsize),
            moment1=found.get((0, True)),
            moment2=found.get((1, True)),
            moment1_base=found.get((0, False)),
            shapes=self._shapes,
        )

    def _taps_outermost(self, values: Bytes, width: int) -> Bytes:
        """Row-major numbers, tap by tap."""
        if self.taps == 1:
            return values
        return np.ascontiguousarray(values.view(f"u{width}").reshape(-1, self.taps).T).reshape(-1).view(np.uint8)

    def _taps_innermost(self, values: Bytes) -> Bytes:
        if self.taps == 1:
            return values
        words = values.view(f"u{self._number_format.itemsize}").reshape(self.taps, -1)
        return np.ascontiguousarray(words.T).reshape(-1).view(np.uint8)
