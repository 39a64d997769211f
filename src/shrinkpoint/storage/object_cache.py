"""Objects of buckets in a directory of this machine: what was read or written here is not fetched again.

::

    <digest of the URL>.object   the bytes of the object, a digest of each block of them, then `_Footer`
    tmp-<random>                 a copy that is being written, or that a killed process has left

A copy is used for the ETag and the size of its object alone. Nothing in this directory is needed: files may be deleted
at any time, are not flushed to the disk, and what is wrong with them is found by their digests.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shrinkpoint import validate
from shrinkpoint._native import xxh3_128
from shrinkpoint.errors import CorruptError, ShrinkpointError, StorageError
from shrinkpoint.storage.base import Buffer, Source, check_range
from shrinkpoint.storage.local import LocalSource, is_being_written, try_lock
from shrinkpoint.storage.paths import is_regular, local_path
from shrinkpoint.threads import ForkSafeLock

DIRECTORY_VARIABLE, BYTES_VARIABLE = "SHRINKPOINT_CACHE", "SHRINKPOINT_CACHE_BYTES"
"""Environment variables: the directory of the cache, and how much it may take."""
BLOCK_BYTES = 1 << 20  # Bytes that one digest is of
MIN_BYTES = 1 << 18  # Up to this size an object comes whole with the request that opens it, and is not cached
_WINDOW_BYTES = 1 << 25  # that are moved at a time
_FOOTER = struct.Struct("<32sQ")  # digest and length of the index before it
_MAX_INDEX_BYTES = 1 << 28
_log = logging.getLogger("shrinkpoint")


class ObjectVersion(NamedTuple):
    """One object as it is at one time."""

    url: str  # of the object, without credentials
    e_tag: str  # what its service says of its content
    size: int  # in bytes


class RemoteSource(Source, Protocol):
    """An object open for reading, of which the ETag is known."""

    @property
    def e_tag(self) -> str | None: ...


class ObjectCache:
    """A directory with copies of objects; those that were used longest ago are deleted for new ones.

    Several processes may share it. No method raises an error for what is wrong with the directory or its disk: then
    there is no copy.

    Args:
        directory: need not exist yet. Whoever can write there can change what is loaded.
        max_bytes: how much it may take; None: half of its file system.

    Raises:
        PolicyError: no path of a directory on this machine; no number of bytes.
    """

    def __init__(self, directory: str | Path, max_bytes: int | None = None) -> None:
        path = local_path(directory, "cache", directory=True)
        self.directory = Path(os.path.expanduser(path)).absolute()  # noqa: PTH111 - the other one raises
        self._max_bytes = validate.check_optional_int("max_bytes", max_bytes, none_meaning="for half of the disk")
        self._has_warned = False

    @property
    def max_bytes(self) -> int:
        """Bytes that the cache may take; 0 where the file system does not say."""
        if self._max_bytes is None:
            with suppress(OSError):
                existing = next(path for path in (self.directory, *self.directory.parents) if path.exists())
                self._max_bytes = shutil.disk_usage(existing).total // 2
        return self._max_bytes or 0

    def open(self, url: str, ask: Callable[[], Mapping[str, Any]], fetch: Callable[[], RemoteSource]) -> Source:
        """Open an object: its copy, if there is one; else the object itself, which becomes a copy when it is read.

        Args:
            ask: asks the service for `e_tag` and `size`; only called where there is a copy, of this version or another.
            fetch: opens the object itself.

        Raises:
            whatever these raise.
        """
        if self._has_copy(url):
            meta = ask()
            version = ObjectVersion(url, meta["e_tag"] or "", int(meta["size"]))
            path = self._path_of(url)
            try:
                copy = CachedFile(path, version)
                os.utime(path)  # used now
                return CachedSource(copy, lambda: self._fetch_version(version, fetch))
            except (OSError, ShrinkpointError, ValueError, KeyError, TypeError) as error:
                _log.debug("%s: not used: %s", path, error)
        return self._record(url, fetch())

    def add(self, version: ObjectVersion, parts: Iterator[Buffer]) -> None:
        """Copy an object that has just been written; `parts` are its bytes, from the first on."""
        copy = self._begin_copy(version)
        if copy is None:
            return
        try:
            offset = 0
            for part in parts:
                copy.write(offset, part)
                offset += memoryview(part).nbytes
            copy.commit()
        except (OSError, ShrinkpointError) as error:
            self._warn(error)
        finally:
            copy.drop()

    def discard(self, url: str) -> None:
        """Delete the copy of an object that was deleted."""
        with suppress(OSError):
            self._path_of(url).unlink(missing_ok=True)

    def make_room(self, size: int) -> None:
        """Delete the copies that were used longest ago until there is room for `size` bytes within the limit, and what
        killed processes have left.

        Raises:
            OSError: the directory cannot be read.
        """
        copies, total = list[tuple[int, int, Path]](), size
        with os.scandir(self.directory) as entries:
            for entry in entries:
                with suppress(OSError):  # deleted meanwhile
                    status, path = entry.stat(follow_symlinks=False), Path(entry.path)
                    if entry.name.startswith("tmp-") and is_regular(path) and not is_being_written(path):
                        path.unlink()
                        continue
                    total += status.st_blocks * 512
                    if entry.name.endswith(".object"):
                        copies.append((status.st_mtime_ns, status.st_blocks * 512, path))
        for _, taken, path in sorted(copies):
            if total <= self.max_bytes:
                return
            with suppress(OSError):
                path.unlink()
            total -= taken

    def _has_copy(self, url: str) -> bool:
        with suppress(OSError):  # a directory that may not be searched, a name that is too long
            return self._path_of(url).exists()
        return False

    def _path_of(self, url: str) -> Path:
        return self.directory / f"{xxh3_128(url.encode())}.object"

    def _fetch_version(self, version: ObjectVersion, fetch: Callable[[], RemoteSource]) -> Source:
        """Open an object of which a part may have been read from a copy.

        Raises:
            StorageError: it has been replaced since.
        """
        source = fetch()
        if (source.e_tag, source.size) != (version.e_tag, version.size):
            source.close()
            found, do = "another object than the one that was opened", "read again: something was saved meanwhile"
            raise StorageError(version.url, found=found, expected="the object that was opened", do=do)
        return self._record(version.url, source)

    def _record(self, url: str, source: RemoteSource) -> Source:
        """The same source, of which a copy is written while it is read."""
        copy = self._begin_copy(ObjectVersion(url, source.e_tag or "", source.size))
        return source if copy is None else RecordingSource(source, copy, self._warn)

    def _begin_copy(self, version: ObjectVersion) -> CacheWriter | None:
        if not version.e_tag or not MIN_BYTES < version.size <= self.max_bytes:
            return None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            return CacheWriter(self, self._path_of(version.url), version)
        except (OSError, ShrinkpointError) as error:
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s caches nothing now: %s", self.directory, error)


def resolve_cache(cache: str | Path | ObjectCache | None) -> ObjectCache | None:
    """The cache that a caller names; None: that of the environment, if that names one.

    Raises:
        PolicyError: no path of a directory on this machine, or no number of bytes.
    """
    if isinstance(cache, ObjectCache):
        return cache
    max_bytes = validate.read_byte_variable(BYTES_VARIABLE)
    if cache is None:
        cache = os.environ.get(DIRECTORY_VARIABLE) or None
    return None if cache is None else ObjectCache(cache, max_bytes)


class CachedFile(Source):
    """A copy, open for reading: each block is compared with its digest when it is first read.

    Raises:
        CorruptError: it is damaged, or of another version.
        OSError: there is none, or it cannot be read.
    """

    def __init__(self, path: Path, version: ObjectVersion) -> None:
        self.path, self._version = path, version
        self._file = LocalSource(path, str(path))
        try:
            length, size = self._file.size, self._version.size
            digest, index_bytes = _FOOTER.unpack(self._file.read(max(length - _FOOTER.size, 0), _FOOTER.size))
            if index_bytes > _MAX_INDEX_BYTES or length != size + index_bytes + _FOOTER.size:
                raise self._damaged()
            index = bytes(self._file.read(size, index_bytes))
            if xxh3_128(index).encode() != digest:
                raise self._damaged()
            content = json.loads(index)
            if ObjectVersion(*content["version"]) != self._version:
                raise self._damaged()
            digests = [content["digests"][begin : begin + 32] for begin in range(0, len(content["digests"]), 32)]
            if len(digests) != -(-size // BLOCK_BYTES):
                raise self._damaged()
            self._digests = digests
        except BaseException:
            self._file.close()
            raise
        self._verified = bytearray(len(self._digests))

    @property
    def size(self) -> int:
        return self._version.size

    def read(self, offset: int, length: int) -> bytes | memoryview:
        first, last = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
        if length and not all(self._verified[first:last]):
            begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self.size)
            data = memoryview(self._file.read(begin, end - begin))
            for number in range(first, last):
                block = data[number * BLOCK_BYTES - begin :][:BLOCK_BYTES]
                if xxh3_128(block) != self._digests[number]:
                    raise self._damaged()
                self._verified[number] = True
            return data[offset - begin : offset - begin + length]
        return self._file.read(offset, length)

    def _damaged(self) -> CorruptError:
        found = "bytes that do not have the digest of a copy"
        return CorruptError(str(self.path), found=found, do="delete it: the object is then read again")

    def close(self) -> None:
        self._file.close()


class CachedSource(Source):
    """A copy of an object; or the object itself, as soon as something is found to be wrong with the copy.

    Args:
        copy: of this version.
        fetch: opens the object itself.
    """

    def __init__(self, copy: CachedFile, fetch: Callable[[], Source]) -> None:
        self._copy, self._fetch = copy, fetch
        self._lock = ForkSafeLock()
        self._source: Source | None = None

    @property
    def size(self) -> int:
        return self._copy.size

    def read(self, offset: int, length: int) -> bytes | memoryview:
        check_range(str(self._copy.path), self.size, offset, length)
        if self._source is None:
            try:
                return self._copy.read(offset, length)
            except (OSError, ShrinkpointError, ValueError) as error:
                self._open_object(error)
        assert self._source is not None
        return self._source.read(offset, length)

    def _open_object(self, error: Exception) -> None:
        with self._lock.lock:
            if self._source is None:
                _log.warning("%s is damaged, its object is read again: %s", self._copy.path, error)
                with suppress(OSError):
                    self._copy.path.unlink(missing_ok=True)
                self._source = self._fetch()

    def close(self) -> None:
        self._copy.close()
        if self._source is not None:
            self._source.close()


class RecordingSource(Source):
    """An object of which a copy is written as it is read; what is missing of most of it is fetched at the end.

    Args:
        source: the object.
        copy: what is written.
        warn: is called with what goes wrong with the copy.
    """

    def __init__(self, source: Source, copy: CacheWriter, warn: Callable[[Exception], None]) -> None:
        self._source, self._copy, self._warn = source, copy, warn

    @property
    def size(self) -> int:
        return self._source.size

    def read(self, offset: int, length: int) -> bytes | memoryview:
        data = self._source.read(offset, length)
        self._write(offset, data)
        return data

    def _write(self, offset: int, data: Buffer) -> None:
        try:
            self._copy.write(offset, data)
        except (OSError, ShrinkpointError) as error:
            self._copy.drop()
            self._warn(error)

    def __exit__(self, kind: object = None, *error: object) -> None:
        if kind is not None:
            self._copy.drop()
        self.close()

    def close(self) -> None:
        try:
            gaps = self._copy.gaps()
            if 2 * sum(length for _, length in gaps) <= self.size:
                for offset, length in gaps:
                    for begin in range(offset, offset + length, _WINDOW_BYTES):
                        self.read(begin, min(_WINDOW_BYTES, offset + length - begin))
                self._copy.commit()
        except (OSError, ShrinkpointError) as error:
            self._warn(error)
        finally:
            self._copy.drop()
            self._source.close()


class CacheWriter:
    """A copy that is being written, in any order, by several threads.

    Args:
        cache: its cache.
        path: of the copy, once it is whole.
        version: of the object.

    Raises:
        OSError: no file can be written in the directory.
    """

    def __init__(self, cache: ObjectCache, path: Path, version: ObjectVersion) -> None:
        self._cache, self._path, self._version = cache, path, version
        self._lock = ForkSafeLock()
        self._digests: list[str] = [""] * -(-version.size // BLOCK_BYTES)
        self._ranges: list[tuple[int, int]] = []  # what has been written, in order, none touching another
        self._temporary = path.with_name(f"tmp-{secrets.token_hex(8)}")
        self._file: FileIO | None = FileIO(self._temporary, "x+")
        with suppress(OSError):  # of `is_being_written`; some file systems have no locks
            try_lock(self._file.fileno())

    def write(self, offset: int, data: Buffer) -> None:
        """Write bytes of the object; nothing happens once the copy is dropped.

        Raises:
            OSError: writing failed, also after other copies were deleted.
        """
        view = memoryview(data).cast("B")
        with self._lock.lock:
            if self._file is None or not view.nbytes:
                return
            self._write_all(offset, view)
            for number in range(-(-offset // BLOCK_BYTES), (offset + view.nbytes) // BLOCK_BYTES):
                begin = number * BLOCK_BYTES - offset
                self._digests[number] = xxh3_128(view[begin : begin + BLOCK_BYTES])
            self._ranges = _merge([*self._ranges, (offset, offset + view.nbytes)])

    def gaps(self) -> list[tuple[int, int]]:
        """Offset and length of what has not been written; of a dropped copy all."""
        with self._lock.lock:
            if self._file is None:
                return [(0, self._version.size)]
            ends = [0, *(end for _, end in self._ranges)]
            begins = [*(begin for begin, _ in self._ranges), self._version.size]
            return [(end, begin - end) for end, begin in zip(ends, begins, strict=True) if begin > end]

    def commit(self) -> None:
        """Make this the copy, if it is whole; raises OSError if writing failed."""
        if self.gaps():
            return
        with self._lock.lock:
            assert self._file is not None
            for number, digest in enumerate(self._digests):
                if not digest:  # it came in pieces
                    length = min(BLOCK_BYTES, self._version.size - number * BLOCK_BYTES)
                    self._digests[number] = xxh3_128(os.pread(self._file.fileno(), length, number * BLOCK_BYTES))
            index = json.dumps({"version": self._version, "digests": "".join(self._digests)}).encode()
            footer = _FOOTER.pack(xxh3_128(index).encode(), len(index))
            self._write_all(self._version.size, memoryview(index + footer))
            self._cache.make_room(0)
            self._temporary.replace(self._path)

    def drop(self) -> None:
        """Forget what is not committed; nothing happens after a commit."""
        with self._lock.lock:
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):
                    self._temporary.unlink(missing_ok=True)
                with suppress(OSError):
                    file.close()

    def _write_all(self, offset: int, view: memoryview) -> None:
        assert self._file is not None
        try:
            _pwrite(self._file.fileno(), offset, view)
        except OSError:  # the disk is full, perhaps of what is here
            self._cache.make_room(self._version.size)
            _pwrite(self._file.fileno(), offset, view)


def _pwrite(fd: int, offset: int, view: memoryview) -> None:
    while view.nbytes:
        count = os.pwrite(fd, view[: 1 << 30], offset)
        view, offset = view[count:], offset + count


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ranges in order, those that touch as one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
