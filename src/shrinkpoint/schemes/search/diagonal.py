"""The paper's search: a cube by its main diagonal, and then the parts of the cube that the diagonal leaves open.

arXiv 2306.11800 sec. 3.4, "guided exhaustive search". The paper does not print how the sub-cubes are cut. Here, in a
box with `bad` the last point of its diagonal that fails and `good` the first one that holds:

* whatever is at least as safe as `good` holds, and is passed over as larger;
* whatever is at least as aggressive as `bad` fails;
* the rest is cut into boxes that do not overlap: for every axis a, the points that are below `good` on a and not below
  it on the axes before a; and each of these boxes in the same way by `bad`.

A box is bounded by the size of its most aggressive corner. This and the first point assume that size falls with
aggressiveness; where it does not, the search may miss the smallest point that holds. `branch_and_bound` does not.
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
    """A small point whose degradation is at most `threshold`; the smallest one if size falls with aggressiveness.

    The variants are searched one after the other, as in the paper, but a later one only for what is smaller than the
    best so far. A diagonal is measured at once where there are enough ranks, and otherwise cut into width + 1 parts
    again and again, which finds the same two points. Ranks that are left over begin with the next boxes.

    Args:
        sizes: predicted bytes of any point.
        variants: that are searched; all where None.

    Raises:
        PolicyError: a negative threshold, an unknown variant; and see `Trials.run`.
    """
    allowed = space.resolve_variants(variants)
    predicted = trials.predict_sizes(sizes, [point for variant in allowed for point in space.points(variant)])
    ledger = TrialLog("diagonal", trials, predicted, threshold, progress)
    whole = _SubGrid((0,) * len(space.axes), tuple(side - 1 for side in space.shape))
    for variant in allowed:
        lines = [_DiagonalSearch(whole, -1, len(whole.diagonal))]
        while lines := _open_searches(lines, variant, ledger):
            lines = _run_round(lines, variant, ledger)
            ledger.remaining = sum(line.num_open.bit_length() for line in lines)
    return ledger.result()


@dataclass(frozen=True, order=True)
class _SubGrid:
    """All indices between two corners, both of them in it."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def diagonal(self) -> list[tuple[int, ...]]:
        """From the most aggressive corner to the safest, with as many points as the longest side."""
        steps = max((b - a for a, b in zip(self.low, self.high, strict=True)), default=0)
        if steps == 0:
            return [self.low]
        return [
            tuple(a + (2 * t * (b - a) + steps) // (2 * steps) for a, b in zip(self.low, self.high, strict=True))
            for t in range(steps + 1)
        ]

    def without_safer(self, success: tuple[int, ...]) -> Iterator[_SubGrid]:
        """What is not at least as safe as `success`, a point of this box, as boxes that do not overlap."""
        for a, limit in enumerate(success):
            if limit > self.low[a]:
                low = (*success[:a], *self.low[a:])
                yield _SubGrid(low, (*self.high[:a], limit - 1, *self.high[a + 1 :]))

    def without_more_aggressive(self, failure: tuple[int, ...]) -> Iterator[_SubGrid]:
        """What is not at least as aggressive as `failure`, which may lie outside, as boxes that do not overlap."""
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
        last_failure: the last place on it known to fail; -1 where none is.
        first_success: the first place known to hold; the diagonal's length where none is.
    """

    grid: _SubGrid
    last_failure: int
    first_success: int

    @property
    def num_open(self) -> int:
        """Places of which nothing is known."""
        return self.first_success - self.last_failure - 1

    def open_indices(self, max_count: int) -> list[int]:
        """Up to `max_count` of the open places, evenly spread."""
        parts = min(max_count, self.num_open)
        return [self.last_failure + 1 + ((2 * i + 1) * self.num_open) // (2 * parts) for i in range(parts)]

    def update(self, holds: Mapping[int, bool]) -> _DiagonalSearch:
        """An answer above the first one that holds tells nothing, even where noise makes it fail."""
        good = min((t for t, held in holds.items() if held), default=self.first_success)
        return _DiagonalSearch(self.grid, max((t for t in holds if t < good), default=self.last_failure), good)

    def subproblems(self) -> list[_DiagonalSearch]:
        """What it leaves open once all places are known."""
        diagonal = self.grid.diagonal
        boxes = [self.grid]
        if self.first_success < len(diagonal):
            boxes = list(self.grid.without_safer(diagonal[self.first_success]))
        if self.last_failure >= 0:
            boxes = [part for box in boxes for part in box.without_more_aggressive(diagonal[self.last_failure])]
        return [_DiagonalSearch(box, -1, len(box.diagonal)) for box in boxes]


def _open_searches(searches: Sequence[_DiagonalSearch], variant: str, trial_log: TrialLog) -> list[_DiagonalSearch]:
    """Those that may find something smaller than the best, the one with the smallest corner first."""
    failed = [point for point, trial in trial_log.trials.items() if not trial.meets(trial_log.threshold)]
    some = [
        line for line in searches if not any(is_dominated(Point(variant, line.grid.high), point) for point in failed)
    ]
    corners = sorted((trial_log.size(Point(variant, line.grid.low)), line) for line in some)
    return [line for size, line in corners if trial_log.best is None or size < trial_log.best.size]


def _run_round(searches: Sequence[_DiagonalSearch], variant: str, trial_log: TrialLog) -> list[_DiagonalSearch]:
    """Measure as many places as there are ranks, those of the first lines; what there is to do after it."""
    chosen: list[list[int]] = []
    for line in searches:
        chosen.append(line.open_indices(trial_log.width - sum(map(len, chosen))))
    points = [Point(variant, line.grid.diagonal[t]) for line, some in zip(searches, chosen, strict=True) for t in some]
    answers = iter([trial.meets(trial_log.threshold) for trial in trial_log.measure(points)])
    after = [line.update({t: next(answers) for t in some}) for line, some in zip(searches, chosen, strict=True)]
    return [new for line in after for new in ([line] if line.num_open else line.subproblems())]
