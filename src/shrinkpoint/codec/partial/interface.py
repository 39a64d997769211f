"""A part of a record, decoded alone: what it needs of other tensors, and the bytes it gives.

The values of a record's tensors, one tensor's row-major bytes behind the other's, are its *stream*. A record that can
be decoded in part has pieces of the stream that need no other piece: its chunks, and for each of them the same range
of the parent's numbers and of its moments. Plain, same, copied and coded records can; quantized and gridded ones where
`partial_quantized` and `partial_gridded` say so.

No digest of a record's values can be compared on a part of them. A caller has to compare those of the stored bytes and
of the headers of the chain, which vouch for the same thing unless a writer was wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol, TypeAlias

import numpy as np

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import Bytes
from shrinkpoint.codec.lattice import Lattice
from shrinkpoint.codec.pack import num_numbers
from shrinkpoint.tensors.dtypes import tensor_bytes, tensor_from_bytes
from shrinkpoint.tensors.info import ITEMSIZE, JSON, TensorInfo

QuantizerParams: TypeAlias = CodebookTensor | Lattice
"""What a quantizer left of a tensor besides its codes: its centers (and symbols without codes), or its lattice."""

MERGE_GAP = 1 << 16
"""Bytes between two ranges of a stream that is stored or copied: fewer are not worth a call of their own."""


@dataclass(frozen=True)
class ByteRange:
    """A range of another tensor.

    Attributes:
        same_file: it is one of an earlier record of the same file; else one of the parent.
        name: of the tensor.
        start, stop: bytes of its values, row-major; or of its codes.
        codes: the quantizer's codes are meant, one byte for each value.
    """

    same_file: bool
    name: str
    start: int
    stop: int
    codes: bool = False


FetchRange: TypeAlias = Callable[[ByteRange], Bytes]
"""Gives the bytes of a span that was said to be needed."""
FetchParams: TypeAlias = Callable[[str], QuantizerParams]
"""Gives what the parent's tensor of a name was made from."""


@dataclass(frozen=True)
class RecordView:
    """A record whose bytes can be read in part, and what surrounds it.

    Attributes:
        sizes: bytes of each part.
        read: (part, begin, end) -> bytes whose digest is right; raises only errors of our tree.
        tensor_at: the tensor of an ordinal, among those of earlier records of the file; raises `LookupError`.
        parent_tensors: the parent's tensors by name; None: there is no parent.
    """

    infos: tuple[TensorInfo, ...]
    recipe: JSON
    sizes: Mapping[str, int]
    read: Callable[[str, int, int], memoryview]
    tensor_at: Callable[[int], TensorInfo]
    parent_tensors: Mapping[str, TensorInfo] | None

    def read_array(self, part: str, begin: int = 0, end: int | None = None) -> Bytes:
        return np.frombuffer(self.read(part, begin, self.sizes[part] if end is None else end), np.uint8)

    def members_of_range(self, start: int, stop: int) -> Iterator[tuple[int, TensorInfo, int, int]]:
        """(index, tensor, begin, end) of the tensors that a range of the stream has bytes of."""
        offset = 0
        for index, info in enumerate(self.infos):
            begin, end = max(start - offset, 0), min(stop - offset, info.nbytes)
            if begin < end:
                yield index, info, begin, end
            offset += info.nbytes

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each tensor begins in the stream."""
        ends = accumulate((info.nbytes for info in self.infos), initial=0)
        return {info.name: end for info, end in zip(self.infos, ends, strict=False)}


@dataclass(frozen=True)
class DecodedRange:
    """What a range of a stream decodes to.

    Attributes:
        values: its bytes.
        codes: of quantized tensors, one byte for each value; else None.
    """

    values: Bytes
    codes: Bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.codes is None else self.codes.nbytes)


class PartialDecoder(Protocol):
    """A record that can be decoded in part.

    Attributes:
        unit: bytes of the stream that cannot be told apart; ranges are counted in these.
        count: of units in the stream.
        chunk: units that are decoded together: ranges begin and end at multiples of it, or at `count`.
        merge_gap: chunks between two ranges that are better decoded than told apart.
        cacheable: decoding has a price, so that what was decoded is worth keeping.
    """

    unit: int
    count: int
    chunk: int
    merge_gap: int
    cacheable: bool

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        """What `decode` asks its supply for."""

    def required_parents(self) -> Sequence[str]:
        """The tensors whose origins in the parent `open_origins` asks for; nothing else does."""

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        """What the record's tensors were made from; to be called before `decode`."""

    def decode(self, lo: int, hi: int, fetch: FetchRange, threads: int) -> DecodedRange:
        """The range [lo, hi) of the stream.

        Raises:
            ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are at fault.
        """


class PlainDecoder:
    """Values as they are."""

    unit, chunk, merge_gap, cacheable = 1, 1, MERGE_GAP, False

    def __init__(self, view: RecordView) -> None:
        self._view = view
        self.count = sum(info.nbytes for info in view.infos)
        if self.count != view.sizes["values"]:
            raise ValueError(f"{view.sizes['values']} bytes for {self.count} bytes of tensors")

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        return ()

    def required_parents(self) -> Sequence[str]:
        return ()

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        return {}

    def decode(self, lo: int, hi: int, fetch: FetchRange, threads: int) -> DecodedRange:
        return DecodedRange(self._view.read_array("values", lo, hi))


