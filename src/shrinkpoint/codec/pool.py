"""Work for threads, where the system may refuse to start any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def submitted(pool: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """As `pool.submit`; where no thread can be started, the work is done here before this returns.

    Raises:
        whatever work raised that was done here.
    """
    first = threading.Lock()

    def once() -> T:
        if not first.acquire(blocking=False):  # it stays in the queue, and has been done
            raise RuntimeError("done elsewhere")
        return work(*args, **kwargs)

    try:
        return pool.submit(once)
    except RuntimeError:
        first.acquire(blocking=False)
        done: Future[T] = Future()
        done.set_result(work(*args, **kwargs))
        return done
