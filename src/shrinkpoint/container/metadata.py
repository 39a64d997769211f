"""Description of a file's records, in the terms that all versions of the format share (docs/format.md).

`parse_metadata_v1` reads format 1: one JSON document in the header, and an entry for every part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shrinkpoint.container.header import ALIGN, MARKER_ENTRY, MARKER_SHAPE, SAFETENSORS_DTYPES, Header, Slot
from shrinkpoint.container.strict_json import (
    SIZE_LIMIT,
    corrupt_error,
    expect_hexdigest,
    expect_numbers,
    expect_type,
    expect_unique,
    nbytes_of,
)
from shrinkpoint.tensors.info import ITEMSIZE, JSON, Role, TensorInfo

FORMAT_VERSION = 3  # The version that is written; readers know all up to it
FILLER_PREFIX = "~pad/"  # Prefix of the filler entries of format 1, which align the next entry
RENAMED_PREFIX = "~entry/"  # Prefix of entries whose own name is taken or reserved
ROLES = {role.value: role for role in Role}
TensorKind: TypeAlias = tuple[tuple[int, ...], str, Role, tuple[int, ...] | None]
"""Shape, dtype, role and offsets of a tensor."""


@dataclass(frozen=True)
class Entry:
    """The location of one part of a record in the file."""

    name: str  # name of the safetensors entry that holds it
    offset: int  # bytes from the start of the file
    size: int  # stored bytes
    digest: str  # xxh3-128 of the stored bytes, in hex
    pad: int = 0  # filler bytes directly before it, all zero


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
    def label(self) -> str:
        """The tensors in it, for messages."""
        more = f" and {len(self.infos) - 1} more" if len(self.infos) > 1 else ""
        return f"tensor {(self.infos or (self,))[0].name!r}{more}"

    @property
    def stored(self) -> int:
        """Stored bytes of its parts and their fillers."""
        return sum(entry.pad + entry.size for entry in self.parts.values())


def is_plain(recipe: JSON) -> bool:
    """True if a record has one part, the uncompressed bytes of its tensors."""
    return isinstance(recipe, dict) and recipe.get("kind") == "plain"


def is_standard_entry(recipe: JSON, infos: Sequence[TensorInfo]) -> bool:
    """True if a record is stored as an ordinary entry, whose tensor any safetensors reader can read."""
    return is_plain(recipe) and len(infos) == 1 and infos[0].dtype in SAFETENSORS_DTYPES


def parse_kinds(values: list[JSON], where: str, what: str, subject: str) -> list[TensorKind]:
    """Parse rows of dtype, shape, role and perhaps offsets of tensors; messages call them `what`, or `subject`."""
    kinds = []
    for value in values:
        fields = expect_type(value, list, where, what)
        if len(fields) not in (3, 4):
            raise corrupt_error(where, f"{what} with {len(fields)} fields", "3 or 4")
        dtype = expect_type(fields[0], str, where, f"the dtype of {what}")
        shape = tuple(expect_numbers(fields[1], 0, SIZE_LIMIT, where, f"the shape of {what}"))
        if dtype not in ITEMSIZE or nbytes_of(shape, ITEMSIZE[dtype]) is None:
            found = f"{subject} of dtype {dtype!r} and shape {list(shape)[:16]}"
            raise corrupt_error(where, found, "a known dtype and size")
        role = expect_type(fields[2], str, where, f"the role of {what}")
        if role not in ROLES:
            raise corrupt_error(where, f"{what} with the role {role!r}", f"one of {sorted(ROLES)}")
        offsets = None
        if len(fields) == 4:
            offsets = tuple(expect_numbers(fields[3], 0, SIZE_LIMIT, where, f"the offsets of {what}"))
            if len(offsets) != len(shape):
                raise corrupt_error(where, f"{what} with {len(offsets)} offsets", f"{len(shape)}")
        kinds.append((shape, dtype, ROLES[role], offsets))
    return kinds


def filler_size(dtype: str, size: int, begin: int) -> int:
    """Return the filler bytes before an entry, which align multi-byte elements in a mapped file."""
    return -begin % ALIGN if size and ITEMSIZE[dtype] > 1 else 0


INDEX_ENTRY = "~index"  # Name of the last entry
PARTS_PREFIX = "~parts/"  # Prefix of the entries of bytes that only this library decodes
_RESERVED = (FILLER_PREFIX, RENAMED_PREFIX, PARTS_PREFIX)


class PayloadLayout:
    """Places parts one behind the other: a tensor in an entry of its own, all bytes between two of them in one.

    Attributes:
        slots: the entries, except the one of the bytes behind the last tensor until `end` is called.
        size: bytes of the payload so far.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.size = 0
        self._begin = 0  # of the bytes that no entry covers yet

    def add(self, size: int, tensor: TensorInfo | None) -> tuple[int, str]:
        """Place a part.

        Args:
            tensor: what the part is an entry of; None if it is a part that only this library decodes.

        Returns:
            The filler bytes before it, and the name of its entry.
        """
        if tensor is None:
            self.size += size
            return 0, f"{PARTS_PREFIX}{len(self.slots)}"
        pad = filler_size(tensor.dtype, size, self.size)
        self.size += pad
        self._cover_bytes()
        name = tensor.name
        is_reserved = name in ("__metadata__", INDEX_ENTRY) or name.startswith(_RESERVED)
        if is_reserved or any("\ud800" <= char <= "\udfff" for char in name):  # no Unicode, as safetensors requires
            name = f"{RENAMED_PREFIX}{len(self.slots)}"
        self.slots.append(Slot(name, tensor.dtype, tensor.shape, self.size, self.size + size))
        self.size += size
        self._begin = self.size
        return pad, name

    def end(self, index_size: int, *, marked: bool) -> None:
        """Place the marker, which format 2 does not have, and the index."""
        self._cover_bytes()
        if marked:
            self.slots.append(Slot(MARKER_ENTRY, "U8", MARKER_SHAPE, self.size, self.size))
        self.slots.append(Slot(INDEX_ENTRY, "U8", (index_size,), self.size, self.size + index_size))
        self.size += index_size

    def _cover_bytes(self) -> None:
        if self.size > self._begin:
            name = f"{PARTS_PREFIX}{len(self.slots)}"
            self.slots.append(Slot(name, "U8", (self.size - self._begin,), self._begin, self.size))


