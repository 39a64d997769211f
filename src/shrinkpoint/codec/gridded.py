"""One record of tensors on lattices: points -> recipe and bytes, and back. Everything here is exact on integers.

A point is coded as the difference to the point nearest to what the parent has in its place, under how far from that
point the parent's value lies. On the lattice it was made for, a value lies on its point, and most differences are 0. On
another one (another dither after a restore, other steps, a parent of another scheme) the same rule holds: a value near
the middle between two points tells little, one near a point tells much.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.lattice import FINE, MOST_CODE, MOST_EXPONENT, NOTHING, Lattice, Points, matrix, sides, spans
from shrinkpoint.codec.number import Number
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.codec.recipe import Gridded
from shrinkpoint.codec.reference import Reference
from shrinkpoint.codec.run import CHUNK, Bytes, Known, Run, default_threads
from shrinkpoint.record import Encoded, TensorInfo
from shrinkpoint.state import torch_dtype

_SIZES = struct.Struct("<IQII")  # bytes of the lattices, of the run's codes and side, and how many escapes
_SIDES = struct.Struct("<II")  # bytes of the run's side, and how many escapes; the run's codes are the rest
_ESCAPE = -128
"""The difference that stands for one too large for a byte; the next of the escapes is that."""
_OFFSETS = 16
"""Places in the cell around a point that contexts tell apart; one more for the point itself."""
_CLASSES = 8
"""Sizes of a step, beside its tensor's usual one, that contexts tell apart."""
_NEAR = 1.0 / 64
_QUARTERS = 12
"""Of a step of powers of two, up and down from zero, that contexts tell apart."""
_SMALLEST = 28  # bytes of a chunk of a run, at least
_BYTE = Number(8)

Shorts = NDArray[np.int16]


@dataclass(frozen=True)
class Pointed:
    """The tensors of one record, to be coded.

    Attributes:
        name: of the record.
        infos: its tensors.
        tensors: of each, the values as a reader gets them.
        points: of each, what those were made from; all of one law and step.
        reference: the parent, where it holds every member; None: they stand alone.
        others: where the law is "relative", the tensors they are relative to, one for each.
        ordinals: of those tensors.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    tensors: tuple[Tensor, ...]
    points: tuple[Points, ...]
    reference: Reference | None = None
    others: tuple[Tensor, ...] = ()
    ordinals: tuple[int, ...] = ()


def encode_gridded(material: Pointed, *, threads: int | None = None) -> Encoded:
    """The record.

    Raises:
        ValueError: the points are not what `codec.Points` says, or not those of the tensors.
    """
    infos, reference = material.infos, material.reference
    lattices = [one.lattice for one in material.points]
    digest = _digest(material.tensors)
    _check(material, digest)
    parents = _parents(infos, reference)
    guesses = [
        _Guess.of(lattice, info, parent, other)
        for lattice, info, parent, other in zip(lattices, infos, parents, _aligned(material.others, infos), strict=True)
    ]
    codes = [one.codes.reshape(-1).numpy() for one in material.points]
    tokens, escapes = _tokens(codes, guesses)
    contexts = np.concatenate([one.contexts for one in guesses])
    run = Run("codes", predictor="base", top=int(contexts.max(initial=0)))
    side, coded = run.encode(_BYTE, tokens, Known(base=contexts), default_threads(threads))
    inherited = reference is not None and _alike(_inherited(infos, reference), lattices)
    described = _seeds(lattices) + (b"" if inherited else _exponents(lattices))
    parts = b"".join(
        [
            _SIZES.pack(len(described), coded.nbytes, side.nbytes, escapes.size),
            described,
            side.tobytes(),
            coded.tobytes(),
            escapes.astype("<i4").tobytes(),
        ]
    )
    recipe = Gridded(
        law=lattices[0].law, run=run, step=lattices[0].step, base=reference is not None, inherited=inherited,
        others=material.ordinals,
    )  # fmt: skip
    base = base_digest(infos, recipe, reference) if reference is not None else None
    return Encoded(material.name, infos, recipes.to_json(recipe), {"points": parts}, digest, base)


def decode_gridded(
    encoded: Encoded, recipe: Gridded, reference: Reference | None, others: Mapping[str, Tensor], threads: int
) -> tuple[dict[str, Tensor], dict[str, Points]]:
    """The tensors and points of a record.

    Args:
        reference: the parent, which has been checked, where the recipe asks for it.
        others: second moments by name, one for each member in their order, where the recipe asks for them.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are at fault.
    """
    infos = encoded.infos
    count = sum(info.numel for info in infos)
    described, side, coded, escapes = _split(encoded.parts["points"])
    if coded.nbytes < -(-count // recipe.run.chunk) * _SMALLEST:  # before the memory is taken
        raise _native.Truncated("the points are too short for the tensors' shapes")
    lattices = _read_lattices(described, infos, recipe, reference)
    parents = _parents(infos, reference if recipe.base else None)
    beside = _aligned(tuple(others.values()), infos)
    guesses = [
        _Guess.of(lattice, info, parent, other)
        for lattice, info, parent, other in zip(lattices, infos, parents, beside, strict=True)
    ]
    contexts = np.concatenate([one.contexts for one in guesses])
    tokens = np.empty(count, np.uint8)
    recipe.run.decode(_BYTE, side, coded, tokens, Known(base=contexts), threads)
    codes = _codes(tokens, contexts, guesses, escapes)
    names = list(others) or [""] * len(infos)
    points = [
        Points(torch.from_numpy(one).reshape(info.shape), lattice, name)
        for one, info, lattice, name in zip(codes, infos, lattices, names, strict=True)
    ]
    tensors = {
        info.name: one.values(torch_dtype(info.dtype), other)
        for info, one, other in zip(infos, points, beside, strict=True)
    }
    digest = _digest([tensors[info.name] for info in infos])
    if digest != encoded.digest:
        raise ValueError(f"decoded values with digest {digest}, expected {encoded.digest}")
    return tensors, {info.name: one for info, one in zip(infos, points, strict=True)}


def base_digest(infos: Sequence[TensorInfo], recipe: Gridded, reference: Reference) -> str:
    """What a record calls its base: the parent's values, after its lattices where these are its own."""
    hasher = _native.Hasher()
    if recipe.inherited:
        for one in _inherited(infos, reference):
            for side in (one.rows, one.columns):
                hasher.update(bits_of(side))
    for info in infos:
        hasher.update(bits_of(reference.tensors[info.name]))
    return hasher.hexdigest()


