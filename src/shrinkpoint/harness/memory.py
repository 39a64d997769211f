"""How far memory rose at most: Linux tells, and can be told to forget, the peak of a process's resident set."""

from __future__ import annotations

import gc
from pathlib import Path

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """From its making on. The rise is above what was resident then, of which some may have been free for reuse."""

    def __init__(self) -> None:
        gc.collect()
        try:
            _FORGET.write_text("5")
            self._before: int | None = resident("VmRSS")
        except OSError:  # another system, or a container that does not allow it
            self._before = None

    @property
    def rise(self) -> int | None:
        """Bytes; None where it cannot be known."""
        return None if self._before is None else max(0, resident("VmHWM") - self._before)


def resident(field: str) -> int:
    """Bytes of `field` (VmRSS, VmHWM) of this process; raises `OSError` where nobody tells."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")
