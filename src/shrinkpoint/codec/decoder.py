"""The interface of record decoders: what they read and return, and the ranges of other tensors that they need.

The *stream* of a record is the row-major bytes of its tensors one after the other. A decoder decodes ranges of the
stream that begin and end at chunks; a range needs the same ranges of the parent's values and of the moments, and
nothing else."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol, TypeAlias

import numpy as np

from shrinkpoint import _native
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import Bytes
from shrinkpoint.codec.lattice import Lattice
from shrinkpoint.codec.pack import num_numbers
from shrinkpoint.errors import CorruptError, ShrinkpointError, TruncatedError
from shrinkpoint.guard import read_guard
from shrinkpoint.tensors.dtypes import tensor_bytes, tensor_from_bytes
from shrinkpoint.tensors.info import ITEMSIZE, JSON, TensorInfo

_ADVICE = "restore an older checkpoint; `shrinkpoint verify` names what else is hit"


@contextmanager
def decode_errors(where: str) -> Iterator[None]:
    """Translate the exceptions of decoders that run inside this context.

    Args:
        where: the file and record that are decoded, for messages.

    Raises:
        CorruptError, TruncatedError: the bytes are damaged.
    """
    with read_guard(where):
        try:
            yield
        except ShrinkpointError:
            raise
        except _native.Truncated as error:
            raise TruncatedError(where, found=str(error), do=_ADVICE) from error
        except (_native.Corrupt, ValueError, LookupError, struct.error) as error:
            raise CorruptError(where, found=str(error), do=_ADVICE) from error


QuantizerParams: TypeAlias = CodebookTensor | Lattice
"""A quantized tensor without its codes: a `CodebookTensor` whose codes are empty, or a lattice."""

MERGE_GAP = 1 << 16
"""Bytes between two ranges of a plain or copied stream up to which one read of both is faster than two."""


@dataclass(frozen=True)
class ByteRange:
    """A range of another tensor that decoding needs.

    Attributes:
        same_file: whether the tensor is of an earlier record of the same file; else of the parent.
        name: name of the tensor.
        start, stop: bytes of its row-major values, or of its codes.
        codes: whether the range is one of codes, one byte per value.
    """

    same_file: bool
    name: str
    start: int
    stop: int
    codes: bool = False


FetchRange: TypeAlias = Callable[[ByteRange], Bytes]
"""Returns the bytes of a required range."""
FetchParams: TypeAlias = Callable[[str], QuantizerParams]
"""Returns the quantizer parameters of the parent's tensor of a name."""


@dataclass(frozen=True)
class RecordView:
    """A record whose parts can be read in ranges, with the tensors of its file and of the parent.

    Attributes:
        infos: its tensors (members).
        recipe: the recipe as JSON.
        sizes: bytes of each part by its name.
        read: (part, begin, end) -> verified bytes; raises only errors of `shrinkpoint.errors`.
        tensor_at: ordinal -> tensor of an earlier record of the file; raises `LookupError`.
        parent_tensors: the parent's tensors by name; None if there is no parent.
    """

    infos: tuple[TensorInfo, ...]
    recipe: JSON
    sizes: Mapping[str, int]
    read: Callable[[str, int, int], memoryview]
    tensor_at: Callable[[int], TensorInfo]
    parent_tensors: Mapping[str, TensorInfo] | None

    def read_array(self, part: str, begin: int = 0, end: int | None = None) -> Bytes:
        """Read a range of a part; by default all of it."""
        return np.frombuffer(self.read(part, begin, self.sizes[part] if end is None else end), np.uint8)

    def members_of_range(self, start: int, stop: int) -> Iterator[tuple[int, TensorInfo, int, int]]:
        """Yield (index, tensor, begin, end) of each tensor that a range of the stream overlaps; bytes of the tensor."""
        offset = 0
        for index, info in enumerate(self.infos):
            begin, end = max(start - offset, 0), min(stop - offset, info.nbytes)
            if begin < end:
                yield index, info, begin, end
            offset += info.nbytes

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The first byte of each tensor in the stream, by name."""
        ends = accumulate((info.nbytes for info in self.infos), initial=0)
        return {info.name: end for info, end in zip(self.infos, ends, strict=False)}


@dataclass(frozen=True)
class DecodedRange:
    """A decoded range of a stream.

    Attributes:
        values: the bytes of its values, uint8.
        codes: codes of a codebook record, uint8, one per value; else None.
    """

    values: Bytes
    codes: Bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.codes is None else self.codes.nbytes)


class PartialDecoder(Protocol):
    """Decodes ranges of one record.

    Attributes:
        unit: bytes of the stream that one step of a range stands for, such as the size of a number.
        count: units in the stream.
        chunk: units that are decoded together: ranges begin and end at multiples of it, or at `count`.
        merge_gap: chunks between two ranges up to which decoding both in one call is faster.
        cacheable: whether decoding is expensive enough for decoded ranges to be cached.
    """

    unit: int
    count: int
    chunk: int
    merge_gap: int
    cacheable: bool

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        """Return the ranges of other tensors that `decode` of [lo, hi) fetches."""

    def required_parents(self) -> Sequence[str]:
        """Return the tensors whose parameters in the parent `quantizer_params` fetches."""

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        """Return the parameters of the record's quantized tensors by name; must be called before `decode`."""

    def decode(self, lo: int, hi: int, fetch: FetchRange, threads: int) -> DecodedRange:
        """Decode the range [lo, hi) of the stream, in units.

        Raises:
            ValueError, LookupError, struct.error, _native.Corrupt, _native.Truncated: the bytes are damaged.
        """


