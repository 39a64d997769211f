"""What writer and reader both hold of the previous checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from shrinkpoint.codec.lattice import Points
from shrinkpoint.codec.symbols import Symbols

Origin: TypeAlias = Symbols | Points
"""What a quantizer left of a tensor, and what its values were made from."""


class Earlier(dict[str, Tensor]):
    """The tensors of a file's earlier records by name.

    Attributes:
        order: their names, by ordinal; listing the keys for each record would take the square of their number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Those of the next record."""
        self.update(tensors)
        self.order.extend(tensors)


def in_order(tensors: Mapping[str, Tensor]) -> Sequence[str]:
    """The names of earlier tensors, by ordinal."""
    return tensors.order if isinstance(tensors, Earlier) else list(tensors)


@dataclass(frozen=True)
class Reference:
    """Decoded values of the parent checkpoint (law 3: never the originals).

    Attributes:
        tensors: by name; contiguous, on the CPU.
        symbols: of those that are quantized, what their values were made from.
        originals: a writer's alone: of those, the values before they were quantized, where it still has them.
        base: a writer's alone: whether a delta can be made against it; else it only tells what a reader has.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    symbols: Mapping[str, Origin] = field(default_factory=dict, repr=False)
    originals: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    base: bool = True

    def matching(self, name: str, shape: tuple[int, ...], dtype: object) -> Tensor | None:
        """The parent's tensor of this name, or None when it has none of the same shape and dtype."""
        tensor = self.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return None
        return tensor

    @property
    def codebooks(self) -> dict[str, Symbols]:
        """Those of the symbols that are codes of centers."""
        return {name: one for name, one in self.symbols.items() if isinstance(one, Symbols)}

    def has_codes(self, name: str) -> bool:
        """Whether the parent's codes of a tensor can be context: those of differences tell little about the next."""
        held = self.symbols.get(name)
        return isinstance(held, Symbols) and not held.residual

    def of(self, names: Iterable[str]) -> Reference:
        """What it holds of these tensors, all of which it has."""
        names = list(names)
        symbols = {name: self.symbols[name] for name in names if name in self.symbols}
        return Reference({name: self.tensors[name] for name in names}, symbols)
