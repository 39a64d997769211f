"""Adaptive uniform quantization by a greedy search of the range, as the baseline CNR+ has it.

Check-N-Run shrinks the range from one end or the other, whichever costs less, and keeps the best; torch has the same
algorithm for rows of embedding tables as `torch.choose_qparams_optimized`. There the loss of a range is a pass over all
values. Here it is one over a histogram, a few thousand cells however large the tensor.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shrinkpoint.codec.quantize.histogram import Numbers, wide
from shrinkpoint.codec.quantize.nearest import check_bins
from shrinkpoint.codec.quantize.uniform import ends, grid, on_grid
from shrinkpoint.codec.symbols import Symbols
from shrinkpoint.errors import PolicyError

Wide: TypeAlias = npt.NDArray[np.float64]


def adaptive(
    x: Tensor, bins: int, values: Numbers, counts: Numbers, *, steps: int = 100, ratio: float = 0.5,
    whole: tuple[float, float] | None = None,
) -> Symbols:  # fmt: skip
    """The nearest point of a uniform grid over the range that `best_range` finds; values outside get its ends.

    Args:
        x: bfloat16, float16 or float32; finite; any shape and strides.
        bins: 1 to 256.
        values, counts: a histogram of `x`, as fine as the loss is to be judged; values ascending. What it leaves out,
            zeros for one, has no say in the range.
        steps, ratio: see `best_range`.
        whole: the least and the largest value of all; None: those of `x`.

    Raises:
        PolicyError: `bins`, `steps` or `ratio` out of range.
    """
    check_bins(bins, 0)
    low, high = best_range(values, counts, whole or ends(x), bins, steps=steps, ratio=ratio)
    return on_grid(x, grid(low, high, bins))


def best_range(
    values: Numbers, counts: Numbers, whole: tuple[float, float], bins: int, *, steps: int, ratio: float
) -> tuple[float, float]:
    """The range with the least squared error of those a greedy search meets.

    Step by step one end moves in by `width / steps`, the one after whose move the error is less, until the range has
    fallen to `1 - ratio` of its width. torch keeps the best range at which the error had a local minimum; this keeps
    the best of all that were met, which is never worse.

    Args:
        values, counts: a histogram.
        whole: where to start: the least and the largest value.
        bins: points of the grid.
        steps: into so many the width is cut (the paper's step bins: 10, 25, 50, 100).
        ratio: by how much the range may shrink at most (the paper's range: 0.1 to 0.5).

    Raises:
        PolicyError: `steps` below 1, or `ratio` not from 0 to 1.
    """
    if steps < 1 or not 0 <= ratio <= 1:
        found, expected = f"{steps} steps, ratio {ratio}", "at least one step and a ratio from 0 to 1"
        raise PolicyError("range search", found=found, expected=expected, do="take 100 steps and a ratio of 0.5")
    points, held = wide(values).numpy(), wide(counts).numpy()
    low, high = whole
    step, moves = high / steps - low / steps, round(steps * ratio)
    best, least = whole, _loss(points, held, low, high, bins)
    for _ in range(min(moves, steps - 1) if step > 0 else 0):
        left = _loss(points, held, low + step, high, bins)
        right = _loss(points, held, low, high - step, bins)
        low, high = (low + step, high) if left < right else (low, high - step)
        if min(left, right) < least:
            best, least = (low, high), min(left, right)
    return best


def _loss(values: Wide, counts: Wide, low: float, high: float, bins: int) -> float:
    """The squared error of all values at their nearest points of the grid."""
    step = (high - low) / max(1, bins - 1)
    if step > 0 and bins > 1:
        errors = np.clip(np.rint((values - low) / step), 0, bins - 1) * step + low - values
    else:
        errors = (low + high) / 2 - values
    return float(np.dot(counts, np.square(errors)))
