"""Bytes that the files of a directory take after each save, and at any time while one is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

_BEFORE_FALL = ("os.remove", "os.rename", "os.truncate")
"""Events after which there may be fewer bytes: right before one of them, or at the end, there are most."""
_active: list[Meter] = []


def disk_bytes(root: Path) -> int:
    """Bytes of all files below a directory, each once whatever number of names it has."""
    sizes: dict[tuple[int, int], int] = {}
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            if path.is_file():
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


class Meter:
    """What one writer holds in a directory, save by save.

    Attributes:
        root: the directory.
        held: bytes after each save and what it deletes.
        peaks: the most bytes at any time of each save.
        seconds: of each save, deletions included.
        files: that a restore of the newest checkpoint reads, after each save; empty where that is not known.
        rises: of the loss that a decoded checkpoint has, relative to the loss of the model that was saved.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.held: list[int] = []
        self.peaks: list[int] = []
        self.seconds: list[float] = []
        self.files: list[int] = []
        self.rises: list[float] = []
        self._peak, self._spent = 0, 0.0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure one save; the time of measuring does not count."""
        _install()
        self._peak, self._spent = 0, 0.0
        began = time.perf_counter()
        _active.append(self)
        try:
            yield
        finally:
            _active.remove(self)
        self.seconds.append(time.perf_counter() - began - self._spent)
        self.held.append(disk_bytes(self.root))
        self.peaks.append(max(self._peak, self.held[-1]))

    def look(self) -> None:
        """Measure now, in the middle of a save."""
        began = time.perf_counter()
        self._peak = max(self._peak, disk_bytes(self.root))
        self._spent += time.perf_counter() - began

    def figures(self) -> dict[str, Any]:
        """The means of the second half of the saves, and the greatest of all."""
        half = len(self.held) // 2
        return {
            "saves": len(self.held),
            "held": fmean(self.held[half:]),
            "peak after": max(self.held),
            "peak": max(self.peaks),
            "seconds": fmean(self.seconds[half:]),
            "files": fmean(self.files[half:]) if self.files else None,
            "rise": fmean(self.rises) if self.rises else None,
            "worst rise": max(self.rises) if self.rises else None,
        }


@cache
def _install() -> None:
    """Add the hook, which stays for the life of the process and does nothing between saves."""

    def look(event: str, arguments: Any) -> None:
        if _active and event in _BEFORE_FALL:
            _active[-1].look()

    sys.addaudithook(look)
