"""The steady state: what held last time nearly holds now, so only its neighbours are tried.

arXiv 2306.11800 sec. 3.4, "delta-neighbourhood search". Not given there, and decided here: a step is one value on any
number of axes at once (radius 1 in the maximum norm); an improvement is significant from a tenth of the threshold.
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
"""Of the threshold: by how much another variant must be better."""


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
    """The first point near `last`, in order of predicted size, whose degradation is at most `threshold`.

    Where another variant is allowed, `last` is measured under each of them first, and the search goes on in the one
    with the least degradation if it is significantly less.

    Args:
        sizes: predicted bytes of any point; an infinite one excludes a point.
        last: what was chosen last time.
        variants: that may be switched to; all where None. The one of `last` is allowed in any case.
        radius: steps on each axis.
        coarser: whether points strictly more aggressive than `last` may be chosen. The paper excludes them: a model
            becomes denser in the course of training.

    Returns:
        An outcome whose `chosen` is None where no neighbour holds: search the whole space then.

    Raises:
        PolicyError: a negative threshold or radius, an unknown variant, a point outside of the space; and see
            `Trials.run`.
    """
    others = [variant for variant in space.resolve_variants(variants) if variant != last.variant]
    _check_start(space, last, radius)
    rivals = [Point(variant, last.index) for variant in (last.variant, *others)]
    around = {rival: [*_neighbours(space, rival, radius, coarser)] for rival in rivals}
    points = sorted(point for some in around.values() for point in some)
    predicted = trials.predict_sizes(sizes, points)
    ledger = TrialLog("neighbourhood", trials, predicted, threshold, progress)
    center = _choose_variant(rivals, ledger) if others else last
    _measure_until_success(sorted(around[center], key=lambda point: (predicted[point], point)), ledger)
    return ledger.result()


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
    """The one of `alternatives` to search around; all of them are measured, the last choice is the first of them."""
    for i in range(0, len(alternatives), trial_log.width):
        trial_log.measure(alternatives[i : i + trial_log.width], eligible=False)
    stay, *_ = alternatives
    best = min(alternatives, key=lambda point: _comparable_degradation(trial_log.trials[point]))
    gain = _comparable_degradation(trial_log.trials[stay]) - _comparable_degradation(trial_log.trials[best])
    return best if gain > MIN_VARIANT_GAIN * trial_log.threshold else stay  # inf - inf is no gain


def _comparable_degradation(trial: Trial) -> float:
    return math.inf if math.isnan(trial.degradation) else trial.degradation


def _measure_until_success(candidates: Sequence[Point], trial_log: TrialLog) -> None:
    """Measure candidates in their order until one holds; what is known already costs nothing."""
    waiting = [point for point in candidates if math.isfinite(trial_log.size(point))]
    while trial_log.best is None and (waiting := _undecided(waiting, trial_log)):
        batch = _next_batch(waiting, trial_log)
        waiting = waiting[len(batch) :]
        fresh = [point for point in batch if point not in trial_log.trials]
        if fresh:
            trial_log.measure(fresh, eligible=False)
        for point in batch:
            trial_log.consider(trial_log.trials[point])
        trial_log.remaining = len(waiting)


def _undecided(waiting: Sequence[Point], trial_log: TrialLog) -> list[Point]:
    """Those that are not more aggressive than one that failed."""
    failed = [point for point, trial in trial_log.trials.items() if not trial.meets(trial_log.threshold)]
    return [point for point in waiting if not any(is_dominated(point, bad) for bad in failed)]


def _next_batch(waiting: Sequence[Point], trial_log: TrialLog) -> list[Point]:
    """The next candidates: as many as can be measured in one round, and no further than one that is known to hold."""
    batch: list[Point] = []
    fresh = 0
    for point in waiting:
        fresh += point not in trial_log.trials
        if fresh > trial_log.width:
            break
        batch.append(point)
        if point in trial_log.trials and trial_log.trials[point].meets(trial_log.threshold):
            break
    return batch
