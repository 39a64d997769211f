"""One tensor as a quantizer left it: small integers, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

SPECIALS = 2
"""Codes with a meaning of their own that a quantizer may put before those of its centers."""
MOST_CODES = 256
"""A code is a byte."""


@dataclass(frozen=True)
class Symbols:
    """Codes, and the values they stand for.

    Codes below `first` have fixed meanings, so that they stay put when the number of centers changes:

    ========== ========================= ==========================
    `first`    code 0                    code 1
    ========== ========================= ==========================
    2          zero (pruned)             the next value of `exact`
    1          the next value of `exact` center 0
    0          center 0                  center 1
    ========== ========================= ==========================

    Attributes:
        codes: uint8, contiguous, of the tensor's shape.
        centers: float32, of shape (bins,), ascending and finite; at least one.
        exact: float32 or bfloat16, 1-d: the values of the codes that say so, in row-major order.
        first: the code of the first center.
    """

    codes: Tensor = field(repr=False)
    centers: Tensor = field(repr=False)
    exact: Tensor = field(repr=False)
    first: int = SPECIALS

    @property
    def bins(self) -> int:
        return int(self.centers.numel())

    @property
    def used(self) -> int:
        """How many codes there may be."""
        return self.first + self.bins

    @property
    def protected(self) -> Tensor:
        """Which values are stored in `exact`: bool, of the shape of `codes`."""
        if self.first == 0:
            return torch.zeros_like(self.codes, dtype=torch.bool)
        return self.codes == self.first - 1

    def cpu(self) -> Symbols:
        """The same, where a store holds them."""
        return Symbols(self.codes.cpu(), self.centers.cpu(), self.exact.cpu(), self.first)

    def values(self, dtype: torch.dtype) -> Tensor:
        """What a reader gets; of the shape of `codes`, on their device."""
        table = torch.zeros(self.used, dtype=torch.float32, device=self.codes.device)
        table[self.first :] = self.centers.to(table.device)
        flat = table.to(dtype).index_select(0, self.codes.reshape(-1).to(torch.int32))
        out = flat.reshape(self.codes.shape)
        if self.exact.numel():
            out[self.protected] = self.exact.to(device=out.device, dtype=dtype)
        return out
