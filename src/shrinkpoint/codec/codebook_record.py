"""Encodes a record of codebook tensors to recipe and bytes, and decodes it. All arithmetic is exact.

Centers and exact values are short arrays inside the record: entropy-coded where that saves bytes, else stored
unchanged."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.code_streams import CODERS, BytesLike, decode_codes, encode_forms
from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES, CodebookTensor
from shrinkpoint.codec.coded_record import Chunks
from shrinkpoint.codec.coder import (
    BYTE_FORMAT,
    MAX_CHUNK,
    NUMBER_FORMATS,
    Bytes,
    CoderConfig,
    CodingContext,
    NumberFormat,
    default_threads,
)
from shrinkpoint.codec.decoder import (
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
from shrinkpoint.codec.pack import digest_arrays, num_numbers
from shrinkpoint.codec.recipe import BitPacked, CodebookRecipe
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.dtypes import tensor_bytes, tensor_from_bytes, torch_dtype
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

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
        for config in _small_array_configs(number_format, values, base):
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


def _small_array_configs(number_format: NumberFormat, values: Bytes, base: Bytes | None) -> Iterator[CoderConfig]:
    fine = min(2, number_format.mantissa)
    words = values.view(f"u{number_format.itemsize}") & ((1 << (number_format.width - 1)) - 1)
    largest_level = int(words.max()) >> (number_format.mantissa - fine)
    yield CoderConfig("level", fine=fine, bias=largest_level + _LEVEL_MARGIN - 126)
    if base is not None:
        base_words = base.view(f"u{number_format.itemsize}") & ((1 << (number_format.width - 1)) - 1)
        top = int(base_words.max()) >> number_format.mantissa
        yield CoderConfig("delta", predictor="base", top=top)


PART_SIZES = struct.Struct("<IQQ")
"""Bytes of the codes' side data, of the codes and of the centers; they begin the part, exact values end it."""
_EXACT_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class CodebookInput:
    """The codebook tensors of one record, to be encoded.

    Attributes:
        name: name of the record.
        infos: its tensors (members).
        tensors: the values of each member as a reader gets them.
        quantized: the quantized form of each member; all alike in `bins`, `first_code`, `residual` and dtype of
            `exact`.
        context: the members' moments, if a decoder has them; nothing else of it is used.
        moments: as in `recipe.CodebookRecipe`.
        reference: the parent, if it has codes of every member or if the members are residual; else None.
        context_codes: codes of other tensors of the file that are context in place of the parent's, one tensor for
            each member; or ().
        context_ordinals: ordinals of those tensors in the file.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    tensors: tuple[Tensor, ...]
    quantized: tuple[CodebookTensor, ...]
    context: CodingContext = field(default_factory=CodingContext)
    moments: tuple[tuple[int, int], ...] = ()
    reference: Reference | None = None
    context_codes: tuple[Tensor, ...] = ()
    context_ordinals: tuple[int, ...] = ()


def encode_codebook_record(
    record: CodebookInput, *, coders: Sequence[str] = CODERS, threads: int | None = None
) -> EncodedRecord:
    """Encode a record in the smallest form that `coders` allow.

    Raises:
        ValueError: the quantized tensors are malformed, or do not decode to the given values.
    """
    digest = digest_arrays(tensor_bytes(tensor) for tensor in record.tensors)
    infos, first = record.infos, record.quantized[0]
    codes = _concat_codes([tensor.codes for tensor in record.quantized])
    parent = ParentCodes.from_reference(infos, record.reference, residual=first.residual)
    if record.context_codes and not first.residual:
        parent = None
    _check_readable(record, parent, digest)
    context = _concat_codes(record.context_codes) if record.context_codes else None if parent is None else parent.codes
    forms = encode_forms(codes, first.num_codes, context, record.context, coders, default_threads(threads))
    codes_recipe, side, stored = min(forms, key=lambda form: len(form[1]) + len(form[2]))
    centers, center_bytes = _encode_centers(record.quantized, parent)
    exacts, exact_bytes = _encode_exact(record.quantized, parent)
    sizes = PART_SIZES.pack(len(side), len(stored), len(center_bytes))
    parts = {"symbols": b"".join([sizes, side, stored, center_bytes, exact_bytes])}
    uses_moments = isinstance(codes_recipe, CoderConfig) and codes_recipe.moments
    recipe = CodebookRecipe(
        bins=first.bins,
        first=first.first_code,
        codes=codes_recipe,
        centers=centers,
        exact=_EXACT_DTYPES[first.exact.dtype],
        exacts=exacts,
        base=parent is not None and not first.residual,
        moments=record.moments if uses_moments else (),
        residual=first.residual,
        contexts=record.context_ordinals if record.context_codes and recipes.uses_context(codes_recipe) else (),
    )
    base = None if parent is None else parent.digest
    return EncodedRecord(record.name, infos, recipes.to_json(recipe), parts, digest, base)


def decode_codebook_record(
    encoded: EncodedRecord,
    recipe: CodebookRecipe,
    moments: CodingContext,
    reference: Reference | None,
    context_codes: Sequence[Tensor],
    threads: int,
) -> tuple[dict[str, Tensor], dict[str, CodebookTensor]]:
    """Decode a record to tensors and codebook tensors by name, and check their digest.

    Args:
        moments: the members' moments, if the recipe uses them.
        reference: the parent, already verified, if the recipe uses it.
        context_codes: the codes of other tensors of the file, if the recipe uses them.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged.
    """
    infos = encoded.infos
    needed = recipe.base or recipe.residual
    parent = ParentCodes.from_reference(infos, reference, residual=recipe.residual) if needed else None
    if needed and parent is None:
        raise ValueError("a parent whose tensors are not quantized")
    context = _concat_codes(context_codes) if context_codes else None if parent is None else parent.codes
    side, stored, center_bytes, exact_bytes = _split_parts(encoded.parts["symbols"])
    codes = decode_codes(sum(info.numel for info in infos), recipe, side, stored, context, moments, threads)
    if codes.nbytes and int(codes.max()) >= recipe.first + recipe.bins:
        raise ValueError("a code beyond the last center")
    centers = decode_centers(len(infos), recipe, center_bytes, parent)
    members = np.split(codes, np.cumsum([info.numel for info in infos])[:-1])
    shaped = [torch.from_numpy(member).reshape(info.shape) for member, info in zip(members, infos, strict=True)]
    exact = _decode_exact(recipe, exact_bytes, parent, shaped)
    quantized = [
        CodebookTensor(member, table, values, recipe.first, recipe.residual)
        for member, table, values in zip(shaped, centers, exact, strict=True)
    ]
    values = _dequantize_all(infos, quantized, parent)
    digest = digest_arrays(map(tensor_bytes, values))
    if digest != encoded.digest:
        raise ValueError(f"decoded values with digest {digest}, expected {encoded.digest}")
    names = [info.name for info in infos]
    return dict(zip(names, values, strict=True)), dict(zip(names, quantized, strict=True))


def _dequantize_all(
    infos: Sequence[TensorInfo], quantized: Sequence[CodebookTensor], parent: ParentCodes | None
) -> list[Tensor]:
    """Return the values of each quantized tensor."""
    bases = parent.tensors if parent is not None and parent.codes is None else [None] * len(infos)
    return [
        tensor.dequantize(torch_dtype(info.dtype), base)
        for info, tensor, base in zip(infos, quantized, bases, strict=True)
    ]


def _check_readable(record: CodebookInput, parent: ParentCodes | None, digest: str) -> None:
    """Raise ValueError for what no reader would accept, so that a scheme's mistake never becomes a checkpoint."""
    shapes = [info.shape for info in record.infos]
    code_shapes = [tuple(tensor.codes.shape) for tensor in record.quantized]
    if code_shapes != shapes or len({*map(_codebook_kind, record.quantized)}) != 1:
        raise ValueError("codebook tensors of other shapes than their values, or of several kinds")
    context_shapes = [tuple(codes.shape) for codes in record.context_codes]
    if context_shapes and (context_shapes != shapes or len(record.context_ordinals) != len(shapes)):
        raise ValueError("codebook tensors whose context codes have other shapes")
    for tensor in record.quantized:
        _check_codebook(tensor)
    if record.quantized[0].residual and parent is None:
        raise ValueError("codebook tensors of differences to a parent that is missing")
    values = _dequantize_all(record.infos, record.quantized, parent)
    if digest_arrays(map(tensor_bytes, values)) != digest:
        raise ValueError("codebook tensors that stand for other values than the tensors have")


