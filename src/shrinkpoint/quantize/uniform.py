"""Uniform quantization with a number of bits by entropy, as the baseline QD+ has it.

QD-Compressor gives every layer its own uniform quantizer, with more bits where the values hold more information; in the
evaluation of arXiv 2306.11800 the number of bins may change between checkpoints, and least and most are searched. The
exact rule from entropy to bits is not printed there; `variable_bins` says ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import MAX_CODES, CodebookTensor
from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.assign import assign, check_bins


def quantize_uniform(tensor: Tensor, bins: int) -> CodebookTensor:
    """The nearest point of a grid from the least to the largest value; the error is at most half a step.

    The step is `(largest - least) / (bins - 1)`. Both ends are kept exactly; a constant tensor is, whole, under code 0.
    One bin is the middle of the range. Without values the grid is zero.

    Args:
        tensor: bfloat16, float16 or float32; finite; any shape and strides.
        bins: 1 to 256.

    Raises:
        PolicyError: `bins` out of range.
    """
    check_bins(bins, 0)
    return quantize_to_grid(tensor, uniform_grid(*min_max(tensor), bins))


def min_max(tensor: Tensor) -> tuple[float, float]:
    """The least and the largest value; zeros where there is none."""
    if not tensor.numel():
        return 0.0, 0.0
    least, largest = torch.aminmax(tensor.detach())
    return float(least), float(largest)


def uniform_grid(low: float, high: float, bins: int) -> Tensor:
    """`bins` points from `low` to `high`, float32, on the CPU; their middle if only one."""
    if bins == 1:
        return torch.tensor([low / 2 + high / 2], dtype=torch.float32)
    points = torch.linspace(0, 1, bins, dtype=torch.float64)
    return (low * (1 - points) + high * points).float()  # never beyond an end, where high - low would overflow


def quantize_to_grid(tensor: Tensor, centers: Tensor) -> CodebookTensor:
    """The nearest center for every value, and no value apart."""
    return CodebookTensor(assign(tensor, centers, 0), centers, torch.empty(0, device=tensor.device), 0)


def histogram_entropy(tensor: Tensor, bins: int = MAX_CODES) -> float:
    """Bits per value of a histogram of `bins` cells of equal width, those at the ends half as wide."""
    return entropy_per_value(grid_histogram(tensor, min_max(tensor), bins)) if tensor.numel() else 0.0


def grid_histogram(tensor: Tensor, limits: tuple[float, float], bins: int = MAX_CODES) -> Tensor:
    """How many values are nearest to each point of a grid between two ends; int64."""
    codes = quantize_to_grid(tensor, uniform_grid(*limits, bins)).codes
    return torch.bincount(codes.reshape(-1), minlength=bins)


def entropy_per_value(counts: Tensor) -> float:
    """Bits per value of a histogram; 0 of an empty one."""
    counts = counts.double()
    shares = counts[counts > 0] / counts.sum()
    return max(0.0, -float((shares * shares.log2()).sum()))


def variable_bins(entropies: Sequence[float], min_bins: int, max_bins: int) -> list[int]:
    """How many bins each tensor gets, a power of two: the more, the more its values tell.

    Bits go linearly from those of `min_bins` at the lowest entropy to those of `max_bins` at the highest, and are
    rounded to
    whole ones, halves up. This rule is ours: the paper prints none. Where all entropies are equal, all get `max_bins`.

    Args:
        entropies: one of each tensor, in bits.
        least, most: powers of two, at most 256.

    Raises:
        PolicyError: `min_bins` and `max_bins` are not powers of two in this order.
    """
    if not 1 <= min_bins <= max_bins <= MAX_CODES or min_bins & (min_bins - 1) or max_bins & (max_bins - 1):
        expected = f"two powers of two in ascending order, at most {MAX_CODES}"
        raise PolicyError(
            "bins", found=f"least {min_bins}, most {max_bins}", expected=expected, do="take 8, 16, ... 256"
        )
    low, high = min(entropies, default=0.0), max(entropies, default=0.0)
    few, many = math.log2(min_bins), math.log2(max_bins)

    def of(one: float) -> int:
        place = (one - low) / (high - low) if high > low else 1.0
        return 1 << math.floor(few + (many - few) * place + 0.5)

    return [of(one) for one in entropies]
