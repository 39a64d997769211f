"""One job in the background at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shrinkpoint.errors import StorageError

_log = logging.getLogger("shrinkpoint")


class BackgroundWorker:
    """Runs one job at a time beside the caller, and hands its error over exactly once.

    The thread is no daemon: an interpreter that ends waits for the job.
    """

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._error: BaseException | None = None

    def start(self, description: str, job: Callable[[], object]) -> None:
        """Run `job`; the one before must have been waited for. `description` names it in the log, should it fail.

        Interrupted by a signal, either the job does not run and never will, or it runs and is waited for.

        Raises:
            StorageError: the system gives no thread; the job does not run.
        """
        begun = _Job(description, job)
        try:
            self._job = begun
            begun.thread.start()
            begun.is_launched = True
        except (RuntimeError, MemoryError) as error:
            self._revoke(begun)
            do = "free memory, or allow more threads (`ulimit -u`), and save again; or save without background"
            raise StorageError(description, found=f"no thread to write in ({error})", do=do) from error
        except BaseException:
            self._revoke(begun)
            raise

    def join(self) -> None:
        """Wait for the job, if one runs, and leave its error for `wait`. Any thread may call this."""
        job = self._job
        if job is None:
            return
        if (
            not job.is_launched and job.starter_thread_id == threading.get_ident()
        ):  # an interrupt has ended `start`, and its end
            self._revoke(job)
        if self._job is job:
            job.done.wait()  # not `join`, which an interrupt makes believe that the thread has ended
            self._collect_error(job)

    def wait(self) -> None:
        """Wait for the job, if one runs.

        Raises:
            whatever a job raised, once.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _revoke(self, job: _Job) -> None:
        """Forget a job, unless it is running."""
        if job.revoke() and self._job is job:
            self._job = None

    def _collect_error(self, job: _Job) -> None:
        """Note how a job ended, once: several threads may have waited for it."""
        with job.lock:
            error, job.error = job.error, None
        if error is not None:
            self._error = error
        if self._job is job:
            self._job = None


class _Job:
    """What is to be done in a thread, until it is known whether the thread runs."""

    def __init__(self, description: str, work: Callable[[], object]) -> None:
        self.lock, self.done = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"shrinkpoint: {description}")
        self.starter_thread_id, self.is_launched = threading.get_ident(), False
        self.error: BaseException | None = None
        self._description, self._work = description, work
        self._is_running = self._is_revoked = False

    def revoke(self) -> bool:
        """Make sure that the work is not done, unless it is being done; whether that is so."""
        with self.lock:
            if not self._is_running and not self._is_revoked:
                self._is_revoked = True
                self.done.set()
        return self._is_revoked

    def _run(self) -> None:
        with self.lock:
            if self._is_revoked:
                return
            self._is_running = True
        try:
            self._work()
        except BaseException as error:
            self.error = error
            _log.warning("%s failed: %s", self._description, error)
        finally:
            del self._work  # what it holds of the state is free now
            self.done.set()
