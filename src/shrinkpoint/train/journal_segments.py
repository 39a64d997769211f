"""The files of a journal in a directory: a segment for each checkpoint that was begun, one file a rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.container.journal_file import JournalFile, JournalRecord, encode_journal_header, encode_journal_record
from shrinkpoint.container.strict_json import corrupt_error
from shrinkpoint.errors import CorruptError, TruncatedError, warn_user
from shrinkpoint.guard import read_guard
from shrinkpoint.storage import LocalStorage, storage_error
from shrinkpoint.storage.append_file import AppendFile
from shrinkpoint.storage.local import LOCK, hold_lock
from shrinkpoint.tensors.info import JSON

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

    def lock(self, rank: int) -> AbstractContextManager[None]:
        """Keep other processes from writing the files of a rank.

        Raises:
            LockedError: another process does. StorageError: the system refused something.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(str(self.path), "creating the directory", error) from error
        return hold_lock(self.path / f"{LOCK}-{rank:05d}", str(self.path))

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
