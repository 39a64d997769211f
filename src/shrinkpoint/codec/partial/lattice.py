"""Decodes ranges of records of lattice tensors that have no escapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shrinkpoint import _native
from shrinkpoint.codec.coder import BYTE_FORMAT, NUMBER_FORMATS, Bytes, CodingContext
from shrinkpoint.codec.lattice import Lattice, LatticeTensor, matrix_shape
from shrinkpoint.codec.lattice_record import PART_SIZES, decode_lattices
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

_NO_ESCAPES = np.empty(0, np.uint8)


def lattice_decoder(view: RecordView, recipe: LatticeRecipe) -> LatticeDecoder | None:
    """Return the decoder of a record; None if it can only be decoded whole.

    That is so if it has escapes, since their number before a range depends on all codes before it.

    Raises:
        ValueError, struct.error, _native.Truncated: the bytes are damaged.
    """
    lattice_bytes, codes, side, escapes = PART_SIZES.unpack(
        view.read("points", 0, min(PART_SIZES.size, view.sizes["points"]))
    )
    if PART_SIZES.size + lattice_bytes + codes + side + 4 * escapes != view.sizes["points"]:
        raise _native.Truncated("the codes end too early, or too late")
    if any(info.dtype not in ("F32", "BF16", "F16") for info in view.infos):
        raise ValueError("lattice tensors that are not floats of 16 or 32 bits")
    if escapes or len({info.dtype for info in view.infos}) > 1 or not any(info.numel for info in view.infos):
        return None
    return LatticeDecoder(view, recipe, lattice_bytes, side)


class LatticeDecoder:
    """A `PartialDecoder` of lattice tensors whose unit is one value."""

    merge_gap, cacheable = 0, True

    def __init__(self, view: RecordView, recipe: LatticeRecipe, lattice_bytes: int, side: int) -> None:
        infos = view.infos
        self._view, self._recipe, self.chunk = view, recipe, recipe.run.chunk
        self.unit = NUMBER_FORMATS[infos[0].dtype].itemsize
        self.count = sum(num_numbers(info) for info in infos)
        self._lattices_end = PART_SIZES.size + lattice_bytes
        begin = self._lattices_end + side
        side_data = view.read_array("points", self._lattices_end, begin)
        self._chunks = Chunks.from_part(recipe.run, side_data, begin, view.sizes["points"], self.count)
        self._moment_infos = [view.tensor_at(ordinal) for ordinal in recipe.relative_to]
        layouts = [(moment.shape, moment.dtype) for moment in self._moment_infos]
        if layouts and layouts != [(info.shape, "F32") for info in infos]:
            raise ValueError("second moments that do not fit their tensors")
        self._lattices: list[Lattice] = []

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        start, stop = lo * self.unit, hi * self.unit
        out = base_ranges(self._view, start, stop) if self._recipe.base else []
        if self._moment_infos:
            out += [self._moment_range(*member) for member in self._view.members_of_range(start, stop)]
        return out

    def required_parents(self) -> Sequence[str]:
        return [info.name for info in self._view.infos] if self._recipe.inherited else []

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        infos = self._view.infos
        params = {name: fetch(name) for name in self.required_parents()}
        no_codes = torch.empty(0, dtype=torch.int16)
        parents = {name: LatticeTensor(no_codes, param) for name, param in params.items() if isinstance(param, Lattice)}
        lattice_bytes = self._view.read_array("points", PART_SIZES.size, self._lattices_end)
        self._lattices = decode_lattices(lattice_bytes, infos, self._recipe, Reference({}, parents))
        if len(self._lattices) != len(infos):
            raise ValueError("a parent whose tensors are not on lattices")
        return {info.name: lattice for info, lattice in zip(infos, self._lattices, strict=True)}

    def decode(self, lo: int, hi: int, fetch: FetchRange, threads: int) -> DecodedRange:
        start, stop = lo * self.unit, hi * self.unit
        members = [_RangeDecoder(self, *member, fetch) for member in self._view.members_of_range(start, stop)]
        contexts, tokens = _native.empty(hi - lo), _native.empty(hi - lo)
        spans, position = [], 0
        for member in members:
            spans.append(slice(position, position + member.count))
            member.predict(contexts[spans[-1]], threads)
            position += member.count
        codes = self._view.read_array("points", *self._chunks.byte_range(lo, hi))
        self._chunks.decode(BYTE_FORMAT, codes, tokens, CodingContext(base=contexts), lo, threads)
        values = [
            member.values(tokens[span], contexts[span], threads) for member, span in zip(members, spans, strict=True)
        ]
        return DecodedRange(concat(values))

    def _moment_range(self, index: int, info: TensorInfo, begin: int, end: int) -> ByteRange:
        return ByteRange(True, self._moment_infos[index].name, begin // self.unit * 4, end // self.unit * 4)


class _RangeDecoder:
    """Decodes the values [first, first + count) of one tensor of a record."""

    def __init__(
        self, decoder: LatticeDecoder, index: int, info: TensorInfo, begin: int, end: int, fetch: FetchRange
    ) -> None:
        self._dtype = info.dtype
        self._lattice = decoder._lattices[index].to_native(matrix_shape(info.shape))
        self._first, self.count = begin // decoder.unit, (end - begin) // decoder.unit
        self._parent = self._squares = None
        if decoder._recipe.base:
            parent = fetch(ByteRange(False, info.name, begin, end))
            self._parent = as_aligned(cast(parent, info.dtype, "F32") if info.dtype == "F16" else parent)
        if decoder._moment_infos:
            self._squares = as_aligned(fetch(decoder._moment_range(index, info, begin, end)))
        self._codes = _native.empty(2 * self.count)

    def predict(self, contexts: Bytes, threads: int) -> None:
        """Predict the codes and fill in their contexts."""
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
        """Return the values of the range in the tensor's dtype, as uint8."""
        values = _native.empty(4 * self.count)
        _native.lattice_decode(
            self._lattice,
            tokens,
            contexts,
            _NO_ESCAPES,
            self._codes,
            values,
            squares=self._squares,
            first=self._first,
            threads=threads,
        )
        return cast(values, "F32", self._dtype)
