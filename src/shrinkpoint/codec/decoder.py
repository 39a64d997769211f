"""The interface of record decoders: what they read and return, and the ranges of other tensors that they need.

The *stream* of a record is the row-major bytes of its tensors one after the other. A decoder decodes ranges of the
stream that begin and end at chunks; a range needs the same ranges of the parent's values and of the moments, and
nothing else. A record is decoded whole as the range of all its units.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import Bytes, num_numbers
from shrinkpoint.codec.lattice import Lattice, LatticeTensor
from shrinkpoint.codec.recipe import Recipe
from shrinkpoint.codec.reference import DecodedTensors, QuantizedTensor, Reference, lattice_source, tensor_layout
from shrinkpoint.errors import BASE_ADVICE, VERIFY_ADVICE, ChainError, CorruptError, ShrinkpointError, TruncatedError
from shrinkpoint.guard import read_guard
from shrinkpoint.tensors.dtypes import dtype_name, joined_bytes, tensor_bytes, tensor_from_bytes, torch_dtype
from shrinkpoint.tensors.info import DTYPES, ITEMSIZE, JSON, EncodedRecord, TensorInfo, shared_info

QuantizerParams: TypeAlias = CodebookTensor | Lattice
"""A quantized tensor without its codes: a `CodebookTensor` whose codes are empty, or a lattice."""


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
            raise TruncatedError(where, found=str(error), do=VERIFY_ADVICE) from error
        except (_native.Corrupt, ValueError, LookupError, struct.error) as error:
            raise CorruptError(where, found=str(error), do=VERIFY_ADVICE) from error


class ByteRange(NamedTuple):
    """A range of another tensor that decoding needs."""

    same_file: bool  # True if the tensor is of an earlier record of the same file; else of the parent
    name: str
    # `start`, `stop`: bytes of its row-major values, or of its codes.
    start: int
    stop: int
    codes: bool = False  # True if the range is one of codes, one byte per value


class TensorRange(NamedTuple):
    """A range of one tensor of the record."""

    member: int  # index of the tensor in the record
    info: TensorInfo
    # `begin`, `end`: in units of the decoder, from the first of the tensor.
    begin: int
    end: int


@dataclass(frozen=True)
class RecordView:
    """A record whose parts can be read in ranges, with the tensors of its file and of the parent."""

    infos: tuple[TensorInfo, ...]
    recipe: JSON
    sizes: Mapping[str, int]  # bytes of each part by its name
    # (part, begin, end) -> verified bytes; raises only errors of `shrinkpoint.errors`.
    read: Callable[[str, int, int], memoryview]
    tensor_at: Callable[[int], TensorInfo]  # ordinal -> tensor of an earlier record of the file; raises `LookupError`
    # Name -> tensor of the parent; None if there is no parent or no such tensor.
    parent_tensor: Callable[[str], TensorInfo | None]
    known_recipe: Recipe | None = None  # the same recipe, if it has been parsed already

    def read_array(self, part: str, begin: int = 0, end: int | None = None) -> Bytes:
        """Read a range of a part; by default all of it."""
        return np.frombuffer(self.read(part, begin, self.sizes[part] if end is None else end), np.uint8)

    @cached_property
    def parsed_recipe(self) -> Recipe:
        """The recipe; raises ValueError if no encoder writes it."""
        return self.known_recipe or recipes.from_json(self.recipe, len(self.infos))

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The first byte of each tensor in the stream, by name."""
        ends = accumulate((info.nbytes for info in self.infos), initial=0)
        return {info.name: end for info, end in zip(self.infos, ends, strict=False)}

    def parent_has(self, info: TensorInfo) -> bool:
        """True if the parent has a tensor of the same name, shape and dtype."""
        parent = self.parent_tensor(info.name)
        return parent is not None and (parent.shape, parent.dtype) == (info.shape, info.dtype)


@dataclass(frozen=True)
class RecordDigests:
    """The digests of a record, which are compared when all of it is decoded."""

    where: str  # the file and record, for messages
    values: str  # digest of the values, in the order in which they are coded
    base: str | None  # digest of what the record was encoded against; None without base

    def check_base(self, digest: str) -> None:
        """Raise ChainError unless this is the digest of the parent's numbers that the record was encoded against."""
        if digest != self.base:
            found = f"a base with digest {digest}"
            raise ChainError(self.where, found=found, expected=str(self.base), do=BASE_ADVICE)

    def check_values(self, digest: str) -> None:
        """Raise ValueError unless this is the digest of the values that were encoded."""
        if digest != self.values:
            raise ValueError(f"decoded values with digest {digest}, expected {self.values}")


