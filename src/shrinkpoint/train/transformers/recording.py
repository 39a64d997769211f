"""Gradients, recorded where the Trainer says that they are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from shrinkpoint.train.gradients import Gradients


class Recording(TrainerCallback):
    """Calls a recorder at every optimizer step: gradients are accumulated and clipped by then, and not yet cleared.

    Args:
        recorder: gives the recorder, anew for every training.
    """

    def __init__(self, recorder: Callable[[], Gradients]) -> None:
        self._recorder_of = recorder
        self._recorder: Gradients | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go on from the step that training goes on from."""
        self._recorder = self._recorder_of()
        self._recorder.at(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hold it no longer, nor the model in it, which the next training may make anew."""
        self._recorder = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record."""
        if self._recorder is not None:
            self._recorder.after_backward()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count."""
        if self._recorder is not None:
            self._recorder.before_zero_grad()
