"""Search among the neighbours of the last choice: what held last time nearly holds now.

arXiv 2306.11800 sec. 3.4, "delta-neighbourhood search". The paper leaves open what a neighbour and a significant
improvement are. Here a step is one value on any number of axes at once (radius 1 in the maximum norm), and an
improvement is significant from a tenth of the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.search.progress import Progress
from shrinkpoint.schemes.search.space import Point, Space, is_dominated
from shrinkpoint.schemes.search.trial_log import TrialLog
from shrinkpoint.schemes.search.trials import SearchResult, Trial, Trials

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
