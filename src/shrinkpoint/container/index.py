"""The index of a file of format 2 or 3: what a reader needs to know of its records, compressed, at the end of the file.

A zlib stream of one JSON object, whose columns hold what records and tensors have in common once, and then the digests
(docs/format.md).
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import add, sub

from shrinkpoint._native import xxh3_128
from shrinkpoint.container.header import Header, Readable
from shrinkpoint.container.metadata import (
    INDEX_ENTRY,
    Entry,
    PayloadLayout,
    RecordHead,
    TensorKind,
    is_plain,
    is_standard_entry,
    parse_kinds,
)
from shrinkpoint.container.strict_json import (
    SIZE_LIMIT,
    corrupt_error,
    expect_hexdigest,
    expect_numbers,
    expect_type,
    expect_unique,
    load_json,
)
from shrinkpoint.tensors.info import JSON, EncodedRecord, TensorInfo, shared_info

NUMBER_MARK = "\n"  # Stands for a number in a pattern
_MAX_DIGITS = 19  # Digits of the largest number
_MAX_SHARED_BYTES = 512  # of a tensor's description, in the mean, up to which it stays in memory for the next file
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,14})(?![0-9])")


def join_names(patterns: Sequence[JSON], indexes: Sequence[int], numbers: Sequence[int], where: str) -> list[str]:
    """Return the names.

    Args:
        patterns: each a text with a `NUMBER_MARK` for each number, or a list of one text, which is a name itself.
        indexes: each below `len(patterns)`.
        numbers: whole numbers between -2^63 and 2^63.

    Raises:
        CorruptError: numbers are too many or too few, or one of a name is not within 0 to 2^63 - 1.
    """
    marks = [_count_numbers(pattern) for pattern in patterns]
    count = sum(marks[index] for index in indexes)
    if count != len(numbers):
        raise corrupt_error(where, f"{len(numbers)} numbers in names", f"{count}, as their patterns say")
    # A `%` format with as many numbers as the pattern; the name itself if there are none
    formats = [
        str(pattern).replace("%", "%%").replace(NUMBER_MARK, "%d") if mark else _text_of(pattern)
        for pattern, mark in zip(patterns, marks, strict=True)
    ]
    values: list[tuple[int, ...]] = [(0,) * mark for mark in marks]
    names, begin = [], 0
    for index in indexes:
        if not (mark := marks[index]):
            names.append(formats[index])
            continue
        if mark == 1:
            current = (values[index][0] + numbers[begin],)
        else:
            current = tuple(map(add, values[index], numbers[begin : begin + mark]))
        if min(current) < 0 or max(current) >= SIZE_LIMIT:
            raise corrupt_error(where, f"the numbers {current[:4]} in a name", "numbers from 0 to 2^63 - 1")
        values[index] = current
        names.append(formats[index] % current)
        begin += mark
    return names


def _text_of(pattern: JSON) -> str:
    return str(pattern[0] if type(pattern) is list else pattern)


def _count_numbers(pattern: JSON) -> int:
    return 0 if type(pattern) is list else pattern.count(NUMBER_MARK)


MAX_INDEX_BYTES = 100_000_000  # Largest index, and largest JSON text in it, in bytes: as of a header
MIN_TEXT_LIMIT = 1 << 22  # Bytes that the JSON of any index may have
MAX_TEXT_RATIO = 32  # Bytes that it may have for each byte of the index, beyond that
MIN_SIZE_LIMIT = 1 << 24  # Limit of `description_size` in any file
MAX_SIZE_RATIO = 64  # The same for each byte of the index, beyond that

_DIGEST_BYTES = 16
_KEYS = {
    "scheme",
    "parent",
    "tree",
    "report",
    "recipes",
    "patterns",
    "kinds",
    "tensors",
    "part_names",
    "records",
    "sizes",
}
_TENSOR_COLUMNS = ("pattern", "numbers", "kind")
_RECORD_COLUMNS = ("name", "recipe", "tensors", "parts", "base")


class IndexBuilder:
    """Collects the rows of the records of a file, in their order."""

    def __init__(self) -> None:
        self._patterns: list[JSON] = []  # see `join_names`
        self._indexes: list[int] = []  # of its pattern, for each name
        # For each name, each number less the one at its place in the last name of the same pattern, or less 0
        self._numbers: list[int] = []
        self._last: dict[str, tuple[int, list[int]]] = {}  # by pattern its index, and the numbers in its last name
        self._kinds: dict[TensorKind, int] = {}
        self._kind_column: list[int] = []
        self._recipes: dict[str, int] = {}
        self._part_names: dict[tuple[str, ...], int] = {}
        self._records: dict[str, list[JSON]] = {column: [] for column in _RECORD_COLUMNS}
        self._sizes: list[int] = []
        self._digests = bytearray()

    def add(self, record: EncodedRecord, recipe_json: str, sizes: Sequence[int], digests: Sequence[str]) -> None:
        """Add a record.

        Args:
            recipe_json: its recipe as JSON.
            sizes, digests: of its parts, in their order.
        """
        kinds = self._kinds
        self._add_names([info.name for info in record.infos])
        previous, index = record.infos[0], -1
        for info in record.infos:
            is_new = info.shape != previous.shape or info.dtype != previous.dtype or info.role is not previous.role
            if index < 0 or is_new or info.offsets != previous.offsets:
                index = kinds.setdefault((info.shape, info.dtype, info.role, info.offsets), len(kinds))
            previous = info
            self._kind_column.append(index)
        row = (
            None if record.name == record.infos[0].name else record.name,
            self._recipes.setdefault(recipe_json, len(self._recipes)),
            len(record.infos),
            self._part_names.setdefault(tuple(record.parts), len(self._part_names)),
            int(record.base is not None),
        )
        for column, value in zip(self._records.values(), row, strict=True):
            column.append(value)
        own = [record.digest] if record.base is None else [record.digest, record.base]
        if not is_plain(record.recipe):
            self._sizes += sizes
            own += digests
        self._digests += bytes.fromhex("".join(own))

    def _add_names(self, names: Iterable[str]) -> None:
        """Append names to their columns; the same name twice is no error."""
        split, last = _NUMBER.split, self._last
        for name in names:
            pieces = split(name)
            if NUMBER_MARK in name:
                self._indexes.append(len(self._patterns))
                self._patterns.append([name])
                continue
            pattern = NUMBER_MARK.join(pieces[::2])
            values = [*map(int, pieces[1::2])]
            if pattern in last:
                index, previous = last[pattern]
                self._numbers += map(sub, values, previous)
            else:
                index = len(self._patterns)
                self._numbers += values
                self._patterns.append(pattern)
            last[pattern] = index, values
            self._indexes.append(index)

    def encode(self, fields: Sequence[str], report_json: str) -> tuple[bytes, str]:
        """Encode the index.

        Args:
            fields: the members `scheme`, `parent` and `tree` of the JSON object.
            report_json: the report as JSON.

        Returns:
            The bytes, and the JSON text in them.
        """
        rows = ([dtype, shape, role.value, offsets] for shape, dtype, role, offsets in self._kinds)
        tensors = dict(zip(_TENSOR_COLUMNS, (self._indexes, self._numbers, self._kind_column), strict=True))
        columns = {
            "patterns": self._patterns,
            "kinds": [row[:3] if row[3] is None else row for row in rows],
            "tensors": tensors,
            "part_names": list(self._part_names),
            "records": self._records,
            "sizes": self._sizes,
        }
        column_json = json.dumps(columns, separators=(",", ":"))[1:-1]
        members = [*fields, f'"recipes":[{",".join(self._recipes)}]', column_json, f'"report":{report_json}']
        text = "{" + ",".join(members) + "}"
        data = zlib.compress(text.encode("ascii")) + self._digests
        size = description_size(self._patterns, self._indexes, list(self._kinds), self._kind_column)
        max_text, max_size = size_limits(len(data))
        if len(text) > max_text or size > max_size:
            data = zlib.compress(text.encode("ascii"), 0) + self._digests  # readers bound what a byte expands to
        return data, text


def size_limits(index_bytes: int) -> tuple[int, int]:
    """Return the most bytes that the JSON of an index of this size may have, and its largest `description_size`."""
    max_text = min(MAX_INDEX_BYTES, max(MIN_TEXT_LIMIT, MAX_TEXT_RATIO * index_bytes))
    return max_text, max(MIN_SIZE_LIMIT, MAX_SIZE_RATIO * index_bytes)


def description_size(
    patterns: Sequence[JSON], indexes: Sequence[int], kinds: Sequence[TensorKind], kind_column: Sequence[int]
) -> int:
    """Return about how many bytes the descriptions of all tensors take in memory: names, shapes, and 64 for each."""
    dims = [len(shape) + len(offsets or ()) for shape, _, _, offsets in kinds]
    sizes = sum(dims[kind] * times for kind, times in Counter(kind_column).items())
    chars = [len(_text_of(pattern)) + _MAX_DIGITS * _count_numbers(pattern) for pattern in patterns]
    name_chars = sum(chars[i] * times for i, times in Counter(indexes).items())
    return name_chars + 8 * sizes + 64 * len(indexes)


def parse_index(header: Header, source: Readable, where: str) -> tuple[Mapping[str, JSON], tuple[RecordHead, ...]]:
    """Read the index of a file, and validate it against the entries of the header.

    Returns:
        The fields of the file, and its records.

    Raises:
        CorruptError: the index is malformed, or contradicts the entries or itself.
    """
    data = _read_index(header, source, where)
    max_text, max_size = size_limits(len(data))
    text, digests = _inflate(data, max_text, where)
    document = expect_type(load_json(text, where, "the index"), dict, where, "the index")
    if document.keys() != _KEYS:
        raise corrupt_error(where, f"an index with the keys {sorted(document)}", f"{sorted(_KEYS)}")
    infos = _parse_tensors(document, max_size, where)
    records, layout = _parse_records(document, infos, digests, header.start, where)
    layout.end(len(data), marked=header.fields["format"] != 2)
    for slot, required in zip(header.slots, layout.slots, strict=False):
        if slot != required:
            raise corrupt_error(where, f"entry {slot}", f"{required}, as the index says")
    if len(header.slots) != len(layout.slots):
        raise corrupt_error(where, f"{len(header.slots)} entries", f"{len(layout.slots)}, as the index says")
    return document, records


def _read_index(header: Header, source: Readable, where: str) -> bytes:
    fields = header.fields
    if fields.keys() != {"format", "writer", "index"}:
        raise corrupt_error(where, f"a document with the keys {sorted(fields)}", "format, writer and index")
    expected = expect_hexdigest(fields["index"], where, "the digest of the index")
    slot = header.slots[-1] if header.slots else None
    if slot is None or slot.name != INDEX_ENTRY:
        raise corrupt_error(where, "a file without an index", f"{INDEX_ENTRY!r} as its last entry")
    if slot.size > MAX_INDEX_BYTES:
        raise corrupt_error(where, f"an index of {slot.size} bytes", f"at most {MAX_INDEX_BYTES}")
    data = bytes(source.read(header.start + slot.begin, slot.size))
    digest = xxh3_128(data)
    if digest != expected:
        raise corrupt_error(where, f"an index with digest {digest}", expected)
    return data


def _inflate(data: bytes, limit: int, where: str) -> tuple[bytes, bytes]:
    """The JSON text of an index, of at most `limit` bytes, and the digests behind it."""
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise corrupt_error(where, f"an index that cannot be decompressed ({error})", "a zlib stream") from error
    if len(text) > limit or not inflater.eof:
        found = f"an index of {len(data)} bytes that is cut, or expands to more than {limit}"
        raise corrupt_error(where, found, "a whole zlib stream, of what a writer compresses")
    return text, inflater.unused_data


def _columns(value: JSON, columns: Sequence[str], where: str, what: str) -> list[list[JSON]]:
    fields = expect_type(value, dict, where, what)
    if fields.keys() != {*columns}:
        raise corrupt_error(where, f"{what} with the keys {sorted(fields)}", f"{sorted(columns)}")
    return [expect_type(fields[column], list, where, f"{column!r} of {what}") for column in columns]


def _parse_tensors(document: Mapping[str, JSON], limit: int, where: str) -> list[TensorInfo]:
    patterns = expect_type(document["patterns"], list, where, "the patterns of names")
    for pattern in patterns:
        if type(pattern) is list and len(pattern) == 1:
            expect_type(pattern[0], str, where, "a name")
        else:
            expect_type(pattern, str, where, "a pattern of names")
    rows = expect_type(document["kinds"], list, where, "the kinds")
    kinds = parse_kinds(rows, where, "a kind of tensors", "tensors")
    indexes, numbers, kind_column = _columns(document["tensors"], _TENSOR_COLUMNS, where, "the tensors")
    expect_numbers(indexes, 0, len(patterns), where, "the patterns of tensors")
    expect_numbers(numbers, 1 - SIZE_LIMIT, SIZE_LIMIT, where, "the numbers in names")
    expect_numbers(kind_column, 0, len(kinds), where, "the kinds of tensors")
    if len(kind_column) != len(indexes):
        raise corrupt_error(where, f"{len(kind_column)} kinds of {len(indexes)} tensors", "as many")
    size = description_size(patterns, indexes, kinds, kind_column)
    if size > limit:
        raise corrupt_error(where, f"{len(indexes)} tensors, whose names and shapes take {size} bytes", f"{limit}")
    names = join_names(patterns, indexes, numbers, where)
    describe = shared_info if size <= _MAX_SHARED_BYTES * len(names) else TensorInfo
    return [describe(name, *kinds[kind]) for name, kind in zip(names, kind_column, strict=True)]


def _parse_records(
    document: Mapping[str, JSON], infos: list[TensorInfo], digests: bytes, start: int, where: str
) -> tuple[tuple[RecordHead, ...], PayloadLayout]:
    """The records in their order, and where their parts are; every column is checked before the first of them."""
    recipes = expect_type(document["recipes"], list, where, "the recipes")
    plain = [is_plain(recipe) for recipe in recipes]
    rows, part_names = _check_columns(document, plain, infos, digests, where)
    step = 2 * _DIGEST_BYTES
    hexdigits, size_column, tensors = digests.hex(), iter(document["sizes"]), iter(infos)
    each_digest = (hexdigits[begin : begin + step] for begin in range(0, len(hexdigits), step))
    layout, records = PayloadLayout(), []
    for index, (name, recipe, count, part, base) in enumerate(rows):
        own = tuple(islice(tensors, count))
        name = own[0].name if name is None else expect_type(name, str, where, f"the name of record {index}")
        digest = next(each_digest)
        base_digest = next(each_digest) if base else None
        own_parts = part_names[part]
        if plain[recipe] and len(own_parts) != 1:
            raise corrupt_error(where, f"record {name!r}, plain, with {len(own_parts)} parts", "one")
        tensor = own[0] if plain[recipe] and is_standard_entry(recipes[recipe], own) else None
        parts = {}
        for part_name in own_parts:
            if plain[recipe]:
                size, stored = sum(info.nbytes for info in own), digest
            else:
                size, stored = next(size_column), next(each_digest)
            pad, entry = layout.add(size, tensor)
            parts[part_name] = Entry(entry, start + layout.size - size, size, stored, pad)
        records.append(RecordHead(name, own, recipes[recipe], digest, base_digest, parts))
    expect_unique([record.name for record in records], where, "records")
    expect_unique([info.name for info in infos], where, "tensors")
    return tuple(records), layout


def _check_columns(
    document: Mapping[str, JSON], plain: Sequence[bool], infos: Sequence[TensorInfo], digests: bytes, where: str
) -> tuple[Iterable[tuple[JSON, ...]], list[list[str]]]:
    """The rows of the records, and the names of parts that they refer to.

    Args:
        plain: for each recipe, whether it is one of plain records.
    """
    part_names = expect_type(document["part_names"], list, where, "parts")
    for names in part_names:
        for name in expect_type(names, list, where, "parts"):
            expect_type(name, str, where, "the name of a part")
        expect_unique(names, where, "parts")
    columns = _columns(document["records"], _RECORD_COLUMNS, where, "the records")
    names, recipe_column, counts, parts, bases = columns
    if len({*map(len, columns)}) > 1:
        raise corrupt_error(where, f"columns of {[*map(len, columns)]} records", "columns of one length")
    expect_numbers(recipe_column, 0, len(plain), where, "the recipes of records")
    expect_numbers(counts, 1, SIZE_LIMIT, where, "the tensors of records")
    expect_numbers(parts, 0, len(part_names), where, "the parts of records")
    expect_numbers(bases, 0, 2, where, "the bases of records")
    if sum(counts) != len(infos):
        raise corrupt_error(where, f"records of {sum(counts)} tensors", f"{len(infos)}, as many as there are")
    coded_parts = [part_names[p] for p, r in zip(parts, recipe_column, strict=True) if not plain[r]]
    coded = sum(map(len, coded_parts))
    sizes = expect_numbers(document["sizes"], 0, SIZE_LIMIT, where, "the sizes")
    if len(sizes) != coded:
        raise corrupt_error(where, f"{len(sizes)} sizes", f"{coded}, one for each part")
    expected = _DIGEST_BYTES * (len(names) + sum(bases) + coded)
    if len(digests) != expected:
        raise corrupt_error(where, f"{len(digests)} bytes of digests", f"{expected}")
    return zip(*columns, strict=True), part_names
