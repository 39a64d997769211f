"""A storage in memory: for tests, and for a store that lives as long as its process."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shrinkpoint.errors import LockedError, NotFoundError, TruncatedError
from shrinkpoint.storage.base import Buffer, Keys, Sink, Source, check_key


class MemorySource(Source):
    """Bytes as a source."""

    def __init__(self, data: Buffer, where: str = "memory") -> None:
        self._data, self._where = memoryview(data), where

    @property
    def size(self) -> int:
        return self._data.nbytes

    def read(self, offset: int, length: int) -> memoryview:
        part = self._data[offset : offset + length]
        if part.nbytes != length:
            raise TruncatedError(
                self._where,
                found=f"{self.size} bytes",
                expected=f"{length} bytes from byte {offset} on",
                do="restore another checkpoint",
            )
        return part

    def close(self) -> None:
        pass


class MemorySink(Sink):
    """A growing buffer as a sink."""

    def __init__(self) -> None:
        self._file = io.BytesIO()

    def write(self, data: Buffer) -> None:
        self._file.write(data)

    def seek(self, offset: int) -> None:
        self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, length: int) -> bytes:
        return self._file.read(length)

    def getvalue(self) -> bytes:
        """All bytes written."""
        return self._file.getvalue()


class MemoryStorage:
    """A `Storage` that keeps its objects in a dict."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Buffer) -> None:
        self._objects[check_key(key)] = bytes(data)

    @contextmanager
    def create(self, key: str) -> Iterator[MemorySink]:
        check_key(key)
        sink = MemorySink()
        yield sink
        self._objects[key] = sink.getvalue()

    def open(self, key: str) -> MemorySource:
        return MemorySource(self.get(key), self.describe(key))

    def get(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise NotFoundError(self.describe(key), found="no such object", do="list what there is") from None

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
                raise LockedError(
                    self.describe(),
                    found=f"process {os.getpid()} is saving here already",
                    do="wait until it has finished",
                )
            yield
        finally:
            if is_mine:
                self._lock.release()

    def remove_stale(self, is_own_dir: Callable[[str], bool] = lambda name: False) -> Keys:
        return []

    def describe(self, key: str = "") -> str:
        return f"memory:{key}"
