"""Encodes a record of lattice tensors to recipe and bytes, and decodes it. All arithmetic is exact.

A code is predicted by the code of the lattice point nearest to the parent's value, and the difference is entropy-coded.
Its context is how far the parent's value lies from that point. If the lattice has not changed, the parent's values lie
on points, and most differences are 0. If it has (new dither after a restore, other scales, a parent of another scheme),
values in the middle between two points predict poorly, values near a point well.
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
from shrinkpoint.codec.coded_record import Chunks
from shrinkpoint.codec.coder import (
    BYTE_FORMAT,
    MAX_CHUNK,
    MIN_CHUNK_BYTES,
    NUMBER_FORMATS,
    Bytes,
    CoderConfig,
    CodingContext,
    default_threads,
)
from shrinkpoint.codec.decoder import (
    ByteRange,
    DecodedRange,
    FetchParams,
    FetchRange,
    QuantizerParams,
    RecordView,
    as_aligned,
    base_ranges,
    cast,
    concat,
)
from shrinkpoint.codec.lattice import MAX_SCALE_EXPONENT, Lattice, LatticeTensor, matrix_shape, scale_counts
from shrinkpoint.codec.pack import digest_arrays, num_numbers
from shrinkpoint.codec.recipe import LatticeRecipe
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.dtypes import tensor_bytes, torch_dtype
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

PART_SIZES = struct.Struct("<IQII")
"""Bytes of the lattices, of the coded tokens and of their side data, and the number of escapes; they begin the part."""
_SIDE_SIZES = struct.Struct("<II")  # of the exponents: bytes of the side data, and the number of escapes
_ESCAPE = -128
"""The token of a difference that does not fit into a byte; the difference is the next of the escapes."""


@dataclass(frozen=True)
class LatticeInput:
    """The lattice tensors of one record, to be encoded.

    Attributes:
        name: name of the record.
        infos: its tensors (members).
        tensors: the values of each member as a reader gets them.
        quantized: the quantized form of each member; all of one spacing and step.
        reference: the parent, if it holds every member; None for a record without base.
        second_moments: with spacing "relative", the second moment of each member; else ().
        moment_ordinals: ordinals of those second moments in the file.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    tensors: tuple[Tensor, ...]
    quantized: tuple[LatticeTensor, ...]
    reference: Reference | None = None
    second_moments: tuple[Tensor, ...] = ()
    moment_ordinals: tuple[int, ...] = ()


