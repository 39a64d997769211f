"""The three orders in which the points of a space are measured: branch and bound, neighbourhood, diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.search.space import Point, Space, is_dominated
from shrinkpoint.schemes.search.trials import Progress, SearchResult, Trial, TrialLog, Trials

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


def diagonal(
    space: Space,
    sizes: Callable[[Point], float],
    trials: Trials,
    threshold: float,
    *,
    variants: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Find a small point whose degradation is at most `threshold`: the smallest, if size falls with aggressiveness.

    The variants are searched one after the other, as in the paper, but a later one only for points smaller than the
    best so far. A diagonal is measured at once if there are enough ranks, and is otherwise cut into width + 1 parts
    repeatedly, which finds the same two points. Ranks that have no point of it begin with the next boxes.

    Args:
        sizes: predicts the bytes of a point.
        variants: the variants that are searched; None: all.

    Raises:
        PolicyError: a negative threshold, an unknown variant; what `Trials.run` raises.
    """
    allowed = space.resolve_variants(variants)
    predicted = trials.predict_sizes(sizes, [point for variant in allowed for point in space.points(variant)])
    log = TrialLog("diagonal", trials, predicted, threshold, progress)
    whole = _SubGrid((0,) * len(space.axes), tuple(side - 1 for side in space.shape))
    for variant in allowed:
        searches = [_DiagonalSearch(whole, -1, len(whole.diagonal))]
        while searches := _open_searches(searches, variant, log):
            searches = _run_round(searches, variant, log)
            log.remaining = sum(search.num_open.bit_length() for search in searches)
    return log.result()


@dataclass(frozen=True, order=True)
class _SubGrid:
    """A box of indices between two corners, both included."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def diagonal(self) -> list[tuple[int, ...]]:
        """The indices from the most aggressive corner to the safest; their number is the longest side."""
        steps = max((b - a for a, b in zip(self.low, self.high, strict=True)), default=0)
        if steps == 0:
            return [self.low]
        return [
            tuple(a + (2 * t * (b - a) + steps) // (2 * steps) for a, b in zip(self.low, self.high, strict=True))
            for t in range(steps + 1)
        ]

    def without_safer(self, success: tuple[int, ...]) -> Iterator[_SubGrid]:
        """The indices that are not at least as safe as `success`, which lies in this box, as disjoint boxes."""
        for a, limit in enumerate(success):
            if limit > self.low[a]:
                low = (*success[:a], *self.low[a:])
                yield _SubGrid(low, (*self.high[:a], limit - 1, *self.high[a + 1 :]))

    def without_more_aggressive(self, failure: tuple[int, ...]) -> Iterator[_SubGrid]:
        """The indices that are not at least as aggressive as `failure`, which may lie outside, as disjoint boxes."""
        if any(b < low for b, low in zip(failure, self.low, strict=True)):
            yield self
            return
        capped = tuple(min(b, high) for b, high in zip(failure, self.high, strict=True))
        for a, limit in enumerate(capped):
            if limit < self.high[a]:
                high = (*capped[:a], *self.high[a:])
                yield _SubGrid((*self.low[:a], limit + 1, *self.low[a + 1 :]), high)


@dataclass(frozen=True, order=True)
class _DiagonalSearch:
    """A box whose diagonal is being searched.

    Attributes:
        grid: the box.
        last_failure: the last position on the diagonal known to fail; -1 if none is.
        first_success: the first position known to hold; the diagonal's length if none is.
    """

    grid: _SubGrid
    last_failure: int
    first_success: int

    @property
    def num_open(self) -> int:
        """The number of positions of which nothing is known."""
        return self.first_success - self.last_failure - 1

    def open_indices(self, max_count: int) -> list[int]:
        """Up to `max_count` of the unknown positions, evenly spread."""
        parts = min(max_count, self.num_open)
        return [self.last_failure + 1 + ((2 * i + 1) * self.num_open) // (2 * parts) for i in range(parts)]

    def update(self, holds: Mapping[int, bool]) -> _DiagonalSearch:
        """The search after some positions were measured.

        An answer above the first one that holds tells nothing, even if noise makes it fail.
        """
        success = min((t for t, succeeded in holds.items() if succeeded), default=self.first_success)
        failure = max((t for t in holds if t < success), default=self.last_failure)
        return _DiagonalSearch(self.grid, failure, success)

    def subproblems(self) -> list[_DiagonalSearch]:
        """Searches of the boxes that this one leaves open once all its positions are known."""
        diagonal = self.grid.diagonal
        boxes = [self.grid]
        if self.first_success < len(diagonal):
            boxes = list(self.grid.without_safer(diagonal[self.first_success]))
        if self.last_failure >= 0:
            boxes = [part for box in boxes for part in box.without_more_aggressive(diagonal[self.last_failure])]
        return [_DiagonalSearch(box, -1, len(box.diagonal)) for box in boxes]


def _open_searches(searches: Sequence[_DiagonalSearch], variant: str, trial_log: TrialLog) -> list[_DiagonalSearch]:
    """The searches that may find a smaller point than the best, the one with the smallest corner first."""
    failed = [point for point, trial in trial_log.trials.items() if not trial.meets(trial_log.threshold)]
    undecided = [
        search
        for search in searches
        if not any(is_dominated(Point(variant, search.grid.high), point) for point in failed)
    ]
    corners = sorted((trial_log.size(Point(variant, search.grid.low)), search) for search in undecided)
    return [search for size, search in corners if trial_log.best is None or size < trial_log.best.size]


def _run_round(searches: Sequence[_DiagonalSearch], variant: str, trial_log: TrialLog) -> list[_DiagonalSearch]:
    """Measure one position per rank, those of the first searches; returns the searches that follow."""
    chosen: list[list[int]] = []
    for search in searches:
        chosen.append(search.open_indices(trial_log.width - sum(map(len, chosen))))
    pairs = [*zip(searches, chosen, strict=True)]
    points = [Point(variant, search.grid.diagonal[t]) for search, positions in pairs for t in positions]
    holds = iter([trial.meets(trial_log.threshold) for trial in trial_log.measure(points)])
    updated = [search.update({t: next(holds) for t in positions}) for search, positions in pairs]
    return [following for search in updated for following in ([search] if search.num_open else search.subproblems())]


MIN_VARIANT_GAIN = 0.1
"""The share of the threshold by which another variant must be better."""


def neighbourhood(
    space: Space,
    sizes: Callable[[Point], float],
    trials: Trials,
    threshold: float,
    last: Point,
    *,
    variants: Sequence[str] | None = None,
    radius: int = 1,
    coarser: bool = False,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the first point near `last`, in order of predicted size, whose degradation is at most `threshold`.

    If other variants are allowed, `last` is measured under each of them first, and the search continues in the one
    with the least degradation if it is significantly less.

    Args:
        sizes: predicts the bytes of a point; an infinite size excludes it.
        last: what was chosen last time.
        variants: the variants that may be switched to; None: all. The one of `last` is always allowed.
        radius: the largest number of steps on each axis.
        coarser: whether points strictly more aggressive than `last` may be chosen. The paper excludes them: a model
            becomes denser in the course of training.

    Returns:
        A result whose `chosen` is None if no neighbour holds: search the whole space then.

    Raises:
        PolicyError: a negative threshold or radius, an unknown variant, a point outside of the space; what
            `Trials.run` raises.
    """
    other_variants = [variant for variant in space.resolve_variants(variants) if variant != last.variant]
    _check_start(space, last, radius)
    centers = [Point(variant, last.index) for variant in (last.variant, *other_variants)]
    neighbours = {center: [*_neighbours(space, center, radius, coarser)] for center in centers}
    predicted = trials.predict_sizes(sizes, sorted(point for points in neighbours.values() for point in points))
    log = TrialLog("neighbourhood", trials, predicted, threshold, progress)
    center = _choose_variant(centers, log) if other_variants else last
    _measure_until_success(sorted(neighbours[center], key=lambda point: (predicted[point], point)), log)
    return log.result()


