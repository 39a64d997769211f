"""Encodes records of exact values, entropy-coded or not, and decodes records of every kind, in ranges or whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint._native import xxh3_128
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.codebook_record import CodebookDecoder
from shrinkpoint.codec.coder import (
    NUMBER_FORMATS,
    TAP_SIZES,
    Bytes,
    CodedChunks,
    CoderConfig,
    CodingContext,
    default_threads,
    digest_arrays,
    matrix_shapes,
    num_numbers,
    pack_float32,
    pack_tensors,
    tap,
    tap_context,
    taps_innermost,
    taps_outermost,
)
from shrinkpoint.codec.decoder import (
    ByteRange,
    DecodedPart,
    DecodedSources,
    DecodeInputs,
    RecordDecoder,
    RecordDigests,
    RecordView,
    TensorRange,
    cast,
    concat,
    decode_errors,
    moment_pairs,
)
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.lattice_decoder import LatticeDecoder
from shrinkpoint.codec.recipe import (
    CodebookRecipe,
    CodedRecipe,
    CopyRecipe,
    LatticeRecipe,
    PlainRecipe,
    Recipe,
    SameRecipe,
    TwisterRecipe,
)
from shrinkpoint.codec.reference import (
    DecodedTensors,
    LatticeSource,
    QuantizedTensor,
    Reference,
    TensorSource,
    hashed_values,
)
from shrinkpoint.codec.twister_record import TwisterDecoder
from shrinkpoint.tensors.dtypes import tensor_from_bytes, torch_dtype
from shrinkpoint.tensors.info import ITEMSIZE, EncodedRecord, TensorInfo


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
        ranges = self._tensor_ranges(lo, hi)
        out = self._parent_ranges(ranges) if self.uses_parent else []
        if self._uses_moments:
            out += self._ranges_of(self._first_moments, ranges) + self._ranges_of(self._second_moments, ranges)
        if self._uses_parent_moments:
            out += self._ranges_of(self._first_moments, ranges, same_file=False)
        return out

    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        ranges = self._tensor_ranges(lo, hi)

        def floats(moments: Sequence[TensorInfo], *, same_file: bool = True) -> Bytes:
            return taps_outermost(
                self._fetch_float32(moments, ranges, inputs.fetch, same_file=same_file), 4, self._taps
            )

        base = moment1 = moment2 = None
        if self.uses_parent:
            base = concat([inputs.fetch(self._parent_ranges(ranges))])
            base = taps_outermost(base, self._number_format.itemsize, self._taps)
        if self._uses_moments:
            moment1, moment2 = floats(self._first_moments), floats(self._second_moments)
        context = CodingContext(
            base=base,
            moment1=moment1,
            moment2=moment2,
            moment1_base=floats(self._first_moments, same_file=False) if self._uses_parent_moments else None,
            shapes=self._shapes,
        )
        if inputs.base_digests is not None and context.base is not None:
            inputs.base_digests.check_base(digest_arrays([context.base]))
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
            inputs.value_digests.check_values(digest_arrays([values]))
        values = taps_innermost(values, self._number_format.itemsize, self._taps)
        return self._split(values, ranges)

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


def _uses_moments(config: CoderConfig) -> bool:
    return config.moments or config.predictor in ("adam", "square") or config.companion == "moment1"


_CASTS = {("F32", "BF16"), ("F32", "F16")}  # (dtype of the source, dtype of the copy)
_MERGE_GAP = 1 << 16
"""Bytes between two ranges of a plain or copied stream up to which one read of both is faster than two."""
_MAX_SMALL_BYTES = 1 << 14  # Bytes of a tensor up to which it is copied together with its neighbours


def encode_plain(name: str, infos: Sequence[TensorInfo], tensors: Mapping[str, Tensor]) -> EncodedRecord:
    """Encode tensors as their uncompressed bytes."""
    values = pack_tensors(infos, tensors, 1)
    return EncodedRecord(name, tuple(infos), recipes.to_json(PlainRecipe()), {"values": values.data}, xxh3_128(values))


def encode_same(name: str, infos: Sequence[TensorInfo], reference: Reference) -> EncodedRecord:
    """Encode tensors as equal to the parent's tensors of the same names."""
    digest = digest_arrays(hashed_values(reference.tensors, info.name) for info in infos)
    return EncodedRecord(name, tuple(infos), recipes.to_json(SameRecipe()), {}, digest, digest)


