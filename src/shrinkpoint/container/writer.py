"""Writes records one after the other into one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from io import BytesIO
from typing import Protocol

from shrinkpoint._native import xxh3_128
from shrinkpoint.container import header
from shrinkpoint.container.index import MAX_INDEX_BYTES, IndexBuilder
from shrinkpoint.container.metadata import FORMAT_VERSION, PayloadLayout, is_plain, is_standard_entry
from shrinkpoint.container.strict_json import MAX_JSON_DEPTH, count_nests, json_depth
from shrinkpoint.errors import PolicyError, StateError
from shrinkpoint.tensors.info import JSON, EncodedRecord, TensorInfo

_BLOCK = 8 << 20
_MAX_VALUE_DEPTH = MAX_JSON_DEPTH - 8  # the header nests its values further
_MIN_ENTRY_BYTES = 1 << 12  # Bytes of a tensor for which space in the header is reserved
_ZEROS = bytes(header.ALIGN)
_version = cache(version)


class Writable(Protocol):
    """A file that can be written and read back, such as `storage.Sink`."""

    def write(self, data: bytes | memoryview, /) -> object: ...

    def seek(self, offset: int, /) -> object: ...

    def read(self, length: int, /) -> bytes: ...


class FileWriter:
    """Streams records into a file.

    The header comes first in the file but is complete last. Up to `spool` bytes of payload are buffered in memory, so
    that a small file gets a header without padding. In a larger file, space for the header is reserved by an estimate
    from the tensors so far and the large ones to come; if it does not suffice, the payload is shifted.

    Args:
        sink: an empty file at offset 0.
        scheme: id of the scheme that encodes.
        parent: how a reader finds the file that this one is a delta to; None for none.
        tree: the state without its tensors.
        expected: the tensors that will follow, as far as known; used only to estimate the size of the header.

    Raises:
        StateError: `tree` or `parent` is not JSON, or nests too deeply.
    """

    spool = 16 << 20

    def __init__(
        self, sink: Writable, *, scheme: str, parent: JSON, tree: JSON, expected: Sequence[TensorInfo] = ()
    ) -> None:
        self._sink = sink
        self._fields = [
            f'"scheme":{_to_json(scheme, "scheme")}',
            f'"parent":{_to_json(parent, "parent")}',
            f'"tree":{_to_json(tree, "state")}',
        ]
        self._expected = {info.name: info for info in expected}
        self._index = IndexBuilder()
        self._layout = PayloadLayout()
        self._records: set[str] = set()
        self._tensors: set[str] = set()
        self._spooled: BytesIO | None = BytesIO()
        self._reserved = 0  # bytes reserved for length and header; 0 while the payload is buffered

    def add(self, encoded: EncodedRecord) -> int:
        """Append one record; its parts are copied or written before this returns.

        Returns:
            The bytes that it takes in the payload.

        Raises:
            PolicyError: the record contradicts itself, or repeats a name.
            StorageError: writing failed.
        """
        plain = is_plain(encoded.recipe)
        self._check(encoded, plain=plain)
        recipe = _to_json(encoded.recipe, encoded.name)
        views = [memoryview(data) for data in encoded.parts.values()]
        parts = [view.cast("B") if view.nbytes else memoryview(b"") for view in views]
        digests = [xxh3_128(part) for part in parts]
        if plain and digests != [encoded.digest]:
            raise _record_error(encoded, f"digest {encoded.digest} of bytes with {digests}")
        begin = self._layout.size
        tensor = encoded.infos[0] if plain and is_standard_entry(encoded.recipe, encoded.infos) else None
        for part in parts:
            pad, _ = self._layout.add(part.nbytes, tensor)
            self._write(_ZEROS[:pad])
            self._write(part)
        self._index.add(encoded, recipe, [part.nbytes for part in parts], digests)
        self._records.add(encoded.name)
        self._tensors.update(info.name for info in encoded.infos)
        return self._layout.size - begin

    def finish(self, report: JSON = None) -> tuple[int, str]:
        """Write the index and the header, which complete the file; its durability is up to the sink.

        Args:
            report: JSON for tools that inspect the file.

        Returns:
            The file's size in bytes, and the digest of its header, which covers all of its bytes.

        Raises:
            PolicyError: the header would be longer than safetensors allows, or the index have more items than readers
                accept.
            StateError: `report` is not JSON.
            StorageError: writing failed.
        """
        index, text = self._index.encode(self._fields, _to_json(report, "report"))
        count, limit = count_nests(text)
        if count > limit:
            found = f"an index of {count} lists and objects"
            do = "save many small values as one tensor or text, or the state in several files"
            raise PolicyError("state", found=found, expected=f"at most {limit}", do=do)
        if max(len(index), len(text)) > MAX_INDEX_BYTES:
            found = f"an index of {len(index)} bytes, from {len(text)} of JSON, for {len(self._tensors)} tensors"
            expected, do = f"at most {MAX_INDEX_BYTES} of each", "save the state in several files"
            raise PolicyError("state", found=found, expected=expected, do=do)
        self._layout.end(len(index), marked=True)
        (self._sink if self._spooled is None else self._spooled).write(index)
        data, digest = header.encode_header(_metadata_json(index), self._layout.slots, self._reserved - 8)
        if len(data) - 8 > header.MAX_HEADER_BYTES:
            found = f"a header of {len(data) - 8} bytes for {len(self._tensors)} tensors"
            expected, do = f"at most {header.MAX_HEADER_BYTES}", "save the state in several files"
            raise PolicyError("state", found=found, expected=expected, do=do)
        if self._spooled is None:
            self._shift_payload(len(data) - self._reserved)
            self._sink.seek(0)
        self._sink.write(data)
        if self._spooled is not None:
            self._sink.write(self._spooled.getbuffer())
        return len(data) + self._layout.size, digest

    def _check(self, encoded: EncodedRecord, *, plain: bool) -> None:
        names = [info.name for info in encoded.infos]
        sizes = [memoryview(data).nbytes for data in encoded.parts.values()]
        if not names:
            fault = "no tensors"
        elif encoded.name in self._records or len(set(names)) < len(names) or self._tensors.intersection(names):
            fault = "a name that is taken"
        elif plain and sizes != [sum(info.nbytes for info in encoded.infos)]:
            fault = f"plain parts of {sizes} bytes for {encoded.infos}"
        else:
            return
        raise _record_error(encoded, fault)

    def _write(self, data: bytes | memoryview) -> None:
        if self._spooled is not None and self._spooled.tell() + len(data) > self.spool:
            # Reserve space for the header, and write the buffered payload
            header_so_far, _ = header.encode_header(_metadata_json(b""), self._layout.slots)
            # A tensor that is stored as it is takes two entries. Small ones share records, as a rule.
            coming = [info for name, info in self._expected.items() if name not in self._tensors]
            entries = sum(2 * len(info.name) + 240 for info in coming if info.nbytes >= _MIN_ENTRY_BYTES)
            self._reserved = len(header_so_far) + 4096 + entries
            self._reserved += -self._reserved % header.ALIGN
            self._sink.write(b" " * self._reserved)
            self._sink.write(self._spooled.getbuffer())
            self._spooled = None
        if self._spooled is not None:
            self._spooled.write(data)
        else:
            self._sink.write(data)

    def _shift_payload(self, by: int) -> None:
        """Shift the payload towards the end of the file, last block first."""
        for end in range(self._layout.size if by > 0 else 0, 0, -_BLOCK):
            begin = self._reserved + max(0, end - _BLOCK)
            self._sink.seek(begin)
            block = self._sink.read(self._reserved + end - begin)
            self._sink.seek(begin + by)
            self._sink.write(block)


def _metadata_json(index: bytes) -> str:
    writer = f"shrinkpoint {_version('shrinkpoint')}"
    fields = {"format": FORMAT_VERSION, "writer": writer, "index": xxh3_128(index)}
    return json.dumps(fields, separators=(",", ":"))


def _record_error(encoded: EncodedRecord, fault: str) -> PolicyError:
    return PolicyError(f"record {encoded.name!r}", found=fault, do="report this bug of the scheme")


def _to_json(value: JSON, where: str) -> str:
    """Return `value` as compact JSON that `load_json` accepts.

    Raises:
        StateError: the value is not JSON, or nested too deeply.
    """
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        reason = "nested too deeply" if json_depth(value) > _MAX_VALUE_DEPTH else ""
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error)
    if reason:
        expected = f"JSON of at most {_MAX_VALUE_DEPTH} levels"
        found = f"a value that JSON cannot hold ({reason})"
        raise StateError(where, found=found, expected=expected, do="pass plain values of JSON")
    return text
