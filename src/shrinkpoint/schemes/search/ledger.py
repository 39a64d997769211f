"""The books of one search: what was measured so far, and the best of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.search.outcome import Outcome, Trial
from shrinkpoint.schemes.search.progress import Progress
from shrinkpoint.schemes.search.space import Point
from shrinkpoint.schemes.search.trials import Trials


class Ledger:
    """Counts, remembers and reports.

    Args:
        method: the name of the search.
        sizes: predicted, of every point that may be measured.
        threshold: the largest degradation that is accepted.

    Attributes:
        known: every trial by its point, in the order of measuring.
        best: the smallest trial that meets the threshold; the first of equal ones.
        left: about how many trials there will still be, as far as the search can tell after a round.

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
        self.known: dict[Point, Trial] = {}
        self.best: Trial | None = None
        self.left = 0
        self._rounds = 0
        self._untold: list[Trial] = []

    @property
    def width(self) -> int:
        return self._trials.width

    def size(self, point: Point) -> float:
        return self._sizes[point]

    def measure(self, points: Sequence[Point], *, count: bool = True) -> list[Trial]:
        """One round.

        Args:
            points: not measured before, at most `width`.
            count: whether these trials may become the best.
        """
        self._tell(max(1, self.left))
        degradations = self._trials.run(points)
        self._rounds += 1
        found = [
            Trial(point, self._sizes[point], degradation, self._trials.seconds[point])
            for point, degradation in zip(points, degradations, strict=True)
        ]
        self.known |= {trial.point: trial for trial in found}
        self._untold = found
        for trial in found if count else ():
            self.offer(trial)
        return found

    def offer(self, trial: Trial) -> None:
        """Let a trial become the best if it is better."""
        if trial.meets(self.threshold) and (self.best is None or trial.size < self.best.size):
            self.best = trial

    def _tell(self, left: int) -> None:
        """Show the trials of the last round. Only the last trial of a search has nothing left after it."""
        untold, self._untold = self._untold, []
        for waiting, trial in zip(range(len(untold) - 1, -1, -1), untold, strict=True):
            if self._progress is not None:
                self._progress(trial, self.best, left + waiting)

    def outcome(self) -> Outcome:
        self._tell(0)
        return Outcome(self.best, tuple(self.known.values()), self._method, self._rounds)
