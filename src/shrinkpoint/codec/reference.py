"""The decoded parent checkpoint, which writer and reader both have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.lattice import LatticeTensor

QuantizedTensor: TypeAlias = CodebookTensor | LatticeTensor
"""A quantized tensor: codes with the codebook or lattice that they index."""


class FileTensors(dict[str, Tensor]):
    """The tensors of a file's earlier records by name.

    Attributes:
        names: their names in order, indexed by ordinal; listing the keys for each record would take quadratic time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors of the next record."""
        self.update(tensors)
        self.names.extend(tensors)


def names_by_ordinal(tensors: Mapping[str, Tensor]) -> Sequence[str]:
    """Return the names of the file's earlier tensors in order, indexed by ordinal."""
    return tensors.names if isinstance(tensors, FileTensors) else list(tensors)


@dataclass(frozen=True)
class Reference:
    """The parent checkpoint as a reader decodes it, never the original values.

    Attributes:
        tensors: decoded tensors by name; contiguous, on the CPU.
        quantized: codes and codebook or lattice of the tensors that are quantized, by name.
        originals: the values before quantization, by name, where they are still available; set by writers only.
        is_base: whether a delta can be made against this checkpoint; otherwise it only describes a reader's values.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict, repr=False)
    originals: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    is_base: bool = True

    def get_like(self, name: str, shape: tuple[int, ...], dtype: object) -> Tensor | None:
        """Return the tensor of this name, or None if there is none of the same shape and dtype."""
        tensor = self.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return None
        return tensor

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
        return Reference({name: self.tensors[name] for name in names}, quantized)
