"""Encodes a record of lattice tensors to recipe and bytes, and decodes it. All arithmetic is exact.

A code is predicted by the code of the lattice point nearest to the parent's value, and the difference is entropy-coded.
Its context is how far the parent's value lies from that point. If the lattice has not changed, the parent's values lie
on points, and most differences are 0. If it has (new dither after a restore, other scales, a parent of another scheme),
values in the middle between two points predict poorly, values near a point well.

Tensors with gains, whose values do not lie on points, are predicted by the parent's points as long as their lattice
and their origin are the parent's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.coder import (
    BYTE_FORMAT,
    MAX_CHUNK,
    MIN_CHUNK_BYTES,
    NUMBER_FORMATS,
    Bytes,
    CodedChunks,
    CoderConfig,
    CodingContext,
    default_threads,
)
from shrinkpoint.codec.decoder import (
    ByteRange,
    DecodedPart,
    DecodeInputs,
    FetchParams,
    QuantizerParams,
    RecordDecoder,
    RecordView,
    TensorRange,
)
from shrinkpoint.codec.lattice import (
    MAX_GAIN,
    MAX_SCALE_EXPONENT,
    MIN_GAIN,
    Lattice,
    LatticeTensor,
    matrix_shape,
    scale_counts,
)
from shrinkpoint.codec.lattice_member import MemberDecoder, native_values
from shrinkpoint.codec.recipe import LatticeRecipe
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.dtypes import as_native_float, tensor_bytes, torch_dtype
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

PART_SIZES = struct.Struct("<IQII")
"""Bytes of the lattices, of the coded tokens and of their side data, and the number of escapes; they begin the part."""
_SIDE_SIZES = struct.Struct("<II")  # of the exponents: bytes of the side data, and the number of escapes
_BLOCK_VALUES = 1 << 19
"""Values that are decoded before the next ones are looked at."""
_ESCAPE = -128
"""The token of a difference that does not fit into a byte; the difference is the next of the escapes."""


@dataclass(frozen=True)
class LatticeInput:
    """The lattice tensors of one record, to be encoded.

    Attributes:
        name: name of the record.
        infos: its tensors (members).
        tensors: the values of each member as a reader gets them, to be compared; None: whatever its codes stand for.
        quantized: the quantized form of each member; all of one spacing and step, and all with an origin or none.
        reference: the parent, if it holds every member; None for a record without base.
        second_moments: with spacing "relative", the second moment of each member, float32, or its codes; else ().
        moment_ordinals: ordinals of those second moments in the file.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    tensors: tuple[Tensor | None, ...]
    quantized: tuple[LatticeTensor, ...]
    reference: Reference | None = None
    second_moments: tuple[Tensor | LatticeTensor, ...] = ()
    moment_ordinals: tuple[int, ...] = ()


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
    gains = record.quantized[0].origin is not None
    continued = reference is not None and all(
        tensor.has_origin_of(reference.quantized.get(info.name))
        for info, tensor in zip(infos, record.quantized, strict=True)
    )
    digests = _Digests(_native.Hasher(), None if reference is None else _native.Hasher())
    if digests.base is not None:
        for exponents in _exponents(parents if inherited else []):
            digests.base.update(exponents)
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
    gain_bytes = np.array([tensor.gain for tensor in record.quantized], "<f4").tobytes() if gains else b""
    lattice_bytes = _encode_seeds(lattices) + gain_bytes + (b"" if inherited else _encode_exponents(lattices))
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
    )
    stored = {"points": parts} | ({"origin": _encode_origins(record.quantized)} if recipe.origin else {})
    base = None if digests.base is None else digests.base.hexdigest()
    return EncodedRecord(record.name, infos, recipes.to_json(recipe), stored, digests.values.hexdigest(), base)


class _Digests(NamedTuple):
    """The digests of a record, which go on from member to member.

    Attributes:
        values: of the members' values.
        base: of the parent's; None without parent.
    """

    values: _native.Hasher
    base: _native.Hasher | None


