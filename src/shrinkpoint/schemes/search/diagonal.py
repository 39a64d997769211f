"""The search of the Inshrinkerator paper: the main diagonal of a cube, and then the parts that it leaves open.

arXiv 2306.11800 sec. 3.4, "guided exhaustive search". The paper does not print how the sub-cubes are cut. Here, in a
box with `bad` the last point of its diagonal that fails and `good` the first one that holds:

* points at least as safe as `good` hold, and are skipped because they are larger;
* points at least as aggressive as `bad` fail;
* the rest is cut into boxes that do not overlap: for every axis a, the points that are below `good` on a and not below
  it on the axes before a; and each of these boxes likewise by `bad`.

A box is bounded by the size of its most aggressive corner. This and the first rule assume that size falls with
aggressiveness; if it does not, the search may miss the smallest point that holds. `branch_and_bound` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shrinkpoint.schemes.search.progress import Progress
from shrinkpoint.schemes.search.space import Point, Space, is_dominated
from shrinkpoint.schemes.search.trial_log import TrialLog
from shrinkpoint.schemes.search.trials import SearchResult, Trials


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
