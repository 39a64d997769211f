"""Encodes a record of lattice tensors to recipe and bytes. All arithmetic is exact.

A code is predicted by the code of the lattice point nearest to the parent's value, and the difference is entropy-coded.
Its context is how far the parent's value lies from that point. If the lattice has not changed, the parent's values lie
on points, and most differences are 0. If it has (new dither after a restore, other scales, a parent of another scheme),
values in the middle between two points predict poorly, values near a point well.

Tensors with gains, whose values do not lie on points, are predicted by the parent's points as long as their lattice
and their origin are the parent's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.coder import BYTE_FORMAT, Bytes, CoderConfig, CodingContext, default_threads
from shrinkpoint.codec.lattice import MAX_GAIN, MIN_GAIN, Lattice, LatticeTensor, all_exponents, row_counts
from shrinkpoint.codec.recipe import LatticeRecipe
from shrinkpoint.codec.reference import Reference, lattice_source
from shrinkpoint.tensors.dtypes import as_native_float, tensor_bytes, torch_dtype
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

PART_SIZES = struct.Struct("<IQII")
"""Bytes of the lattices, of the coded tokens and of their side data, and the number of escapes; they begin the part."""
SIDE_SIZES = struct.Struct("<II")  # of the exponents: bytes of the side data, and the number of escapes
ESCAPE = -128  # The token of a difference that does not fit into a byte; the difference is the next of the escapes


@dataclass(frozen=True)
class LatticeInput:
    """The lattice tensors of one record, to be encoded."""

    name: str  # name of the record
    infos: tuple[TensorInfo, ...]
    # The values of each member as a reader gets them, to be compared; None: whatever its codes stand for.
    tensors: tuple[Tensor | None, ...]
    # The quantized form of each member; all of one spacing and step, and all with an origin or none.
    quantized: tuple[LatticeTensor, ...]
    reference: Reference | None = None  # the parent, if it holds every member; None for a record without base
    # With spacing "relative", the second moment of each member, float32, or its codes; else ().
    second_moments: tuple[Tensor | LatticeTensor, ...] = ()
    moment_ordinals: tuple[int, ...] = ()  # ordinals of those second moments in the file


def encode_lattice_record(record: LatticeInput, *, threads: int | None = None) -> EncodedRecord:
    """Encode a record.

    Raises:
        ValueError: the quantized tensors are malformed, or do not decode to the given values.
    """
    infos, reference, workers = record.infos, record.reference, default_threads(threads)
    lattices = [tensor.lattice for tensor in record.quantized]
    _check_input(record)
    parents = _parent_lattices(infos, reference)
    inherited = len(parents) == len(lattices) and all(map(Lattice.has_equal_steps, parents, lattices))
    exponents, moved = (b"", False) if inherited else _encode_exponents(lattices, parents)
    gains = record.quantized[0].origin is not None
    continued = reference is not None and all(
        tensor.has_origin_of(reference.quantized.get(info.name))
        for info, tensor in zip(infos, record.quantized, strict=True)
    )
    digests = _Digests(_native.Hasher(), None if reference is None else _native.Hasher())
    if digests.base is not None:
        for exponent_side in exponents_of(parents if inherited or moved else []):
            digests.base.update(exponent_side)
    ends = [*accumulate((info.numel for info in infos), initial=0)]
    contexts, tokens = _native.empty(ends[-1]), _native.empty(ends[-1])
    escape_parts, top = list[bytes](), 0
    for index, (begin, end) in enumerate(pairwise(ends)):
        coded_range = slice(begin, end)
        part, largest = _encode_tokens(
            record, index, contexts[coded_range], tokens[coded_range], digests, workers, continued=continued
        )
        escape_parts.append(part)
        top = max(top, largest)
    escapes, config = b"".join(escape_parts), CoderConfig("codes", predictor="base", top=top)
    side = coded = np.empty(0, np.uint8)
    if tokens.size:
        side, coded = config.encode(BYTE_FORMAT, tokens, CodingContext(base=contexts), workers)
    seed_bytes = np.array([lattice.seed for lattice in lattices], "<u4").tobytes()
    gain_bytes = np.array([tensor.gain for tensor in record.quantized], "<f4").tobytes() if gains else b""
    lattice_bytes = seed_bytes + gain_bytes + exponents
    parts = b"".join(
        [
            PART_SIZES.pack(len(lattice_bytes), coded.nbytes, side.nbytes, len(escapes) // 4),
            lattice_bytes,
            side.tobytes(),
            coded.tobytes(),
            escapes,
        ]
    )
    recipe = LatticeRecipe(
        spacing=lattices[0].spacing,
        run=config,
        step=lattices[0].step,
        base=reference is not None,
        inherited=inherited,
        relative_to=record.moment_ordinals,
        gains=gains,
        origin=gains and not continued,
        moved=moved,
        axes=() if inherited or moved else _leading_axes(infos, lattices),
    )
    stored = {"points": parts} | ({"origin": _encode_origins(record.quantized)} if recipe.origin else {})
    base = None if digests.base is None else digests.base.hexdigest()
    return EncodedRecord(record.name, infos, recipes.to_json(recipe), stored, digests.values.hexdigest(), base)


class _Digests(NamedTuple):
    """The digests of a record, which go on from member to member."""

    values: _native.Hasher  # of the members' values
    base: _native.Hasher | None  # of the parent's; None without parent


def exponents_of(lattices: Iterable[Lattice]) -> list[Tensor]:
    """Return the exponents of each lattice as the digest of a base covers them."""
    return [side for lattice in lattices for side in (lattice.rows, lattice.columns)]


def _encode_tokens(
    record: LatticeInput,
    index: int,
    contexts: Bytes,
    tokens: Bytes,
    digests: _Digests,
    threads: int,
    *,
    continued: bool,
) -> tuple[bytes, int]:
    """Fill in the contexts and tokens of one tensor; return its escapes and the largest context.

    Escapes are differences beyond a byte, int32.

    Values and those of the parent are decoded tile by tile, and go into the digests. Only those of 16 bits are decoded
    whole, since torch's own rounding decides.

    Raises:
        ValueError: a code is out of range, or the codes stand for other values than the tensor has. So a scheme's
            mistake never becomes a checkpoint that no reader accepts.
    """
    info, quantized, tensor = record.infos[index], record.quantized[index], record.tensors[index]
    moment = record.second_moments[index] if record.second_moments else None
    is_native = info.dtype == "F32"
    if not is_native:
        values = quantized.dequantize(
            torch_dtype(info.dtype), moment.dequantize(torch.float32) if isinstance(moment, LatticeTensor) else moment
        )
        if tensor is not None and not np.array_equal(tensor_bytes(values), tensor_bytes(tensor)):
            raise ValueError(_OTHER_VALUES)
        digests.values.update(values)
    parent, base = _parent_values(record, info, digests, continued=continued)
    squares: _native.LatticeValues | None = None
    if isinstance(moment, LatticeTensor):
        squares = moment.native_values()
    elif moment is not None:
        squares = moment.to(torch.float32)
    escapes, largest_context, in_range, same = _native.lattice_encode(
        *quantized.native_values(),
        contexts,
        tokens,
        parent=parent,
        squares=squares,
        expected=tensor if is_native else None,
        digest=digests.values if is_native else None,
        base=base,
        threads=threads,
    )
    if not in_range:
        raise ValueError(f"lattice tensor {info.name!r}: codes out of range")
    if not same:
        raise ValueError(_OTHER_VALUES)
    return escapes.tobytes(), largest_context


_OTHER_VALUES = "lattice tensors that stand for other values than the tensors have"


def _parent_values(
    record: LatticeInput, info: TensorInfo, digests: _Digests, *, continued: bool
) -> tuple[_native.LatticeValues | None, _native.Hasher | None]:
    """The parent's values of a tensor for the native core, and the digest that it shall continue with them."""
    if record.reference is None or digests.base is None:
        return None, None
    parent = record.reference.quantized.get(info.name)
    if continued and isinstance(parent, LatticeTensor):
        return parent.points().native_values(), digests.base
    source = lattice_source(record.reference.tensors, info.name)
    if source is not None and source.dtype == torch.float32 and not source.quantized.relative_to:
        return source.quantized.native_values(), digests.base
    values = record.reference.tensors[info.name]
    digests.base.update(values)
    return as_native_float(values), None


