"""What a run says, and what both sides hold besides the numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Run:
    """The keys of a run (docs/format.md, "Runs"), and the width and mantissa of its numbers."""

    tokens: str
    width: int
    mantissa: int = 0
    predictor: str = "none"
    companion: str = "none"
    fine: int = 0
    shift: int = 0
    sign: bool = True
    bias: int = 0
    top: int = 0
    parameters: tuple[float, ...] = ()
    chunk: int = 262144

    def contexts(self, known: Known) -> int:
        if self.tokens == "planes":
            return self.width // 8
        if self.tokens == "codes":
            return (self.largest(known) + 1) * self.pushes(known)
        return 50 if self.tokens == "level" else 512 if self.mantissa else 1

    def largest(self, known: Known) -> int:
        """Of codes: the parent's largest that contexts tell apart."""
        if self.predictor == "none":
            return 0
        return min(self.top or 255, 63 if known.moments else 255)

    def pushes(self, known: Known) -> int:
        """Of codes: contexts that the moments make of one."""
        if not known.moments:
            return 1
        return 32 if self.largest(known) < 16 else 16 if self.largest(known) < 32 else 8


@dataclass(frozen=True)
class Known:
    """Companions of as many numbers, or None; `factors` are the predicted levels, None where dead."""

    base: list[int] | None = None
    moment1: Floats | None = None
    moment2: Floats | None = None
    moment1_base: Floats | None = None
    hint: list[int] | None = None
    levels: list[int | None] | None = field(default=None)

    @property
    def moments(self) -> bool:
        return self.moment1 is not None and self.moment2 is not None
