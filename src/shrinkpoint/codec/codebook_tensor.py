"""One tensor as a quantizer left it: small integers, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

RESERVED_CODES = 2
"""Codes with a meaning of their own that a quantizer may put before those of its centers."""
MAX_CODES = 256
"""A code is a byte."""


@dataclass(frozen=True)
class CodebookTensor:
    """Codes, and the values they stand for.

    Codes below `first_code` have fixed meanings, so that they stay put when the number of centers changes:

    ========== ========================= ==========================
    `first_code`    code 0                    code 1
    ========== ========================= ==========================
    2          zero (pruned)             the next value of `exact`
    1          the next value of `exact` center 0
    0          center 0                  center 1
    ========== ========================= ==========================

    Attributes:
        codes: uint8, contiguous, of the tensor's shape.
        centers: float32, of shape (bins,), ascending and finite; at least one.
        exact: float32 or bfloat16, 1-d: the values of the codes that say so, in row-major order.
        first_code: the code of the first center.
        residual: centers and zeros are differences to the parent's value in the same place; exact values stay values.
        context_name: name of another tensor of the state, of the same shape, whose codes are the context of these.
    """

    codes: Tensor = field(repr=False)
    centers: Tensor = field(repr=False)
    exact: Tensor = field(repr=False)
    first_code: int = RESERVED_CODES
    residual: bool = False
    context_name: str = ""

    @property
    def bins(self) -> int:
        return int(self.centers.numel())

    @property
    def num_codes(self) -> int:
        """How many codes there may be."""
        return self.first_code + self.bins

    @property
    def protected(self) -> Tensor:
        """Which values are stored in `exact`: bool, of the shape of `codes`."""
        if self.first_code == 0:
            return torch.zeros_like(self.codes, dtype=torch.bool)
        return self.codes == self.first_code - 1

    def cpu(self) -> CodebookTensor:
        """The same, where a store holds them."""
        return replace(self, codes=self.codes.cpu(), centers=self.centers.cpu(), exact=self.exact.cpu())

    def dequantize(self, dtype: torch.dtype, base: Tensor | None = None) -> Tensor:
        """What a reader gets; of the shape of `codes`, on their device.

        Args:
            base: the parent's values, where these are differences to them.
        """
        table = torch.zeros(self.num_codes, dtype=torch.float32, device=self.codes.device)
        table[self.first_code :] = self.centers.to(table.device)
        places = self.codes.reshape(-1).to(torch.int32)
        if self.residual:
            assert base is not None
            differences = table.index_select(0, places).reshape(self.codes.shape)
            out = _add_differences(base.to(table.device), differences, dtype)
        else:
            out = table.to(dtype).index_select(0, places).reshape(self.codes.shape)
        if self.exact.numel():
            out[self.protected] = self.exact.to(device=out.device, dtype=dtype)
        return out


def _add_differences(base: Tensor, differences: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums in float32, then the dtype; the parent's value itself where nothing is added or no finite value comes out.

    So what does not move keeps its bits (-0.0 + 0.0 would be 0.0), and no result depends on how a machine treats a nan.
    """
    sums = (base.to(torch.float32) + differences).to(dtype)
    moved = differences != 0
    if sums.numel() and not bool(torch.stack(sums.aminmax()).isfinite().all()):  # of all at once: far the faster way
        moved &= sums.isfinite()
    return torch.where(moved, sums, base.to(dtype))
