"""Encodes a record of lattice tensors to recipe and bytes, and decodes it. All arithmetic is exact.

A code is predicted by the code of the lattice point nearest to the parent's value, and the difference is entropy-coded.
Its context is how far the parent's value lies from that point. If the lattice has not changed, the parent's values lie
on points, and most differences are 0. If it has (new dither after a restore, other scales, a parent of another scheme),
values in the middle between two points predict poorly, values near a point well.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, zip_longest

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
    as_aligned,
    cast,
)
from shrinkpoint.codec.lattice import MAX_SCALE_EXPONENT, Lattice, LatticeTensor, matrix_shape, scale_counts
from shrinkpoint.codec.pack import digest_arrays
from shrinkpoint.codec.recipe import LatticeRecipe
from shrinkpoint.codec.reference import Reference
from shrinkpoint.tensors.dtypes import tensor_bytes
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
    ends = [*accumulate((info.numel for info in infos), initial=0)]
    contexts, tokens = _native.empty(ends[-1]), _native.empty(ends[-1])
    escapes = b"".join(
        _encode_tokens(record, index, contexts[begin:end], tokens[begin:end], workers)
        for index, (begin, end) in enumerate(pairwise(ends))
    )
    config = CoderConfig("codes", predictor="base", top=int(contexts.max(initial=0)))
    side = coded = np.empty(0, np.uint8)
    if tokens.size:
        side, coded = config.encode(BYTE_FORMAT, tokens, CodingContext(base=contexts), workers)
    parents = _parent_lattices(infos, reference)
    inherited = _without_seeds(parents) == _without_seeds(lattices)
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
    base = None
    if reference is not None:
        values = (tensor_bytes(reference.tensors[info.name]) for info in infos)
        base = digest_arrays([*_exponents(parents if inherited else []), *values])
    return EncodedRecord(record.name, infos, recipes.to_json(recipe), {"points": parts}, digest, base)


def _exponents(lattices: Iterable[Lattice]) -> list[Bytes]:
    """Return the exponents of each lattice as the digest of a base covers them."""
    return [tensor_bytes(side) for lattice in lattices for side in (lattice.rows, lattice.columns)]


def _to_native_dtype(tensor: Tensor) -> Tensor:
    """Cast to float32 unless the native core reads the dtype."""
    return tensor if tensor.dtype in (torch.float32, torch.bfloat16) else tensor.to(torch.float32)


def _encode_tokens(record: LatticeInput, index: int, contexts: Bytes, tokens: Bytes, threads: int) -> bytes:
    """Fill in the contexts and tokens of one tensor, and return its escapes: int32, the differences beyond a byte.

    Raises:
        ValueError: a code is out of range, or the codes stand for other values than the tensor has. So a scheme's
            mistake never becomes a checkpoint that no reader accepts.
    """
    info, quantized, tensor = record.infos[index], record.quantized[index], record.tensors[index]
    moment = record.second_moments[index] if record.second_moments else None
    parent = None if record.reference is None else _to_native_dtype(record.reference.tensors[info.name])
    expected = tensor_bytes(tensor) if tensor.dtype in (torch.float32, torch.bfloat16) else None
    escapes, in_range, same = _native.lattice_encode(
        quantized.lattice.to_native(matrix_shape(info.shape)),
        tensor_bytes(quantized.codes),
        contexts,
        tokens,
        parent=None if parent is None else tensor_bytes(parent),
        squares=None if moment is None else tensor_bytes(moment.to(torch.float32)),
        expected=expected,
        threads=threads,
    )
    if not in_range:
        raise ValueError(f"lattice tensor {info.name!r}: codes out of range")
    if expected is None or not same:  # for 16-bit dtypes, torch's own rounding decides
        same = np.array_equal(tensor_bytes(quantized.dequantize(tensor.dtype, moment)), tensor_bytes(tensor))
    if not same:
        raise ValueError("lattice tensors that stand for other values than the tensors have")
    return escapes.tobytes()


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


def _decode_lattices(
    data: Bytes, infos: Sequence[TensorInfo], recipe: LatticeRecipe, parents: Sequence[Lattice]
) -> list[Lattice]:
    """Decode the lattice of each member, or take the parent's exponents if the recipe says that they are inherited."""
    seeds, data = np.frombuffer(data[: 4 * len(infos)].tobytes(), "<u4"), data[4 * len(infos) :]
    if seeds.size != len(infos):
        raise _native.Truncated("the lattices end too early")
    lattices = parents if recipe.inherited else _decode_exponents(data, infos, recipe)
    if len(lattices) != len(infos) or not all(map(_fits_shape, lattices, infos)):
        raise ValueError("a parent whose tensors are not on lattices of these shapes")
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


