"""Trials of a search: how ranks measure points together, what was measured, and the log of one search.

Data-parallel replicas hold the same state, so each can try another point (arXiv 2306.11800 sec. 3.4). After every round
all of them know all answers, and each continues alone to the same next round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shrinkpoint.errors import PolicyError, ShrinkpointError, error_text
from shrinkpoint.schemes.base import finite_or_text
from shrinkpoint.schemes.search.space import Point, Space, is_dominated
from shrinkpoint.sharding.collectives import gather_or_raise

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """A measured point.

    Attributes:
        size: predicted bytes.
        degradation: relative to the state without loss; nan where it could not be measured, which meets no threshold.
        seconds: that measuring took.
    """

    point: Point
    size: float
    degradation: float
    seconds: float

    def meets(self, threshold: float) -> bool:
        return self.degradation <= threshold  # False for nan

    def to_json(self, space: Space) -> dict[str, Any]:
        return {
            "settings": {name: finite_or_text(value) for name, value in space.settings(self.point).items()},
            "size": finite_or_text(self.size),
            "degradation": finite_or_text(self.degradation),
            "seconds": round(self.seconds, 3),
        }


class Progress(Protocol):
    """A callback for every trial of a search."""

    def __call__(self, trial: Trial, best: Trial | None, remaining: int) -> None:
        """Report one trial.

        Args:
            trial: the latest one.
            best: the smallest trial so far that meets the threshold; None if there is none.
            remaining: the estimated number of trials to come; 0 only after the last one.
        """
        ...


@dataclass(frozen=True)
class SearchResult:
    """The end of a search."""

    chosen: Trial | None  # One of `trials`; None where nothing that was tried meets the threshold
    trials: tuple[Trial, ...]  # In the order in which they were measured; each point once
    method: str  # The name of the search
    rounds: int  # How often all ranks measured together; without a group, as many as there are trials

    def to_json(self, space: Space) -> dict[str, Any]:
        return {
            "method": self.method,
            "rounds": self.rounds,
            "chosen": self.chosen and self.chosen.to_json(space),
            "trials": [trial.to_json(space) for trial in self.trials],
        }


class Trials:
    """Measures points, `width` at a time.

    A search over a group is a collective operation: all ranks run the same search over the same space.

    Args:
        measure: the relative degradation at a point. Every rank has the same one: the same state, the same batches.
        group: the ranks that share the work; with nccl each has set its CUDA device, as always.
        sum_over_shards: sums predicted sizes over ranks that have shards of one state, and measure each point
            together; by default the state is not sharded.

    Attributes:
        width: points that are measured at the same time.
        seconds: that each point took where it was measured.

    Raises:
        PolicyError: this process is not in the group.
    """

    def __init__(
        self,
        measure: Callable[[Point], float],
        *,
        group: ProcessGroup | None = None,
        sum_over_shards: Callable[..., Sequence[float]] = lambda *sizes: sizes,
    ) -> None:
        self._measure, self._group, self._sum_over_shards = measure, group, sum_over_shards
        self._rank, self.width = 0, 1
        self.seconds: dict[Point, float] = {}
        if group is not None:
            import torch.distributed as dist

            self._rank, self.width = dist.get_rank(group), dist.get_world_size(group)
            if self._rank < 0:
                found, do = "a group without this process", "search only on the group's ranks"
                raise PolicyError("group", found=found, do=do)

    def run(self, points: Sequence[Point]) -> list[float]:
        """The degradations at `points`, in one round; rank r measures the r-th.

        Raises:
            PolicyError: more points than ranks; or what `measure` raised on another rank. Errors of this library keep
                their class. Every rank raises, and the text names the rank; without a group `measure`'s error passes
                as it is.
        """
        if len(points) > self.width:
            found, expected = f"{len(points)} points", f"at most {self.width}"
            raise PolicyError("Trials.run", found=found, expected=expected, do="measure them in several rounds")
        answers = self.run_on_all_ranks(lambda: self._measure_timed(points[self._rank : self._rank + 1]))
        self.seconds |= {point: seconds for point, (_, seconds) in zip(points, answers, strict=False)}
        return [degradation for degradation, _ in answers[: len(points)]]

    def predict_sizes(self, predict: Callable[[Point], float], points: Sequence[Point]) -> dict[Point, float]:
        """The predicted sizes of `points`, of all shards together; each rank of a group predicts a part of the points.

        nan becomes infinite, so that such a point comes last.
        """
        parts = self.run_on_all_ranks(lambda: [float(predict(point)) for point in points[self._rank :: self.width]])
        sizes: dict[Point, float] = {}
        for rank, part in enumerate(parts):
            sizes |= zip(points[rank :: self.width], part, strict=True)
        local = [math.inf if math.isnan(sizes[point]) else sizes[point] for point in points]
        return dict(zip(points, self._sum_over_shards(*local), strict=True))

    def _measure_timed(self, points: Sequence[Point]) -> tuple[float, float]:
        start = time.perf_counter()
        degradation = float(self._measure(points[0])) if points else math.nan
        return degradation, time.perf_counter() - start

    def run_on_all_ranks(self, compute: Callable[[], T]) -> list[T]:
        """Results of all ranks, by rank; an error of one rank is raised by all, or the others would wait for ever."""
        if self._group is None:
            return [compute()]
        return gather_or_raise(compute, self._group, describe_error=self._describe_error)

    def _describe_error(self, error: Exception) -> ShrinkpointError:
        if isinstance(error, ShrinkpointError):
            return error
        found, do = error_text(error), f"see the traceback of rank {self._rank}"
        return PolicyError("evaluate", found=found, expected="a number", do=do)


class TrialLog:
    """Measures points, remembers the trials and reports them to a progress callback.

    Args:
        method: the name of the search.
        trials: what measures.
        sizes: predicted bytes of every point that may be measured.
        threshold: the largest accepted degradation.
        progress: called for every trial; None: nothing is reported.

    Attributes:
        threshold, sizes: as given.
        width: points that are measured in one round.
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
            raise PolicyError("threshold", found=f"{threshold}", expected="0 or more", do="pass e.g. 0.01 for 1%")
        self._method, self._trials, self._progress = method, trials, progress
        self.sizes, self.threshold, self.width = sizes, threshold, trials.width
        self.trials: dict[Point, Trial] = {}
        self.best: Trial | None = None
        self.remaining = 0
        self._rounds = 0
        self._pending: list[Trial] = []

    def measure(self, points: Sequence[Point], *, eligible: bool = True) -> list[Trial]:
        """Measure points in one round.

        Args:
            points: at most `width`, none of them measured before.
            eligible: True if these trials may become the best.
        """
        self._report(max(1, self.remaining))
        degradations = self._trials.run(points)
        self._rounds += 1
        trials = [
            Trial(point, self.sizes[point], degradation, self._trials.seconds[point])
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

    def rules_out(self, point: Point) -> bool:
        """True if a point is more aggressive than one that failed."""
        return any(is_dominated(point, tried) for tried, t in self.trials.items() if not t.meets(self.threshold))

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
