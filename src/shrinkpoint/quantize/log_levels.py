"""Quantization to levels in geometric steps, for moments: their magnitudes span many octaves and matter by their ratio.

A second moment that is rounded to zero would make Adam's next step huge, so none is."""

from __future__ import annotations

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import RESERVED_CODES, CodebookTensor
from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.assign import assign, check_bins

MIN_LEVEL = 1e-30
"""No level is smaller."""
MAX_SHARE_BELOW = 1e-3
"""Of the values other than zero at most so many may lie below the lowest level."""
CELL_SHIFT = 15
"""Low bits of a float32 that do not count for where the lowest level is: it is found to within 1/256."""


def quantize_log(
    x: Tensor,
    bins: int = 254,
    *,
    signed: bool,
    share: float = MAX_SHARE_BELOW,
    limits: tuple[float, float] | None = None,
) -> CodebookTensor:
    """The nearest of levels whose neighbours differ by one factor `r`; zero stays zero.

    Levels go from a floor to the largest magnitude. The floor is the smallest magnitude, but not less than 1e-30, and
    where a few tiny values would stretch the grid, higher, so that at most `share` of the values lie below it. Then

    - from the floor upwards the error is at most `(r - 1) / (r + 1)` of the value;
    - below the floor: unsigned values become the floor, so nothing but zero becomes zero. That makes Adam's step
      smaller, never larger. Signed ones become the floor with their sign, or zero up to half of it.

    Args:
        x: bfloat16, float16 or float32; finite; any shape and strides.
        bins: levels in all; signed, half of them, rounded down, for each sign.
        signed: whether there may be negative values.
        share: see above; 0 keeps the whole range.
        limits: the lowest and the highest level; None: those of `x`, as `ends` finds them.

    Raises:
        PolicyError: `bins` out of range, `share` not from 0 to 1, or a negative value where `signed` is false.
    """
    check_bins(bins, RESERVED_CODES)
    if signed and bins < 2:
        raise PolicyError("bins", found=f"{bins}", expected="one for each sign", do="ask for two at least")
    if not 0 <= share < 1:
        raise PolicyError("share", found=f"{share}", expected="0 or more, below 1", do="take the default, 0.001")
    flat = x.detach().float()
    if not signed and bool((flat < 0).any()):
        raise PolicyError("x", found="a negative value", expected="none, as signed is false", do="pass signed=True")
    size = flat.abs()
    low, high = limits or log_range(size, share)
    steps = log_levels(low, high, bins // 2 if signed else bins)
    centers = torch.cat([-steps.flip(0), steps]) if signed else steps
    codes = assign(x, centers, RESERVED_CODES)
    codes.masked_fill_(size <= float(steps[0]) / 2 if signed else size == 0, 0)
    return CodebookTensor(codes, centers, torch.empty(0, dtype=torch.bfloat16, device=x.device), RESERVED_CODES)


def log_levels(low: float, high: float, count: int) -> Tensor:
    """`count` float32 from `low` to `high` in geometric steps, ascending, on the CPU; one alone is `high`."""
    if count == 1 or high == 0:
        return torch.full((count,), high)
    wide = torch.tensor([low, high], dtype=torch.float64).log()
    places = torch.linspace(0, 1, count, dtype=torch.float64)
    found = torch.exp(wide[0] * (1 - places) + wide[1] * places).clamp(low, high)
    found[0], found[-1] = low, high
    return found.float()


def log_range(magnitudes: Tensor, share: float) -> tuple[float, float]:
    """The lowest and the highest level for these magnitudes; zeros where all are zero.

    Args:
        magnitudes: float32, not negative.
        share: of those above zero at most so many are below the lowest level.
    """
    present = magnitudes[magnitudes > 0]
    if not present.numel():
        return 0.0, 0.0
    least, largest = (float(end) for end in torch.aminmax(present))
    return log_range_from_counts(least, largest, magnitude_cells(present), share)


def magnitude_cells(magnitudes: Tensor) -> Tensor:
    """How many magnitudes above zero lie in each cell: bit patterns of positive floats are in their order."""
    return torch.bincount(magnitudes[magnitudes > 0].view(torch.int32) >> CELL_SHIFT, minlength=1)


def log_range_from_counts(smallest: float, largest: float, counts: Tensor, share: float) -> tuple[float, float]:
    """As `ends`, from the least and the largest magnitude above zero, and from `cells`."""
    before = counts.cumsum(0) - counts
    cell = torch.nonzero(before <= share * int(counts.sum())).max()
    floor = max(MIN_LEVEL, smallest, float((cell.to(torch.int32) << CELL_SHIFT).view(torch.float32)))
    return floor, max(floor, largest)
