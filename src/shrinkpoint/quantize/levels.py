"""Quantizes to levels that follow from a range: a uniform grid, or geometric levels for moments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES, CodebookTensor
from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.codebook import assign, check_bins


def min_max(tensor: Tensor) -> tuple[float, float]:
    """Return the minimum and the maximum; zeros for an empty tensor."""
    if not tensor.numel():
        return 0.0, 0.0
    low, high = torch.aminmax(tensor.detach())
    return float(low), float(high)


def uniform_grid(low: float, high: float, bins: int) -> Tensor:
    """Return `bins` equidistant points from `low` to `high`: float32, on the CPU; the middle if there is only one.

    Both ends are exact. A constant range has equal points.

    Raises:
        PolicyError: `bins` is not from 1 to 256.
    """
    check_bins(bins, 0)
    if bins == 1:
        return torch.tensor([low / 2 + high / 2], dtype=torch.float32)
    points = torch.linspace(0, 1, bins, dtype=torch.float64)
    return (low * (1 - points) + high * points).float()  # no overflow, unlike high - low


def quantize_to_grid(tensor: Tensor, centers: Tensor) -> CodebookTensor:
    """Quantize every value to its nearest center, without zeros or exact values.

    On a uniform grid the error is at most half a step.

    Args:
        tensor: bfloat16, float16 or float32; finite; any shape and strides.
        centers: as of `uniform_grid`.

    Raises:
        PolicyError: there is no center, or there are more than 256.
    """
    return CodebookTensor(assign(tensor, centers, 0), centers, tensor.new_empty(0, dtype=torch.float32), 0)


def grid_histogram(tensor: Tensor, limits: tuple[float, float], bins: int = MAX_CODES) -> Tensor:
    """Count the values nearest to each of `bins` points of a uniform grid between two limits; int64."""
    codes = quantize_to_grid(tensor, uniform_grid(*limits, bins)).codes
    return torch.bincount(codes.reshape(-1), minlength=bins)


def variable_bins(entropies: Sequence[float], min_bins: int, max_bins: int) -> list[int]:
    """Return the number of bins of each tensor, a power of two that grows with its entropy, as in QD-Compressor.

    Bits are interpolated from log2 of `min_bins` at the lowest entropy to log2 of `max_bins` at the highest, and
    rounded, halves up. This rule is ours: arXiv 2306.11800, where the two are searched, prints none. If all
    entropies are equal, all get `max_bins`.

    Args:
        entropies: bits per value of each tensor.
        min_bins, max_bins: powers of two, at most 256.

    Raises:
        PolicyError: `min_bins` and `max_bins` are not powers of two in this order.
    """
    if not 1 <= min_bins <= max_bins <= MAX_CODES or min_bins & (min_bins - 1) or max_bins & (max_bins - 1):
        found, expected = (
            f"at least {min_bins}, at most {max_bins}",
            f"two powers of two in ascending order, at most {MAX_CODES}",
        )
        raise PolicyError("bins", found=found, expected=expected, do="pass two of 8, 16, ... 256")
    low, high = min(entropies, default=0.0), max(entropies, default=0.0)
    min_bits, max_bits = math.log2(min_bins), math.log2(max_bins)
    fractions = [(entropy - low) / (high - low) if high > low else 1.0 for entropy in entropies]
    return [1 << math.floor(min_bits + (max_bits - min_bits) * fraction + 0.5) for fraction in fractions]


MIN_LEVEL = 1e-30  # The smallest level
MAX_SHARE_BELOW = 1e-3  # Largest share of the nonzero values that may lie below the lowest level
CELL_SHIFT = 15  # Low bits of a float32 that are dropped when the lowest level is searched; it is exact to 1/256


def quantize_log(
    tensor: Tensor,
    bins: int = 254,
    *,
    signed: bool,
    share: float = MAX_SHARE_BELOW,
    limits: tuple[float, float] | None = None,
) -> CodebookTensor:
    """Quantize to the nearest of levels with a constant ratio `r` of neighbours; zero stays zero.

    Made for moments, whose magnitudes span many octaves, and whose second ones must not become zero: Adam's next step
    would be huge.

    Levels range from a floor to the largest magnitude. The floor is the smallest nonzero magnitude, at least 1e-30, or
    a higher one below which at most `share` of the values lie, so that few tiny values do not stretch the levels. Then

    - from the floor upwards the error is at most `(r - 1) / (r + 1)` of the value;
    - below the floor: unsigned values become the floor, so only zero becomes zero, and Adam's step gets smaller, never
      larger. Signed values become the floor with their sign, or zero up to half of it.

    Args:
        tensor: bfloat16, float16 or float32; finite; any shape and strides.
        bins: number of levels; if signed, half of them, rounded down, for each sign.
        signed: True if there may be negative values.
        share: largest share of the nonzero values below the lowest level; 0 keeps the whole range.
        limits: the lowest and the highest level; None: computed by `log_range` from the tensor.

    Raises:
        PolicyError: `bins` out of range, `share` not from 0 to 1, or a negative value where `signed` is false.
    """
    check_bins(bins, RESERVED_CODES)
    if signed and bins < 2:
        raise PolicyError("bins", found=f"{bins}", expected="at least one for each sign", do="pass 2 or more")
    if not 0 <= share < 1:
        raise PolicyError("share", found=f"{share}", expected="0 or more, below 1", do="pass 0.001, the default")
    flat = tensor.detach().float()
    if not signed and bool((flat < 0).any()):
        expected = "no negative value with signed=False"
        raise PolicyError("tensor", found="a negative value", expected=expected, do="pass signed=True")
    magnitudes = flat.abs()
    low, high = limits or log_range(magnitudes, share)
    steps = log_levels(low, high, bins // 2 if signed else bins)
    centers = torch.cat([-steps.flip(0), steps]) if signed else steps
    codes = assign(tensor, centers, RESERVED_CODES)
    codes.masked_fill_(magnitudes <= float(steps[0]) / 2 if signed else magnitudes == 0, 0)
    no_exact = torch.empty(0, dtype=torch.bfloat16, device=tensor.device)
    return CodebookTensor(codes, centers, no_exact, RESERVED_CODES)


def log_levels(low: float, high: float, count: int) -> Tensor:
    """Return `count` geometric levels from `low` to `high`: float32, ascending, on the CPU; a single one is `high`."""
    if count == 1 or high == 0:
        return torch.full((count,), high, dtype=torch.float32)
    logs = torch.tensor([low, high], dtype=torch.float64).log()
    fractions = torch.linspace(0, 1, count, dtype=torch.float64)
    levels = torch.exp(logs[0] * (1 - fractions) + logs[1] * fractions).clamp(low, high)
    levels[0], levels[-1] = low, high
    return levels.float()


def log_range(magnitudes: Tensor, share: float) -> tuple[float, float]:
    """Return the lowest and the highest level for magnitudes; zeros if all are zero.

    Args:
        magnitudes: float32, not negative.
        share: largest share of the nonzero ones below the lowest level.
    """
    present = magnitudes[magnitudes > 0]
    if not present.numel():
        return 0.0, 0.0
    smallest, largest = (float(limit) for limit in torch.aminmax(present))
    return log_range_from_counts(smallest, largest, magnitude_cells(present), share)


def magnitude_cells(magnitudes: Tensor) -> Tensor:
    """Count the nonzero magnitudes in each cell of bit patterns, which are in the order of the values."""
    return torch.bincount(magnitudes[magnitudes > 0].view(torch.int32) >> CELL_SHIFT, minlength=1)


def log_range_from_counts(smallest: float, largest: float, counts: Tensor, share: float) -> tuple[float, float]:
    """Return `log_range` from the smallest and largest nonzero magnitude and the counts of `magnitude_cells`."""
    counts_below = counts.cumsum(0) - counts
    cell = torch.nonzero(counts_below <= share * int(counts.sum())).max()
    floor = max(MIN_LEVEL, smallest, float((cell.to(torch.int32) << CELL_SHIFT).view(torch.float32)))
    return floor, max(floor, largest)