class CopyDecoder(PlainDecoder):
    """Values of earlier tensors of the same file, cast where these are wider."""

    def __init__(self, view: RecordView, sources: Sequence[int]) -> None:
        self._view = view
        self.count = sum(info.nbytes for info in view.infos)
        if len(sources) != len(view.infos):
            raise ValueError(f"{len(sources)} sources for {len(view.infos)} copies")
        self._sources = [view.tensor_at(ordinal) for ordinal in sources]
        for info, source in zip(view.infos, self._sources, strict=True):
            if source.shape != info.shape:
                raise ValueError(f"a copy of shape {list(info.shape)} has a source of shape {list(source.shape)}")
            if source.dtype != info.dtype and (source.dtype, info.dtype) not in (("F32", "BF16"), ("F32", "F16")):
                raise ValueError(f"a copy as {info.dtype} of {source.dtype}")

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        return [
            self._source_range(index, info, begin, end)
            for index, info, begin, end in self._view.members_of_range(lo, hi)
        ]

    def decode(self, lo: int, hi: int, fetch: FetchRange, threads: int) -> DecodedRange:
        out = np.empty(hi - lo, np.uint8)
        place = 0
        for index, info, begin, end in self._view.members_of_range(lo, hi):
            found = fetch(self._source_range(index, info, begin, end))
            if self._sources[index].dtype != info.dtype:
                skipped = begin % ITEMSIZE[info.dtype]
                found = cast(found, "F32", info.dtype)[skipped : skipped + end - begin]
            out[place : place + end - begin] = found
            place += end - begin
        return DecodedRange(out)

    def _source_range(self, index: int, info: TensorInfo, begin: int, end: int) -> ByteRange:
        source, size = self._sources[index], ITEMSIZE[info.dtype]
        if source.dtype == info.dtype:
            return ByteRange(True, source.name, begin, end)
        wide = ITEMSIZE[source.dtype]
        return ByteRange(True, source.name, begin // size * wide, -(-end // size) * wide)


def cast(values: Bytes, source: str, dtype: str) -> Bytes:
    """Numbers of one dtype as those of another; the same array where it is the same dtype."""
    if source == dtype:
        return values
    count = values.nbytes // ITEMSIZE[source]
    tensor = tensor_from_bytes(as_aligned(values), TensorInfo("", (count,), source))
    return tensor_bytes(tensor.to(tensor_from_bytes(np.empty(0, np.uint8), TensorInfo("", (0,), dtype)).dtype))


def as_aligned(values: Bytes) -> Bytes:
    """The same bytes where numbers of any width may stand, in memory that may be written."""
    good = values.flags.writeable and values.ctypes.data % 16 == 0
    return values if good else values.copy()


def moment_pairs(view: RecordView, moments: Sequence[tuple[int, int]]) -> list[tuple[TensorInfo, TensorInfo]]:
    """(first, second) moment of each tensor of the record; [] for none."""
    if not moments:
        return []
    pairs = [(view.tensor_at(first), view.tensor_at(second)) for first, second in moments]
    if len(pairs) != len(view.infos):
        raise ValueError(f"{len(pairs)} pairs of moments for {len(view.infos)} tensors")
    for info, pair in zip(view.infos, pairs, strict=True):
        if any(one.shape != info.shape or not _is_float(one) for one in pair) or num_numbers(info) != info.numel:
            raise ValueError(f"moments of {info.name!r} that do not fit it")
    return pairs


def _is_float(info: TensorInfo) -> bool:
    """As `arrange.is_codable_float` has it of a tensor."""
    return info.dtype.startswith(("F", "BF")) and info.dtype != "F4_X2"


def moment_ranges(
    view: RecordView, moments: Sequence[TensorInfo], start: int, stop: int, *, same_file: bool = True
) -> Iterator[tuple[ByteRange, str]]:
    """Where the moments of a range of the stream stand, one for each tensor of the record; and their dtypes."""
    for index, info, begin, end in view.members_of_range(start, stop):
        size, other = ITEMSIZE[info.dtype], moments[index]
        wide = ITEMSIZE[other.dtype]
        yield ByteRange(same_file, other.name, begin // size * wide, end // size * wide), other.dtype


def base_ranges(view: RecordView, start: int, stop: int) -> list[ByteRange]:
    """Where the parent's values of a range of the stream stand."""
    return [ByteRange(False, info.name, begin, end) for _, info, begin, end in view.members_of_range(start, stop)]


def concat(parts: Sequence[Bytes]) -> Bytes:
    return as_aligned(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def common_chunk(chunks: Sequence[int], count: int) -> int:
    """Numbers after which chunks of all these sizes end."""
    return min(math.lcm(*chunks), max(1, count))