def _codebook_kind(tensor: CodebookTensor) -> tuple[object, ...]:
    """Return the properties that must be equal for all members of a record."""
    return tensor.bins, tensor.first_code, tensor.residual, tensor.exact.dtype


def _check_codebook(tensor: CodebookTensor) -> None:
    """Raise ValueError if codes, centers and exact values do not fit each other."""
    if not 0 <= tensor.first_code <= RESERVED_CODES or not 0 < tensor.bins <= MAX_CODES - tensor.first_code:
        raise ValueError("a codebook tensor with more codes than a byte has")
    if tensor.codes.numel() and int(tensor.codes.max()) >= tensor.num_codes:
        raise ValueError("a codebook tensor with a code beyond the last center")
    if int(tensor.protected.sum()) != tensor.exact.numel():
        raise ValueError("a codebook tensor whose exact values do not match its codes")
    if not bool(tensor.centers.isfinite().all()) or bool((tensor.centers.diff() < 0).any()):
        raise ValueError("a codebook tensor whose centers do not rise, or are not finite")


def codebook_base_digest(infos: Sequence[TensorInfo], recipe: CodebookRecipe, reference: Reference) -> str | None:
    """Return the digest that a record stores of its base; None if it needs codes that the parent does not have."""
    parent = ParentCodes.from_reference(infos, reference, residual=recipe.residual)
    return None if parent is None else parent.digest


