"""Encodes a record of codebook tensors to recipe and bytes, and decodes it. All arithmetic is exact.

The codes of all members are one stream, in the smallest of several lossless formats. Centers and exact values are short
arrays inside the record: entropy-coded where that saves bytes, else stored unchanged."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES, CodebookTensor
from shrinkpoint.codec.coder import (
    BYTE_FORMAT,
    MAX_CHUNK,
    MIN_CHUNK_BYTES,
    NUMBER_FORMATS,
    Bytes,
    CodedChunks,
    CoderConfig,
    CodingContext,
    NumberFormat,
    default_threads,
    digest_arrays,
)
from shrinkpoint.codec.decoder import (
    ByteRange,
    DecodedPart,
    DecodeInputs,
    FetchParams,
    FetchRanges,
    QuantizerParams,
    RecordDecoder,
    RecordView,
    TensorRange,
    concat,
    flat_tensor,
    moment_pairs,
)
from shrinkpoint.codec.recipe import BitPacked, CodebookRecipe, CodesRecipe, CyclicDelta, LzmaCodes
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes, torch_dtype
from shrinkpoint.tensors.info import DTYPES, ITEMSIZE, EncodedRecord, TensorInfo

CODERS = ("context", "alone", "packed", "rearranged", "runs", "huffman")
"""Coders of codes.

