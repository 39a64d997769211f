"""Decodes records of lattice tensors, whole or in ranges: `lattice_record` says how codes are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest

import numpy as np
import torch
from numpy.typing import NDArray

from shrinkpoint import _native
from shrinkpoint.codec.coder import (
    BYTE_FORMAT,
    MAX_CHUNK,
    MIN_CHUNK_BYTES,
    NUMBER_FORMATS,
    Bytes,
    CodedChunks,
    CoderConfig,
    CodingContext,
    digest_arrays,
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
from shrinkpoint.codec.lattice import (
    MAX_GAIN,
    MAX_LATTICE_CODE,
    MAX_SCALE_EXPONENT,
    MIN_GAIN,
    Lattice,
    LatticeTensor,
    all_exponents,
    code_bytes,
    narrow_codes,
    row_counts,
    scale_counts,
)
from shrinkpoint.codec.lattice_record import ESCAPE, PART_SIZES, SIDE_SIZES, exponents_of
from shrinkpoint.codec.recipe import LatticeRecipe
from shrinkpoint.tensors.info import TensorInfo

_BLOCK_VALUES = 1 << 19  # Values that are decoded before the next ones are looked at
_NO_BYTES: Bytes = np.empty(0, np.uint8)
_DIFFERENCES, _NO_CONTEXT = CoderConfig("codes"), CodingContext()
"""How differences of exponents and of codes are coded."""


class MemberDecoder:
    """Decodes a range of one tensor part by part: its codes are predicted, and then corrected by the tokens.

    Args:
        continued: the parent's tensor on the same lattice, whose points predict the codes and whose origin is that of
            the tensor; None: the values of `parent` predict the codes.
        gain: None for a tensor without an origin; else the range is the whole tensor.
        squares_dtype: of the second moment.

    Attributes:
        count: values in the range.
    """

    def __init__(
        self,
        lattice: Lattice,
        span: TensorRange,
        parent: ByteRange | None,
        squares: ByteRange | None,
        inputs: DecodeInputs,
        continued: LatticeTensor | None = None,
        gain: float | None = None,
        squares_dtype: str = "F32",
    ) -> None:
        self._info, self._first, self.count, self._params = span.info, span.begin, span.end - span.begin, lattice
        self._lattice = lattice.to_native(span.info.shape)
        self._codes, self._code_bytes = _NO_BYTES, 1
        self._origin, self._gain = None if continued is None else continued.first_codes, gain
        self._parent = None if parent is None else _FetchedValues(parent, span.info.dtype, inputs, continued)
        self._squares = None if squares is None else _FetchedValues(squares, squares_dtype, inputs, widen=True)
        self._allocate_codes = inputs.allocate_codes
        self._overwrites = inputs.overwrite_base and (continued is None or continued.origin is not None)
        self._values = None
        if inputs.with_values:
            is_native = span.info.dtype == "F32"
            self._values = inputs.allocate(4 * self.count) if is_native else _native.empty(4 * self.count)

    def codes_part(self) -> _native.LatticePart:
        """The range for the native core: where codes go, at best into those of the parent, and what predicts them."""
        parent = None if self._parent is None else self._parent.part(0, self.count)
        squares = None if self._squares is None else self._squares.part(0, self.count)
        before = self._parent.narrow_codes if self._parent is not None and self._overwrites else None
        self._codes = self._allocate_codes(self.count) if before is None else before
        return self._lattice, self._first, self._codes, parent, squares

    def decode_values(
        self, wide: Bytes | None, differences: NDArray[np.int32] | None, digest: _native.Hasher | None, threads: int
    ) -> None:
        """Decode the values of all codes, if they are wanted.

        Args:
            wide: the codes where some do not fit into a byte.
            differences: of a stored origin to the codes.

        Raises:
            ValueError: an origin is out of range.
        """
        if wide is not None:
            self._codes, self._code_bytes = wide, 2
        if differences is not None:
            codes = self._codes.view(np.int8 if self._code_bytes == 1 else np.int16)
            origin = differences.astype(np.int64) + codes.astype(np.int64)
            if origin.size and int(np.abs(origin).max()) > MAX_LATTICE_CODE:
                raise ValueError("an origin that is too far out")
            self._origin = narrow_codes(torch.from_numpy(origin.astype(np.int16))).reshape(self._info.shape)
        if self._values is not None:
            squares = None if self._squares is None else self._squares.part(0, self.count)
            _native.lattice_values(
                self._lattice if self._gain is None else self._tensor().to_native(),
                self._codes,
                self._values,
                squares=squares,
                digest=digest,
                first=self._first,
                threads=threads,
            )

    def predict(self, start: int, guesses: Bytes, contexts: Bytes, base: _native.Hasher | None, threads: int) -> None:
        """Predict codes from `start` of the range on, and fill in their contexts."""
        if self._parent is not None and self._parent.values is not None and base is not None and start == 0:
            base.update(self._parent.stored)
            base = None
        is_hashed = self._parent is not None and self._parent.values is None
        _native.lattice_predict(
            self._lattice,
            guesses,
            contexts,
            parent=None if self._parent is None else self._parent.part(start, contexts.size),
            squares=None if self._squares is None else self._squares.part(start, contexts.size),
            base=base if is_hashed else None,
            first=self._first + start,
            threads=threads,
        )

    def decode(
        self,
        start: int,
        guesses: Bytes,
        tokens: Bytes,
        contexts: Bytes,
        escapes: Bytes,
        digest: _native.Hasher | None,
        threads: int,
    ) -> int:
        """Decode codes and values from `start` of the range on; returns how many escapes they used."""
        stop = start + tokens.size
        if start == 0:
            self._codes = self._allocate_codes(self.count)
        used, is_narrow = _native.lattice_decode(
            self._lattice,
            tokens,
            contexts,
            escapes,
            guesses,
            None if self._values is None or self._gain is not None else self._values[4 * start : 4 * stop],
            codes=self._codes[self._code_bytes * start : self._code_bytes * stop],
            squares=None if self._squares is None else self._squares.part(start, tokens.size),
            digest=None if self._gain is not None else digest,
            first=self._first + start,
            threads=threads,
        )
        if not is_narrow and self._code_bytes == 1:
            wide = _native.empty(2 * self.count)
            wide.view(np.int16)[:start] = self._codes.view(np.int8)[:start]
            wide[2 * start : 2 * stop] = guesses
            self._codes, self._code_bytes = wide, 2
        return used

    def part(self) -> DecodedPart:
        """The decoded range."""
        values = None if self._values is None else cast(self._values, "F32", self._info.dtype)
        return DecodedPart(values, self._tensor())

    def _tensor(self) -> LatticeTensor:
        """Decoded values; the codes have the tensor's shape if they are complete."""
        array = self._codes.view(np.int8 if self._code_bytes == 1 else np.int16)
        codes = torch.from_numpy(array.reshape(self._info.shape) if self.count == self._info.numel else array)
        relative_to = "" if self._squares is None else self._squares.name
        if self._gain is None:
            return LatticeTensor(codes, self._params, relative_to)
        return LatticeTensor(codes, self._params, relative_to, self._origin, self._gain)


