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

from shrinkpoint.schemes.search.ledger import Ledger
from shrinkpoint.schemes.search.outcome import Outcome
from shrinkpoint.schemes.search.progress import Progress
from shrinkpoint.schemes.search.space import Point, Space, dominated
from shrinkpoint.schemes.search.trials import Trials


def diagonal(
    space: Space, sizes: Callable[[Point], float], trials: Trials, threshold: float, *,
    variants: Sequence[str] | None = None, progress: Progress | None = None,
) -> Outcome:  # fmt: skip
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
    allowed = space.allowed(variants)
    predicted = trials.sizes(sizes, [point for variant in allowed for point in space.points(variant)])
    ledger = Ledger("diagonal", trials, predicted, threshold, progress)
    whole = _Box((0,) * len(space.axes), tuple(side - 1 for side in space.sides))
    for variant in allowed:
        lines = [_Line(whole, -1, len(whole.diagonal))]
        while lines := _open(lines, variant, ledger):
            lines = _round(lines, variant, ledger)
            ledger.left = sum(line.open.bit_length() for line in lines)
    return ledger.outcome()


@dataclass(frozen=True, order=True)
class _Box:
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

    def without_safer(self, good: tuple[int, ...]) -> Iterator[_Box]:
        """What is not at least as safe as `good`, a point of this box, as boxes that do not overlap."""
        for a, limit in enumerate(good):
            if limit > self.low[a]:
                low = (*good[:a], *self.low[a:])
                yield _Box(low, (*self.high[:a], limit - 1, *self.high[a + 1 :]))

    def without_bolder(self, bad: tuple[int, ...]) -> Iterator[_Box]:
        """What is not at least as aggressive as `bad`, which may lie outside, as boxes that do not overlap."""
        if any(b < low for b, low in zip(bad, self.low, strict=True)):
            yield self
            return
        capped = tuple(min(b, high) for b, high in zip(bad, self.high, strict=True))
        for a, limit in enumerate(capped):
            if limit < self.high[a]:
                high = (*capped[:a], *self.high[a:])
                yield _Box((*self.low[:a], limit + 1, *self.low[a + 1 :]), high)


@dataclass(frozen=True, order=True)
class _Line:
    """A box whose diagonal is being searched.

    Attributes:
        bad: the last place on it known to fail; -1 where none is.
        good: the first place known to hold; the diagonal's length where none is.
    """

    box: _Box
    bad: int
    good: int

    @property
    def open(self) -> int:
        """Places of which nothing is known."""
        return self.good - self.bad - 1

    def places(self, most: int) -> list[int]:
        """Up to `most` of the open places, evenly spread."""
        parts = min(most, self.open)
        return [self.bad + 1 + ((2 * i + 1) * self.open) // (2 * parts) for i in range(parts)]

    def after(self, holds: Mapping[int, bool]) -> _Line:
        """An answer above the first one that holds tells nothing, even where noise makes it fail."""
        good = min((t for t, held in holds.items() if held), default=self.good)
        return _Line(self.box, max((t for t in holds if t < good), default=self.bad), good)

    def rest(self) -> list[_Line]:
        """What it leaves open once all places are known."""
        diagonal = self.box.diagonal
        boxes = [self.box]
        if self.good < len(diagonal):
            boxes = list(self.box.without_safer(diagonal[self.good]))
        if self.bad >= 0:
            boxes = [part for box in boxes for part in box.without_bolder(diagonal[self.bad])]
        return [_Line(box, -1, len(box.diagonal)) for box in boxes]


def _open(lines: Sequence[_Line], variant: str, ledger: Ledger) -> list[_Line]:
    """Those that may find something smaller than the best, the one with the smallest corner first."""
    failed = [point for point, trial in ledger.known.items() if not trial.meets(ledger.threshold)]
    some = [line for line in lines if not any(dominated(Point(variant, line.box.high), point) for point in failed)]
    corners = sorted((ledger.size(Point(variant, line.box.low)), line) for line in some)
    return [line for size, line in corners if ledger.best is None or size < ledger.best.size]


def _round(lines: Sequence[_Line], variant: str, ledger: Ledger) -> list[_Line]:
    """Measure as many places as there are ranks, those of the first lines; what there is to do after it."""
    chosen: list[list[int]] = []
    for line in lines:
        chosen.append(line.places(ledger.width - sum(map(len, chosen))))
    points = [Point(variant, line.box.diagonal[t]) for line, some in zip(lines, chosen, strict=True) for t in some]
    answers = iter([trial.meets(ledger.threshold) for trial in ledger.measure(points)])
    after = [line.after({t: next(answers) for t in some}) for line, some in zip(lines, chosen, strict=True)]
    return [new for line in after for new in ([line] if line.open else line.rest())]