def encode_copies(
    name: str, infos: Sequence[TensorInfo], ordinals: Sequence[int], tensors: Mapping[str, Tensor]
) -> EncodedRecord:
    """Encode tensors as copies of earlier tensors of the same file, which `ordinals` refer to."""
    digest = digest_arrays(tensors[info.name] for info in infos)
    return EncodedRecord(name, tuple(infos), recipes.to_json(CopyRecipe(tuple(ordinals))), {}, digest)


class PlainDecoder(RecordDecoder):
    """Reads values that are stored uncompressed; its unit is one byte."""

    merge_gap, cacheable = _MERGE_GAP, False

    def __init__(self, view: RecordView) -> None:
        super().__init__(view, [info.nbytes for info in view.infos])
        if self.count != view.sizes["values"]:
            raise ValueError(f"{view.sizes['values']} bytes for {self.count} bytes of tensors")

    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        values = inputs.allocate(hi - lo)
        values[:] = self._view.read_array("values", lo, hi)
        if inputs.digests is not None:
            inputs.digests.check_values(digest_arrays([values]))
        return self._split(values, self._tensor_ranges(lo, hi))

    def _unit_bytes(self, info: TensorInfo) -> int:
        return 1


class CopyDecoder(RecordDecoder):
    """Copies earlier tensors of the same file, and casts them where they are wider; its unit is one byte."""

    merge_gap, cacheable = _MERGE_GAP, False

    def __init__(self, view: RecordView, sources: Sequence[int]) -> None:
        super().__init__(view, [info.nbytes for info in view.infos])
        if len(sources) != len(view.infos):
            raise ValueError(f"{len(sources)} sources for {len(view.infos)} copies")
        self._sources = [view.tensor_at(ordinal) for ordinal in sources]
        for info, source in zip(view.infos, self._sources, strict=True):
            if source.shape != info.shape:
                raise ValueError(f"a copy of shape {list(info.shape)} has a source of shape {list(source.shape)}")
            if source.dtype != info.dtype and (source.dtype, info.dtype) not in _CASTS:
                raise ValueError(f"a copy as {info.dtype} of {source.dtype}")

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        return [self._source_range(span) for span in self._tensor_ranges(lo, hi)]

    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        out: list[DecodedPart] = []
        for (source, dtype, _), batch in groupby(self._tensor_ranges(lo, hi), self._batch_key):
            spans = [*batch]
            values = inputs.fetch([self._source_range(span) for span in spans])
            if source == dtype:
                copies = inputs.allocate(values.nbytes)
                copies[:] = values
            else:
                copies = cast(values, source, dtype)
            size, start = 1 if source == dtype else ITEMSIZE[dtype], 0
            for span in spans:  # the first and the last may begin and end inside of a number
                begin = start + span.begin % size
                out.append(DecodedPart(copies[begin : begin + span.end - span.begin]))
                start = begin - span.begin + -(-span.end // size) * size
        if inputs.digests is not None:
            inputs.digests.check_values(digest_arrays(part.values for part in out if part.values is not None))
        return out

    def _batch_key(self, span: TensorRange) -> tuple[str, str, int]:
        """Group consecutive small tensors, each call for which would cost more than its copying."""
        small = span.info.nbytes <= _MAX_SMALL_BYTES
        return self._sources[span.member].dtype, span.info.dtype, -1 if small else span.member

    def _source_range(self, span: TensorRange) -> ByteRange:
        source, size = self._sources[span.member], ITEMSIZE[span.info.dtype]
        if source.dtype == span.info.dtype:
            return ByteRange(True, source.name, span.begin, span.end)
        source_size = ITEMSIZE[source.dtype]
        return ByteRange(True, source.name, span.begin // size * source_size, -(-span.end // size) * source_size)


def record_decoder(view: RecordView) -> RecordDecoder:
    """Return the decoder of a record.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged; or the record
            is of kind `same`, for which the parent's record is to be decoded instead.
    """
    match view.parsed_recipe:
        case PlainRecipe():
            return PlainDecoder(view)
        case CopyRecipe(sources):
            return CopyDecoder(view, sources)
        case CodedRecipe() as recipe:
            return CodedDecoder(view, recipe)
        case CodebookRecipe() as recipe:
            return CodebookDecoder(view, recipe)
        case LatticeRecipe() as recipe:
            return LatticeDecoder(view, recipe)
        case TwisterRecipe() as recipe:
            return TwisterDecoder(view, recipe)
        case SameRecipe():
            raise ValueError("a record of kind same has no bytes to decode")


def required_tensors(view: RecordView) -> list[tuple[bool, str]]:
    """Return the tensors that decoding the whole record needs: (whether of its own file or of the parent, name).

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged.
    """
    members = [(False, info.name) for info in view.infos]
    if isinstance(view.parsed_recipe, SameRecipe):
        return members
    decoder = record_decoder(view)
    own = [(True, view.tensor_at(ordinal).name) for ordinal in recipes.ordinals(view.parsed_recipe)]
    ranges = decoder.required_ranges(0, decoder.count)
    parent = [(False, span.name) for span in ranges if not span.same_file] + (members if decoder.uses_parent else [])
    return list(dict.fromkeys(own + parent))


def decode(
    encoded: EncodedRecord,
    decoded: Mapping[str, Tensor],
    reference: Reference | None,
    *,
    quantized: Mapping[str, QuantizedTensor] | None = None,
    where: str = "record",
    recipe: Recipe | None = None,
    allocate: Callable[[int], Bytes] = _native.empty,
    allocate_codes: Callable[[int], Bytes] = _native.empty,
    threads: int | None = None,
    with_values: bool = True,
    overwrite_base: bool = False,
    trust_base: bool = False,
) -> Reference:
    """Decode a record to tensors by name and their quantized forms, and check the digest of their values.

    Args:
        encoded: the record; its parts have the right digests already.
        decoded: tensors of earlier records of the same file by name, in file order.
        quantized: the quantized form of those of them that are quantized.
        reference: the decoded parent, if the file is a delta.
        where: the file, for messages.
        recipe: that of the record, if it has been parsed already.
        allocate: returns uninitialized memory; an `Arena` for all records of a file saves time.
        allocate_codes: the same for codes on lattices, which a reference holds when the values are gone.
        threads: number of threads; None: one per core.
        with_values, trust_base: as in `DecodeInputs`.
        overwrite_base: as in `DecodeInputs`; after an error the parent's tensors of this record are not to be used.

    Raises:
        CorruptError, TruncatedError: the bytes are damaged.
        ChainError: the parent is missing, or is not the one that the record was encoded against.
    """
    where = f"{where}: record {encoded.name!r}"
    digests = RecordDigests(where, encoded.digest, encoded.base)
    try:
        sources = DecodedSources(decoded, quantized or {}, reference, digests)
        view = sources.view(encoded, recipe)
        if isinstance(view.parsed_recipe, SameRecipe):
            parent = sources.check_parent(encoded.infos)
            if with_values:
                digests.check_base(digest_arrays(hashed_values(parent.tensors, info.name) for info in encoded.infos))
            return parent.subset(info.name for info in encoded.infos)
        decoder = record_decoder(view)
        if decoder.uses_parent:
            sources.check_parent(encoded.infos)
        inputs = DecodeInputs(
            sources.fetch,
            sources.fetch_params,
            default_threads(None) if threads is None else threads,
            allocate,
            digests,
            sources.fetch_codes,
            with_values,
            overwrite_base,
            allocate_codes,
            trust_base,
            sources.fetch_lattice_tensor,
        )
        return _decoded_reference(encoded.infos, decoder.decode(0, decoder.count, inputs))
    except Exception:
        with decode_errors(where):
            raise


def _decoded_reference(infos: Sequence[TensorInfo], parts: Sequence[DecodedPart]) -> Reference:
    """The tensors of a record: on lattices those of codes, with values where these were decoded."""
    tensors: dict[str, TensorSource] = {}
    forms: dict[str, QuantizedTensor] = {}
    for info, part in zip(infos, parts, strict=True):
        values = None if part.values is None else tensor_from_bytes(part.values, info)
        if part.quantized is not None:
            forms[info.name] = part.quantized
        if isinstance(part.quantized, LatticeTensor):
            tensors[info.name] = LatticeSource(part.quantized, torch_dtype(info.dtype), values)
        elif values is not None:
            tensors[info.name] = values
    return Reference(DecodedTensors(tensors), forms)
