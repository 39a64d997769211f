"""Exact search by branch and bound, from one thing alone: along every axis quality never falls.

The paper assumes that size is monotone, too. Under an entropy coder it is not: light pruning adds a symbol and can cost
bytes. So sizes are predicted for every point and may be anything; only quality has to be measured.
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
    """The point with the smallest predicted size whose degradation is at most `threshold`.

    A point that fails takes all more aggressive ones of its variant with it, one that holds takes all that are not
    smaller, of every variant. Measured next is what splits the rest best whichever way the answers fall.

    Args:
        sizes: predicted bytes of any point, in any order; an infinite one excludes a point.
        variants: that compete; all where None.

    Raises:
        PolicyError: a negative threshold, an unknown variant; and see `Trials.run`.
    """
    points = [point for variant in space.resolve_variants(variants) for point in space.points(variant)]
    predicted = trials.predict_sizes(sizes, points)
    ledger = TrialLog("branch and bound", trials, predicted, threshold, progress)
    left = _OpenPoints.from_predictions(points, predicted)
    while left.points:
        for trial in ledger.measure([left.points[i] for i in left.choose_split(trials.width)]):
            left = left.update(trial.point, trial.meets(threshold))
        ledger.remaining = _remaining_trials(len(left.points), trials.width)
    return ledger.result()


def _remaining_trials(count: int, width: int) -> int:
    """Trials until `count` points are decided if every round leaves one part of width + 1."""
    return min(count, width * math.ceil(math.log(count + 1, width + 1))) if count else 0


@dataclass(frozen=True)
class _OpenPoints:
    """Points that may still be the answer, the smallest first.

    Attributes:
        sizes: float64 [n], ascending.
        fails_with: bool [n, n]; under[i, j]: j is at least as aggressive as i, and fails if i does.
    """

    points: list[Point]
    sizes: Array
    fails_with: Array

    @classmethod
    def from_predictions(cls, points: Sequence[Point], predicted: dict[Point, float]) -> _OpenPoints:
        """All points but those that have a safer one that is no larger: these are never needed."""
        ordered = sorted(
            (point for point in points if math.isfinite(predicted[point])), key=lambda p: (predicted[p], p)
        )
        sizes = np.array([predicted[point] for point in ordered], np.float64)
        names = np.array([point.variant for point in ordered])
        index = np.array([point.index for point in ordered], np.int64).reshape(len(ordered), -1)
        under = (index[None] <= index[:, None]).all(-1) & (names[None] == names[:, None])
        beaten = under & (sizes[:, None] <= sizes[None])
        np.fill_diagonal(beaten, False)
        return cls(ordered, sizes, under)._subset(~beaten.any(0))

    def update(self, point: Point, holds: bool) -> _OpenPoints:
        """What is left once `point` is known; an answer may come too late to tell anything new."""
        if point not in self.points:
            return self
        i = self.points.index(point)
        return self._subset(self.sizes < self.sizes[i]) if holds else self._subset(~self.fails_with[i])

    def _subset(self, mask: Array) -> _OpenPoints:
        points = [point for point, keep in zip(self.points, mask, strict=True) if keep]
        return _OpenPoints(points, self.sizes[mask], self.fails_with[np.ix_(mask, mask)])

    def choose_split(self, width: int) -> list[int]:
        """Up to `width` points to measure together, chosen one after the other: each leaves least in the worst case."""
        smaller = np.searchsorted(self.sizes, self.sizes, side="left")
        chosen: list[int] = []
        cost: tuple[float, float] = (math.inf, math.inf)
        while len(chosen) < width:
            rest = [i for i in range(len(self.points)) if i not in chosen]
            costs = [(*self._cost(sorted([*chosen, i]), smaller), i) for i in rest]
            if not costs or min(costs)[:2] >= cost:
                break  # nothing left to learn in this round
            *_, one = min(costs)
            cost = min(costs)[:2]
            chosen.append(one)
        return chosen

    def _cost(self, chosen: Sequence[int], num_smaller: Array) -> tuple[float, float]:
        """How many points the answers to `chosen` (ascending) leave: at worst, and in sum over the possible answers.

        What counts is the smallest one that holds: all before it have failed, and those after it tell nothing more.
        """
        open = np.ones(len(self.points), bool)
        counts = []
        for i in chosen:
            counts.append(int(np.count_nonzero(open[: num_smaller[i]])))
            open &= ~self.fails_with[i]
        counts.append(int(np.count_nonzero(open)))
        return max(counts), sum(counts)
