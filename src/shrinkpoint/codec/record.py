"""Encodes records that are not entropy-coded, and decodes records of every kind, in ranges or whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint._native import xxh3_128
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.codebook_record import CodebookDecoder
from shrinkpoint.codec.coded_record import CodedDecoder
from shrinkpoint.codec.coder import Bytes, default_threads
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
    decode_errors,
)
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.lattice_decoder import LatticeDecoder
from shrinkpoint.codec.pack import digest_arrays, pack_tensors
from shrinkpoint.codec.recipe import (
    CodebookRecipe,
    CodedRecipe,
    CopyRecipe,
    LatticeRecipe,
    PlainRecipe,
    Recipe,
    SameRecipe,
)
from shrinkpoint.codec.reference import DecodedTensors, LatticeSource, QuantizedTensor, Reference, TensorSource
from shrinkpoint.tensors.dtypes import tensor_bytes, tensor_from_bytes, torch_dtype
from shrinkpoint.tensors.info import ITEMSIZE, EncodedRecord, TensorInfo

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
    digest = _digest_of_members(infos, reference.tensors)
    return EncodedRecord(name, tuple(infos), recipes.to_json(SameRecipe()), {}, digest, digest)


def encode_copies(
    name: str, infos: Sequence[TensorInfo], ordinals: Sequence[int], tensors: Mapping[str, Tensor]
) -> EncodedRecord:
    """Encode tensors as copies of earlier tensors of the same file, which `ordinals` refer to."""
    digest = _digest_of_members(infos, tensors)
    return EncodedRecord(name, tuple(infos), recipes.to_json(CopyRecipe(tuple(ordinals))), {}, digest)


def _digest_of_members(infos: Sequence[TensorInfo], tensors: Mapping[str, Tensor]) -> str:
    return digest_arrays(tensor_bytes(tensors[info.name]) for info in infos)


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
            inputs.digests.check_values([values])
        return self._split(values, lo, hi)

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
            values = [inputs.fetch(self._source_range(span)) for span in spans]
            if len(values) == 1 and source != dtype:
                copies = cast(values[0], source, dtype)
            else:
                copies = inputs.allocate(sum(array.nbytes for array in values))
                copies = cast(np.concatenate(values, out=copies), source, dtype)
            size, start = 1 if source == dtype else ITEMSIZE[dtype], 0
            for span in spans:  # the first and the last may begin and end inside of a number
                begin = start + span.begin % size
                out.append(DecodedPart(copies[begin : begin + span.end - span.begin]))
                start = begin - span.begin + -(-span.end // size) * size
        if inputs.digests is not None:
            inputs.digests.check_values(part.values for part in out if part.values is not None)
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
                digests.check_base(tensor_bytes(parent.tensors[info.name]) for info in encoded.infos)
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
