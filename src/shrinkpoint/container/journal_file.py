"""The journal file: what one rank appended between two checkpoints, a record a training step. No torch.

A record is written by one append, so that what a killed process leaves at the end is the beginning of a record. Each
record's digest covers that of the record before: records cannot be left out, exchanged or taken from another file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shrinkpoint._native import Hasher, xxh3_128
from shrinkpoint.container.header import Readable
from shrinkpoint.container.strict_json import corrupt_error, expect_type, load_json
from shrinkpoint.errors import VERSION_ADVICE, CorruptError, TruncatedError, VersionError
from shrinkpoint.tensors.info import JSON

Buffer: TypeAlias = bytes | bytearray | memoryview
JOURNAL_FORMAT = 1
JOURNAL_MAGIC = b"shrinkpoint journal\n"
_START = struct.Struct("<Q16s")  # Length of the JSON behind it, and the digest of magic, length and JSON
_HEAD = struct.Struct("<QQI8s16s")
"""Step, bytes of all blobs, bytes of the JSON before them; a digest of these, cut to 8 bytes; the record's digest."""
_NUMBERS = struct.Struct("<QQI")
MAX_JOURNAL_JSON = 1 << 24  # Largest JSON of a header or record in bytes
_DO = "restore with strict=False, which stops before what is damaged, or begin from the checkpoint alone"


@dataclass(frozen=True)
class JournalRecord:
    """One step."""

    step: int  # its number
    fields: dict[str, JSON]  # its JSON object, without the sizes of blobs
    blobs: dict[str, memoryview]  # bytes by name
    end: int  # the offset behind it in the file


def encode_journal_header(fields: Mapping[str, JSON]) -> tuple[bytes, bytes]:
    """Encode the beginning of a file; returns the bytes, and the digest that the first record continues."""
    text = json.dumps({"format": JOURNAL_FORMAT, **fields}, separators=(",", ":")).encode("ascii")
    digest = _start_digest(text)
    return JOURNAL_MAGIC + _START.pack(len(text), digest) + text, digest


def encode_journal_record(
    step: int, fields: Mapping[str, JSON], blobs: Mapping[str, Sequence[Buffer]], previous: bytes
) -> tuple[list[Buffer], bytes]:
    """Encode a record: the buffers of blobs are not copied.

    Args:
        blobs: by name, the buffers that make up each.
        previous: the digest of the record before, or of the header.

    Returns:
        The buffers to append, and the record's digest.
    """
    sizes = [[name, sum(map(_nbytes, parts))] for name, parts in blobs.items()]
    blob_bytes = sum(_nbytes(part) for parts in blobs.values() for part in parts)
    text = json.dumps({**fields, "blobs": sizes}, separators=(",", ":")).encode("ascii")
    numbers = _NUMBERS.pack(step, blob_bytes, len(text))
    buffers = [part for parts in blobs.values() for part in parts if _nbytes(part)]
    digest = _record_digest(previous, numbers, text, buffers)
    return [_HEAD.pack(*_NUMBERS.unpack(numbers), _check_of(numbers), digest) + text, *buffers], digest


