"""The lock of a store, and the removal of orphaned files by its holder."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager

from shrinkpoint.errors import StorageError
from shrinkpoint.storage import Storage
from shrinkpoint.store import layout
from shrinkpoint.store.listing import scan


class StoreLock:
    """A store's lock; the files of interrupted saves are removed once after it is taken.

    Args:
        storage: the store's.
        mutex: held by threads of this process while they write.
    """

    def __init__(self, storage: Storage, mutex: AbstractContextManager[object]) -> None:
        self._storage, self._mutex = storage, mutex
        self._storage_lock: Generator[None, None, None] | None = None
        self._is_clean = False

    def acquire(self) -> None:
        """Take the lock until `release`, and remove the files of interrupted saves.

        Raises:
            LockedError: another process holds it.
            StorageError: removing failed; the lock is held nevertheless.
        """
        if self._storage_lock is None:
            # Stored before it is taken: an interrupt may come at any line.
            self._storage_lock = lock = self._hold_storage_lock()
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
        """Holds the storage's lock from the first `next` until it is closed."""
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
        """Hold the lock for this block; keep it afterwards if it was held before."""
        with self._mutex, self.cleanup_on_error():
            if self._storage_lock is not None:
                yield
                return
            with self._storage.lock():
                yield

    @contextmanager
    def cleanup_on_error(self) -> Iterator[None]:
        """If the block fails, let the next `acquire` remove orphaned files."""
        try:
            yield
        except BaseException:
            self._is_clean = False
            raise

    def remove_orphans(self) -> None:
        """Remove the files that a commit replaced; if that fails, the next `acquire` does it."""
        try:
            self._delete_orphans()
        except StorageError:
            self._is_clean = False

    def _delete_orphans(self) -> None:
        for key in scan(self._storage).orphans():
            self._storage.delete(key)
