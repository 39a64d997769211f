"""Reads the metadata of format 1: one JSON document in the header, and an entry for every part (docs/format.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shrinkpoint.container.header import ALIGN, Header, Slot
from shrinkpoint.container.metadata import (
    FILLER_PREFIX,
    RENAMED_PREFIX,
    ROLES,
    Entry,
    FileMetadata,
    RecordHead,
    filler_size,
    is_plain,
    is_standard_entry,
    parse_kinds,
)
from shrinkpoint.container.strict_json import (
    SIZE_LIMIT,
    corrupt_error,
    expect_hexdigest,
    expect_type,
    expect_unique,
    nbytes_of,
)
from shrinkpoint.tensors.info import ITEMSIZE, JSON, TensorInfo

_KEYS = {"format", "writer", "scheme", "parent", "recipes", "records", "tree", "report"}


def parse_metadata(header: Header, where: str) -> FileMetadata:
    """Parse the metadata and validate it against the entries: each belongs to one record, in order.

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
    return FileMetadata.from_json(fields, fields["writer"], tuple(records), where)


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


def _is_size(value: JSON) -> bool:
    return type(value) is int and 0 <= value < SIZE_LIMIT


def _info_from_json(value: JSON, where: str, what: str) -> TensorInfo:
    if type(value) is list and len(value) == 4:  # the fast path of valid tensors; errors are found below
        name, dtype, shape, role = value
        if type(name) is type(dtype) is type(role) is str and type(shape) is list and role in ROLES:
            sizes = tuple(shape)
            valid = dtype in ITEMSIZE and all(map(_is_size, sizes))
            if valid and nbytes_of(sizes, ITEMSIZE[dtype]) is not None:
                return TensorInfo(name, sizes, dtype, ROLES[role])
    fields = expect_type(value, list, where, what)
    if len(fields) not in (4, 5):
        raise corrupt_error(where, f"{what} with {len(fields)} fields", "4 or 5")
    name = expect_type(fields[0], str, where, f"the name of {what}")
    what = f"tensor {name!r}"
    return TensorInfo(name, *parse_kinds([fields[1:]], where, what, what)[0])
