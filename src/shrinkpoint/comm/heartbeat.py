"""Signs of life of processes in a key-value store, and a thread that gives this one's and watches the others'."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Any

from torch._C._distributed_c10d import Store

from shrinkpoint.threads import end_thread_with

_LEFT = b"left"
_MAX_INTERVAL = 1.0
"""Seconds between two signs of life."""


class Heartbeat:
    """Counts in a store for as long as this process lives, and watches what others count, in a thread.

    A process counts as dead when its number has stood still while this thread looked often enough to fill `patience`
    seconds. What passes while this process itself is stopped does not count, and clocks are not compared.

    Args:
        store: a client that no other thread uses, since a client that waits for a key does nothing else.
        own_id: names this process.
        patience: seconds.
    """

    def __init__(self, store: Store, own_id: str, patience: float) -> None:
        self._store, self._own_id = store, own_id
        self._interval = min(_MAX_INTERVAL, patience / 5)
        self._max_unchanged = math.ceil(patience / self._interval)
        self._counts: dict[str, tuple[bytes, int]] = {}
        self._keys: dict[str, bool] = {}
        self._lock, self._end = threading.Lock(), threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shrinkpoint heartbeat", daemon=True)
        self._store.add(_count_key(own_id), 1)
        self._thread.start()
        end_thread_with(self, self._thread, self._end.set)

    def watch(self, processes: Iterable[str], keys: Iterable[str] = ()) -> None:
        """Watch these processes, and whether these keys are in the store, and no others."""
        with self._lock:
            self._counts = {process: self._counts.get(process, (b"", 0)) for process in processes}
            self._keys = {key: self._keys.get(key, False) for key in keys}

    def is_dead(self, process: str) -> bool:
        """Whether a process that is watched has left, or has given no sign of life for too long."""
        self._raise_error()
        with self._lock:
            count, unchanged = self._counts[process]
        return count == _LEFT or unchanged > self._max_unchanged

    def has_seen(self, key: str) -> bool:
        """Whether a key that is watched is in the store, as of the last time that the thread looked."""
        self._raise_error()
        with self._lock:
            return self._keys[key]

    def stop(self) -> None:
        """End the thread, and tell others that this process has left."""
        if not self._end.is_set():
            self._end.set()
            self._thread.join()
            if self._error is None:
                self._store.set(_count_key(self._own_id), _LEFT.decode())

    def _run(self) -> None:
        try:
            while not self._end.wait(self._interval):
                self._beat()
        except Exception as error:  # of the store; it is raised where this process asks for something
            self._error = error

    def _beat(self) -> None:
        self._store.add(_count_key(self._own_id), 1)
        with self._lock:
            processes, keys = list(self._counts), [key for key, is_seen in self._keys.items() if not is_seen]
        counts = {process: _read(self._store, _count_key(process)) for process in processes}
        seen = [key for key in keys if self._store.check([key])]
        with self._lock:
            for process, count in counts.items():
                last, unchanged = self._counts.get(process, (b"", 0))
                if process in self._counts:
                    self._counts[process] = count, (unchanged + 1 if count == last else 0)
            self._keys.update({key: True for key in seen if key in self._keys})

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _count_key(process: str) -> str:
    return f"alive/{process}"


def _read(store: Any, key: str) -> bytes:
    return bytes(store.get(key)) if store.check([key]) else b""
