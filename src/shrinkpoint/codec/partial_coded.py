"""Chunks of entropy-coded numbers, decoded without the others."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shrinkpoint import _native
from shrinkpoint.codec.arrange import matrices, numbers
from shrinkpoint.codec.kernel import known_of_tap, tap
from shrinkpoint.codec.number import NUMBERS, Number
from shrinkpoint.codec.partial import (
    Block,
    Opened,
    Origin,
    Origins,
    Span,
    Supply,
    base_spans,
    cast,
    common_chunk,
    floats_spans,
    joined,
    moments_of,
)
from shrinkpoint.codec.recipe import Coded
from shrinkpoint.codec.run import Bytes, Known, Run
from shrinkpoint.record import TensorInfo

_RUN = struct.Struct("<IQ")  # bytes of a run's side and of its codes
_SIZE = np.dtype("<u4")
_SMALLEST_CHUNK = 4 + 4 * 4 + 8  # its header, the states of four lanes, the slack behind the extra bits


@dataclass(frozen=True)
class Chunks:
    """The chunks of one run, in a part of a record.

    Attributes:
        side: the run's.
        starts: of each chunk in the part, and where the last one ends.
        count: of numbers.
    """

    run: Run
    side: Bytes
    starts: NDArray[np.int64]
    count: int

    @classmethod
    def of(cls, run: Run, side: Bytes, begin: int, end: int, count: int) -> Chunks:
        """Of the run whose codes stand in the bytes [begin, end) of a part."""
        chunks = -(-count // run.chunk)
        if end - begin < chunks * _SMALLEST_CHUNK:  # before any memory is taken by the count
            raise _native.Truncated("the codes are too short for the tensors' shapes")
        if side.nbytes < chunks * _SIZE.itemsize:
            raise _native.Truncated("the side data end too early")
        sizes = np.frombuffer(side[side.nbytes - chunks * _SIZE.itemsize :].tobytes(), _SIZE)
        starts = np.concatenate([[begin], begin + np.cumsum(sizes, dtype=np.int64)])
        if starts[-1] != end:
            raise _native.Truncated("the codes are shorter or longer than their chunks")
        return cls(run, side, starts, count)

    def place(self, lo: int, hi: int) -> tuple[int, int]:
        """Where the chunks of the numbers [lo, hi) stand in the part."""
        return int(self.starts[lo // self.run.chunk]), int(self.starts[-(-hi // self.run.chunk)])

    def decode(self, number: Number, codes: Bytes, out: Bytes, known: Known, lo: int, threads: int) -> None:
        """Fill `out` with the numbers from `lo` on, of the bytes at their `place`."""
        first = lo // self.run.chunk
        self.run.decode_stretch(number, self.side, codes, out, known, self.count, first, threads)


class CodedPieces:
    """As `partial.Pieces`. A unit is a position: one number, or with taps one of each."""

    near, coded = 0, True

    def __init__(self, opened: Opened, recipe: Coded) -> None:
        infos, self.taps = opened.infos, recipe.taps
        if any(info.dtype != infos[0].dtype for info in infos) or any(numbers(info) % self.taps for info in infos):
            raise ValueError("its tensors cannot have been coded together")
        self._opened, self._number = opened, NUMBERS[infos[0].dtype]
        self.unit = self._number.bytes * self.taps
        self.count = sum(numbers(info) for info in infos) // self.taps
        self._runs = self._read_runs(recipe)
        runs = [one.run for one in self._runs]
        self.chunk = common_chunk([run.chunk for run in runs], self.count)
        self._base = recipe.base and any(run.needs_base for run in runs)
        moments = any(run.moments or run.predictor in ("adam", "square") or run.companion == "moment1" for run in runs)
        self._moments = moments_of(opened, recipe.moments) if moments else []
        self._moments_base = any(run.predictor == "square" for run in runs) and recipe.base and self._first_fit()
        self._shapes = matrices(infos, self.taps)

    def needs(self, lo: int, hi: int) -> Sequence[Span]:
        start, stop = lo * self.unit, hi * self.unit
        out = base_spans(self._opened, start, stop) if self._base else []
        for side, own in self._sides():
            out += [span for span, _ in floats_spans(self._opened, self._side(side), start, stop, own=own)]
        return out

    def ancestors(self) -> Sequence[str]:
        return ()

    def origins(self, parent: Origins) -> Mapping[str, Origin]:
        return {}

    def decode(self, lo: int, hi: int, supply: Supply, threads: int) -> Block:
        known = self._known(lo, hi, supply)
        values = _native.empty((hi - lo) * self.unit)
        for index, one in enumerate(self._runs):
            here = known_of_tap(self._number, values, known, one.run, index, self.taps)
            out = tap(values, index, self.taps)
            assert out is not None
            one.decode(self._number, self._opened.bytes("codes", *one.place(lo, hi)), out, here, lo, threads)
        return Block(self._outermost_last(values))

    def _read_runs(self, recipe: Coded) -> list[Chunks]:
        sides, end = self._opened.bytes("side"), 0
        out = []
        for index in range(self.taps):
            side, size = _RUN.unpack(sides[: _RUN.size].tobytes())
            sides = sides[_RUN.size :]
            begin, end = end, end + size
            if side > sides.nbytes or end > self._opened.sizes["codes"]:
                raise _native.Truncated("a run is longer than what is left of its record")
            run = recipe.runs[min(index, len(recipe.runs) - 1)]
            out.append(Chunks.of(run, sides[:side], begin, end, self.count))
            sides = sides[side:]
        if sides.nbytes or end != self._opened.sizes["codes"]:
            raise ValueError("a record is longer than its runs")
        return out

    def _first_fit(self) -> bool:
        """Whether the parent has the first moments."""
        before = self._opened.before or {}
        found = [before.get(first.name) for first, _ in self._moments]
        return bool(found) and all(
            one is not None and (one.shape, one.dtype) == (first.shape, first.dtype)
            for one, (first, _) in zip(found, self._moments, strict=True)
        )

    def _sides(self) -> list[tuple[int, bool]]:
        """Which moments are known: (first or second, of this file)."""
        if not self._moments:
            return []
        return [(0, True), (1, True), *([(0, False)] if self._moments_base else [])]

    def _side(self, index: int) -> list[TensorInfo]:
        return [pair[index] for pair in self._moments]

    def _known(self, lo: int, hi: int, supply: Supply) -> Known:
        start, stop = lo * self.unit, hi * self.unit
        base = joined([supply(span) for span in base_spans(self._opened, start, stop)]) if self._base else None
        found: dict[tuple[int, bool], Bytes] = {}
        for side, own in self._sides():
            spans = floats_spans(self._opened, self._side(side), start, stop, own=own)
            floats = joined([cast(supply(span), dtype, "F32") for span, dtype in spans])
            found[side, own] = self._outermost_first(floats, 4)
        return Known(
            base=None if base is None else self._outermost_first(base, self._number.bytes),
            moment1=found.get((0, True)),
            moment2=found.get((1, True)),
            moment1_base=found.get((0, False)),
            shapes=self._shapes,
        )

    def _outermost_first(self, values: Bytes, width: int) -> Bytes:
        """Row-major numbers, tap by tap."""
        if self.taps == 1:
            return values
        return np.ascontiguousarray(values.view(f"u{width}").reshape(-1, self.taps).T).reshape(-1).view(np.uint8)

    def _outermost_last(self, values: Bytes) -> Bytes:
        if self.taps == 1:
            return values
        words = values.view(f"u{self._number.bytes}").reshape(self.taps, -1)
        return np.ascontiguousarray(words.T).reshape(-1).view(np.uint8)
