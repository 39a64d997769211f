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
from shrinkpoint.codec.arrange import gather, gather_floats, has_floats, matrices, numbers, scatter
from shrinkpoint.codec.gridded import base_digest as gridded_base
from shrinkpoint.codec.gridded import decode_gridded
from shrinkpoint.codec.kernel import known_of_tap, tap
from shrinkpoint.codec.number import NUMBERS
from shrinkpoint.codec.quantize import bits_of, from_bits
from shrinkpoint.codec.quantized import base_digest, decode_quantized
from shrinkpoint.codec.recipe import Coded, Copy, Gridded, Plain, Quantized, Same
from shrinkpoint.codec.reference import Origin, Reference, in_order
from shrinkpoint.codec.refusing import refusing
from shrinkpoint.codec.run import Bytes, Known, Run, default_threads
from shrinkpoint.codec.slab import Slab
from shrinkpoint.codec.symbols import Symbols
from shrinkpoint.errors import ChainError
from shrinkpoint.record import Encoded, TensorInfo
from shrinkpoint.state import torch_dtype
from shrinkpoint.state.dtypes import raw

_RUN = struct.Struct("<IQ")  # bytes of a run's side and of its codes
_CASTS = {(torch.float32, "BF16"), (torch.float32, "F16")}  # between a copy and its source
_SMALLEST_CHUNK = 4 + 4 * 4 + 8  # its header, the states of four lanes, the slack behind the extra bits


@dataclass(frozen=True)
class Material:
    """The arrays of one record to be coded.

    Attributes:
        name: of the record.
        infos: its tensors.
        taps: as in `recipe.Coded`.
        values: their numbers, arranged.
        known: what a decoder will hold as well.
        moments: as in `recipe.Coded`.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    taps: int
    values: Bytes
    known: Known
    moments: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


def plain(name: str, infos: Sequence[TensorInfo], tensors: Mapping[str, Tensor]) -> Encoded:
    """The tensors' bytes as they are."""
    values = gather(infos, tensors, 1)
    return Encoded(name, tuple(infos), recipes.to_json(Plain()), {"values": values.data}, xxh3_128(values))


def same(name: str, infos: Sequence[TensorInfo], reference: Reference) -> Encoded:
    """A reference to the parent's tensors of the same names."""
    digest = _digest_of_members(infos, reference.tensors)
    return Encoded(name, tuple(infos), recipes.to_json(Same()), {}, digest, digest)


def copies(name: str, infos: Sequence[TensorInfo], ordinals: Sequence[int], tensors: Mapping[str, Tensor]) -> Encoded:
    """References to earlier tensors of the same file, whose ordinals are given."""
    digest = _digest_of_members(infos, tensors)
    return Encoded(name, tuple(infos), recipes.to_json(Copy(tuple(ordinals))), {}, digest)


def encode(material: Material, runs: tuple[Run, ...], *, threads: int | None = None) -> Encoded:
    """Code the numbers of a record, every tap by its run (the last run serves all later taps)."""
    number, taps = NUMBERS[material.infos[0].dtype], material.taps
    sides, codes = bytearray(), []
    for index in range(taps):
        run = runs[min(index, len(runs) - 1)]
        known = known_of_tap(number, material.values, material.known, run, index, taps)
        values = tap(material.values, index, taps)
        assert values is not None
        side, code = run.encode(number, values, known, default_threads(threads))
        sides += _RUN.pack(side.nbytes, code.nbytes) + side.tobytes()
        codes.append(code)
    joined = codes[0] if taps == 1 else np.concatenate(codes)
    base = material.known.base if any(run.needs_base for run in runs) else None
    coded = Coded(runs, taps, base is not None, material.moments)
    return Encoded(
        material.name,
        material.infos,
        recipes.to_json(coded),
        {"side": bytes(sides), "codes": joined.data},
        xxh3_128(material.values),
        None if base is None else xxh3_128(base),
    )


