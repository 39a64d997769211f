"""A key-value store of processes in one file, which any of them may be killed in the middle of writing."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from zlib import crc32

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shrinkpoint.errors import CorruptError, PolicyError, StorageError
from shrinkpoint.storage.paths import local_path

_MAGIC = b"shrinkpoint store 1\n"
_HEADER = struct.Struct("<III")
"""Of a record: the CRC-32 of the rest of it, the length of the key, the length of the value. Key and value follow."""
_DELETED = 0xFFFF_FFFF
"""The length of the value of a key that is deleted."""
_LOCK_POLL_SECONDS, _KEY_POLL_SECONDS = 0.001, 0.01
_stores: list[SharedFileStore] = []
"""All of this process. torch's C++ code holds the C++ half of a store only, which does nothing without the other."""


class SharedFileStore(Store):
    """A store of `torch.distributed` in a file that all processes share, without a process that hosts it.

    torch's own `FileStore` writes a record in four steps. When a process is killed between two of them, all others wait
    for the rest, without a timeout. Here they ignore a record that has no end, and the next one that writes replaces
    it.

        store = SharedFileStore("/shared/runs/7/members")   # a new file for each training
        membership = Membership(store, size=4, min_size=2)

    The file grows with each write: by some 100 bytes a second for each process that gives signs of life. Its file
    system needs locks (`flock`), as those of a machine and NFS 4 have.

    Args:
        path: of the file; it is made if there is none.

    Raises:
        PolicyError: `path` is a URL, or no path; `add` is called for a key that has no number.
        StorageError: the file cannot be opened, written or locked; or another process, which may be stopped, holds its
            lock for longer than `timeout`. Every method raises it.
        CorruptError: it is another file, or somebody else has written into it. Every method raises it.
    """

    timeout: timedelta  # of torch's class

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = local_path(path)
        self._values: dict[str, bytes] = {}
        self._end = 0  # of what this process has read
        self._lock = threading.Lock()
        with self._open(fcntl.LOCK_EX, os.O_CREAT) as fd:
            if not self._end:
                self._write(fd, _MAGIC)
        _stores.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        with self._open(fcntl.LOCK_EX) as fd:
            self._append(fd, key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value.

        Raises:
            DistStoreError: it does not come in `timeout`.
        """
        self.wait([key])
        with self._lock:
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add a number to the one that a key has, at first 0, and return the sum."""
        with self._open(fcntl.LOCK_EX) as fd:
            total = self._number(key) + amount
            self._append(fd, key, str(total))
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store a value if the key has the expected one; empty: also if there is no such key. Return what it has now.

        Without such a key, that is `expected`.
        """
        with self._open(fcntl.LOCK_EX) as fd:
            value = self._values.get(key)
            if value == _as_bytes(expected) or (value is None and not expected):
                self._append(fd, key, desired)
            return self._values.get(key, _as_bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys are there."""
        with self._open(fcntl.LOCK_SH):
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all of these keys.

        Raises:
            DistStoreError: they do not come in this time; None for `timeout` of the store.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"{self._path}: timeout after {timeout}; no {', '.join(keys):.200}")
            time.sleep(_KEY_POLL_SECONDS)

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        with self._open(fcntl.LOCK_EX) as fd:
            is_there = key in self._values
            if is_there:
                self._append(fd, key, None)
        return is_there

    def num_keys(self) -> int:
        """The number of keys."""
        with self._open(fcntl.LOCK_SH):
            return len(self._values)

    def clone(self) -> SharedFileStore:
        """The store itself: threads may share it."""
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # what torch's C++ code calls them  # noqa: N815

    @contextmanager
    def _open(self, lock: int, flags: int = 0) -> Iterator[int]:
        """Open and lock the file, and read what is new in it."""
        try:
            with self._lock:
                fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o666)
                try:
                    self._wait_for_lock(fd, lock)
                    self._read_new(fd)
                    yield fd
                finally:
                    os.close(fd)  # which unlocks it
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            advice = "give a file on a file system that all processes can write to, with locks"
            raise StorageError(str(self._path), found=f"{error.strerror or error}", do=advice) from error

    def _wait_for_lock(self, fd: int, lock: int) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                fcntl.flock(fd, lock | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    problem = f"locked by another process for {self.timeout.total_seconds():g} s"
                    advice = "look for a process that is stopped, and continue or kill it"
                    raise StorageError(str(self._path), found=problem, do=advice) from None
            time.sleep(_LOCK_POLL_SECONDS)

    def _read_new(self, fd: int) -> None:
        """Take the records since the last time, up to one that has no end since its writer was killed."""
        size = os.fstat(fd).st_size
        if size < self._end:
            raise self._corrupt_error(f"{size} bytes", f"{self._end} or more, as there were before")
        data = b""
        while self._end + len(data) < size:  # a read may return less than it is asked for
            piece = os.pread(fd, size - self._end - len(data), self._end + len(data))
            if not piece:
                raise self._corrupt_error(f"{self._end + len(data)} bytes that can be read", f"{size}")
            data += piece
        place = 0
        if not self._end:
            begin = data[: len(_MAGIC)]
            if begin != _MAGIC[: len(begin)]:
                raise self._corrupt_error("a file of something else", "one that SharedFileStore has made")
            place = len(_MAGIC)
        while (end := _end_of_record(data, place)) <= len(data):
            self._take_record(data, place, end)
            place = end
        if place <= len(data):
            self._end += place

    def _number(self, key: str) -> int:
        value = self._values.get(key, b"0")
        try:
            return int(value)
        except ValueError:
            where, advice = f"{self._path}, add({key!r})", "add to a key that nobody sets"
            raise PolicyError(where, found=f"{value[:40]!r}", expected="a number", do=advice) from None

    def _take_record(self, data: bytes, place: int, end: int) -> None:
        crc, key_length, value_length = _HEADER.unpack_from(data, place)
        if crc32(memoryview(data)[place + 4 : end]) != crc:
            expected = "a record with the CRC-32 that it was written with"
            raise self._corrupt_error(f"another record in byte {self._end + place}", expected)
        middle = place + _HEADER.size + key_length
        key = data[place + _HEADER.size : middle].decode(errors="surrogateescape")
        if value_length == _DELETED:
            self._values.pop(key, None)
        else:
            self._values[key] = data[middle:end]

    def _append(self, fd: int, key: str, value: str | bytes | None) -> None:
        """Write a record, and take it: a value, or None where the key is deleted."""
        name, content = key.encode(errors="surrogateescape"), b"" if value is None else _as_bytes(value)
        lengths = _HEADER.pack(0, len(name), _DELETED if value is None else len(content))[4:]
        self._write(fd, crc32(lengths + name + content).to_bytes(4, "little") + lengths + name + content)
        if value is None:
            del self._values[key]
        else:
            self._values[key] = content

    def _write(self, fd: int, data: bytes) -> None:
        """Write at the end of what has been read; what lies there is of a process that was killed."""
        os.ftruncate(fd, self._end)
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], self._end + written)
        self._end += len(data)

    def _corrupt_error(self, found: str, expected: str) -> CorruptError:
        advice = "give each training a new file, and start all processes anew"
        return CorruptError(str(self._path), found=found, expected=expected, do=advice)


def _end_of_record(data: bytes, place: int) -> int:
    """Where the record ends that begins at this place; after the end of the data if that is unknown."""
    begin = place + _HEADER.size
    if begin > len(data):
        return begin
    key_length, value_length = (int(length) for length in _HEADER.unpack_from(data, place)[1:])
    return begin + key_length + (0 if value_length == _DELETED else value_length)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