class JournalFile:
    """Reads a journal file, which may end in the middle of a record.

    Memory: one record at a time.

    Attributes:
        fields: the JSON object of the header.
        end: the offset behind the last record that was read, from which on a writer may append.
        digest: of the last record that was read, or of the header.

    Raises:
        TruncatedError: the file ends before its header does: the process was killed while it began.
        CorruptError: the header is at fault. VersionError: a newer release wrote it.
    """

    def __init__(self, source: Readable, where: str) -> None:
        self._source, self._where = source, where
        begin = len(JOURNAL_MAGIC) + _START.size
        magic = bytes(source.read(0, min(len(JOURNAL_MAGIC), source.size)))
        if not JOURNAL_MAGIC.startswith(magic):
            raise corrupt_error(where, f"{magic[:20]!r} at the beginning", "a journal", _DO)
        if source.size < begin:
            raise _truncated(where, source.size)
        length, self.digest = _START.unpack(source.read(len(JOURNAL_MAGIC), _START.size))
        if length > MAX_JOURNAL_JSON:
            raise corrupt_error(where, f"a header of {length} bytes", f"at most {MAX_JOURNAL_JSON}", _DO)
        if source.size < begin + length:
            raise _truncated(where, source.size)
        text = bytes(source.read(begin, length))
        if _start_digest(text) != self.digest:
            raise corrupt_error(where, "a header that contradicts its digest", "the bytes that were written", _DO)
        self.fields = expect_type(load_json(text, where, "the header"), dict, where, "the header")
        if (version := self.fields.pop("format", None)) != JOURNAL_FORMAT:
            found = f"format {version!a:.20}"
            raise VersionError(where, found=found, expected=f"{JOURNAL_FORMAT}", do=VERSION_ADVICE)
        self.end = begin + length

    def records(self) -> Iterator[JournalRecord]:
        """Read the records behind `end`; the iterator ends where the file does, or in a record that is not whole.

        The last record counts as not whole if it contradicts its digest: after a power cut a file may have its size
        before it has its bytes.

        Raises:
            CorruptError: a record that others follow is damaged, or the numbers at the beginning of one are.
        """
        while self._source.size - self.end >= _HEAD.size:
            head = bytes(self._source.read(self.end, _HEAD.size))
            step, blob_bytes, text_bytes, check, digest = _HEAD.unpack(head)
            numbers = head[: _NUMBERS.size]
            if check != _check_of(numbers):
                if self._is_blank():
                    return
                raise self._damaged("the numbers of a record")
            size = _HEAD.size + text_bytes + blob_bytes
            if self._source.size - self.end < size:
                return
            if text_bytes > MAX_JOURNAL_JSON:
                raise self._damaged(f"JSON of {text_bytes} bytes")
            body = memoryview(self._source.read(self.end + _HEAD.size, text_bytes + blob_bytes))
            if _record_digest(self.digest, numbers, body, ()) != digest:
                if self._source.size == self.end + size:
                    return
                raise self._damaged(f"the record of step {step}")
            record = self._parse(step, bytes(body[:text_bytes]), body[text_bytes:], self.end + size)
            self.end, self.digest = record.end, digest
            yield record

    def _parse(self, step: int, text: bytes, data: memoryview, end: int) -> JournalRecord:
        where = f"{self._where}, step {step}"
        fields = expect_type(load_json(text, where, "a record"), dict, where, "a record")
        blobs, offset = {}, 0
        for row in expect_type(fields.pop("blobs", None), list, where, "the blobs"):
            pair = expect_type(row, list, where, "a blob")
            if len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) is not int or pair[0] in blobs:
                raise corrupt_error(where, f"a blob {row!a:.60}", "a name of its own and a size", _DO)
            if not 0 <= pair[1] <= data.nbytes - offset:
                raise corrupt_error(where, f"a blob of {pair[1]} bytes", f"at most {data.nbytes - offset}", _DO)
            blobs[pair[0]] = data[offset : offset + pair[1]]
            offset += pair[1]
        if offset != data.nbytes:
            raise corrupt_error(where, f"blobs of {offset} bytes", f"{data.nbytes}", _DO)
        return JournalRecord(step, fields, blobs, end)

    def _is_blank(self) -> bool:
        """True if nothing but zeros follows, as after a power cut; read piece by piece."""
        offset = self.end
        while offset < self._source.size:
            piece = bytes(self._source.read(offset, min(1 << 20, self._source.size - offset)))
            if piece.strip(b"\0"):
                return False
            offset += len(piece)
        return True

    def _damaged(self, what: str) -> CorruptError:
        where = f"{self._where}, byte {self.end}"
        return corrupt_error(where, f"{what}, which contradicts its digest", "the bytes that were written", _DO)


def _nbytes(part: Buffer) -> int:
    return len(part) if isinstance(part, bytes | bytearray) else part.nbytes


def _start_digest(text: bytes) -> bytes:
    return bytes.fromhex(xxh3_128(JOURNAL_MAGIC + struct.pack("<Q", len(text)) + text))


def _check_of(numbers: bytes) -> bytes:
    return bytes.fromhex(xxh3_128(numbers))[:8]


def _record_digest(previous: bytes, numbers: bytes, text: Buffer, buffers: Sequence[Buffer]) -> bytes:
    hasher = Hasher()
    for part in (previous, numbers, text, *buffers):
        hasher.update(part)
    return bytes.fromhex(hasher.hexdigest())


def _truncated(where: str, size: int) -> TruncatedError:
    return TruncatedError(where, found=f"a file that ends at byte {size}", expected="a header", do=_DO)
