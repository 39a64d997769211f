"""Headers of format 1 made to harm: each is refused with an error of our tree, and none costs more than reading it.

The files here carry a right header digest: whoever means harm can compute one.
"""

from __future__ import annotations

import json
import struct
from contextlib import suppress

import pytest
from helpers.format_v1 import file_v1
from helpers.malformed import assert_corrupt, changed, coded, file, plain, read_or_refused, reader, sealed, split
from helpers.mutations import everywhere
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.container.header import PREFIX
from shrinkpoint.errors import CorruptError, FormatError, TruncatedError, VersionError
from shrinkpoint.tensors.info import TensorInfo

BUNDLE = [TensorInfo("x", (1,), "F32"), TensorInfo("y", (1,), "F32", offsets=(0,))]
RECORDS = [plain("m", "U8", (3,)), plain("w", "F32", (2,)), coded("~b", {"p": b"1234", "q": b"56"}, BUNDLE)]
DATA = file_v1(RECORDS, tree=[1])
JUNK = [None, True, False, 0, 1, -1, 1.0, 1e300, 2**64, 10**400, "", "x", [], [1], ["x"], {}, {"x": 1}, [[]], [[], {}]]


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def put(name, value):
    return lambda entries, _: entries.__setitem__(name, value)


def drop(name):
    return lambda entries, _: entries.pop(name)


def say(key, value):
    return lambda _, document: document.__setitem__(key, value)


def record(index, field, value):
    return lambda _, document: document["records"][index].__setitem__(field, value)


def member(index, field, value):
    return lambda _, document: document["records"][index][4][0].__setitem__(field, value)


def swap(entries, document):
    document["records"].reverse()


def twice(entries, document):
    document["records"].append(document["records"][-1])


