"""The space of settings that is searched, and trials of its points, which ranks measure together.

The space is a grid whose axes are ordered by quality, for each of several variants. It is the configuration cube of
arXiv 2306.11800 sec. 3.4: bins, pruning and protection are axes; the pruning metric is a variant, because neither
metric is better everywhere.

Data-parallel replicas hold the same state, so each can try another point (sec. 3.4). After every round all of them know
all answers, and each continues alone to the same next round.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import finite_or_text
from shrinkpoint.sharding.collectives import gather_or_raise

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

METRIC = "metric"  # The setting that names a point's variant


@dataclass(frozen=True)
class Axis:
    """The values of one setting, ordered by quality.

    Raises:
        PolicyError: no values, a duplicate value, or the reserved name "metric".
    """

    name: str  # of the setting
    # From the most aggressive to the safest: with everything else equal, quality never falls with the index.
    values: tuple[float | int, ...]

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values):
            where, expected = f"Axis({self.name!r})", "different values, at least one"
            raise PolicyError(where, found=repr(self.values), expected=expected, do="name them")
        if self.name == METRIC:
            raise PolicyError("Axis", found=repr(self.name), expected="another name", do="let variants be the metrics")

    def nearest_safe_index(self, value: object) -> int | None:
        """The index of `value`, or of the nearest safer one; None if there is neither."""
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        if value in self.values:
            return self.values.index(value)
        steps = [b > a for a, b in itertools.pairwise(self.values)]
        if not steps or any(steps) != all(steps):
            return None  # which of two numbers is safer is known only if the values are monotone
        safer = (i for i, other in enumerate(self.values) if (other > value if steps[0] else other < value))
        return next(safer, None)


@dataclass(frozen=True, order=True)
class Point:
    """One choice on every axis, for one variant."""

    variant: str  # one of the space's variants
    index: tuple[int, ...]  # the index of a value for each of the space's axes, in their order


@dataclass(frozen=True)
class Space:
    """A grid of points for each variant.

    Raises:
        PolicyError: a duplicate axis or variant, or no variant.
    """

    axes: tuple[Axis, ...]  # the settings that are ordered by quality
    # The values of a setting without such an order, as the pruning metric; ("",) if there is none.
    variants: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        for argument, names in (("axes", [axis.name for axis in self.axes]), ("variants", list(self.variants))):
            if len(set(names)) < len(names) or (argument == "variants" and not names):
                where, expected = f"Space({argument}=)", "different names"
                raise PolicyError(where, found=repr(names), expected=expected, do="name each once")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(axis.values) for axis in self.axes)

    def points(self, variant: str) -> tuple[Point, ...]:
        """Every point of a variant, the most aggressive first and the safest last."""
        return tuple(Point(variant, index) for index in itertools.product(*map(range, self.shape)))

    def __contains__(self, point: Point) -> bool:
        inside = point.variant in self.variants and len(point.index) == len(self.axes)
        return inside and all(0 <= i < side for i, side in zip(point.index, self.shape, strict=True))

    def safest(self, variant: str) -> Point:
        return Point(variant, tuple(side - 1 for side in self.shape))

    def resolve_variants(self, variants: Sequence[str] | None) -> tuple[str, ...]:
        """The same variants without duplicates; None: all variants of this space.

        Raises:
            PolicyError: an unknown variant, or none at all.
        """
        if variants is None:
            return self.variants
        if not variants or not set(variants) <= set(self.variants):
            expected = " or ".join(map(repr, self.variants))
            found, do = repr(tuple(variants)), "allow at least one of them"
            raise PolicyError("variants", found=found, expected=expected, do=do)
        return tuple(dict.fromkeys(variants))

    def settings(self, point: Point) -> dict[str, float | int | str]:
        """The settings of a point by name; its variant is "metric", unless the space has only the variant ""."""
        metric = {} if self.variants == ("",) else {METRIC: point.variant}
        return {axis.name: axis.values[i] for axis, i in zip(self.axes, point.index, strict=True)} | metric

    def point(self, settings: Mapping[str, object]) -> Point | None:
        """The point with these settings, which may come from a file and from another space.

        A value that an axis no longer has becomes the nearest safer one. Settings without an axis are ignored.

        Returns:
            None if an axis has neither the value nor a safer one, or if a setting or the variant is missing.
        """
        variant = settings.get(METRIC, "")
        index = [axis.nearest_safe_index(settings.get(axis.name, math.nan)) for axis in self.axes]
        if not isinstance(variant, str) or variant not in self.variants or None in index:
            return None
        return Point(variant, tuple(i for i in index if i is not None))

    def point_from_config(self, config: Mapping[str, Any]) -> Point:
        """The point with these settings, all of them values of this space; without a metric, its first variant.

        Raises:
            PolicyError: there is none.
        """
        point = self.point({METRIC: self.variants[0], **config}) if isinstance(config, Mapping) else None
        settings = {} if point is None else self.settings(point)
        if point is None or any(settings.get(name) != value for name, value in config.items()):
            expected = "a value for each of " + ", ".join(f"{axis.name} {axis.values}" for axis in self.axes)
            if self.variants != ("",):
                expected += f"; and a metric of {self.variants}, the first where none is named"
            raise PolicyError("config", found=repr(config), expected=expected, do="choose among these")
        return point


def is_dominated(a: Point, b: Point) -> bool:
    """True if `a` is another point of the same variant that is at least as aggressive as `b` on every axis."""
    return a != b and a.variant == b.variant and all(i <= j for i, j in zip(a.index, b.index, strict=True))


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
            raise PolicyError("Trials.run", found=found, expected=expected, do="split them")
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
        found, do = f"{type(error).__name__}: {error}", f"see the traceback of rank {self._rank}"
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
            raise PolicyError("threshold", found=f"{threshold}", expected="0 or more", do="say e.g. 0.01 for 1%")
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
