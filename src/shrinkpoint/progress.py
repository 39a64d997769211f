"""Tells whoever watches how far a long operation is, and how long the rest takes. Nobody watches unless asked to."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from shrinkpoint import humanize, validate

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
ProgressUnit: TypeAlias = Literal["", "bytes"]
_log = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class TaskProgress:
    """Progress of a task.

    Attributes:
        key: of the task, different from those of all others; several may run at a time, one inside of another.
        title: what is done, in words.
        done, total: in units; `total` is None where it is not known, and may change on the way.
        unit: "bytes", or "" for a number of things.
        seconds: since the task began.
        is_finished: this is the last report of this task, which may have failed.
    """

    key: int
    title: str
    done: int
    total: int | None
    unit: ProgressUnit
    seconds: float
    is_finished: bool = False

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end at the speed so far; None where nothing is known yet."""
        if self.is_finished:
            return 0.0
        if not self.total or not self.done:
            return None
        return self.seconds * max(0, self.total - self.done) / self.done

    @property
    def amount(self) -> str:
        """Progress in words: done, and of how much."""
        show = humanize.size if self.unit == "bytes" else str
        return show(self.done) if self.total is None else f"{show(self.done)} of {show(self.total)}"

    def __str__(self) -> str:
        """One line.

        >>> str(TaskProgress(1, "reading run", 5_000_000, 20_000_000, "bytes", 7.0))
        'reading run: 5.00 MB of 20.0 MB, 21 s left'
        >>> str(TaskProgress(1, "deleting", 3, 3, "", 90.0, is_finished=True))
        'deleting: 3 of 3, 90 s'
        """
        left = self.seconds_left
        time_text = "" if left is None else f", {humanize.duration(left)} left"
        if self.is_finished:
            time_text = f", {humanize.duration(self.seconds)}"
        return f"{self.title}: {self.amount}{time_text}"


ProgressListener: TypeAlias = Callable[[TaskProgress], object]
"""Called when a task begins, with every step of it, and when it ends; from any thread, one call at a time a task."""

_LISTENER: ContextVar[ProgressListener | None] = ContextVar("_LISTENER", default=None)
_KEYS = itertools.count(1)


def watch_progress(listener: ProgressListener) -> AbstractContextManager[None]:
    """Call `listener` with the progress of every long operation that begins in this block, in this thread.

    These are: trials of schemes that measure the loss, verifying, pruning and compacting, conversions, the benchmark,
    and uploads to a bucket. What a background save does is not among them.

    An exception of the listener is logged as a warning, and it is not called for that task again.

    Raises:
        PolicyError: it cannot be called.
    """
    if not callable(listener):
        raise validate.argument_error("listener", listener, "a function of a TaskProgress", "pass e.g. print")
    return _watch(listener)


@contextmanager
def _watch(listener: ProgressListener) -> Iterator[None]:
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def is_watched() -> bool:
    """True if anybody is told of the tasks that begin here."""
    return _LISTENER.get() is not None


class Task:
    """A long operation; a context manager. Costs next to nothing where nobody watches.

    Args:
        title: what is done, in words.
        total: its length in units; None: not known.
        unit: "bytes", or "" for a number of things.
    """

    def __init__(self, title: str, total: int | None = None, unit: ProgressUnit = "") -> None:
        self._listener = _LISTENER.get()
        self._title, self._unit, self._key = title, unit, next(_KEYS)
        self._done, self._total = 0, total
        self._began, self._lock = time.monotonic(), threading.Lock()

    def __enter__(self) -> Self:
        self._report()
        return self

    def __exit__(self, *_: object) -> None:
        self._report(is_finished=True)

    def advance(self, amount: int = 1) -> None:
        """Count what has been done; any thread may call this."""
        with self._lock:
            self._done += amount
            if self._total is not None:
                self._total = max(self._total, self._done)
        self._report()

    def expect(self, remaining: int) -> None:
        """Set how much is left, once that is known better."""
        with self._lock:
            self._total = self._done + remaining
        self._report()

    def _report(self, *, is_finished: bool = False) -> None:
        if self._listener is None:
            return
        with self._lock:
            listener, seconds = self._listener, time.monotonic() - self._began
            if listener is None:
                return
            try:
                listener(
                    TaskProgress(
                        self._key, self._title, self._done, self._total, self._unit, seconds, is_finished=is_finished
                    )
                )
            except Exception as error:
                self._listener = None
                _log.warning("the progress callback of %r failed: %s", self._title, error, exc_info=True)


def track(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """The items, each of which is a step of a task.

    Args:
        total: how many there are; None: `len(items)`, where they have one.
    """
    count = len(items) if total is None and isinstance(items, Sized) else total
    with Task(title, count) as task:
        for item in items:
            yield item
            task.advance()
