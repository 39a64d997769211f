"""Quantized tensors in part, where it is known what comes before a part."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shrinkpoint import _native
from shrinkpoint.codec.arrange import numbers
from shrinkpoint.codec.number import NUMBERS, Number
from shrinkpoint.codec.partial import (
    Block,
    Opened,
    Origin,
    Origins,
    Span,
    Supply,
    aligned,
    base_spans,
    cast,
    floats_spans,
    joined,
    moments_of,
)
from shrinkpoint.codec.partial_coded import Chunks
from shrinkpoint.codec.quantize import bits_of, from_bits
from shrinkpoint.codec.quantized import Parent, decode_centers
from shrinkpoint.codec.recipe import Packed, Quantized
from shrinkpoint.codec.run import CHUNK, Bytes, Known, Run
from shrinkpoint.codec.symbols import Symbols
from shrinkpoint.record import TensorInfo
from shrinkpoint.state import torch_dtype

_SIZES = struct.Struct("<IQQ")  # bytes of the side, of the codes and of the centers; the exact values are the rest
_BYTE = Number(8)


def quantized_pieces(opened: Opened, recipe: Quantized) -> QuantizedPieces | None:
    """The record's pieces, or None.

    Exact values stand one behind the other, so which ones a part has is known only when all codes before it are. And
    codes that are one stream (cyclic differences, LZMA) cannot be entered in the middle.
    """
    side, codes, centers = _SIZES.unpack(opened.read("symbols", 0, min(_SIZES.size, opened.sizes["symbols"])))
    left = opened.sizes["symbols"] - _SIZES.size - side - codes - centers
    if left < 0:
        raise _native.Truncated("the symbols end too early")
    alike = len({info.dtype for info in opened.infos}) == 1
    if left or not alike or not isinstance(recipe.codes, Run | Packed) or recipe.exacts is not None:
        return None
    return QuantizedPieces(opened, recipe, recipe.codes, (side, codes, centers))


class QuantizedPieces:
    """As `partial.Pieces`. A unit is a value."""

    near, coded = 0, True

    def __init__(self, opened: Opened, recipe: Quantized, how: Run | Packed, sizes: tuple[int, int, int]) -> None:
        infos = opened.infos
        if any(not info.dtype.startswith(("F", "BF")) or NUMBERS[info.dtype].width < 16 for info in infos):
            raise ValueError("quantized tensors that are no floats")
        self._opened, self._recipe = opened, recipe
        self.unit = NUMBERS[infos[0].dtype].bytes
        self.count = sum(numbers(info) for info in infos)
        self._first = _SIZES.size + sizes[0]
        self._end = self._first + sizes[1]
        self._packed, self._chunks = self._open(how)
        self.chunk = CHUNK if isinstance(how, Packed) else how.chunk
        uses_moments = isinstance(how, Run) and how.moments
        self._moments = moments_of(opened, recipe.moments) if uses_moments else []
        self._context = isinstance(how, Run) and how.needs_base
        self._under = self._others()
        self._centers: list[torch.Tensor] = []

    def needs(self, lo: int, hi: int) -> Sequence[Span]:
        start, stop = lo * self.unit, hi * self.unit
        out = base_spans(self._opened, start, stop) if self._recipe.residual else []
        out += self._code_spans(start, stop)
        for side in (0, 1) if self._moments else ():
            out += [span for span, _ in self._moment_spans(side, start, stop)]
        return out

    def ancestors(self) -> Sequence[str]:
        return [info.name for info in self._opened.infos] if self._recipe.base else []

    def origins(self, parent: Origins) -> Mapping[str, Origin]:
        recipe, infos = self._recipe, self._opened.infos
        before = [parent(name) for name in self.ancestors()]
        symbols = tuple(one for one in before if isinstance(one, Symbols) and not one.residual)
        if len(symbols) < len(before):
            raise ValueError("a parent whose tensors are not quantized")
        stored = self._opened.bytes("symbols", self._end)
        self._centers = decode_centers(len(infos), recipe, stored, Parent(symbols, (), None) if symbols else None)
        exact = torch.empty(0, dtype=torch_dtype(recipe.exact))
        none = torch.empty(0, dtype=torch.uint8)
        return {
            info.name: Symbols(none, centers, exact, recipe.first, recipe.residual)
            for info, centers in zip(infos, self._centers, strict=True)
        }

    def decode(self, lo: int, hi: int, supply: Supply, threads: int) -> Block:
        codes = self._codes(lo, hi, supply, threads)
        if int(codes.max(initial=0)) >= self._recipe.first + self._recipe.bins:
            raise ValueError("a code beyond the last center")
        if self._recipe.first and bool((codes == self._recipe.first - 1).any()):
            raise ValueError("more codes of exact values than there are")
        values, done = [], 0
        for index, info, begin, end in self._opened.spread(lo * self.unit, hi * self.unit):
            count = (end - begin) // self.unit
            base = None
            if self._recipe.residual:
                found = aligned(supply(Span(False, info.name, begin, end)))
                base = from_bits(found, TensorInfo("", (count,), info.dtype))
            values.append(bits_of(self._values(index, info, codes[done : done + count], base)))
            done += count
        return Block(joined(values), codes)

    def _values(self, index: int, info: TensorInfo, codes: Bytes, base: torch.Tensor | None) -> torch.Tensor:
        exact = torch.empty(0, dtype=torch_dtype(self._recipe.exact))
        one = Symbols(torch.from_numpy(codes), self._centers[index], exact, self._recipe.first, self._recipe.residual)
        return one.values(torch_dtype(info.dtype), base)

    def _open(self, how: Run | Packed) -> tuple[Packed | None, Chunks | None]:
        if isinstance(how, Run):
            side = self._opened.bytes("symbols", _SIZES.size, self._first)
            return None, Chunks.of(how, side, self._first, self._end, self.count)
        if self._first != _SIZES.size:
            raise ValueError("a side of codes that have none")
        if self._end - self._first != (self.count * how.bits + 7) // 8:
            raise _native.Truncated(f"{self._end - self._first} bytes for {self.count} codes of {how.bits} bits")
        return how, None

    def _others(self) -> list[TensorInfo]:
        others = [self._opened.earlier(ordinal) for ordinal in self._recipe.under]
        if others and [one.shape for one in others] != [info.shape for info in self._opened.infos]:
            raise ValueError("codes under those of tensors that do not fit")
        return others

    def _code_spans(self, start: int, stop: int) -> list[Span]:
        """Where the codes stand that are context of a range's own."""
        if not self._context or not (self._under or self._recipe.base):
            return []
        ranges = [
            (index, info, begin // self.unit, end // self.unit)
            for index, info, begin, end in self._opened.spread(start, stop)
        ]
        if self._under:
            return [Span(True, self._under[index].name, begin, end, codes=True) for index, _, begin, end in ranges]
        return [Span(False, info.name, begin, end, codes=True) for _, info, begin, end in ranges]

    def _moment_spans(self, side: int, start: int, stop: int) -> list[tuple[Span, str]]:
        return list(floats_spans(self._opened, [pair[side] for pair in self._moments], start, stop))

    def _codes(self, lo: int, hi: int, supply: Supply, threads: int) -> Bytes:
        if self._packed is not None:
            bits = self._packed.bits  # a chunk's codes begin with a byte
            begin, end = lo * bits // 8, (hi * bits + 7) // 8
            stored = self._opened.bytes("symbols", self._first + begin, self._first + end)
            return _native.unpack_bits(stored, hi - lo, bits).astype(np.uint8)
        assert self._chunks is not None
        out = _native.empty(hi - lo)
        codes = self._opened.bytes("symbols", *self._chunks.place(lo, hi))
        self._chunks.decode(_BYTE, codes, out, self._known(lo, hi, supply), lo, threads)
        return out

    def _known(self, lo: int, hi: int, supply: Supply) -> Known:
        start, stop = lo * self.unit, hi * self.unit
        context = [supply(span) for span in self._code_spans(start, stop)]
        moments = [
            joined([cast(supply(span), dtype, "F32") for span, dtype in self._moment_spans(side, start, stop)])
            for side in ((0, 1) if self._moments else ())
        ]
        return Known(
            base=joined(context) if context else None,
            moment1=moments[0] if moments else None,
            moment2=moments[1] if moments else None,
        )