def _encode_exponents(lattices: Sequence[Lattice], parents: Sequence[Lattice]) -> tuple[bytes, bool]:
    """Encode the exponents of all rows and columns, entropy-coded: each as the difference to the one before it.

    Where that takes fewer bytes, each is the difference to the parent's exponent: most rows have not moved.

    Args:
        parents: the parent's lattices of the same members; empty: not all have one.

    Returns:
        The bytes, and True if they are differences to the parent's.
    """
    if not lattices:
        return b"", False
    exponents = all_exponents(lattices)
    differences = exponents.copy()
    differences[1:] -= exponents[:-1]
    alone = _encode_differences(differences)
    if not parents or not all(map(Lattice.is_like, lattices, parents)):
        return alone, False
    moved = _encode_differences(exponents - all_exponents(parents))
    return (moved, True) if len(moved) < len(alone) else (alone, False)


def _leading_axes(infos: Sequence[TensorInfo], lattices: Sequence[Lattice]) -> tuple[int, ...]:
    """Number of leading axes of each tensor that are the rows of its matrix; empty if it is one for all."""
    rows = [lattice.rows.numel() for lattice in lattices]
    axes = tuple(row_counts(info.shape).index(n) + 1 for info, n in zip(infos, rows, strict=True))
    return axes if any(n > 1 for n in axes) else ()


