"""Exact search by branch and bound, which assumes only that quality never falls along an axis.

The paper assumes that size is monotone as well. Under an entropy coder it is not: light pruning adds a symbol and can
cost bytes. So sizes are predicted for every point, in any order, and only quality is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shrinkpoint.schemes.search.progress import Progress
from shrinkpoint.schemes.search.space import Point, Space
from shrinkpoint.schemes.search.trial_log import TrialLog
from shrinkpoint.schemes.search.trials import SearchResult, Trials

Array = np.ndarray[Any, np.dtype[Any]]


def branch_and_bound(
    space: Space,
    sizes: Callable[[Point], float],
    trials: Trials,
    threshold: float,
    *,
    variants: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the point with the smallest predicted size whose degradation is at most `threshold`.

    A point that fails excludes all more aggressive ones of its variant; one that holds excludes all that are not
    smaller, of every variant. The next round measures the points that leave the fewest others in the worst case.

    Args:
        sizes: predicts the bytes of a point; an infinite size excludes it.
        variants: the variants that compete; None: all.

    Raises:
        PolicyError: a negative threshold, an unknown variant; what `Trials.run` raises.
    """
    points = [point for variant in space.resolve_variants(variants) for point in space.points(variant)]
    predicted = trials.predict_sizes(sizes, points)
    log = TrialLog("branch and bound", trials, predicted, threshold, progress)
    candidates = _OpenPoints.from_predictions(points, predicted)
    while candidates.points:
        for trial in log.measure([candidates.points[i] for i in candidates.choose_split(trials.width)]):
            candidates = candidates.update(trial.point, trial.meets(threshold))
        log.remaining = _remaining_trials(len(candidates.points), trials.width)
    return log.result()


def _remaining_trials(count: int, width: int) -> int:
    """The number of trials that decide `count` points if every round leaves one of width + 1 parts."""
    return min(count, width * math.ceil(math.log(count + 1, width + 1))) if count else 0


@dataclass(frozen=True)
class _OpenPoints:
    """The points that may still be the answer, smallest first.

    Attributes:
        points: n of them.
        sizes: float64 [n], ascending.
        fails_with: bool [n, n]; [i, j]: point j is at least as aggressive as point i, and so fails if i does.
    """

    points: list[Point]
    sizes: Array
    fails_with: Array

    @classmethod
    def from_predictions(cls, points: Sequence[Point], predicted: dict[Point, float]) -> _OpenPoints:
        """All points except those for which there is a safer one that is no larger."""
        ordered = sorted(
            (point for point in points if math.isfinite(predicted[point])), key=lambda p: (predicted[p], p)
        )
        sizes = np.array([predicted[point] for point in ordered], np.float64)
        names = np.array([point.variant for point in ordered])
        index = np.array([point.index for point in ordered], np.int64).reshape(len(ordered), -1)
        fails_with = (index[None] <= index[:, None]).all(-1) & (names[None] == names[:, None])
        is_dominated = fails_with & (sizes[:, None] <= sizes[None])
        np.fill_diagonal(is_dominated, False)
        return cls(ordered, sizes, fails_with)._subset(~is_dominated.any(0))

    def update(self, point: Point, holds: bool) -> _OpenPoints:
        """The points that remain once `point` was measured; it may have been excluded in the same round."""
        if point not in self.points:
            return self
        i = self.points.index(point)
        return self._subset(self.sizes < self.sizes[i]) if holds else self._subset(~self.fails_with[i])

    def _subset(self, mask: Array) -> _OpenPoints:
        points = [point for point, keep in zip(self.points, mask, strict=True) if keep]
        return _OpenPoints(points, self.sizes[mask], self.fails_with[np.ix_(mask, mask)])

    def choose_split(self, width: int) -> list[int]:
        """Choose up to `width` points to measure at once, greedily: each leaves the fewest points in the worst case."""
        smaller = np.searchsorted(self.sizes, self.sizes, side="left")
        chosen: list[int] = []
        cost: tuple[float, float] = (math.inf, math.inf)
        while len(chosen) < width:
            rest = [i for i in range(len(self.points)) if i not in chosen]
            costs = [(*self._cost(sorted([*chosen, i]), smaller), i) for i in rest]
            if not costs or min(costs)[:2] >= cost:
                break  # another point would tell nothing in this round
            *cost_pair, best = min(costs)
            cost = (cost_pair[0], cost_pair[1])
            chosen.append(best)
        return chosen

    def _cost(self, chosen: Sequence[int], num_smaller: Array) -> tuple[float, float]:
        """How many points remain after measuring `chosen` (ascending): at worst, and summed over the possible answers.

        An answer is the smallest of them that holds: all before it failed, and those after it tell nothing more.
        """
        is_open = np.ones(len(self.points), bool)
        counts = []
        for i in chosen:
            counts.append(int(np.count_nonzero(is_open[: num_smaller[i]])))
            is_open &= ~self.fails_with[i]
        counts.append(int(np.count_nonzero(is_open)))
        return max(counts), sum(counts)