def known_arrays(
    infos: Sequence[TensorInfo],
    taps: int,
    reference: Reference | None,
    moments: Sequence[tuple[str, str]],
    decoded: Mapping[str, Tensor],
    *,
    shapes: bool = True,
) -> Known:
    """What writer and reader both hold of a record: the parent's numbers, and moments by name from `decoded`.

    Args:
        reference: the parent, where it holds every member; else None.
        moments: (first, second) moment of each member; () for none.
        shapes: whether those of the members are needed, as factors do.
    """
    base = moment1_base = None
    first = [pair[0] for pair in moments]
    if reference is not None:
        base = gather(infos, reference.tensors, taps)
        if first and all(_fits(reference.tensors.get(name), decoded[name]) for name in first):
            moment1_base = gather_floats(first, reference.tensors, taps)
    return Known(
        base=base,
        moment1=gather_floats(first, decoded, taps) if moments else None,
        moment2=gather_floats([pair[1] for pair in moments], decoded, taps) if moments else None,
        moment1_base=moment1_base,
        shapes=matrices(infos, taps) if shapes else None,
    )


def decode(
    encoded: Encoded,
    decoded: Mapping[str, Tensor],
    reference: Reference | None,
    *,
    symbols: Mapping[str, Origin] | None = None,
    where: str = "record",
    slab: Slab | None = None,
    threads: int | None = None,
) -> Reference:
    """The tensors of a record by name, and the symbols of those that are quantized; their digest has been checked.

    Args:
        decoded: tensors of earlier records of the same file, in their order.
        symbols: of those of them that are quantized.
        reference: the parent's tensors, where the file is a delta.
        slab: where the tensors' memory comes from; one for all records of a file saves time.

    Raises:
        CorruptError, TruncatedError: the bytes are at fault.
        ChainError: the parent is missing, or is not the one the record was made against.
    """
    where = f"{where}: record {encoded.name!r}"
    slab = slab or Slab()
    with refusing(where):
        recipe = recipes.from_json(encoded.recipe, len(encoded.infos))
        match recipe:
            case Plain():
                return Reference(_decode_plain(encoded, slab))
            case Same():
                return _decode_same(encoded, reference, where)
            case Copy(of):
                return Reference(_decode_copies(encoded, of, decoded))
            case Coded():
                return Reference(_decode_coded(encoded, recipe, decoded, reference, where, slab, threads))
            case Quantized():
                return _decode_quantized(encoded, recipe, decoded, symbols or {}, reference, where, threads)
            case Gridded():
                return _decode_gridded(encoded, recipe, decoded, reference, where, threads)
    raise AssertionError("unreachable")


def _decode_plain(encoded: Encoded, slab: Slab) -> dict[str, Tensor]:
    stored = np.frombuffer(encoded.parts["values"], np.uint8)
    values = slab.take(stored.nbytes)
    values[:] = stored
    return _tensors(encoded, values, 1)


def _decode_same(encoded: Encoded, reference: Reference | None, where: str) -> Reference:
    parent = _parent(encoded, reference, where)
    _check_base(encoded, _digest_of_members(encoded.infos, parent.tensors), where)
    return parent.of(info.name for info in encoded.infos)


