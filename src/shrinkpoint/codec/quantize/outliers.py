"""Outliers kept exactly, the rest by k-means, as the baseline GOBO+ has it.

GOBO fits a Gaussian to a layer; values at which its log-density is below a threshold are outliers. The others start in
cells of equal population and move to the nearest centroid until the sum of absolute errors (L1) falls no more. Every
iteration of the original is a pass over all values. Here the values are sorted once: a cell is then a range, and its
mean and its error come from prefix sums, so an iteration takes microseconds and finds the same centroids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec.quantize.nearest import assign, check_bins
from shrinkpoint.codec.symbols import MOST_CODES, Symbols
from shrinkpoint.errors import PolicyError

THRESHOLD = -4.0
"""Of the log-density; GOBO's, and fixed in the paper's search space."""
SOFT = 1e-4
"""The iteration stops when L1 falls by less: the soft termination of the paper's GOBO+, which prints no number."""


def outliers(x: Tensor, bins: int, *, threshold: float = THRESHOLD, iterations: int = 1000) -> Symbols:
    """The nearest centroid for every value but the outliers, which are exact.

    One code is the outliers', so 256 bins are 255 centroids. The density is one per unit of `x`, as in GOBO: the
    smaller the values' spread, the further out is the same threshold; where the spread is beyond 22, all values are
    outliers.

    Args:
        x: bfloat16, float16 or float32; finite; any shape and strides.
        bins: 1 to 256.
        threshold: of the natural logarithm of the density.
        iterations: at most so many.

    Raises:
        PolicyError: `bins` out of range.
    """
    check_bins(bins, 0)
    bins = min(bins, MOST_CODES - 1)
    apart = is_outlier(x, threshold)
    return around(x, apart, centroids(x.detach()[~apart].float(), bins, iterations=iterations))


def around(x: Tensor, apart: Tensor, centers: Tensor) -> Symbols:
    """The nearest centroid for every value, but what is `apart` (bool) as it is."""
    codes = assign(x, centers, 1).masked_fill_(apart, 0)
    return Symbols(codes, centers, x.detach()[apart].float(), 1)


def is_outlier(x: Tensor, threshold: float = THRESHOLD) -> Tensor:
    """Where the log-density of the Gaussian with the mean and deviation of `x` is below `threshold`: bool, like `x`."""
    wide = x.detach().double()
    deviation, mean = torch.std_mean(wide, correction=0) if x.numel() else (wide.sum(), wide.sum())
    return is_far(x, float(mean), float(deviation), threshold)


def is_far(x: Tensor, mean: float, deviation: float, threshold: float = THRESHOLD) -> Tensor:
    """As `is_outlier`, of a Gaussian that is known."""
    if not deviation > 0:
        return torch.zeros_like(x, dtype=torch.bool)
    room = -threshold - math.log(deviation * math.sqrt(2 * math.pi))
    if room < 0:
        return torch.ones_like(x, dtype=torch.bool)
    return (x.detach().double() - mean).abs_() > deviation * math.sqrt(2 * room)


def centroids(values: Tensor, bins: int, *, iterations: int = 1000, soft: float = SOFT) -> Tensor:
    """k-means from cells of equal population, judged by L1.

    Args:
        values: float32, 1-d.
        bins: how many centroids.
        iterations: at most so many moves.
        soft: stop when L1 falls by less than this share.

    Returns:
        float32 of shape (bins,), ascending, on the CPU: those with the least L1 that were met. Without values, zeros.

    Raises:
        PolicyError: `iterations` is negative.
    """
    if iterations < 0:
        raise PolicyError("iterations", found=f"{iterations}", expected="0 or more", do="take 1000")
    if not values.numel():
        return torch.zeros(bins)
    cells = Sorted.of(values)
    best = cells.start(bins)
    least = cells.error(best)
    for _ in range(iterations):
        found = cells.means(cells.bounds(best), best)
        error = cells.error(found)
        enough = error >= least * (1 - soft)
        if error < least:
            best, least = found, error
        if enough:
            break
    return best.float()


@dataclass(frozen=True)
class Sorted:
    """Values in ascending order, with the sums of all their beginnings; on the CPU.

    Attributes:
        values: float32, ascending.
        sums: float64, one more than values.
    """

    values: Tensor
    sums: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Sorted:
        ordered = torch.from_numpy(np.sort(values.cpu().numpy()))  # measured, 25 times as fast as torch's
        sums = torch.zeros(ordered.numel() + 1, dtype=torch.float64)
        torch.cumsum(ordered, 0, dtype=torch.float64, out=sums[1:])
        return cls(ordered, sums)

    def start(self, bins: int) -> Tensor:
        """The means of `bins` cells of equal population; of one without any, the value that follows."""
        bounds = torch.arange(bins + 1) * self.values.numel() // bins
        return self.means(bounds, self.values[bounds[:-1]].double())

    def bounds(self, centers: Tensor) -> Tensor:
        """Where the cells of the nearest centers begin and end."""
        middles = (centers[1:] + centers[:-1]) / 2
        inner = torch.searchsorted(self.values, middles.float(), right=True)
        ends = inner.new_tensor([0, self.values.numel()])
        return torch.cat([ends[:1], inner, ends[1:]])

    def means(self, bounds: Tensor, old: Tensor) -> Tensor:
        """Of every cell; an empty one keeps its old center."""
        counts = bounds.diff()
        means = self.sums[bounds].diff() / counts.clamp(min=1)
        low = self.values[bounds[:-1].clamp(max=self.values.numel() - 1)]
        high = self.values[(bounds[1:] - 1).clamp(min=0)]
        within = means.clamp(low.double(), high.double())  # sums of very different values cancel badly
        return torch.where(counts > 0, within, old)

    def error(self, centers: Tensor) -> float:
        """The sum of the absolute errors at the nearest centers."""
        bounds = self.bounds(centers)
        within = torch.searchsorted(self.values, centers.float(), right=True)
        middle = torch.minimum(torch.maximum(within, bounds[:-1]), bounds[1:])
        below = centers * (middle - bounds[:-1]) - (self.sums[middle] - self.sums[bounds[:-1]])
        above = self.sums[bounds[1:]] - self.sums[middle] - centers * (bounds[1:] - middle)
        return float((below + above).sum())
