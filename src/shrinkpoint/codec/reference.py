"""Tensors of a checkpoint held as what they are made from, and the decoded parent, which writer and reader have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.lattice import LatticeTensor, as_matrix
from shrinkpoint.device.reads import copy_together
from shrinkpoint.tensors.dtypes import TORCH_DTYPES, empty
from shrinkpoint.tensors.info import TensorInfo


class LatticeSource(NamedTuple):
    """A tensor on a lattice: a quarter of its values' bytes."""

    quantized: LatticeTensor  # its codes and lattice
    dtype: torch.dtype  # of its values
    values: Tensor | None = None  # the values, if they have been decoded already

    @property
    def needs_only_codes(self) -> bool:
        """True if the values are float32, and are decoded from nothing but the codes."""
        return self.values is None and self.dtype == torch.float32 and not self.quantized.relative_to


class CastSource(NamedTuple):
    """A tensor that is another one in a narrower dtype."""

    name: str  # of the other tensor
    dtype: torch.dtype  # of its values


TensorSource: TypeAlias = Tensor | LatticeSource | CastSource


class DecodedTensors(Mapping[str, Tensor]):
    """Tensors by name, decoded anew whenever they are asked for, unless they are held as values.

    Args:
        sources: by name.

    Attributes:
        names: the names in order, indexed by ordinal; listing the keys for each record would take quadratic time.
    """

    def __init__(self, sources: Mapping[str, TensorSource] | None = None) -> None:
        self._sources: dict[str, TensorSource] = {}
        self.names: list[str] = []
        self.add(sources or {})

    def add(self, sources: Mapping[str, TensorSource] | Mapping[str, Tensor]) -> None:
        """Add the tensors of the next record; of those of another mapping of this kind, their sources."""
        self._sources.update(sources._sources if isinstance(sources, DecodedTensors) else sources)
        self.names.extend(sources)

    def skip(self, names: Iterable[str]) -> None:
        """Number the tensors of the next record, which nobody needs."""
        self.names.extend(names)

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[name]
        if isinstance(source, Tensor):
            return source
        if isinstance(source, CastSource):
            return self[source.name].to(source.dtype)
        if source.values is not None:
            return source.values
        other = source.quantized.relative_to
        return source.quantized.dequantize(source.dtype, self[other] if other else None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    @property
    def nbytes(self) -> int:
        """Bytes that are held: of values, and of codes."""
        return sum(_held_bytes(source) for source in self._sources.values())

    def subset(self, names: Iterable[str]) -> DecodedTensors:
        """Return these tensors alone; what one of them is made from must be among them, or it is held as values."""
        names = list(names)
        chosen = set(names)
        return DecodedTensors({name: self._self_contained(name, chosen) for name in names})

    def needed_names(self) -> set[str]:
        """Return the names of the tensors that others are made from."""
        out = set()
        for source in self._sources.values():
            if isinstance(source, CastSource):
                out.add(source.name)
            elif isinstance(source, LatticeSource) and source.quantized.relative_to:
                out.add(source.quantized.relative_to)
        return out

    def without_values(self) -> DecodedTensors:
        """Return the same tensors, those that can be decoded without their values."""
        return DecodedTensors(
            {
                name: LatticeSource(*source[:2])
                if isinstance(source, LatticeSource) and source.values is not None
                else source
                for name, source in self._sources.items()
            }
        )

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> DecodedTensors:
        """Return the same tensors, some of those that are held as values with other memory."""
        return DecodedTensors({**self._sources, **tensors})

    def held_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are held as values alone, by name."""
        return {name: source for name, source in self._sources.items() if isinstance(source, Tensor)}

    def _self_contained(self, name: str, names: set[str]) -> TensorSource:
        source = self._sources[name]
        if isinstance(source, CastSource) and source.name not in names:
            return self[name]
        is_relative = isinstance(source, LatticeSource) and source.quantized.relative_to not in {"", *names}
        return source._replace(values=self[name]) if isinstance(source, LatticeSource) and is_relative else source


def _held_bytes(source: TensorSource) -> int:
    if isinstance(source, Tensor):
        return source.nbytes
    if isinstance(source, CastSource):
        return 0
    return source.quantized.nbytes + (0 if source.values is None else source.values.nbytes)


_MAX_EXACT_SHARE = 8


def is_mostly_codes(tensors: Mapping[str, Tensor]) -> bool:
    """True if at most an eighth of the values' bytes belong to tensors that are held as values alone."""
    exact = coded = 0
    for source in as_decoded(tensors)._sources.values():
        if isinstance(source, Tensor):
            exact += source.nbytes
        elif isinstance(source, LatticeSource):
            coded += source.quantized.codes.numel() * source.dtype.itemsize
    return exact <= (exact + coded) // _MAX_EXACT_SHARE


def as_decoded(tensors: Mapping[str, Tensor]) -> DecodedTensors:
    """Return any tensors by name as `DecodedTensors`."""
    return tensors if isinstance(tensors, DecodedTensors) else DecodedTensors(tensors)


def tensor_layout(tensors: Mapping[str, Tensor], name: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a tensor, without decoding it."""
    source = tensors._sources[name] if isinstance(tensors, DecodedTensors) else tensors[name]
    if isinstance(source, LatticeSource):
        return source.quantized.codes.shape, source.dtype
    return source.shape if isinstance(source, Tensor) else tensor_layout(tensors, source.name)[0], source.dtype


def tensor_rows(tensors: Mapping[str, Tensor], name: str, rows: slice) -> Tensor:
    """Return some rows of a tensor, viewed as a matrix, without decoding others."""
    source = tensors._sources[name] if isinstance(tensors, DecodedTensors) else tensors[name]
    if isinstance(source, CastSource):
        return tensor_rows(tensors, source.name, rows).to(source.dtype)
    if isinstance(source, Tensor) or source.values is not None:
        return as_matrix(tensors[name])[rows]
    other = source.quantized.relative_to
    return source.quantized.dequantize_rows(rows, source.dtype, tensor_rows(tensors, other, rows) if other else None)


def all_tensor_rows(tensors: Mapping[str, Tensor], rows: Mapping[str, slice]) -> dict[str, Tensor]:
    """Return `tensor_rows` of tensors by name; those on lattices are decoded by one call of the native core."""
    out = dict[str, Tensor]()
    runs: dict[str, tuple[_native.LatticeRun, int]] = {}
    for name, part in rows.items():
        source = lattice_source(tensors, name)
        if source is not None and source.needs_only_codes and source.quantized.codes.numel():
            runs[name] = source.quantized.runs(part)
        else:
            out[name] = tensor_rows(tensors, name, part)
    sizes = [width * run[-1] for run, width in runs.values()]
    values = torch.empty(sum(sizes), dtype=torch.float32, device="cpu")
    _native.lattice_rows([run for run, _ in runs.values()], values)
    parts = zip(runs.items(), values.split(sizes), strict=True)
    return out | {name: part.view(-1, width) for (name, (_, width)), part in parts}


def lattice_source(tensors: Mapping[str, Tensor], name: str) -> LatticeSource | None:
    """Return the codes that a tensor's values are made from; None if it is held as values alone."""
    source = tensors._sources[name] if isinstance(tensors, DecodedTensors) else None
    return source if isinstance(source, LatticeSource) else None


def hashed_values(tensors: Mapping[str, Tensor], name: str) -> Tensor | _native.LatticeValues:
    """Return the values of a tensor for `coder.digest_arrays`, which decodes small ones on a lattice itself."""
    source = lattice_source(tensors, name)
    if source is not None and source.needs_only_codes and source.quantized.codes.numel() <= MAX_SAMPLED_VALUES:
        return source.quantized.native_values()
    return tensors[name]


def lattice_sources(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, LatticeSource]:
    """Return the codes that tensors are made from, by name; of those that are held as values alone, nothing."""
    sources = tensors._sources if isinstance(tensors, DecodedTensors) else {}
    return {name: source for name in names if isinstance(source := sources.get(name), LatticeSource)}


QuantizedTensor: TypeAlias = CodebookTensor | LatticeTensor
"""A quantized tensor: codes with the codebook or lattice that they index."""

MAX_SAMPLED_VALUES = 1 << 16  # Values of a weight that are held as they were before quantization, about


class RowSample(NamedTuple):
    """Some rows of a tensor, viewed as a matrix."""

    shape: tuple[int, ...]  # of the whole tensor
    rows: slice  # which rows
    values: Tensor  # of these rows; 2-d

    @classmethod
    def from_tensor(cls, tensor: Tensor, rows: slice | None = None) -> RowSample:
        """Copy rows of a tensor to host memory; None: every n-th, of about `MAX_SAMPLED_VALUES` values."""
        return cls.from_tensors({"": (tensor, rows)})[""]

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, tuple[Tensor, slice | None]]) -> dict[str, RowSample]:
        """Copy rows of many tensors at once, by name, as `from_tensor` does."""
        rows = {
            name: slice(0, None, max(1, tensor.numel() // MAX_SAMPLED_VALUES)) if rows is None else rows
            for name, (tensor, rows) in tensors.items()
        }
        values = copy_together({name: as_matrix(tensor)[rows[name]] for name, (tensor, _) in tensors.items()})
        return {name: cls(tuple(tensor.shape), rows[name], values[name]) for name, (tensor, _) in tensors.items()}


def to_host(tensors: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
    """Copy quantized tensors to host memory, by name; those that are there already are the same.

    Codes on lattices come from CUDA devices into pinned memory, all at once, and may arrive later, when this thread's
    streams there have got so far.
    """
    out = dict[str, QuantizedTensor]()
    for name, tensor in tensors.items():
        if tensor.codes.device.type == "cpu":
            out[name] = tensor
        elif isinstance(tensor, LatticeTensor) and tensor.codes.is_cuda:
            codes = empty(tuple(tensor.codes.shape), tensor.codes.dtype, pin=True)
            codes.copy_(tensor.codes, non_blocking=True)
            tensor.codes.record_stream(torch.cuda.current_stream(tensor.codes.device))
            out[name] = replace(tensor, codes=codes)
        else:
            out[name] = tensor.cpu()
    return out


@dataclass(frozen=True)
class Reference:
    """The parent checkpoint as a reader decodes it, never the original values."""

    # Decoded tensors by name; contiguous, on the CPU. What is on lattices may be held as codes, and decoded whenever it
    # is asked for: take rows or layouts where these are enough.
    tensors: Mapping[str, Tensor] = field(repr=False)
    # Codes and codebook or lattice of the tensors that are quantized, by name.
    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict, repr=False)
    # The values before quantization, by name, where they are still available: all of them or a sample of the rows; set
    # by writers only.
    originals: Mapping[str, Tensor] | Mapping[str, RowSample] = field(default_factory=dict, repr=False)
    # True if a delta can be made against this checkpoint; otherwise it only describes a reader's values.
    is_base: bool = True

    def shared_names(self, infos: Iterable[TensorInfo]) -> set[str]:
        """Return the names of those tensors that the parent has with the same shape and dtype."""
        return {
            info.name
            for info in infos
            if info.name in self.tensors
            and tensor_layout(self.tensors, info.name) == (info.shape, TORCH_DTYPES.get(info.dtype))
        }

    def has_like(self, name: str, shape: tuple[int, ...], dtype: object) -> bool:
        """True if there is a tensor of this name, shape and dtype."""
        return name in self.tensors and tensor_layout(self.tensors, name) == (shape, dtype)

    def get_like(self, name: str, shape: tuple[int, ...], dtype: object) -> Tensor | None:
        """Return the tensor of this name, or None if there is none of the same shape and dtype."""
        return self.tensors[name] if self.has_like(name, shape, dtype) else None

    def original_rows(self, name: str, shape: tuple[int, ...], rows: slice) -> Tensor | None:
        """Return some rows of a tensor before quantization; None if they are not available, or its shape is another."""
        originals = self.originals
        if name not in originals:
            return None
        if isinstance(originals, DecodedTensors):
            return tensor_rows(originals, name, rows) if tensor_layout(originals, name)[0] == shape else None
        original = originals[name]
        if isinstance(original, Tensor):
            return as_matrix(original)[rows] if tuple(original.shape) == shape else None
        return original.values if (original.shape, original.rows) == (shape, rows) else None

    def data_addresses(self) -> set[int]:
        """Return the addresses of all values that are held, as `Tensor.data_ptr` gives them."""
        originals = self.originals
        held = [*as_decoded(self.tensors).held_tensors().values()]
        if isinstance(originals, DecodedTensors):
            held += originals.held_tensors().values()
        else:
            held += (
                original.values if isinstance(original, RowSample) else original for original in originals.values()
            )
        return {tensor.data_ptr() for tensor in held}

    @property
    def codebook_tensors(self) -> dict[str, CodebookTensor]:
        """The quantized tensors that are codebook tensors, by name."""
        return {name: tensor for name, tensor in self.quantized.items() if isinstance(tensor, CodebookTensor)}

    def has_codes(self, name: str) -> bool:
        """True if a tensor's codes can be coding context; codes of differences say little about the next ones."""
        tensor = self.quantized.get(name)
        return isinstance(tensor, CodebookTensor) and not tensor.residual

    def subset(self, names: Iterable[str]) -> Reference:
        """Return the reference of these tensors alone; all of them must be present."""
        names = list(names)
        quantized = {name: self.quantized[name] for name in names if name in self.quantized}
        return Reference(as_decoded(self.tensors).subset(names), quantized)