def encode_lattice_record(record: LatticeInput, *, threads: int | None = None) -> EncodedRecord:
    """Encode a record.

    Raises:
        ValueError: the quantized tensors are malformed, or do not decode to the given values.
    """
    infos, reference, workers = record.infos, record.reference, default_threads(threads)
    lattices = [tensor.lattice for tensor in record.quantized]
    digest = digest_arrays(map(tensor_bytes, record.tensors))
    _check_input(record)
    count = sum(info.numel for info in infos)
    contexts, tokens = _native.empty(count), _native.empty(count)
    members = _native_members(infos, lattices, reference, record.second_moments)
    escapes = b"".join(
        _encode_tokens(record, index, member, contexts, tokens, workers) for index, member in enumerate(members)
    )
    config = CoderConfig("codes", predictor="base", top=int(contexts.max(initial=0)))
    side = coded = np.empty(0, np.uint8)
    if count:
        side, coded = config.encode(BYTE_FORMAT, tokens, CodingContext(base=contexts), workers)
    inherited = reference is not None and _equal_but_seeds(_parent_lattices(infos, reference), lattices)
    lattice_bytes = _encode_seeds(lattices) + (b"" if inherited else _encode_exponents(lattices))
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
    """Decode a record to tensors and lattice tensors by name, and check their digest.

    Args:
        reference: the parent, already verified, if the recipe uses it.
        second_moments: (name, second moment) of each member, if the recipe uses them.

    Raises:
        ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged.
    """
    infos = encoded.infos
    count = sum(info.numel for info in infos)
    lattice_bytes, side, coded, escapes = _split_parts(encoded.parts["points"])
    if coded.nbytes < -(-count // recipe.run.chunk) * MIN_CHUNK_BYTES:  # before memory is allocated
        raise _native.Truncated("the codes are too short for the tensors' shapes")
    lattices = decode_lattices(lattice_bytes, infos, recipe, reference)
    members = _native_members(
        infos, lattices, reference if recipe.base else None, [tensor for _, tensor in second_moments]
    )
    contexts, tokens = _native.empty(count), _native.empty(count)
    codes = [_predict_codes(member, contexts, threads) for member in members]
    if count:
        recipe.run.decode(BYTE_FORMAT, side, coded, tokens, CodingContext(base=contexts), threads)
    remaining = escapes.copy()
    tensors, quantized = {}, {}
    names = [name for name, _ in second_moments] or [""] * len(infos)
    for i, (info, moment_name) in enumerate(zip(infos, names, strict=True)):
        values, num_escapes = _decode_values(members[i], tokens, contexts, remaining, codes[i], threads)
        remaining = remaining[4 * num_escapes :]
        shaped = torch.from_numpy(codes[i].view(np.int16)).reshape(info.shape)
        quantized[info.name] = LatticeTensor(shaped, lattices[i], moment_name)
        tensors[info.name] = torch.from_numpy(values.view(np.float32)).reshape(info.shape).to(torch_dtype(info.dtype))
    if remaining.size:
        raise ValueError("more escapes than tokens that stand for them")
    digest = digest_arrays(map(tensor_bytes, tensors.values()))
    if digest != encoded.digest:
        raise ValueError(f"decoded values with digest {digest}, expected {encoded.digest}")
    return tensors, quantized


def lattice_base_digest(infos: Sequence[TensorInfo], recipe: LatticeRecipe, reference: Reference) -> str:
    """Return the digest that a record stores of its base: of inherited exponents, if any, and the parent's values."""
    inherited = _parent_lattices(infos, reference) if recipe.inherited else []
    exponents = [side for lattice in inherited for side in (lattice.rows, lattice.columns)]
    return digest_arrays(map(tensor_bytes, [*exponents, *(reference.tensors[info.name] for info in infos)]))


@dataclass(frozen=True)
class _LatticeMember:
    """The arguments of the native core for one tensor of a record.

    Attributes:
        lattice: its lattice.
        parent: the parent's values, float32 or bfloat16, as uint8; or None.
        squares: the second moments whose roots multiply the scales, float32, as uint8; or None.
        span: the range of its values among those of the record.
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
    moments: Sequence[Tensor | None] = second_moments or [None] * len(infos)
    members, start = [], 0
    for info, lattice, moment in zip(infos, lattices, moments, strict=True):
        parent = None if reference is None else tensor_bytes(_to_native_dtype(reference.tensors[info.name]))
        squares = None if moment is None else tensor_bytes(moment.to(torch.float32))
        span = slice(start, start + info.numel)
        members.append(_LatticeMember(lattice.to_native(matrix_shape(info.shape)), parent, squares, span))
        start = span.stop
    return members


def _to_native_dtype(tensor: Tensor) -> Tensor:
    """Cast to float32 unless the native core reads the dtype."""
    return tensor if tensor.dtype in (torch.float32, torch.bfloat16) else tensor.to(torch.float32)


def _encode_tokens(
    record: LatticeInput, index: int, member: _LatticeMember, contexts: Bytes, tokens: Bytes, threads: int
) -> bytes:
    """Fill in the contexts and tokens of one tensor, and return its escapes: int32, the differences beyond a byte.

    Raises:
        ValueError: a code is out of range, or the codes stand for other values than the tensor has. So a scheme's
            mistake never becomes a checkpoint that no reader accepts.
    """
    info, quantized, tensor = record.infos[index], record.quantized[index], record.tensors[index]
    expected = tensor_bytes(tensor) if tensor.dtype in (torch.float32, torch.bfloat16) else None
    escapes, in_range, same = _native.lattice_encode(
        member.lattice,
        tensor_bytes(quantized.codes),
        contexts[member.span],
        tokens[member.span],
        parent=member.parent,
        squares=member.squares,
        expected=expected,
        threads=threads,
    )
    if not in_range:
        raise ValueError(f"lattice tensor {info.name!r}: codes out of range")
    if expected is None or not same:  # for 16-bit dtypes, torch's own rounding decides
        moment = record.second_moments[index] if record.second_moments else None
        if not np.array_equal(tensor_bytes(quantized.dequantize(tensor.dtype, moment)), tensor_bytes(tensor)):
            raise ValueError("lattice tensors that stand for other values than the tensors have")
    return escapes.tobytes()


def _predict_codes(member: _LatticeMember, contexts: Bytes, threads: int) -> Bytes:
    """Return the predicted codes of one tensor, int16 as uint8, and fill in their contexts."""
    codes = _native.empty(2 * (member.span.stop - member.span.start))
    _native.lattice_predict(
        member.lattice,
        codes,
        contexts[member.span],
        parent=member.parent,
        squares=member.squares,
        threads=threads,
    )
    return codes


def _decode_values(
    member: _LatticeMember, tokens: Bytes, contexts: Bytes, escapes: Bytes, codes: Bytes, threads: int
) -> tuple[Bytes, int]:
    """Return a tensor's values, float32 as uint8, and how many escapes it used; predicted codes become codes."""
    span = member.span
    values = _native.empty(2 * codes.nbytes)
    num_escapes = _native.lattice_decode(
        member.lattice, tokens[span], contexts[span], escapes, codes, values, squares=member.squares, threads=threads
    )
    return values, num_escapes


def _encode_seeds(lattices: Sequence[Lattice]) -> bytes:
    return np.array([lattice.seed for lattice in lattices], "<u4").tobytes()


def _encode_exponents(lattices: Sequence[Lattice]) -> bytes:
    """Encode the exponents of all rows and columns: differences of consecutive ones, entropy-coded."""
    if not lattices:
        return b""
    exponents = np.concatenate([side.numpy() for lattice in lattices for side in (lattice.rows, lattice.columns)])
    differences = np.diff(exponents.astype(np.int32), prepend=0)
    large = np.abs(differences) > -_ESCAPE - 1
    escapes = differences[large].astype("<i4")
    differences[large] = _ESCAPE
    tokens = differences.astype(np.int8).view(np.uint8)
    side, coded = CoderConfig("codes").encode(BYTE_FORMAT, tokens, CodingContext(), 1)
    return b"".join([_SIDE_SIZES.pack(side.nbytes, escapes.size), side.tobytes(), escapes.tobytes(), coded.tobytes()])


def decode_lattices(
    data: Bytes, infos: Sequence[TensorInfo], recipe: LatticeRecipe, reference: Reference | None
) -> list[Lattice]:
    """Decode the lattice of each member, or take the parent's exponents if the recipe says that they are inherited.

    Raises:
        ValueError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged.
    """
    seeds, data = np.frombuffer(data[: 4 * len(infos)].tobytes(), "<u4"), data[4 * len(infos) :]
    if seeds.size != len(infos):
        raise _native.Truncated("the lattices end too early")
    lattices = _parent_lattices(infos, reference) if recipe.inherited else _decode_exponents(data, infos, recipe)
    if any(lattice.spacing != recipe.spacing or lattice.step != recipe.step for lattice in lattices):
        raise ValueError("the parent's lattices have another spacing or step")
    if recipe.inherited and data.nbytes:
        raise ValueError("bytes behind inherited lattices")
    if recipe.spacing == "log" and seeds.any():
        raise ValueError('dither with spacing "log", which has none')
    return [replace(lattice, seed=int(seed)) for lattice, seed in zip(lattices, seeds, strict=True)]


def _decode_exponents(data: Bytes, infos: Sequence[TensorInfo], recipe: LatticeRecipe) -> list[Lattice]:
    counts = [scale_counts(recipe.spacing, info.shape) for info in infos]
    total = sum(rows + columns for rows, columns in counts)
    nside, nescapes = _SIDE_SIZES.unpack(data[: _SIDE_SIZES.size].tobytes())
    ends = np.cumsum([_SIDE_SIZES.size, nside, 4 * nescapes])
    if ends[-1] + -(-total // MAX_CHUNK) * MIN_CHUNK_BYTES > data.nbytes:
        raise _native.Truncated("the lattices end too early")
    side, escapes, coded = np.split(data, ends)[1:]
    tokens = np.empty(total, np.uint8)
    CoderConfig("codes").decode(BYTE_FORMAT, side, coded, tokens, CodingContext(), 1)
    differences = _resolve_escapes(tokens.view(np.int8), np.frombuffer(escapes.tobytes(), "<i4"))
    exponents = np.cumsum(differences, dtype=np.int64)
    if bool((np.abs(exponents) > MAX_SCALE_EXPONENT).any()):
        raise ValueError("scales out of range")
    parts = np.split(exponents.astype(np.int16), np.cumsum([n for pair in counts for n in pair])[:-1])
    sides = [torch.from_numpy(part) for part in parts]
    lattices = [
        Lattice(recipe.spacing, rows, columns, recipe.step)
        for rows, columns in zip(sides[::2], sides[1::2], strict=True)
    ]
    if not all(map(_is_in_range, lattices)):
        raise ValueError("scales out of range")
    return lattices


def _is_in_range(lattice: Lattice) -> bool:
    """Whether every scale is a normal float32."""
    ranges = [(int(side.min()), int(side.max())) for side in (lattice.rows, lattice.columns) if side.numel()]
    low, high = (sum(limits[i] for limits in ranges) for i in range(2))
    return low >= -MAX_SCALE_EXPONENT and high <= MAX_SCALE_EXPONENT


def _parent_lattices(infos: Sequence[TensorInfo], reference: Reference | None) -> list[Lattice]:
    """Return the parent's lattices of all members; [] if some are missing or do not fit the shapes."""
    quantized = {} if reference is None else reference.quantized
    tensors = [quantized.get(info.name) for info in infos]
    lattices = [tensor.lattice for tensor in tensors if isinstance(tensor, LatticeTensor)]
    if len(lattices) < len(infos):
        return []
    return lattices if all(map(_fits_shape, lattices, infos)) else []


def _fits_shape(lattice: Lattice, info: TensorInfo) -> bool:
    return (lattice.rows.numel(), lattice.columns.numel()) == scale_counts(lattice.spacing, info.shape)


def _equal_but_seeds(lattices: Sequence[Lattice], expected: Sequence[Lattice]) -> bool:
    """Whether two lists of lattices are equal except for the seeds."""
    return [replace(lattice, seed=0) for lattice in lattices] == [replace(lattice, seed=0) for lattice in expected]


def _resolve_escapes(tokens: NDArray[np.int8], escapes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the differences of tokens, with each escape token replaced by the next escape."""
    out = tokens.astype(np.int32)
    large = out == _ESCAPE
    if int(large.sum()) != escapes.size:
        raise ValueError("more or fewer escapes than tokens that stand for them")
    out[large] = escapes
    return out


def _split_parts(stored: memoryview | bytes | bytearray) -> list[Bytes]:
    """Split a part into the lattices, the side data, the coded tokens and the escapes."""
    data = np.frombuffer(stored, np.uint8)
    lattices, coded, side, escapes = PART_SIZES.unpack(data[: PART_SIZES.size].tobytes())
    sizes = (lattices, side, coded, 4 * escapes)
    if sum(sizes) != data.nbytes - PART_SIZES.size:
        raise _native.Truncated("the codes end too early, or too late")
    return np.split(data, np.cumsum([PART_SIZES.size, *sizes]))[1:-1]


def _check_input(record: LatticeInput) -> None:
    """Raise ValueError for what `_encode_tokens` does not check."""
    first = record.quantized[0].lattice
    if len({(member.lattice.spacing, member.lattice.step) for member in record.quantized}) != 1:
        raise ValueError("lattice tensors of several spacings or steps in one record")
    if (first.spacing == "relative") != bool(record.second_moments):
        raise ValueError('lattice tensors need second moments with spacing "relative" and no other')
    for info, member, tensor in zip(record.infos, record.quantized, record.tensors, strict=True):
        shapes = {tuple(member.codes.shape), tuple(tensor.shape)}
        if shapes != {info.shape} or not _fits_shape(member.lattice, info):
            raise ValueError(f"lattice tensor {info.name!r} of another shape than its values")
        if not _is_in_range(member.lattice) or (first.spacing == "log" and member.lattice.seed):
            raise ValueError(f"lattice tensor {info.name!r}: scales or seed out of range")


_NO_ESCAPES = np.empty(0, np.uint8)


def lattice_decoder(view: RecordView, recipe: LatticeRecipe) -> LatticeDecoder | None:
    """Return the decoder of a record; None if it can only be decoded whole.

    That is so if it has escapes, since their number before a range depends on all codes before it.

    Raises:
        ValueError, struct.error, _native.Truncated: the bytes are damaged.
    """
    lattice_bytes, codes, side, escapes = PART_SIZES.unpack(
        view.read("points", 0, min(PART_SIZES.size, view.sizes["points"]))
    )
    if PART_SIZES.size + lattice_bytes + codes + side + 4 * escapes != view.sizes["points"]:
        raise _native.Truncated("the codes end too early, or too late")
    if any(info.dtype not in ("F32", "BF16", "F16") for info in view.infos):
        raise ValueError("lattice tensors that are not floats of 16 or 32 bits")
    if escapes or len({info.dtype for info in view.infos}) > 1 or not any(info.numel for info in view.infos):
        return None
    return LatticeDecoder(view, recipe, lattice_bytes, side)


class LatticeDecoder:
    """A `PartialDecoder` of lattice tensors whose unit is one value."""

    merge_gap, cacheable = 0, True

    def __init__(self, view: RecordView, recipe: LatticeRecipe, lattice_bytes: int, side: int) -> None:
        infos = view.infos
        self._view, self._recipe, self.chunk = view, recipe, recipe.run.chunk
        self.unit = NUMBER_FORMATS[infos[0].dtype].itemsize
        self.count = sum(num_numbers(info) for info in infos)
        self._lattices_end = PART_SIZES.size + lattice_bytes
        begin = self._lattices_end + side
        side_data = view.read_array("points", self._lattices_end, begin)
        self._chunks = Chunks.from_part(recipe.run, side_data, begin, view.sizes["points"], self.count)
        self._moment_infos = [view.tensor_at(ordinal) for ordinal in recipe.relative_to]
        layouts = [(moment.shape, moment.dtype) for moment in self._moment_infos]
        if layouts and layouts != [(info.shape, "F32") for info in infos]:
            raise ValueError("second moments that do not fit their tensors")
        self._lattices: list[Lattice] = []

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        start, stop = lo * self.unit, hi * self.unit
        out = base_ranges(self._view, start, stop) if self._recipe.base else []
        if self._moment_infos:
            out += [self._moment_range(*member) for member in self._view.members_of_range(start, stop)]
        return out

    def required_parents(self) -> Sequence[str]:
        return [info.name for info in self._view.infos] if self._recipe.inherited else []

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        infos = self._view.infos
        params = {name: fetch(name) for name in self.required_parents()}
        no_codes = torch.empty(0, dtype=torch.int16)
        parents = {name: LatticeTensor(no_codes, param) for name, param in params.items() if isinstance(param, Lattice)}
        lattice_bytes = self._view.read_array("points", PART_SIZES.size, self._lattices_end)
        self._lattices = decode_lattices(lattice_bytes, infos, self._recipe, Reference({}, parents))
        if len(self._lattices) != len(infos):
            raise ValueError("a parent whose tensors are not on lattices")
        return {info.name: lattice for info, lattice in zip(infos, self._lattices, strict=True)}

    def decode(self, lo: int, hi: int, fetch: FetchRange, threads: int) -> DecodedRange:
        start, stop = lo * self.unit, hi * self.unit
        members = [_RangeDecoder(self, *member, fetch) for member in self._view.members_of_range(start, stop)]
        contexts, tokens = _native.empty(hi - lo), _native.empty(hi - lo)
        spans, position = [], 0
        for member in members:
            spans.append(slice(position, position + member.count))
            member.predict(contexts[spans[-1]], threads)
            position += member.count
        codes = self._view.read_array("points", *self._chunks.byte_range(lo, hi))
        self._chunks.decode(BYTE_FORMAT, codes, tokens, CodingContext(base=contexts), lo, threads)
        values = [
            member.values(tokens[span], contexts[span], threads) for member, span in zip(members, spans, strict=True)
        ]
        return DecodedRange(concat(values))

    def _moment_range(self, index: int, info: TensorInfo, begin: int, end: int) -> ByteRange:
        return ByteRange(True, self._moment_infos[index].name, begin // self.unit * 4, end // self.unit * 4)


class _RangeDecoder:
    """Decodes the values [first, first + count) of one tensor of a record."""

    def __init__(
        self, decoder: LatticeDecoder, index: int, info: TensorInfo, begin: int, end: int, fetch: FetchRange
    ) -> None:
        self._dtype = info.dtype
        self._lattice = decoder._lattices[index].to_native(matrix_shape(info.shape))
        self._first, self.count = begin // decoder.unit, (end - begin) // decoder.unit
        self._parent = self._squares = None
        if decoder._recipe.base:
            parent = fetch(ByteRange(False, info.name, begin, end))
            self._parent = as_aligned(cast(parent, info.dtype, "F32") if info.dtype == "F16" else parent)
        if decoder._moment_infos:
            self._squares = as_aligned(fetch(decoder._moment_range(index, info, begin, end)))
        self._codes = _native.empty(2 * self.count)

    def predict(self, contexts: Bytes, threads: int) -> None:
        """Predict the codes and fill in their contexts."""
        _native.lattice_predict(
            self._lattice,
            self._codes,
            contexts,
            parent=self._parent,
            squares=self._squares,
            first=self._first,
            threads=threads,
        )

    def values(self, tokens: Bytes, contexts: Bytes, threads: int) -> Bytes:
        """Return the values of the range in the tensor's dtype, as uint8."""
        values = _native.empty(4 * self.count)
        _native.lattice_decode(
            self._lattice,
            tokens,
            contexts,
            _NO_ESCAPES,
            self._codes,
            values,
            squares=self._squares,
            first=self._first,
            threads=threads,
        )
        return cast(values, "F32", self._dtype)
