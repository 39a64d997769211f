"""What writer and reader both hold of the previous checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.lattice import LatticeTensor

QuantizedTensor: TypeAlias = CodebookTensor | LatticeTensor
"""What a quantizer left of a tensor, and what its values were made from."""


class FileTensors(dict[str, Tensor]):
    """The tensors of a file's earlier records by name.

    Attributes:
        names: their names, by ordinal; listing the keys for each record would take the square of their number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Those of the next record."""
        self.update(tensors)
        self.names.extend(tensors)


def names_by_ordinal(tensors: Mapping[str, Tensor]) -> Sequence[str]:
    """The names of earlier tensors, by ordinal."""
    return tensors.names if isinstance(tensors, FileTensors) else list(tensors)


@dataclass(frozen=True)
class Reference:
    """Decoded values of the parent checkpoint (law 3: never the originals).

    Attributes:
        tensors: by name; contiguous, on the CPU.
        quantized: of those that are quantized, what their values were made from.
        originals: a writer's alone: of those, the values before they were quantized, where it still has them.
        is_base: a writer's alone: whether a delta can be made against it; else it only tells what a reader has.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict, repr=False)
    originals: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    is_base: bool = True

    def get_like(self, name: str, shape: tuple[int, ...], dtype: object) -> Tensor | None:
        """The parent's tensor of this name, or None when it has none of the same shape and dtype."""
        tensor = self.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return None
        return tensor

    @property
    def codebook_tensors(self) -> dict[str, CodebookTensor]:
        """Those of the symbols that are codes of centers."""
        return {name: one for name, one in self.quantized.items() if isinstance(one, CodebookTensor)}

    def has_codes(self, name: str) -> bool:
        """Whether the parent's codes of a tensor can be context: those of differences tell little about the next."""
        held = self.quantized.get(name)
        return isinstance(held, CodebookTensor) and not held.residual

    def subset(self, names: Iterable[str]) -> Reference:
        """What it holds of these tensors, all of which it has."""
        names = list(names)
        symbols = {name: self.quantized[name] for name in names if name in self.quantized}
        return Reference({name: self.tensors[name] for name in names}, symbols)
