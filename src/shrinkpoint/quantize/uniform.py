"""Uniform quantization whose number of bins follows the entropy, as in the baseline QD+.

QD-Compressor gives every layer its own uniform quantizer, with more bits where the values hold more information. In the
evaluation of arXiv 2306.11800 the number of bins may change between checkpoints, and its minimum and maximum are
searched. The rule from entropy to bits is not printed there; `variable_bins` defines ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import MAX_CODES, CodebookTensor
from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.assign import assign, check_bins
from shrinkpoint.quantize.entropy import entropy_per_value


def quantize_uniform(tensor: Tensor, bins: int) -> CodebookTensor:
    """Quantize to the nearest point of a uniform grid from minimum to maximum; the error is at most half a step.

    The step is `(maximum - minimum) / (bins - 1)`. Minimum and maximum are exact; all values of a constant tensor get
    code 0. A single bin is the middle of the range. Without values the grid is zero.

    Args:
        tensor: bfloat16, float16 or float32; finite; any shape and strides.
        bins: 1 to 256.

    Raises:
        PolicyError: `bins` out of range.
    """
    check_bins(bins, 0)
    return quantize_to_grid(tensor, uniform_grid(*min_max(tensor), bins))


def min_max(tensor: Tensor) -> tuple[float, float]:
    """Return the minimum and the maximum; zeros for an empty tensor."""
    if not tensor.numel():
        return 0.0, 0.0
    low, high = torch.aminmax(tensor.detach())
    return float(low), float(high)


def uniform_grid(low: float, high: float, bins: int) -> Tensor:
    """Return `bins` equidistant points from `low` to `high`: float32, on the CPU; the middle if there is only one."""
    if bins == 1:
        return torch.tensor([low / 2 + high / 2], dtype=torch.float32)
    points = torch.linspace(0, 1, bins, dtype=torch.float64)
    return (low * (1 - points) + high * points).float()  # no overflow, unlike high - low


def quantize_to_grid(tensor: Tensor, centers: Tensor) -> CodebookTensor:
    """Quantize every value to its nearest center, without zeros or exact values."""
    return CodebookTensor(assign(tensor, centers, 0), centers, torch.empty(0, device=tensor.device), 0)


def histogram_entropy(tensor: Tensor, bins: int = MAX_CODES) -> float:
    """Return the bits per value under a histogram of `bins` equal cells; those at the ends are half as wide."""
    return entropy_per_value(grid_histogram(tensor, min_max(tensor), bins)) if tensor.numel() else 0.0


def grid_histogram(tensor: Tensor, limits: tuple[float, float], bins: int = MAX_CODES) -> Tensor:
    """Count the values nearest to each of `bins` points of a uniform grid between two limits; int64."""
    codes = quantize_to_grid(tensor, uniform_grid(*limits, bins)).codes
    return torch.bincount(codes.reshape(-1), minlength=bins)


def variable_bins(entropies: Sequence[float], min_bins: int, max_bins: int) -> list[int]:
    """Return the number of bins of each tensor, a power of two that grows with its entropy.

    Bits are interpolated from log2 of `min_bins` at the lowest entropy to log2 of `max_bins` at the highest, and
    rounded, halves up. This rule is ours: the paper prints none. If all entropies are equal, all get `max_bins`.

    Args:
        entropies: bits per value of each tensor.
        min_bins, max_bins: powers of two, at most 256.

    Raises:
        PolicyError: `min_bins` and `max_bins` are not powers of two in this order.
    """
    if not 1 <= min_bins <= max_bins <= MAX_CODES or min_bins & (min_bins - 1) or max_bins & (max_bins - 1):
        expected = f"two powers of two in ascending order, at most {MAX_CODES}"
        raise PolicyError(
            "bins", found=f"at least {min_bins}, at most {max_bins}", expected=expected, do="take 8, 16, ... 256"
        )
    low, high = min(entropies, default=0.0), max(entropies, default=0.0)
    min_bits, max_bits = math.log2(min_bins), math.log2(max_bins)

    def num_bins(entropy: float) -> int:
        fraction = (entropy - low) / (high - low) if high > low else 1.0
        return 1 << math.floor(min_bits + (max_bits - min_bits) * fraction + 0.5)

    return [num_bins(entropy) for entropy in entropies]
