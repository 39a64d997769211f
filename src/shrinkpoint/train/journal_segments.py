"""The files of a journal in a directory: a segment for each checkpoint that was begun, one file a rank.

An `AppendFile` only grows: its records must outlive the process without an fsync each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.container.journal_file import JournalFile, JournalRecord, encode_journal_header, encode_journal_record
from shrinkpoint.container.strict_json import corrupt_error
from shrinkpoint.errors import CorruptError, MismatchError, StorageError, TruncatedError, warn_user
from shrinkpoint.guard import read_guard
from shrinkpoint.storage import LocalStorage, storage_error
from shrinkpoint.storage.base import Buffer
from shrinkpoint.storage.local import LOCK, atomic_replace, hold_lock, os_errors
from shrinkpoint.storage.paths import open_regular
from shrinkpoint.tensors.info import JSON

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
        with atomic_replace(path) as temporary:
            temporary.write_bytes(data)
        return cls(path, len(data))

    def append(self, buffers: Sequence[Buffer]) -> None:
        """Append bytes; on an error the file has the size that it had.

        Raises:
            NoSpaceError: the disk is full. StorageError: writing failed, or the file was deleted.
        """
        rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        end = self.size
        self._check_own()
        if not self._path.exists():
            found, do = "a journal that was deleted or moved away", "call its `save`, which begins it anew"
            raise StorageError(str(self._path), found=found, expected="the file that is appended to", do=do)
        try:
            while rest:
                with os_errors(str(self._path), "appending"):
                    written = os.pwritev(self._fd, rest[:_MAX_BUFFERS], end)
                end += written
                while rest and written >= rest[0].nbytes:
                    written -= rest.pop(0).nbytes
                if written:
                    rest[0] = rest[0][written:]
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size = end

    def cut(self, size: int) -> None:
        """Take back what was appended behind a size; raises StorageError if the system refused it."""
        self._check_own()
        self.size = size
        with os_errors(str(self._path), "cutting"):
            os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Return when every byte is on the disk."""
        with os_errors(str(self._path), "flushing to the disk"):
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; what was appended stays the kernel's to write."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def _check_own(self) -> None:
        """Raise in a forked child, whose parent appends to the same file."""
        if os.getpid() != self._pid:
            found, do = f"a file that process {self._pid} appends to", "append in the process that opened it"
            raise StorageError(str(self._path), found=found, expected="one writer at a time", do=do)


_NAME = re.compile(r"([0-9]{12}|[1-9][0-9]{12,14})-([0-9]{5})\.journal")


@dataclass(frozen=True)
class ChainPlace:
    """A record in a chain of segments, and where the file goes on behind it."""

    where: str  # the file
    start: int  # the step after which the segment begins
    record: JournalRecord  # the record; the first one of a segment is the state at `start`, without gradients
    digest: bytes  # of the record
    fields: dict[str, object]  # of the file's header

    @property
    def begins_segment(self) -> bool:
        return self.record.step == self.start


