"""Points of lattices in part, where no escape is among them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shrinkpoint import _native
from shrinkpoint.codec.coder import NUMBER_FORMATS, Bytes, CodingContext, NumberFormat
from shrinkpoint.codec.lattice import Lattice, LatticeTensor, matrix_shape
from shrinkpoint.codec.lattice_record import decode_lattices
from shrinkpoint.codec.pack import num_numbers
from shrinkpoint.codec.partial.coded import Chunks
from shrinkpoint.codec.partial.interface import (
    ByteRange,
    DecodedRange,
    FetchParams,
    FetchRange,
    QuantizerParams,
    RecordView,
    as_aligned,
    base_ranges,
    cast,
    concat,
)
from shrinkpoint.codec.recipe import LatticeRecipe
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.info import TensorInfo

_PART_SIZES = struct.Struct("<IQII")  # bytes of the lattices, of the run's codes and side, and how many escapes
_BYTE = NumberFormat(8)
_NO_ESCAPES = np.empty(0, np.uint8)


def lattice_decoder(view: RecordView, recipe: LatticeRecipe) -> LatticeDecoder | None:
    """The record's pieces, or None.

    Escapes stand one behind the other, so which ones a part has is known only when all points before it are; and their
    contexts are made from all the parent's values before it.
    """
    described, codes, side, escapes = _PART_SIZES.unpack(
        view.read("points", 0, min(_PART_SIZES.size, view.sizes["points"]))
    )
    if _PART_SIZES.size + described + codes + side + 4 * escapes != view.sizes["points"]:
        raise _native.Truncated("the points end too early, or too late")
    if any(info.dtype not in ("F32", "BF16", "F16") for info in view.infos):
        raise ValueError("points of tensors that are no floats of 16 or 32 bits")
    if escapes or len({info.dtype for info in view.infos}) > 1 or not any(info.numel for info in view.infos):
        return None
    return LatticeDecoder(view, recipe, described, side)


class LatticeDecoder:
    """As `partial.Pieces`. A unit is a value."""

    merge_gap, cacheable = 0, True

    def __init__(self, view: RecordView, recipe: LatticeRecipe, lattice_bytes: int, side: int) -> None:
        infos = view.infos
        self._view, self._recipe, self.chunk = view, recipe, recipe.run.chunk
        self.unit = NUMBER_FORMATS[infos[0].dtype].itemsize
        self.count = sum(num_numbers(info) for info in infos)
        self._lattices_end = _PART_SIZES.size + lattice_bytes
        begin = self._lattices_end + side
        held = view.read_array("points", self._lattices_end, begin)
        self._chunks = Chunks.from_part(recipe.run, held, begin, view.sizes["points"], self.count)
        self._moment_infos = [view.tensor_at(ordinal) for ordinal in recipe.relative_to]
        if self._moment_infos and [(x.shape, x.dtype) for x in self._moment_infos] != [(i.shape, "F32") for i in infos]:
            raise ValueError("points relative to tensors that do not fit")
        self._lattices: list[Lattice] = []

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        start, stop = lo * self.unit, hi * self.unit
        out = base_ranges(self._view, start, stop) if self._recipe.base else []
        if self._moment_infos:
            out += [self._moment_range(*one) for one in self._view.members_of_range(start, stop)]
        return out

    def required_parents(self) -> Sequence[str]:
        return [info.name for info in self._view.infos] if self._recipe.inherited else []

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        infos = self._view.infos
        held = {name: fetch(name) for name in self.required_parents()}
        none = torch.empty(0, dtype=torch.int16)
        points = {name: LatticeTensor(none, one) for name, one in held.items() if isinstance(one, Lattice)}
        described = self._view.read_array("points", _PART_SIZES.size, self._lattices_end)
        self._lattices = decode_lattices(described, infos, self._recipe, Reference({}, points))
        if len(self._lattices) != len(infos):
            raise ValueError("a parent whose tensors are not on lattices")
        return {info.name: one for info, one in zip(infos, self._lattices, strict=True)}

    def decode(self, lo: int, hi: int, fetch: FetchRange, threads: int) -> DecodedRange:
        start, stop = lo * self.unit, hi * self.unit
        members = [_RangeDecoder(self, *one, fetch) for one in self._view.members_of_range(start, stop)]
        contexts, tokens = _native.empty(hi - lo), _native.empty(hi - lo)
        places, done = [], 0
        for one in members:
            places.append(slice(done, done + one.count))
            one.guess(contexts[places[-1]], threads)
            done += one.count
        codes = self._view.read_array("points", *self._chunks.byte_range(lo, hi))
        self._chunks.decode(_BYTE, codes, tokens, CodingContext(base=contexts), lo, threads)
        values = [
            one.values(tokens[place], contexts[place], threads) for one, place in zip(members, places, strict=True)
        ]
        return DecodedRange(concat(values))

    def _moment_range(self, index: int, info: TensorInfo, begin: int, end: int) -> ByteRange:
        return ByteRange(True, self._moment_infos[index].name, begin // self.unit * 4, end // self.unit * 4)


class _RangeDecoder:
    """A range of one tensor of a record, [first, first + count) of its values."""

    def __init__(
        self, decoder: LatticeDecoder, index: int, info: TensorInfo, begin: int, end: int, fetch: FetchRange
    ) -> None:
        self._dtype = info.dtype
        self._lattice = decoder._lattices[index].to_native(matrix_shape(info.shape))
        self._first, self.count = begin // decoder.unit, (end - begin) // decoder.unit
        self._parent = self._squares = None
        if decoder._recipe.base:
            found = fetch(ByteRange(False, info.name, begin, end))
            self._parent = as_aligned(cast(found, info.dtype, "F32") if info.dtype == "F16" else found)
        if decoder._moment_infos:
            self._squares = as_aligned(fetch(decoder._moment_range(index, info, begin, end)))
        self._codes = _native.empty(2 * self.count)

    def guess(self, contexts: Bytes, threads: int) -> None:
        _native.lattice_predict(
            self._lattice,
            self._codes,
            contexts,
            parent=self._parent,
            squares=self._squares,
            first=self._first,
            threads=threads,
        )

    def values(self, tokens: Bytes, contexts: Bytes, threads: int) -> Bytes:
        made = _native.empty(4 * self.count)
        _native.lattice_decode(
            self._lattice,
            tokens,
            contexts,
            _NO_ESCAPES,
            self._codes,
            made,
            squares=self._squares,
            first=self._first,
            threads=threads,
        )
        return cast(made, "F32", self._dtype)
