"""The decoded parent checkpoint, which writer and reader both have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.decoded_tensors import (
    DecodedTensors,
    LatticeSource,
    as_decoded,
    lattice_source,
    tensor_layout,
    tensor_rows,
)
from shrinkpoint.codec.lattice import LatticeTensor, as_matrix
from shrinkpoint.tensors.dtypes import copy_to_host, empty

QuantizedTensor: TypeAlias = CodebookTensor | LatticeTensor
"""A quantized tensor: codes with the codebook or lattice that they index."""

MAX_SAMPLED_VALUES = 1 << 16
"""Values of a weight that are held as they were before quantization, about."""


class RowSample(NamedTuple):
    """Some rows of a tensor, viewed as a matrix.

    Attributes:
        shape: of the whole tensor.
        rows: which rows.
        values: of these rows; 2-d.
    """

    shape: tuple[int, ...]
    rows: slice
    values: Tensor

    @classmethod
    def from_tensor(cls, tensor: Tensor, rows: slice | None = None) -> RowSample:
        """Copy rows of a tensor to host memory; None: every n-th, of about `MAX_SAMPLED_VALUES` values."""
        rows = slice(0, None, max(1, tensor.numel() // MAX_SAMPLED_VALUES)) if rows is None else rows
        return cls(tuple(tensor.shape), rows, copy_to_host(as_matrix(tensor)[rows]))


def names_by_ordinal(tensors: Mapping[str, Tensor]) -> Sequence[str]:
    """Return the names of the file's earlier tensors in order, indexed by ordinal."""
    return tensors.names if isinstance(tensors, DecodedTensors) else list(tensors)


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
    """The parent checkpoint as a reader decodes it, never the original values.

    Attributes:
        tensors: decoded tensors by name; contiguous, on the CPU. What is on lattices may be held as codes, and decoded
            whenever it is asked for: take rows or layouts where these are enough.
        quantized: codes and codebook or lattice of the tensors that are quantized, by name.
        originals: the values before quantization, by name, where they are still available: all of them or a sample of
            the rows; set by writers only.
        is_base: whether a delta can be made against this checkpoint; otherwise it only describes a reader's values.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict, repr=False)
    originals: Mapping[str, Tensor] | Mapping[str, RowSample] = field(default_factory=dict, repr=False)
    is_base: bool = True

    def has_like(self, name: str, shape: tuple[int, ...], dtype: object) -> bool:
        """Whether there is a tensor of this name, shape and dtype."""
        return name in self.tensors and tensor_layout(self.tensors, name) == (shape, dtype)

    def get_like(self, name: str, shape: tuple[int, ...], dtype: object) -> Tensor | None:
        """Return the tensor of this name, or None if there is none of the same shape and dtype."""
        return self.tensors[name] if self.has_like(name, shape, dtype) else None

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows of a tensor, viewed as a matrix; only these are decoded."""
        return tensor_rows(self.tensors, name, rows)

    def original_rows(self, name: str, shape: tuple[int, ...], rows: slice) -> Tensor | None:
        """Return some rows of a tensor before quantization; None if they are not available, or its shape is another."""
        originals = self.originals
        if name not in originals:
            return None
        if isinstance(originals, DecodedTensors):
            return originals.rows(name, rows) if originals.layout(name)[0] == shape else None
        original = originals[name]
        if isinstance(original, Tensor):
            return as_matrix(original)[rows] if tuple(original.shape) == shape else None
        return original.values if (original.shape, original.rows) == (shape, rows) else None

    def lattice_source(self, name: str) -> LatticeSource | None:
        """Return the codes that a tensor's values are made from; None if there are none."""
        return lattice_source(self.tensors, name)

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
        """Whether a tensor's codes can be coding context; codes of differences say little about the next ones."""
        tensor = self.quantized.get(name)
        return isinstance(tensor, CodebookTensor) and not tensor.residual

    def subset(self, names: Iterable[str]) -> Reference:
        """Return the reference of these tensors alone; all of them must be present."""
        names = list(names)
        quantized = {name: self.quantized[name] for name in names if name in self.quantized}
        return Reference(as_decoded(self.tensors).subset(names), quantized)
