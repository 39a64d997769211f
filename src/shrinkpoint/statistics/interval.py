"""How far a mean of differences can be trusted, from the differences themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t at .975, for 1 to 9 degrees of freedom."""
_NORMAL = 1.959964


def paired(before: Tensor, after: Tensor) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of `after - before`, over the examples both are of.

    Student's interval of the mean difference. Where all values are 0 or 1 (right or wrong), it is that of two paired
    proportions with half a count added to each cell (Agresti and Min 2005): then no example that changed is no proof.

    Args:
        before, after: float64 [n], n >= 2, in the same order.

    Returns:
        The ends; infinite where a difference is not finite.
    """
    difference = after - before
    count = difference.numel()
    if not bool(difference.isfinite().all()):
        return -math.inf, math.inf
    if bool(torch.stack([before, after]).square().eq(torch.stack([before, after])).all()):
        up, down = (float((difference == sign).sum()) + 0.5 for sign in (1, -1))
        mean = (up - down) / (count + 2)
        error = _NORMAL * math.sqrt(up + down - (up - down) ** 2 / (count + 2)) / (count + 2)
        return mean - error, mean + error
    mean = float(difference.mean())
    error = student(count - 1) * float(difference.std()) / math.sqrt(count)
    return mean - error, mean + error


def student(degrees: int) -> float:
    """The quantile of Student's t at .975, to a thousandth; `degrees` from 1."""
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    z, n = _NORMAL, float(degrees)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n) + third