FetchRanges: TypeAlias = Callable[[Sequence[ByteRange]], Bytes]
FetchParams: TypeAlias = Callable[[str], QuantizerParams]


@dataclass(frozen=True)
class DecodeInputs:
    """Inputs of a decoder besides the bytes of its record."""

    fetch: FetchRanges  # returns the bytes of required ranges one after the other
    fetch_params: FetchParams  # returns the quantizer parameters of the parent's tensor of a name
    threads: int = 1
    allocate: Callable[[int], Bytes] = _native.empty  # returns uninitialized uint8 memory for values
    # Compared if given, which only the range of all units allows. For a smaller range, the digests of the stored bytes
    # and of the headers of the chain guard the same values unless a writer was wrong.
    digests: RecordDigests | None = None
    # Returns the codes of the float32 tensor that a required range is all of, if it is on a lattice whose steps depend
    # on no other tensor; else None.
    fetch_codes: Callable[[ByteRange], LatticeTensor | None] = lambda span: None
    # True if values are wanted, and not only what a later file of the chain is decoded from: then of what is on
    # lattices codes alone are decoded, and no digests of values are compared.
    with_values: bool = True
    overwrite_base: bool = False  # nobody else needs the parent's values of this record: they may be overwritten
    # The same for codes on lattices, which live longer than values.
    allocate_codes: Callable[[int], Bytes] = _native.empty
    # The digest of the parent's values need not be compared: a wrong parent shows in the values'.
    trust_base: bool = False
    # Returns the parent's tensor of a name with its codes; None if it is not on a lattice.
    fetch_lattice_tensor: Callable[[str], LatticeTensor | None] = lambda name: None

    @property
    def value_digests(self) -> RecordDigests | None:
        """The digests, if the one of the values is to be compared."""
        return self.digests if self.with_values else None

    @property
    def base_digests(self) -> RecordDigests | None:
        """The digests, if the one of the parent's values is to be compared."""
        return None if self.trust_base else self.value_digests


class DecodedPart(NamedTuple):
    """A decoded range of one tensor: its bytes, and its quantized form, of the tensor's shape if it is complete.

    Values are None of what is on a lattice, where only codes are wanted.
    """

    values: Bytes | None
    quantized: QuantizedTensor | None = None


@dataclass(frozen=True)
class DecodedRange:
    """A decoded range of a stream."""

    values: Bytes  # the bytes of its values, uint8
    codes: Bytes | None = None  # codes of a codebook record, uint8, one per value; else None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.codes is None else self.codes.nbytes)