class JournalDirectory:
    """Finds, reads and deletes segments."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock(self, rank: int) -> AbstractContextManager[int]:
        """Keep other processes from writing the files of a rank.

        Raises:
            LockedError: another process does. StorageError: the system refused something.
        """
        with os_errors(str(self.path), "creating the directory"):
            self.path.mkdir(parents=True, exist_ok=True)
        return hold_lock(self._lock_path(rank), str(self.path))

    def holds_lock(self, rank: int, fd: int) -> bool:
        """True if the lock with this descriptor is held; not if somebody has deleted its file since."""
        try:
            return os.path.samestat(os.fstat(fd), self._lock_path(rank).stat())
        except OSError:
            return False

    def _lock_path(self, rank: int) -> Path:
        return self.path / f"{LOCK}-{rank:05d}"

    def path_of(self, start: int, rank: int) -> Path:
        return self.path / f"{start:012d}-{rank:05d}.journal"

    def chain(self, start: int, rank: int) -> Iterator[ChainPlace]:
        """The records of a rank from the state at a step on, over segments that follow each other.

        Raises:
            CorruptError: a record that others follow is damaged. VersionError: a newer release wrote it.
            StorageError: a file cannot be read.
        """
        storage = LocalStorage(self.path)
        while self.path_of(start, rank).is_file():
            name = self.path_of(start, rank).name
            where, expected = storage.describe(name), start
            with storage.open(name) as source, read_guard(where):
                try:
                    file = JournalFile(source, where)
                except TruncatedError:
                    return
                for record in file.records():
                    if record.step != expected:
                        advice = "restore with strict=False, which stops before it"
                        raise corrupt_error(where, f"the record of step {record.step}", f"step {expected}", advice)
                    yield ChainPlace(where, start, record, file.digest, file.fields)
                    expected += 1
            if expected <= start + 1:  # nothing, or the state alone: no other segment begins behind it
                return
            start = expected - 1

    def last_place(self, start: int, rank: int, *, strict: bool) -> tuple[int, int] | None:
        """The last step of a rank's chain, and the start of its segment; None if there is no whole state at the start.

        Args:
            strict: False: a damaged record ends the chain, with a warning.
        """
        last = None
        try:
            for place in self.chain(start, rank):
                last = place.record.step, place.start
        except CorruptError as error:
            if strict:
                raise
            warn_user(f"the journal is replayed up to step {start if last is None else last[0]}: {error}", UserWarning)
        return last

    def check_passed(self, start: int, rank: int) -> None:
        """Raise MismatchError if no file of a rank begins at a step, and an older one has steps behind it."""
        older = [other for other in self.starts(rank) if other < start]
        last = self.last_place(older[-1], rank, strict=False) if older else None
        if last is not None and last[0] > start and start not in self.starts(rank):
            found = f"no file from step {start}, saved without the journal, and {last[0] - start} steps after it"
            do = f"replay them from the checkpoint of step {older[-1]}, if it is there, or lose them with strict=False"
            raise MismatchError(str(self.path), found=found, expected="checkpoints of journal.save", do=do)

    def starts(self, rank: int) -> list[int]:
        """The steps at which files of a rank begin, in order: a checkpoint of each was made."""
        return sorted(start for _, start, owner in self._files() if owner == rank)

    def delete(self, is_old: Callable[[int, int], bool]) -> None:
        """Delete the files of whose step and rank this is true."""
        for path, start, rank in self._files():
            if is_old(start, rank):
                with suppress(OSError):  # it is in nobody's way
                    path.unlink()

    def _files(self) -> list[tuple[Path, int, int]]:
        """The files, with the step at which each begins, and its rank."""
        paths = list(self.path.iterdir()) if self.path.is_dir() else []
        matches = [(path, _NAME.fullmatch(path.name)) for path in paths]
        return [(path, int(match[1]), int(match[2])) for path, match in matches if match]


class SegmentWriter:
    """The open segment of a rank.

    Args:
        file: its file.
        start: the step after which it begins.
        digest: of its last record.
        num_records: of steps.

    Attributes:
        start, num_records: as passed, and with what was appended since.
    """

    def __init__(self, file: AppendFile, start: int, digest: bytes, num_records: int) -> None:
        self._file, self.start, self._digest, self.num_records = file, start, digest, num_records
        self._before: tuple[int, bytes] | None = None  # the size and the digest before the last record

    @classmethod
    def create(
        cls, path: Path, start: int, header: Mapping[str, JSON], fields: Mapping[str, JSON], blobs: Mapping[str, Any]
    ) -> SegmentWriter:
        """Create or replace a file with a header and the record of the state at its start, durably."""
        head, digest = encode_journal_header(header)
        record, digest = encode_journal_record(start, fields, blobs, digest)
        file = AppendFile.create(path, b"".join(bytes(part) for part in (head, *record)))
        return cls(file, start, digest, 0)

    @classmethod
    def reopen(cls, path: Path, place: ChainPlace) -> SegmentWriter:
        """Go on behind a record; what follows it is cut off."""
        file = AppendFile(path, place.record.end)
        return cls(file, place.start, place.digest, place.record.step - place.start)

    def append(self, step: int, fields: Mapping[str, JSON], blobs: Mapping[str, Sequence[Any]], *, sync: bool) -> None:
        """Append a record; on an error the file is as it was.

        Args:
            sync: True if it is on the disk when this returns.

        Raises:
            NoSpaceError: the disk is full. StorageError: writing failed.
        """
        before = self._file.size, self._digest
        data, digest = encode_journal_record(step, fields, blobs, self._digest)
        self._file.append(data)
        self._before, self._digest = before, digest
        self.num_records += 1
        if sync:
            try:
                self._file.sync()
            except BaseException:
                self.undo()
                raise

    def undo(self) -> None:
        """Take back the record that was appended last."""
        if self._before is not None:
            size, self._digest = self._before
            self._before = None
            self.num_records -= 1
            self._file.cut(size)

    def sync(self) -> None:
        """Return when every record is on the disk."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()
