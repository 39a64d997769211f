"""A storage that fails at a chosen call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from shrinkpoint.errors import StorageError
from shrinkpoint.storage import LocalStorage, Sink, Source, Storage, storage_error


class FaultyStorage:
    """Holds a storage, and lets its `fail_at`-th call fail, counted from 1.

    Each put, create, write, commit (leaving a `create` block), open, read, get, list, delete and link is a call.

    Args:
        inner: does the work.
        fail_at: which call fails; 0 for none, to count them.
        error: what the operating system is to have said.
        late: the call fails after it has done its work, as when the last flush fails.
        dead: all later calls fail too, as when the disk is gone.

    Attributes:
        calls: how many there were.
        log: their names and keys.
    """

    def __init__(
        self, inner: Storage, fail_at: int = 0, error: OSError | None = None, *, late: bool = False, dead: bool = False
    ) -> None:
        self.inner, self.fail_at, self.late, self.dead = inner, fail_at, late, dead
        self.error = error or OSError(errno.EIO, os.strerror(errno.EIO))
        self.log: list[str] = []

    @property
    def calls(self) -> int:
        return len(self.log)

    def put(self, key: str, data: bytes) -> None:
        with self._call("put", key):
            self.inner.put(key, data)

    @contextmanager
    def create(self, key: str) -> Iterator[Sink]:
        with self._call("create", key):
            pass
        with self.inner.create(key) as sink:
            yield FaultySink(sink, self, key)
            failure = self._next("commit", key)
            if failure and not self.late:
                raise failure
        if failure:
            raise failure

    def open(self, key: str) -> Source:
        with self._call("open", key):
            pass
        return FaultySource(self.inner.open(key), self, key)

    def get(self, key: str) -> bytes:
        with self._call("get", key):
            return self.inner.get(key)

    def list(self, prefix: str = "") -> list[str]:
        with self._call("list", prefix):
            return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        with self._call("delete", key):
            self.inner.delete(key)

    def link(self, source: str, target: str) -> bool:
        with self._call("link", target):
            return self.inner.link(source, target)

    def flush_dir(self, key: str) -> None:
        with self._call("flush", key):
            if isinstance(self.inner, LocalStorage):
                self.inner.flush_dir(key)

    def lock(self) -> AbstractContextManager[None]:
        return self.inner.lock()

    def remove_stale(self, is_own_dir: Callable[[str], bool] = lambda name: False) -> list[str]:
        return self.inner.remove_stale(is_own_dir)

    def describe(self, key: str = "") -> str:
        return self.inner.describe(key)

    def _next(self, doing: str, key: str) -> StorageError | None:
        self.log.append(f"{doing} {key}")
        if self.calls == self.fail_at or (self.dead and 0 < self.fail_at < self.calls):
            failure = storage_error(self.describe(key), doing, self.error)
            failure.__cause__ = self.error
            return failure
        return None

    @contextmanager
    def _call(self, doing: str, key: str) -> Iterator[None]:
        failure = self._next(doing, key)
        if failure and not self.late:
            raise failure
        yield
        if failure:
            raise failure


class FaultySink(Sink):
    """The sink of a `FaultyStorage`."""

    def __init__(self, inner: Sink, storage: FaultyStorage, key: str) -> None:
        self._inner, self._storage, self._key = inner, storage, key

    def write(self, data: bytes) -> None:
        with self._storage._call("write", self._key):
            self._inner.write(data)

    def seek(self, offset: int) -> None:
        self._inner.seek(offset)

    def tell(self) -> int:
        return self._inner.tell()

    def read(self, length: int) -> bytes:
        with self._storage._call("read", self._key):
            return self._inner.read(length)


class FaultySource(Source):
    """The source of a `FaultyStorage`."""

    def __init__(self, inner: Source, storage: FaultyStorage, key: str) -> None:
        self._inner, self._storage, self._key = inner, storage, key

    @property
    def size(self) -> int:
        return self._inner.size

    def read(self, offset: int, length: int) -> bytes | memoryview:
        with self._storage._call("read", self._key):
            return self._inner.read(offset, length)

    def close(self) -> None:
        self._inner.close()
