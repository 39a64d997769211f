"""One record of quantized tensors: symbols -> recipe and bytes, and back. Everything here is exact on integers."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.inner import decode_inner, encode_inner
from shrinkpoint.codec.number import NUMBERS, Number
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.codec.recipe import Codes, Cyclic, Packed, Quantized
from shrinkpoint.codec.reference import Reference
from shrinkpoint.codec.run import CHUNK, Bytes, Known, Run, default_threads
from shrinkpoint.codec.symbols import MOST_CODES, SPECIALS, Symbols
from shrinkpoint.record import Encoded, TensorInfo
from shrinkpoint.state import torch_dtype

CODERS = ("context", "alone", "packed", "rearranged", "runs", "huffman")
"""How codes may be coded: under the parent's codes, by themselves, in fixed width; and as arXiv 2306.11800 does it,
in whole or without its later stages (its table of the delta encoder)."""
DELTA_CODERS = ("context", "rearranged", "runs", "huffman")
"""Those of them that look at the parent."""

Stored: TypeAlias = bytes | bytearray | memoryview

_BYTE = Number(8)
_LENGTH = struct.Struct("<Q")
_SIZES = struct.Struct("<IQQ")  # bytes of the side, of the codes and of the centers; the exact values are the rest
_EXACT = {torch.float32: "F32", torch.bfloat16: "BF16"}
_SMALLEST = 28
"""Bytes that stand for a chunk of codes at least: what bounds the memory a reader takes for a record. A chunk of a run
has as many anyway (its header, four states, the slack); a run of equal differences is filled up to it."""


@dataclass(frozen=True)
class Codebooked:
    """The quantized tensors of one record, to be coded.

    Attributes:
        name: of the record.
        infos: its tensors.
        tensors: of each, the values as a reader gets them.
        symbols: of each, what those were made from; all with the same `bins`, `first` and dtype of `exact`.
        known: the members' moments, where a decoder holds them; nothing else.
        moments: as in `recipe.Quantized`.
        reference: the parent, where it holds symbols of every member; else None.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    tensors: tuple[Tensor, ...]
    symbols: tuple[Symbols, ...]
    known: Known = field(default_factory=Known)
    moments: tuple[tuple[int, int], ...] = ()
    reference: Reference | None = None


def encode_quantized(material: Codebooked, *, coders: Sequence[str] = CODERS, threads: int | None = None) -> Encoded:
    """The record, in the smallest form that `coders` allow.

    Raises:
        ValueError: the symbols are not what `codec.Symbols` says, or not those of the tensors.
    """
    digest = _digest([bits_of(tensor) for tensor in material.tensors])
    _check_readable(material, digest)
    infos, first = material.infos, material.symbols[0]
    codes = _joined([one.codes for one in material.symbols])
    parent = _Parent.of(infos, material.reference)
    used = first.used if parent is None else max(first.used, parent.used)
    forms = _forms(codes, parent, material.known, used, coders, default_threads(threads))
    how, side, stored = min(forms, key=lambda form: len(form[1]) + len(form[2]))
    centers, middle = _encode_centers(material.symbols, parent)
    exacts, end = _encode_exact(material.symbols, parent)
    parts = {"symbols": b"".join([_SIZES.pack(len(side), len(stored), len(middle)), side, stored, middle, end])}
    uses_moments = isinstance(how, Run) and how.moments
    recipe = Quantized(
        bins=first.bins, first=first.first, codes=how, centers=centers, exact=_EXACT[first.exact.dtype], exacts=exacts,
        base=parent is not None, moments=material.moments if uses_moments else (),
    )  # fmt: skip
    base = None if parent is None else parent.digest
    return Encoded(material.name, infos, recipes.to_json(recipe), parts, digest, base)


def decode_quantized(
    encoded: Encoded, recipe: Quantized, known: Known, reference: Reference | None, threads: int
) -> tuple[dict[str, Tensor], dict[str, Symbols]]:
    """The tensors and symbols of a record.

    Args:
        known: the members' moments, where the recipe asks for them.
        reference: the parent, whose codes have been checked, where the recipe asks for it.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are at fault.
    """
    infos = encoded.infos
    parent = _Parent.of(infos, reference) if recipe.base else None
    if recipe.base and parent is None:
        raise ValueError("a parent whose tensors are not quantized")
    side, stored, middle, end = _split(encoded.parts["symbols"])
    codes = _decode_codes(sum(info.numel for info in infos), recipe, side, stored, parent, known, threads)
    if codes.nbytes and int(codes.max()) >= recipe.first + recipe.bins:
        raise ValueError("a code beyond the last center")
    centers = _decode_centers(len(infos), recipe, middle, parent)
    members = np.split(codes, np.cumsum([info.numel for info in infos])[:-1])
    shaped = [torch.from_numpy(one).reshape(info.shape) for one, info in zip(members, infos, strict=True)]
    exact = _decode_exact(recipe, end, parent, shaped)
    out = {
        info.name: Symbols(one, table, values, recipe.first)
        for info, one, table, values in zip(infos, shaped, centers, exact, strict=True)
    }
    tensors = {info.name: out[info.name].values(torch_dtype(info.dtype)) for info in infos}
    found = _digest([bits_of(tensors[info.name]) for info in infos])
    if found != encoded.digest:
        raise ValueError(f"decoded values with digest {found}, expected {encoded.digest}")
    return tensors, out


