"""One record of tensors on lattices: points -> recipe and bytes, and back. Everything here is exact on integers.

A point is coded as the difference to the point nearest to what the parent has in its place, under how far from that
point the parent's value lies. On the lattice it was made for, a value lies on its point, and most differences are 0. On
another one (another dither after a restore, other steps, a parent of another scheme) the same rule holds: a value near
the middle between two points tells little, one near a point tells much.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.coder import MAX_CHUNK, Bytes, CoderConfig, CodingContext, NumberFormat, default_threads
from shrinkpoint.codec.lattice import MAX_SCALE_EXPONENT, Lattice, LatticeTensor, matrix_shape, scale_counts
from shrinkpoint.codec.recipe import LatticeRecipe
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.dtypes import tensor_bytes, torch_dtype
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

_PART_SIZES = struct.Struct("<IQII")  # bytes of the lattices, of the run's codes and side, and how many escapes
_SIDE_SIZES = struct.Struct("<II")  # bytes of the run's side, and how many escapes; the run's codes are the rest
_ESCAPE = -128
"""The difference that stands for one too large for a byte; the next of the escapes is that."""
_MIN_CHUNK_BYTES = 28  # bytes of a chunk of a run, at least
_BYTE = NumberFormat(8)


@dataclass(frozen=True)
class LatticeInput:
    """The tensors of one record, to be coded.

    Attributes:
        name: of the record.
        infos: its tensors.
        tensors: of each, the values as a reader gets them.
        quantized: of each, what those were made from; all of one law and step.
        reference: the parent, where it holds every member; None: they stand alone.
        second_moments: where the law is "relative", the tensors they are relative to, one for each.
        moment_ordinals: of those tensors.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    tensors: tuple[Tensor, ...]
    quantized: tuple[LatticeTensor, ...]
    reference: Reference | None = None
    second_moments: tuple[Tensor, ...] = ()
    moment_ordinals: tuple[int, ...] = ()


