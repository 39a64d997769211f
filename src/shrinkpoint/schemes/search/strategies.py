"""The three orders in which the points of a space are measured: branch and bound, neighbourhood, diagonal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.search.space import Point, Space, is_dominated
from shrinkpoint.schemes.search.trials import Progress, SearchResult, TrialLog, Trials

Array = np.ndarray[Any, np.dtype[Any]]
MIN_VARIANT_GAIN = 0.1  # The share of the threshold by which another variant must be better


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

    Exact, if quality never falls along an axis. The paper assumes that size is monotone as well. Under an entropy coder
    it is not: light pruning adds a symbol and can cost bytes. So sizes are predicted for every point, in any order. A
    point that fails excludes all more aggressive ones of its variant; one that holds excludes all that are not smaller,
    of every variant. The next round measures the points that leave the fewest others in the worst case.

    Args:
        sizes: predicts the bytes of a point; an infinite size excludes it.
        variants: the variants that compete; None: all.

    Raises:
        PolicyError: a negative threshold, an unknown variant; what `Trials.run` raises.
    """
    points = [point for variant in space.resolve_variants(variants) for point in space.points(variant)]
    predicted = trials.predict_sizes(sizes, points)
    log = TrialLog("branch and bound", trials, predicted, threshold, progress)
    candidates = _OpenPoints.from_predictions(predicted)
    while candidates.points:
        for trial in log.measure([candidates.points[i] for i in candidates.choose_split(trials.width)]):
            candidates = candidates.update(trial.point, trial.meets(threshold))
        count, parts = len(candidates.points), trials.width + 1  # a round leaves one of so many parts
        log.remaining = min(count, trials.width * math.ceil(math.log(count + 1, parts))) if count else 0
    return log.result()


