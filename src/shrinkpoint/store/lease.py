"""The right to write to a store."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager

from shrinkpoint.errors import StorageError
from shrinkpoint.storage import Storage
from shrinkpoint.store import layout
from shrinkpoint.store.listing import scan


class Lease:
    """A store's lock, and whether what interrupted saves left behind has been swept since it was taken.

    Args:
        guard: what threads of this process hold while they write.
    """

    def __init__(self, storage: Storage, guard: AbstractContextManager[object]) -> None:
        self._storage, self._guard = storage, guard
        self._lock: Generator[None, None, None] | None = None
        self._swept = False

    def hold(self) -> None:
        """Take the lock, to hold it until `release`, and sweep.

        Raises:
            LockedError: another process holds it.
            StorageError: sweeping failed; the lock is held all the same.
        """
        if self._lock is None:
            self._lock = lock = self._locking()  # before it is taken: an interrupt may come at any line
            try:
                next(lock)
            except BaseException:
                self._lock = None
                lock.close()
                raise
        if not self._swept:
            self._storage.sweep(layout.is_folder)
            self._delete_litter()
            self._swept = True

    def _locking(self) -> Generator[None, None, None]:
        """Holds the storage's lock from its first step until it is closed."""
        with self._storage.lock():
            yield

    def release(self) -> None:
        try:
            if self._lock is not None:
                self._lock.close()
        finally:
            self._lock, self._swept = None, False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock for this block; it stays held after it if it was before."""
        with self._guard, self.settled():
            if self._lock is not None:
                yield
                return
            with self._storage.lock():
                yield

    @contextmanager
    def settled(self) -> Iterator[None]:
        """A block that may leave litter when it fails: then the next `hold` sweeps."""
        try:
            yield
        except BaseException:
            self._swept = False
            raise

    def tidy(self) -> None:
        """Remove what a commit replaced. That commit stands, so failing here is no failure: the next `hold` sweeps."""
        try:
            self._delete_litter()
        except StorageError:
            self._swept = False

    def _delete_litter(self) -> None:
        for key in scan(self._storage).litter():
            self._storage.delete(key)
