"""The safetensors layer of a file: the header's length, a JSON header, and its entries (slots).

A digest at a fixed offset covers every byte of the header, and the digests in the metadata inside the header cover
every byte of the payload.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shrinkpoint._native import xxh3_128
from shrinkpoint.container.strict_json import corrupt_error, expect_type, load_json, shorten
from shrinkpoint.errors import TruncatedError, VersionError
from shrinkpoint.tensors.info import ITEMSIZE, JSON, EncodedRecord, Role, TensorInfo

ALIGN = 8
MAX_HEADER_BYTES = 100_000_000
"""Largest header in bytes; safetensors refuses longer ones, too."""

SAFETENSORS_DTYPES = ITEMSIZE.keys() - {"F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4_X2", "C32", "C128"}
"""The dtypes that an entry may have; each means the same to safetensors."""

PREFIX = b'{"__metadata__":{"format":"pt","shrinkpoint.digest":"'
"""The first bytes of every header, in this and all later versions of the format."""

_BLANK_DIGEST = b"0" * 32
_DIGEST_SLICE = slice(8 + len(PREFIX), 8 + len(PREFIX) + 32)
_DIGEST_PATTERN = re.compile("[0-9a-f]{32}")
SIZE_LIMIT = 1 << 63
"""Exclusive upper bound of every size, dimension and offset of a file."""


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
    """A decoded header.

    Attributes:
        digest: digest of the header, in hex.
        metadata_json: the text in `__metadata__["shrinkpoint"]`.
        slots: the entries in the order of the payload, which they fill completely.
        start: offset of the payload in the file.
    """

    digest: str
    metadata_json: str
    slots: tuple[Slot, ...]
    start: int


def nbytes_of(shape: Sequence[int], itemsize: int) -> int | None:
    """Return the bytes of a tensor; None if a product of its dimensions on the way exceeds `SIZE_LIMIT`."""
    size = itemsize
    for dim in shape:
        size *= dim
        if not size:
            return 0
        if size >= SIZE_LIMIT:  # early, since many dims could make a number of megabytes
            return None
    return size


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
    data = _read_bytes(source, where)
    digest = _check_digest(data, where)
    outer = expect_type(load_json(data[8:], where, "the header"), dict, where, "the header")
    metadata = expect_type(outer.pop("__metadata__", None), dict, where, '"__metadata__"')
    document = expect_type(metadata.get("shrinkpoint"), str, where, '"shrinkpoint" in the metadata')
    if len(metadata) != 3:
        raise corrupt_error(where, f"metadata with the keys {sorted(metadata)}", "the three of our format")
    slots, end = _parse_slots(outer, where)
    size = len(data) + end
    if source.size < size:
        raise _truncated_error(where, f"{source.size} bytes", f"{size}, which its header announces")
    if source.size > size:
        raise corrupt_error(where, f"{source.size} bytes", f"{size}, which its header announces")
    return Header(digest, document, slots, len(data))


def read_digest(source: Readable, where: str) -> str:
    """Read and verify the digest of a header.

    Raises:
        TruncatedError, CorruptError: as `decode_header`.
    """
    return _check_digest(_read_bytes(source, where), where)


def _read_bytes(source: Readable, where: str) -> bytes:
    if source.size < 8:
        raise _truncated_error(where, f"{source.size} bytes", "at least the 8 of a length")
    (length,) = struct.unpack("<Q", source.read(0, 8))
    if length > MAX_HEADER_BYTES or length % ALIGN or length < len(PREFIX):
        expected = f"a multiple of 8 up to {MAX_HEADER_BYTES}"
        raise corrupt_error(where, f"an announced header of {length} bytes", expected)
    if 8 + length > source.size:
        raise _truncated_error(where, f"{source.size} bytes", f"{8 + length} for the header alone")
    return bytes(source.read(0, 8 + length))


def _check_digest(data: bytes, where: str) -> str:
    if not data[8:].startswith(PREFIX):
        found, do = f"a header that begins with {data[8:40]!r}", "open it with safetensors, if it is another program's"
        raise corrupt_error(where, found, "the beginning of a shrinkpoint header", do)
    stored = data[_DIGEST_SLICE].decode("latin-1")
    digest = xxh3_128(data[: _DIGEST_SLICE.start] + _BLANK_DIGEST + data[_DIGEST_SLICE.stop :])
    if stored != digest:
        raise corrupt_error(where, f"header digest {stored!r}", f"{digest!r}, which these bytes have")
    return digest


def _parse_slots(entries: dict[str, JSON], where: str) -> tuple[tuple[Slot, ...], int]:
    """The entries, and the bytes of the payload that they fill."""
    slots, cursor = [], 0
    for name, value in entries.items():
        slot = _parse_slot(name, value, where)
        if slot.begin != cursor:
            fault = "overlaps the previous one" if slot.begin < cursor else "leaves a hole before it"
            found = f"entry {name!r}, which begins at {slot.begin} and {fault}"
            raise corrupt_error(where, found, f"a beginning at {cursor}")
        slots.append(slot)
        cursor = slot.end
    return tuple(slots), cursor


def _parse_slot(name: str, value: JSON, where: str) -> Slot:
    what = f"entry {name!r}"
    fields = expect_type(value, dict, where, what)
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise corrupt_error(where, f"{what} with the keys {sorted(fields)}", "dtype, shape and data_offsets")
    dtype = expect_type(fields["dtype"], str, where, f"the dtype of {what}")
    if dtype not in SAFETENSORS_DTYPES:
        raise corrupt_error(where, f"{what} of dtype {dtype!r}", "a dtype of safetensors that this format uses")
    shape = shape_from_json(fields["shape"], where, f"the shape of {what}")
    offsets = shape_from_json(fields["data_offsets"], where, f"the offsets of {what}")
    size = nbytes_of(shape, ITEMSIZE[dtype])
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise corrupt_error(where, f"{what} at {list(offsets)}", f"two offsets {size} bytes apart, as its shape says")
    return Slot(name, dtype, shape, offsets[0], offsets[1])


def shape_from_json(value: JSON, where: str, what: str) -> tuple[int, ...]:
    """Return `value` as a tuple if it is a list of whole numbers from 0 to 2^63 - 1; else raise a CorruptError."""
    numbers = expect_type(value, list, where, what)
    for number in numbers:
        if not 0 <= expect_type(number, int, where, what) < SIZE_LIMIT:
            raise corrupt_error(where, f"{number} in {what}", "a number from 0 to 2^63 - 1")
    return tuple(numbers)


def check_hexdigest(value: JSON, where: str, what: str) -> str:
    """Return `value` if it is a digest in hex; else raise a CorruptError."""
    digest = expect_type(value, str, where, what)
    if not _DIGEST_PATTERN.fullmatch(digest):
        raise corrupt_error(where, f"{digest[:40]!r} for {what}", "32 hex digits")
    return digest


def _truncated_error(where: str, found: str, expected: str) -> TruncatedError:
    advice = "restore another checkpoint, or fetch an intact copy of this file"
    return TruncatedError(where, found=f"only {found}", expected=expected, do=advice)


FORMAT_VERSION = 1
FILLER_PREFIX = "~pad/"
"""Prefix of filler entries, which align the next entry."""
RENAMED_PREFIX = "~entry/"
"""Prefix of entries whose own name is taken or reserved."""

_KEYS = {"format", "writer", "scheme", "parent", "recipes", "records", "tree", "report"}
_ROLES = {role.value: role for role in Role}


@dataclass(frozen=True)
class Entry:
    """The location of one part of a record in the file.

    Attributes:
        name: name of the safetensors entry.
        offset: bytes from the start of the file.
        size: stored bytes.
        digest: xxh3-128 of the stored bytes, in hex.
        pad: filler bytes directly before it, all zero.
    """

    name: str
    offset: int
    size: int
    digest: str
    pad: int = 0


@dataclass(frozen=True)
class RecordHead:
    """A record without its bytes: the fields of `tensors.info.EncodedRecord`, with entries as parts."""

    name: str
    infos: tuple[TensorInfo, ...]
    recipe: JSON
    digest: str
    base: str | None
    parts: Mapping[str, Entry]

    @property
    def stored(self) -> int:
        """Stored bytes of its parts and their fillers."""
        return sum(entry.pad + entry.size for entry in self.parts.values())


@dataclass(frozen=True)
class FileMetadata:
    """Parsed metadata that agrees with the entries of the file (docs/format.md)."""

    writer: str
    scheme: str
    parent: JSON
    tree: JSON
    report: JSON
    records: tuple[RecordHead, ...] = field(repr=False)


def is_plain(recipe: JSON) -> bool:
    """Whether a record has one part, the uncompressed bytes of its tensors."""
    return isinstance(recipe, dict) and recipe.get("kind") == "plain"


def is_standard_entry(recipe: JSON, infos: Sequence[TensorInfo]) -> bool:
    """Whether a record is stored as an ordinary entry, whose tensor any safetensors reader can read."""
    return is_plain(recipe) and len(infos) == 1 and infos[0].dtype in SAFETENSORS_DTYPES


def filler_size(dtype: str, size: int, begin: int) -> int:
    """Return the filler bytes before an entry, which align multi-byte elements in a mapped file."""
    return -begin % ALIGN if size and ITEMSIZE[dtype] > 1 else 0


def record_to_json(record: EncodedRecord, recipe: int, digests: Mapping[str, str]) -> list[JSON]:
    """The JSON of a record; values that a reader can infer are null.

    Args:
        recipe: index of the record's recipe in the list of recipes.
        digests: digest of the stored bytes of each part.
    """
    return [
        None if record.name == record.infos[0].name else record.name,
        recipe,
        record.digest,
        record.base,
        [_info_to_json(info) for info in record.infos],
        {part: None if digest == record.digest else digest for part, digest in digests.items()},
    ]


def _info_to_json(info: TensorInfo) -> list[JSON]:
    offsets = [] if info.offsets is None else [list(info.offsets)]
    return [info.name, info.dtype, list(info.shape), info.role.value, *offsets]


def parse_metadata(header: Header, where: str) -> FileMetadata:
    """Parse the metadata and validate it against the entries: each belongs to one record, in order.

    Raises:
        VersionError: a newer release wrote the file.
        CorruptError: the metadata is malformed, or contradicts the entries or itself.
    """
    fields = expect_type(load_json(header.metadata_json, where, "the document"), dict, where, "the document")
    version = expect_type(fields.get("format"), int, where, "the format version")
    if version > FORMAT_VERSION:
        found = shorten(f"format version {version}, written by {fields.get('writer')!r}")
        expected, do = f"at most version {FORMAT_VERSION}", "install a newer shrinkpoint to read it"
        raise VersionError(where, found=found, expected=expected, do=do)
    if version != FORMAT_VERSION or fields.keys() != _KEYS:
        found = f"version {version} with the keys {sorted(fields)}"
        raise corrupt_error(where, found, f"version 1 with {sorted(_KEYS)}")
    if fields["parent"] is not None:
        expect_type(fields["parent"], dict, where, "the parent")
    return FileMetadata(
        writer=expect_type(fields["writer"], str, where, "the writer"),
        scheme=expect_type(fields["scheme"], str, where, "the scheme"),
        parent=fields["parent"],
        tree=fields["tree"],
        report=fields["report"],
        records=_records_from_json(header, fields, where),
    )


def _records_from_json(header: Header, fields: Mapping[str, JSON], where: str) -> tuple[RecordHead, ...]:
    recipes = expect_type(fields["recipes"], list, where, "the recipes")
    claims = _unclaimed_entries(header, where)
    records = []
    names: set[str] = set()
    tensors: set[str] = set()
    for index, value in enumerate(expect_type(fields["records"], list, where, "the records")):
        record = _record_from_json(value, recipes, claims, where, f"record {index}")
        _add_unique(names, [record.name], where, "records")
        _add_unique(tensors, [info.name for info in record.infos], where, "tensors")
        records.append(record)
    unclaimed = next(claims, None)
    if unclaimed is not None:
        raise corrupt_error(where, f"entry {unclaimed[0].name!r}, which no record claims", "a record for every entry")
    return tuple(records)


def _add_unique(seen: set[str], names: Sequence[str], where: str, what: str) -> None:
    """Add names to `seen`; raise CorruptError if one is there already."""
    new = set(names)
    if len(new) < len(names) or not seen.isdisjoint(new):
        name = next(name for name, times in Counter(names).items() if times > 1 or name in seen)
        raise corrupt_error(where, f"two {what} named {name!r}", "one")
    seen |= new


def _unclaimed_entries(header: Header, where: str) -> Iterator[tuple[Slot, int, int]]:
    """Each entry that is not a filler, with the filler bytes before it and its offset in the file."""
    pad = 0
    for slot in header.slots:
        if slot.name.startswith(FILLER_PREFIX):
            if pad or slot.dtype != "U8" or not 0 < slot.size < ALIGN:
                found = f"filler {slot.name!r} of {slot.size} bytes"
                raise corrupt_error(where, found, "one of 1 to 7 bytes where needed")
            pad = slot.size
            continue
        needed = filler_size(slot.dtype, slot.size, slot.begin - pad)
        if pad != needed:
            raise corrupt_error(where, f"{pad} filler bytes before entry {slot.name!r}", f"{needed}")
        yield slot, pad, header.start + slot.begin
        pad = 0
    if pad:
        raise corrupt_error(where, "a filler at the end", "an entry after it")


def _record_from_json(
    value: JSON, recipes: list[JSON], entries: Iterator[tuple[Slot, int, int]], where: str, what: str
) -> RecordHead:
    fields = expect_type(value, list, where, what)
    if len(fields) != 6:
        raise corrupt_error(where, f"{what} with {len(fields)} fields", "6")
    members = expect_type(fields[4], list, where, f"the tensors of {what}")
    tensor = f"a tensor of {what}"
    infos = tuple([_info_from_json(member, where, tensor) for member in members])
    if not infos:
        raise corrupt_error(where, f"{what} without tensors", "at least one")
    name = infos[0].name if fields[0] is None else expect_type(fields[0], str, where, f"the name of {what}")
    what = f"record {name!r}"
    recipe = expect_type(fields[1], int, where, f"the recipe of {what}")
    if not 0 <= recipe < len(recipes):
        raise corrupt_error(where, f"recipe {recipe} for {what}", f"one of {len(recipes)}")
    digest = check_hexdigest(fields[2], where, f"the digest of {what}")
    base = None if fields[3] is None else check_hexdigest(fields[3], where, f"the base of {what}")
    parts = {}
    for part, own in expect_type(fields[5], dict, where, f"the parts of {what}").items():
        slot, pad, offset = next(entries, (None, 0, 0))
        if slot is None:
            raise corrupt_error(where, f"part {part!r} of {what} without an entry", "one")
        stored = digest if own is None else check_hexdigest(own, where, f"the digest of part {part!r} of {what}")
        parts[part] = Entry(slot.name, offset, slot.size, stored, pad)
        _check_entry(slot, part, name, recipes[recipe], infos, where)
    record = RecordHead(name, infos, recipes[recipe], digest, base, parts)
    sizes = [entry.size for entry in parts.values()]
    if is_plain(record.recipe) and sizes != [sum(info.nbytes for info in infos)]:
        raise corrupt_error(where, f"{what}, plain, with parts of {sizes} bytes", "one part of its tensors' size")
    return record


def _check_entry(slot: Slot, part: str, name: str, recipe: JSON, infos: Sequence[TensorInfo], where: str) -> None:
    """Raise CorruptError unless an entry has the name, dtype and shape that its record requires."""
    if is_standard_entry(recipe, infos):
        expected = (infos[0].name, infos[0].dtype, infos[0].shape)
    else:
        expected = (f"{name}/{part}", "U8", (slot.size,))
    actual = (expected[0] if slot.name.startswith(RENAMED_PREFIX) else slot.name, slot.dtype, slot.shape)
    if actual != expected:
        raise corrupt_error(where, f"entry {slot.name!r} {slot.dtype} {list(slot.shape)}", f"entry {expected}")


def _is_size(value: JSON) -> bool:
    return type(value) is int and 0 <= value < SIZE_LIMIT


def _info_from_json(value: JSON, where: str, what: str) -> TensorInfo:
    if type(value) is list and len(value) == 4:  # the fast path of valid tensors; errors are found below
        name, dtype, shape, role = value
        if type(name) is type(dtype) is type(role) is str and type(shape) is list and role in _ROLES:
            sizes = tuple(shape)
            valid = dtype in ITEMSIZE and all(map(_is_size, sizes))
            if valid and nbytes_of(sizes, ITEMSIZE[dtype]) is not None:
                return TensorInfo(name, sizes, dtype, _ROLES[role])
    fields = expect_type(value, list, where, what)
    if len(fields) not in (4, 5):
        raise corrupt_error(where, f"{what} with {len(fields)} fields", "4 or 5")
    name = expect_type(fields[0], str, where, f"the name of {what}")
    what = f"tensor {name!r}"
    dtype = expect_type(fields[1], str, where, f"the dtype of {what}")
    shape = shape_from_json(fields[2], where, f"the shape of {what}")
    if dtype not in ITEMSIZE or nbytes_of(shape, ITEMSIZE[dtype]) is None:
        raise corrupt_error(where, f"{what} of dtype {dtype!r} and shape {list(shape)[:16]}", "a known dtype and size")
    role = expect_type(fields[3], str, where, f"the role of {what}")
    if role not in _ROLES:
        raise corrupt_error(where, f"{what} with the role {role!r}", f"one of {sorted(_ROLES)}")
    offsets = None if len(fields) == 4 else shape_from_json(fields[4], where, f"the offsets of {what}")
    if offsets is not None and len(offsets) != len(shape):
        raise corrupt_error(where, f"{what} with {len(offsets)} offsets", f"{len(shape)}")
    return TensorInfo(name, shape, dtype, _ROLES[role], offsets)
