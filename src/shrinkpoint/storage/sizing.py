"""Storages that count what is written to them and keep no payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shrinkpoint.errors import TruncatedError
from shrinkpoint.storage.base import Buffer, Keys, MemoryStorage, Sink, Source, Storage, check_key


class SizingStorage(MemoryStorage):
    """Counts the payloads that are written, and keeps small objects and headers of files."""

    keeps_payloads = False

    def __init__(self) -> None:
        super().__init__()
        self._sinks: dict[str, SizingSink] = {}

    @contextmanager
    def create(self, key: str) -> Iterator[SizingSink]:  # type: ignore[override]
        sink = SizingSink()
        yield sink
        self._sinks[check_key(key)] = sink
        self.put(key, b"")

    def open(self, key: str) -> HeaderOnlySource:  # type: ignore[override]
        data, sink = self.get(key), self._sinks.get(key)
        return HeaderOnlySource(data, len(data), key) if sink is None else HeaderOnlySource(sink.header, sink.size, key)

    def link(self, source: str, target: str) -> bool:
        if source in self._sinks:
            self._sinks[target] = self._sinks[source]
        return super().link(source, target)


class SizingSink(Sink):
    """Counts the bytes written, and keeps the last data written at offset 0, which is the header of a finished file.

    Attributes:
        header: the bytes of the header.
        size: bytes of the whole file.
    """

    def __init__(self) -> None:
        self.header, self.size, self._position = b"", 0, 0

    def write(self, data: Buffer) -> None:
        length = memoryview(data).nbytes
        if self._position == 0:
            self.header = bytes(data)
        self._position += length
        self.size = max(self.size, self._position)

    def seek(self, offset: int) -> None:
        self._position = offset

    def tell(self) -> int:
        return self._position

    def read(self, length: int) -> bytes:
        """Returns zeros, as many as were written: a writer reads a payload back to move it behind a longer header."""
        length = min(length, self.size - self._position)
        self._position += length
        return bytes(length)


class HeaderOnlySource(Source):
    """Reads the header of a file whose payload was only counted."""

    def __init__(self, header: bytes, size: int, where: str) -> None:
        self._header, self._size, self._where = header, size, where

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        if offset + length > len(self._header):
            found, expected = "a file that was only measured", "a read of its header alone"
            raise TruncatedError(self._where, found=found, expected=expected, do="report this")
        return self._header[offset : offset + length]

    def close(self) -> None:
        pass


class DryRunStorage:
    """Reads what another storage holds, and drops whatever is written to it or deleted.

    Args:
        inner: the other storage.
        has_links: True if it would link.
    """

    keeps_payloads = False

    def __init__(self, inner: Storage, *, has_links: bool) -> None:
        self.has_links = has_links
        self.lock_expires: bool = getattr(inner, "lock_expires", False)
        self.open, self.get, self.list = inner.open, inner.get, inner.list
        self.lock, self.describe = inner.lock, inner.describe

    def put(self, key: str, data: Buffer) -> None:
        check_key(key)

    @contextmanager
    def create(self, key: str) -> Iterator[Sink]:
        check_key(key)
        yield SizingSink()

    def delete(self, key: str) -> None:
        check_key(key)

    def link(self, source: str, target: str) -> bool:
        check_key(target)
        return self.has_links

    def remove_stale(self, is_own_dir: Callable[[str], bool] = lambda name: False) -> Keys:
        return []
