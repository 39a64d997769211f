"""Work in the threads of a pool, where threads may be refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


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
