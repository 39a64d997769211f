"""Threads: a pool where threads may be refused, an end before that of the interpreter, and none in a forked child."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
_JOIN_SECONDS = 2.0  # How long the end of an owner waits for its thread, which may wait for a peer that died


class ForkAware(Protocol):
    """An object that depends on a thread, or on what another thread may hold while a process forks."""

    def reset_after_fork(self) -> None:
        """Let go of threads, locks and unfinished work, which are the parent's; called in a forked child."""
        ...


_FORK_AWARE: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def reset_in_children(owner: ForkAware) -> None:
    """Call `owner.reset_after_fork` in every child that this process forks while the owner lives."""
    _FORK_AWARE.add(owner)


def _reset_all() -> None:
    for owner in [*_FORK_AWARE]:
        owner.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)


class ForkSafeLock:
    """Has a reentrant lock that is free in a forked child, where no thread could release it; pickled, it is a new one.

    It is used as `with self._mutex.lock:`. A `with` on a lock of Python itself releases it whenever an interrupt comes;
    in an `__exit__` of ours one could come before the lock is released.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the lock; another one in a child
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[ForkSafeLock], tuple[()]]:
        return (ForkSafeLock, ())


def submit_or_run(pool: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Submit a call to a pool; where no thread can be started, or the interpreter exits, make it in this thread.

    The call is made once, or not at all if the returned future is cancelled before.

    Raises:
        Exception: what `function` raised in this thread.
    """
    first, result = threading.Lock(), Future[T]()

    def run_once() -> None:
        if first.acquire(blocking=False) and result.set_running_or_notify_cancel():
            try:
                result.set_result(function(*args, **kwargs))
            except BaseException as error:
                result.set_exception(error)
                raise

    try:
        pool.submit(run_once)
    except RuntimeError:  # the pool may have queued it all the same, for a thread that it has
        run_once()
    return result


def end_thread_with(owner: object, thread: threading.Thread, end: Callable[[], object]) -> Callable[[], object]:
    """End a daemon thread with its owner, or with the interpreter, if that is earlier; and wait for it.

    torch aborts a process whose interpreter ends while a thread that has used torch does.

    Args:
        end: tells the thread to end. It holds no reference to the owner, which would live as long as the program.

    Returns:
        What ends the thread now. The second call does nothing.
    """
    return weakref.finalize(owner, _end_and_join, end, thread)


def _end_and_join(end: Callable[[], object], thread: threading.Thread) -> None:
    end()
    if thread is not threading.current_thread():  # the last reference to the owner may be the thread's own
        thread.join(_JOIN_SECONDS)
