"""Decodes ranges of records of codebook tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shrinkpoint import _native
from shrinkpoint.codec.codebook_record import PART_SIZES, ParentCodes, decode_centers
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import BYTE_FORMAT, MAX_CHUNK, NUMBER_FORMATS, Bytes, CoderConfig, CodingContext
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
    moment_pairs,
    moment_ranges,
)
from shrinkpoint.codec.recipe import BitPacked, CodebookRecipe
from shrinkpoint.tensors.dtypes import tensor_bytes, tensor_from_bytes, torch_dtype
from shrinkpoint.tensors.info import TensorInfo


def codebook_decoder(view: RecordView, recipe: CodebookRecipe) -> CodebookDecoder | None:
    """Return the decoder of a record; None if it can only be decoded whole.

    That is so if it has exact values, since their number before a range depends on all codes before it, and if its
    codes are one stream (cyclic differences, LZMA), which cannot be entered in the middle.

    Raises:
        ValueError, struct.error, _native.Truncated: the bytes are damaged.
    """
    side, codes, centers = PART_SIZES.unpack(view.read("symbols", 0, min(PART_SIZES.size, view.sizes["symbols"])))
    exact_bytes = view.sizes["symbols"] - PART_SIZES.size - side - codes - centers
    if exact_bytes < 0:
        raise _native.Truncated("the codes end too early")
    same_dtype = len({info.dtype for info in view.infos}) == 1
    if exact_bytes or recipe.exacts is not None or not same_dtype:
        return None
    if not isinstance(recipe.codes, CoderConfig | BitPacked):
        return None
    return CodebookDecoder(view, recipe, recipe.codes, (side, codes, centers))


class CodebookDecoder:
    """A `PartialDecoder` of codebook tensors whose unit is one value."""

    merge_gap, cacheable = 0, True

    def __init__(
        self, view: RecordView, recipe: CodebookRecipe, codes: CoderConfig | BitPacked, sizes: tuple[int, int, int]
    ) -> None:
        infos = view.infos
        if any(not info.dtype.startswith(("F", "BF")) or NUMBER_FORMATS[info.dtype].width < 16 for info in infos):
            raise ValueError("codebook tensors that are not floats")
        self._view, self._recipe = view, recipe
        self.unit = NUMBER_FORMATS[infos[0].dtype].itemsize
        self.count = sum(num_numbers(info) for info in infos)
        self._codes_begin = PART_SIZES.size + sizes[0]
        self._codes_end = self._codes_begin + sizes[1]
        self._packed, self._chunks = self._open_codes(codes)
        self.chunk = MAX_CHUNK if isinstance(codes, BitPacked) else codes.chunk
        uses_moments = isinstance(codes, CoderConfig) and codes.moments
        self._moments = moment_pairs(view, recipe.moments) if uses_moments else []
        self._uses_context = isinstance(codes, CoderConfig) and codes.needs_base
        self._context_infos = self._find_context_infos()
        self._centers: list[torch.Tensor] = []

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        start, stop = lo * self.unit, hi * self.unit
        out = base_ranges(self._view, start, stop) if self._recipe.residual else []
        out += self._code_ranges(start, stop)
        for side in (0, 1) if self._moments else ():
            out += [span for span, _ in self._moment_ranges(side, start, stop)]
        return out

    def required_parents(self) -> Sequence[str]:
        return [info.name for info in self._view.infos] if self._recipe.base else []

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        recipe, infos = self._recipe, self._view.infos
        params = [fetch(name) for name in self.required_parents()]
        parents = tuple(param for param in params if isinstance(param, CodebookTensor) and not param.residual)
        if len(parents) < len(params):
            raise ValueError("a parent whose tensors are not quantized")
        stored = self._view.read_array("symbols", self._codes_end)
        self._centers = decode_centers(len(infos), recipe, stored, ParentCodes(parents, (), None) if parents else None)
        exact = torch.empty(0, dtype=torch_dtype(recipe.exact))
        no_codes = torch.empty(0, dtype=torch.uint8)
        return {
            info.name: CodebookTensor(no_codes, centers, exact, recipe.first, recipe.residual)
            for info, centers in zip(infos, self._centers, strict=True)
        }

    def decode(self, lo: int, hi: int, fetch: FetchRange, threads: int) -> DecodedRange:
        codes = self._decode_codes(lo, hi, fetch, threads)
        if int(codes.max(initial=0)) >= self._recipe.first + self._recipe.bins:
            raise ValueError("a code beyond the last center")
        if self._recipe.first and bool((codes == self._recipe.first - 1).any()):
            raise ValueError("codes of exact values, which the record does not have")
        values, position = [], 0
        for index, info, begin, end in self._view.members_of_range(lo * self.unit, hi * self.unit):
            count = (end - begin) // self.unit
            base = None
            if self._recipe.residual:
                base_bytes = as_aligned(fetch(ByteRange(False, info.name, begin, end)))
                base = tensor_from_bytes(base_bytes, TensorInfo("", (count,), info.dtype))
            values.append(tensor_bytes(self._dequantize(index, info, codes[position : position + count], base)))
            position += count
        return DecodedRange(concat(values), codes)

    def _dequantize(self, index: int, info: TensorInfo, codes: Bytes, base: torch.Tensor | None) -> torch.Tensor:
        exact = torch.empty(0, dtype=torch_dtype(self._recipe.exact))
        tensor = CodebookTensor(
            torch.from_numpy(codes), self._centers[index], exact, self._recipe.first, self._recipe.residual
        )
        return tensor.dequantize(torch_dtype(info.dtype), base)

    def _open_codes(self, codes: CoderConfig | BitPacked) -> tuple[BitPacked | None, Chunks | None]:
        if isinstance(codes, CoderConfig):
            side = self._view.read_array("symbols", PART_SIZES.size, self._codes_begin)
            return None, Chunks.from_part(codes, side, self._codes_begin, self._codes_end, self.count)
        if self._codes_begin != PART_SIZES.size:
            raise ValueError("side data of codes that have none")
        if self._codes_end - self._codes_begin != (self.count * codes.bits + 7) // 8:
            raise _native.Truncated(
                f"{self._codes_end - self._codes_begin} bytes for {self.count} codes of {codes.bits} bits"
            )
        return codes, None

    def _find_context_infos(self) -> list[TensorInfo]:
        context_infos = [self._view.tensor_at(ordinal) for ordinal in self._recipe.contexts]
        shapes = [info.shape for info in self._view.infos]
        if context_infos and [info.shape for info in context_infos] != shapes:
            raise ValueError("context codes of tensors that do not fit")
        return context_infos

    def _code_ranges(self, start: int, stop: int) -> list[ByteRange]:
        """Return the ranges of the codes that are context of a range of the stream."""
        if not self._uses_context or not (self._context_infos or self._recipe.base):
            return []
        ranges = [
            (index, info, begin // self.unit, end // self.unit)
            for index, info, begin, end in self._view.members_of_range(start, stop)
        ]
        if self._context_infos:
            return [
                ByteRange(True, self._context_infos[index].name, begin, end, codes=True)
                for index, _, begin, end in ranges
            ]
        return [ByteRange(False, info.name, begin, end, codes=True) for _, info, begin, end in ranges]

    def _moment_ranges(self, side: int, start: int, stop: int) -> list[tuple[ByteRange, str]]:
        return list(moment_ranges(self._view, [pair[side] for pair in self._moments], start, stop))

    def _decode_codes(self, lo: int, hi: int, fetch: FetchRange, threads: int) -> Bytes:
        if self._packed is not None:
            bits = self._packed.bits  # chunks begin at whole bytes
            begin, end = lo * bits // 8, (hi * bits + 7) // 8
            stored = self._view.read_array("symbols", self._codes_begin + begin, self._codes_begin + end)
            return _native.unpack_bits(stored, hi - lo, bits).astype(np.uint8)
        assert self._chunks is not None
        out = _native.empty(hi - lo)
        codes = self._view.read_array("symbols", *self._chunks.byte_range(lo, hi))
        self._chunks.decode(BYTE_FORMAT, codes, out, self._coding_context(lo, hi, fetch), lo, threads)
        return out

    def _coding_context(self, lo: int, hi: int, fetch: FetchRange) -> CodingContext:
        start, stop = lo * self.unit, hi * self.unit
        context = [fetch(span) for span in self._code_ranges(start, stop)]
        moments = [
            concat([cast(fetch(span), dtype, "F32") for span, dtype in self._moment_ranges(side, start, stop)])
            for side in ((0, 1) if self._moments else ())
        ]
        return CodingContext(
            base=concat(context) if context else None,
            moment1=moments[0] if moments else None,
            moment2=moments[1] if moments else None,
        )
