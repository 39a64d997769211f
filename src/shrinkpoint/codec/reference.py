"""What writer and reader both hold of the previous checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shrinkpoint.codec.symbols import Symbols


@dataclass(frozen=True)
class Reference:
    """Decoded values of the parent checkpoint (law 3: never the originals).

    Attributes:
        tensors: by name; contiguous, on the CPU.
        symbols: of those that are quantized, what their values were made from.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    symbols: Mapping[str, Symbols] = field(default_factory=dict, repr=False)

    def matching(self, name: str, shape: tuple[int, ...], dtype: object) -> Tensor | None:
        """The parent's tensor of this name, or None when it has none of the same shape and dtype."""
        tensor = self.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return None
        return tensor

    def has_codes(self, name: str) -> bool:
        """Whether the parent's codes of a tensor can be context: those of differences tell little about the next."""
        return name in self.symbols and not self.symbols[name].residual

    def of(self, names: Iterable[str]) -> Reference:
        """What it holds of these tensors, all of which it has."""
        names = list(names)
        symbols = {name: self.symbols[name] for name in names if name in self.symbols}
        return Reference({name: self.tensors[name] for name in names}, symbols)
