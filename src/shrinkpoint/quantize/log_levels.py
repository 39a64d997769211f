"""Quantization of moments to geometric levels, since their magnitudes span many octaves.

A second moment rounded to zero would make Adam's next step huge, so none is rounded to zero."""

from __future__ import annotations

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import RESERVED_CODES, CodebookTensor
from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.assign import assign, check_bins

MIN_LEVEL = 1e-30
"""The smallest level."""
MAX_SHARE_BELOW = 1e-3
"""Largest share of the nonzero values that may lie below the lowest level."""
CELL_SHIFT = 15
"""Low bits of a float32 that are dropped when the lowest level is searched; it is exact to 1/256."""


def quantize_log(
    tensor: Tensor,
    bins: int = 254,
    *,
    signed: bool,
    share: float = MAX_SHARE_BELOW,
    limits: tuple[float, float] | None = None,
) -> CodebookTensor:
    """Quantize to the nearest of levels with a constant ratio `r` of neighbours; zero stays zero.

    Levels range from a floor to the largest magnitude. The floor is the smallest nonzero magnitude, at least 1e-30, or
    a higher one below which at most `share` of the values lie, so that few tiny values do not stretch the levels. Then

    - from the floor upwards the error is at most `(r - 1) / (r + 1)` of the value;
    - below the floor: unsigned values become the floor, so only zero becomes zero, and Adam's step gets smaller, never
      larger. Signed values become the floor with their sign, or zero up to half of it.

    Args:
        tensor: bfloat16, float16 or float32; finite; any shape and strides.
        bins: number of levels; if signed, half of them, rounded down, for each sign.
        signed: whether there may be negative values.
        share: largest share of the nonzero values below the lowest level; 0 keeps the whole range.
        limits: the lowest and the highest level; None: computed by `log_range` from the tensor.

    Raises:
        PolicyError: `bins` out of range, `share` not from 0 to 1, or a negative value where `signed` is false.
    """
    check_bins(bins, RESERVED_CODES)
    if signed and bins < 2:
        raise PolicyError("bins", found=f"{bins}", expected="one for each sign", do="ask for two at least")
    if not 0 <= share < 1:
        raise PolicyError("share", found=f"{share}", expected="0 or more, below 1", do="take the default, 0.001")
    flat = tensor.detach().float()
    if not signed and bool((flat < 0).any()):
        raise PolicyError(
            "tensor", found="a negative value", expected="none, as signed is false", do="pass signed=True"
        )
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
        return torch.full((count,), high)
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
