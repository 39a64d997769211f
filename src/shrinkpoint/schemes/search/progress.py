"""What a person sees of a search."""

from __future__ import annotations

import contextlib
import sys
from typing import Protocol, TextIO

from shrinkpoint.schemes.search.space import METRIC, Space
from shrinkpoint.schemes.search.trials import Trial


class Progress(Protocol):
    """Called after every trial."""

    def __call__(self, trial: Trial, best: Trial | None, remaining: int) -> None:
        """
        Args:
            best: the smallest trial so far that holds.
            remaining: about how many trials there will still be; 0 only after the last one.
        """
        ...


def progress_printer(space: Space, threshold: float, raw_bytes: int, stream: TextIO | None = None) -> Progress:
    """A progress that writes one line a trial; on a terminal one line that changes, if rich is installed.

    What goes wrong with the stream is passed over: a closed terminal must not end a training run.

    Args:
        threshold: as given to the search.
        raw_bytes: what sizes are compared with.
        stream: stderr as it is now where None.
    """
    stream = sys.stderr if stream is None else stream
    lines = _LinePrinter(space, threshold, raw_bytes, stream)
    return (_live_printer(lines) if stream.isatty() else None) or lines


class _LinePrinter:
    """One line a trial."""

    def __init__(self, space: Space, threshold: float, raw_bytes: int, stream: TextIO) -> None:
        self.stream = stream
        self._space, self._threshold, self._raw_bytes = space, threshold, raw_bytes

    def __call__(self, trial: Trial, best: Trial | None, remaining: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a closed file, or a character it cannot write
            self.stream.write(self.line(trial, best, remaining) + "\n")
            self.stream.flush()

    def line(self, trial: Trial, best: Trial | None, remaining: int) -> str:
        parts = [self._settings(trial), self._ratio(trial), self.verdict(trial)]
        parts.append(f"best {self._ratio(best)}" if best else "none yet" if remaining else "none")
        parts.append(f"~{remaining} left" if remaining else "done")
        return "   ".join(parts)

    def holds(self, trial: Trial) -> bool:
        return trial.meets(self._threshold)

    def verdict(self, trial: Trial) -> str:
        limit = f"{100 * self._threshold:g} %"
        if trial.degradation != trial.degradation:
            return f"not a number, {limit} allowed  no"
        found = f"{100 * trial.degradation:+.2f} %"
        return f"{found} <= {limit}  ok" if self.holds(trial) else f"{found} > {limit}  no"

    def _settings(self, trial: Trial) -> str:
        settings = self._space.settings(trial.point)
        return " · ".join(str(value) if name == METRIC else f"{name} {value:g}" for name, value in settings.items())

    def _ratio(self, trial: Trial) -> str:
        return f"{self._raw_bytes / trial.size:.1f}x" if trial.size > 0 else "-"


def _live_printer(printer: _LinePrinter) -> Progress | None:
    """The same in one place of a terminal; None where rich is missing or the terminal cannot."""
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
        verdict = printer.verdict(trial)
        text.highlight_words([verdict], "green" if printer.holds(trial) else "red")
        with contextlib.suppress(OSError, ValueError):
            console.control(erase)
            console.print(text, end="" if remaining else "\n", no_wrap=True, overflow="ellipsis")

    return draw