@dataclass(frozen=True)
class ParentCodes:
    """The parent's values and codes of a record's tensors.

    A residual record needs values alone, so its parent need not be quantized.

    Attributes:
        quantized: the parent's quantized form of each member; () for a residual record.
        tensors: the parent's decoded values of each member.
        codes: uint8, the parent's codes of all members; None for a residual record.
    """

    quantized: tuple[CodebookTensor, ...]
    tensors: tuple[Tensor, ...]
    codes: Bytes | None

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
        values = [tensor_bytes(tensor) for tensor in self.tensors]
        return digest_arrays(values if self.codes is None else [self.codes, *values])

    def centers(self, bins: int) -> Bytes | None:
        """Return the parent's centers of all members as uint8; None unless each member has `bins` of them."""
        if not self.quantized or any(tensor.bins != bins for tensor in self.quantized):
            return None
        return np.concatenate([tensor_bytes(tensor.centers) for tensor in self.quantized])

    def values_at(self, masks: Sequence[Tensor], dtype: torch.dtype) -> Bytes:
        """Return the values where a mask is true (bool, one mask a member), cast to `dtype`, as uint8."""
        values = [tensor[mask].to(dtype) for tensor, mask in zip(self.tensors, masks, strict=True)]
        return np.concatenate([tensor_bytes(value) for value in values])


def _split_parts(stored: BytesLike) -> list[Bytes]:
    """Split a part into side data, codes, centers and exact values."""
    data = np.frombuffer(stored, np.uint8)
    sizes = PART_SIZES.unpack(data[: PART_SIZES.size].tobytes())
    if sum(sizes) > data.nbytes - PART_SIZES.size:
        raise _native.Truncated("the codes end too early")
    return np.split(data, np.cumsum([PART_SIZES.size, *sizes]))[1:]


def _encode_centers(
    quantized: Sequence[CodebookTensor], parent: ParentCodes | None
) -> tuple[CoderConfig | None, bytes]:
    centers = np.concatenate([tensor_bytes(tensor.centers) for tensor in quantized])
    base = None if parent is None else parent.centers(quantized[0].bins)
    return encode_small_array(NUMBER_FORMATS["F32"], centers, base)


def decode_centers(members: int, recipe: CodebookRecipe, stored: Bytes, parent: ParentCodes | None) -> list[Tensor]:
    """Decode the centers of each member: float32, of shape (bins,).

    Raises:
        ValueError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged.
    """
    out = np.empty(4 * recipe.bins * members, np.uint8)
    base = None if parent is None else parent.centers(recipe.bins)
    decode_small_array(NUMBER_FORMATS["F32"], recipe.centers, stored, out, base)
    centers = torch.from_numpy(out).view(torch.float32).reshape(members, recipe.bins)
    if not bool(centers.isfinite().all()) or bool((centers.diff(dim=1) < 0).any()):
        raise ValueError("centers that do not rise, or are not finite")
    return [*centers]


def _encode_exact(quantized: Sequence[CodebookTensor], parent: ParentCodes | None) -> tuple[CoderConfig | None, bytes]:
    dtype = quantized[0].exact.dtype
    values = np.concatenate([tensor_bytes(tensor.exact) for tensor in quantized])
    base = None if parent is None else parent.values_at([tensor.protected.cpu() for tensor in quantized], dtype)
    return encode_small_array(NUMBER_FORMATS[_EXACT_DTYPES[dtype]], values, base)


def _decode_exact(
    recipe: CodebookRecipe, stored: Bytes, parent: ParentCodes | None, codes: Sequence[Tensor]
) -> list[Tensor]:
    dtype = torch_dtype(recipe.exact)
    masks = [
        member == recipe.first - 1 if recipe.first else torch.zeros_like(member, dtype=torch.bool) for member in codes
    ]
    counts = [int(mask.sum()) for mask in masks]
    out = np.empty(sum(counts) * dtype.itemsize, np.uint8)
    base = None if parent is None else parent.values_at(masks, dtype)
    decode_small_array(NUMBER_FORMATS[recipe.exact], recipe.exacts, stored, out, base)
    values = torch.from_numpy(out).view(dtype) if out.nbytes else torch.empty(0, dtype=dtype)
    return [*torch.split(values, counts)]


def _concat_codes(codes: Sequence[Tensor]) -> Bytes:
    arrays = [tensor_bytes(member) for member in codes]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


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
