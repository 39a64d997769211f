"""Encodes and decodes records of entropy-coded numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint._native import xxh3_128
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.coder import NUMBER_FORMATS, Bytes, CodedChunks, CoderConfig, CodingContext, default_threads
from shrinkpoint.codec.decoder import (
    ByteRange,
    DecodedPart,
    DecodeInputs,
    FetchRange,
    RecordDecoder,
    RecordView,
    concat,
    moment_pairs,
)
from shrinkpoint.codec.pack import (
    TAP_SIZES,
    matrix_shapes,
    num_numbers,
    pack_float32,
    pack_tensors,
    tap,
    tap_context,
    taps_innermost,
    taps_outermost,
)
from shrinkpoint.codec.recipe import CodedRecipe
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo


@dataclass(frozen=True)
class RecordInput:
    """The numbers of one record, to be entropy-coded."""

    name: str  # name of the record
    infos: tuple[TensorInfo, ...]
    taps: int  # as in `recipe.CodedRecipe`
    values: Bytes  # their numbers, packed by `pack_tensors`, uint8
    context: CodingContext  # arrays that a decoder has as well
    moments: tuple[tuple[int, int], ...] = ()  # as in `recipe.CodedRecipe`


def encode(record: RecordInput, configs: tuple[CoderConfig, ...], *, threads: int | None = None) -> EncodedRecord:
    """Entropy-code a record, each tap with its configuration; the last configuration serves all later taps."""
    number, taps = NUMBER_FORMATS[record.infos[0].dtype], record.taps
    sides, codes = bytearray(), []
    for index in range(taps):
        config = configs[min(index, len(configs) - 1)]
        context = tap_context(number, record.values, record.context, config, index, taps)
        values = tap(record.values, index, taps)
        assert values is not None
        side, code = config.encode(number, values, context, default_threads(threads))
        sides += TAP_SIZES.pack(side.nbytes, code.nbytes) + side.tobytes()
        codes.append(code)
    joined = codes[0] if taps == 1 else np.concatenate(codes)
    base = record.context.base if any(config.needs_base for config in configs) else None
    recipe = CodedRecipe(configs, taps, base is not None, record.moments)
    return EncodedRecord(
        record.name,
        record.infos,
        recipes.to_json(recipe),
        {"side": bytes(sides), "codes": joined.data},
        xxh3_128(record.values),
        None if base is None else xxh3_128(base),
    )


def coding_context(
    infos: Sequence[TensorInfo],
    taps: int,
    reference: Reference | None,
    moments: Sequence[tuple[str, str]],
    tensors: Mapping[str, Tensor],
) -> CodingContext:
    """Collect the coding context with which a record is encoded: the parent's numbers, and moments of the same file.

    Args:
        infos: the members of the record.
        taps: as in `recipe.CodedRecipe`.
        reference: the parent, if it holds every member; else None.
        moments: names of the (first, second) moment of each member; () for none.
        tensors: earlier tensors of the same file by name.
    """
    base = moment1_base = None
    first = [pair[0] for pair in moments]
    if reference is not None:
        base = pack_tensors(infos, reference.tensors, taps)
        parents = [reference.get_like(name, tuple(tensors[name].shape), tensors[name].dtype) for name in first]
        if first and all(parent is not None for parent in parents):
            moment1_base = pack_float32(first, reference.tensors, taps)
    return CodingContext(
        base=base,
        moment1=pack_float32(first, tensors, taps) if moments else None,
        moment2=pack_float32([pair[1] for pair in moments], tensors, taps) if moments else None,
        moment1_base=moment1_base,
        shapes=matrix_shapes(infos, taps),
    )


class CodedDecoder(RecordDecoder):
    """Decodes numbers; its unit is one number, or with taps one number of each tap."""

    def __init__(self, view: RecordView, recipe: CodedRecipe) -> None:
        infos, self._taps = view.infos, recipe.taps
        if any(info.dtype != infos[0].dtype or num_numbers(info) % self._taps for info in infos):
            raise ValueError("its tensors cannot have been coded together")
        super().__init__(view, [num_numbers(info) // self._taps for info in infos])
        self._number_format = NUMBER_FORMATS[infos[0].dtype]
        self.unit = self._number_format.itemsize * self._taps
        self._streams = self._read_streams(recipe)
        self.chunk = min(math.lcm(*(stream.config.chunk for stream in self._streams)), max(1, self.count))
        self.uses_parent = recipe.base
        moments = moment_pairs(view, recipe.moments)
        self._uses_moments = bool(moments) and any(_uses_moments(stream.config) for stream in self._streams)
        self._first_moments, self._second_moments = ([pair[side] for pair in moments] for side in (0, 1))
        self._uses_parent_moments = (
            self._uses_moments
            and recipe.base
            and any(stream.config.predictor == "square" for stream in self._streams)
            and all(map(view.parent_has, self._first_moments))
        )
        factors = any(stream.config.factors for stream in self._streams)
        self._shapes = matrix_shapes(infos, self._taps) if factors else None

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        out = self._parent_ranges(lo, hi) if self.uses_parent else []
        if self._uses_moments:
            out += self._ranges_of(self._first_moments, lo, hi) + self._ranges_of(self._second_moments, lo, hi)
        if self._uses_parent_moments:
            out += self._ranges_of(self._first_moments, lo, hi, same_file=False)
        return out

    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        context = self._coding_context(lo, hi, inputs.fetch)
        if inputs.base_digests is not None and context.base is not None:
            inputs.base_digests.check_base([context.base])
        values = context.base if inputs.overwrite_base and self._taps == 1 else None  # a tap needs the one before
        if values is None or not values.flags.writeable:
            values = inputs.allocate((hi - lo) * self.unit)
        for index, stream in enumerate(self._streams):
            context_of_tap = tap_context(self._number_format, values, context, stream.config, index, self._taps)
            out = tap(values, index, self._taps)
            assert out is not None
            codes = self._view.read_array("codes", *stream.byte_range(lo, hi))
            stream.decode(self._number_format, codes, out, context_of_tap, lo, inputs.threads)
        if inputs.value_digests is not None:
            inputs.value_digests.check_values([values])
        values = taps_innermost(values, self._number_format.itemsize, self._taps)
        return self._split(values, lo, hi)

    def _unit_bytes(self, info: TensorInfo) -> int:
        return self.unit

    def _read_streams(self, recipe: CodedRecipe) -> list[CodedChunks]:
        sides, end = self._view.read_array("side"), 0
        out = []
        for index in range(self._taps):
            side, size = TAP_SIZES.unpack(sides[: TAP_SIZES.size].tobytes())
            sides = sides[TAP_SIZES.size :]
            begin, end = end, end + size
            if side > sides.nbytes or end > self._view.sizes["codes"]:
                raise _native.Truncated("a tap is longer than the rest of its record")
            config = recipe.runs[min(index, len(recipe.runs) - 1)]
            out.append(CodedChunks(config, sides[:side], begin, end, self.count))
            sides = sides[side:]
        if sides.nbytes or end != self._view.sizes["codes"]:
            raise ValueError("a record is longer than its taps")
        return out

    def _coding_context(self, lo: int, hi: int, fetch: FetchRange) -> CodingContext:
        def floats(moments: Sequence[TensorInfo], *, same_file: bool = True) -> Bytes:
            return taps_outermost(self._fetch_float32(moments, lo, hi, fetch, same_file=same_file), 4, self._taps)

        base = moment1 = moment2 = None
        if self.uses_parent:
            base = concat([fetch(span) for span in self._parent_ranges(lo, hi)])
            base = taps_outermost(base, self._number_format.itemsize, self._taps)
        if self._uses_moments:
            moment1, moment2 = floats(self._first_moments), floats(self._second_moments)
        return CodingContext(
            base=base,
            moment1=moment1,
            moment2=moment2,
            moment1_base=floats(self._first_moments, same_file=False) if self._uses_parent_moments else None,
            shapes=self._shapes,
        )


def _uses_moments(config: CoderConfig) -> bool:
    return config.moments or config.predictor in ("adam", "square") or config.companion == "moment1"
