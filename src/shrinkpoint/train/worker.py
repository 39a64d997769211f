"""One job in the background at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("shrinkpoint")


class Worker:
    """Runs one job at a time beside the caller, and hands its error over exactly once.

    The thread is no daemon: an interpreter that ends waits for the job.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, what: str, job: Callable[[], object]) -> None:
        """Run `job`; the one before must have been waited for. `what` names it in the log, should it fail."""
        self._thread = threading.Thread(target=self._run, args=(what, job), name=f"shrinkpoint: {what}")
        self._thread.start()

    def settle(self) -> None:
        """Wait for the job, if one runs, and leave its error for `wait`. Any thread may call this."""
        thread = self._thread
        if thread is not None:
            thread.join()
            if self._thread is thread:
                self._thread = None

    def wait(self) -> None:
        """Wait for the job, if one runs.

        Raises:
            whatever a job raised, once.
        """
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, what: str, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
            _log.warning("%s failed: %s", what, error)