def _check_readable(material: Codebooked, digest: str) -> None:
    """The last line of defence: a scheme's mistake must not become a checkpoint that no reader takes."""
    pairs = list(zip(material.infos, material.symbols, strict=True))
    if any(not 0 < one.bins <= MOST_CODES - one.first or not 0 <= one.first <= SPECIALS for _, one in pairs):
        raise ValueError("symbols with more codes than there are")
    if any(not bool(one.centers.isfinite().all()) or bool((one.centers.diff() < 0).any()) for _, one in pairs):
        raise ValueError("symbols whose centers do not rise, or are not finite")
    if _digest([bits_of(one.values(torch_dtype(info.dtype))) for info, one in pairs]) != digest:
        raise ValueError("symbols that stand for other values than the tensors have")


def base_digest(infos: Sequence[TensorInfo], reference: Reference) -> str | None:
    """What a record that needs the parent's codes calls its base; None where the parent does not have them."""
    parent = _Parent.of(infos, reference)
    return None if parent is None else parent.digest


@dataclass(frozen=True)
class _Parent:
    """What the parent holds of a record's tensors."""

    symbols: tuple[Symbols, ...]
    tensors: tuple[Tensor, ...]
    codes: Bytes

    @classmethod
    def of(cls, infos: Sequence[TensorInfo], reference: Reference | None) -> _Parent | None:
        if reference is None or any(info.name not in reference.symbols for info in infos):
            return None
        symbols = tuple(reference.symbols[info.name] for info in infos)
        found = [reference.matching(info.name, info.shape, torch_dtype(info.dtype)) for info in infos]
        tensors = tuple(tensor for tensor in found if tensor is not None)
        if len(tensors) < len(infos):
            return None
        return cls(symbols, tensors, _joined([one.codes for one in symbols]))

    @property
    def used(self) -> int:
        return max(one.used for one in self.symbols)

    @property
    def digest(self) -> str:
        """Of the codes, then the values."""
        return _digest([self.codes, *(bits_of(tensor) for tensor in self.tensors)])

    def centers(self, bins: int) -> Bytes | None:
        if any(one.bins != bins for one in self.symbols):
            return None
        return np.concatenate([bits_of(one.centers) for one in self.symbols])

    def at(self, places: Sequence[Tensor], dtype: torch.dtype) -> Bytes:
        """The values at these places (bool, one mask a member), as numbers of `dtype`."""
        picked = [tensor[place].to(dtype) for tensor, place in zip(self.tensors, places, strict=True)]
        return np.concatenate([bits_of(one) for one in picked])


def _forms(
    codes: Bytes, parent: _Parent | None, known: Known, used: int, coders: Sequence[str], threads: int
) -> Iterator[tuple[Codes, Stored, Stored]]:
    """(how, side, codes) in every form that `coders` allow; at least one, since fixed width always serves."""
    previous = None if parent is None else parent.codes
    any_form = False
    for run in _runs(codes, parent, known, coders, threads):
        arrays = Known(base=previous, moment1=known.moment1, moment2=known.moment2)
        side, coded = run.encode(_BYTE, codes, arrays, threads)
        yield run, side.data, coded.data
        any_form = True
    for coder in ("rearranged", "runs", "huffman"):
        if coder in coders and codes.nbytes:
            how = Cyclic(used, coder == "rearranged" and previous is not None, coder != "huffman")
            yield how, b"", _cyclic(codes, previous, how)
            any_form = True
    if "packed" in coders or not any_form:
        bits = max(1, (used - 1).bit_length())
        yield Packed(bits), b"", _native.pack_bits(codes.astype(np.uint32), bits).data


def _runs(codes: Bytes, parent: _Parent | None, known: Known, coders: Sequence[str], threads: int) -> Iterator[Run]:
    if codes.nbytes == 0:
        return
    if "alone" in coders or ("context" in coders and parent is None):
        yield Run("codes")
    if "context" in coders and parent is not None:
        top = parent.used - 1
        plain = Run("codes", predictor="base", top=top)
        if known.moment1 is None or known.moment2 is None:
            yield plain
            return
        arrays = Known(base=parent.codes, moment1=known.moment1, moment2=known.moment2)
        runs = [plain, Run("codes", predictor="base", moments=True, top=top)]
        stride = max(1, codes.nbytes >> 17)
        yield min(runs, key=lambda run: run.measure(_BYTE, codes, arrays, stride, threads))


