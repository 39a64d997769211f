"""Degradation: how much worse a model has become, relative to itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.statistics import paired

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Reading:
    """What `evaluate` said of some weights.

    Attributes:
        value: the loss, or the score; the mean of the examples, where these are known.
        examples: of each example, or batch of equal size, by itself; float64 [n], n >= 2, on the CPU. None: not known.
    """

    value: float
    examples: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, answer: Any) -> Reading:
        """Of what a user's function returned: a number, or a 1-D tensor of each example's loss or score.

        Raises:
            TypeError, ValueError, RuntimeError: it is neither.
        """
        if isinstance(answer, Reading):
            return answer
        if isinstance(answer, Tensor) and answer.dim() == 1 and answer.numel() > 1:
            examples = answer.detach().to("cpu", torch.float64)
            return cls(float(examples.mean()), examples)
        return cls(float(answer.detach() if isinstance(answer, Tensor) else answer))

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.value)

    def is_as(self, other: Reading) -> bool:
        """Whether nothing tells the two apart; what is not finite is like nothing."""
        if self.examples is not None and other.examples is not None:
            return torch.equal(self.examples, other.examples)
        return self.value == other.value


@dataclass(frozen=True)
class Change:
    """By how much some weights are worse than others, in `evaluate`'s own unit.

    Attributes:
        rise: above zero: worse. nan: it could not be measured.
        interval: where the rise on other examples of the kind may lie, with 95 % confidence; None: not known.
    """

    rise: float
    interval: tuple[float, float] | None = None


class Quality:
    """What is lost with some values in the place of a state's own.

    Args:
        measure: evaluates with these values in place of the state's own.
        higher: more is better.

    Attributes:
        base: what the unchanged weights measure; to be set before anything is compared with it.
    """

    def __init__(self, measure: Callable[[Values], Reading], *, higher: bool) -> None:
        self.measure, self._higher = measure, higher
        self.base = Reading(math.nan)

    @property
    def scale(self) -> float:
        """What rises are relative to."""
        return scale_of(self.base.value)

    def change(self, values: Values) -> Change:
        """What the values do."""
        found, sign = self.measure(values), -1.0 if self._higher else 1.0
        before, after = self.base.examples, found.examples
        interval = None
        if before is not None and after is not None and before.shape == after.shape:
            interval = paired(after, before) if self._higher else paired(before, after)
        return Change(sign * (found.value - self.base.value), interval)


def worse(value: float, base: float, *, higher: bool) -> float:
    """By how much `value` is worse than `base`, relative to it, or to 1 where it is zero; `higher`: more is better."""
    change = base - value if higher else value - base
    return change / scale_of(base)


def scale_of(base: float) -> float:
    """What rises are relative to: what was measured; 1 where that is zero, as an accuracy may be in the beginning."""
    return abs(base) or 1.0