def _check_start(space: Space, last: Point, radius: int) -> None:
    inside = last.variant in space.variants and len(last.index) == len(space.axes)
    if not inside or not all(0 <= i < side for i, side in zip(last.index, space.shape, strict=True)):
        raise PolicyError("last", found=f"{last}", expected="a point of the space", do="search the whole space instead")
    if radius < 0:
        raise PolicyError("radius", found=f"{radius}", expected="0 or more", do="say 1")


def _neighbours(space: Space, center: Point, radius: int, coarser: bool) -> Iterator[Point]:
    for point in space.points(center.variant):
        near = all(abs(i - j) <= radius for i, j in zip(point.index, center.index, strict=True))
        if near and (coarser or not is_dominated(point, center)):
            yield point


def _choose_variant(alternatives: Sequence[Point], trial_log: TrialLog) -> Point:
    """Measure all alternatives, of which the first is the last choice, and choose the one to search around."""
    for i in range(0, len(alternatives), trial_log.width):
        trial_log.measure(alternatives[i : i + trial_log.width], eligible=False)
    stay, *_ = alternatives
    best = min(alternatives, key=lambda point: _comparable_degradation(trial_log.trials[point]))
    gain = _comparable_degradation(trial_log.trials[stay]) - _comparable_degradation(trial_log.trials[best])
    return best if gain > MIN_VARIANT_GAIN * trial_log.threshold else stay  # inf - inf is no gain


def _comparable_degradation(trial: Trial) -> float:
    return math.inf if math.isnan(trial.degradation) else trial.degradation


def _measure_until_success(candidates: Sequence[Point], trial_log: TrialLog) -> None:
    """Measure candidates in order until one holds, without measuring a point twice."""
    pending = [point for point in candidates if math.isfinite(trial_log.size(point))]
    while trial_log.best is None and (pending := _undecided(pending, trial_log)):
        batch = _next_batch(pending, trial_log)
        pending = pending[len(batch) :]
        unmeasured = [point for point in batch if point not in trial_log.trials]
        if unmeasured:
            trial_log.measure(unmeasured, eligible=False)
        for point in batch:
            trial_log.consider(trial_log.trials[point])
        trial_log.remaining = len(pending)


def _undecided(points: Sequence[Point], trial_log: TrialLog) -> list[Point]:
    """The points that are not more aggressive than one that failed."""
    failed = [point for point, trial in trial_log.trials.items() if not trial.meets(trial_log.threshold)]
    return [point for point in points if not any(is_dominated(point, failure) for failure in failed)]


def _next_batch(points: Sequence[Point], trial_log: TrialLog) -> list[Point]:
    """The first points, up to one that is known to hold, of which no more are unmeasured than fit in one round."""
    batch: list[Point] = []
    num_unmeasured = 0
    for point in points:
        num_unmeasured += point not in trial_log.trials
        if num_unmeasured > trial_log.width:
            break
        batch.append(point)
        if point in trial_log.trials and trial_log.trials[point].meets(trial_log.threshold):
            break
    return batch
