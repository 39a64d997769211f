"""Measures the largest rise of resident memory, and the calls and seconds of a function."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

from shrinkpoint.schemes.evaluate import Evaluate

_STATUS_FILE, _CLEAR_REFS_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures the rise of resident memory since this object was made; reused memory is not counted."""

    def __init__(self) -> None:
        gc.collect()
        try:
            _CLEAR_REFS_FILE.write_text("5")
            self._baseline: int | None = resident_bytes("VmRSS")
        except OSError:  # another system, or a container that does not allow it
            self._baseline = None

    @property
    def rise(self) -> int | None:
        """The largest rise so far in bytes; None if it cannot be measured."""
        return None if self._baseline is None else max(0, resident_bytes("VmHWM") - self._baseline)


def resident_bytes(field: str) -> int:
    """Bytes of a field (VmRSS, VmHWM) of the status of this process; raises `OSError` if there is none."""
    for line in _STATUS_FILE.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS_FILE} has no {field}")


class CallTimer:
    """Wraps a quality function and measures its calls since the last `lap`.

    Attributes:
        calls: number of calls.
        seconds: time spent in them.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self.calls, self.seconds = 0, 0.0

    def __call__(self, argument: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._evaluate(argument)
        finally:
            self.calls += 1
            self.seconds += time.perf_counter() - began

    def lap(self) -> dict[str, float]:
        """Returns calls and seconds, and sets both to 0."""
        out = {"calls": self.calls, "seconds": self.seconds}
        self.calls, self.seconds = 0, 0.0
        return out
