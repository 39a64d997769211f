"""One record of quantized tensors: symbols -> recipe and bytes, and back. Everything here is exact on integers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.codes import CODERS, Stored, decode_codes, forms
from shrinkpoint.codec.inner import decode_inner, encode_inner
from shrinkpoint.codec.number import NUMBERS
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.codec.recipe import Cyclic, Quantized
from shrinkpoint.codec.reference import Reference
from shrinkpoint.codec.run import Bytes, Known, Run, default_threads
from shrinkpoint.codec.symbols import MOST_CODES, SPECIALS, Symbols
from shrinkpoint.record import Encoded, TensorInfo
from shrinkpoint.state import torch_dtype

_SIZES = struct.Struct("<IQQ")  # bytes of the side, of the codes and of the centers; the exact values are the rest
_EXACT = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Codebooked:
    """The quantized tensors of one record, to be coded.

    Attributes:
        name: of the record.
        infos: its tensors.
        tensors: of each, the values as a reader gets them.
        symbols: of each, what those were made from; all alike in `bins`, `first`, `residual` and dtype of `exact`.
        known: the members' moments, where a decoder holds them; nothing else.
        moments: as in `recipe.Quantized`.
        reference: the parent, where it holds symbols of every member, or where these are residual; else None.
        under: the codes of other tensors of the file that are context in place of the parent's, one for each member; ()
            for none.
        ordinals: of those tensors.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    tensors: tuple[Tensor, ...]
    symbols: tuple[Symbols, ...]
    known: Known = field(default_factory=Known)
    moments: tuple[tuple[int, int], ...] = ()
    reference: Reference | None = None
    under: tuple[Tensor, ...] = ()
    ordinals: tuple[int, ...] = ()


def encode_quantized(material: Codebooked, *, coders: Sequence[str] = CODERS, threads: int | None = None) -> Encoded:
    """The record, in the smallest form that `coders` allow.

    Raises:
        ValueError: the symbols are not what `codec.Symbols` says, or not those of the tensors.
    """
    digest = _digest([bits_of(tensor) for tensor in material.tensors])
    infos, first = material.infos, material.symbols[0]
    codes = _joined([one.codes for one in material.symbols])
    parent = Parent.of(infos, material.reference, residual=first.residual)
    if material.under and not first.residual:
        parent = None
    _check_readable(material, parent, digest)
    context = _joined(material.under) if material.under else None if parent is None else parent.codes
    found = forms(codes, first.used, context, material.known, coders, default_threads(threads))
    how, side, stored = min(found, key=lambda form: len(form[1]) + len(form[2]))
    centers, middle = _encode_centers(material.symbols, parent)
    exacts, end = _encode_exact(material.symbols, parent)
    parts = {"symbols": b"".join([_SIZES.pack(len(side), len(stored), len(middle)), side, stored, middle, end])}
    uses_moments = isinstance(how, Run) and how.moments
    uses_others = isinstance(how, Cyclic) or (isinstance(how, Run) and how.needs_base)
    recipe = Quantized(
        bins=first.bins, first=first.first, codes=how, centers=centers, exact=_EXACT[first.exact.dtype], exacts=exacts,
        base=parent is not None and not first.residual, moments=material.moments if uses_moments else (),
        residual=first.residual, under=material.ordinals if material.under and uses_others else (),
    )  # fmt: skip
    base = None if parent is None else parent.digest
    return Encoded(material.name, infos, recipes.to_json(recipe), parts, digest, base)


def decode_quantized(
    encoded: Encoded,
    recipe: Quantized,
    known: Known,
    reference: Reference | None,
    under: Sequence[Tensor],
    threads: int,
) -> tuple[dict[str, Tensor], dict[str, Symbols]]:
    """The tensors and symbols of a record.

    Args:
        known: the members' moments, where the recipe asks for them.
        reference: the parent, which has been checked, where the recipe asks for it.
        under: the codes of other tensors of the file, where the recipe asks for them.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are at fault.
    """
    infos = encoded.infos
    needed = recipe.base or recipe.residual
    parent = Parent.of(infos, reference, residual=recipe.residual) if needed else None
    if needed and parent is None:
        raise ValueError("a parent whose tensors are not quantized")
    context = _joined(under) if under else None if parent is None else parent.codes
    side, stored, middle, end = _split(encoded.parts["symbols"])
    codes = decode_codes(sum(info.numel for info in infos), recipe, side, stored, context, known, threads)
    if codes.nbytes and int(codes.max()) >= recipe.first + recipe.bins:
        raise ValueError("a code beyond the last center")
    centers = decode_centers(len(infos), recipe, middle, parent)
    members = np.split(codes, np.cumsum([info.numel for info in infos])[:-1])
    shaped = [torch.from_numpy(one).reshape(info.shape) for one, info in zip(members, infos, strict=True)]
    exact = _decode_exact(recipe, end, parent, shaped)
    symbols = [
        Symbols(one, table, values, recipe.first, recipe.residual)
        for one, table, values in zip(shaped, centers, exact, strict=True)
    ]
    made = _made(infos, symbols, parent)
    tensors = {info.name: one for info, one in zip(infos, made, strict=True)}
    digest = _digest([bits_of(tensors[info.name]) for info in infos])
    if digest != encoded.digest:
        raise ValueError(f"decoded values with digest {digest}, expected {encoded.digest}")
    return tensors, {info.name: one for info, one in zip(infos, symbols, strict=True)}


def _made(infos: Sequence[TensorInfo], symbols: Sequence[Symbols], parent: Parent | None) -> list[Tensor]:
    """The values that symbols stand for."""
    bases = parent.tensors if parent is not None and parent.codes is None else [None] * len(infos)
    return [one.values(torch_dtype(info.dtype), base) for info, one, base in zip(infos, symbols, bases, strict=True)]