def _cyclic(codes: Bytes, previous: Bytes | None, how: Cyclic) -> bytes:
    coded = _native.cyclic_encode(codes, previous, modulus=how.modulus, rearranged=how.rearranged, runs=how.runs)
    least = -(-codes.nbytes // CHUNK) * _SMALLEST
    return (_LENGTH.pack(coded.nbytes) + coded.tobytes()).ljust(least, b"\0")


def _unpadded(stored: Bytes) -> Bytes:
    (size,) = _LENGTH.unpack(stored[: _LENGTH.size].tobytes())
    end = _LENGTH.size + size
    if end > stored.nbytes:
        raise _native.Truncated("the codes end too early")
    if stored[end:].any():
        raise ValueError("codes that are filled up with something")
    return stored[_LENGTH.size : end]


def _split(stored: Stored) -> list[Bytes]:
    """Side, codes, centers and exact values."""
    data = np.frombuffer(stored, np.uint8)
    sizes = _SIZES.unpack(data[: _SIZES.size].tobytes())
    if sum(sizes) > data.nbytes - _SIZES.size:
        raise _native.Truncated("the symbols end too early")
    return np.split(data, np.cumsum([_SIZES.size, *sizes]))[1:]


def _decode_codes(
    count: int, recipe: Quantized, side: Bytes, stored: Bytes, parent: _Parent | None, known: Known, threads: int
) -> Bytes:
    previous = None if parent is None else parent.codes
    if side.nbytes and not isinstance(recipe.codes, Run):
        raise ValueError("a side of codes that have none")
    match recipe.codes:
        case Packed(bits):
            if stored.nbytes != (count * bits + 7) // 8:
                raise _native.Truncated(f"{stored.nbytes} bytes for {count} codes of {bits} bits")
            return _native.unpack_bits(stored, count, bits).astype(np.uint8)
        case Run() as run:
            _check_length(stored, count, run.chunk)
            out = np.empty(count, np.uint8)
            arrays = Known(base=previous, moment1=known.moment1, moment2=known.moment2)
            run.decode(_BYTE, side, stored, out, arrays, threads)
            return out
        case Cyclic() as how:
            _check_length(stored, count, CHUNK)
            out = np.empty(count, np.uint8)
            data = _unpadded(stored)
            _native.cyclic_decode(
                data, previous, modulus=how.modulus, rearranged=how.rearranged, runs=how.runs, out=out
            )
            return out


def _check_length(stored: Bytes, count: int, chunk: int) -> None:
    """Before the memory is taken: what decodes to a lot is not arbitrarily short."""
    if stored.nbytes < -(-count // chunk) * _SMALLEST:
        raise _native.Truncated("the codes are too short for the tensors' shapes")


def _encode_centers(symbols: Sequence[Symbols], parent: _Parent | None) -> tuple[Run | None, bytes]:
    centers = np.concatenate([bits_of(one.centers) for one in symbols])
    return encode_inner(NUMBERS["F32"], centers, None if parent is None else parent.centers(symbols[0].bins))


def _decode_centers(members: int, recipe: Quantized, stored: Bytes, parent: _Parent | None) -> list[Tensor]:
    out = np.empty(4 * recipe.bins * members, np.uint8)
    base = None if parent is None else parent.centers(recipe.bins)
    decode_inner(NUMBERS["F32"], recipe.centers, stored, out, base)
    centers = torch.from_numpy(out).view(torch.float32).reshape(members, recipe.bins)
    if not bool(centers.isfinite().all()) or bool((centers.diff(dim=1) < 0).any()):
        raise ValueError("centers that do not rise, or are not finite")
    return [*centers]


def _encode_exact(symbols: Sequence[Symbols], parent: _Parent | None) -> tuple[Run | None, bytes]:
    dtype = symbols[0].exact.dtype
    values = np.concatenate([bits_of(one.exact) for one in symbols])
    base = None if parent is None else parent.at([one.protected.cpu() for one in symbols], dtype)
    return encode_inner(NUMBERS[_EXACT[dtype]], values, base)


def _decode_exact(recipe: Quantized, stored: Bytes, parent: _Parent | None, codes: Sequence[Tensor]) -> list[Tensor]:
    dtype = torch_dtype(recipe.exact)
    places = [one == recipe.first - 1 if recipe.first else torch.zeros_like(one, dtype=torch.bool) for one in codes]
    counts = [int(place.sum()) for place in places]
    out = np.empty(sum(counts) * dtype.itemsize, np.uint8)
    base = None if parent is None else parent.at(places, dtype)
    decode_inner(NUMBERS[recipe.exact], recipe.exacts, stored, out, base)
    values = torch.from_numpy(out).view(dtype) if out.nbytes else torch.empty(0, dtype=dtype)
    return [*torch.split(values, counts)]


def _joined(codes: Sequence[Tensor]) -> Bytes:
    arrays = [bits_of(one) for one in codes]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _digest(arrays: Sequence[Bytes]) -> str:
    hasher = _native.Hasher()
    for array in arrays:
        hasher.update(array)
    return hasher.hexdigest()