class RecordDecoder(ABC):
    """Decodes ranges of one record.

    Its methods raise ValueError, LookupError, struct.error, `_native.Corrupt` or `_native.Truncated` for damaged bytes.

    Args:
        view: the record.
        counts: units of each tensor.

    Attributes:
        unit: bytes of the stream that one step of a range stands for, such as the size of a number.
        count: units in the stream.
        chunk: units that are decoded together: ranges begin and end at multiples of it, or at `count`.
        merge_gap: chunks between two ranges up to which decoding both in one call is faster.
        cacheable: True if decoding is expensive enough for decoded ranges to be cached.
        splittable: True if ranges smaller than the record can be decoded; if not, `unit` and `chunk` are of no use.
        uses_parent: True if the parent must have the record's tensors.
    """

    unit = 1
    chunk = 1
    merge_gap = 0
    cacheable = True
    splittable = True
    uses_parent = False

    def __init__(self, view: RecordView, counts: Sequence[int]) -> None:
        self._view, self._counts = view, counts
        self.count = sum(counts)

    @abstractmethod
    def decode(self, lo: int, hi: int, inputs: DecodeInputs) -> list[DecodedPart]:
        """Decode the range [lo, hi) of the stream, in units, to the parts of the tensors that it overlaps."""

    def required_ranges(self, lo: int, hi: int) -> Sequence[ByteRange]:
        """Return the ranges of other tensors that `decode` of [lo, hi) fetches."""
        return ()

    def required_parents(self) -> Sequence[str]:
        """Return the tensors whose parameters in the parent `quantizer_params` fetches."""
        return ()

    def quantizer_params(self, fetch: FetchParams) -> Mapping[str, QuantizerParams]:
        """Return the parameters of the record's quantized tensors by name."""
        return {}

    def decode_range(self, lo: int, hi: int, inputs: DecodeInputs) -> DecodedRange:
        """Decode the range [lo, hi) of the stream, in units, to one array."""
        parts = self.decode(lo, hi, inputs)
        codes = [tensor_bytes(part.quantized.codes) for part in parts if isinstance(part.quantized, CodebookTensor)]
        values = [part.values for part in parts if part.values is not None]
        return DecodedRange(concat(values), concat(codes) if codes else None)

    def _tensor_ranges(self, lo: int, hi: int) -> list[TensorRange]:
        """Return the range of each tensor that a range of the stream overlaps; tensors without values are included."""
        offset, out = 0, []
        for index, (info, count) in enumerate(zip(self._view.infos, self._counts, strict=True)):
            begin, end = max(lo - offset, 0), min(hi - offset, count)
            if begin < end or begin == end == count == 0:
                out.append(TensorRange(index, info, begin, end))
            offset += count
        return out

    def _parent_ranges(self, ranges: Sequence[TensorRange]) -> list[ByteRange]:
        """Return the same ranges of the parent's values."""
        sizes = [self._unit_bytes(info) for _, info, _, _ in ranges]
        return [
            ByteRange(False, info.name, begin * size, end * size)
            for (_, info, begin, end), size in zip(ranges, sizes, strict=True)
        ]

    def _ranges_of(
        self, moments: Sequence[TensorInfo], ranges: Sequence[TensorRange], *, same_file: bool = True
    ) -> list[ByteRange]:
        """Return the same ranges of tensors of the same shapes, one for each of the record, of any float dtype."""
        out = []
        for index, info, begin, end in ranges:
            size = self._unit_bytes(info) // ITEMSIZE[info.dtype] * ITEMSIZE[moments[index].dtype]
            out.append(ByteRange(same_file, moments[index].name, begin * size, end * size))
        return out

    def _fetch_float32(
        self,
        moments: Sequence[TensorInfo],
        ranges: Sequence[TensorRange],
        fetch: FetchRanges,
        *,
        same_file: bool = True,
    ) -> Bytes:
        spans = self._ranges_of(moments, ranges, same_file=same_file)
        groups = groupby(zip(ranges, spans, strict=True), lambda pair: moments[pair[0].member].dtype)
        return concat([cast(fetch([span for _, span in group]), dtype, "F32") for dtype, group in groups])

    def _split(self, values: Bytes, ranges: Sequence[TensorRange]) -> list[DecodedPart]:
        """Split the bytes of ranges one after the other."""
        out, start = [], 0
        for _, info, begin, end in ranges:
            stop = start + (end - begin) * self._unit_bytes(info)
            out.append(DecodedPart(values[start:stop]))
            start = stop
        return out

    def _unit_bytes(self, info: TensorInfo) -> int:
        """Bytes of a unit of one tensor; differs between tensors only if the record is not splittable."""
        return ITEMSIZE[info.dtype]


