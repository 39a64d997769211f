"""Encodes one record of tensors to recipe and bytes, and decodes records of every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint._native import xxh3_128
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.arena import Arena
from shrinkpoint.codec.codebook_record import codebook_base_digest, codebook_decoder, decode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coded_record import CodedDecoder
from shrinkpoint.codec.coder import MIN_CHUNK_BYTES, NUMBER_FORMATS, Bytes, CoderConfig, CodingContext, default_threads
from shrinkpoint.codec.decoder import (
    CopyDecoder,
    PartialDecoder,
    PlainDecoder,
    RecordView,
    decode_errors,
    has_same_layout,
)
from shrinkpoint.codec.lattice_record import decode_lattice_record, lattice_base_digest, lattice_decoder
from shrinkpoint.codec.pack import (
    TAP_SIZES,
    digest_arrays,
    is_codable_float,
    matrix_shapes,
    num_numbers,
    pack_float32,
    pack_tensors,
    tap,
    tap_context,
    unpack_tensors,
)
from shrinkpoint.codec.recipe import CodebookRecipe, CodedRecipe, CopyRecipe, LatticeRecipe, PlainRecipe, SameRecipe
from shrinkpoint.codec.reference import QuantizedTensor, Reference, names_by_ordinal
from shrinkpoint.errors import ChainError
from shrinkpoint.tensors.dtypes import as_bits, tensor_bytes, tensor_from_bytes, torch_dtype
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

_CASTS = {(torch.float32, "BF16"), (torch.float32, "F16")}  # (dtype of the source, dtype of the copy)


@dataclass(frozen=True)
class RecordInput:
    """The numbers of one record, to be entropy-coded.

    Attributes:
        name: name of the record.
        infos: its tensors (members).
        taps: as in `recipe.CodedRecipe`.
        values: their numbers, packed by `pack_tensors`, uint8.
        context: arrays that a decoder has as well.
        moments: as in `recipe.CodedRecipe`.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    taps: int
    values: Bytes
    context: CodingContext
    moments: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


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
    decoded: Mapping[str, Tensor],
    *,
    shapes: bool = True,
) -> CodingContext:
    """Collect the coding context of a record: the parent's numbers, and moments of the same file.

    Args:
        infos: the members of the record.
        taps: as in `recipe.CodedRecipe`.
        reference: the parent, if it holds every member; else None.
        moments: names of the (first, second) moment of each member; () for none.
        decoded: earlier tensors of the same file by name.
        shapes: whether matrix shapes are included, which row and column factors need.
    """
    base = moment1_base = None
    first = [pair[0] for pair in moments]
    if reference is not None:
        base = pack_tensors(infos, reference.tensors, taps)
        if first and all(_same_layout(reference.tensors.get(name), decoded[name]) for name in first):
            moment1_base = pack_float32(first, reference.tensors, taps)
    return CodingContext(
        base=base,
        moment1=pack_float32(first, decoded, taps) if moments else None,
        moment2=pack_float32([pair[1] for pair in moments], decoded, taps) if moments else None,
        moment1_base=moment1_base,
        shapes=matrix_shapes(infos, taps) if shapes else None,
    )


def decode(
    encoded: EncodedRecord,
    decoded: Mapping[str, Tensor],
    reference: Reference | None,
    *,
    quantized: Mapping[str, QuantizedTensor] | None = None,
    where: str = "record",
    arena: Arena | None = None,
    threads: int | None = None,
) -> Reference:
    """Decode a record to tensors by name and their quantized forms, and check the digest of their values.

    Args:
        encoded: the record; its parts have the right digests already.
        decoded: tensors of earlier records of the same file by name, in file order.
        quantized: the quantized form of those of them that are quantized.
        reference: the decoded parent, if the file is a delta.
        where: the file, for messages.
        arena: allocates the tensors' memory; one arena for all records of a file saves time.
        threads: number of threads; None: one per core.

    Raises:
        CorruptError, TruncatedError: the bytes are damaged.
        ChainError: the parent is missing, or is not the one that the record was encoded against.
    """
    where = f"{where}: record {encoded.name!r}"
    arena = arena or Arena()
    with decode_errors(where):
        recipe = recipes.from_json(encoded.recipe, len(encoded.infos))
        match recipe:
            case PlainRecipe():
                return Reference(_decode_plain(encoded, arena))
            case SameRecipe():
                return _decode_same(encoded, reference, where)
            case CopyRecipe(sources):
                return Reference(_decode_copies(encoded, sources, decoded))
            case CodedRecipe():
                return Reference(_decode_coded(encoded, recipe, decoded, reference, where, arena, threads))
            case CodebookRecipe():
                return _decode_codebook(encoded, recipe, decoded, quantized or {}, reference, where, threads)
            case LatticeRecipe():
                return _decode_lattice(encoded, recipe, decoded, reference, where, threads)
    raise AssertionError("unreachable")


