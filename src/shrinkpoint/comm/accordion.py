"""Accordion (arXiv 2010.16248): strong compression of gradients outside of critical regimes of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.state_check import check_entries, part_error

CompressorT = TypeVar("CompressorT")
_STATE_FIELDS = ("critical", "previous", "squares", "steps", "counted", "rate", "fell")


class Accordion(Generic[CompressorT]):
    """Switches between two compressors: the mild one is used while the norm of the gradient changes fast.

    At the end of every window of steps, with `before` and `now` the norms in the last two windows, the next window is
    critical if `|before - now| / before >= threshold`, or if the learning rate fell (Algorithm 1). The norm of a window
    is the root mean square over its steps; the paper takes the norm of the summed gradient, which would need memory
    of the size of the model. Steps whose gradient is not finite do not count. The first two windows are critical: there
    is nothing to compare them with.

    Decisions are made on numbers summed over the group, so that they are the same on all ranks.

    Args:
        strong: a compressor, a feedback, or the spec of either, for use outside of critical regimes.
        mild: the same, for use within them.
        threshold: of the relative change.
        interval: steps of a window.

    Attributes:
        critical: True if the window under way is critical.
        previous: the norm of the previous window; nan if there was none.
        step_square: the squared norm of the step under way, or of this rank's share of it; not part of `state_dict`.

    Raises:
        PolicyError: the threshold or the interval is not positive.
    """

    def __init__(self, strong: CompressorT, mild: CompressorT, *, threshold: float = 0.5, interval: int = 100) -> None:
        validate.check_float("Accordion, threshold", threshold)
        validate.check_int("Accordion, interval", interval)
        self.strong, self.mild, self.threshold, self.interval = strong, mild, threshold, interval
        self.critical = True
        self.previous = math.nan
        self.squares, self.steps, self.counted = 0.0, 0, 0
        self.rate, self.fell = math.inf, False
        self.step_square: Tensor | float = 0.0

    @property
    def compressor(self) -> CompressorT:
        """The compressor in use."""
        return self.mild if self.critical else self.strong

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps: the window after one in which it fell is critical.

        For schedules that fall by steps. With one that falls all the time compression would always be mild.
        """
        rate = float(lr)  # a scheduler of an optimizer on a device has tensors
        self.fell |= rate < self.rate
        self.rate = rate

    def add_gradient(self, gradient: Tensor) -> None:
        """Add a part of the step's gradient, any floating shape, to its norm; waits for no device."""
        self.step_square = self.step_square + torch.linalg.vector_norm(gradient, dtype=torch.float64).square()

    def end_step(self, all_reduce_sum: Callable[[list[float]], list[float]]) -> bool:
        """Record the norm of the gradient that was added since the last step.

        Args:
            all_reduce_sum: sums numbers over the group; called by every rank at the same step, once in a window.

        Returns:
            Whether the compressor in use changed.
        """
        squared_norm, self.step_square = float(self.step_square), 0.0
        self.steps += 1
        if math.isfinite(squared_norm):
            self.squares, self.counted = self.squares + squared_norm, self.counted + 1
        if self.steps < self.interval:
            return False
        squares, counted, fell = all_reduce_sum([self.squares, float(self.counted), float(self.fell)])
        norm = math.sqrt(squares / counted) if counted else math.nan
        # the change may be nan, of windows that cannot be compared
        is_steady = abs(self.previous - norm) < self.threshold * self.previous or self.previous == norm == 0
        was_critical, self.critical = self.critical, not is_steady or fell > 0
        self.previous = norm
        self.squares, self.steps, self.counted, self.fell = 0.0, 0, 0, False
        return was_critical != self.critical

    def describe(self) -> dict[str, Any]:
        """The configuration that all ranks must have in common."""
        compressors = {"strong": str(self.strong), "mild": str(self.mild)}
        return {**compressors, "threshold": self.threshold, "every": self.interval}

    def progress(self) -> dict[str, Any]:
        """The part of the state that is the same on all ranks at any step."""
        return {"critical": self.critical, "steps": self.steps}

    def state_dict(self) -> dict[str, Any]:
        """The regime, and the sums of the window under way."""
        return {name: getattr(self, name) for name in _STATE_FIELDS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            MismatchError: it has other entries, or values of another kind; then nothing has changed.
        """
        entries = check_entries("Accordion", state, _STATE_FIELDS)
        values = {name: _check_value(name, entries[name]) for name in _STATE_FIELDS}
        for name, value in values.items():
            setattr(self, name, value)


def _check_value(name: str, value: Any) -> Any:
    """Return a value of a state; a MismatchError if it cannot be the one of that name."""
    if isinstance(value, Tensor) and value.numel() == 1:  # a rate that was given as a tensor
        value = value.item()
    is_flag, is_number = isinstance(value, bool), isinstance(value, Real) and not isinstance(value, bool)
    if name in ("critical", "fell"):
        is_valid, expected = is_flag, "True or False"
    elif name in ("steps", "counted"):
        is_valid, expected = is_number and isinstance(value, int) and value >= 0, "a whole number from 0"
    elif name == "squares":
        is_valid, expected = is_number and value >= 0, "a number from 0"
    else:  # nan before the end of the first window, infinity before the first rate
        is_valid, expected = is_number, "a number"
    if not is_valid:
        raise part_error(f"Accordion, {name} of a state", validate.describe_value(value), expected)
    return value
