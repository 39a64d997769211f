"""When gradients bear strong compression and when they do not: Accordion (arXiv 2010.16248)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError

CompressorT = TypeVar("CompressorT")
_STATE_FIELDS = ("critical", "previous", "squares", "steps", "counted", "rate", "fell")


class Accordion(Generic[CompressorT]):
    """Two ways to compress, and which of them is in use: the mild one while the gradient's norm changes fast.

    At the end of every window of steps, with `before` and `now` the norms in the last two windows, the next window is
    critical if `|before - now| / before >= threshold`, or if the learning rate fell (Algorithm 1). The norm of a window
    is the root of the mean square over its steps; the paper takes that of the summed gradient, which would need
    memory of the size of the model. Steps whose gradient is not finite do not count. The first two windows are
    critical: there is nothing to compare with.

    Decisions rest on numbers that were summed over the group, so that all ranks take the same one.

    Args:
        strong: an operator, or feedback around one, or its spec: outside critical regimes.
        mild: the same, within them.
        threshold: of the relative change.
        interval: steps of a window.

    Raises:
        PolicyError: a threshold or a window that is not positive.
    """

    def __init__(self, strong: CompressorT, mild: CompressorT, *, threshold: float = 0.5, interval: int = 100) -> None:
        validate.check_float("Accordion, threshold", threshold)
        validate.check_int("Accordion, every", interval)
        self.strong, self.mild, self.threshold, self.interval = strong, mild, threshold, interval
        self.critical = True
        self.previous = math.nan
        """The norm in the window before; nan: there was none."""
        self.squares, self.steps, self.counted = 0.0, 0, 0
        self.rate, self.fell = math.inf, False

    @property
    def compressor(self) -> CompressorT:
        """What is in use."""
        return self.mild if self.critical else self.strong

    def set_lr(self, lr: float) -> None:
        """Tell the learning rate of the steps to come: the window after one in which it fell is critical.

        For schedules that fall by steps. One that falls all the time would keep compression mild for good.
        """
        self.fell |= lr < self.rate
        self.rate = lr

    def observe(self, squared_norm: float, all_reduce_sum: Callable[[list[float]], list[float]]) -> bool:
        """Count one step.

        Args:
            squared_norm: of the norm of the step's gradient, or of this rank's share of it.
            all_reduce_sum: sums numbers over the group; called by every rank at the same step, once in a window.

        Returns:
            Whether what is in use changed.
        """
        self.steps += 1
        if math.isfinite(squared_norm):
            self.squares, self.counted = self.squares + squared_norm, self.counted + 1
        if self.steps < self.interval:
            return False
        squares, counted, fell = all_reduce_sum([self.squares, float(self.counted), float(self.fell)])
        now = math.sqrt(squares / counted) if counted else math.nan
        before, self.critical = self.critical, self._is_critical(now) or fell > 0
        self.previous = now
        self.squares, self.steps, self.counted, self.fell = 0.0, 0, 0, False
        return before != self.critical

    def _is_critical(self, norm: float) -> bool:
        """Whether the norm changed so much, or cannot be compared."""
        return not abs(self.previous - norm) < self.threshold * self.previous and not self.previous == norm == 0

    def describe(self) -> dict[str, Any]:
        """What the ranks must agree on."""
        return {
            "strong": str(self.strong),
            "mild": str(self.mild),
            "threshold": self.threshold,
            "every": self.interval,
        }

    def state_dict(self) -> dict[str, Any]:
        """The regime, and what is known of the window under way."""
        return {name: getattr(self, name) for name in _STATE_FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the one that gave this state would have.

        Raises:
            MismatchError: it is not such a state.
        """
        if set(state) != set(_STATE_FIELDS):
            found, expected = f"a state of {sorted(state)}", f"one of {sorted(_STATE_FIELDS)}"
            raise MismatchError("Accordion", found=found, expected=expected, do="give what its state_dict() gave")
        for name, value in state.items():
            setattr(self, name, value)


def check_accordion(where: str, accordion: object) -> None:
    """Refuse what is no accordion.

    Raises:
        PolicyError: it is none.
    """
    expected, do = "an Accordion, or None", "make one: Accordion(strong, mild)"
    validate.check_instance(f"{where}, accordion", accordion, Accordion, expected=expected, do=do, allow_none=True)
