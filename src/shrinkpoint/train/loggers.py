"""Sends the numbers of saves to loggers."""

from __future__ import annotations

from typing import Any, Protocol

from shrinkpoint import validate
from shrinkpoint.store.save_report import SaveReport


class ScalarWriter(Protocol):
    """Interface of `torch.utils.tensorboard.SummaryWriter`, which other loggers share."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None, /) -> Any:
        """Write one number."""
        ...


class TensorBoardHook:
    """An `on_save` that writes the numbers of each checkpoint to TensorBoard, at its step.

    Args:
        writer: a `SummaryWriter`, or anything with its `add_scalar`; any thread may call that.
        prefix: of the tags.

    Raises:
        PolicyError: the writer has no `add_scalar`.
    """

    def __init__(self, writer: ScalarWriter, prefix: str = "checkpoint/") -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise validate.argument_error("writer", writer, "an object with add_scalar", "pass a SummaryWriter")
        self._writer, self._prefix = writer, validate.check_str("prefix", prefix)

    def __call__(self, report: SaveReport) -> None:
        """Write the numbers of one checkpoint."""
        for name, value in report.metrics(self._prefix).items():
            if name != f"{self._prefix}step":
                self._writer.add_scalar(name, value, report.step)
