"""Points of lattices in part, where no escape is among them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shrinkpoint import _native
from shrinkpoint.codec.arrange import numbers
from shrinkpoint.codec.gridded import read_lattices
from shrinkpoint.codec.lattice import Lattice, Points, sides
from shrinkpoint.codec.number import NUMBERS, Number
from shrinkpoint.codec.partial import Block, Opened, Origin, Origins, Span, Supply, aligned, base_spans, cast, joined
from shrinkpoint.codec.partial_coded import Chunks
from shrinkpoint.codec.recipe import Gridded
from shrinkpoint.codec.reference import Reference
from shrinkpoint.codec.run import Bytes, Known
from shrinkpoint.record import TensorInfo

_SIZES = struct.Struct("<IQII")  # bytes of the lattices, of the run's codes and side, and how many escapes
_BYTE = Number(8)
_NO_ESCAPES = np.empty(0, np.uint8)


def gridded_pieces(opened: Opened, recipe: Gridded) -> GriddedPieces | None:
    """The record's pieces, or None.

    Escapes stand one behind the other, so which ones a part has is known only when all points before it are; and their
    contexts are made from all the parent's values before it.
    """
    described, codes, side, escapes = _SIZES.unpack(opened.read("points", 0, min(_SIZES.size, opened.sizes["points"])))
    if _SIZES.size + described + codes + side + 4 * escapes != opened.sizes["points"]:
        raise _native.Truncated("the points end too early, or too late")
    if any(info.dtype not in ("F32", "BF16", "F16") for info in opened.infos):
        raise ValueError("points of tensors that are no floats of 16 or 32 bits")
    if escapes or len({info.dtype for info in opened.infos}) > 1 or not any(info.numel for info in opened.infos):
        return None
    return GriddedPieces(opened, recipe, described, side)


class GriddedPieces:
    """As `partial.Pieces`. A unit is a value."""

    near, coded = 0, True

    def __init__(self, opened: Opened, recipe: Gridded, described: int, side: int) -> None:
        infos = opened.infos
        self._opened, self._recipe, self.chunk = opened, recipe, recipe.run.chunk
        self.unit = NUMBERS[infos[0].dtype].bytes
        self.count = sum(numbers(info) for info in infos)
        self._described = _SIZES.size + described
        begin = self._described + side
        held = opened.bytes("points", self._described, begin)
        self._chunks = Chunks.of(recipe.run, held, begin, opened.sizes["points"], self.count)
        self._others = [opened.earlier(ordinal) for ordinal in recipe.others]
        if self._others and [(x.shape, x.dtype) for x in self._others] != [(i.shape, "F32") for i in infos]:
            raise ValueError("points relative to tensors that do not fit")
        self._lattices: list[Lattice] = []

    def needs(self, lo: int, hi: int) -> Sequence[Span]:
        start, stop = lo * self.unit, hi * self.unit
        out = base_spans(self._opened, start, stop) if self._recipe.base else []
        if self._others:
            out += [self._square_span(*one) for one in self._opened.spread(start, stop)]
        return out

    def ancestors(self) -> Sequence[str]:
        return [info.name for info in self._opened.infos] if self._recipe.inherited else []

    def origins(self, parent: Origins) -> Mapping[str, Origin]:
        infos = self._opened.infos
        held = {name: parent(name) for name in self.ancestors()}
        none = torch.empty(0, dtype=torch.int16)
        points = {name: Points(none, one) for name, one in held.items() if isinstance(one, Lattice)}
        described = self._opened.bytes("points", _SIZES.size, self._described)
        self._lattices = read_lattices(described, infos, self._recipe, Reference({}, points))
        if len(self._lattices) != len(infos):
            raise ValueError("a parent whose tensors are not on lattices")
        return {info.name: one for info, one in zip(infos, self._lattices, strict=True)}

    def decode(self, lo: int, hi: int, supply: Supply, threads: int) -> Block:
        start, stop = lo * self.unit, hi * self.unit
        members = [_Member(self, *one, supply) for one in self._opened.spread(start, stop)]
        contexts, tokens = _native.empty(hi - lo), _native.empty(hi - lo)
        places, done = [], 0
        for one in members:
            places.append(slice(done, done + one.count))
            one.guess(contexts[places[-1]], threads)
            done += one.count
        codes = self._opened.bytes("points", *self._chunks.place(lo, hi))
        self._chunks.decode(_BYTE, codes, tokens, Known(base=contexts), lo, threads)
        values = [
            one.values(tokens[place], contexts[place], threads) for one, place in zip(members, places, strict=True)
        ]
        return Block(joined(values))

    def _square_span(self, index: int, info: TensorInfo, begin: int, end: int) -> Span:
        return Span(True, self._others[index].name, begin // self.unit * 4, end // self.unit * 4)


class _Member:
    """A range of one tensor of a record, [first, first + count) of its values."""

    def __init__(
        self, pieces: GriddedPieces, index: int, info: TensorInfo, begin: int, end: int, supply: Supply
    ) -> None:
        self._dtype = info.dtype
        self._lattice = pieces._lattices[index].native(sides(info.shape))
        self._first, self.count = begin // pieces.unit, (end - begin) // pieces.unit
        self._parent = self._squares = None
        if pieces._recipe.base:
            found = supply(Span(False, info.name, begin, end))
            self._parent = aligned(cast(found, info.dtype, "F32") if info.dtype == "F16" else found)
        if pieces._others:
            self._squares = aligned(supply(pieces._square_span(index, info, begin, end)))
        self._codes = _native.empty(2 * self.count)

    def guess(self, contexts: Bytes, threads: int) -> None:
        _native.lattice_predict(
            self._lattice, self._codes, contexts, parent=self._parent, squares=self._squares, first=self._first,
            threads=threads,
        )  # fmt: skip

    def values(self, tokens: Bytes, contexts: Bytes, threads: int) -> Bytes:
        made = _native.empty(4 * self.count)
        _native.lattice_decode(
            self._lattice, tokens, contexts, _NO_ESCAPES, self._codes, made, squares=self._squares, first=self._first,
            threads=threads,
        )  # fmt: skip
        return cast(made, "F32", self._dtype)