def _exponents(lattices: Iterable[Lattice]) -> list[Bytes]:
    """Return the exponents of each lattice as the digest of a base covers them."""
    return [tensor_bytes(side) for lattice in lattices for side in (lattice.rows, lattice.columns)]


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
        values = quantized.dequantize(torch_dtype(info.dtype), _as_tensor(moment))
        if tensor is not None and not np.array_equal(tensor_bytes(values), tensor_bytes(tensor)):
            raise ValueError(_OTHER_VALUES)
        digests.values.update(tensor_bytes(values))
    parent, base = _parent_values(record, info, digests, continued=continued)
    escapes, largest_context, in_range, same = _native.lattice_encode(
        quantized.to_native(),
        tensor_bytes(quantized.codes),
        contexts,
        tokens,
        parent=parent,
        squares=_native_squares(moment),
        expected=tensor_bytes(tensor) if is_native and tensor is not None else None,
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
        return native_values(parent.points()), digests.base
    source = record.reference.lattice_source(info.name)
    if source is not None and source.dtype == torch.float32 and not source.quantized.relative_to:
        return native_values(source.quantized), digests.base
    values = record.reference.tensors[info.name]
    digests.base.update(tensor_bytes(values))
    return tensor_bytes(as_native_float(values)), None


def _native_squares(moment: Tensor | LatticeTensor | None) -> _native.LatticeValues | None:
    if moment is None or isinstance(moment, LatticeTensor):
        return None if moment is None else native_values(moment)
    return tensor_bytes(moment.to(torch.float32))


def _as_tensor(tensor: Tensor | LatticeTensor | None) -> Tensor | None:
    return tensor.dequantize(torch.float32) if isinstance(tensor, LatticeTensor) else tensor


def _encode_seeds(lattices: Sequence[Lattice]) -> bytes:
    return np.array([lattice.seed for lattice in lattices], "<u4").tobytes()


def _encode_exponents(lattices: Sequence[Lattice]) -> bytes:
    """Encode the exponents of all rows and columns: differences of consecutive ones, entropy-coded."""
    if not lattices:
        return b""
    exponents = np.concatenate([side.numpy() for lattice in lattices for side in (lattice.rows, lattice.columns)])
    differences = exponents.astype(np.int32)
    differences[1:] -= exponents[:-1]
    return _encode_differences(differences)


def _encode_origins(tensors: Sequence[LatticeTensor]) -> bytes:
    """Encode the codes of all origins: their differences to the codes of the tensors, entropy-coded."""
    pairs = [(tensor.first_codes, tensor.codes) for tensor in tensors]
    differences = [origin.to(torch.int32) - codes.to(torch.int32) for origin, codes in pairs]
    return _encode_differences(np.concatenate([difference.reshape(-1).numpy() for difference in differences]))


def _encode_differences(differences: NDArray[np.int32]) -> bytes:
    large = np.abs(differences) > -_ESCAPE - 1
    escapes = differences[large].astype("<i4")
    differences[large] = _ESCAPE
    tokens = differences.astype(np.int8).view(np.uint8)
    side = coded = np.empty(0, np.uint8)
    if tokens.size:
        side, coded = CoderConfig("codes").encode(BYTE_FORMAT, tokens, CodingContext(), 1)
    return b"".join([_SIDE_SIZES.pack(side.nbytes, escapes.size), side.tobytes(), escapes.tobytes(), coded.tobytes()])


def _decode_lattices(
    seeds: NDArray[np.uint32],
    data: Bytes,
    infos: Sequence[TensorInfo],
    recipe: LatticeRecipe,
    parents: Sequence[Lattice],
) -> list[Lattice]:
    """Decode the lattice of each member, or take the parent's exponents if the recipe says that they are inherited."""
    if seeds.size != len(infos):
        raise _native.Truncated("the lattices end too early")
    lattices = parents if recipe.inherited else _decode_exponents(data, infos, recipe, seeds.tolist())
    if len(lattices) != len(infos) or not all(map(_fits_shape, lattices, infos)):
        raise ValueError("a parent whose tensors are not on lattices of these shapes")
    if any(lattice.spacing != recipe.spacing or lattice.step != recipe.step for lattice in lattices):
        raise ValueError("the parent's lattices have another spacing or step")
    if recipe.inherited and data.nbytes:
        raise ValueError("bytes behind inherited lattices")
    if recipe.spacing == "log" and seeds.any():
        raise ValueError('dither with spacing "log", which has none')
    return [
        lattice if lattice.seed == seed else replace(lattice, seed=seed)
        for lattice, seed in zip(lattices, seeds.tolist(), strict=True)
    ]


def _decode_exponents(
    data: Bytes, infos: Sequence[TensorInfo], recipe: LatticeRecipe, seeds: Sequence[int]
) -> list[Lattice]:
    counts = [scale_counts(recipe.spacing, info.shape) for info in infos]
    differences = _decode_differences(data, sum(rows + columns for rows, columns in counts))
    exponents = np.cumsum(differences, dtype=np.int64)
    if bool((np.abs(exponents) > MAX_SCALE_EXPONENT).any()):
        raise ValueError("scales out of range")
    parts = np.split(exponents.astype(np.int16), np.cumsum([n for pair in counts for n in pair])[:-1])
    sides = [torch.from_numpy(part) for part in parts]
    lattices = [
        Lattice(recipe.spacing, rows, columns, recipe.step, seed)
        for rows, columns, seed in zip(sides[::2], sides[1::2], seeds, strict=True)
    ]
    if not all(map(_is_in_range, lattices, infos)):
        raise ValueError("scales out of range")
    return lattices


def _decode_differences(data: Bytes, total: int) -> NDArray[np.int32]:
    """Decode differences of exponents or of codes; whatever they are, in 32 bits."""
    nside, nescapes = _SIDE_SIZES.unpack(data[: _SIDE_SIZES.size].tobytes())
    ends = np.cumsum([_SIDE_SIZES.size, nside, 4 * nescapes])
    if ends[-1] + -(-total // MAX_CHUNK) * MIN_CHUNK_BYTES > data.nbytes:
        raise _native.Truncated("the lattices, or their origins, end too early")
    side, escapes, coded = np.split(data, ends)[1:]
    tokens = np.empty(total, np.uint8)
    if total:
        CoderConfig("codes").decode(BYTE_FORMAT, side, coded, tokens, CodingContext(), 1)
    return _resolve_escapes(tokens.view(np.int8), np.frombuffer(escapes.tobytes(), "<i4"))


def _is_in_range(lattice: Lattice, info: TensorInfo) -> bool:
    """Whether every scale is a normal float32."""
    return lattice.to_native(matrix_shape(info.shape)).has_normal_steps


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


def _resolve_escapes(tokens: NDArray[np.int8], escapes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the differences of tokens, with each escape token replaced by the next escape."""
    out = tokens.astype(np.int32)
    large = out == _ESCAPE
    if int(large.sum()) != escapes.size:
        raise ValueError("more or fewer escapes than tokens that stand for them")
    out[large] = escapes
    return out


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
        if shapes != {info.shape} or not _fits_shape(member.lattice, info):
            raise ValueError(f"lattice tensor {info.name!r} of another shape than its values")
        if member.origin is not None and (member.origin.shape != member.codes.shape or first.spacing != "linear"):
            raise ValueError(f"lattice tensor {info.name!r} with an origin of another shape or spacing")
        if not MIN_GAIN <= member.gain <= MAX_GAIN or (member.origin is None and member.gain != 1):
            raise ValueError(f"lattice tensor {info.name!r}: a gain out of range, or without an origin")
        if not _is_in_range(member.lattice, info) or (first.spacing == "log" and member.lattice.seed):
            raise ValueError(f"lattice tensor {info.name!r}: scales or seed out of range")


class LatticeDecoder(RecordDecoder):
    """Decodes lattice tensors; its unit is one value.

    Only the whole record can be decoded if it has escapes, since their number before a range depends on all codes
    before it; and if its dtypes differ.
    """

    def __init__(self, view: RecordView, recipe: LatticeRecipe) -> None:
        infos, size = view.infos, view.sizes["points"]
        if any(info.dtype not in ("F32", "BF16", "F16") for info in infos):
            raise ValueError("lattice tensors that are not floats of 16 or 32 bits")
        super().__init__(view, [info.numel for info in infos])
        sizes = PART_SIZES.unpack(view.read("points", 0, min(PART_SIZES.size, size)))
        lattice_bytes, coded, side, escapes = sizes
        self._lattices_end, begin, self._codes_end, end = [
            *accumulate((side, coded, 4 * escapes), initial=PART_SIZES.size + lattice_bytes)
        ]
        if end != size:
            raise _native.Truncated("the codes end too early, or too late")
        self._recipe, self.uses_parent, self._has_escapes = recipe, recipe.base, escapes > 0
        self.unit, self.chunk = NUMBER_FORMATS[infos[0].dtype].itemsize, recipe.run.chunk
        is_uniform = len({info.dtype for info in infos}) == 1 and self.count > 0
        self.splittable = is_uniform and not escapes and not recipe.gains
        side_data = view.read_array("points", self._lattices_end, begin)
        self._chunks = CodedChunks(recipe.run, side_data, begin, self._codes_end, self.count)
        self._moments = [view.tensor_at(ordinal) for ordinal in recipe.relative_to]
        layouts = [(moment.shape, moment.dtype) for moment in self._moments]
        if layouts and layouts != [(info.shape, "F32") for info in infos]:
            raise ValueError("second moments that do not fit their tensors")
        self._lattices: list[Lattice] = []
        self._gains: list[float | None] = [None] * len(infos)

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        out = self._parent_ranges(lo, hi) if self._recipe.base else []
        return out + self._moment_ranges(lo, hi)

    def required_parents(self) -> Sequence[str]:
        return [info.name for info in self._view.infos] if self._recipe.inherited else []

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        infos = self._view.infos
        data = self._view.read_array("points", PART_SIZES.size, self._lattices_end)
        seeds, data = np.frombuffer(data[: 4 * len(infos)].tobytes(), "<u4"), data[4 * len(infos) :]
        if self._recipe.gains:
            gains, data = np.frombuffer(data[: 4 * len(infos)].tobytes(), "<f4"), data[4 * len(infos) :]
            if gains.size != len(infos):
                raise _native.Truncated("the gains end too early")
            if not bool(((gains >= MIN_GAIN) & (gains <= MAX_GAIN)).all()):  # nor is nan in range
                raise ValueError("gains out of range")
            self._gains = gains.tolist()
        self._lattices = _decode_lattices(seeds, data, infos, self._recipe, self._parent_lattices(fetch))
        return {info.name: lattice for info, lattice in zip(infos, self._lattices, strict=True)}

    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        if not self._lattices:
            self.quantizer_params(inputs.fetch_params)
        ranges = [*self._tensor_ranges(lo, hi)]
        parents = self._parent_ranges(lo, hi) if self._recipe.base else []
        continued = self._continued_tensors(ranges, inputs)
        sources = zip_longest(ranges, parents, self._moment_ranges(lo, hi), continued)
        members = [
            MemberDecoder(self._lattices[span.member], span, parent, squares, inputs, tensor, self._gains[span.member])
            for span, parent, squares, tensor in sources
        ]
        digests, base_digests = inputs.value_digests, inputs.base_digests
        is_native = all(info.dtype == "F32" for info in self._view.infos)
        values = _native.Hasher() if digests is not None and is_native else None
        base = self._base_hasher(inputs) if base_digests is not None and self._recipe.base else None
        try:
            if base is None and not self._has_escapes:
                self._decode_tiles(lo, hi, members, values, inputs.threads)
            else:
                self._decode_blocks(lo, hi, members, values, base, inputs.threads)
        except (ValueError, _native.Corrupt, _native.Truncated):
            if base_digests is not None and base is not None:  # of another parent nothing else can be expected
                whole = self._base_hasher(inputs)
                for parent, tensor in zip_longest(parents, continued):
                    points = None if tensor is None else tensor.points().dequantize(torch.float32)
                    whole.update(inputs.fetch(parent) if points is None else tensor_bytes(points))
                base_digests.check_base_digest(whole.hexdigest())
            raise
        if base_digests is not None and base is not None:
            base_digests.check_base_digest(base.hexdigest())
        out = [member.part() for member in members]
        if digests is not None and values is not None:
            digests.check_values_digest(values.hexdigest())
        elif digests is not None:
            digests.check_values(part.values for part in out if part.values is not None)
        return out

    def _decode_tiles(
        self, lo: int, hi: int, members: Sequence[MemberDecoder], digest: _native.Hasher | None, threads: int
    ) -> None:
        """Decode codes in one native loop that makes guesses and contexts tile by tile, and then their values."""
        if lo < hi:
            config = self._chunks.config
            wide = _native.lattice_decode_codes(
                config.native_model(BYTE_FORMAT),
                self._chunks.side,
                self._view.read_array("points", *self._chunks.byte_range(lo, hi)),
                self.count,
                lo // config.chunk,
                [member.codes_part() for member in members],
                chunk=config.chunk,
                threads=threads,
            )
            differences = self._origin_differences(members)
            for member, codes, to_origin in zip(members, wide, differences, strict=True):
                member.decode_values(codes, to_origin, digest, threads)

    def _decode_blocks(
        self,
        lo: int,
        hi: int,
        members: Sequence[MemberDecoder],
        values: _native.Hasher | None,
        base: _native.Hasher | None,
        threads: int,
    ) -> None:
        """Decode a few chunks at a time, so that what is between bytes and codes stays in the processor's cache."""
        block = self.chunk * max(2 * threads, -(-_BLOCK_VALUES // self.chunk))
        size = min(block, hi - lo)
        contexts, tokens, guesses = _native.empty(size), _native.empty(size), _native.empty(2 * size)
        escapes = self._view.read_array("points", self._codes_end).copy()
        ends = [*accumulate((member.count for member in members), initial=lo)]
        for begin in range(lo, hi, block):
            end = min(begin + block, hi)
            spans = [
                (member, slice(max(first, begin) - begin, min(last, end) - begin), max(begin - first, 0))
                for member, (first, last) in zip(members, pairwise(ends), strict=True)
                if first < end and last > begin
            ]
            for member, span, start in spans:
                codes = guesses[2 * span.start : 2 * span.stop]
                member.predict(start, codes, contexts[span], base, threads)
            coded = self._view.read_array("points", *self._chunks.byte_range(begin, end))
            context = CodingContext(base=contexts[: end - begin])
            self._chunks.decode(BYTE_FORMAT, coded, tokens[: end - begin], context, begin, threads)
            for member, span, start in spans:
                codes = guesses[2 * span.start : 2 * span.stop]
                used = member.decode(start, codes, tokens[span], contexts[span], escapes, values, threads)
                escapes = escapes[4 * used :]
        if escapes.size:
            raise ValueError("more escapes than tokens that stand for them")
        if self._recipe.gains:
            for member, to_origin in zip(members, self._origin_differences(members), strict=True):
                member.decode_values(None, to_origin, values, threads)

    def _continued_tensors(self, ranges: Sequence[TensorRange], inputs: DecodeInputs) -> Sequence[LatticeTensor | None]:
        """The parent's tensors whose points predict those of the record, if it has gains and no origins of its own.

        Raises:
            ValueError: the parent's tensors are on other lattices.
        """
        if not self._recipe.gains or self._recipe.origin:
            return [None] * len(ranges)
        tensors = [inputs.fetch_lattice_tensor(span.info.name) for span in ranges]
        for span, tensor in zip(ranges, tensors, strict=True):
            if tensor is None or tensor.lattice != self._lattices[span.member]:
                raise ValueError(f"gains of {span.info.name!r}, whose parent is not on the same lattice")
        return tensors

    def _origin_differences(self, members: Sequence[MemberDecoder]) -> Sequence[NDArray[np.int32] | None]:
        """The differences of stored origins to the codes of all members; None where there are none."""
        if not self._recipe.origin:
            return [None] * len(members)
        differences = _decode_differences(self._view.read_array("origin"), self.count)
        return np.split(differences, [*accumulate(member.count for member in members)][:-1])

    def _base_hasher(self, inputs: DecodeInputs) -> _native.Hasher:
        """The digest of the base as far as it covers the parent's exponents."""
        hasher = _native.Hasher()
        for exponents in _exponents(self._parent_lattices(inputs.fetch_params)):
            hasher.update(exponents)
        return hasher

    def _moment_ranges(self, lo: int, hi: int) -> list[ByteRange]:
        return self._ranges_of(self._moments, lo, hi) if self._moments else []

    def _parent_lattices(self, fetch: FetchParams) -> list[Lattice]:
        params = [fetch(name) for name in self.required_parents()]
        return [param for param in params if isinstance(param, Lattice)]
