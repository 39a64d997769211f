"""A storage that keeps nothing but headers: what a conversion would take, without a byte on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shrinkpoint.errors import TruncatedError
from shrinkpoint.storage import MemoryStorage, Sink, Source, check_key
from shrinkpoint.storage.base import Buffer


class HeaderSource(Source):
    """A file of which only the beginning is known, and how long it would be."""

    def __init__(self, head: bytes, size: int, where: str) -> None:
        self._head, self._size, self._where = head, size, where

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        if offset + length > len(self._head):
            expected = "to be asked for no more than the header"
            raise TruncatedError(self._where, found="a file that was only weighed", expected=expected)
        return self._head[offset : offset + length]

    def close(self) -> None:
        pass


class ScaleSink(Sink):
    """Counts bytes; keeps what is written from the first byte on, which is the header of a file in the end."""

    def __init__(self) -> None:
        self.head, self.size, self._at = b"", 0, 0

    def write(self, data: Buffer) -> None:
        length = memoryview(data).nbytes
        if self._at == 0:
            self.head = bytes(data)
        self._at += length
        self.size = max(self.size, self._at)

    def seek(self, offset: int) -> None:
        self._at = offset

    def tell(self) -> int:
        return self._at

    def read(self, length: int) -> bytes:
        """Zeros: whoever moves a payload to make room for its header gets as many bytes as there were."""
        length = min(length, self.size - self._at)
        self._at += length
        return bytes(length)


class Scale(MemoryStorage):
    """Writes are counted, small objects are kept; payloads cannot be read again."""

    keeps_payloads = False

    def __init__(self) -> None:
        super().__init__()
        self._weighed: dict[str, ScaleSink] = {}

    @contextmanager
    def create(self, key: str) -> Iterator[ScaleSink]:  # type: ignore[override]
        sink = ScaleSink()
        yield sink
        self._weighed[check_key(key)] = sink
        self.put(key, b"")

    def open(self, key: str) -> HeaderSource:  # type: ignore[override]
        data = self.get(key)
        sink = self._weighed.get(key)
        return HeaderSource(data, len(data), key) if sink is None else HeaderSource(sink.head, sink.size, key)

    def link(self, source: str, target: str) -> bool:
        if source in self._weighed:
            self._weighed[target] = self._weighed[source]
        return super().link(source, target)