@dataclass(frozen=True)
class _Guess:
    """What the parent says of a tensor's points.

    Attributes:
        codes: int32, 1-d: the points nearest to the parent's values; zeros without a parent.
        contexts: uint8, 1-d.
    """

    codes: NDArray[np.int32]
    contexts: Bytes

    @classmethod
    def of(cls, lattice: Lattice, info: TensorInfo, parent: Tensor | None, other: Tensor | None) -> _Guess:
        shape = sides(info.shape)
        if lattice.law == "log":
            codes, contexts = _nearest_power(lattice, shape, parent)
        else:
            codes, offsets = _nearest(lattice, shape, parent, other)
            contexts = offsets * _CLASSES + _classes(lattice, shape)
        return cls(codes.reshape(-1).numpy(), contexts.reshape(-1).to(torch.uint8).numpy())


def _nearest(
    lattice: Lattice, shape: tuple[int, int], parent: Tensor | None, other: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and offsets; every step is one rounding of float32, as a reader on another machine repeats it."""
    u = lattice.dither(shape)
    if parent is None:
        at = torch.zeros(shape) - u
    else:
        scales = lattice.scales(None if other is None else matrix(other).to(torch.float32))
        at = matrix(parent).to(torch.float32) / scales - u
        at = torch.nan_to_num_(at, 0.0, 0.0, 0.0).clamp_(-MOST_CODE, MOST_CODE)
    codes = at.round()
    rest = at - codes
    offsets = ((rest + 0.5) * _OFFSETS).to(torch.int32).clamp_(0, _OFFSETS - 1)
    return codes.to(torch.int32), offsets.masked_fill_(rest.abs() < _NEAR, _OFFSETS)


def _nearest_power(lattice: Lattice, shape: tuple[int, int], parent: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and contexts. Most values are where their row and column say, whatever the parent's were: so that is the
    guess, and the parent's point is context.

    The parent's values are taken as integers: an octave has eight parts of equal width, nearly those of powers of two.
    """
    if parent is None:
        return torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
    bits = matrix(parent).to(torch.float32).contiguous().view(torch.int32)
    level = (bits >> 20) - 127 * FINE  # the exponent and three bits of the mantissa
    beyond = level - lattice.exponents()
    quarters = torch.div(beyond * 4, lattice.step, rounding_mode="floor").clamp_(-_QUARTERS, _QUARTERS - 1) + _QUARTERS
    nothing = bits == 0
    codes = torch.zeros(shape, dtype=torch.int32).masked_fill_(nothing, NOTHING)
    return codes, quarters.masked_fill_(nothing, 2 * _QUARTERS)


def _classes(lattice: Lattice, shape: tuple[int, int]) -> Tensor:
    """By how many half octaves a step is above or below its tensor's usual one."""
    if lattice.law == "log":
        return torch.zeros(shape, dtype=torch.int32)
    rows, columns = lattice.rows.to(torch.int32), lattice.columns.to(torch.int32)
    rows = rows - rows.sum() // max(1, rows.numel())
    columns = columns - columns.sum() // max(1, columns.numel())
    here = ((rows[:, None] + columns[None, :]) >> 2) + _CLASSES // 2
    return here.clamp_(0, _CLASSES - 1).expand(shape)


def _tokens(codes: Sequence[Shorts], guesses: Sequence[_Guess]) -> tuple[Bytes, NDArray[np.int32]]:
    """The bytes to be coded (context + difference, modulo 256), and the differences that are too large."""
    apart = np.concatenate([one.astype(np.int32) - guess.codes for one, guess in zip(codes, guesses, strict=True)])
    contexts = np.concatenate([guess.contexts for guess in guesses])
    large = np.abs(apart) > -_ESCAPE - 1
    escapes = apart[large]
    apart[large] = _ESCAPE
    return (contexts + apart.astype(np.int8).view(np.uint8)).astype(np.uint8), escapes


def _codes(tokens: Bytes, contexts: Bytes, guesses: Sequence[_Guess], escapes: Bytes) -> list[Shorts]:
    apart = _unescaped((tokens - contexts).view(np.int8), np.frombuffer(escapes.tobytes(), "<i4"))
    codes = np.concatenate([one.codes for one in guesses]).astype(np.int64) + apart
    if codes.size and int(np.abs(codes).max()) > MOST_CODE:
        raise ValueError("a point that is too far out")
    ends = np.cumsum([one.codes.size for one in guesses])[:-1]
    return np.split(codes.astype(np.int16), ends)


def _seeds(lattices: Sequence[Lattice]) -> bytes:
    return np.array([one.seed for one in lattices], "<u4").tobytes()


def _exponents(lattices: Sequence[Lattice]) -> bytes:
    """Of all rows and columns, entropy-coded as differences of one to the next."""
    if not lattices:
        return b""
    exponents = np.concatenate([side.numpy() for one in lattices for side in (one.rows, one.columns)])
    apart = np.diff(exponents.astype(np.int32), prepend=0)
    large = np.abs(apart) > -_ESCAPE - 1
    escapes = apart[large].astype("<i4")
    apart[large] = _ESCAPE
    side, coded = Run("codes").encode(_BYTE, apart.astype(np.int8).view(np.uint8), Known(), 1)
    return b"".join([_SIDES.pack(side.nbytes, escapes.size), side.tobytes(), escapes.tobytes(), coded.tobytes()])


def _read_lattices(
    data: Bytes, infos: Sequence[TensorInfo], recipe: Gridded, reference: Reference | None
) -> list[Lattice]:
    seeds, data = np.frombuffer(data[: 4 * len(infos)].tobytes(), "<u4"), data[4 * len(infos) :]
    if seeds.size != len(infos):
        raise _native.Truncated("the lattices end too early")
    lattices = _inherited(infos, reference) if recipe.inherited else _read_exponents(data, infos, recipe)
    if any(one.law != recipe.law or one.step != recipe.step for one in lattices) or (recipe.inherited and data.nbytes):
        raise ValueError("lattices of the parent that are of another law, or more bytes than they have")
    return [replace(one, seed=int(seed)) for one, seed in zip(lattices, seeds, strict=True)]


def _read_exponents(data: Bytes, infos: Sequence[TensorInfo], recipe: Gridded) -> list[Lattice]:
    counts = [spans(recipe.law, info.shape) for info in infos]
    total = sum(rows + columns for rows, columns in counts)
    nside, nescapes = _SIDES.unpack(data[: _SIDES.size].tobytes())
    ends = np.cumsum([_SIDES.size, nside, 4 * nescapes])
    if ends[-1] + -(-total // CHUNK) * _SMALLEST > data.nbytes:
        raise _native.Truncated("the lattices end too early")
    side, escapes, coded = np.split(data, ends)[1:]
    apart = np.empty(total, np.uint8)
    Run("codes").decode(_BYTE, side, coded, apart, Known(), 1)
    exponents = np.cumsum(_unescaped(apart.view(np.int8), np.frombuffer(escapes.tobytes(), "<i4")), dtype=np.int64)
    if bool((np.abs(exponents) > MOST_EXPONENT).any()):
        raise ValueError("steps out of range")
    parts = np.split(exponents.astype(np.int16), np.cumsum([n for pair in counts for n in pair])[:-1])
    halves = [torch.from_numpy(part) for part in parts]
    lattices = [
        Lattice(recipe.law, rows, columns, recipe.step) for rows, columns in zip(halves[::2], halves[1::2], strict=True)
    ]
    if not all(map(_is_sound, lattices)):
        raise ValueError("steps out of range")
    return lattices


def _is_sound(lattice: Lattice) -> bool:
    """Whether every step is a float32 of full precision."""
    ends = [(int(one.min()), int(one.max())) for one in (lattice.rows, lattice.columns) if one.numel()]
    low, high = (sum(end[i] for end in ends) for i in range(2))
    return low >= -MOST_EXPONENT and high <= MOST_EXPONENT


def _inherited(infos: Sequence[TensorInfo], reference: Reference | None) -> list[Lattice]:
    """The parent's lattices; [] where it does not have them all."""
    held = {} if reference is None else reference.symbols
    found = [held.get(info.name) for info in infos]
    lattices = [one.lattice for one in found if isinstance(one, Points)]
    fit = all(
        (one.rows.numel(), one.columns.numel()) == spans(one.law, info.shape)
        for one, info in zip(lattices, infos, strict=False)
    )
    return lattices if fit and len(lattices) == len(infos) else []


def _alike(lattices: Sequence[Lattice], others: Sequence[Lattice]) -> bool:
    """Whether they differ in nothing but their seeds."""
    return [replace(one, seed=0) for one in lattices] == [replace(one, seed=0) for one in others]


def _parents(infos: Sequence[TensorInfo], reference: Reference | None) -> list[Tensor | None]:
    return [None if reference is None else reference.tensors[info.name] for info in infos]


def _aligned(others: Sequence[Tensor], infos: Sequence[TensorInfo]) -> Sequence[Tensor | None]:
    return others or [None] * len(infos)


def _unescaped(apart: NDArray[np.int8], escapes: NDArray[np.int32]) -> NDArray[np.int32]:
    out = apart.astype(np.int32)
    large = out == _ESCAPE
    if int(large.sum()) != escapes.size:
        raise ValueError("more or fewer large differences than codes that say so")
    out[large] = escapes
    return out


def _split(stored: memoryview | bytes | bytearray) -> list[Bytes]:
    """The lattices, the side of the run, its codes, and the escapes."""
    data = np.frombuffer(stored, np.uint8)
    described, coded, side, escapes = _SIZES.unpack(data[: _SIZES.size].tobytes())
    sizes = (described, side, coded, 4 * escapes)
    if sum(sizes) != data.nbytes - _SIZES.size:
        raise _native.Truncated("the points end too early, or too late")
    return np.split(data, np.cumsum([_SIZES.size, *sizes]))[1:-1]


def _check(material: Pointed, digest: str) -> None:
    """The last line of defence: a scheme's mistake must not become a checkpoint that no reader takes."""
    first = material.points[0].lattice
    if len({(one.lattice.law, one.lattice.step) for one in material.points}) != 1:
        raise ValueError("points of several laws in one record")
    if (first.law == "relative") != bool(material.others):
        raise ValueError("points that are relative to nothing, or something beside points that are not")
    for info, one in zip(material.infos, material.points, strict=True):
        counts = one.lattice.rows.numel(), one.lattice.columns.numel()
        if tuple(one.codes.shape) != info.shape or counts != spans(first.law, info.shape):
            raise ValueError(f"points of another shape than {info.name!r}")
        if not _is_sound(one.lattice) or (one.codes.numel() and int(one.codes.abs().max()) > MOST_CODE):
            raise ValueError(f"points of {info.name!r} that are out of range")
    made = [
        one.values(tensor.dtype, other)
        for one, tensor, other in zip(
            material.points, material.tensors, _aligned(material.others, material.infos), strict=True
        )
    ]
    if _digest(made) != digest:
        raise ValueError("points that stand for other values than the tensors have")


def _digest(tensors: Sequence[Tensor]) -> str:
    hasher = _native.Hasher()
    for tensor in tensors:
        hasher.update(bits_of(tensor))
    return hasher.hexdigest()
