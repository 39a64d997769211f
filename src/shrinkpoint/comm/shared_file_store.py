"""A key-value store of processes in one file, which any of them may be killed in the middle of writing."""

from __future__ import annotations

import atexit
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shrinkpoint import validate
from shrinkpoint.errors import CorruptError, PolicyError, StorageError
from shrinkpoint.storage.base import storage_error
from shrinkpoint.storage.paths import local_path

_MAGIC = b"shrinkpoint store 1\n"
_HEADER = struct.Struct("<IIII")
"""Of a record: the CRC-32 of the next 12 bytes; the lengths of key and value; the CRC-32 of both, which follow."""
_DELETED = 0xFFFF_FFFF
"""The length of the value of a key that is deleted."""
_PIECE_BYTES = 1 << 20
"""Read at a time; more only for a record that is longer and whole."""
_LOCK_POLL_SECONDS, _KEY_POLL_SECONDS = 0.001, 0.01
_stores: list[SharedFileStore] = []
"""All of this process. torch's C++ code holds the C++ half of a store only, which does nothing without the other."""
_is_exiting = threading.Event()
atexit.register(_is_exiting.set)  # torch aborts a process whose interpreter ends while a thread is in a store


class SharedFileStore(Store):
    """A store of `torch.distributed` in a file that all processes share, without a process that hosts it.

    torch's own `FileStore` writes a record in four steps. When a process is killed between two of them, all others wait
    for the rest, without a timeout. Here they ignore a record that has no end, and the next one that writes replaces
    it.

        store = SharedFileStore("/shared/runs/7/members")   # a new file for each training
        membership = Membership(store, size=4, min_size=2)

    The file grows with each write and is never compacted: by some 100 bytes a second for each process that gives signs
    of life, and by some 400 for each rank and round of local steps. Its file system needs locks (`flock`), as those of
    a machine and NFS 4 have. A machine that loses its power in the middle of a write may leave a damaged file. A
    process that is stopped in the middle of a call holds the lock: others wait for it for `timeout` of the store, 300
    seconds unless `set_timeout` is called. In a signal handler that interrupts a call of the same store it is an error.

    Args:
        path: of the file; it is made if there is none.

    Raises:
        PolicyError: `path` is a URL, or no path. Of every method: an argument is unusable.
        StorageError: the file cannot be opened, written or locked, or is another one now. Every method raises it.
        CorruptError: it is a file of something else, or damaged. Every method raises it.
    """

    timeout: timedelta  # of torch's class

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = local_path(path).absolute()
        self._values: dict[str, bytes] = {}
        self._end = 0  # of what this process has read
        self._file: tuple[int, int] | None = None  # device and inode
        self._fd: int | None = None
        self._lock, self._owner = threading.Lock(), 0
        with self._open(fcntl.LOCK_EX, flags=os.O_CREAT) as fd:
            if not self._end:
                self._write(fd, _MAGIC)
        _stores.append(self)

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Store a value."""
        name, content = _as_key(key), _as_bytes(value)
        with self._open(fcntl.LOCK_EX) as fd:
            self._append(fd, name, content)

    def get(self, key: str | bytes) -> bytes:
        """Wait for a key, and return its value.

        Raises:
            DistStoreError: it does not come in `timeout`.
        """
        return self._wait_for([_as_key(key)], self.timeout)[0]

    def add(self, key: str | bytes, amount: int) -> int:
        """Add a number to the one that a key has, at first 0, and return the sum."""
        name = _as_key(key)
        amount = validate.check_int("SharedFileStore, amount", amount, minimum=-(1 << 63), maximum=(1 << 63) - 1)
        with self._open(fcntl.LOCK_EX) as fd:
            total = self._number(name) + amount
            self._append(fd, name, str(total).encode())
        return total

    def compare_set(self, key: str | bytes, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store a value if the key has the expected one, or if there is no such key and that is empty.

        Returns:
            The value that the key has now; `expected` if there is no such key.
        """
        name, old, new = _as_key(key), _as_bytes(expected), _as_bytes(desired)
        with self._open(fcntl.LOCK_EX) as fd:
            value = self._values.get(name)
            if value == old or (value is None and not old):
                self._append(fd, name, new)
            return self._values.get(name, old)

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Whether all of these keys are there."""
        names = _as_keys(keys)
        with self._open(fcntl.LOCK_SH):
            return all(name in self._values for name in names)

    def wait(self, keys: Sequence[str | bytes], timeout: timedelta | float | None = None) -> None:
        """Wait for all of these keys.

        Args:
            timeout: a number is of seconds; None for `timeout` of the store.

        Raises:
            DistStoreError: they do not come in this time.
        """
        self._wait_for(_as_keys(keys), self.timeout if timeout is None else timeout)

    def delete_key(self, key: str | bytes) -> bool:
        """Delete a key; whether it was there."""
        name = _as_key(key)
        with self._open(fcntl.LOCK_EX) as fd:
            is_there = name in self._values
            if is_there:
                self._append(fd, name, None)
        return is_there

    def num_keys(self) -> int:
        """The number of keys."""
        with self._open(fcntl.LOCK_SH):
            return len(self._values)

    def clone(self) -> SharedFileStore:
        """The store itself: threads may share it."""
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # what torch's C++ code calls them  # noqa: N815

    def _wait_for(self, names: Sequence[str], timeout: timedelta | float) -> list[bytes]:
        """The values of keys, once all of them are there."""
        deadline = time.monotonic() + (timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
        while True:
            with self._open(fcntl.LOCK_SH, deadline=deadline):
                missing = [name for name in names if name not in self._values]
                if not missing:
                    return [self._values[name] for name in names]
            if time.monotonic() > deadline or _has_to_end(_KEY_POLL_SECONDS):
                raise dist.DistStoreError(f"{self._path}: timeout; no {', '.join(missing):.200}")

    @contextmanager
    def _open(self, lock: int, *, flags: int = 0, deadline: float | None = None) -> Iterator[int]:
        """Open and lock the file until the deadline (None: for `timeout`), and read what is new in it."""
        if self._owner == threading.get_ident():
            problem = "a call in the middle of another one of this thread, as of a signal handler"
            advice = "let the handler set a flag, and call the store after the other call"
            raise StorageError(str(self._path), found=problem, do=advice)
        deadline = time.monotonic() + self.timeout.total_seconds() if deadline is None else deadline
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._locked_error()
        try:
            self._owner = threading.get_ident()
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o666)
            self._wait_for_lock(self._fd, lock, deadline)
            stat = os.fstat(self._fd)
            self._check_file(stat)
            self._read_new(self._fd, stat.st_size)
            yield self._fd
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise storage_error(str(self._path), "using the store", error) from error
        finally:
            self._close()
            self._owner = 0
            self._lock.release()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
            os.close(fd)

    def _wait_for_lock(self, fd: int, lock: int, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(fd, lock | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline or _has_to_end(_LOCK_POLL_SECONDS):
                    raise self._locked_error() from None

    def _locked_error(self) -> StorageError:
        problem = "locked by another process until the timeout"
        advice = "look for a process that is stopped, and continue or kill it"
        return StorageError(str(self._path), found=problem, do=advice)

    def _check_file(self, stat: os.stat_result) -> None:
        """Raise an error if another file has taken the place of the one that was opened first."""
        self._file = self._file or (stat.st_dev, stat.st_ino)
        if self._file != (stat.st_dev, stat.st_ino):
            problem, advice = "another file than before", "give each training a file of its own, and keep it"
            raise StorageError(str(self._path), found=problem, do=advice)

    def _read_new(self, fd: int, size: int) -> None:
        """Take the records since the last time, up to one that has no end since its writer was killed."""
        if size < self._end:
            raise self._corrupt_error(f"{size} bytes", f"{self._end} or more, as there were before")
        if not self._end and size:
            begin = os.pread(fd, len(_MAGIC), 0)
            if begin != _MAGIC[: len(begin)]:
                raise self._corrupt_error("a file of something else", "one that SharedFileStore has made")
            self._end = len(_MAGIC) if begin == _MAGIC else 0
        while self._end and self._end + _HEADER.size <= size:
            data = os.pread(fd, min(_PIECE_BYTES, size - self._end), self._end)
            length = self._record_length(data)
            if self._end + length > size:
                return
            while len(data) < length:
                piece = os.pread(fd, length - len(data), self._end + len(data))
                if not piece:
                    raise self._corrupt_error(f"{self._end + len(data)} bytes that can be read", f"{size}")
                data += piece
            self._take_records(memoryview(data))

    def _take_records(self, data: memoryview) -> None:
        """Take the records that are whole here."""
        place = 0
        while place + _HEADER.size <= len(data):
            rest = data[place:]
            length = self._record_length(rest)
            if length > len(rest):
                return
            _, key_length, value_length, crc = _HEADER.unpack_from(rest)
            if crc32(rest[_HEADER.size : length]) != crc:
                raise self._damage_error()
            key = str(rest[_HEADER.size : _HEADER.size + key_length], "utf-8", "surrogateescape")
            if value_length == _DELETED:
                self._values.pop(key, None)
            else:
                self._values[key] = bytes(rest[_HEADER.size + key_length : length])
            place, self._end = place + length, self._end + length

    def _record_length(self, data: bytes | memoryview) -> int:
        """Of the record that begins here, which is whole up to its header at least."""
        crc, key_length, value_length = (int(number) for number in _HEADER.unpack_from(data)[:3])
        if crc32(data[4 : _HEADER.size]) != crc:
            raise self._damage_error()
        return _HEADER.size + key_length + (0 if value_length == _DELETED else value_length)

    def _number(self, key: str) -> int:
        value = self._values.get(key, b"0")
        try:
            return int(value)
        except ValueError:
            where, advice = f"{self._path}, add({key!r})", "add to a key that nobody sets"
            raise PolicyError(where, found=f"{value[:40]!r}", expected="a number", do=advice) from None

    def _append(self, fd: int, key: str, value: bytes | None) -> None:
        """Write a record, and take it: a value, or None where the key is deleted."""
        name, content = key.encode(errors="surrogateescape"), value or b""
        lengths = struct.pack("<II", len(name), _DELETED if value is None else len(content))
        rest = lengths + crc32(name + content).to_bytes(4, "little")
        self._write(fd, crc32(rest).to_bytes(4, "little") + rest + name + content)
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = content

    def _write(self, fd: int, data: bytes) -> None:
        """Write at the end of what has been read; what lies there is of a process that was killed."""
        if os.fstat(fd).st_size > self._end:
            os.ftruncate(fd, self._end)
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], self._end + written)
        self._end += len(data)

    def _damage_error(self) -> CorruptError:
        expected = "a record with the CRC-32 that it was written with"
        return self._corrupt_error(f"another record in byte {self._end}", expected)

    def _corrupt_error(self, found: str, expected: str) -> CorruptError:
        advice = "give each training a new file, and start all processes anew"
        return CorruptError(str(self._path), found=found, expected=expected, do=advice)

    def _begin_in_child(self) -> None:
        """After a fork: another thread of the parent may have been in the middle of a call."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)  # which leaves the parent's lock as it is
            self._values, self._end = {}, 0
        self._lock, self._owner = threading.Lock(), 0


def _begin_all_in_child() -> None:
    for store in _stores:
        store._begin_in_child()


os.register_at_fork(after_in_child=_begin_all_in_child)


def _has_to_end(seconds: float) -> bool:
    """Sleep; whether this is a thread that has to end with the interpreter."""
    return _is_exiting.wait(seconds) and threading.current_thread() is not threading.main_thread()


def _as_key(key: Any) -> str:
    if isinstance(key, bytes):
        return key.decode(errors="surrogateescape")
    return validate.check_str("SharedFileStore, key", key)


def _as_keys(keys: Any) -> list[str]:
    if isinstance(keys, str | bytes):
        expected, advice = "a list of keys", "put the key into a list"
        raise validate.argument_error("SharedFileStore, keys", keys, expected, advice)
    return [_as_key(key) for key in keys]


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="surrogateescape")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    raise validate.argument_error("SharedFileStore, value", value, "a text or bytes", "encode it before")
