"""One record: tensors -> recipe and bytes, and back. The stages meet only here."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint._native import xxh3_128
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.arena import Arena
from shrinkpoint.codec.codebook_record import codebook_base_digest, decode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import NUMBER_FORMATS, Bytes, CoderConfig, CodingContext, default_threads
from shrinkpoint.codec.errors import decode_errors
from shrinkpoint.codec.lattice_record import decode_lattice_record
from shrinkpoint.codec.lattice_record import lattice_base_digest as gridded_base
from shrinkpoint.codec.pack import (
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

_TAP_SIZES = struct.Struct("<IQ")  # bytes of a run's side and of its codes
_CASTS = {(torch.float32, "BF16"), (torch.float32, "F16")}  # between a copy and its source
_MIN_CHUNK_BYTES = 4 + 4 * 4 + 8  # its header, the states of four lanes, the slack behind the extra bits


@dataclass(frozen=True)
class RecordInput:
    """The arrays of one record to be coded.

    Attributes:
        name: of the record.
        infos: its tensors.
        taps: as in `recipe.CodedRecipe`.
        values: their numbers, arranged.
        context: what a decoder will hold as well.
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
    """The tensors' bytes as they are."""
    values = pack_tensors(infos, tensors, 1)
    return EncodedRecord(name, tuple(infos), recipes.to_json(PlainRecipe()), {"values": values.data}, xxh3_128(values))


def encode_same(name: str, infos: Sequence[TensorInfo], reference: Reference) -> EncodedRecord:
    """A reference to the parent's tensors of the same names."""
    digest = _digest_of_members(infos, reference.tensors)
    return EncodedRecord(name, tuple(infos), recipes.to_json(SameRecipe()), {}, digest, digest)


def encode_copies(
    name: str, infos: Sequence[TensorInfo], ordinals: Sequence[int], tensors: Mapping[str, Tensor]
) -> EncodedRecord:
    """References to earlier tensors of the same file, whose ordinals are given."""
    digest = _digest_of_members(infos, tensors)
    return EncodedRecord(name, tuple(infos), recipes.to_json(CopyRecipe(tuple(ordinals))), {}, digest)


