"""Codebook tensors: codes of a byte, and the values that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

RESERVED_CODES = 2  # Codes with a fixed meaning that may come before those of the centers: zero and exact values
MAX_CODES = 256  # Number of distinct codes: a code is a byte


@dataclass(frozen=True)
class CodebookTensor:
    """Codes, and the values they stand for.

    Codes below `first_code` have fixed meanings, so that they do not change with the number of centers:

    ========== ========================= ==========================
    first_code code 0                    code 1
    ========== ========================= ==========================
    2          zero (pruned)             the next value of `exact`
    1          the next value of `exact` center 0
    0          center 0                  center 1
    ========== ========================= ==========================
    """

    codes: Tensor = field(repr=False)  # uint8, contiguous, of the tensor's shape
    centers: Tensor = field(repr=False)  # float32, of shape (bins,), ascending and finite; at least one
    # float32 or bfloat16, 1-d: the values of the codes that stand for exact values, in row-major order.
    exact: Tensor = field(repr=False)
    first_code: int = RESERVED_CODES  # the code of the first center: 0, 1 or 2
    # True if centers and zeros are differences to the parent's values; exact values are never differences.
    residual: bool = False
    # Name of another tensor of the state, of the same shape, whose codes are the coding context; or "".
    context_name: str = ""

    @property
    def bins(self) -> int:
        return int(self.centers.numel())

    @property
    def num_codes(self) -> int:
        return self.first_code + self.bins

    @property
    def protected(self) -> Tensor:
        """Mask of the values that are stored in `exact`: bool, of the shape of `codes`."""
        if self.first_code == 0:
            return torch.zeros_like(self.codes, dtype=torch.bool)
        return self.codes == self.first_code - 1

    def cpu(self) -> CodebookTensor:
        return replace(self, codes=self.codes.cpu(), centers=self.centers.cpu(), exact=self.exact.cpu())

    def dequantize(self, dtype: torch.dtype, base: Tensor | None = None) -> Tensor:
        """Return the values that a reader gets; of the shape and on the device of `codes`.

        Args:
            dtype: of the result.
            base: the parent's values, of the same shape; needed if `residual`.
        """
        table = torch.zeros(self.num_codes, dtype=torch.float32, device=self.codes.device)
        table[self.first_code :] = self.centers.to(table.device)
        indices = self.codes.reshape(-1).to(torch.int32)
        if self.residual:
            assert base is not None
            differences = table.index_select(0, indices).reshape(self.codes.shape)
            out = _add_differences(base.to(table.device), differences, dtype)
        else:
            out = table.to(dtype).index_select(0, indices).reshape(self.codes.shape)
        if self.exact.numel():
            out[self.protected] = self.exact.to(device=out.device, dtype=dtype)
        return out


def _add_differences(base: Tensor, differences: Tensor, dtype: torch.dtype) -> Tensor:
    """Add in float32 and cast; keep the parent's value where the difference is zero or the sum is not finite.

    So unchanged values keep their bits (-0.0 + 0.0 would be 0.0), and no result depends on how a machine treats a nan.
    """
    sums = (base.to(torch.float32) + differences).to(dtype)
    changed = differences != 0
    if sums.numel() and not bool(
        torch.stack(sums.aminmax()).isfinite().all()
    ):  # one test of the extremes is much faster
        changed &= sums.isfinite()
    return torch.where(changed, sums, base.to(dtype))
