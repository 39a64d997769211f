"""The interface of a storage for checkpoints, and its implementation in memory.

A key is a relative path of non-empty parts joined by "/". An object exists completely and durably or not at all: no
reader ever sees a part of one. Every method raises only errors of `shrinkpoint.errors`.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeAlias, TypeVar

from shrinkpoint.errors import LockedError, NoSpaceError, NotFoundError, PolicyError, StorageError, TruncatedError
from shrinkpoint.threads import submit_or_run

Buffer: TypeAlias = bytes | bytearray | memoryview
Keys: TypeAlias = list[str]
T = TypeVar("T")
R = TypeVar("R")

RESERVED = ".shrinkpoint-"
"""Prefix of the names that a storage uses itself (temporary files, its lock); no part of a key begins with it."""

_COPIED_BYTES = 1 << 23  # at a time


class Source(Protocol):
    """An object open for reading; usable in a `with` statement, and by several threads at once.

    One that is far away may have `read_ahead()`, which begins to fetch what will be read, and returns at once.
    """

    @property
    def size(self) -> int:
        """Size of the object in bytes when it was opened."""

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Read exactly `length` bytes from `offset`.

        Raises:
            TruncatedError: the object ends earlier.
            StorageError: reading failed.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Sink(Protocol):
    """An object that is being written; readers see it once it is committed."""

    def write(self, data: Buffer, /) -> object: ...

    def seek(self, offset: int, /) -> object: ...

    def tell(self) -> int: ...

    def read(self, length: int, /) -> bytes:
        """Read up to `length` of the bytes already written, from the current offset."""


class Storage(Protocol):
    """A set of objects under keys. Several threads may call it at once; only the holder of its lock should write.

    It may also have, each of which spares requests, reading or flushes:

    * `list_dirs() -> list[str]`: the first parts of all keys that have several; a restore need not list every object.
    * `has_links = False`: `link` need not be tried.
    * `flush_dir(key)` makes the links in a directory survive a power cut; without it, `link` returns once they do.
    * `holds_lock() -> bool`: whether this process holds its lock, which somebody may have deleted.
    * `lock_expires = True`: a holder of its lock that stands still loses the lock, and may go on to write later.
    * `condition(key) -> object`: identifies the object that is there now, or that there is none.
    * `put_if(key, data, condition)`: as `put`, if the condition still holds; else an error, and nothing is written.
    * `size(key) -> int`: bytes of an object, without opening it.
    * `version(key) -> object`: a value that changes when the object is replaced, None if there is none; only of a
      storage that compares what it holds with checksums itself.
    * `versions(prefix) -> Mapping[str, object]`: these of all keys that begin with `prefix`, in one list.
    * `write_from(key, source)`: as `create`, of the bytes of an open object.
    * `request_pool`: threads in which calls wait beside each other, where each waits for a service; see `map_requests`.
    """

    def put(self, key: str, data: Buffer) -> None:
        """Create or replace a small object, atomically and durably.

        Raises:
            StorageError: writing failed (`NoSpaceError`: no space is left); an earlier object is unchanged.
        """

    def create(self, key: str) -> AbstractContextManager[Sink]:
        """Write an object in parts; leaving the block commits it atomically and durably, an exception drops it.

        Raises:
            StorageError: writing or committing failed.
        """

    def open(self, key: str) -> Source:
        """Open an object for reading.

        Raises:
            NotFoundError: there is no such object.
        """

    def get(self, key: str) -> bytes:
        """Read a small object completely.

        Raises:
            NotFoundError: there is no such object.
        """

    def list(self, prefix: str = "") -> Keys:
        """Keys of all committed objects that begin with `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens when there is none."""

    def link(self, source: str, target: str) -> bool:
        """Give the bytes of `source` a second key without copying them; deleting one key keeps the other.

        A power cut may take the new key until `flush_dir` of its directory returns, where the storage has that.

        Returns:
            False if this storage has no links; then nothing has changed.

        Raises:
            NotFoundError: there is no `source`.
        """

    def lock(self) -> AbstractContextManager[None]:
        """Hold the writer's lock for the block; it is also released when this process dies.

        Raises:
            LockedError: another writer holds it; raised at once, with its name if known.
        """

    def remove_stale(self, is_own_dir: Callable[[str], bool] = lambda name: False) -> Keys:
        """Remove temporary files of interrupted writers, and nothing else; returns the removed names, sorted.

        Args:
            is_own_dir: True if an empty directory of this name is the caller's and can be removed. (A process may die
                between emptying a directory and removing it.)
        """

    def describe(self, key: str = "") -> str:
        """The name of an object, or of the storage, in messages: a path or a URL."""


def check_key(key: str) -> str:
    """Return `key` if it is valid.

    Raises:
        PolicyError: it is empty or absolute, or a part of it is empty, ".", ".." or begins with `RESERVED`.
    """
    if "\0" in key or any(part in ("", ".", "..") or part.startswith(RESERVED) for part in key.split("/")):
        expected = f'a relative path without empty, "." or ".." parts, and no part that begins with "{RESERVED}"'
        raise PolicyError("storage", found=f"the key {key!r}", expected=expected, do="choose another name")
    return key


def check_range(where: str, size: int, offset: int, length: int) -> None:
    """Raise a TruncatedError if a range is not within an object."""
    if offset + length > size:
        found, expected = f"only {size} bytes", f"{length} bytes from byte {offset} on"
        raise TruncatedError(where, found=found, expected=expected, do="restore another checkpoint")


def copy_object(source: Source, target: Storage, key: str) -> None:
    """Write the bytes of an open object as another one, atomically and durably.

    Raises:
        StorageError: reading or writing failed.
        TruncatedError: the source ends before its size.
    """
    write_from: Callable[[str, Source], None] | None = getattr(target, "write_from", None)
    if write_from is not None:
        write_from(key, source)
        return
    with target.create(key) as sink:
        for begin in range(0, source.size, _COPIED_BYTES):
            sink.write(source.read(begin, min(_COPIED_BYTES, source.size - begin)))


def object_size(storage: Storage, key: str) -> int:
    """The bytes of an object, without opening it where that is cheaper.

    Raises:
        NotFoundError: there is none.
        StorageError: the storage cannot be asked.
    """
    ask: Callable[[str], int] | None = getattr(storage, "size", None)
    if ask is not None:
        return ask(key)
    with storage.open(key) as source:
        return source.size


def map_requests(storage: Storage, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call a function, which reads of a storage, for each item: beside each other in the storage's `request_pool`.

    The function itself must not call this.

    Raises:
        whatever a call raises; of several the first.
    """
    pool: Executor | None = getattr(storage, "request_pool", None)
    if pool is None:
        return [call(item) for item in items]
    futures: list[Future[R]] = []
    try:
        for item in items:
            futures.append(submit_or_run(pool, call, item))
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


_ADVICE = {
    errno.EFBIG: "save to a file system, or under a limit (`ulimit -f`), that takes larger files",
    errno.EMFILE: "allow the process more open files (`ulimit -n`)",
    errno.ENOLCK: "mount this file system with locks, or save to another one",
    errno.EROFS: "save to another place: this file system is read-only",
}
"""The remedy for an error of the system, if there is a better one than to look."""


def storage_error(where: str, operation: str, error: OSError) -> StorageError:
    """The error to raise from an `OSError`, with its `errno`."""
    reason = error.strerror or str(error) or type(error).__name__
    do = _ADVICE.get(error.errno or 0, "check the disk and the permissions")
    result = StorageError(where, found=f"{operation} failed ({reason})", do=do)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        do = "free some space and save again; earlier checkpoints are untouched"
        result = NoSpaceError(where, found=f"no space left while {operation} ({reason})", do=do)
    result.errno = error.errno
    return result


class MemorySource(Source):
    """Bytes as a source."""

    def __init__(self, data: Buffer, where: str = "memory") -> None:
        self._data, self._where = memoryview(data), where

    @property
    def size(self) -> int:
        return self._data.nbytes

    def read(self, offset: int, length: int) -> memoryview:
        check_range(self._where, self.size, offset, length)
        return self._data[offset : offset + length]

    def close(self) -> None:
        pass


class MemoryStorage:
    """A `Storage` that keeps its objects in a dict."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Buffer) -> None:
        self._objects[check_key(key)] = bytes(data)

    @contextmanager
    def create(self, key: str) -> Iterator[io.BytesIO]:
        check_key(key)
        sink = io.BytesIO()
        yield sink
        self._objects[key] = sink.getvalue()

    def open(self, key: str) -> MemorySource:
        return MemorySource(self.get(key), self.describe(key))

    def get(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise NotFoundError(self.describe(key), found="no such object", do="check the name") from None

    def list(self, prefix: str = "") -> Keys:
        return sorted(key for key in self._objects.copy() if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self._objects.pop(check_key(key), None)

    def link(self, source: str, target: str) -> bool:
        self._objects[check_key(target)] = self.get(source)
        return True

    @contextmanager
    def lock(self) -> Iterator[None]:
        is_mine = False
        try:
            is_mine = self._lock.acquire(blocking=False)
            if not is_mine:
                found = f"process {os.getpid()} is saving here already"
                raise LockedError(self.describe(), found=found, do="wait until it has finished")
            yield
        finally:
            if is_mine:
                self._lock.release()

    def remove_stale(self, is_own_dir: Callable[[str], bool] = lambda name: False) -> Keys:
        return []

    def describe(self, key: str = "") -> str:
        return f"memory:{key}"
