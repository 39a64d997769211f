"""The log of one search: its trials so far, and the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.search.progress import Progress
from shrinkpoint.schemes.search.space import Point
from shrinkpoint.schemes.search.trials import SearchResult, Trial, Trials


class TrialLog:
    """Measures points, remembers the trials and reports them to a progress callback.

    Args:
        method: the name of the search.
        trials: what measures.
        sizes: predicted bytes of every point that may be measured.
        threshold: the largest accepted degradation.
        progress: called for every trial; None: nothing is reported.

    Attributes:
        threshold: as given.
        trials: every trial by its point, in the order of measuring.
        best: the smallest trial that meets the threshold; the first of equal ones; None if there is none.
        remaining: the estimated number of trials to come, set by the search after each round.

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
        """Measure points in one round.

        Args:
            points: at most `width`, none of them measured before.
            eligible: whether these trials may become the best.
        """
        self._report(max(1, self.remaining))
        degradations = self._trials.run(points)
        self._rounds += 1
        trials = [
            Trial(point, self._sizes[point], degradation, self._trials.seconds[point])
            for point, degradation in zip(points, degradations, strict=True)
        ]
        self.trials |= {trial.point: trial for trial in trials}
        self._pending = trials
        for trial in trials if eligible else ():
            self.consider(trial)
        return trials

    def consider(self, trial: Trial) -> None:
        """Make a trial the best one if it meets the threshold and is smaller."""
        if trial.meets(self.threshold) and (self.best is None or trial.size < self.best.size):
            self.best = trial

    def _report(self, remaining: int) -> None:
        """Report the trials of the last round, with the number of trials that follow each of them."""
        trials, self._pending = self._pending, []
        for following, trial in zip(range(len(trials) - 1, -1, -1), trials, strict=True):
            if self._progress is not None:
                self._progress(trial, self.best, remaining + following)

    def result(self) -> SearchResult:
        """The end of the search; reports the trials that were not reported yet."""
        self._report(0)
        return SearchResult(self.best, tuple(self.trials.values()), self._method, self._rounds)
