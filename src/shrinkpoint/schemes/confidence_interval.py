"""Confidence intervals of the mean difference between two measurements of the same examples."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STUDENT_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t at 0.975, for 1 to 9 degrees of freedom."""
_NORMAL_QUANTILE = 1.959964


def paired_mean_interval(reference: Tensor, trial: Tensor) -> tuple[float, float]:
    """The 95% confidence interval of the mean of `trial - reference`, over the examples of both.

    It is Student's interval of the mean difference. If all values are 0 or 1 (right or wrong), it is that of two paired
    proportions with half a count added to each cell (Agresti and Min 2005), which is not empty if no example changed.

    Args:
        reference, trial: float64 [n], n >= 2, in the same order.

    Returns:
        The ends; infinite if a difference is not finite.
    """
    difference = trial - reference
    count = difference.numel()
    if not bool(difference.isfinite().all()):
        return -math.inf, math.inf
    if bool(torch.stack([reference, trial]).square().eq(torch.stack([reference, trial])).all()):
        up, down = (float((difference == sign).sum()) + 0.5 for sign in (1, -1))
        mean = (up - down) / (count + 2)
        error = _NORMAL_QUANTILE * math.sqrt(up + down - (up - down) ** 2 / (count + 2)) / (count + 2)
        return mean - error, mean + error
    mean = float(difference.mean())
    error = student_t_quantile(count - 1) * float(difference.std()) / math.sqrt(count)
    return mean - error, mean + error


def student_t_quantile(degrees_of_freedom: int) -> float:
    """The quantile of Student's t at 0.975, to a thousandth; `degrees_of_freedom` from 1."""
    if degrees_of_freedom <= len(_STUDENT_T_QUANTILES):
        return _STUDENT_T_QUANTILES[degrees_of_freedom - 1]
    z, n = _NORMAL_QUANTILE, float(degrees_of_freedom)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n) + third