class PlainDecoder:
    """Reads ranges of a plain record, whose values are stored uncompressed."""

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
    """Copies ranges of earlier tensors of the same file, and casts them where they are wider."""

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
        position = 0
        for index, info, begin, end in self._view.members_of_range(lo, hi):
            values = fetch(self._source_range(index, info, begin, end))
            if self._sources[index].dtype != info.dtype:
                skipped = begin % ITEMSIZE[info.dtype]
                values = cast(values, "F32", info.dtype)[skipped : skipped + end - begin]
            out[position : position + end - begin] = values
            position += end - begin
        return DecodedRange(out)

    def _source_range(self, index: int, info: TensorInfo, begin: int, end: int) -> ByteRange:
        source, size = self._sources[index], ITEMSIZE[info.dtype]
        if source.dtype == info.dtype:
            return ByteRange(True, source.name, begin, end)
        source_size = ITEMSIZE[source.dtype]
        return ByteRange(True, source.name, begin // size * source_size, -(-end // size) * source_size)


def cast(values: Bytes, source: str, dtype: str) -> Bytes:
    """Cast numbers from one dtype to another; returns the same array if the dtypes are equal."""
    if source == dtype:
        return values
    count = values.nbytes // ITEMSIZE[source]
    tensor = tensor_from_bytes(as_aligned(values), TensorInfo("", (count,), source))
    return tensor_bytes(tensor.to(tensor_from_bytes(np.empty(0, np.uint8), TensorInfo("", (0,), dtype)).dtype))


def as_aligned(values: Bytes) -> Bytes:
    """Return the array if it is writable and aligned to 16 bytes, else such a copy."""
    aligned = values.flags.writeable and values.ctypes.data % 16 == 0
    return values if aligned else values.copy()


def moment_pairs(view: RecordView, moments: Sequence[tuple[int, int]]) -> list[tuple[TensorInfo, TensorInfo]]:
    """Return the (first, second) moment of each tensor of the record; [] for none.

    Raises:
        ValueError: a moment does not fit its tensor.
    """
    if not moments:
        return []
    pairs = [(view.tensor_at(first), view.tensor_at(second)) for first, second in moments]
    if len(pairs) != len(view.infos):
        raise ValueError(f"{len(pairs)} pairs of moments for {len(view.infos)} tensors")
    for info, pair in zip(view.infos, pairs, strict=True):
        fits = all(moment.shape == info.shape and _is_float(moment) for moment in pair)
        if not fits or num_numbers(info) != info.numel:
            raise ValueError(f"moments of {info.name!r} that do not fit it")
    return pairs


def _is_float(info: TensorInfo) -> bool:
    """Whether `pack.is_codable_float` holds for such a tensor."""
    return info.dtype.startswith(("F", "BF")) and info.dtype != "F4_X2"


def moment_ranges(
    view: RecordView, moments: Sequence[TensorInfo], start: int, stop: int, *, same_file: bool = True
) -> Iterator[tuple[ByteRange, str]]:
    """Yield (range, dtype) of the moment of each tensor that a range of the stream overlaps."""
    for index, info, begin, end in view.members_of_range(start, stop):
        size, moment = ITEMSIZE[info.dtype], moments[index]
        moment_size = ITEMSIZE[moment.dtype]
        span = ByteRange(same_file, moment.name, begin // size * moment_size, end // size * moment_size)
        yield span, moment.dtype


def base_ranges(view: RecordView, start: int, stop: int) -> list[ByteRange]:
    """Return the ranges of the parent's values that a range of the stream overlaps."""
    return [ByteRange(False, info.name, begin, end) for _, info, begin, end in view.members_of_range(start, stop)]


def has_same_layout(parent: TensorInfo | None, info: TensorInfo) -> bool:
    """Whether a parent's tensor exists with the same shape and dtype."""
    return parent is not None and (parent.shape, parent.dtype) == (info.shape, info.dtype)


def concat(parts: Sequence[Bytes]) -> Bytes:
    """Concatenate arrays to one that is writable and aligned to 16 bytes."""
    return as_aligned(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def common_chunk(chunks: Sequence[int], count: int) -> int:
    """Return the smallest multiple of all chunk sizes, at most `count` (or 1)."""
    return min(math.lcm(*chunks), max(1, count))
