"""QD+ and CNR+, the baselines of arXiv 2306.11800 with uniform grids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.codebook import check_bins
from shrinkpoint.quantize.levels import min_max, quantize_to_grid, uniform_grid
from shrinkpoint.quantize.statistics import HistogramArray, LogHistogram, to_float64
from shrinkpoint.schemes.evaluate import TrialEvaluator
from shrinkpoint.schemes.search import candidates
from shrinkpoint.schemes.search.candidates import UNIFORM_SPACE, PreviousCodes, UniformCandidates
from shrinkpoint.schemes.search.scheme import SearchScheme
from shrinkpoint.schemes.search.space import Axis, Point, Space
from shrinkpoint.sharding.global_stats import GlobalStats


class QD(SearchScheme):
    """QD+: QD-Compressor (ICCD 2021) with searched settings, and bins that may change between checkpoints.

    Arguments are those of `SearchScheme`.
    """

    id: ClassVar[str] = "qd"
    coders = ("huffman",)
    space = UNIFORM_SPACE

    def candidates(
        self,
        weights: Mapping[str, Tensor],
        previous: PreviousCodes,
        evaluator: TrialEvaluator,
        stats: GlobalStats,
    ) -> candidates.CandidateSet:
        return UniformCandidates(weights, previous, stats)


FloatArray: TypeAlias = npt.NDArray[np.float64]


def quantize_adaptive(
    tensor: Tensor,
    bins: int,
    values: HistogramArray,
    counts: HistogramArray,
    *,
    steps: int = 100,
    ratio: float = 0.5,
    limits: tuple[float, float] | None = None,
) -> CodebookTensor:
    """Round to a uniform grid over the range that `best_range` finds; values outside get its ends.

    Args:
        tensor: bfloat16, float16 or float32; finite; any shape and strides.
        bins: 1 to 256.
        values, counts: a histogram of `tensor` by which the squared error is estimated; values ascending.
        steps, ratio: as of `best_range`.
        limits: the least and the largest value of the global tensor; None: those of `tensor`.

    Raises:
        PolicyError: `bins`, `steps` or `ratio` out of range.
    """
    check_bins(bins, 0)
    low, high = best_range(values, counts, limits or min_max(tensor), bins, steps=steps, ratio=ratio)
    return quantize_to_grid(tensor, uniform_grid(low, high, bins))


def best_range(
    values: HistogramArray, counts: HistogramArray, limits: tuple[float, float], bins: int, *, steps: int, ratio: float
) -> tuple[float, float]:
    """Find the range with the least squared error among those that a greedy search meets.

    Step by step one end moves in by `width / steps`, the one after whose move the error is less, until the range has
    fallen to `1 - ratio` of its width. torch keeps the best range at which the error had a local minimum; this keeps
    the best of all that were met, which is never worse.

    Args:
        values, counts: a histogram.
        limits: where to start: the least and the largest value.
        bins: points of the grid.
        steps: the number of steps that the width is divided into (the paper's step bins: 10, 25, 50, 100).
        ratio: the share by which the range may shrink at most (the paper's range: 0.1 to 0.5).

    Raises:
        PolicyError: `steps` below 1, or `ratio` not from 0 to 1.
    """
    if steps < 1 or not 0 <= ratio <= 1:
        found, expected = f"{steps} steps, ratio {ratio}", "at least one step and a ratio from 0 to 1"
        raise PolicyError("range search", found=found, expected=expected, do="take 100 steps and a ratio of 0.5")
    points, weights = to_float64(values).numpy(), to_float64(counts).numpy()
    low, high = limits
    step, moves = high / steps - low / steps, round(steps * ratio)
    best, min_error = limits, _range_error(points, weights, low, high, bins)
    for _ in range(min(moves, steps - 1) if step > 0 else 0):
        raised_low = _range_error(points, weights, low + step, high, bins)
        lowered_high = _range_error(points, weights, low, high - step, bins)
        low, high = (low + step, high) if raised_low < lowered_high else (low, high - step)
        if min(raised_low, lowered_high) < min_error:
            best, min_error = (low, high), min(raised_low, lowered_high)
    return best


def _range_error(values: FloatArray, counts: FloatArray, low: float, high: float, bins: int) -> float:
    """The sum of squared distances of all values to the nearest points of a uniform grid."""
    step = (high - low) / max(1, bins - 1)
    if step > 0 and bins > 1:
        errors = np.clip(np.rint((values - low) / step), 0, bins - 1) * step + low - values
    else:
        errors = (low + high) / 2 - values
    return float(np.dot(counts, np.square(errors)))


CNR_SPACE = Space(
    (
        Axis("bins", (8, 16, 32, 64, 128, 256)),
        Axis("steps", (10, 25, 50, 100)),
        Axis("range", (0.1, 0.2, 0.3, 0.4, 0.5)),
    )
)
"""Bins; steps that the range is divided into when its ends are moved; the share by which it may shrink."""


class CNR(SearchScheme):
    """CNR+: the quantizer of Check-N-Run with searched settings, without its delta, which is for embedding tables.

    Arguments are those of `SearchScheme`.
    """

    id: ClassVar[str] = "cnr"
    coders = ("packed",)
    space = CNR_SPACE

    def candidates(
        self,
        weights: Mapping[str, Tensor],
        previous: PreviousCodes,
        evaluator: TrialEvaluator,
        stats: GlobalStats,
    ) -> candidates.CandidateSet:
        return _CNRCandidates(weights, stats)


class _CNRCandidates:
    def __init__(self, weights: Mapping[str, Tensor], stats: GlobalStats) -> None:
        self._weights = weights
        sketches = stats.merge_sketches(
            {name: LogHistogram.from_tensor(weight, where=name) for name, weight in weights.items()}
        )
        limits = stats.min_max(weights)
        self._min_max = {name: limits[stats.global_name(name)] for name in weights}
        self._histograms = {name: _sketch_histogram(sketches[stats.global_name(name)]) for name in weights}

    def quantize(self, point: Point) -> dict[str, CodebookTensor]:
        settings = CNR_SPACE.settings(point)
        return {
            name: quantize_adaptive(
                x,
                int(settings["bins"]),
                *self._histograms[name],
                steps=int(settings["steps"]),
                ratio=float(settings["range"]),
                limits=self._min_max[name],
            )
            for name, x in self._weights.items()
        }

    def size(self, point: Point) -> float:
        """Predicted bytes: codes of a fixed width, and centers."""
        bins = int(CNR_SPACE.settings(point)["bins"])
        bits = (bins - 1).bit_length()
        return sum(x.numel() * bits / 8 + 4 * bins for x in self._weights.values())


def _sketch_histogram(sketch: LogHistogram) -> tuple[Tensor, Tensor]:
    """(values, counts) of a sketch, with zero in its place among the values."""
    values, counts = sketch.buckets()
    index, zeros = int((values < 0).sum()), counts.new_tensor([sketch.zeros])
    values = torch.cat([values[:index], values.new_zeros(1), values[index:]])
    return values, torch.cat([counts[:index], zeros, counts[index:]])