HOSTILE = {
    "overlap": put("w", entry("F32", [2], 0, 8)),
    "overlap by one": put("w", entry("F32", [2], 7, 15)),
    "hole": put("w", entry("F32", [2], 16, 24)),
    "negative offset": put("w", entry("F32", [2], -8, 0)),
    "end before begin": put("w", entry("F32", [2], 16, 8)),
    "huge offsets": put("w", entry("F32", [2], 2**62, 2**62 + 8)),
    "offsets beyond 64 bits": put("w", entry("F32", [2], 2**80, 2**80 + 8)),
    "entry with a name of a megabyte": put("x" * 1_000_000, entry("F32", [2], 0, 8)),
    "entry with a thousand keys": put("w", {str(key): 0 for key in range(1000)}),
    "three offsets": put("w", {"dtype": "F32", "shape": [2], "data_offsets": [8, 16, 24]}),
    "one offset": put("w", {"dtype": "F32", "shape": [2], "data_offsets": [8]}),
    "float offset": put("w", entry("F32", [2], 8, 16.0)),
    "boolean offset": put("m", entry("U8", [3], False, 3)),
    "float shape": put("w", entry("F32", [2.0], 8, 16)),
    "boolean shape": put("m", entry("U8", [3, True], 0, 3)),
    "negative shape": put("w", entry("F32", [-1, -2], 8, 16)),
    "shape and size disagree": put("w", entry("F32", [3], 8, 16)),
    "shape that overflows 64 bits": put("w", entry("F32", [2**62, 2], 8, 16)),
    "shape that overflows to its own size": put("w", entry("F32", [2**62 + 2], 8, 16)),
    "shape of many dims": put("w", entry("F32", [2**62] * 100_000, 8, 16)),
    "unknown dtype": put("w", entry("F33", [2], 8, 16)),
    "dtype that is ours alone": put("w", entry("C128", [], 8, 24)),
    "no dtype": put("w", {"shape": [2], "data_offsets": [8, 16]}),
    "one key more": put("w", {**entry("F32", [2], 8, 16), "more": 1}),
    "entry of another type than its tensor": put("w", entry("I32", [2], 8, 16)),
    "entry of another shape than its tensor": put("w", entry("F32", [2, 1], 8, 16)),
    "part that is not bytes": put("~b/p", entry("F32", [1], 16, 20)),
    "part of two dims": put("~b/p", entry("U8", [2, 2], 16, 20)),
    "missing entry": drop("~b/q"),
    "missing filler": drop("~pad/1"),
    "entry that nothing claims": put("more", entry("U8", [0], 22, 22)),
    "filler at the end": lambda entries, _: entries.update(
        {"~b/q": entry("U8", [1], 20, 21), "~pad/9": entry("U8", [1], 21, 22)}
    ),
    "filler that aligns nothing": put("~pad/1", entry("U8", [4], 3, 7)),
    "filler of another dtype": put("~pad/1", entry("BOOL", [5], 3, 8)),
    "no format": lambda _, document: document.pop("format"),
    "format true": say("format", True),
    "format 1.0": say("format", 1.0),
    "format 0": say("format", 0),
    "format -1": say("format", -1),
    "unknown key": say("more", 1),
    "missing key": lambda _, document: document.pop("tree"),
    "parent that is text": say("parent", "a"),
    "scheme that is a number": say("scheme", 1),
    "writer that is null": say("writer", None),
    "records that are an object": say("records", {}),
    "record that is an object": say("records", [{}]),
    "records for other entries": swap,
    "record twice": twice,
    "no records": say("records", []),
    "record with a field less": lambda _, document: document["records"][0].pop(),
    "record with a field more": lambda _, document: document["records"][0].append(None),
    "two records of one name": record(0, 0, "w"),
    "record name that is a number": record(0, 0, 7),
    "recipe out of range": record(0, 1, 2),
    "recipe from the end": record(0, 1, -1),
    "recipe true": record(0, 1, True),
    "no recipes": say("recipes", []),
    "recipes that are an object": say("recipes", {"0": 1}),
    "digest that is short": record(0, 2, "0" * 31),
    "digest in capitals": record(0, 2, "A" * 32),
    "digest with a line end": record(0, 2, "0" * 32 + "\n"),
    "digest of other digits": record(0, 2, "\u0660" * 32),
    "digest that is a number": record(0, 2, 0),
    "base that is a number": record(0, 3, 0),
    "no tensors": record(2, 4, []),
    "two tensors of one name": member(2, 0, "w"),
    "tensor of unknown dtype": member(2, 1, "F33"),
    "empty tensor of unknown dtype": lambda _, d: d["records"][2][4].__setitem__(0, ["x", "F33", [0], "other"]),
    "tensor larger than any file": member(2, 2, [2**40, 2**40]),
    "tensor of negative size": member(2, 2, [-1]),
    "tensor of float size": member(2, 2, [1.0]),
    "tensor of many dims": member(2, 2, [2**62] * 100_000),
    "unknown role": member(2, 3, "boss"),
    "role that is a list": member(2, 3, ["other"]),
    "more offsets than dims": lambda _, document: document["records"][2][4][1].__setitem__(4, [0, 0]),
    "negative shard offset": lambda _, document: document["records"][2][4][1].__setitem__(4, [-1]),
    "parts that are an array": record(2, 5, ["p", "q"]),
    "one part less": record(2, 5, {"p": None}),
    "one part more": record(2, 5, {"p": None, "q": None, "r": None}),
    "part of another name": record(2, 5, {"p": None, "z": None}),
    "part digest that is a number": record(2, 5, {"p": 1, "q": None}),
    "plain record of two parts": record(2, 1, 0),
    "plain record of no parts": record(1, 5, {}),
}


def test_header_that_lies_is_corrupt():
    for change in HOSTILE.values():
        assert_corrupt(DATA, change)


@pytest.mark.parametrize("data", [DATA, file(RECORDS)], ids=["of format 1", "of format 3"])
def test_newer_version_is_told_as_such_whatever_else_it_changed(data):
    def change(entries, document):
        document.clear()
        document.update(format=4, writer="shrinkpoint 9.1", novelty=[])

    with pytest.raises(VersionError, match=r"shrinkpoint 9\.1.*with the release that wrote it"):
        reader(changed(data, change))


def outer_and_document():
    outer = json.loads(split(DATA)[0])
    document = json.loads(outer["__metadata__"]["shrinkpoint"])
    return {"entries": {name: outer[name] for name in outer if name != "__metadata__"}, "document": document}


PATHS = [path for path in everywhere(outer_and_document()) if len(path) > 1]


def at(path, entries, document):
    """What holds the node at the end of a path."""
    node = {"entries": entries, "document": document}
    for key in path[:-1]:
        node = node[key]
    return node


