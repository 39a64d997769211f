"""The steady state: what held last time nearly holds now, so only its neighbours are tried.

arXiv 2306.11800 sec. 3.4, "delta-neighbourhood search". Not given there, and decided here: a step is one value on any
number of axes at once (radius 1 in the maximum norm); an improvement is significant from a tenth of the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.search.ledger import Ledger
from shrinkpoint.schemes.search.outcome import Outcome, Trial
from shrinkpoint.schemes.search.progress import Progress
from shrinkpoint.schemes.search.space import Point, Space, dominated
from shrinkpoint.schemes.search.trials import Trials

SIGNIFICANT = 0.1
"""Of the threshold: by how much another variant must be better."""


def neighbourhood(
    space: Space, sizes: Callable[[Point], float], trials: Trials, threshold: float, last: Point, *,
    variants: Sequence[str] | None = None, radius: int = 1, coarser: bool = False, progress: Progress | None = None,
) -> Outcome:  # fmt: skip
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
    others = [variant for variant in space.allowed(variants) if variant != last.variant]
    _check(space, last, radius)
    rivals = [Point(variant, last.index) for variant in (last.variant, *others)]
    around = {rival: [*_around(space, rival, radius, coarser)] for rival in rivals}
    points = sorted(point for some in around.values() for point in some)
    predicted = trials.sizes(sizes, points)
    ledger = Ledger("neighbourhood", trials, predicted, threshold, progress)
    center = _switched(rivals, ledger) if others else last
    _first_that_holds(sorted(around[center], key=lambda point: (predicted[point], point)), ledger)
    return ledger.outcome()


def _check(space: Space, last: Point, radius: int) -> None:
    inside = last.variant in space.variants and len(last.index) == len(space.axes)
    if not inside or not all(0 <= i < side for i, side in zip(last.index, space.sides, strict=True)):
        raise PolicyError("last", found=f"{last}", expected="a point of the space", do="search the whole space instead")
    if radius < 0:
        raise PolicyError("radius", found=f"{radius}", expected="0 or more", do="say 1")


def _around(space: Space, center: Point, radius: int, coarser: bool) -> Iterator[Point]:
    for point in space.points(center.variant):
        near = all(abs(i - j) <= radius for i, j in zip(point.index, center.index, strict=True))
        if near and (coarser or not dominated(point, center)):
            yield point


def _switched(rivals: Sequence[Point], ledger: Ledger) -> Point:
    """The one of `rivals` to search around; all of them are measured, the last choice is the first of them."""
    for i in range(0, len(rivals), ledger.width):
        ledger.measure(rivals[i : i + ledger.width], count=False)
    stay, *_ = rivals
    best = min(rivals, key=lambda point: _degradation(ledger.known[point]))
    gain = _degradation(ledger.known[stay]) - _degradation(ledger.known[best])
    return best if gain > SIGNIFICANT * ledger.threshold else stay  # inf - inf is no gain


def _degradation(trial: Trial) -> float:
    return math.inf if math.isnan(trial.degradation) else trial.degradation


def _first_that_holds(candidates: Sequence[Point], ledger: Ledger) -> None:
    """Measure candidates in their order until one holds; what is known already costs nothing."""
    waiting = [point for point in candidates if math.isfinite(ledger.size(point))]
    while ledger.best is None and (waiting := _may_hold(waiting, ledger)):
        batch = _batch(waiting, ledger)
        waiting = waiting[len(batch) :]
        fresh = [point for point in batch if point not in ledger.known]
        if fresh:
            ledger.measure(fresh, count=False)
        for point in batch:
            ledger.offer(ledger.known[point])
        ledger.left = len(waiting)


def _may_hold(waiting: Sequence[Point], ledger: Ledger) -> list[Point]:
    """Those that are not more aggressive than one that failed."""
    failed = [point for point, trial in ledger.known.items() if not trial.meets(ledger.threshold)]
    return [point for point in waiting if not any(dominated(point, bad) for bad in failed)]


def _batch(waiting: Sequence[Point], ledger: Ledger) -> list[Point]:
    """The next candidates: as many as can be measured in one round, and no further than one that is known to hold."""
    batch: list[Point] = []
    fresh = 0
    for point in waiting:
        fresh += point not in ledger.known
        if fresh > ledger.width:
            break
        batch.append(point)
        if point in ledger.known and ledger.known[point].meets(ledger.threshold):
            break
    return batch