def encode(record: RecordInput, configs: tuple[CoderConfig, ...], *, threads: int | None = None) -> EncodedRecord:
    """Code the numbers of a record, every tap by its run (the last run serves all later taps)."""
    number, taps = NUMBER_FORMATS[record.infos[0].dtype], record.taps
    sides, codes = bytearray(), []
    for index in range(taps):
        run = configs[min(index, len(configs) - 1)]
        known = tap_context(number, record.values, record.context, run, index, taps)
        values = tap(record.values, index, taps)
        assert values is not None
        side, code = run.encode(number, values, known, default_threads(threads))
        sides += _TAP_SIZES.pack(side.nbytes, code.nbytes) + side.tobytes()
        codes.append(code)
    joined = codes[0] if taps == 1 else np.concatenate(codes)
    base = record.context.base if any(run.needs_base for run in configs) else None
    coded = CodedRecipe(configs, taps, base is not None, record.moments)
    return EncodedRecord(
        record.name,
        record.infos,
        recipes.to_json(coded),
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
    """What writer and reader both hold of a record: the parent's numbers, and moments by name from `decoded`.

    Args:
        reference: the parent, where it holds every member; else None.
        moments: (first, second) moment of each member; () for none.
        shapes: whether those of the members are needed, as factors do.
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
    """The tensors of a record by name, and the symbols of those that are quantized; their digest has been checked.

    Args:
        decoded: tensors of earlier records of the same file, in their order.
        quantized: of those of them that are quantized.
        reference: the parent's tensors, where the file is a delta.
        arena: where the tensors' memory comes from; one for all records of a file saves time.

    Raises:
        CorruptError, TruncatedError: the bytes are at fault.
        ChainError: the parent is missing, or is not the one the record was made against.
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
            case CopyRecipe(of):
                return Reference(_decode_copies(encoded, of, decoded))
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
    factors = any(run.factors for run in recipe.runs)
    known = coding_context(infos, taps, parent, _moment_names(recipe, infos, decoded), decoded, shapes=factors)
    if known.base is not None:
        _check_base(encoded, xxh3_128(known.base), where)
    pieces = _split_taps(encoded, recipe)
    count = sum(num_numbers(info) for info in infos) // taps
    for run, _, codes in pieces:  # before the allocation: no stream is so short for so many numbers
        if codes.nbytes < -(-count // run.chunk) * _MIN_CHUNK_BYTES:
            raise _native.Truncated("the codes are too short for the tensors' shapes")
    values = arena.allocate(sum(info.nbytes for info in infos))
    for index, (run, side, codes) in enumerate(pieces):
        here = tap_context(number, values, known, run, index, taps)
        out = tap(values, index, taps)
        assert out is not None
        run.decode(number, side, codes, out, here, default_threads(threads))
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
        raise ValueError("quantized tensors that are no floats")
    if recipe.base or recipe.residual:
        parent = _check_parent(encoded, reference, where)
        _check_base(
            encoded, codebook_base_digest(infos, recipe, parent) or "none: its tensors are not quantized", where
        )
    known = coding_context(infos, 1, None, _moment_names(recipe, infos, decoded), decoded)
    others = _context_names(recipe, infos, decoded, quantized)
    under = [_codes_of(quantized[name], name) for name in others]
    tensors, made = decode_codebook_record(encoded, recipe, known, reference, under, default_threads(threads))
    for info, name in zip(infos, others, strict=False):  # so that the file can be written again as it was
        made[info.name] = replace(made[info.name], context_name=name)
    return Reference(tensors, made)


def _codes_of(tensor: QuantizedTensor, name: str) -> Tensor:
    if not isinstance(tensor, CodebookTensor):
        raise ValueError(f"codes under those of {name!r}, which has none")
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
        raise ValueError("points of tensors that are no floats of 16 or 32 bits")
    if recipe.base:
        parent = _check_parent(encoded, reference, where)
        _check_base(encoded, gridded_base(infos, recipe, parent), where)
    names = names_by_ordinal(decoded)
    others = [(names[ordinal], decoded[names[ordinal]]) for ordinal in recipe.relative_to]
    if others and [(tuple(x.shape), x.dtype) for _, x in others] != [(i.shape, torch.float32) for i in infos]:
        raise ValueError("points relative to tensors that do not fit")
    tensors, points = decode_lattice_record(encoded, recipe, reference, others, default_threads(threads))
    return Reference(tensors, points)


def _context_names(
    recipe: CodebookRecipe,
    infos: Sequence[TensorInfo],
    decoded: Mapping[str, Tensor],
    quantized: Mapping[str, QuantizedTensor],
) -> list[str]:
    """The tensors whose codes a record's own are coded under, one for each member."""
    if not recipe.contexts:
        return []
    names = names_by_ordinal(decoded)
    others = [names[ordinal] for ordinal in recipe.contexts]
    if [tuple(quantized[name].codes.shape) for name in others] != [info.shape for info in infos]:
        raise ValueError("codes under those of tensors that do not fit")
    return others


def _split_taps(encoded: EncodedRecord, recipe: CodedRecipe) -> list[tuple[CoderConfig, Bytes, Bytes]]:
    """(run, side, codes) of every tap."""
    sides = np.frombuffer(encoded.parts["side"], np.uint8)
    codes = np.frombuffer(encoded.parts["codes"], np.uint8)
    out = []
    for index in range(recipe.taps):
        side_size, codes_size = _TAP_SIZES.unpack(sides[: _TAP_SIZES.size].tobytes())
        sides = sides[_TAP_SIZES.size :]
        if side_size > sides.nbytes or codes_size > codes.nbytes:
            raise _native.Truncated("a run is longer than what is left of its record")
        out.append((recipe.runs[min(index, len(recipe.runs) - 1)], sides[:side_size], codes[:codes_size]))
        sides, codes = sides[side_size:], codes[codes_size:]
    if sides.nbytes or codes.nbytes:
        raise ValueError("a record is longer than its runs")
    return out


def _moment_names(
    recipe: CodedRecipe | CodebookRecipe, infos: Sequence[TensorInfo], decoded: Mapping[str, Tensor]
) -> list[tuple[str, str]]:
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
                do="give the checkpoint this one was made against",
            )
    return reference


def _check_base(encoded: EncodedRecord, digest: str, where: str) -> None:
    if digest != encoded.base:
        raise ChainError(
            where,
            found=f"a base with digest {digest}",
            expected=str(encoded.base),
            do="give the checkpoint this one was made against",
        )


def _unpack_verified(encoded: EncodedRecord, values: Bytes, taps: int) -> dict[str, Tensor]:
    if sum(info.nbytes for info in encoded.infos) != values.nbytes:
        raise ValueError(f"{values.nbytes} bytes for {sum(info.nbytes for info in encoded.infos)} bytes of tensors")
    found = xxh3_128(values)
    if found != encoded.digest:
        raise ValueError(f"decoded values with digest {found}, expected {encoded.digest}")
    parts = unpack_tensors(values, encoded.infos, taps)
    return {info.name: tensor_from_bytes(part, info) for info, part in zip(encoded.infos, parts, strict=True)}


def _digest_of_members(infos: Sequence[TensorInfo], tensors: Mapping[str, Tensor]) -> str:
    hasher = _native.Hasher()
    for info in infos:
        hasher.update(tensor_bytes(tensors[info.name]))
    return hasher.hexdigest()


def _same_layout(old: Tensor | None, new: Tensor) -> bool:
    return old is not None and old.shape == new.shape and old.dtype == new.dtype
