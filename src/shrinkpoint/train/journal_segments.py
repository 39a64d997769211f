"""The files of a journal in a directory: a segment for each checkpoint that was begun, one file a rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shrinkpoint.container.journal_file import JournalFile, JournalRecord
from shrinkpoint.container.strict_json import corrupt_error
from shrinkpoint.errors import CorruptError, TruncatedError, warn_user
from shrinkpoint.guard import read_guard
from shrinkpoint.storage import LocalStorage

_NAME = re.compile(r"(\d{12})-(\d{5})\.journal")


@dataclass(frozen=True)
class ChainPlace:
    """A record in a chain of segments, and where the file goes on behind it.

    Attributes:
        start: the step after which the segment begins.
        record: the record; the first one of a segment is the state at `start`, without gradients.
        digest: of the record.
        fields: of the file's header.
    """

    start: int
    record: JournalRecord
    digest: bytes
    fields: dict[str, object]

    @property
    def begins_segment(self) -> bool:
        return self.record.step == self.start


class JournalDirectory:
    """Finds, reads and deletes segments."""

    def __init__(self, path: Path) -> None:
        self.path = path

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
                    yield ChainPlace(start, record, file.digest, file.fields)
                    expected += 1
            if expected <= start + 1:  # nothing, or the state alone: no other segment begins behind it
                return
            start = expected - 1

    def last_step(self, start: int, rank: int, *, strict: bool) -> int | None:
        """The last step of a rank's chain; None if there is no whole state at its start.

        Args:
            strict: False: a damaged record ends the chain, with a warning.
        """
        last = None
        try:
            for place in self.chain(start, rank):
                last = place.record.step
        except CorruptError as error:
            if strict:
                raise
            warn_user(f"the journal is replayed up to step {last}: {error}", UserWarning)
        return last

    def delete(self, is_old: Callable[[int, int], bool]) -> None:
        """Delete the files of whose step and rank this is true."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match and is_old(int(match[1]), int(match[2])):
                with suppress(OSError):  # it is in nobody's way
                    path.unlink()