_KEYS = {"format", "writer", "scheme", "parent", "recipes", "records", "tree", "report"}


def parse_metadata_v1(header: Header, where: str) -> tuple[Mapping[str, JSON], tuple[RecordHead, ...]]:
    """Parse the metadata and validate it against the entries: each belongs to one record, in order.

    Returns:
        The fields of the file, and its records.

    Raises:
        CorruptError: the metadata is malformed, or contradicts the entries or itself.
    """
    fields = header.fields
    if fields.keys() != _KEYS:
        raise corrupt_error(where, f"version 1 with the keys {sorted(fields)}", f"{sorted(_KEYS)}")
    recipes = expect_type(fields["recipes"], list, where, "the recipes")
    claims = _unclaimed_entries(header, where)
    records = []
    for index, value in enumerate(expect_type(fields["records"], list, where, "the records")):
        records.append(_record_from_json(value, recipes, claims, where, f"record {index}"))
    expect_unique([record.name for record in records], where, "records")
    expect_unique([info.name for record in records for info in record.infos], where, "tensors")
    unclaimed = next(claims, None)
    if unclaimed is not None:
        raise corrupt_error(where, f"entry {unclaimed[0].name!r}, which no record claims", "a record for every entry")
    return fields, tuple(records)


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
    digest = expect_hexdigest(fields[2], where, f"the digest of {what}")
    base = None if fields[3] is None else expect_hexdigest(fields[3], where, f"the base of {what}")
    parts = {}
    for part, own in expect_type(fields[5], dict, where, f"the parts of {what}").items():
        slot, pad, offset = next(entries, (None, 0, 0))
        if slot is None:
            raise corrupt_error(where, f"part {part!r} of {what} without an entry", "one")
        stored = digest if own is None else expect_hexdigest(own, where, f"the digest of part {part!r} of {what}")
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


def _info_from_json(value: JSON, where: str, what: str) -> TensorInfo:
    if type(value) is list and len(value) == 4:  # the fast path of valid tensors; errors are found below
        name, dtype, shape, role = value
        if type(name) is type(dtype) is type(role) is str and type(shape) is list and role in ROLES:
            sizes = tuple(shape)
            valid = dtype in ITEMSIZE and all(type(size) is int and 0 <= size < SIZE_LIMIT for size in sizes)
            if valid and nbytes_of(sizes, ITEMSIZE[dtype]) is not None:
                return TensorInfo(name, sizes, dtype, ROLES[role])
    fields = expect_type(value, list, where, what)
    if len(fields) not in (4, 5):
        raise corrupt_error(where, f"{what} with {len(fields)} fields", "4 or 5")
    name = expect_type(fields[0], str, where, f"the name of {what}")
    what = f"tensor {name!r}"
    return TensorInfo(name, *parse_kinds([fields[1:]], where, what, what)[0])