def _without_seeds(lattices: Sequence[Lattice]) -> list[Lattice]:
    return [replace(lattice, seed=0) for lattice in lattices]


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
    for info, member, tensor in zip(record.infos, record.quantized, record.tensors, strict=True):
        shapes = {tuple(member.codes.shape), tuple(tensor.shape)}
        if shapes != {info.shape} or not _fits_shape(member.lattice, info):
            raise ValueError(f"lattice tensor {info.name!r} of another shape than its values")
        if not _is_in_range(member.lattice) or (first.spacing == "log" and member.lattice.seed):
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
        self._recipe, self.uses_parent = recipe, recipe.base
        self.unit, self.chunk = NUMBER_FORMATS[infos[0].dtype].itemsize, recipe.run.chunk
        self.splittable = not escapes and len({info.dtype for info in infos}) == 1 and self.count > 0
        side_data = view.read_array("points", self._lattices_end, begin)
        self._chunks = CodedChunks(recipe.run, side_data, begin, self._codes_end, self.count)
        self._moments = [view.tensor_at(ordinal) for ordinal in recipe.relative_to]
        layouts = [(moment.shape, moment.dtype) for moment in self._moments]
        if layouts and layouts != [(info.shape, "F32") for info in infos]:
            raise ValueError("second moments that do not fit their tensors")
        self._lattices: list[Lattice] = []

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        out = self._parent_ranges(lo, hi) if self._recipe.base else []
        return out + self._moment_ranges(lo, hi)

    def required_parents(self) -> Sequence[str]:
        return [info.name for info in self._view.infos] if self._recipe.inherited else []

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        infos = self._view.infos
        data = self._view.read_array("points", PART_SIZES.size, self._lattices_end)
        self._lattices = _decode_lattices(data, infos, self._recipe, self._parent_lattices(fetch))
        return {info.name: lattice for info, lattice in zip(infos, self._lattices, strict=True)}

    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        parents = [inputs.fetch(span) for span in self._parent_ranges(lo, hi)] if self._recipe.base else []
        if inputs.digests is not None and self._recipe.base:
            inputs.digests.check_base([*_exponents(self._parent_lattices(inputs.fetch_params)), *parents])
        if not self._lattices:
            self.quantizer_params(inputs.fetch_params)
        squares = [inputs.fetch(span) for span in self._moment_ranges(lo, hi)]
        ranges = [*self._tensor_ranges(lo, hi)]
        members = [
            _NativeRange(self._lattices[span.member], span, parent, square, inputs.threads)
            for span, parent, square in zip_longest(ranges, parents, squares)
        ]
        contexts, tokens = _native.empty(hi - lo), _native.empty(hi - lo)
        ends = accumulate((span.end - span.begin for span in ranges), initial=0)
        spans = [slice(begin, end) for begin, end in pairwise(ends)]
        for member, span in zip(members, spans, strict=True):
            member.predict(contexts[span])
        if hi > lo:
            coded = self._view.read_array("points", *self._chunks.byte_range(lo, hi))
            self._chunks.decode(BYTE_FORMAT, coded, tokens, CodingContext(base=contexts), lo, inputs.threads)
        escapes, out = self._view.read_array("points", self._codes_end).copy(), []
        for (index, *_), member, span in zip(ranges, members, spans, strict=True):
            values, num_escapes = member.decode(tokens[span], contexts[span], escapes)
            escapes = escapes[4 * num_escapes :]
            name = self._moments[index].name if self._moments else ""
            out.append(DecodedPart(values, LatticeTensor(member.codes, self._lattices[index], name).narrow()))
        if escapes.size:
            raise ValueError("more escapes than tokens that stand for them")
        if inputs.digests is not None:
            inputs.digests.check_values(part.values for part in out)
        return out

    def _moment_ranges(self, lo: int, hi: int) -> list[ByteRange]:
        return self._ranges_of(self._moments, lo, hi) if self._moments else []

    def _parent_lattices(self, fetch: FetchParams) -> list[Lattice]:
        params = [fetch(name) for name in self.required_parents()]
        return [param for param in params if isinstance(param, Lattice)]


class _NativeRange:
    """A range of one tensor, decoded by the native core: its codes are predicted, and then corrected by the tokens."""

    def __init__(
        self, lattice: Lattice, span: TensorRange, parent: Bytes | None, squares: Bytes | None, threads: int
    ) -> None:
        self._info, self._first, self._threads = span.info, span.begin, threads
        self._lattice = lattice.to_native(matrix_shape(span.info.shape))
        if parent is not None and span.info.dtype == "F16":  # which the native core does not read
            parent = cast(parent, "F16", "F32")
        self._parent = None if parent is None else as_aligned(parent, 4)
        self._squares = None if squares is None else as_aligned(squares, 4)
        self._codes = _native.empty(2 * (span.end - span.begin))

    def predict(self, contexts: Bytes) -> None:
        """Predict the codes and fill in their contexts."""
        _native.lattice_predict(
            self._lattice,
            self._codes,
            contexts,
            parent=self._parent,
            squares=self._squares,
            first=self._first,
            threads=self._threads,
        )

    def decode(self, tokens: Bytes, contexts: Bytes, escapes: Bytes) -> tuple[Bytes, int]:
        """Return the values in the tensor's dtype, and how many escapes they used; predicted codes become codes."""
        values = _native.empty(2 * self._codes.nbytes)
        num_escapes = _native.lattice_decode(
            self._lattice,
            tokens,
            contexts,
            escapes,
            self._codes,
            values,
            squares=self._squares,
            first=self._first,
            threads=self._threads,
        )
        return cast(values, "F32", self._info.dtype), num_escapes

    @property
    def codes(self) -> Tensor:
        """The codes, int16, of the tensor's shape if they are all of its codes."""
        codes = torch.from_numpy(self._codes.view(np.int16))
        return codes.reshape(self._info.shape) if codes.numel() == self._info.numel else codes
