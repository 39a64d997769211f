"""What a person sees of a search."""

from __future__ import annotations

import contextlib
import sys
from typing import Protocol, TextIO

from shrinkpoint.schemes.search.outcome import Trial
from shrinkpoint.schemes.search.space import METRIC, Space


class Progress(Protocol):
    """Called after every trial."""

    def __call__(self, trial: Trial, best: Trial | None, left: int) -> None:
        """
        Args:
            best: the smallest trial so far that holds.
            left: about how many trials there will still be; 0 only after the last one.
        """
        ...


def show(space: Space, threshold: float, raw_bytes: int, stream: TextIO | None = None) -> Progress:
    """A progress that writes one line a trial; on a terminal one line that changes, if rich is installed.

    What goes wrong with the stream is passed over: a closed terminal must not end a training run.

    Args:
        threshold: as given to the search.
        raw_bytes: what sizes are compared with.
        stream: stderr as it is now where None.
    """
    stream = sys.stderr if stream is None else stream
    lines = _Lines(space, threshold, raw_bytes, stream)
    return (_live(lines) if stream.isatty() else None) or lines


class _Lines:
    """One line a trial."""

    def __init__(self, space: Space, threshold: float, raw_bytes: int, stream: TextIO) -> None:
        self.stream = stream
        self._space, self._threshold, self._raw = space, threshold, raw_bytes

    def __call__(self, trial: Trial, best: Trial | None, left: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a closed file, or a character it cannot write
            self.stream.write(self.line(trial, best, left) + "\n")
            self.stream.flush()

    def line(self, trial: Trial, best: Trial | None, left: int) -> str:
        parts = [self._settings(trial), self._ratio(trial), self.verdict(trial)]
        parts.append(f"best {self._ratio(best)}" if best else "none yet" if left else "none")
        parts.append(f"~{left} left" if left else "done")
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
        return f"{self._raw / trial.size:.1f}x" if trial.size > 0 else "-"


def _live(lines: _Lines) -> Progress | None:
    """The same in one place of a terminal; None where rich is missing or the terminal cannot."""
    try:
        from rich.console import Console
        from rich.control import Control
        from rich.segment import ControlType
        from rich.text import Text
    except ImportError:
        return None
    console = Console(file=lines.stream, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    erase = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))

    def draw(trial: Trial, best: Trial | None, left: int) -> None:
        text = Text(lines.line(trial, best, left))
        verdict = lines.verdict(trial)
        text.highlight_words([verdict], "green" if lines.holds(trial) else "red")
        with contextlib.suppress(OSError, ValueError):
            console.control(erase)
            console.print(text, end="" if left else "\n", no_wrap=True, overflow="ellipsis")

    return draw
