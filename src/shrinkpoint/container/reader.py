"""Open a file: everything its header says is checked before anything else is read."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

from shrinkpoint._native import Hasher, xxh3_128
from shrinkpoint.collection import postponed
from shrinkpoint.container import document, header
from shrinkpoint.container.document import Entry, RecordHead
from shrinkpoint.container.header import Readable
from shrinkpoint.container.strict import refuse
from shrinkpoint.errors import CorruptError, FormatError, StorageError
from shrinkpoint.guard import guarded
from shrinkpoint.record import Encoded

_WINDOW = 8 << 20


@dataclass(frozen=True)
class Damage:
    """One damaged place of a file.

    Attributes:
        record: the record that is hit.
        tensors: the names of its tensors.
        error: what is wrong.
    """

    record: str
    tensors: tuple[str, ...]
    error: FormatError | StorageError


class Reader:
    """A file's header, and its records one by one. Several threads may use one reader at once.

    Attributes:
        where: the file, as messages name it.
        digest: of the header, in hex; vouches for every byte of the file.
        size: of the file in bytes.
        writer, scheme, parent, tree, report: as given to the `Writer`.
        records: in the order of the file, in which they must be decoded.

    Raises:
        TruncatedError: the file ends before what it announces.
        VersionError: a newer release wrote it.
        CorruptError: anything else about its header is wrong.
        StorageError: it cannot be read.
    """

    def __init__(self, source: Readable, where: str) -> None:
        with guarded(where), postponed():
            head = header.unpack(source, where)
            said = document.parse(head, where)
        self._source = source
        self._vouched: set[tuple[str, str]] = set()  # records' parts whose bytes were compared with their digests
        self.where, self.digest, self.size = where, head.digest, source.size
        self.writer, self.scheme, self.parent = said.writer, said.scheme, said.parent
        self.tree, self.report, self.records = said.tree, said.report, said.records

    def attached(self, source: Readable) -> Reader:
        """This reader over the same file, opened again, without parsing its header again.

        Raises:
            CorruptError: it is another file by now.
            TruncatedError, StorageError: as of a new reader.
        """
        with guarded(self.where):
            found = header.seal(source, self.where)
        if (found, source.size) != (self.digest, self.size):
            raise refuse(self.where, f"header digest {found}", f"{self.digest}, which it had when it was opened")
        out = copy(self)
        out._source, out._vouched = source, set()
        return out

    def read(self, record: RecordHead) -> Encoded:
        """A record with its bytes, whose digests are right.

        Raises:
            CorruptError: a digest does not match.
            TruncatedError: the file has been cut since it was opened.
            StorageError: reading failed.
        """
        parts = {part: self._part(record, part, entry) for part, entry in record.parts.items()}
        return Encoded(record.name, record.infos, record.recipe, parts, record.digest, record.base)

    def read_part(self, record: RecordHead, part: str, begin: int, end: int) -> memoryview:
        """Some bytes of a part, whose digest is compared when the first of it are asked for, and then no more.

        Raises:
            CorruptError: the digest does not match, or the part does not have these bytes.
            TruncatedError, StorageError: as `read`.
        """
        entry = record.parts[part]
        if not 0 <= begin <= end <= entry.size:
            raise self._damaged(record, part, f"{entry.size} bytes", f"bytes {begin} to {end}")
        if (record.name, part) not in self._vouched:
            self._filler(record, part, entry)
            self._match(record, part, entry, self._digest(entry))
            self._vouched.add((record.name, part))
        return memoryview(self._source.read(entry.offset + begin, end - begin))

    def check(self) -> Iterator[Damage]:
        """Compare all stored bytes with their digests, without decoding, in little memory; yields what is damaged."""
        for record in self.records:
            for part, entry in record.parts.items():
                try:
                    self._filler(record, part, entry)
                    self._match(record, part, entry, self._digest(entry))
                except (FormatError, StorageError) as error:
                    yield Damage(record.name, tuple(info.name for info in record.infos), error)

    def _part(self, record: RecordHead, part: str, entry: Entry) -> memoryview:
        self._filler(record, part, entry)
        data = self._source.read(entry.offset, entry.size)
        self._match(record, part, entry, xxh3_128(data))
        return memoryview(data)

    def _digest(self, entry: Entry) -> str:
        hasher, end = Hasher(), entry.offset + entry.size
        for begin in range(entry.offset, end, _WINDOW):
            hasher.update(self._source.read(begin, min(_WINDOW, end - begin)))
        return hasher.hexdigest()

    def _filler(self, record: RecordHead, part: str, entry: Entry) -> None:
        if entry.pad and any(self._source.read(entry.offset - entry.pad, entry.pad)):
            raise self._damaged(record, part, "a filler that is not zero", "zeros")

    def _match(self, record: RecordHead, part: str, entry: Entry, digest: str) -> None:
        if digest != entry.digest:
            raise self._damaged(record, part, f"stored digest {digest}", entry.digest)

    def _damaged(self, record: RecordHead, part: str, found: str, expected: str) -> CorruptError:
        name = record.infos[0].name if len(record.infos) == 1 else record.name
        do = "restore another checkpoint; `shrinkpoint verify` tells what else is hit"
        return refuse(f"{self.where}: tensor {name!r}, part {part!r}", found, expected, do)
