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

from shrinkpoint.codec.quantize.nearest import assign, check_bins
from shrinkpoint.codec.symbols import MOST_CODES, Symbols
from shrinkpoint.errors import PolicyError


def uniform(x: Tensor, bins: int) -> Symbols:
    """The nearest point of a grid from the least to the largest value; the error is at most half a step.

    The step is `(largest - least) / (bins - 1)`. Both ends are kept exactly; a constant tensor is, whole, under code 0.
    One bin is the middle of the range. Without values the grid is zero.

    Args:
        x: bfloat16, float16 or float32; finite; any shape and strides.
        bins: 1 to 256.

    Raises:
        PolicyError: `bins` out of range.
    """
    check_bins(bins, 0)
    return on_grid(x, grid(*ends(x), bins))


def ends(x: Tensor) -> tuple[float, float]:
    """The least and the largest value; zeros where there is none."""
    if not x.numel():
        return 0.0, 0.0
    least, largest = torch.aminmax(x.detach())
    return float(least), float(largest)


def grid(low: float, high: float, bins: int) -> Tensor:
    """`bins` points from `low` to `high`, float32, on the CPU; their middle if only one."""
    if bins == 1:
        return torch.tensor([low / 2 + high / 2], dtype=torch.float32)
    points = torch.linspace(0, 1, bins, dtype=torch.float64)
    return (low * (1 - points) + high * points).float()  # never beyond an end, where high - low would overflow


def on_grid(x: Tensor, centers: Tensor) -> Symbols:
    """The nearest center for every value, and no value apart."""
    return Symbols(assign(x, centers, 0), centers, torch.empty(0, device=x.device), 0)


def entropy(x: Tensor, bins: int = MOST_CODES) -> float:
    """Bits per value of a histogram of `bins` cells of equal width, those at the ends half as wide."""
    return entropy_of(histogram(x, ends(x), bins)) if x.numel() else 0.0


def histogram(x: Tensor, whole: tuple[float, float], bins: int = MOST_CODES) -> Tensor:
    """How many values are nearest to each point of a grid between two ends; int64."""
    codes = on_grid(x, grid(*whole, bins)).codes
    return torch.bincount(codes.reshape(-1), minlength=bins)


def entropy_of(counts: Tensor) -> float:
    """Bits per value of a histogram; 0 of an empty one."""
    counts = counts.double()
    shares = counts[counts > 0] / counts.sum()
    return max(0.0, -float((shares * shares.log2()).sum()))


def variable_bins(entropies: Sequence[float], least: int, most: int) -> list[int]:
    """How many bins each tensor gets, a power of two: the more, the more its values tell.

    Bits go linearly from those of `least` at the lowest entropy to those of `most` at the highest, and are rounded to
    whole ones, halves up. This rule is ours: the paper prints none. Where all entropies are equal, all get `most`.

    Args:
        entropies: one of each tensor, in bits.
        least, most: powers of two, at most 256.

    Raises:
        PolicyError: `least` and `most` are not powers of two in this order.
    """
    if not 1 <= least <= most <= MOST_CODES or least & (least - 1) or most & (most - 1):
        expected = f"two powers of two in ascending order, at most {MOST_CODES}"
        raise PolicyError("bins", found=f"least {least}, most {most}", expected=expected, do="take 8, 16, ... 256")
    low, high = min(entropies, default=0.0), max(entropies, default=0.0)
    few, many = math.log2(least), math.log2(most)

    def of(one: float) -> int:
        place = (one - low) / (high - low) if high > low else 1.0
        return 1 << math.floor(few + (many - few) * place + 0.5)

    return [of(one) for one in entropies]
