"""Search spaces with a degradation and a size at every point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from shrinkpoint.schemes.search.space import Axis, Point, Space
from shrinkpoint.schemes.search.trials import Trials


@dataclass
class Landscape:
    """What a search walks over.

    Attributes:
        degradations, sizes: by point.
        asked: every point that was measured, in order.
    """

    space: Space
    degradations: dict[Point, float]
    sizes: dict[Point, float]
    threshold: float = 0.5
    asked: list[Point] = field(default_factory=list)

    @property
    def points(self) -> list[Point]:
        return [point for variant in self.space.variants for point in self.space.points(variant)]

    def measure(self, point: Point) -> float:
        self.asked.append(point)
        return self.degradations[point]

    def size(self, point: Point) -> float:
        return self.sizes[point]

    def smallest(self, variants: Sequence[str] | None = None) -> float | None:
        """By brute force: the smallest size that holds."""
        some = [point for point in self.points if point.variant in (variants or self.space.variants)]
        sizes = (self.sizes[point] for point in some if self.degradations[point] <= self.threshold)
        return min((size for size in sizes if size < math.inf), default=None)


class Wide(Trials):
    """Trials as a group of `width` ranks would make them, one after the other in this process."""

    def __init__(self, measure, width: int) -> None:
        super().__init__(measure)
        self.width = width
        self.rounds: list[list[Point]] = []

    def run(self, points):
        assert 0 < len(points) <= self.width
        self.rounds.append(list(points))
        self.seconds |= dict.fromkeys(points, 0.0)
        return [self._measure(point) for point in points]

    def predict_sizes(self, predict, points):
        return Trials(self._measure).predict_sizes(predict, points)


def space_of(sides: Sequence[int], variants: tuple[str, ...] = ("",)) -> Space:
    return Space(tuple(Axis(f"axis{i}", tuple(range(side))) for i, side in enumerate(sides)), variants)


def random_landscape(
    seed: int, sides: Sequence[int] = (6, 6, 3), variants: tuple[str, ...] = ("",), sizes: str = "any"
) -> Landscape:
    """A landscape whose degradation never rises towards the safe end, with plateaus now and then.

    Args:
        sizes: "any" is in no order, with ties; "monotone" rises strictly towards the safe end.
    """
    random, space = np.random.default_rng(seed), space_of(sides, variants)
    found = Landscape(space, {}, {})
    for variant in variants:
        bumps = random.exponential(size=tuple(sides)) ** 2 * (random.random(tuple(sides)) < random.random())
        size = (
            random.integers(1, 50, tuple(sides)).astype(float) if sizes == "any" else random.random(tuple(sides)) + 0.01
        )
        for axis in range(len(sides)):
            bumps = np.flip(np.cumsum(np.flip(bumps, axis), axis), axis)
            size = np.cumsum(size, axis) if sizes == "monotone" else size
        for point in space.points(variant):
            found.degradations[point] = float(bumps[point.index])
            found.sizes[point] = float(size[point.index])
    found.threshold = float(np.quantile(list(found.degradations.values()), random.random()))
    if random.random() < 0.1:  # nothing holds
        found.degradations = {point: found.threshold + 1 + value for point, value in found.degradations.items()}
    return found


@st.composite
def landscapes(draw: st.DrawFn, sizes: str = "any") -> Landscape:
    sides = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    variants = draw(st.sampled_from([("",), ("magnitude", "sensitivity"), ("a", "b", "c")]))
    return random_landscape(draw(st.integers(0, 2**32 - 1)), sides, variants, sizes)
