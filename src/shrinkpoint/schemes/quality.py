"""Degradation: how much worse a model has become, relative to itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Base:
    """What the unchanged weights measure, and by how much two measurements of them differ, relatively."""

    value: float
    noise: float


@dataclass
class Quality:
    """Degradation as the tables of arXiv 2306.11800 have it: relative to the state before.

    Attributes:
        measure: evaluates with these values in place of the state's own.
        higher: more is better.
        base: what the unchanged weights measure.
    """

    measure: Callable[[Values], float]
    higher: bool
    base: float = math.nan

    def measure_base(self, *, twice: bool) -> Base:
        """Measure the unchanged weights; `twice` tells how noisy that is, else it is taken to be exact.

        A value that is not finite the second time is what is returned: there is nothing to compare with then.
        """
        value = self.measure({})
        if not twice or not math.isfinite(value):
            return Base(value, 0.0)
        again = self.measure({})
        return Base(value, abs(self._worse(again, value))) if math.isfinite(again) else Base(again, 0.0)

    def degradation(self, values: Values) -> float:
        """By how much of `base` the values are worse; negative where they are better, nan where they are nowhere.

        Relative to 1 where `base` is zero, as an accuracy may be in the beginning.
        """
        return self._worse(self.measure(values), self.base)

    def _worse(self, value: float, base: float) -> float:
        return worse(value, base, higher=self.higher)


def worse(value: float, base: float, *, higher: bool) -> float:
    """By how much `value` is worse than `base`, relative to it, or to 1 where it is zero; `higher`: more is better."""
    change = base - value if higher else value - base
    return change / (abs(base) or 1.0)