def _decode_copies(encoded: Encoded, of: Sequence[int], decoded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if len(of) != len(encoded.infos):
        raise ValueError(f"{len(of)} sources for {len(encoded.infos)} copies")
    names = in_order(decoded)
    out = {}
    for info, ordinal in zip(encoded.infos, of, strict=True):
        source = decoded[names[ordinal]]
        dtype = torch_dtype(info.dtype)
        if tuple(source.shape) != info.shape:
            raise ValueError(f"a copy of shape {list(info.shape)} has a source of shape {list(source.shape)}")
        if source.dtype != dtype and (source.dtype, info.dtype) not in _CASTS:
            raise ValueError(f"a copy as {info.dtype} of {source.dtype}")
        out[info.name] = raw(source).clone().view(dtype) if source.dtype == dtype else source.to(dtype)
    if _digest_of_members(encoded.infos, out) != encoded.digest:
        raise ValueError("the copies differ from what was saved")
    return out


def _decode_coded(
    encoded: Encoded,
    recipe: Coded,
    decoded: Mapping[str, Tensor],
    reference: Reference | None,
    where: str,
    slab: Slab,
    threads: int | None,
) -> dict[str, Tensor]:
    infos, taps = encoded.infos, recipe.taps
    number = NUMBERS[infos[0].dtype]
    if any(info.dtype != infos[0].dtype for info in infos) or any(numbers(info) % taps for info in infos):
        raise ValueError("its tensors cannot have been coded together")
    parent = _parent(encoded, reference, where) if recipe.base else None
    factors = any(run.factors for run in recipe.runs)
    known = known_arrays(infos, taps, parent, _moment_names(recipe, infos, decoded), decoded, shapes=factors)
    if known.base is not None:
        _check_base(encoded, xxh3_128(known.base), where)
    pieces = _split(encoded, recipe)
    count = sum(numbers(info) for info in infos) // taps
    for run, _, codes in pieces:  # before the allocation: no stream is so short for so many numbers
        if codes.nbytes < -(-count // run.chunk) * _SMALLEST_CHUNK:
            raise _native.Truncated("the codes are too short for the tensors' shapes")
    values = slab.take(sum(info.nbytes for info in infos))
    for index, (run, side, codes) in enumerate(pieces):
        here = known_of_tap(number, values, known, run, index, taps)
        out = tap(values, index, taps)
        assert out is not None
        run.decode(number, side, codes, out, here, default_threads(threads))
    return _tensors(encoded, values, taps)


def _decode_quantized(
    encoded: Encoded,
    recipe: Quantized,
    decoded: Mapping[str, Tensor],
    symbols: Mapping[str, Origin],
    reference: Reference | None,
    where: str,
    threads: int | None,
) -> Reference:
    infos = encoded.infos
    if any(not info.dtype.startswith(("F", "BF")) or NUMBERS[info.dtype].width < 16 for info in infos):
        raise ValueError("quantized tensors that are no floats")
    if recipe.base or recipe.residual:
        parent = _parent(encoded, reference, where)
        _check_base(encoded, base_digest(infos, recipe, parent) or "none: its tensors are not quantized", where)
    known = known_arrays(infos, 1, None, _moment_names(recipe, infos, decoded), decoded)
    others = _others(recipe, infos, decoded, symbols)
    under = [_codes(symbols[name], name) for name in others]
    tensors, made = decode_quantized(encoded, recipe, known, reference, under, default_threads(threads))
    for info, name in zip(infos, others, strict=False):  # so that the file can be written again as it was
        made[info.name] = replace(made[info.name], under=name)
    return Reference(tensors, made)


def _codes(origin: Origin, name: str) -> Tensor:
    if not isinstance(origin, Symbols):
        raise ValueError(f"codes under those of {name!r}, which has none")
    return origin.codes


def _decode_gridded(
    encoded: Encoded,
    recipe: Gridded,
    decoded: Mapping[str, Tensor],
    reference: Reference | None,
    where: str,
    threads: int | None,
) -> Reference:
    infos = encoded.infos
    if any(info.dtype not in ("F32", "BF16", "F16") for info in infos):
        raise ValueError("points of tensors that are no floats of 16 or 32 bits")
    if recipe.base:
        parent = _parent(encoded, reference, where)
        _check_base(encoded, gridded_base(infos, recipe, parent), where)
    names = in_order(decoded)
    others = [(names[ordinal], decoded[names[ordinal]]) for ordinal in recipe.others]
    if others and [(tuple(x.shape), x.dtype) for _, x in others] != [(i.shape, torch.float32) for i in infos]:
        raise ValueError("points relative to tensors that do not fit")
    tensors, points = decode_gridded(encoded, recipe, reference, others, default_threads(threads))
    return Reference(tensors, points)


def _others(
    recipe: Quantized, infos: Sequence[TensorInfo], decoded: Mapping[str, Tensor], symbols: Mapping[str, Origin]
) -> list[str]:
    """The tensors whose codes a record's own are coded under, one for each member."""
    if not recipe.under:
        return []
    names = in_order(decoded)
    others = [names[ordinal] for ordinal in recipe.under]
    if [tuple(symbols[name].codes.shape) for name in others] != [info.shape for info in infos]:
        raise ValueError("codes under those of tensors that do not fit")
    return others


def _split(encoded: Encoded, recipe: Coded) -> list[tuple[Run, Bytes, Bytes]]:
    """(run, side, codes) of every tap."""
    sides = np.frombuffer(encoded.parts["side"], np.uint8)
    codes = np.frombuffer(encoded.parts["codes"], np.uint8)
    out = []
    for index in range(recipe.taps):
        side_size, codes_size = _RUN.unpack(sides[: _RUN.size].tobytes())
        sides = sides[_RUN.size :]
        if side_size > sides.nbytes or codes_size > codes.nbytes:
            raise _native.Truncated("a run is longer than what is left of its record")
        out.append((recipe.runs[min(index, len(recipe.runs) - 1)], sides[:side_size], codes[:codes_size]))
        sides, codes = sides[side_size:], codes[codes_size:]
    if sides.nbytes or codes.nbytes:
        raise ValueError("a record is longer than its runs")
    return out


def _moment_names(
    recipe: Coded | Quantized, infos: Sequence[TensorInfo], decoded: Mapping[str, Tensor]
) -> list[tuple[str, str]]:
    if not recipe.moments:
        return []
    names = in_order(decoded)
    pairs = [(names[first], names[second]) for first, second in recipe.moments]
    if len(pairs) != len(infos):
        raise ValueError(f"{len(pairs)} pairs of moments for {len(infos)} tensors")
    for info, pair in zip(infos, pairs, strict=True):
        if any(tuple(decoded[name].shape) != info.shape or not has_floats(decoded[name]) for name in pair):
            raise ValueError(f"moments of {info.name!r} that do not fit it")
    return pairs


def _parent(encoded: Encoded, reference: Reference | None, where: str) -> Reference:
    if reference is None:
        raise ChainError(
            where, found="a delta without its parent", expected=f"a base with digest {encoded.base}",
            do="load it through its store, or give base=",
        )  # fmt: skip
    for info in encoded.infos:
        if reference.matching(info.name, info.shape, torch_dtype(info.dtype)) is None:
            raise ChainError(
                where, found=f"a parent without tensor {info.name!r} of shape {list(info.shape)} and {info.dtype}",
                expected=f"a base with digest {encoded.base}", do="give the checkpoint this one was made against",
            )  # fmt: skip
    return reference


def _check_base(encoded: Encoded, found: str, where: str) -> None:
    if found != encoded.base:
        raise ChainError(
            where, found=f"a base with digest {found}", expected=str(encoded.base),
            do="give the checkpoint this one was made against",
        )  # fmt: skip


def _tensors(encoded: Encoded, values: Bytes, taps: int) -> dict[str, Tensor]:
    if sum(info.nbytes for info in encoded.infos) != values.nbytes:
        raise ValueError(f"{values.nbytes} bytes for {sum(info.nbytes for info in encoded.infos)} bytes of tensors")
    found = xxh3_128(values)
    if found != encoded.digest:
        raise ValueError(f"decoded values with digest {found}, expected {encoded.digest}")
    parts = scatter(values, encoded.infos, taps)
    return {info.name: from_bits(part, info) for info, part in zip(encoded.infos, parts, strict=True)}


def _digest_of_members(infos: Sequence[TensorInfo], tensors: Mapping[str, Tensor]) -> str:
    hasher = _native.Hasher()
    for info in infos:
        hasher.update(bits_of(tensors[info.name]))
    return hasher.hexdigest()


def _fits(old: Tensor | None, new: Tensor) -> bool:
    return old is not None and old.shape == new.shape and old.dtype == new.dtype