@dataclass(frozen=True)
class _OpenPoints:
    """The points that may still be the answer, smallest first."""

    points: list[Point]  # n of them
    sizes: Array  # float64 [n], ascending
    fails_with: Array  # bool [n, n]; [i, j]: point j is at least as aggressive as point i, and so fails if i does

    @classmethod
    def from_predictions(cls, predicted: Mapping[Point, float]) -> _OpenPoints:
        """All points except those for which there is a safer one that is no larger."""
        finite = (point for point, size in predicted.items() if math.isfinite(size))
        ordered = sorted(finite, key=lambda point: (predicted[point], point))
        sizes = np.array([predicted[point] for point in ordered], np.float64)
        names = np.array([point.variant for point in ordered])
        index = np.array([point.index for point in ordered], np.int64).reshape(len(ordered), -1)
        fails_with = (index[None] <= index[:, None]).all(-1) & (names[None] == names[:, None])
        dominated = fails_with & (sizes[:, None] <= sizes[None])
        np.fill_diagonal(dominated, False)
        return cls(ordered, sizes, fails_with)._subset(~dominated.any(0))

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
        num_smaller = np.searchsorted(self.sizes, self.sizes, side="left")
        chosen: list[int] = []
        cost: tuple[float, float] = (math.inf, math.inf)
        while len(chosen) < width:
            rest = [i for i in range(len(self.points)) if i not in chosen]
            costs = [(self._cost(sorted([*chosen, i]), num_smaller), i) for i in rest]
            if not costs or min(costs)[0] >= cost:
                break  # another point would tell nothing in this round
            cost, best = min(costs)
            chosen.append(best)
        return chosen

    def _cost(self, chosen: Sequence[int], num_smaller: Array) -> tuple[float, float]:
        """Number of points left after measuring `chosen` (ascending): at worst, and summed over the possible answers.

        An answer is the smallest of them that holds: all before it failed, and those after it tell nothing more.
        """
        is_open = np.ones(len(self.points), bool)
        counts = []
        for i in chosen:
            counts.append(int(np.count_nonzero(is_open[: num_smaller[i]])))
            is_open &= ~self.fails_with[i]
        counts.append(int(np.count_nonzero(is_open)))
        return max(counts), sum(counts)


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

    What held last time nearly holds now (arXiv 2306.11800 sec. 3.4, "delta-neighbourhood search"). The paper leaves
    open what a neighbour and a significant improvement are. Here a step is one value on any number of axes at once
    (radius 1 in the maximum norm), and an improvement is significant from a tenth of the threshold. If other variants
    are allowed, `last` is measured under each of them first, and the search continues in the one with the least
    degradation if it is significantly less.

    Args:
        sizes: predicts the bytes of a point; an infinite size excludes it.
        last: what was chosen last time.
        variants: the variants that may be switched to; None: all. The one of `last` is always allowed.
        radius: the largest number of steps on each axis.
        coarser: True if points strictly more aggressive than `last` may be chosen. The paper excludes them: a model
            becomes denser in the course of training.

    Returns:
        A result whose `chosen` is None if no neighbour holds: search the whole space then.

    Raises:
        PolicyError: a negative threshold or radius, an unknown variant, a point outside of the space; what
            `Trials.run` raises.
    """
    other_variants = [variant for variant in space.resolve_variants(variants) if variant != last.variant]
    if last not in space:
        raise PolicyError("last", found=f"{last}", expected="a point of the space", do="search the whole space instead")
    if radius < 0:
        raise PolicyError("radius", found=f"{radius}", expected="0 or more", do="pass 1")
    centers = [Point(variant, last.index) for variant in (last.variant, *other_variants)]
    neighbours = {
        center: [
            point
            for point in space.points(center.variant)
            if all(abs(i - j) <= radius for i, j in zip(point.index, center.index, strict=True))
            and (coarser or not is_dominated(point, center))
        ]
        for center in centers
    }
    predicted = trials.predict_sizes(sizes, sorted(point for points in neighbours.values() for point in points))
    log = TrialLog("neighbourhood", trials, predicted, threshold, progress)
    center = _choose_variant(centers, log) if other_variants else last
    _measure_until_success(sorted(neighbours[center], key=lambda point: (predicted[point], point)), log)
    return log.result()


def _choose_variant(alternatives: Sequence[Point], log: TrialLog) -> Point:
    """Measure all alternatives, of which the first is the last choice, and choose the one to search around."""
    for i in range(0, len(alternatives), log.width):
        log.measure(alternatives[i : i + log.width], eligible=False)
    measured = [log.trials[point].degradation for point in alternatives]
    degradations = [math.inf if math.isnan(degradation) else degradation for degradation in measured]
    least = min(degradations)
    significant = degradations[0] - least > MIN_VARIANT_GAIN * log.threshold  # inf - inf is no gain
    return alternatives[degradations.index(least) if significant else 0]


def _measure_until_success(candidates: Sequence[Point], log: TrialLog) -> None:
    """Measure candidates in order until one holds, without measuring a point twice."""
    pending = [point for point in candidates if math.isfinite(log.sizes[point])]
    while log.best is None:
        pending = [point for point in pending if not log.rules_out(point)]
        if not pending:
            return
        batch = _next_batch(pending, log)
        pending = pending[len(batch) :]
        unmeasured = [point for point in batch if point not in log.trials]
        if unmeasured:
            log.measure(unmeasured, eligible=False)
        for point in batch:
            log.consider(log.trials[point])
        log.remaining = len(pending)


def _next_batch(points: Sequence[Point], log: TrialLog) -> list[Point]:
    """The first points, up to one that is known to hold, of which no more are unmeasured than fit in one round."""
    batch: list[Point] = []
    num_unmeasured = 0
    for point in points:
        num_unmeasured += point not in log.trials
        if num_unmeasured > log.width:
            break
        batch.append(point)
        if point in log.trials and log.trials[point].meets(log.threshold):
            break
    return batch


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

    The "guided exhaustive search" of arXiv 2306.11800 sec. 3.4: the main diagonal of a cube, and then the parts that it
    leaves open. The paper does not print how these are cut. Here, in a box with `bad` the last point of its diagonal
    that fails and `good` the first one that holds:

    * points at least as safe as `good` hold, and are skipped because they are larger;
    * points at least as aggressive as `bad` fail;
    * the rest is cut into boxes that do not overlap: for every axis a, the points that are below `good` on a and not
      below it on the axes before a; and each of these boxes likewise by `bad`.

    A box is bounded by the size of its most aggressive corner. This and the first rule assume that size falls with
    aggressiveness; if it does not, the search may miss the smallest point that holds. `branch_and_bound` does not.

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
        searches = _open_searches([_DiagonalSearch(whole, -1, len(whole.diagonal))], variant, log)
        while searches:
            following = _run_round(searches, variant, log)
            log.remaining = sum(search.num_open.bit_length() for search in following)
            searches = _open_searches(following, variant, log)
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
        capped = tuple(map(min, failure, self.high))
        for a, limit in enumerate(capped):
            if limit < self.high[a]:
                high = (*capped[:a], *self.high[a:])
                yield _SubGrid((*self.low[:a], limit + 1, *self.low[a + 1 :]), high)


@dataclass(frozen=True, order=True)
class _DiagonalSearch:
    """A box whose diagonal is being searched."""

    grid: _SubGrid
    last_failure: int  # the last position on the diagonal known to fail; -1 if none is
    first_success: int  # the first position known to hold; the diagonal's length if none is

    @property
    def num_open(self) -> int:
        """The number of positions of which nothing is known."""
        return self.first_success - self.last_failure - 1

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


def _open_searches(searches: Sequence[_DiagonalSearch], variant: str, log: TrialLog) -> list[_DiagonalSearch]:
    """The searches that may find a smaller point than the best, the one with the smallest corner first."""
    undecided = [search for search in searches if not log.rules_out(Point(variant, search.grid.high))]
    corners = sorted((log.sizes[Point(variant, search.grid.low)], search) for search in undecided)
    return [search for size, search in corners if log.best is None or size < log.best.size]


def _run_round(searches: Sequence[_DiagonalSearch], variant: str, log: TrialLog) -> list[_DiagonalSearch]:
    """Measure one position per rank, those of the first searches; returns the searches that follow."""
    chosen: list[list[int]] = []
    for search in searches:
        parts = min(log.width - sum(map(len, chosen)), search.num_open)  # positions, evenly spread
        chosen.append([search.last_failure + 1 + ((2 * i + 1) * search.num_open) // (2 * parts) for i in range(parts)])
    pairs = [*zip(searches, chosen, strict=True)]
    points = [Point(variant, search.grid.diagonal[t]) for search, positions in pairs for t in positions]
    holds = iter([trial.meets(log.threshold) for trial in log.measure(points)])
    updated = [search.update({t: next(holds) for t in positions}) for search, positions in pairs]
    return [following for search in updated for following in ([search] if search.num_open else search.subproblems())]
