"""Shows the progress of a search on a terminal or in a log."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TextIO

from shrinkpoint.schemes.search.space import METRIC, Space
from shrinkpoint.schemes.search.trials import Progress, Trial


def progress_printer(space: Space, threshold: float, raw_bytes: int, stream: TextIO | None = None) -> Progress:
    """Make a callback that writes one line per trial; on a terminal, one line that changes, if rich is installed.

    Errors of the stream are ignored: a closed terminal must not end a training run.

    Args:
        threshold: of the search.
        raw_bytes: the uncompressed size, for ratios.
        stream: None: the current stderr.
    """
    printer = _LinePrinter(space, threshold, raw_bytes, sys.stderr if stream is None else stream)
    return (_live_printer(printer) if printer.stream.isatty() else None) or printer


@dataclass(frozen=True)
class _LinePrinter:
    """Writes one line per trial."""

    space: Space
    threshold: float
    raw_bytes: int
    stream: TextIO

    def __call__(self, trial: Trial, best: Trial | None, remaining: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a closed file, or a character it cannot write
            self.stream.write(self.line(trial, best, remaining) + "\n")
            self.stream.flush()

    def line(self, trial: Trial, best: Trial | None, remaining: int) -> str:
        settings = " · ".join(
            str(value) if name == METRIC else f"{name} {value:g}"
            for name, value in self.space.settings(trial.point).items()
        )
        parts = [settings, self._ratio(trial), self.verdict(trial)]
        parts.append(f"best {self._ratio(best)}" if best else "none yet" if remaining else "none")
        parts.append(f"~{remaining} left" if remaining else "done")
        return "   ".join(parts)

    def verdict(self, trial: Trial) -> str:
        limit = f"{100 * self.threshold:g} %"
        if trial.degradation != trial.degradation:
            return f"not a number, {limit} allowed  no"
        degradation = f"{100 * trial.degradation:+.2f} %"
        return f"{degradation} <= {limit}  ok" if trial.meets(self.threshold) else f"{degradation} > {limit}  no"

    def _ratio(self, trial: Trial) -> str:
        return f"{self.raw_bytes / trial.size:.1f}x" if trial.size > 0 else "-"


def _live_printer(printer: _LinePrinter) -> Progress | None:
    """Make a callback that rewrites one line of a terminal; None if rich is missing or the terminal cannot do it."""
    try:
        from rich.console import Console
        from rich.control import Control
        from rich.segment import ControlType
        from rich.text import Text
    except ImportError:
        return None
    console = Console(file=printer.stream, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    erase = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))

    def draw(trial: Trial, best: Trial | None, remaining: int) -> None:
        text = Text(printer.line(trial, best, remaining))
        text.highlight_words([printer.verdict(trial)], "green" if trial.meets(printer.threshold) else "red")
        with contextlib.suppress(OSError, ValueError):
            console.control(erase)
            console.print(text, end="" if remaining else "\n", no_wrap=True, overflow="ellipsis")

    return draw
