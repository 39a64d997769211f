"""What writer and reader both hold of the previous checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """Decoded values of the parent checkpoint (law 3: never the originals).

    Attributes:
        tensors: by name; contiguous, on the CPU.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)

    def matching(self, name: str, shape: tuple[int, ...], dtype: object) -> Tensor | None:
        """The parent's tensor of this name, or None when it has none of the same shape and dtype."""
        tensor = self.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return None
        return tensor