def encode_lattice_record(record: LatticeInput, *, threads: int | None = None) -> EncodedRecord:
    """The record.

    Raises:
        ValueError: the points are not what `codec.Points` says, or not those of the tensors.
    """
    infos, reference, workers = record.infos, record.reference, default_threads(threads)
    lattices = [one.lattice for one in record.quantized]
    digest = _digest(record.tensors)
    _check_input(record)
    count = sum(info.numel for info in infos)
    contexts, tokens = _native.empty(count), _native.empty(count)
    members = _native_members(infos, lattices, reference, record.second_moments)
    escapes = b"".join(_encode_tokens(record, i, one, contexts, tokens, workers) for i, one in enumerate(members))
    run = CoderConfig("codes", predictor="base", top=int(contexts.max(initial=0)))
    nothing = np.empty(0, np.uint8)
    side, coded = run.encode(_BYTE, tokens, CodingContext(base=contexts), workers) if count else (nothing, nothing)
    inherited = reference is not None and _equal_but_seeds(_parent_lattices(infos, reference), lattices)
    described = _encode_seeds(lattices) + (b"" if inherited else _encode_exponents(lattices))
    parts = b"".join(
        [
            _PART_SIZES.pack(len(described), coded.nbytes, side.nbytes, len(escapes) // 4),
            described,
            side.tobytes(),
            coded.tobytes(),
            escapes,
        ]
    )
    recipe = LatticeRecipe(
        spacing=lattices[0].spacing,
        run=run,
        step=lattices[0].step,
        base=reference is not None,
        inherited=inherited,
        relative_to=record.moment_ordinals,
    )
    base = lattice_base_digest(infos, recipe, reference) if reference is not None else None
    return EncodedRecord(record.name, infos, recipes.to_json(recipe), {"points": parts}, digest, base)


def decode_lattice_record(
    encoded: EncodedRecord,
    recipe: LatticeRecipe,
    reference: Reference | None,
    second_moments: Sequence[tuple[str, Tensor]],
    threads: int,
) -> tuple[dict[str, Tensor], dict[str, LatticeTensor]]:
    """The tensors and points of a record.

    Args:
        reference: the parent, which has been checked, where the recipe asks for it.
        second_moments: second moments with their names, one for each member in their order, where the recipe asks for
            them.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are at fault.
    """
    infos = encoded.infos
    count = sum(info.numel for info in infos)
    described, side, coded, escapes = _split_parts(encoded.parts["points"])
    if coded.nbytes < -(-count // recipe.run.chunk) * _MIN_CHUNK_BYTES:  # before the memory is taken
        raise _native.Truncated("the points are too short for the tensors' shapes")
    lattices = decode_lattices(described, infos, recipe, reference)
    members = _native_members(infos, lattices, reference if recipe.base else None, [x for _, x in second_moments])
    contexts, tokens = _native.empty(count), _native.empty(count)
    codes = [_guess(one, contexts, threads) for one in members]
    if count:
        recipe.run.decode(_BYTE, side, coded, tokens, CodingContext(base=contexts), threads)
    large, hasher = escapes.copy(), _native.Hasher()
    tensors, points = {}, {}
    names = [name for name, _ in second_moments] or [""] * len(infos)
    for i, (info, other) in enumerate(zip(infos, names, strict=True)):
        values, used = _decode_values(members[i], tokens, contexts, large, codes[i], threads)
        large = large[4 * used :]
        made = torch.from_numpy(codes[i].view(np.int16)).reshape(info.shape)
        points[info.name] = LatticeTensor(made, lattices[i], other)
        tensors[info.name] = torch.from_numpy(values.view(np.float32)).reshape(info.shape).to(torch_dtype(info.dtype))
        hasher.update(tensor_bytes(tensors[info.name]))
    if large.size:
        raise ValueError("more large differences than tokens that say so")
    digest = hasher.hexdigest()
    if digest != encoded.digest:
        raise ValueError(f"decoded values with digest {digest}, expected {encoded.digest}")
    return tensors, points


def lattice_base_digest(infos: Sequence[TensorInfo], recipe: LatticeRecipe, reference: Reference) -> str:
    """What a record calls its base: the parent's values, after its lattices where these are its own."""
    hasher = _native.Hasher()
    if recipe.inherited:
        for one in _parent_lattices(infos, reference):
            for side in (one.rows, one.columns):
                hasher.update(tensor_bytes(side))
    for info in infos:
        hasher.update(tensor_bytes(reference.tensors[info.name]))
    return hasher.hexdigest()


@dataclass(frozen=True)
class _LatticeMember:
    """One tensor of a record, as the native core takes it.

    Attributes:
        parent: its values before, float32 or bfloat16; None: unknown.
        squares: steps are multiplied by their roots, float32; None: they are not.
        span: of its values among the record's.
    """

    lattice: _native.Lattice
    parent: Bytes | None
    squares: Bytes | None
    span: slice


def _native_members(
    infos: Sequence[TensorInfo],
    lattices: Sequence[Lattice],
    reference: Reference | None,
    second_moments: Sequence[Tensor],
) -> list[_LatticeMember]:
    beside: Sequence[Tensor | None] = second_moments or [None] * len(infos)
    out, start = [], 0
    for info, lattice, other in zip(infos, lattices, beside, strict=True):
        parent = None if reference is None else tensor_bytes(_to_native_dtype(reference.tensors[info.name]))
        squares = None if other is None else tensor_bytes(other.to(torch.float32))
        place = slice(start, start + info.numel)
        out.append(_LatticeMember(lattice.to_native(matrix_shape(info.shape)), parent, squares, place))
        start = place.stop
    return out


def _to_native_dtype(x: Tensor) -> Tensor:
    """Of the dtypes that the native core reads."""
    return x if x.dtype in (torch.float32, torch.bfloat16) else x.to(torch.float32)


def _encode_tokens(
    record: LatticeInput, index: int, member: _LatticeMember, contexts: Bytes, tokens: Bytes, threads: int
) -> bytes:
    """Fills in what is coded of one tensor; returns the differences that are too large.

    In the same turn it is the last line of defence: a scheme's mistake must not become a checkpoint that no reader
    takes.
    """
    info, points, tensor = record.infos[index], record.quantized[index], record.tensors[index]
    expected = tensor_bytes(tensor) if tensor.dtype in (torch.float32, torch.bfloat16) else None
    escapes, in_range, same = _native.lattice_encode(
        member.lattice,
        tensor_bytes(points.codes),
        contexts[member.span],
        tokens[member.span],
        parent=member.parent,
        squares=member.squares,
        expected=expected,
        threads=threads,
    )
    if not in_range:
        raise ValueError(f"points of {info.name!r} that are out of range")
    if expected is None or not same:  # of 16 bits, what torch makes of them decides
        other = record.second_moments[index] if record.second_moments else None
        if not np.array_equal(tensor_bytes(points.dequantize(tensor.dtype, other)), tensor_bytes(tensor)):
            raise ValueError("points that stand for other values than the tensors have")
    return escapes.tobytes()


def _guess(member: _LatticeMember, contexts: Bytes, threads: int) -> Bytes:
    """Where a tensor's points are taken to be; fills in its contexts."""
    codes = _native.empty(2 * (member.span.stop - member.span.start))
    under = contexts[member.span]
    _native.lattice_predict(member.lattice, codes, under, parent=member.parent, squares=member.squares, threads=threads)
    return codes


def _decode_values(
    member: _LatticeMember, tokens: Bytes, contexts: Bytes, escapes: Bytes, codes: Bytes, threads: int
) -> tuple[Bytes, int]:
    """A tensor's values, and how many of the escapes were used; guesses become codes."""
    place = member.span
    values = _native.empty(2 * codes.nbytes)
    used = _native.lattice_decode(
        member.lattice, tokens[place], contexts[place], escapes, codes, values, squares=member.squares, threads=threads
    )
    return values, used


def _encode_seeds(lattices: Sequence[Lattice]) -> bytes:
    return np.array([one.seed for one in lattices], "<u4").tobytes()


def _encode_exponents(lattices: Sequence[Lattice]) -> bytes:
    """Of all rows and columns, entropy-coded as differences of one to the next."""
    if not lattices:
        return b""
    exponents = np.concatenate([side.numpy() for one in lattices for side in (one.rows, one.columns)])
    apart = np.diff(exponents.astype(np.int32), prepend=0)
    large = np.abs(apart) > -_ESCAPE - 1
    escapes = apart[large].astype("<i4")
    apart[large] = _ESCAPE
    side, coded = CoderConfig("codes").encode(_BYTE, apart.astype(np.int8).view(np.uint8), CodingContext(), 1)
    return b"".join([_SIDE_SIZES.pack(side.nbytes, escapes.size), side.tobytes(), escapes.tobytes(), coded.tobytes()])


def decode_lattices(
    data: Bytes, infos: Sequence[TensorInfo], recipe: LatticeRecipe, reference: Reference | None
) -> list[Lattice]:
    seeds, data = np.frombuffer(data[: 4 * len(infos)].tobytes(), "<u4"), data[4 * len(infos) :]
    if seeds.size != len(infos):
        raise _native.Truncated("the lattices end too early")
    lattices = _parent_lattices(infos, reference) if recipe.inherited else _decode_exponents(data, infos, recipe)
    if any(one.spacing != recipe.spacing or one.step != recipe.step for one in lattices) or (
        recipe.inherited and data.nbytes
    ):
        raise ValueError("lattices of the parent that are of another law, or more bytes than they have")
    if recipe.spacing == "log" and seeds.any():
        raise ValueError("dither where there is none")
    return [replace(one, seed=int(seed)) for one, seed in zip(lattices, seeds, strict=True)]


def _decode_exponents(data: Bytes, infos: Sequence[TensorInfo], recipe: LatticeRecipe) -> list[Lattice]:
    counts = [scale_counts(recipe.spacing, info.shape) for info in infos]
    total = sum(rows + columns for rows, columns in counts)
    nside, nescapes = _SIDE_SIZES.unpack(data[: _SIDE_SIZES.size].tobytes())
    ends = np.cumsum([_SIDE_SIZES.size, nside, 4 * nescapes])
    if ends[-1] + -(-total // MAX_CHUNK) * _MIN_CHUNK_BYTES > data.nbytes:
        raise _native.Truncated("the lattices end too early")
    side, escapes, coded = np.split(data, ends)[1:]
    apart = np.empty(total, np.uint8)
    CoderConfig("codes").decode(_BYTE, side, coded, apart, CodingContext(), 1)
    exponents = np.cumsum(
        _resolve_escapes(apart.view(np.int8), np.frombuffer(escapes.tobytes(), "<i4")), dtype=np.int64
    )
    if bool((np.abs(exponents) > MAX_SCALE_EXPONENT).any()):
        raise ValueError("steps out of range")
    parts = np.split(exponents.astype(np.int16), np.cumsum([n for pair in counts for n in pair])[:-1])
    halves = [torch.from_numpy(part) for part in parts]
    lattices = [
        Lattice(recipe.spacing, rows, columns, recipe.step)
        for rows, columns in zip(halves[::2], halves[1::2], strict=True)
    ]
    if not all(map(_is_in_range, lattices)):
        raise ValueError("steps out of range")
    return lattices


def _is_in_range(lattice: Lattice) -> bool:
    """Whether every step is a float32 of full precision."""
    ends = [(int(one.min()), int(one.max())) for one in (lattice.rows, lattice.columns) if one.numel()]
    low, high = (sum(end[i] for end in ends) for i in range(2))
    return low >= -MAX_SCALE_EXPONENT and high <= MAX_SCALE_EXPONENT


def _parent_lattices(infos: Sequence[TensorInfo], reference: Reference | None) -> list[Lattice]:
    """The parent's lattices; [] where it does not have them all."""
    held = {} if reference is None else reference.quantized
    found = [held.get(info.name) for info in infos]
    lattices = [one.lattice for one in found if isinstance(one, LatticeTensor)]
    fit = all(
        (one.rows.numel(), one.columns.numel()) == scale_counts(one.spacing, info.shape)
        for one, info in zip(lattices, infos, strict=False)
    )
    return lattices if fit and len(lattices) == len(infos) else []


def _equal_but_seeds(lattices: Sequence[Lattice], others: Sequence[Lattice]) -> bool:
    """Whether they differ in nothing but their seeds."""
    return [replace(one, seed=0) for one in lattices] == [replace(one, seed=0) for one in others]


def _resolve_escapes(differences: NDArray[np.int8], escapes: NDArray[np.int32]) -> NDArray[np.int32]:
    out = differences.astype(np.int32)
    large = out == _ESCAPE
    if int(large.sum()) != escapes.size:
        raise ValueError("more or fewer large differences than codes that say so")
    out[large] = escapes
    return out


def _split_parts(stored: memoryview | bytes | bytearray) -> list[Bytes]:
    """The lattices, the side of the run, its codes, and the escapes."""
    data = np.frombuffer(stored, np.uint8)
    described, coded, side, escapes = _PART_SIZES.unpack(data[: _PART_SIZES.size].tobytes())
    sizes = (described, side, coded, 4 * escapes)
    if sum(sizes) != data.nbytes - _PART_SIZES.size:
        raise _native.Truncated("the points end too early, or too late")
    return np.split(data, np.cumsum([_PART_SIZES.size, *sizes]))[1:-1]


def _check_input(record: LatticeInput) -> None:
    """What `_encode_tokens` takes for granted."""
    first = record.quantized[0].lattice
    if len({(one.lattice.spacing, one.lattice.step) for one in record.quantized}) != 1:
        raise ValueError("points of several laws in one record")
    if (first.spacing == "relative") != bool(record.second_moments):
        raise ValueError("points that are relative to nothing, or something beside points that are not")
    for info, one, tensor in zip(record.infos, record.quantized, record.tensors, strict=True):
        counts = one.lattice.rows.numel(), one.lattice.columns.numel()
        if {tuple(one.codes.shape), tuple(tensor.shape)} != {info.shape} or counts != scale_counts(
            first.spacing, info.shape
        ):
            raise ValueError(f"points of another shape than {info.name!r}")
        if not _is_in_range(one.lattice) or (first.spacing == "log" and one.lattice.seed):
            raise ValueError(f"points of {info.name!r} that are out of range")


def _digest(tensors: Sequence[Tensor]) -> str:
    hasher = _native.Hasher()
    for tensor in tensors:
        hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()