def _check_readable(material: Codebooked, parent: Parent | None, digest: str) -> None:
    """The last line of defence: a scheme's mistake must not become a checkpoint that no reader takes."""
    shapes = [info.shape for info in material.infos]
    if [tuple(one.codes.shape) for one in material.symbols] != shapes or len({*map(_kind, material.symbols)}) != 1:
        raise ValueError("symbols of other shapes than their tensors, or of several kinds")
    if material.under and (
        [tuple(one.shape) for one in material.under] != shapes or len(material.ordinals) != len(shapes)
    ):
        raise ValueError("symbols under codes of other shapes")
    for one in material.symbols:
        _check(one)
    if material.symbols[0].residual and parent is None:
        raise ValueError("symbols of differences to a parent that is not there")
    if _digest([bits_of(one) for one in _made(material.infos, material.symbols, parent)]) != digest:
        raise ValueError("symbols that stand for other values than the tensors have")


def _kind(one: Symbols) -> tuple[object, ...]:
    """What the symbols of one record have in common."""
    return one.bins, one.first, one.residual, one.exact.dtype


def _check(one: Symbols) -> None:
    if not 0 <= one.first <= SPECIALS or not 0 < one.bins <= MOST_CODES - one.first:
        raise ValueError("symbols with more codes than there are")
    if one.codes.numel() and int(one.codes.max()) >= one.used:
        raise ValueError("symbols with a code beyond the last center")
    if int(one.protected.sum()) != one.exact.numel():
        raise ValueError("symbols with more or fewer exact values than codes that say so")
    if not bool(one.centers.isfinite().all()) or bool((one.centers.diff() < 0).any()):
        raise ValueError("symbols whose centers do not rise, or are not finite")


def base_digest(infos: Sequence[TensorInfo], recipe: Quantized, reference: Reference) -> str | None:
    """What a record calls its base; None where it needs the parent's codes, which the parent does not have."""
    parent = Parent.of(infos, reference, residual=recipe.residual)
    return None if parent is None else parent.digest


@dataclass(frozen=True)
class Parent:
    """What the parent holds of a record's tensors.

    Attributes:
        symbols, codes: () and None where the record is residual, which needs values alone. So it can be made against a
            parent that is not quantized, and a parent can be written again without its symbols.
    """

    symbols: tuple[Symbols, ...]
    tensors: tuple[Tensor, ...]
    codes: Bytes | None

    @classmethod
    def of(cls, infos: Sequence[TensorInfo], reference: Reference | None, *, residual: bool) -> Parent | None:
        if reference is None:
            return None
        if not residual and not all(reference.has_codes(info.name) for info in infos):
            return None
        held = () if residual else tuple(reference.symbols[info.name] for info in infos)
        symbols = tuple(one for one in held if isinstance(one, Symbols))
        found = [reference.matching(info.name, info.shape, torch_dtype(info.dtype)) for info in infos]
        tensors = tuple(tensor for tensor in found if tensor is not None)
        if len(tensors) < len(infos):
            return None
        return cls(symbols, tensors, None if residual else _joined([one.codes for one in symbols]))

    @property
    def digest(self) -> str:
        """Of the codes, then the values."""
        values = [bits_of(tensor) for tensor in self.tensors]
        return _digest(values if self.codes is None else [self.codes, *values])

    def centers(self, bins: int) -> Bytes | None:
        if not self.symbols or any(one.bins != bins for one in self.symbols):
            return None
        return np.concatenate([bits_of(one.centers) for one in self.symbols])

    def at(self, places: Sequence[Tensor], dtype: torch.dtype) -> Bytes:
        """The values at these places (bool, one mask a member), as numbers of `dtype`."""
        picked = [tensor[place].to(dtype) for tensor, place in zip(self.tensors, places, strict=True)]
        return np.concatenate([bits_of(one) for one in picked])


def _split(stored: Stored) -> list[Bytes]:
    """Side, codes, centers and exact values."""
    data = np.frombuffer(stored, np.uint8)
    sizes = _SIZES.unpack(data[: _SIZES.size].tobytes())
    if sum(sizes) > data.nbytes - _SIZES.size:
        raise _native.Truncated("the symbols end too early")
    return np.split(data, np.cumsum([_SIZES.size, *sizes]))[1:]


def _encode_centers(symbols: Sequence[Symbols], parent: Parent | None) -> tuple[Run | None, bytes]:
    centers = np.concatenate([bits_of(one.centers) for one in symbols])
    return encode_inner(NUMBERS["F32"], centers, None if parent is None else parent.centers(symbols[0].bins))


def decode_centers(members: int, recipe: Quantized, stored: Bytes, parent: Parent | None) -> list[Tensor]:
    out = np.empty(4 * recipe.bins * members, np.uint8)
    base = None if parent is None else parent.centers(recipe.bins)
    decode_inner(NUMBERS["F32"], recipe.centers, stored, out, base)
    centers = torch.from_numpy(out).view(torch.float32).reshape(members, recipe.bins)
    if not bool(centers.isfinite().all()) or bool((centers.diff(dim=1) < 0).any()):
        raise ValueError("centers that do not rise, or are not finite")
    return [*centers]


def _encode_exact(symbols: Sequence[Symbols], parent: Parent | None) -> tuple[Run | None, bytes]:
    dtype = symbols[0].exact.dtype
    values = np.concatenate([bits_of(one.exact) for one in symbols])
    base = None if parent is None else parent.at([one.protected.cpu() for one in symbols], dtype)
    return encode_inner(NUMBERS[_EXACT[dtype]], values, base)


def _decode_exact(recipe: Quantized, stored: Bytes, parent: Parent | None, codes: Sequence[Tensor]) -> list[Tensor]:
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
