"""A storage in a bucket: Amazon S3 and what speaks its protocol, Google Cloud Storage, Azure.

An object is written in one piece, or in parts that become it at once when the last has arrived. Services of today show
it to every reader from then on. There are no links and no directories.
A writer gathers the bytes of an object in a temporary file, and uploads it when it is complete.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shrinkpoint import validate
from shrinkpoint.errors import LockedError, NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.progress import Task
from shrinkpoint.storage.base import RESERVED, Buffer, Keys, Sink, Source, check_key, storage_error
from shrinkpoint.storage.lease import Lease, version_condition
from shrinkpoint.storage.object_cache import ObjectCache, ObjectVersion, resolve_cache
from shrinkpoint.storage.object_requests import (
    BUCKET_ADVICE,
    REQUEST_SECONDS,
    ObjectConflictError,
    ObjectSource,
    check_not_forked,
    connect,
    send_request,
)
from shrinkpoint.storage.paths import parse_object_url

if TYPE_CHECKING:
    from obstore import PutMode, PutResult
    from obstore.store import ObjectStore


PART_BYTES = 1 << 23  # Bytes of one part of an upload; a slow line still takes them before a request times out
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
                file = tempfile.TemporaryFile()  # noqa: SIM115
                try:
                    file.write(self._file.getbuffer())
                    file.seek(self._file.tell())
                except BaseException:
                    file.close()
                    raise
                self._file = file
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


_PARALLEL_READS = 8
_PARALLEL_REQUESTS = 16


class ObjectStorage:
    """The objects below a URL.

    Args:
        url: "s3://bucket/path", "gs://bucket/path" or "az://container/path".
        lease_seconds: how long other writers wait for one that died on another machine.
        cache: a directory on this machine for what is read and written, or an `ObjectCache`; None: that of the
            environment variable `SHRINKPOINT_CACHE`, if it is set.
        options: further arguments of `obstore.store.from_url`, such as `config={"aws_region": "eu-west-1"}` and
            `credential_provider`; without them, what the environment says.

    Attributes:
        url: without credentials.
        has_links: False: `link` need not be tried.
        lock_expires: True: a writer that stands still for longer than its lease loses the lock, and may not know.

    Raises:
        PolicyError: no such URL, one with credentials, or options of which obstore makes no client; a cache that is no
            directory on this machine.
        MissingExtraError: obstore is not installed.
    """

    has_links = False
    lock_expires = True

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        lease_seconds: float = 60.0,
        cache: str | Path | ObjectCache | None = None,
        **options: Any,
    ) -> None:
        self.url, self._cache = parse_object_url(url), resolve_cache(cache)
        self._lease_seconds = validate.check_float("lease_seconds", lease_seconds, minimum=1.0)
        self._options = options
        self._store = connect(self.url, options, seconds=REQUEST_SECONDS)
        self._lease: Lease | None = None

    @cached_property
    def _lease_store(self) -> ObjectStore:
        """Writes under a lease, the manifest above all: what it sends arrives before the lease ends, or not at all."""
        return connect(self.url, self._options, seconds=min(REQUEST_SECONDS, self._lease_seconds / 3))

    @cached_property
    def _deletion_store(self) -> ObjectStore:
        return connect(self.url, self._options, seconds=min(REQUEST_SECONDS, self._lease_seconds / 3), retries=False)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_PARALLEL_READS, "shrinkpoint-read")

    @cached_property
    def _request_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_PARALLEL_REQUESTS, "shrinkpoint-request")

    @property
    def request_pool(self) -> ThreadPoolExecutor:
        """Threads of `map_requests`; not those of large reads, for which a call here may wait.

        Raises:
            StorageError: this process is a fork, and has none of them.
        """
        check_not_forked(self.describe())
        return self._request_pool

    def put(self, key: str, data: Buffer) -> None:
        """Write a small object, such as the manifest that commits a checkpoint.

        Raises:
            LockedError: this storage is locked, but its lease was taken by another writer; nothing was written.
        """
        check_key(key)
        if (lease := self._own_lease()) is None:
            self.put_if(key, data, "overwrite")
            return
        # In this order: what another writer puts here after the renewal has changed what the condition names.
        condition = self.condition(key)
        lease.renew()
        try:
            self.put_if(key, data, condition)
        except ObjectConflictError:
            lease.renew()  # says who has taken the lease
            raise

    def condition(self, key: str) -> PutMode:
        """Identifies the object that is there now, or that there is none, for `put_if`."""
        try:
            return version_condition(self._head(key))
        except NotFoundError:
            return "create"

    def put_if(self, key: str, data: Buffer, condition: PutMode) -> None:
        """Write a small object on condition that what is there now is what it was when `condition` was asked.

        Raises:
            ObjectConflictError: another writer has put an object there, or deleted it; nothing was written.
            StorageError: the service did not take it.
        """
        import obstore

        store = self._store if self._own_lease() is None else self._lease_store
        content, where = bytes(data), self.describe(key)
        try:
            with _bucket_errors(where):
                send_request(
                    where, "writing", lambda: obstore.put(store, key, content, mode=condition, use_multipart=False)
                )
        except ObjectConflictError:
            # A request that is sent again, since its answer was lost, finds what it has written itself.
            try:
                is_own = self.get(key) == content
            except NotFoundError:
                is_own = False
            if not is_own:
                raise

    @contextmanager
    def create(self, key: str) -> Iterator[UploadSink]:
        check_key(key)
        sink = UploadSink(self.describe(key))
        try:
            yield sink
            self._check_lease()
            with _bucket_errors(self.describe(key)):
                e_tag = sink.upload(self._store, key)
            self._check_lease()
            if self._cache is not None and e_tag is not None:
                self._cache.add(ObjectVersion(self.describe(key), e_tag, sink.size), sink.parts())
        finally:
            sink.close()

    def write_from(self, key: str, source: Source) -> None:
        """As `create`, of bytes that are elsewhere already: no temporary file is written.

        Raises:
            StorageError: the service did not take it; or whatever reading the source raised.
        """
        check_key(key)
        self._check_lease()
        file = SourceFile(source)
        try:
            with _bucket_errors(self.describe(key)):
                upload_file(self._store, key, file, source.size, self.describe(key))
        except StorageError:
            if file.error is not None:
                raise file.error from None
            raise
        self._check_lease()

    def open(self, key: str) -> Source:
        if self._cache is None:
            return self._open_object(key)
        check_key(key)
        return self._cache.open(self.describe(key), lambda: self._head(key), lambda: self._open_object(key))

    def _open_object(self, key: str) -> ObjectSource:
        return ObjectSource(self._store, check_key(key), self.describe(key), self._pool)

    def get(self, key: str) -> bytes:
        with self._open_object(key) as source:
            return bytes(source.read(0, source.size))

    def list(self, prefix: str = "") -> Keys:
        return sorted(self.versions(prefix))

    def versions(self, prefix: str = "") -> Mapping[str, object]:
        """By key of every object that begins with `prefix`, a value that changes when it is replaced."""
        import obstore

        directory = prefix.rpartition("/")[0]  # services list whole parts of keys only
        if directory:
            check_key(directory)

        def collect() -> Sequence[Mapping[str, Any]]:
            return [meta for page in obstore.list(self._store, directory or None) for meta in page]

        objects = send_request(self.describe(prefix), "listing", collect)
        keys = {meta["path"]: _version_of(meta) for meta in objects if meta["path"].startswith(prefix)}
        return {key: version for key, version in keys.items() if f"/{RESERVED}" not in f"/{key}"}

    def version(self, key: str) -> object:
        """A value that changes when the object is replaced; None if there is none."""
        try:
            return _version_of(self._head(key))
        except NotFoundError:
            return None

    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            NotFoundError: there is no such object.
        """
        return int(self._head(key)["size"])

    def _head(self, key: str) -> Mapping[str, Any]:
        import obstore

        check_key(key)
        return send_request(self.describe(key), "asking for an object", lambda: obstore.head(self._store, key))

    def list_dirs(self) -> Keys:
        """The first parts of all keys that have several, sorted; one request for a thousand of them."""
        import obstore

        answer = send_request(self.describe(), "listing", lambda: obstore.list_with_delimiter(self._store))
        return sorted(name.rpartition("/")[2] for name in answer["common_prefixes"])

    def delete(self, key: str) -> None:
        import obstore

        check_key(key)
        # Each attempt looks at the lease first. obstore would not: sent again after this process stood still, a request
        # could delete the object of the writer that has the lease now.
        store = self._store if self._own_lease() is None else self._deletion_store

        def delete() -> None:
            self._check_lease()
            obstore.delete(store, key)

        with suppress(NotFoundError):  # some services say so
            send_request(self.describe(key), "deleting", delete)
        if self._cache is not None:
            self._cache.discard(self.describe(key))

    def link(self, source: str, target: str) -> bool:
        """No service has links: returns False, after looking whether there is a `source`."""
        check_key(target)
        self._head(source)
        return False

    @contextmanager
    def lock(self) -> Iterator[None]:
        lease = Lease(self._lease_store, self.describe(), self._lease_seconds)
        if self._own_lease() is not None:
            found, do = f"process {os.getpid()} is saving here already", "wait until it has finished"
            raise LockedError(self.describe(), found=found, expected="one writer at a time", do=do)
        try:
            lease.acquire()
            self._lease = lease
            yield
        finally:
            if self._lease is lease:
                self._lease = None
                lease.release()

    def remove_stale(self, is_own_dir: Callable[[str], bool] = lambda name: False) -> Keys:
        """Nothing to remove: what an interrupted writer uploads has no key until it is complete.

        Parts of an interrupted upload are not listed with objects; a lifecycle rule of the bucket removes them.
        """
        return []

    def describe(self, key: str = "") -> str:
        return f"{self.url}/{key}" if key else str(self.url)

    def _own_lease(self) -> Lease | None:
        return self._lease if self._lease is not None and self._lease.is_own else None

    def _check_lease(self) -> None:
        if (lease := self._own_lease()) is not None:
            lease.check()


def _version_of(meta: Mapping[str, Any]) -> object:
    """ETag and size; a list has no more, and on Azure has the ETag without quotes."""
    return (meta["e_tag"] or "").strip('"'), meta["size"]


@contextmanager
def _bucket_errors(where: str) -> Iterator[None]:
    """Turn "not found" while an object is written into an error about the bucket."""
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(where, found="no such bucket", expected="a bucket", do=BUCKET_ADVICE) from error
