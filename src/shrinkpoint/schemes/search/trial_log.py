"""The log of one search: its trials so far, and the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.search.progress import Progress
from shrinkpoint.schemes.search.space import Point
from shrinkpoint.schemes.search.trials import SearchResult, Trial, Trials


class TrialLog:
    """Counts, remembers and reports.

    Args:
        method: the name of the search.
        sizes: predicted, of every point that may be measured.
        threshold: the largest degradation that is accepted.

    Attributes:
        trials: every trial by its point, in the order of measuring.
        best: the smallest trial that meets the threshold; the first of equal ones.
        remaining: about how many trials there will still be, as far as the search can tell after a round.

    Raises:
        PolicyError: a threshold that is negative or nan.
    """

    def __init__(
        self, method: str, trials: Trials, sizes: Mapping[Point, float], threshold: float, progress: Progress | None
    ) -> None:
        if not threshold >= 0:
            raise PolicyError("threshold", found=f"{threshold}", expected="0 or more", do="say e.g. 0.01 for 1 %")
        self._method, self._trials, self._sizes, self._progress = method, trials, sizes, progress
        self.threshold = threshold
        self.trials: dict[Point, Trial] = {}
        self.best: Trial | None = None
        self.remaining = 0
        self._rounds = 0
        self._pending: list[Trial] = []

    @property
    def width(self) -> int:
        return self._trials.width

    def size(self, point: Point) -> float:
        return self._sizes[point]

    def measure(self, points: Sequence[Point], *, eligible: bool = True) -> list[Trial]:
        """One round.

        Args:
            points: not measured before, at most `width`.
            eligible: whether these trials may become the best.
        """
        self._report(max(1, self.remaining))
        degradations = self._trials.run(points)
        self._rounds += 1
        found = [
            Trial(point, self._sizes[point], degradation, self._trials.seconds[point])
            for point, degradation in zip(points, degradations, strict=True)
        ]
        self.trials |= {trial.point: trial for trial in found}
        self._pending = found
        for trial in found if eligible else ():
            self.consider(trial)
        return found

    def consider(self, trial: Trial) -> None:
        """Let a trial become the best if it is better."""
        if trial.meets(self.threshold) and (self.best is None or trial.size < self.best.size):
            self.best = trial

    def _report(self, remaining: int) -> None:
        """Show the trials of the last round. Only the last trial of a search has nothing left after it."""
        untold, self._pending = self._pending, []
        for waiting, trial in zip(range(len(untold) - 1, -1, -1), untold, strict=True):
            if self._progress is not None:
                self._progress(trial, self.best, remaining + waiting)

    def result(self) -> SearchResult:
        self._report(0)
        return SearchResult(self.best, tuple(self.trials.values()), self._method, self._rounds)
