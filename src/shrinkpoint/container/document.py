"""The inner half of a header: the document that says what the slots of a file mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shrinkpoint.container.header import ALIGN, FAR, NATIVE, Header, Slot, counts, extent, hexdigest
from shrinkpoint.container.strict import exact, load, refuse, shorten
from shrinkpoint.errors import VersionError
from shrinkpoint.record import ITEMSIZE, JSON, Encoded, Role, TensorInfo

FORMAT = 1
FILLER = "~pad/"
"""Entries of this prefix align the one that follows."""
SPARE = "~entry/"
"""Entries of this prefix could not have the name they should have had: it is taken, or means something else."""

_KEYS = {"format", "writer", "scheme", "parent", "recipes", "records", "tree", "report"}
_ROLES = {role.value: role for role in Role}


@dataclass(frozen=True)
class Entry:
    """Where one part of a record lies in the file.

    Attributes:
        name: of the safetensors entry.
        offset: in bytes from the start of the file.
        size: in bytes, as stored.
        digest: xxh3-128 of the stored bytes, in hex.
        pad: filler bytes directly before, all zero.
    """

    name: str
    offset: int
    size: int
    digest: str
    pad: int = 0


@dataclass(frozen=True)
class RecordHead:
    """A record without its bytes; the fields of `record.Encoded`, with places instead of parts."""

    name: str
    infos: tuple[TensorInfo, ...]
    recipe: JSON
    digest: str
    base: str | None
    parts: Mapping[str, Entry]

    @property
    def stored(self) -> int:
        """Bytes of its parts and their fillers."""
        return sum(entry.pad + entry.size for entry in self.parts.values())


@dataclass(frozen=True)
class Document:
    """A document that has been read and agrees with its slots; see docs/format.md."""

    writer: str
    scheme: str
    parent: JSON
    tree: JSON
    report: JSON
    records: tuple[RecordHead, ...] = field(repr=False)


def is_plain(recipe: JSON) -> bool:
    """Whether a record has one part, the bytes of its tensors as they are."""
    return isinstance(recipe, dict) and recipe.get("kind") == "plain"


def is_open(recipe: JSON, infos: Sequence[TensorInfo]) -> bool:
    """Whether a record is stored as an ordinary entry, from which any safetensors reader reads its tensor."""
    return is_plain(recipe) and len(infos) == 1 and infos[0].dtype in NATIVE


def needs_filler(dtype: str, size: int, begin: int) -> int:
    """Bytes to skip before an entry, so that elements wider than a byte are aligned in a mapped file."""
    return -begin % ALIGN if size and ITEMSIZE[dtype] > 1 else 0


def row(record: Encoded, recipe: int, digests: Mapping[str, str]) -> list[JSON]:
    """A record as it stands in the document; what a reader can tell from the rest is null.

    Args:
        recipe: where the record's recipe stands in the document's list.
        digests: of the stored bytes of each part.
    """
    return [
        None if record.name == record.infos[0].name else record.name,
        recipe,
        record.digest,
        record.base,
        [_member(info) for info in record.infos],
        {part: None if digest == record.digest else digest for part, digest in digests.items()},
    ]


def _member(info: TensorInfo) -> list[JSON]:
    offsets = [] if info.offsets is None else [list(info.offsets)]
    return [info.name, info.dtype, list(info.shape), info.role.value, *offsets]


def parse(header: Header, where: str) -> Document:
    """Check a document against its slots: each slot is claimed by one record, in their order, and says the same.

    Raises:
        VersionError: a newer release wrote it.
        CorruptError: it is not a document, or does not agree with the slots or with itself.
    """
    fields = exact(load(header.document, where, "the document"), dict, where, "the document")
    version = exact(fields.get("format"), int, where, "the format version")
    if version > FORMAT:
        raise VersionError(
            where,
            found=shorten(f"format version {version}, written by {fields.get('writer')!r}"),
            expected=f"at most version {FORMAT}",
            do="install a newer shrinkpoint to read it",
        )
    if version != FORMAT or fields.keys() != _KEYS:
        raise refuse(where, f"version {version} with the keys {sorted(fields)}", f"version 1 with {sorted(_KEYS)}")
    if fields["parent"] is not None:
        exact(fields["parent"], dict, where, "the parent")
    return Document(
        writer=exact(fields["writer"], str, where, "the writer"),
        scheme=exact(fields["scheme"], str, where, "the scheme"),
        parent=fields["parent"],
        tree=fields["tree"],
        report=fields["report"],
        records=_records(header, fields, where),
    )


def _records(header: Header, fields: Mapping[str, JSON], where: str) -> tuple[RecordHead, ...]:
    recipes = exact(fields["recipes"], list, where, "the recipes")
    claims = _claims(header, where)
    records = []
    names: set[str] = set()
    tensors: set[str] = set()
    for index, value in enumerate(exact(fields["records"], list, where, "the records")):
        record = _record(value, recipes, claims, where, f"record {index}")
        _take(names, [record.name], where, "records")
        _take(tensors, [info.name for info in record.infos], where, "tensors")
        records.append(record)
    left = next(claims, None)
    if left is not None:
        raise refuse(where, f"entry {left[0].name!r}, which no record claims", "none left")
    return tuple(records)


def _take(taken: set[str], names: Sequence[str], where: str, what: str) -> None:
    """Add names that must be new."""
    new = set(names)
    if len(new) < len(names) or not taken.isdisjoint(new):
        name = next(name for name, times in Counter(names).items() if times > 1 or name in taken)
        raise refuse(where, f"two {what} named {name!r}", "one")
    taken |= new


def _claims(header: Header, where: str) -> Iterator[tuple[Slot, int, int]]:
    """Each slot that is not a filler, with the filler bytes before it and its offset in the file."""
    pad = 0
    for slot in header.slots:
        if slot.name.startswith(FILLER):
            if pad or slot.dtype != "U8" or not 0 < slot.size < ALIGN:
                raise refuse(where, f"filler {slot.name!r} of {slot.size} bytes", "one of 1 to 7 bytes where needed")
            pad = slot.size
            continue
        needed = needs_filler(slot.dtype, slot.size, slot.begin - pad)
        if pad != needed:
            raise refuse(where, f"{pad} filler bytes before entry {slot.name!r}", f"{needed}")
        yield slot, pad, header.start + slot.begin
        pad = 0
    if pad:
        raise refuse(where, "a filler at the end", "an entry after it")


def _record(
    value: JSON, recipes: list[JSON], claims: Iterator[tuple[Slot, int, int]], where: str, what: str
) -> RecordHead:
    fields = exact(value, list, where, what)
    if len(fields) != 6:
        raise refuse(where, f"{what} with {len(fields)} fields", "6")
    members = exact(fields[4], list, where, f"the tensors of {what}")
    tensor = f"a tensor of {what}"
    infos = tuple([_info(member, where, tensor) for member in members])
    if not infos:
        raise refuse(where, f"{what} without tensors", "at least one")
    name = infos[0].name if fields[0] is None else exact(fields[0], str, where, f"the name of {what}")
    what = f"record {name!r}"
    recipe = exact(fields[1], int, where, f"the recipe of {what}")
    if not 0 <= recipe < len(recipes):
        raise refuse(where, f"recipe {recipe} for {what}", f"one of {len(recipes)}")
    digest = hexdigest(fields[2], where, f"the digest of {what}")
    base = None if fields[3] is None else hexdigest(fields[3], where, f"the base of {what}")
    parts = {}
    for part, own in exact(fields[5], dict, where, f"the parts of {what}").items():
        slot, pad, offset = next(claims, (None, 0, 0))
        if slot is None:
            raise refuse(where, f"part {part!r} of {what} without an entry", "one")
        stored = digest if own is None else hexdigest(own, where, f"the digest of part {part!r} of {what}")
        parts[part] = Entry(slot.name, offset, slot.size, stored, pad)
        _agree(slot, part, name, recipes[recipe], infos, where)
    record = RecordHead(name, infos, recipes[recipe], digest, base, parts)
    sizes = [entry.size for entry in parts.values()]
    if is_plain(record.recipe) and sizes != [sum(info.nbytes for info in infos)]:
        raise refuse(where, f"{what}, plain, with parts of {sizes} bytes", "one part of its tensors' size")
    return record


def _agree(slot: Slot, part: str, name: str, recipe: JSON, infos: Sequence[TensorInfo], where: str) -> None:
    """The entry that a record claims says to other readers what the document says to us."""
    if is_open(recipe, infos):
        expected = (infos[0].name, infos[0].dtype, infos[0].shape)
    else:
        expected = (f"{name}/{part}", "U8", (slot.size,))
    found = (expected[0] if slot.name.startswith(SPARE) else slot.name, slot.dtype, slot.shape)
    if found != expected:
        raise refuse(where, f"entry {slot.name!r} {slot.dtype} {list(slot.shape)}", f"entry {expected}")


def _is_size(value: JSON) -> bool:
    return type(value) is int and 0 <= value < FAR


def _info(value: JSON, where: str, what: str) -> TensorInfo:
    if type(value) is list and len(value) == 4:  # nearly all; what is wrong with one, the rest of this function says
        name, dtype, shape, role = value
        if type(name) is type(dtype) is type(role) is str and type(shape) is list and role in _ROLES:
            sizes = tuple(shape)
            known = dtype in ITEMSIZE and all(map(_is_size, sizes))
            if known and extent(sizes, ITEMSIZE[dtype]) is not None:
                return TensorInfo(name, sizes, dtype, _ROLES[role])
    fields = exact(value, list, where, what)
    if len(fields) not in (4, 5):
        raise refuse(where, f"{what} with {len(fields)} fields", "4 or 5")
    name = exact(fields[0], str, where, f"the name of {what}")
    what = f"tensor {name!r}"
    dtype = exact(fields[1], str, where, f"the dtype of {what}")
    shape = counts(fields[2], where, f"the shape of {what}")
    if dtype not in ITEMSIZE or extent(shape, ITEMSIZE[dtype]) is None:
        raise refuse(where, f"{what} of dtype {dtype!r} and shape {list(shape)[:16]}", "a dtype and a size we know")
    role = exact(fields[3], str, where, f"the role of {what}")
    if role not in _ROLES:
        raise refuse(where, f"{what} with the role {role!r}", f"one of {sorted(_ROLES)}")
    offsets = None if len(fields) == 4 else counts(fields[4], where, f"the offsets of {what}")
    if offsets is not None and len(offsets) != len(shape):
        raise refuse(where, f"{what} with {len(offsets)} offsets", f"{len(shape)}")
    return TensorInfo(name, shape, dtype, _ROLES[role], offsets)
