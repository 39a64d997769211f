"""Copies what a training loop saves to a second place, behind the loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from shrinkpoint.errors import LockedError, StorageError, UserLine, find_user_line, warn_at, warn_user
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.mirror import Mirror
from shrinkpoint.threads import ForkSafeLock, reset_in_children

_log = logging.getLogger("shrinkpoint")
_MAX_PAUSE = 60.0  # seconds between two attempts
_POLL_SECONDS = 0.5  # how soon a pause notices that the program ends


class MirrorUploader:
    """Copies the checkpoints of a store to its mirror in a thread, which ends when all are there.

    What fails is tried again, with growing pauses. The thread is no daemon: an interpreter that exits waits for the
    checkpoints that are due, but tries nothing twice then. The lock of the mirror is held from the first copy until
    `close`.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._mutex = ForkSafeLock()  # of what follows
        self._thread: threading.Thread | None = None
        self._is_due = False  # there may be something to copy
        self._behind = set[int]()  # steps that are committed, and not in the mirror yet
        self._committed = set[int]()  # steps that were committed since the last look at what is missing
        self._num_waiting = 0  # callers of `flush`: then nothing is tried again
        self._wake = threading.Event()  # ends a pause
        self._error: BaseException | None = None  # of the last attempt
        self._has_warned = False  # since the last attempt that succeeded
        self._has_compared = False  # whether the mirror has newer checkpoints of another run
        self._user_line: UserLine | None = None  # of the last `start`; None: there was none
        self._lock = ExitStack()  # the mirror's, while it is held
        self._is_locked = False
        reset_in_children(self)

    def __reduce__(self) -> tuple[type[MirrorUploader], tuple[Mirror]]:
        return (MirrorUploader, (self._mirror,))

    def reset_after_fork(self) -> None:
        """In a forked child: the thread and the mirror's lock are the parent's."""
        self._num_waiting, self._behind, self._committed = 0, set(), set()
        self._thread = self._error = self._user_line = None
        self._is_due = self._is_locked = False
        self._wake, self._lock = threading.Event(), ExitStack()

    @property
    def where(self) -> str:
        """The mirror's name in messages."""
        return self._mirror.target.describe()

    @property
    def lag(self) -> int:
        """Number of checkpoints that are committed in the store, and not in the mirror yet."""
        return len(self._behind)

    def start(self, *committed: int) -> None:
        """Copy what the mirror lacks, from now on.

        Args:
            committed: steps that have been committed since the last call.
        """
        with self._mutex.lock:
            self._behind.update(committed)
            self._committed.update(committed)
            self._is_due, self._user_line = True, find_user_line()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"shrinkpoint: mirror {self.where}")
                try:
                    thread.start()
                except RuntimeError as error:  # the next call tries again
                    do = "free memory, or allow more threads (`ulimit -u`)"
                    self._error = StorageError(self.where, found=f"no thread to copy in ({error})", do=do)
                else:
                    self._thread = thread

    def flush(self) -> None:
        """Wait until the mirror has all checkpoints that the store has now.

        Raises:
            StorageError: it has not; the next `start`, also of another process, goes on.
        """
        with self._mutex.lock:
            self._num_waiting += 1
        try:
            self.start()
            self._wake.set()
            while (thread := self._thread) is not None:
                thread.join()
        finally:
            with self._mutex.lock:
                self._num_waiting -= 1
        if self._error is not None:
            error, source = self._error, self._mirror.source.describe()
            found = f"the mirror is behind ({error})"
            do = f"{source} has all checkpoints; the next manager of both copies them, at its first save or by `flush`"
            raise StorageError(self.where, found=found, expected=f"all checkpoints of {source}", do=do) from error

    def close(self) -> None:
        """As `flush`, and release the lock of the mirror. Nothing happens if there was no `start`.

        Raises:
            StorageError: as `flush`.
        """
        if self._user_line is None:
            return
        try:
            self.flush()
        finally:
            if self._thread is None:  # it goes on if waiting for it was interrupted
                self._release()
                self._user_line = None

    def _run(self) -> None:
        try:
            self._copy_until_done()
        except BaseException as error:  # of the handling of an error: whoever waits for the mirror must learn of it
            self._error = error
            _log.warning("%s: copying to the mirror stopped: %r", self.where, error)
        finally:
            with self._mutex.lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _copy_until_done(self) -> None:
        failures = 0
        while self._is_due_again():
            is_last = self._num_waiting > 0 or not threading.main_thread().is_alive()
            try:
                self._copy_missing()
                failures, self._error, self._has_warned = 0, None, False
            except BaseException as error:  # a storage may raise anything; obstore's PanicException is no Exception
                failures += 1
                self._note_failure(error)
                if not is_last:
                    self._is_due = True
                    self._pause(min(2.0 ** (failures - 1), _MAX_PAUSE))
        if not threading.main_thread().is_alive():
            self._release()

    def _is_due_again(self) -> bool:
        """True if another attempt is due, which begins now; else the thread has ended."""
        with self._mutex.lock:
            is_due, self._is_due = self._is_due, False
            if not is_due:
                self._thread = None
            self._wake.clear()
            return is_due

    def _copy_missing(self) -> None:
        holds_lock = getattr(self._mirror.target, "holds_lock", None)
        if self._is_locked and holds_lock is not None and not holds_lock():
            self._release()  # by now another process may have taken the place
        if not self._is_locked:
            self._lock.enter_context(self._mirror.target.lock())
            self._is_locked = True
            self._mirror.begin()
        elif self._error is not None:
            self._mirror.begin()
        if not self._has_compared:
            self._warn_of_newer()
        is_tidy = False
        while missing := self._find_missing():
            self._mirror.copy(missing[0])
            self._mirror.tidy()
            is_tidy = True
        if not is_tidy:
            self._mirror.tidy()

    def _warn_of_newer(self) -> None:
        """Warn of a newer checkpoint of another run in the mirror, once the store has one to compare it with."""
        newest = self._mirror.find_newer()
        if newest is None:
            return
        self._has_compared = True
        mine, other = newest
        if other is not None:
            self._warn(
                f"{self.where}: step {other.step} is from another run, and counts as newer than step {mine.step}, "
                "so a restore would take it. Call restore() before the first save, or name another mirror"
            )

    def _find_missing(self) -> Sequence[Manifest]:
        """The checkpoints that are to be copied; they, and those committed meanwhile, are the lag."""
        with self._mutex.lock:
            self._committed = set()
        missing = self._mirror.missing()
        with self._mutex.lock:  # one that was committed meanwhile may be among those that were found
            self._behind = {manifest.step for manifest in missing} | self._committed
        return missing

    def _note_failure(self, error: BaseException) -> None:
        self._error = error
        if isinstance(error, LockedError):
            self._release()
        _log.warning("%s: copying to the mirror failed: %s", self.where, error)
        if self._has_warned or self._num_waiting:
            return
        self._has_warned = True
        self._warn(f"the mirror {self.where} is behind: {error}. Copying is retried until it succeeds; saves go on")

    def _warn(self, text: str) -> None:
        if self._user_line is not None:
            with suppress(Warning), warn_at(self._user_line):
                warn_user(text, UserWarning)

    def _pause(self, seconds: float) -> None:
        """Wait, unless somebody waits for the mirror or the program ends."""
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0 and threading.main_thread().is_alive():
            if self._wake.wait(min(rest, _POLL_SECONDS)):
                return

    def _release(self) -> None:
        self._is_locked = False
        self._lock.close()
