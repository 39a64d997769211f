"""How much of the weights' progress between two checkpoints the later one holds.

Right after a restore the weights lie exactly on the values a quantizer chose. A save that follows soon may find most of
them still nearest to the same values, and write down that nothing has changed: restored again and again, training then
goes nowhere although every single checkpoint is within its threshold (docs/schemes.md measures it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ENOUGH = 0.7
"""Below this, a checkpoint is worth a warning."""


@torch.no_grad()
def retention(
    before: Mapping[str, Tensor], before_kept: Mapping[str, Tensor], now: Mapping[str, Tensor],
    now_kept: Mapping[str, Tensor],
) -> float | None:  # fmt: skip
    """`<w'_t - w'_(t-1), w_t - w_(t-1)> / |w_t - w_(t-1)|^2` over all tensors that were quantized at both times.

    1 where all of the progress is kept, 0 where nothing is; above 1 where a checkpoint catches up with what the one
    before had missed.

    Where weights have gone more than ten times as far as they are large (a spike that was rolled back), the step counts
    as one from zero: what matters is how much of the present weights is there.

    Args:
        before, now: the weights w as they were in training, by name.
        before_kept, now_kept: the same as the checkpoints have them (w').

    Returns:
        None where nothing can be compared or nothing has moved.
    """
    kept = moved = 0.0
    for name, after in now.items():
        if name not in before or before[name].shape != after.shape:
            continue
        weight = after.to("cpu", torch.float32)
        step = weight - before[name].to(torch.float32)
        written = now_kept[name].to("cpu", torch.float32) - before_kept[name].to(torch.float32)
        if _dot(step, step) > 100 * _dot(weight, weight) > 0:
            step, written = weight, now_kept[name].to("cpu", torch.float32)
        kept += _dot(written, step)
        moved += _dot(step, step)
    return kept / moved if moved > 0 and math.isfinite(kept) and math.isfinite(moved) else None


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))