"context" codes them under the parent's codes, "alone" without context, "packed" in fixed width. "rearranged", "runs"
and "huffman" are the delta encoder of arXiv 2306.11800, whole and without its earlier stages. "lzma", fixed width
followed by LZMA as in arXiv 2406.11257, is slow and therefore used only on request."""
DELTA_CODERS = ("context", "rearranged", "runs", "huffman")  # The coders that use the parent's codes

BytesLike: TypeAlias = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<Q")
_MIN_DICTIONARY, _MAX_DICTIONARY = 1 << 12, 1 << 26
_MAX_LZMA_MEMORY = 1 << 27  # Memory limit of the LZMA decoder in bytes; the largest dictionary needs 65 MiB


def encode_forms(
    codes: Bytes, num_codes: int, context: Bytes | None, moments: CodingContext, coders: Sequence[str], threads: int
) -> Iterator[tuple[CodesRecipe, BytesLike, BytesLike]]:
    """Encode codes with each of `coders`: yields (recipe, side data, codes), at least once.

    Fixed width is used if no other coder applies.

    Args:
        codes: uint8, of all members.
        num_codes: number of codes that may occur.
        context: codes of the parent or of other tensors, one for each code; or None.
        moments: the members' moments; nothing else of it is used.
        coders: names from `CODERS`, or "lzma".
    """
    largest = int(context.max()) if context is not None and context.nbytes else 0
    bits = max(1, (num_codes - 1).bit_length())
    config = _choose_config(codes, context, largest, moments, coders, threads)
    if config is not None:
        arrays = CodingContext(base=context, moment1=moments.moment1, moment2=moments.moment2)
        side, coded = config.encode(BYTE_FORMAT, codes, arrays, threads)
        yield config, side.data, coded.data
    stream_coders = [coder for coder in ("rearranged", "runs", "huffman", "lzma") if coder in coders and codes.nbytes]
    for coder in stream_coders:
        if coder == "lzma":
            lzma, packed = _lzma_module(), _native.pack_bits(codes.astype(np.uint32), bits).tobytes()
            # The strongest preset, with a dictionary no larger than the data: its size determines the memory used.
            size = min(max(len(packed), _MIN_DICTIONARY), _MAX_DICTIONARY)
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}]
            stored = lzma.compress(packed, lzma.FORMAT_XZ, lzma.CHECK_NONE, filters=filters)
            yield LzmaCodes(bits), b"", _pad(stored, codes.nbytes)
        else:
            rearranged = coder == "rearranged" and context is not None
            recipe = CyclicDelta(max(num_codes, largest + 1), rearranged, runs=coder != "huffman")
            coded = _native.cyclic_encode(
                codes, context, modulus=recipe.modulus, rearranged=recipe.rearranged, runs=recipe.runs
            )
            yield recipe, b"", _pad(coded.tobytes(), codes.nbytes)
    if "packed" in coders or (config is None and not stream_coders):
        yield BitPacked(bits), b"", _native.pack_bits(codes.astype(np.uint32), bits).data


def _choose_config(
    codes: Bytes, context: Bytes | None, max_context: int, moments: CodingContext, coders: Sequence[str], threads: int
) -> CoderConfig | None:
    """Return the configuration that `coders` allow with the smallest estimated size; None if there is none."""
    predictor = "none" if context is None else "base"
    configs = []
    if "alone" in coders or ("context" in coders and context is None):
        configs.append(CoderConfig("codes"))
    if "context" in coders and context is not None:
        configs.append(CoderConfig("codes", predictor=predictor, top=max_context))
    if "context" in coders and moments.moment1 is not None and moments.moment2 is not None:
        configs.append(CoderConfig("codes", predictor=predictor, moments=True, top=max_context))
    if len(configs) < 2 or codes.nbytes == 0:
        return configs[0] if configs and codes.nbytes else None
    arrays = CodingContext(base=context, moment1=moments.moment1, moment2=moments.moment2)
    stride = max(1, codes.nbytes >> 17)
    return min(configs, key=lambda config: config.estimate_bytes(BYTE_FORMAT, codes, arrays, stride, threads))


def _pad(coded: bytes, count: int) -> bytes:
    """Prefix the length and pad with zeros to `MIN_CHUNK_BYTES` a chunk, which bounds a reader's memory."""
    return (_LENGTH.pack(len(coded)) + coded).ljust(-(-count // MAX_CHUNK) * MIN_CHUNK_BYTES, b"\0")


def _lzma_module() -> Any:
    """Import the standard library's lzma; raises PolicyError if Python was built without it."""
    try:
        return importlib.import_module("lzma")
    except ImportError as error:
        found, do = "a Python that was built without it", "use a Python with lzma"
        raise PolicyError("codes in LZMA", found=found, expected="the module lzma", do=do) from error


def _unpad(stored: Bytes) -> Bytes:
    (size,) = _LENGTH.unpack(stored[: _LENGTH.size].tobytes())
    end = _LENGTH.size + size
    if end > stored.nbytes:
        raise _native.Truncated("the codes end too early")
    if stored[end:].any():
        raise ValueError("codes whose padding is not zero")
    return stored[_LENGTH.size : end]


class StoredCodes:
    """The coded codes of a record, within a part of it.

    Args:
        recipe: how they were coded.
        side: side data of an entropy coder; empty for all other forms.
        begin, end: where they begin and end in the part.
        count: how many there are.

    Attributes:
        splittable: True if ranges of them can be decoded; cyclic differences and LZMA are one stream each.
        chunk: codes that are decoded together; ranges begin and end at multiples of it, or at `count`.

    Raises:
        ValueError, _native.Truncated: the bytes do not fit the recipe, or are too few for `count`.
    """

    def __init__(self, recipe: CodesRecipe, side: Bytes, begin: int, end: int, count: int) -> None:
        self._recipe, self._begin, self._end, self._count = recipe, begin, end, count
        self.splittable = isinstance(recipe, CoderConfig | BitPacked)
        self.chunk = recipe.chunk if isinstance(recipe, CoderConfig) else MAX_CHUNK
        if isinstance(recipe, CoderConfig):
            self._chunks = CodedChunks(recipe, side, begin, end, count)
            return
        if side.nbytes:
            raise ValueError("side data of codes that have none")
        size = end - begin
        if isinstance(recipe, BitPacked) and size != (count * recipe.bits + 7) // 8:
            raise _native.Truncated(f"{size} bytes for {count} codes of {recipe.bits} bits")
        if not self.splittable and size < -(-count // MAX_CHUNK) * MIN_CHUNK_BYTES:
            raise _native.Truncated("the codes are too short for the tensors' shapes")

    def byte_range(self, lo: int, hi: int) -> tuple[int, int]:
        """Return (begin, end) in the part of the bytes that hold the codes [lo, hi)."""
        match self._recipe:
            case CoderConfig():
                return self._chunks.byte_range(lo, hi)
            case BitPacked(bits):  # chunks begin at whole bytes
                return self._begin + lo * bits // 8, self._begin + (hi * bits + 7) // 8
        return self._begin, self._end

    def decode(self, stored: Bytes, lo: int, hi: int, context: CodingContext, threads: int) -> Bytes:
        """Decode the codes [lo, hi).

        Args:
            stored: the bytes of `byte_range`.
            context: codes of the parent or of other tensors (`base`), and the members' moments, if the recipe uses
                them; of this range.

        Raises:
            ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged.
        """
        match self._recipe:
            case BitPacked(bits):
                return _native.unpack_bits(stored, hi - lo, bits).astype(np.uint8)
            case LzmaCodes(bits):
                count = hi - lo
                lzma = _lzma_module()
                size = (count * bits + 7) // 8
                decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_LZMA_MEMORY)
                try:
                    packed = decompressor.decompress(_unpad(stored).tobytes(), max_length=size + 1)
                except lzma.LZMAError as error:
                    raise ValueError(f"codes that are not LZMA: {error}") from error
                if len(packed) != size or not decompressor.eof or decompressor.unused_data:
                    raise ValueError(f"LZMA gives {len(packed)} bytes for {count} codes of {bits} bits")
                return _native.unpack_bits(np.frombuffer(packed, np.uint8), count, bits).astype(np.uint8)
            case CoderConfig():
                out = np.empty(hi - lo, np.uint8)
                self._chunks.decode(BYTE_FORMAT, stored, out, context, lo, threads)
            case CyclicDelta(modulus, rearranged, runs):
                out = np.empty(hi - lo, np.uint8)
                data = _unpad(stored)
                _native.cyclic_decode(data, context.base, modulus=modulus, rearranged=rearranged, runs=runs, out=out)
        return out


_SIDE_SIZE = struct.Struct("<I")  # bytes of the side data of a small array; its codes follow
_LEVEL_MARGIN = 8


def encode_small_array(
    number_format: NumberFormat, values: Bytes, base: Bytes | None
) -> tuple[CoderConfig | None, bytes]:
    """Encode a short array of floats: (configuration, bytes); the configuration is None for uncompressed values.

    Args:
        values: the numbers as uint8.
        base: as many numbers that the values are close to and that the decoder has; or None.
    """
    best: tuple[CoderConfig | None, bytes] = (None, values.tobytes())
    if values.nbytes:
        fine = min(2, number_format.mantissa)
        largest_level = _max_magnitude(number_format, values) >> (number_format.mantissa - fine)
        configs = [CoderConfig("level", fine=fine, bias=largest_level + _LEVEL_MARGIN - 126)]
        if base is not None:
            top = _max_magnitude(number_format, base) >> number_format.mantissa
            configs.append(CoderConfig("delta", predictor="base", top=top))
        for config in configs:
            side, codes = config.encode(number_format, values, CodingContext(base=base), 1)
            stored = _SIDE_SIZE.pack(side.nbytes) + side.tobytes() + codes.tobytes()
            best = min(best, (config, stored), key=lambda pair: len(pair[1]))
    return best


def decode_small_array(
    number_format: NumberFormat, config: CoderConfig | None, data: Bytes, out: Bytes, base: Bytes | None
) -> None:
    """Decode a short array into `out`, the inverse of `encode_small_array`.

    Raises:
        ValueError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged.
    """
    if config is None:
        if data.nbytes != out.nbytes:
            raise ValueError(f"{data.nbytes} bytes for a small array of {out.nbytes}")
        out[:] = data
        return
    (side,) = _SIDE_SIZE.unpack(data[: _SIDE_SIZE.size].tobytes())
    if config.needs_base and base is None:
        raise ValueError("a small array needs a base and has none")
    if side > data.nbytes - _SIDE_SIZE.size:
        raise _native.Truncated("a small array ends too early")
    start = _SIDE_SIZE.size
    config.decode(number_format, data[start : start + side], data[start + side :], out, CodingContext(base=base), 1)


def _max_magnitude(number_format: NumberFormat, values: Bytes) -> int:
    """The largest number, as an integer without its sign bit."""
    return int((values.view(f"u{number_format.itemsize}") & ((1 << (number_format.width - 1)) - 1)).max())


PART_SIZES = struct.Struct("<IQQ")
"""Bytes of the codes' side data, of the codes and of the centers; they begin the part, exact values end it."""
_EXACT_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class CodebookInput:
    """The codebook tensors of one record, to be encoded."""

    name: str  # name of the record
    infos: tuple[TensorInfo, ...]
    tensors: tuple[Tensor, ...]  # the values of each member as a reader gets them
    # The quantized form of each member; all alike in `bins`, `first_code`, `residual` and dtype of `exact`.
    quantized: tuple[CodebookTensor, ...]
    # The members' moments, if a decoder has them; nothing else of it is used.
    context: CodingContext = field(default_factory=CodingContext)
    moments: tuple[tuple[int, int], ...] = ()  # as in `recipe.CodebookRecipe`
    # The parent, if it has codes of every member or if the members are residual; else None.
    reference: Reference | None = None
    # Codes of other tensors of the file that are context in place of the parent's, one tensor for each member; or ().
    context_codes: tuple[Tensor, ...] = ()
    context_ordinals: tuple[int, ...] = ()  # ordinals of those tensors in the file


def encode_codebook_record(
    record: CodebookInput, *, coders: Sequence[str] = CODERS, threads: int | None = None
) -> EncodedRecord:
    """Encode a record in the smallest form that `coders` allow.

    Raises:
        ValueError: the quantized tensors are malformed, or do not decode to the given values.
    """
    digest = digest_arrays(record.tensors)
    infos, first = record.infos, record.quantized[0]
    codes = _concat_codes([tensor.codes for tensor in record.quantized])
    parent = ParentCodes.from_reference(infos, record.reference, residual=first.residual)
    if record.context_codes and not first.residual:
        parent = None
    _check_readable(record, parent, digest)
    context = _concat_codes(record.context_codes) if record.context_codes else None if parent is None else parent.codes
    forms = encode_forms(codes, first.num_codes, context, record.context, coders, default_threads(threads))
    codes_recipe, side, stored = min(forms, key=lambda form: len(form[1]) + len(form[2]))
    parent_centers = None if parent is None else _stack_centers(parent.quantized, first.bins)
    own_centers = np.concatenate([tensor_bytes(tensor.centers) for tensor in record.quantized])
    centers, center_bytes = encode_small_array(NUMBER_FORMATS["F32"], own_centers, parent_centers)
    exact_dtype = _EXACT_DTYPES[first.exact.dtype]
    values = np.concatenate([tensor_bytes(tensor.exact) for tensor in record.quantized])
    parent_values = None
    if parent is not None:
        pairs = zip(parent.tensors, record.quantized, strict=True)
        at_exact = [base[tensor.protected.cpu()].to(first.exact.dtype) for base, tensor in pairs]
        parent_values = np.concatenate([tensor_bytes(member) for member in at_exact])
    exacts, exact_bytes = encode_small_array(NUMBER_FORMATS[exact_dtype], values, parent_values)
    sizes = PART_SIZES.pack(len(side), len(stored), len(center_bytes))
    parts = {"symbols": b"".join([sizes, side, stored, center_bytes, exact_bytes])}
    uses_moments = isinstance(codes_recipe, CoderConfig) and codes_recipe.moments
    recipe = CodebookRecipe(
        bins=first.bins,
        first=first.first_code,
        codes=codes_recipe,
        centers=centers,
        exact=exact_dtype,
        exacts=exacts,
        base=parent is not None and not first.residual,
        moments=record.moments if uses_moments else (),
        residual=first.residual,
        contexts=record.context_ordinals if record.context_codes and recipes.uses_context(codes_recipe) else (),
    )
    base = None if parent is None else parent.digest
    return EncodedRecord(record.name, infos, recipes.to_json(recipe), parts, digest, base)


def _check_readable(record: CodebookInput, parent: ParentCodes | None, digest: str) -> None:
    """Raise ValueError for what no reader would accept, so that a scheme's mistake never becomes a checkpoint."""
    shapes = [info.shape for info in record.infos]
    code_shapes = [tuple(tensor.codes.shape) for tensor in record.quantized]
    kinds = {(x.bins, x.first_code, x.residual, x.exact.dtype) for x in record.quantized}
    if code_shapes != shapes or len(kinds) != 1:
        raise ValueError("codebook tensors of other shapes than their values, or of several kinds")
    context_shapes = [tuple(codes.shape) for codes in record.context_codes]
    if context_shapes and (context_shapes != shapes or len(record.context_ordinals) != len(shapes)):
        raise ValueError("codebook tensors whose context codes have other shapes")
    for tensor in record.quantized:
        if not 0 <= tensor.first_code <= RESERVED_CODES or not 0 < tensor.bins <= MAX_CODES - tensor.first_code:
            raise ValueError("a codebook tensor with more codes than a byte has")
        if tensor.codes.numel() and int(tensor.codes.max()) >= tensor.num_codes:
            raise ValueError("a codebook tensor with a code beyond the last center")
        if int(tensor.protected.sum()) != tensor.exact.numel():
            raise ValueError("a codebook tensor whose exact values do not match its codes")
        if not bool(tensor.centers.isfinite().all()) or bool((tensor.centers.diff() < 0).any()):
            raise ValueError("a codebook tensor whose centers do not rise, or are not finite")
    if record.quantized[0].residual and parent is None:
        raise ValueError("codebook tensors of differences to a parent that is missing")
    bases = parent.tensors if parent is not None and parent.codes is None else [None] * len(record.infos)
    values = [
        tensor.dequantize(torch_dtype(info.dtype), base)
        for info, tensor, base in zip(record.infos, record.quantized, bases, strict=True)
    ]
    if digest_arrays(values) != digest:
        raise ValueError("codebook tensors that stand for other values than the tensors have")


@dataclass(frozen=True)
class ParentCodes:
    """The parent's values and codes of a record's tensors.

    A residual record needs values alone, so its parent need not be quantized.
    """

    quantized: tuple[CodebookTensor, ...]  # the parent's quantized form of each member; () for a residual record
    tensors: tuple[Tensor, ...]  # the parent's decoded values of each member
    codes: Bytes | None  # uint8, the parent's codes of all members; None for a residual record

    @classmethod
    def from_reference(
        cls, infos: Sequence[TensorInfo], reference: Reference | None, *, residual: bool
    ) -> ParentCodes | None:
        """Collect what a record needs of its parent; None if the parent lacks some of it."""
        if reference is None:
            return None
        if not residual and not all(reference.has_codes(info.name) for info in infos):
            return None
        members = [reference.get_like(info.name, info.shape, torch_dtype(info.dtype)) for info in infos]
        tensors = tuple(tensor for tensor in members if tensor is not None)
        if len(tensors) < len(infos):
            return None
        if residual:
            return cls((), tensors, None)
        parents = (reference.quantized[info.name] for info in infos)
        quantized = tuple(tensor for tensor in parents if isinstance(tensor, CodebookTensor))
        return cls(quantized, tensors, _concat_codes([tensor.codes for tensor in quantized]))

    @property
    def digest(self) -> str:
        """Digest of the codes, if any, followed by the values."""
        return digest_arrays(self.tensors if self.codes is None else [self.codes, *self.tensors])


def _stack_centers(parents: Sequence[CodebookTensor], bins: int) -> Bytes | None:
    """Return the centers of all parents as uint8; None unless there are some and each has `bins` of them."""
    if not parents or any(tensor.bins != bins for tensor in parents):
        return None
    return np.concatenate([tensor_bytes(tensor.centers) for tensor in parents])


def _concat_codes(codes: Sequence[Tensor]) -> Bytes:
    arrays = [tensor_bytes(member) for member in codes]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class CodebookDecoder(RecordDecoder):
    """Decodes codebook tensors; its unit is one value.

    Only the whole record can be decoded if it has exact values, since their number before a range depends on all codes
    before it; if its codes are one stream; and if its dtypes differ.
    """

    def __init__(self, view: RecordView, recipe: CodebookRecipe) -> None:
        infos = view.infos
        if any(DTYPES[info.dtype].kind != "float" or ITEMSIZE[info.dtype] < 2 for info in infos):
            raise ValueError("codebook tensors that are not floats")
        super().__init__(view, [info.numel for info in infos])
        self._recipe = recipe
        self.unit = NUMBER_FORMATS[infos[0].dtype].itemsize
        self.uses_parent = recipe.base or recipe.residual
        sizes = PART_SIZES.unpack(view.read("symbols", 0, min(PART_SIZES.size, view.sizes["symbols"])))
        codes_begin, codes_end, self._exact_begin = accumulate(sizes[1:], initial=PART_SIZES.size + sizes[0])
        if self._exact_begin > view.sizes["symbols"]:
            raise _native.Truncated("the codes end too early")
        side = view.read_array("symbols", PART_SIZES.size, codes_begin)
        self._codes = StoredCodes(recipe.codes, side, codes_begin, codes_end, self.count)
        self._centers_begin, self.chunk = codes_end, self._codes.chunk
        has_exact = self._exact_begin < view.sizes["symbols"] or recipe.exacts is not None
        self.splittable = self._codes.splittable and not has_exact and len({info.dtype for info in infos}) == 1
        self._moments = moment_pairs(view, recipe.moments)
        self._context_infos = [view.tensor_at(ordinal) for ordinal in recipe.contexts]
        if self._context_infos and [info.shape for info in self._context_infos] != [info.shape for info in infos]:
            raise ValueError("context codes of tensors that do not fit")
        self._centers: list[Tensor] = []

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        ranges = self._tensor_ranges(lo, hi)
        out = self._parent_ranges(ranges) if self._recipe.residual else []
        out += self._context_ranges(ranges)
        for moments in self._used_moments():
            out += self._ranges_of(moments, ranges)
        return out

    def required_parents(self) -> Sequence[str]:
        return [info.name for info in self._view.infos] if self._recipe.base else []

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        recipe, infos = self._recipe, self._view.infos
        params = [fetch(name) for name in self.required_parents()]
        parents = [param for param in params if isinstance(param, CodebookTensor) and not param.residual]
        if len(parents) < len(params):
            raise ValueError("a parent whose tensors are not quantized")
        stored = self._view.read_array("symbols", self._centers_begin, self._exact_begin)
        out = np.empty(4 * recipe.bins * len(infos), np.uint8)
        decode_small_array(NUMBER_FORMATS["F32"], recipe.centers, stored, out, _stack_centers(parents, recipe.bins))
        rows = torch.from_numpy(out).view(torch.float32).reshape(len(infos), recipe.bins)
        if not bool(rows.isfinite().all()) or bool((rows.diff(dim=1) < 0).any()):
            raise ValueError("centers that do not rise, or are not finite")
        self._centers = [*rows]
        exact, no_codes = torch.empty(0, dtype=torch_dtype(recipe.exact)), torch.empty(0, dtype=torch.uint8)
        return {
            info.name: CodebookTensor(no_codes, centers, exact, recipe.first, recipe.residual)
            for info, centers in zip(infos, self._centers, strict=True)
        }

    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        recipe, ranges = self._recipe, self._tensor_ranges(lo, hi)
        if inputs.base_digests is not None and self.uses_parent:
            parents = (self._parent_codes(ranges) if recipe.base else []) + self._parent_ranges(ranges)
            inputs.base_digests.check_base(digest_arrays(inputs.fetch([span]) for span in parents))
        if not self._centers:
            self.quantizer_params(inputs.fetch_params)
        context = self._context_ranges(ranges)
        moments = [self._fetch_float32(moments, ranges, inputs.fetch) for moments in self._used_moments()]
        moment1, moment2 = moments or (None, None)
        arrays = CodingContext(
            base=concat([inputs.fetch(context)]) if context else None, moment1=moment1, moment2=moment2
        )
        stored = self._view.read_array("symbols", *self._codes.byte_range(lo, hi))
        codes = self._codes.decode(stored, lo, hi, arrays, inputs.threads)
        if int(codes.max(initial=0)) >= self._recipe.first + self._recipe.bins:
            raise ValueError("a code beyond the last center")
        ends = np.cumsum([end - begin for _, _, begin, end in ranges])
        shaped = [
            torch.from_numpy(part).reshape(info.shape if part.size == info.numel else -1)
            for part, (_, info, _, _) in zip(np.split(codes, ends[:-1]), ranges, strict=True)
        ]
        bases = self._parent_values(ranges, inputs.fetch) if recipe.residual else [None] * len(ranges)
        exact = self._decode_exact(ranges, shaped, inputs.fetch)
        out = []
        for (index, info, _, _), member, values, base in zip(ranges, shaped, exact, bases, strict=True):
            name = self._context_infos[index].name if self._context_infos else ""
            tensor = CodebookTensor(member, self._centers[index], values, recipe.first, recipe.residual, name)
            base = None if base is None else base.reshape(member.shape)
            out.append(DecodedPart(tensor_bytes(tensor.dequantize(torch_dtype(info.dtype), base)), tensor))
        if inputs.value_digests is not None:
            inputs.value_digests.check_values(digest_arrays(part.values for part in out if part.values is not None))
        return out

    def _decode_exact(self, ranges: Sequence[TensorRange], codes: Sequence[Tensor], fetch: FetchRanges) -> list[Tensor]:
        """Return the exact values of each part; codes that stand for values which are not there are refused."""
        recipe, dtype = self._recipe, torch_dtype(self._recipe.exact)
        if not recipe.first:
            masks = [torch.zeros_like(member, dtype=torch.bool) for member in codes]
        else:
            masks = [member == recipe.first - 1 for member in codes]
        counts = [int(mask.sum()) for mask in masks]
        base = None
        if recipe.exacts is not None and recipe.exacts.needs_base and self.uses_parent:
            parents = zip(self._parent_values(ranges, fetch), masks, strict=True)
            base = np.concatenate([tensor_bytes(parent[mask.reshape(-1)].to(dtype)) for parent, mask in parents])
        out = np.empty(sum(counts) * dtype.itemsize, np.uint8)
        stored = self._view.read_array("symbols", self._exact_begin)
        decode_small_array(NUMBER_FORMATS[recipe.exact], recipe.exacts, stored, out, base)
        values = torch.from_numpy(out).view(dtype) if out.nbytes else torch.empty(0, dtype=dtype)
        return [*torch.split(values, counts)]

    def _used_moments(self) -> list[list[TensorInfo]]:
        """Return the first and the second moments if the codes are coded under them; else []."""
        uses_moments = isinstance(self._recipe.codes, CoderConfig) and self._recipe.codes.moments
        return [[pair[side] for pair in self._moments] for side in (0, 1)] if self._moments and uses_moments else []

    def _context_ranges(self, ranges: Sequence[TensorRange]) -> list[ByteRange]:
        if not recipes.uses_context(self._recipe.codes):
            return []
        if self._context_infos:
            return [
                ByteRange(True, self._context_infos[index].name, begin, end, True) for index, _, begin, end in ranges
            ]
        return self._parent_codes(ranges) if self._recipe.base else []

    def _parent_codes(self, ranges: Sequence[TensorRange]) -> list[ByteRange]:
        return [ByteRange(False, info.name, begin, end, codes=True) for _, info, begin, end in ranges]

    def _parent_values(self, ranges: Sequence[TensorRange], fetch: FetchRanges) -> list[Tensor]:
        spans = zip(self._parent_ranges(ranges), ranges, strict=True)
        return [flat_tensor(fetch([span]), info.dtype, end - begin) for span, (_, info, begin, end) in spans]
