"""Writes an object: its bytes are gathered in a temporary file, and uploaded when it is complete."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.progress import Task
from shrinkpoint.storage.base import Buffer, Sink, Source, storage_error
from shrinkpoint.storage.object_requests import send_request

if TYPE_CHECKING:
    from obstore import PutResult
    from obstore.store import ObjectStore

PART_BYTES = 1 << 23
"""Bytes of one part of an upload; a slow line still takes them before a request times out."""
_MAX_PARTS = 9000  # S3 takes 10,000
_PARALLEL_PARTS = 4
_MAX_HELD_BYTES = 2 * PART_BYTES  # that stay in memory, and go in one request


class UploadSink(Sink):
    """The bytes of an object that does not exist yet.

    The header is at the front of a file of ours and is known last, and the parts of an upload are numbered from the
    front: so the bytes wait in a temporary file (`tempfile.gettempdir()`; small ones in memory), and the upload begins
    when the file is complete.

    Args:
        where: its name in messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._file: IO[bytes] = io.BytesIO()

    def write(self, data: Buffer) -> None:
        with self._os_errors("writing"):
            if isinstance(self._file, io.BytesIO) and self._file.tell() + memoryview(data).nbytes > _MAX_HELD_BYTES:
                self._move_to_disk(self._file)
            self._file.write(data)

    def seek(self, offset: int) -> None:
        with self._os_errors("seeking"):
            self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, length: int) -> bytes:
        with self._os_errors("reading back"):
            return self._file.read(length)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        with self._os_errors("seeking"):
            offset = self._file.tell()
            size = self._file.seek(0, io.SEEK_END)
            self._file.seek(offset)
            return size

    def parts(self) -> Iterator[bytes]:
        """The bytes, `PART_BYTES` at a time."""
        self.seek(0)
        while part := self.read(PART_BYTES):
            yield part

    def upload(self, store: ObjectStore, path: str) -> str | None:
        """Make the bytes an object, and return its ETag; raises as `upload_file`."""
        return upload_file(store, path, self._file, self.size, self._where)

    def close(self) -> None:
        with suppress(OSError):  # of a temporary file, which is gone then
            self._file.close()

    def _move_to_disk(self, held: io.BytesIO) -> None:
        file = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            file.write(held.getbuffer())
            file.seek(held.tell())
        except BaseException:
            file.close()
            raise
        self._file = file

    @contextmanager
    def _os_errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f"{self._where}: temporary file in {tempfile.gettempdir()}"
            raise storage_error(where, operation, error) from error


class SourceFile(io.RawIOBase):
    """A source as a file, as obstore reads it.

    Attributes:
        error: why the source could not be read; obstore raises another error then.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._offset = source, 0
        self.error: ShrinkpointError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        rest = self._source.size - self._offset
        size = rest if size < 0 else min(size, rest)
        try:
            data = bytes(self._source.read(self._offset, size))
        except ShrinkpointError as error:
            self.error = error
            raise
        self._offset += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._source.size}
        self._offset = min(max(origins[whence] + offset, 0), self._source.size)
        return self._offset

    def tell(self) -> int:
        return self._offset


class _CountedFile(io.RawIOBase):
    """A file that is read from its front, and a task that counts its bytes."""

    def __init__(self, file: IO[bytes] | SourceFile, task: Task) -> None:
        self._file, self._task = file, task

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._task.advance(len(data))
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def upload_file(store: ObjectStore, path: str, file: IO[bytes] | SourceFile, size: int, where: str) -> str | None:
    """Make the bytes of a file an object: it is there, complete and durable, when this returns.

    Large ones go in parts, a few at once. Memory: `_PARALLEL_PARTS` parts.

    Returns:
        Its ETag; None if the service says none.

    Raises:
        StorageError: the service did not take it.
    """
    import obstore

    def put() -> PutResult:
        file.seek(0)
        if size <= _MAX_HELD_BYTES:
            return obstore.put(store, path, file.read(size), use_multipart=False)
        part = max(PART_BYTES, -(-size // _MAX_PARTS))
        with Task(f"uploading {where}", size, "bytes") as task:
            counted = _CountedFile(file, task)
            return obstore.put(
                store, path, counted, use_multipart=True, chunk_size=part, max_concurrency=_PARALLEL_PARTS
            )

    return send_request(where, "writing" if size <= _MAX_HELD_BYTES else "uploading", put)["e_tag"]
