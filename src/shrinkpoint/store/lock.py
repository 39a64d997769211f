"""The right to write to a store: its lock, and the removal of what interrupted saves left behind."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager

from shrinkpoint.errors import StorageError
from shrinkpoint.storage import Storage
from shrinkpoint.store import layout
from shrinkpoint.store.listing import scan


class StoreLock:
    """A store's lock, and whether what interrupted saves left behind has been swept since it was taken.

    Args:
        mutex: what threads of this process hold while they write.
    """

    def __init__(self, storage: Storage, mutex: AbstractContextManager[object]) -> None:
        self._storage, self._mutex = storage, mutex
        self._storage_lock: Generator[None, None, None] | None = None
        self._is_clean = False

    def acquire(self) -> None:
        """Take the lock, to hold it until `release`, and sweep.

        Raises:
            LockedError: another process holds it.
            StorageError: sweeping failed; the lock is held all the same.
        """
        if self._storage_lock is None:
            self._storage_lock = lock = (
                self._hold_storage_lock()
            )  # before it is taken: an interrupt may come at any line
            try:
                next(lock)
            except BaseException:
                self._storage_lock = None
                lock.close()
                raise
        if not self._is_clean:
            self._storage.remove_stale(layout.is_step_dir)
            self._delete_orphans()
            self._is_clean = True

    def _hold_storage_lock(self) -> Generator[None, None, None]:
        """Holds the storage's lock from its first step until it is closed."""
        with self._storage.lock():
            yield

    def release(self) -> None:
        try:
            if self._storage_lock is not None:
                self._storage_lock.close()
        finally:
            self._storage_lock, self._is_clean = None, False

    @contextmanager
    def for_writing(self) -> Iterator[None]:
        """Hold the lock for this block; it stays held after it if it was before."""
        with self._mutex, self.cleanup_on_error():
            if self._storage_lock is not None:
                yield
                return
            with self._storage.lock():
                yield

    @contextmanager
    def cleanup_on_error(self) -> Iterator[None]:
        """A block that may leave litter when it fails: then the next `hold` sweeps."""
        try:
            yield
        except BaseException:
            self._is_clean = False
            raise

    def remove_orphans(self) -> None:
        """Remove what a commit replaced. That commit stands, so failing here is no failure: the next `hold` sweeps."""
        try:
            self._delete_orphans()
        except StorageError:
            self._is_clean = False

    def _delete_orphans(self) -> None:
        for key in scan(self._storage).orphans():
            self._storage.delete(key)
