"""Checkpoints that Lightning wants removed while another one is being written, maybe by another thread.

Around this plugin, `AsyncCheckpointIO` keeps a queue of saves for a thread of its own, of which the plugin knows only
the one that is being written; removals come at once, also of what is queued still. They are kept here until what they
are to make room for stands.
"""

from __future__ import annotations

import threading
from pathlib import Path


class Lock:
    """A lock that one thread may take several times; in another process it is a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return (Lock, ())


class Removals:
    """Which removals are pending. Every method may be called by any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._beside = False  # the last save was one of another thread than the loop's
        self._folder: Path | None = None  # what it writes, or has written
        self._step = 0
        self._busy = False
        self._doomed: list[Path] = []  # to go once another checkpoint is written
        self._unborn: dict[Path, int] = {}  # removed before they were written, and the step of what was written then

    def begin(self, folder: Path, step: int | None, *, beside: bool) -> None:
        """A save into this folder begins. If the folder was to be removed, that is taken back, unless it came later.

        Args:
            beside: on another thread than the loop's.
        """
        with self._lock:
            self._beside, self._folder, self._step, self._busy = beside, folder, step or 0, True
            if folder in self._doomed:
                self._doomed.remove(folder)
            if self._unborn.pop(folder, self._step + 1) <= self._step:
                self._doomed.append(folder)

    def end(self) -> None:
        """The save has ended, whether it succeeded or not: what comes now is not for `take` to wait for."""
        with self._lock:
            self._busy = False

    def add(self, folder: Path) -> None:
        """To be removed once another checkpoint is written."""
        with self._lock:
            self._doomed.append(folder)

    def add_of_another(self, folder: Path) -> bool:
        """Where another thread saves: `add` what it is writing or has written last, or may have queued; else False."""
        with self._lock:
            if not self._beside:
                return False
            there = folder.exists() or folder.is_symlink()
            if not there and folder != self._folder:
                self._unborn[folder] = self._step
            elif self._busy or folder == self._folder:
                self._doomed.append(folder)
            else:
                return False
            return True

    def take(self) -> list[Path]:
        """What is to be removed now that what was being written stands; that itself stays for the one after it."""
        with self._lock:
            ready = [folder for folder in self._doomed if folder != self._folder]
            self._doomed = [folder for folder in self._doomed if folder == self._folder]
            return ready

    def forget(self) -> None:
        """Nothing is queued any more."""
        with self._lock:
            self._unborn.clear()