def cast(values: Bytes, source: str, dtype: str) -> Bytes:
    """Cast numbers from one dtype to another; returns the same array if the dtypes are equal."""
    if source == dtype:
        return values
    tensor = flat_tensor(values, source, values.nbytes // ITEMSIZE[source])
    return tensor_bytes(tensor.to(torch_dtype(dtype)))


def flat_tensor(values: Bytes, dtype: str, count: int) -> Tensor:
    """Return the 1-d tensor of these bytes, with which it shares memory if they are writable and aligned."""
    return tensor_from_bytes(as_aligned(values, ITEMSIZE[dtype]), TensorInfo("", (count,), dtype))


def as_aligned(values: Bytes, alignment: int) -> Bytes:
    """Return the array if it is writable and aligned, else such a copy."""
    return values if values.flags.writeable and values.ctypes.data % alignment == 0 else values.copy()


def concat(arrays: Sequence[Bytes]) -> Bytes:
    """Concatenate arrays to one that is writable and aligned to 16 bytes."""
    if len(arrays) == 1:
        return as_aligned(arrays[0], 16)
    return np.concatenate(arrays, out=_native.empty(sum(array.nbytes for array in arrays)))


_FLOATS = {name for name, dtype in DTYPES.items() if dtype.kind == "float"}


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
    for info, (first, second) in zip(view.infos, pairs, strict=True):
        fits = first.shape == second.shape == info.shape and {first.dtype, second.dtype} <= _FLOATS
        if not fits or num_numbers(info) != info.numel:
            raise ValueError(f"moments of {info.name!r} that do not fit it")
    return pairs


@dataclass(frozen=True)
class DecodedSources:
    """The decoded tensors that a record of a file may refer to: earlier ones of the file, and the parent's."""

    own: Mapping[str, Tensor]
    own_quantized: Mapping[str, QuantizedTensor]
    reference: Reference | None
    digests: RecordDigests

    def view(self, encoded: EncodedRecord, recipe: Recipe | None) -> RecordView:
        parts = {name: memoryview(part) for name, part in encoded.parts.items()}

        def read(part: str, begin: int, end: int) -> memoryview:
            return parts[part][begin:end]

        sizes = {name: part.nbytes for name, part in parts.items()}
        return RecordView(encoded.infos, encoded.recipe, sizes, read, self._tensor_at, self._parent_tensor, recipe)

    @cached_property
    def _names(self) -> Sequence[str]:
        return self.own.names if isinstance(self.own, DecodedTensors) else list(self.own)

    def _tensor_at(self, ordinal: int) -> TensorInfo:
        return _info_of(self._names[ordinal], self.own)

    def _parent_tensor(self, name: str) -> TensorInfo | None:
        if self.reference is None or name not in self.reference.tensors:
            return None
        return _info_of(name, self.reference.tensors)

    def check_parent(self, infos: Sequence[TensorInfo]) -> Reference:
        """Raise ChainError unless the parent has these tensors, of the same shapes and dtypes."""
        expected = f"a base with digest {self.digests.base}"
        if self.reference is None:
            found = "a delta without its base"
            raise ChainError(self.digests.where, found=found, expected=expected, do=BASE_ADVICE)
        shared = self.reference.shared_names(infos)
        for info in infos:
            if info.name not in shared:
                found = f"a base without tensor {info.name!r} of shape {list(info.shape)} and {info.dtype}"
                raise ChainError(self.digests.where, found=found, expected=expected, do=BASE_ADVICE)
        return self.reference

    def fetch(self, spans: Sequence[ByteRange]) -> Bytes:
        """The bytes of whole tensors, all that a record that is decoded whole needs."""
        parent, tensors = self.reference or Reference({}), list[Tensor]()
        for span in spans:
            if not span.codes:
                tensors.append((self.own if span.same_file else parent.tensors)[span.name])
                continue
            if not span.same_file and not parent.has_codes(span.name):
                self.digests.check_base("none: its tensors are not quantized")
            tensor = (self.own_quantized if span.same_file else parent.quantized)[span.name]
            if not isinstance(tensor, CodebookTensor):
                raise ValueError(f"the context codes are those of {span.name!r}, which has none")
            tensors.append(tensor.codes)
        values = joined_bytes(tensors)
        if values.nbytes != sum(span.stop - span.start for span in spans):
            raise ValueError("the record needs ranges of other tensors")
        return values

    def fetch_codes(self, span: ByteRange) -> LatticeTensor | None:
        tensors = self.own if span.same_file else self.reference.tensors if self.reference is not None else {}
        source = lattice_source(tensors, span.name)
        is_usable = source is not None and source.dtype == torch.float32 and not source.quantized.relative_to
        if source is None or not is_usable or (span.start, span.stop) != (0, 4 * source.quantized.codes.numel()):
            return None
        return source.quantized

    def fetch_lattice_tensor(self, name: str) -> LatticeTensor | None:
        tensor = None if self.reference is None else self.reference.quantized.get(name)
        return tensor if isinstance(tensor, LatticeTensor) else None

    def fetch_params(self, name: str) -> QuantizerParams:
        quantized = {} if self.reference is None else self.reference.quantized
        tensor = quantized.get(name)
        if tensor is None:
            self.digests.check_base("none: its tensors are not quantized")
        assert tensor is not None
        return tensor.lattice if isinstance(tensor, LatticeTensor) else tensor


def _info_of(name: str, tensors: Mapping[str, Tensor]) -> TensorInfo:
    shape, dtype = tensor_layout(tensors, name)
    return shared_info(name, shape, dtype_name(dtype))