def _decode_plain(encoded: EncodedRecord, arena: Arena) -> dict[str, Tensor]:
    stored = np.frombuffer(encoded.parts["values"], np.uint8)
    values = arena.allocate(stored.nbytes)
    values[:] = stored
    return _unpack_verified(encoded, values, 1)


def _decode_same(encoded: EncodedRecord, reference: Reference | None, where: str) -> Reference:
    parent = _check_parent(encoded, reference, where)
    _check_base(encoded, _digest_of_members(encoded.infos, parent.tensors), where)
    return parent.subset(info.name for info in encoded.infos)


def _decode_copies(encoded: EncodedRecord, sources: Sequence[int], decoded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if len(sources) != len(encoded.infos):
        raise ValueError(f"{len(sources)} sources for {len(encoded.infos)} copies")
    names = names_by_ordinal(decoded)
    out = {}
    for info, ordinal in zip(encoded.infos, sources, strict=True):
        source = decoded[names[ordinal]]
        dtype = torch_dtype(info.dtype)
        if tuple(source.shape) != info.shape:
            raise ValueError(f"a copy of shape {list(info.shape)} has a source of shape {list(source.shape)}")
        if source.dtype != dtype and (source.dtype, info.dtype) not in _CASTS:
            raise ValueError(f"a copy as {info.dtype} of {source.dtype}")
        out[info.name] = as_bits(source).clone().view(dtype) if source.dtype == dtype else source.to(dtype)
    if _digest_of_members(encoded.infos, out) != encoded.digest:
        raise ValueError("the copies differ from what was saved")
    return out


def _decode_coded(
    encoded: EncodedRecord,
    recipe: CodedRecipe,
    decoded: Mapping[str, Tensor],
    reference: Reference | None,
    where: str,
    arena: Arena,
    threads: int | None,
) -> dict[str, Tensor]:
    infos, taps = encoded.infos, recipe.taps
    number = NUMBER_FORMATS[infos[0].dtype]
    if any(info.dtype != infos[0].dtype for info in infos) or any(num_numbers(info) % taps for info in infos):
        raise ValueError("its tensors cannot have been coded together")
    parent = _check_parent(encoded, reference, where) if recipe.base else None
    factors = any(config.factors for config in recipe.runs)
    context = coding_context(infos, taps, parent, _moment_names(recipe, infos, decoded), decoded, shapes=factors)
    if context.base is not None:
        _check_base(encoded, xxh3_128(context.base), where)
    streams = _split_taps(encoded, recipe)
    count = sum(num_numbers(info) for info in infos) // taps
    for config, _, codes in streams:  # before memory is allocated
        if codes.nbytes < -(-count // config.chunk) * MIN_CHUNK_BYTES:
            raise _native.Truncated("the codes are too short for the tensors' shapes")
    values = arena.allocate(sum(info.nbytes for info in infos))
    for index, (config, side, codes) in enumerate(streams):
        context_of_tap = tap_context(number, values, context, config, index, taps)
        out = tap(values, index, taps)
        assert out is not None
        config.decode(number, side, codes, out, context_of_tap, default_threads(threads))
    return _unpack_verified(encoded, values, taps)


def _decode_codebook(
    encoded: EncodedRecord,
    recipe: CodebookRecipe,
    decoded: Mapping[str, Tensor],
    quantized: Mapping[str, QuantizedTensor],
    reference: Reference | None,
    where: str,
    threads: int | None,
) -> Reference:
    infos = encoded.infos
    if any(not info.dtype.startswith(("F", "BF")) or NUMBER_FORMATS[info.dtype].width < 16 for info in infos):
        raise ValueError("codebook tensors that are not floats")
    if recipe.base or recipe.residual:
        parent = _check_parent(encoded, reference, where)
        digest = codebook_base_digest(infos, recipe, parent)
        _check_base(encoded, digest or "none: its tensors are not quantized", where)
    moments = coding_context(infos, 1, None, _moment_names(recipe, infos, decoded), decoded)
    context_names = _context_names(recipe, infos, decoded, quantized)
    context_codes = [_codes_of(quantized[name], name) for name in context_names]
    tensors, codebooks = decode_codebook_record(
        encoded, recipe, moments, reference, context_codes, default_threads(threads)
    )
    for info, name in zip(infos, context_names, strict=False):  # so that re-encoding gives the same file
        codebooks[info.name] = replace(codebooks[info.name], context_name=name)
    return Reference(tensors, codebooks)


def _codes_of(tensor: QuantizedTensor, name: str) -> Tensor:
    if not isinstance(tensor, CodebookTensor):
        raise ValueError(f"the context codes are those of {name!r}, which has none")
    return tensor.codes


def _decode_lattice(
    encoded: EncodedRecord,
    recipe: LatticeRecipe,
    decoded: Mapping[str, Tensor],
    reference: Reference | None,
    where: str,
    threads: int | None,
) -> Reference:
    infos = encoded.infos
    if any(info.dtype not in ("F32", "BF16", "F16") for info in infos):
        raise ValueError("lattice tensors that are not floats of 16 or 32 bits")
    if recipe.base:
        parent = _check_parent(encoded, reference, where)
        _check_base(encoded, lattice_base_digest(infos, recipe, parent), where)
    names = names_by_ordinal(decoded)
    moments = [(names[ordinal], decoded[names[ordinal]]) for ordinal in recipe.relative_to]
    layouts = [(tuple(moment.shape), moment.dtype) for _, moment in moments]
    if moments and layouts != [(info.shape, torch.float32) for info in infos]:
        raise ValueError("second moments that do not fit their tensors")
    tensors, quantized = decode_lattice_record(encoded, recipe, reference, moments, default_threads(threads))
    return Reference(tensors, quantized)


def _context_names(
    recipe: CodebookRecipe,
    infos: Sequence[TensorInfo],
    decoded: Mapping[str, Tensor],
    quantized: Mapping[str, QuantizedTensor],
) -> list[str]:
    """Return the names of the tensors whose codes are context of a record's codes, one for each member; [] for none."""
    if not recipe.contexts:
        return []
    names = names_by_ordinal(decoded)
    context_names = [names[ordinal] for ordinal in recipe.contexts]
    if [tuple(quantized[name].codes.shape) for name in context_names] != [info.shape for info in infos]:
        raise ValueError("context codes of tensors that do not fit")
    return context_names


def _split_taps(encoded: EncodedRecord, recipe: CodedRecipe) -> list[tuple[CoderConfig, Bytes, Bytes]]:
    """Split the parts of a record into (configuration, side data, codes) of every tap."""
    sides = np.frombuffer(encoded.parts["side"], np.uint8)
    codes = np.frombuffer(encoded.parts["codes"], np.uint8)
    out = []
    for index in range(recipe.taps):
        side_size, codes_size = TAP_SIZES.unpack(sides[: TAP_SIZES.size].tobytes())
        sides = sides[TAP_SIZES.size :]
        if side_size > sides.nbytes or codes_size > codes.nbytes:
            raise _native.Truncated("a tap is longer than the rest of its record")
        out.append((recipe.runs[min(index, len(recipe.runs) - 1)], sides[:side_size], codes[:codes_size]))
        sides, codes = sides[side_size:], codes[codes_size:]
    if sides.nbytes or codes.nbytes:
        raise ValueError("a record is longer than its taps")
    return out


def _moment_names(
    recipe: CodedRecipe | CodebookRecipe, infos: Sequence[TensorInfo], decoded: Mapping[str, Tensor]
) -> list[tuple[str, str]]:
    """Return the names of the (first, second) moment of each member; [] if the recipe uses none."""
    if not recipe.moments:
        return []
    names = names_by_ordinal(decoded)
    pairs = [(names[first], names[second]) for first, second in recipe.moments]
    if len(pairs) != len(infos):
        raise ValueError(f"{len(pairs)} pairs of moments for {len(infos)} tensors")
    for info, pair in zip(infos, pairs, strict=True):
        if any(tuple(decoded[name].shape) != info.shape or not is_codable_float(decoded[name]) for name in pair):
            raise ValueError(f"moments of {info.name!r} that do not fit it")
    return pairs


def _check_parent(encoded: EncodedRecord, reference: Reference | None, where: str) -> Reference:
    """Raise ChainError unless the parent has all members, of the same shapes and dtypes."""
    if reference is None:
        raise ChainError(
            where,
            found="a delta without its parent",
            expected=f"a base with digest {encoded.base}",
            do="load it through its store, or give base=",
        )
    for info in encoded.infos:
        if reference.get_like(info.name, info.shape, torch_dtype(info.dtype)) is None:
            raise ChainError(
                where,
                found=f"a parent without tensor {info.name!r} of shape {list(info.shape)} and {info.dtype}",
                expected=f"a base with digest {encoded.base}",
                do="give the checkpoint that this one was made against",
            )
    return reference


def _check_base(encoded: EncodedRecord, digest: str, where: str) -> None:
    if digest != encoded.base:
        raise ChainError(
            where,
            found=f"a base with digest {digest}",
            expected=str(encoded.base),
            do="give the checkpoint that this one was made against",
        )


def _unpack_verified(encoded: EncodedRecord, values: Bytes, taps: int) -> dict[str, Tensor]:
    if sum(info.nbytes for info in encoded.infos) != values.nbytes:
        raise ValueError(f"{values.nbytes} bytes for {sum(info.nbytes for info in encoded.infos)} bytes of tensors")
    digest = xxh3_128(values)
    if digest != encoded.digest:
        raise ValueError(f"decoded values with digest {digest}, expected {encoded.digest}")
    parts = unpack_tensors(values, encoded.infos, taps)
    return {info.name: tensor_from_bytes(part, info) for info, part in zip(encoded.infos, parts, strict=True)}


def _digest_of_members(infos: Sequence[TensorInfo], tensors: Mapping[str, Tensor]) -> str:
    return digest_arrays(tensor_bytes(tensors[info.name]) for info in infos)


def _same_layout(parent: Tensor | None, tensor: Tensor) -> bool:
    return parent is not None and parent.shape == tensor.shape and parent.dtype == tensor.dtype


def partial_decoder(view: RecordView) -> PartialDecoder | None:
    """Return the partial decoder of a record; None if it can only be decoded whole, by `codec.decode`.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged; or the record
            is of kind `same`, for which the parent's record is to be decoded instead.
    """
    recipe = recipes.from_json(view.recipe, len(view.infos))
    match recipe:
        case PlainRecipe():
            return PlainDecoder(view)
        case CopyRecipe(sources):
            return CopyDecoder(view, sources)
        case CodedRecipe():
            return CodedDecoder(view, recipe)
        case CodebookRecipe():
            return codebook_decoder(view, recipe)
        case LatticeRecipe():
            return lattice_decoder(view, recipe)
        case SameRecipe():
            raise ValueError("a record of kind same has no bytes to decode")


def required_tensors(view: RecordView) -> list[tuple[bool, str]]:
    """Return the tensors that decoding the whole record needs: (whether of its own file or of the parent, name).

    Raises:
        ValueError, LookupError: the recipe is malformed.
    """
    recipe = recipes.from_json(view.recipe, len(view.infos))
    members, own, parent = [info.name for info in view.infos], list[int](), list[str]()
    match recipe:
        case SameRecipe():
            parent = members
        case CopyRecipe(sources):
            own = [*sources]
        case CodedRecipe(_, _, base, moments):
            own = [ordinal for pair in moments for ordinal in pair]
            parent = [*members, *_parent_first_moments(view, moments)] if base else []
        case CodebookRecipe():
            own = [*recipe.contexts, *(ordinal for pair in recipe.moments for ordinal in pair)]
            parent = members if recipe.base or recipe.residual else []
        case LatticeRecipe():
            own, parent = [*recipe.relative_to], members if recipe.base else []
    named = [(True, view.tensor_at(ordinal).name) for ordinal in own]
    return list(dict.fromkeys(named + [(False, name) for name in parent]))


def _parent_first_moments(view: RecordView, moments: Sequence[tuple[int, int]]) -> list[str]:
    """Return the names of first moments that the parent has with the same shape and dtype."""
    parents = view.parent_tensors or {}
    first_moments = [view.tensor_at(first) for first, _ in moments]
    return [info.name for info in first_moments if has_same_layout(parents.get(info.name), info)]