def _encode_origins(tensors: Sequence[LatticeTensor]) -> bytes:
    """Encode the codes of all origins: their differences to the codes of the tensors, entropy-coded."""
    pairs = [(tensor.first_codes, tensor.codes) for tensor in tensors]
    differences = [origin.to(torch.int32) - codes.to(torch.int32) for origin, codes in pairs]
    return _encode_differences(np.concatenate([difference.reshape(-1).numpy() for difference in differences]))


def _encode_differences(differences: NDArray[np.int32]) -> bytes:
    large = np.abs(differences) > -ESCAPE - 1
    escapes = differences[large].astype("<i4")
    differences[large] = ESCAPE
    tokens = differences.astype(np.int8).view(np.uint8)
    side = coded = np.empty(0, np.uint8)
    if tokens.size:
        side, coded = CoderConfig("codes").encode(BYTE_FORMAT, tokens, CodingContext(), 1)
    return b"".join([SIDE_SIZES.pack(side.nbytes, escapes.size), side.tobytes(), escapes.tobytes(), coded.tobytes()])


def _parent_lattices(infos: Sequence[TensorInfo], reference: Reference | None) -> list[Lattice]:
    """Return the parent's lattices of all members; [] if some are missing or do not fit the shapes."""
    quantized = {} if reference is None else reference.quantized
    tensors = [quantized.get(info.name) for info in infos]
    lattices = [tensor.lattice for tensor in tensors if isinstance(tensor, LatticeTensor)]
    if len(lattices) < len(infos):
        return []
    fit = all(lattice.has_counts_for(info.shape) for lattice, info in zip(lattices, infos, strict=True))
    return lattices if fit else []


def _check_input(record: LatticeInput) -> None:
    """Raise ValueError for what `_encode_tokens` does not check."""
    first = record.quantized[0].lattice
    if len({(member.lattice.spacing, member.lattice.step) for member in record.quantized}) != 1:
        raise ValueError("lattice tensors of several spacings or steps in one record")
    if (first.spacing == "relative") != bool(record.second_moments):
        raise ValueError('lattice tensors need second moments with spacing "relative" and no other')
    if len({member.origin is None for member in record.quantized}) != 1:
        raise ValueError("lattice tensors with and without an origin in one record")
    for info, member, tensor in zip(record.infos, record.quantized, record.tensors, strict=True):
        shapes = {tuple(member.codes.shape), info.shape if tensor is None else tuple(tensor.shape)}
        if shapes != {info.shape} or not member.lattice.has_counts_for(info.shape):
            raise ValueError(f"lattice tensor {info.name!r} of another shape than its values")
        if member.origin is not None and (member.origin.shape != member.codes.shape or first.spacing != "linear"):
            raise ValueError(f"lattice tensor {info.name!r} with an origin of another shape or spacing")
        if not MIN_GAIN <= member.gain <= MAX_GAIN or (member.origin is None and member.gain != 1):
            raise ValueError(f"lattice tensor {info.name!r}: a gain out of range, or without an origin")
        if not member.lattice.to_native(info.shape).has_normal_steps or (
            first.spacing == "log" and member.lattice.seed
        ):
            raise ValueError(f"lattice tensor {info.name!r}: scales or seed out of range")