def test_junk_anywhere_in_a_header_is_refused_or_harmless():
    for junk in JUNK:
        for path in PATHS:
            data = changed(DATA, lambda *found, path=path, junk=junk: at(path, *found).__setitem__(path[-1], junk))
            read_or_refused(data, split(DATA)[1])


def test_gap_anywhere_in_a_header_is_refused_or_harmless():
    for path in PATHS:
        data = changed(DATA, lambda *found, path=path: at(path, *found).__delitem__(path[-1]))
        read_or_refused(data, split(DATA)[1])


def text(inside):
    """A header that begins as ours do and goes on with `inside`."""
    return PREFIX + b"0" * 32 + inside


NOT_JSON = {
    "nothing more": b"",
    "unclosed": b'","shrinkpoint":"{}"',
    "not UTF-8": b'","shrinkpoint":"\xff\xfe"}}',
    "deep lists": b'","shrinkpoint":' + b"[" * 200_000,
    "deep closed lists": b'","shrinkpoint":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    "deep but readable lists": b'","shrinkpoint":"{}"},"a":' + b"[" * 400 + b"]" * 400 + b"}",
    "deep objects": b'","shrinkpoint":' + b'{"a":' * 100_000,
    "NaN": b'","shrinkpoint":NaN}}',
    "infinity in an entry": b'","shrinkpoint":"{}"},"a":{"dtype":"U8","shape":[-Infinity],"data_offsets":[0,0]}}',
    "number of a million digits": b'","shrinkpoint":' + b"9" * 1_000_000 + b"}}",
    "exponent": b'","shrinkpoint":"{}"},"a":{"dtype":"U8","shape":[0],"data_offsets":[0e0,0E0]}}',
    "duplicate entry": b'","shrinkpoint":"{}"},"a":{},"a":{}}',
    "duplicate metadata": b'","shrinkpoint":"{}"},"__metadata__":{"format":"pt","shrinkpoint":"{}"}}',
    "duplicate document": b'","shrinkpoint":"{}","shrinkpoint":"{}"}}',
    "second digest": b'","shrinkpoint":"{}","shrinkpoint.digest":""}}',
    "no document": b'"}}',
    "document that is an object": b'","shrinkpoint":{}}}',
    "document that is empty": b'","shrinkpoint":""}}',
    "document that is a list": b'","shrinkpoint":"[]"}}',
    "document with a duplicate key": b'","shrinkpoint":"{\\"format\\":1,\\"format\\":2}"}}',
    "document with NaN": b'","shrinkpoint":"{\\"format\\":NaN}"}}',
    "document that is deep": b'","shrinkpoint":"' + b"[" * 100_000 + b'"}}',
    "metadata beyond ours": b'","shrinkpoint":"{}","more":"x"}}',
    "another object after it": b'","shrinkpoint":"{}"}}{}',
    "null byte after it": b'","shrinkpoint":"{}"}}\0',
}


def test_text_that_is_not_our_json_is_corrupt():
    for inside in NOT_JSON.values():
        with pytest.raises(CorruptError) as caught:
            reader(sealed(text(inside)))
        assert "header digest" not in caught.value.found
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", [0, 1, 7, 8, 48, 100_000_001, 100_000_008, 2**63, 2**64 - 1, 2**64 - 8])
def test_announced_header_length_is_checked_first(length):
    with pytest.raises(CorruptError, match="announced header"):
        reader(struct.pack("<Q", length) + split(DATA)[0])


def test_announced_header_that_the_file_lacks_is_truncated():
    with pytest.raises(TruncatedError, match="for the header alone"):
        reader(struct.pack("<Q", 99_999_992) + split(DATA)[0])


def test_safetensors_file_of_another_program_is_told_as_such():
    from safetensors.torch import save
    from torch import zeros

    data = save({"w": zeros(64)}, {"a": "long enough to hold the beginning of a header of ours, and then some"})
    with pytest.raises(CorruptError, match="open it with safetensors"):
        reader(data)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_spliced_header_is_read_or_refused(data):
    head = split(DATA)[0]
    begin = data.draw(st.integers(len(PREFIX) + 32, len(head)))
    end = data.draw(st.integers(begin, min(len(head), begin + 8)))
    pieces = [b"", b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"0", b"-1", b"1e9", b"null"]
    piece = data.draw(st.sampled_from(pieces))
    with suppress(FormatError):
        reader(sealed(head[:begin] + piece + head[end:], split(DATA)[1]))
