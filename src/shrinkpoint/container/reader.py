"""Reads files; the whole header is validated before anything else is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import TypeAlias

from shrinkpoint._native import Hasher, xxh3_128
from shrinkpoint.container import header
from shrinkpoint.container.header import Readable
from shrinkpoint.container.index import parse_index
from shrinkpoint.container.metadata import FORMAT_VERSION, Entry, RecordHead, parse_metadata_v1
from shrinkpoint.container.strict_json import corrupt_error, expect_type, shorten
from shrinkpoint.errors import VERIFY_ADVICE, VERSION_ADVICE, CorruptError, FormatError, StorageError, VersionError
from shrinkpoint.guard import no_gc, read_guard
from shrinkpoint.tensors.info import EncodedRecord

_ReadHashed: TypeAlias = Callable[[int, int], tuple[bytes | memoryview, str]]
WINDOW_BYTES = 8 << 20  # Bytes that are read at a time where only their digest is asked for


class FileReader:
    """Reads the header of a file, and its records one by one; safe to use from several threads.

    Attributes:
        where: the file, for messages.
        digest: digest of the header, in hex; it covers every byte of the file.
        size: bytes of the file.
        writer, scheme, parent, tree, report: as given to the `FileWriter`.
        records: the records in the order of the file, in which they must be decoded.

    Raises:
        TruncatedError: the file is shorter than its header announces.
        VersionError: a newer release wrote it.
        CorruptError: the header is malformed in any other way.
        StorageError: it cannot be read.
    """

    def __init__(self, source: Readable, where: str) -> None:
        with read_guard(where), no_gc():
            head = header.decode_header(source, where)
            version = expect_type(head.fields.get("format"), int, where, "the format version")
            if version > FORMAT_VERSION:
                found = shorten(f"format version {version}, written by {head.fields.get('writer')!r}")
                expected = f"at most version {FORMAT_VERSION}"
                raise VersionError(where, found=found, expected=expected, do=VERSION_ADVICE)
            if version < 1:
                raise corrupt_error(where, f"format version {version}", f"1 to {FORMAT_VERSION}")
            fields, records = parse_metadata_v1(head, where) if version == 1 else parse_index(head, source, where)
            self.writer = expect_type(head.fields["writer"], str, where, "the writer")
            self.scheme = expect_type(fields["scheme"], str, where, "the scheme")
            parent = fields["parent"]
            self.parent = None if parent is None else expect_type(parent, dict, where, "the parent")
        self._source = source
        self._verified: set[tuple[str, str]] = set()  # (record, part) whose digest has been checked
        self.where, self.digest, self.size = where, head.digest, source.size
        self.tree, self.report, self.records = fields["tree"], fields["report"], records

    def reopen(self, source: Readable) -> FileReader:
        """Return this reader over the same file opened again, without parsing its header again.

        Raises:
            CorruptError: the file has been replaced by another one.
            TruncatedError, StorageError: as for a new reader.
        """
        with read_guard(self.where):
            _, digest = header.read_header(source, self.where)
        if (digest, source.size) != (self.digest, self.size):
            expected = f"{self.digest}, which it had when it was opened"
            raise corrupt_error(self.where, f"header digest {digest}", expected)
        out = copy(self)
        out._source, out._verified = source, set()
        return out

    def read(self, record: RecordHead) -> EncodedRecord:
        """Read a record, and verify the digests of its parts.

        Raises:
            CorruptError: a digest does not match.
            TruncatedError: the file has been truncated since it was opened.
            StorageError: reading failed.
        """
        parts = {}
        read_hashed: _ReadHashed | None = getattr(self._source, "read_hashed", None)  # where the storage can do that
        for part, entry in record.parts.items():
            if read_hashed is None:
                data = self._source.read(entry.offset, entry.size)
                digest = xxh3_128(data)
            else:
                data, digest = read_hashed(entry.offset, entry.size)
            if entry.pad or digest != entry.digest:
                self._verify(record, part, digest)
            parts[part] = memoryview(data)
        return EncodedRecord(record.name, record.infos, record.recipe, parts, record.digest, record.base)

    def read_part(self, record: RecordHead, part: str, begin: int, end: int) -> memoryview:
        """Read a range of a part; its digest is verified on the first read only.

        Raises:
            CorruptError: the digest does not match, or the range is not within the part.
            TruncatedError, StorageError: as `read`.
        """
        entry = record.parts[part]
        if not 0 <= begin <= end <= entry.size:
            raise self._corrupt_error(record, part, f"{entry.size} bytes", f"bytes {begin} to {end}")
        if (record.name, part) not in self._verified:
            self._verify(record, part, self._digest(entry))
            self._verified.add((record.name, part))
        return memoryview(self._source.read(entry.offset + begin, end - begin))

    def check(self) -> Iterator[FormatError | StorageError]:
        """Verify the digests of all stored bytes without decoding, in little memory; yields an error a damaged part."""
        for record in self.records:
            for part, entry in record.parts.items():
                try:
                    self._verify(record, part, self._digest(entry))
                except (FormatError, StorageError) as error:
                    yield error

    def _digest(self, entry: Entry) -> str:
        hasher, end = Hasher(), entry.offset + entry.size
        for begin in range(entry.offset, end, WINDOW_BYTES):
            hasher.update(self._source.read(begin, min(WINDOW_BYTES, end - begin)))
        return hasher.hexdigest()

    def _verify(self, record: RecordHead, part: str, digest: str) -> None:
        """Raise a CorruptError unless the filler before a part is zero and `digest` is that of its stored bytes."""
        entry = record.parts[part]
        if entry.pad and any(self._source.read(entry.offset - entry.pad, entry.pad)):
            raise self._corrupt_error(record, part, "a filler that is not zero", "zeros")
        if digest != entry.digest:
            raise self._corrupt_error(record, part, f"stored digest {digest}", entry.digest)

    def _corrupt_error(self, record: RecordHead, part: str, found: str, expected: str) -> CorruptError:
        return corrupt_error(f"{self.where}: {record.label}, part {part!r}", found, expected, VERIFY_ADVICE)
