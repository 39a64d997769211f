"""The safetensors layer of a file: the header's length, a JSON header, and its entries (slots).

A digest at a fixed offset covers every byte of the header, and the digests in the header, or in the index whose digest
is in the header, cover every byte of the payload.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shrinkpoint._native import xxh3_128
from shrinkpoint.container.strict_json import (
    SIZE_LIMIT,
    corrupt_error,
    expect_numbers,
    expect_type,
    load_json,
    nbytes_of,
)
from shrinkpoint.errors import RESTORE_ADVICE, TruncatedError
from shrinkpoint.tensors.info import DTYPES, ITEMSIZE, JSON

ALIGN = 8
MAX_HEADER_BYTES = 100_000_000  # Largest header in bytes; safetensors refuses longer ones, too

SAFETENSORS_DTYPES = {name for name, dtype in DTYPES.items() if dtype.in_safetensors}
"""The dtypes that an entry may have; each means the same to safetensors."""

PREFIX = b'{"__metadata__":{"format":"pt","shrinkpoint.digest":"'
"""The first bytes of every header, in this and all later versions of the format."""

MARKER_ENTRY = "~parts/ of this file are read by shrinkpoint.load() only"
"""Name of the entry at which `safetensors.torch.load_file` and `torch.load` fail. It has no bytes."""
MARKER_SHAPE = (0, (1 << 64) - 1)  # Its shape: valid for safetensors, and more than a dimension of a tensor can be
_BLANK_DIGEST = b"0" * 32
_DIGEST_SLICE = slice(8 + len(PREFIX), 8 + len(PREFIX) + 32)


class Readable(Protocol):
    """A file that can be read at any offset, such as `storage.Source`."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes | memoryview: ...


@dataclass(frozen=True)
class Slot:
    """A safetensors entry; `begin` and `end` are bytes from the start of the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A decoded header."""

    digest: str  # digest of the header, in hex
    fields: dict[str, JSON]  # the JSON object in `__metadata__["shrinkpoint"]`
    slots: tuple[Slot, ...]  # the entries in the order of the payload, which they fill completely
    start: int  # offset of the payload in the file


def encode_header(metadata_json: str, slots: Sequence[Slot], length: int = 0) -> tuple[bytes, str]:
    """Encode the header's length and the header, padded with spaces to `length` bytes or a multiple of 8.

    Returns:
        The bytes, and the digest in them.
    """
    metadata = {"format": "pt", "shrinkpoint.digest": _BLANK_DIGEST.decode(), "shrinkpoint": metadata_json}
    entries = {s.name: {"dtype": s.dtype, "shape": s.shape, "data_offsets": (s.begin, s.end)} for s in slots}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode("ascii")
    text = text.ljust(max(length, -(-len(text) // ALIGN) * ALIGN))
    data = struct.pack("<Q", len(text)) + text
    digest = xxh3_128(data)
    return data[: _DIGEST_SLICE.start] + digest.encode() + data[_DIGEST_SLICE.stop :], digest


def decode_header(source: Readable, where: str) -> Header:
    """Read and validate a header; never reads or allocates more than the size of the file.

    Raises:
        TruncatedError: the file is shorter than its header announces.
        CorruptError: the header is malformed in any other way.
    """
    data, digest = read_header(source, where)
    outer = expect_type(load_json(data[8:], where, "the header"), dict, where, "the header")
    metadata = expect_type(outer.pop("__metadata__", None), dict, where, '"__metadata__"')
    document = expect_type(metadata.get("shrinkpoint"), str, where, '"shrinkpoint" in the metadata')
    if len(metadata) != 3:
        raise corrupt_error(where, f"metadata with the keys {sorted(metadata)}", "three of them")
    slots, end = _parse_slots(outer, where)
    size = len(data) + end
    if source.size < size:
        raise _truncated_error(where, f"{source.size} bytes", f"{size}, which its header announces")
    if source.size > size:
        raise corrupt_error(where, f"{source.size} bytes", f"{size}, which its header announces")
    fields = expect_type(load_json(document, where, "the document"), dict, where, "the document")
    return Header(digest, fields, slots, len(data))


def read_header(source: Readable, where: str) -> tuple[bytes, str]:
    """Read the header, and verify the digest in it.

    Returns:
        The length and the header, as they are in the file, and the digest.

    Raises:
        TruncatedError, CorruptError: as `decode_header`.
    """
    if source.size < 8:
        raise _truncated_error(where, f"{source.size} bytes", "at least the 8 of a length")
    (length,) = struct.unpack("<Q", source.read(0, 8))
    if length > MAX_HEADER_BYTES or length % ALIGN or length < len(PREFIX):
        expected = f"a multiple of 8 up to {MAX_HEADER_BYTES}"
        raise corrupt_error(where, f"an announced header of {length} bytes", expected)
    if 8 + length > source.size:
        raise _truncated_error(where, f"{source.size} bytes", f"{8 + length} for the header alone")
    data = bytes(source.read(0, 8 + length))
    if not data[8:].startswith(PREFIX):
        found, do = f"a header that begins with {data[8:40]!r}", "if another program wrote it, open it with safetensors"
        raise corrupt_error(where, found, "the beginning of a shrinkpoint header", do)
    stored = data[_DIGEST_SLICE].decode("latin-1")
    digest = xxh3_128(data[: _DIGEST_SLICE.start] + _BLANK_DIGEST + data[_DIGEST_SLICE.stop :])
    if stored != digest:
        raise corrupt_error(where, f"header digest {stored!r}", f"{digest!r}, which these bytes have")
    return data, digest


def _parse_slots(entries: dict[str, JSON], where: str) -> tuple[tuple[Slot, ...], int]:
    """The entries, and the bytes of the payload that they fill."""
    slots, cursor = [], 0
    for name, value in entries.items():
        what = f"entry {name!r}"
        fields = expect_type(value, dict, where, what)
        if fields.keys() != {"dtype", "shape", "data_offsets"}:
            raise corrupt_error(where, f"{what} with the keys {sorted(fields)}", "dtype, shape and data_offsets")
        dtype = expect_type(fields["dtype"], str, where, f"the dtype of {what}")
        if dtype not in SAFETENSORS_DTYPES:
            raise corrupt_error(where, f"{what} of dtype {dtype!r}", "a dtype of safetensors that this format uses")
        limit = 1 << 64 if name == MARKER_ENTRY else SIZE_LIMIT
        shape = tuple(expect_numbers(fields["shape"], 0, limit, where, f"the shape of {what}"))
        offsets = expect_numbers(fields["data_offsets"], 0, SIZE_LIMIT, where, f"the offsets of {what}")
        size = nbytes_of(shape, ITEMSIZE[dtype])
        if len(offsets) != 2 or offsets[1] - offsets[0] != size:
            raise corrupt_error(where, f"{what} at {offsets}", f"two offsets {size} bytes apart, as its shape says")
        begin, end = offsets
        if begin != cursor:
            fault = "overlaps the previous one" if begin < cursor else "leaves a hole before it"
            found = f"{what}, which begins at byte {begin} and {fault}"
            raise corrupt_error(where, found, f"byte {cursor}")
        slots.append(Slot(name, dtype, shape, begin, end))
        cursor = end
    return tuple(slots), cursor


def _truncated_error(where: str, found: str, expected: str) -> TruncatedError:
    return TruncatedError(where, found=f"only {found}", expected=expected, do=RESTORE_ADVICE)
