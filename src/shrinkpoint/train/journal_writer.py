"""Appends a rank's records to the open segment of a journal, and takes the last one back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shrinkpoint.container.journal_file import encode_journal_header, encode_journal_record
from shrinkpoint.storage.append_file import AppendFile
from shrinkpoint.tensors.info import JSON
from shrinkpoint.train.journal_segments import ChainPlace


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