class _FetchedValues:
    """Values of a range of another tensor, float32 or bfloat16: codes on a lattice if they are all of its values.

    Args:
        widen: values are float32, whatever `dtype` is.

    Attributes:
        name: of the tensor.
        stored: its bytes as they are; empty for codes.
        values: the same as the native core reads them; None for codes.
    """

    def __init__(
        self,
        span: ByteRange,
        dtype: str,
        inputs: DecodeInputs,
        continued: LatticeTensor | None = None,
        *,
        widen: bool = False,
    ) -> None:
        source = None if continued is None else continued.points()
        if source is None and dtype == "F32":
            source = inputs.fetch_codes(span)
        self.name, self.values = span.name, None
        self.stored = _NO_BYTES
        if source is not None:
            self._lattice, self._codes = source.to_native(), code_bytes(source.codes)
            self._code_bytes = source.codes.element_size()
            return
        self.stored = inputs.fetch([span])
        # The native core reads no float16.
        is_cast = dtype == "F16" or (widen and dtype == "BF16")
        self.values = as_aligned(cast(self.stored, dtype, "F32") if is_cast else self.stored, 4)
        self._itemsize = 2 if dtype == "BF16" and not is_cast else 4

    @property
    def narrow_codes(self) -> Bytes | None:
        """The codes, if they have one byte each and may be written."""
        is_narrow = self.values is None and self._code_bytes == 1 and self._codes.flags.writeable
        return self._codes if is_narrow else None

    def part(self, start: int, count: int) -> _native.LatticeValues:
        """Values of the range from `start` on."""
        if self.values is not None:
            return self.values[self._itemsize * start : self._itemsize * (start + count)]
        return self._lattice, self._codes[self._code_bytes * start : self._code_bytes * (start + count)]


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
        are_alike = [shape for shape, _ in layouts] == [info.shape for info in infos]
        if layouts and not (are_alike and all(dtype in ("F32", "BF16") for _, dtype in layouts)):
            raise ValueError("second moments that do not fit their tensors")
        self._lattices: list[Lattice] = []
        self._gains: list[float | None] = [None] * len(infos)

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        ranges = self._tensor_ranges(lo, hi)
        return [*(self._parent_ranges(ranges) if self._recipe.base else ()), *self._moment_ranges(ranges)]

    def required_parents(self) -> Sequence[str]:
        return [info.name for info in self._view.infos] if self._recipe.inherited or self._recipe.moved else []

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
        parents = self._parent_lattices(fetch)
        if seeds.size != len(infos):
            raise _native.Truncated("the lattices end too early")
        if self._recipe.inherited or self._recipe.moved:
            _check_parents(infos, self._recipe, parents)
        if self._recipe.inherited and data.nbytes:
            raise ValueError("bytes behind inherited lattices")
        if self._recipe.spacing == "log" and seeds.any():
            raise ValueError('dither with spacing "log", which has none')
        lattices = (
            parents if self._recipe.inherited else _decode_exponents(data, infos, self._recipe, seeds.tolist(), parents)
        )
        self._lattices = [
            lattice if lattice.seed == seed else replace(lattice, seed=seed)
            for lattice, seed in zip(lattices, seeds.tolist(), strict=True)
        ]
        return {info.name: lattice for info, lattice in zip(infos, self._lattices, strict=True)}

    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        if not self._lattices:
            self.quantizer_params(inputs.fetch_params)
        ranges = self._tensor_ranges(lo, hi)
        parents = self._parent_ranges(ranges) if self._recipe.base else []
        continued = self._continued_tensors(ranges, inputs)
        sources = zip_longest(ranges, parents, self._moment_ranges(ranges), continued)
        members = [
            MemberDecoder(
                self._lattices[span.member],
                span,
                parent,
                squares,
                inputs,
                tensor,
                self._gains[span.member],
                self._moments[span.member].dtype if self._moments else "F32",
            )
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
                    whole.update(inputs.fetch([parent]) if points is None else points)
                base_digests.check_base(whole.hexdigest())
            raise
        if base_digests is not None and base is not None:
            base_digests.check_base(base.hexdigest())
        out = [member.part() for member in members]
        if digests is not None and values is not None:
            digests.check_values(values.hexdigest())
        elif digests is not None:
            digests.check_values(digest_arrays(part.values for part in out if part.values is not None))
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
        if not self._recipe.origin:
            return [None] * len(members)
        differences = _decode_differences(self._view.read_array("origin"), self.count)
        return np.split(differences, [*accumulate(member.count for member in members)][:-1])

    def _base_hasher(self, inputs: DecodeInputs) -> _native.Hasher:
        """The digest of the base as far as it covers the parent's exponents."""
        hasher = _native.Hasher()
        for exponents in exponents_of(self._parent_lattices(inputs.fetch_params)):
            hasher.update(exponents)
        return hasher

    def _moment_ranges(self, ranges: Sequence[TensorRange]) -> list[ByteRange]:
        return self._ranges_of(self._moments, ranges) if self._moments else []

    def _parent_lattices(self, fetch: FetchParams) -> list[Lattice]:
        params = [fetch(name) for name in self.required_parents()]
        return [param for param in params if isinstance(param, Lattice)]


def _check_parents(infos: Sequence[TensorInfo], recipe: LatticeRecipe, parents: Sequence[Lattice]) -> None:
    """Raise ValueError unless the parent has a lattice of each member that its exponents can be taken from."""
    if len(parents) != len(infos) or not all(
        lattice.has_counts_for(info.shape) for lattice, info in zip(parents, infos, strict=True)
    ):
        raise ValueError("a parent whose tensors are not on lattices of these shapes")
    if any(lattice.spacing != recipe.spacing or lattice.step != recipe.step for lattice in parents):
        raise ValueError("the parent's lattices have another spacing or step")


def _decode_exponents(
    data: Bytes, infos: Sequence[TensorInfo], recipe: LatticeRecipe, seeds: Sequence[int], parents: Sequence[Lattice]
) -> list[Lattice]:
    """Decode exponents: differences to the parent's if the recipe says that these have moved, else to those before."""
    if recipe.moved:
        counts = [(lattice.rows.numel(), lattice.columns.numel()) for lattice in parents]
    else:
        axes = recipe.axes or (1,) * len(infos)
        if len(axes) != len(infos) or any(
            leading > len(row_counts(info.shape)) for leading, info in zip(axes, infos, strict=True)
        ):
            raise ValueError("more or other leading axes of matrices than the tensors have")
        rows = [row_counts(info.shape)[leading - 1] for leading, info in zip(axes, infos, strict=True)]
        counts = [scale_counts(recipe.spacing, info.shape, n) for info, n in zip(infos, rows, strict=True)]
    differences = _decode_differences(data, sum(rows + columns for rows, columns in counts))
    if recipe.moved:
        exponents = differences.astype(np.int64) + all_exponents(parents)
    else:
        exponents = np.cumsum(differences, dtype=np.int64)
    if bool((np.abs(exponents) > MAX_SCALE_EXPONENT).any()):
        raise ValueError("scales out of range")
    sides = torch.from_numpy(exponents.astype(np.int16)).split([n for pair in counts for n in pair])
    lattices = [
        Lattice(recipe.spacing, rows, columns, recipe.step, seed)
        for rows, columns, seed in zip(sides[::2], sides[1::2], seeds, strict=True)
    ]
    if not all(lattice.to_native(info.shape).has_normal_steps for lattice, info in zip(lattices, infos, strict=True)):
        raise ValueError("scales out of range")
    return lattices


def _decode_differences(data: Bytes, total: int) -> NDArray[np.int32]:
    """Decode differences of exponents or of codes; whatever they are, in 32 bits."""
    nside, nescapes = SIDE_SIZES.unpack(data[: SIDE_SIZES.size].tobytes())
    side_end = SIDE_SIZES.size + nside
    begin = side_end + 4 * nescapes
    if begin + -(-total // MAX_CHUNK) * MIN_CHUNK_BYTES > data.nbytes:
        raise _native.Truncated("the lattices, or their origins, end too early")
    tokens = np.empty(total, np.uint8)
    if total:
        side = data[SIDE_SIZES.size : side_end]
        _DIFFERENCES.decode(BYTE_FORMAT, side, data[begin:], tokens, _NO_CONTEXT, 1)
    out = tokens.view(np.int8).astype(np.int32)
    large = np.flatnonzero(out == ESCAPE)
    if large.size != nescapes:
        raise ValueError("more or fewer escapes than tokens that stand for them")
    if nescapes:
        out[large] = np.frombuffer(data[side_end:begin].tobytes(), "<i4")
    return out
