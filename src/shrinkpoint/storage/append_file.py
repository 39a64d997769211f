"""A file on a disk that only grows: for journals, whose records must outlive the process without an fsync each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shrinkpoint.errors import StorageError
from shrinkpoint.storage.base import Buffer, storage_error
from shrinkpoint.storage.local import atomic_replace
from shrinkpoint.storage.paths import open_regular

_MAX_BUFFERS = 512  # Buffers of one system call; systems take 1024 and more


class AppendFile:
    """A file open for appending.

    What `append` has written is the kernel's: it survives the end of the process, in whatever way, and a power cut from
    the next `sync` on.

    Args:
        path: of a file that exists.
        size: it is cut to this many bytes first.

    Attributes:
        size: in bytes.

    Raises:
        StorageError: the file cannot be opened or cut; a forked child appends to its parent's file.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self.size, self._fd, self._pid = path, size, -1, os.getpid()
        try:
            self._fd = open_regular(path, os.O_WRONLY | os.O_NOFOLLOW)
            os.ftruncate(self._fd, size)
        except OSError as error:
            self.close()
            raise storage_error(str(path), "opening for appending", error) from error

    @classmethod
    def create(cls, path: Path, data: bytes) -> AppendFile:
        """Create or replace a file with these first bytes, atomically and durably."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(str(path.parent), "creating the directory", error) from error
        with atomic_replace(path) as temporary:
            temporary.write_bytes(data)
        return cls(path, len(data))

    def append(self, buffers: Sequence[Buffer]) -> None:
        """Append bytes; on an error the file has the size that it had.

        Raises:
            NoSpaceError: the disk is full. StorageError: writing failed.
        """
        rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        end = self.size
        self._check_own()
        try:
            while rest:
                written = os.pwritev(self._fd, rest[:_MAX_BUFFERS], end)
                end += written
                while rest and written >= rest[0].nbytes:
                    written -= rest.pop(0).nbytes
                if written:
                    rest[0] = rest[0][written:]
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(self._fd, self.size)
            if isinstance(error, OSError):
                raise storage_error(str(self._path), "appending", error) from error
            raise
        self.size = end

    def cut(self, size: int) -> None:
        """Take back what was appended behind a size; raises StorageError if the system refused it."""
        self._check_own()
        self.size = size
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise storage_error(str(self._path), "cutting", error) from error

    def sync(self) -> None:
        """Return when every byte is on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise storage_error(str(self._path), "flushing to the disk", error) from error

    def close(self) -> None:
        """Close the file; what was appended stays the kernel's to write."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def _check_own(self) -> None:
        """Raise in a forked child, whose parent appends to the same file."""
        if os.getpid() != self._pid:
            found, do = f"a file that process {self._pid} appends to", "write it in the process that opened it"
            raise StorageError(str(self._path), found=found, expected="one writer at a time", do=do)
