"""Indexes of format 2 made to harm, under digests that are right: refused with an error of our tree, at small cost."""

from __future__ import annotations

import copy
import json
import zlib
from contextlib import suppress

import pytest
import torch
from helpers.malformed import (
    assert_corrupt,
    changed,
    coded,
    file,
    plain,
    read_or_refused,
    reader,
    sealed,
    split,
    unpacked,
    with_index,
)
from helpers.mutations import Mutator, at, everywhere
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.container import index as indexing
from shrinkpoint.errors import CorruptError, PolicyError
from shrinkpoint.tensors.info import TensorInfo, shared_info

BUNDLE = [TensorInfo("x.7", (1,), "F32"), TensorInfo("x.9", (1,), "F32", offsets=(0,))]
RECORDS = [
    plain("m", "U8", (3,)),
    plain("w", "F32", (2,)),
    coded("~b", {"p": b"1234", "q": b"56"}, BUNDLE, base="0" * 32),
]
DATA = file(RECORDS, tree=[1])
ENTRIES, DOCUMENT, PAYLOAD = unpacked(DATA)
JUNK = [None, True, False, 0, 1, -1, 1.0, 1e300, 2**64, 10**400, "", "x", [], [1], ["x"], {}, {"x": 1}, [[]], [[], {}]]


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def put(name, value):
    return lambda entries, _: entries.__setitem__(name, value)


def say(*path_and_value):
    *path, value = path_and_value
    return lambda entries, document: at(document, path[:-1]).__setitem__(path[-1], value)


def test_the_parts_of_a_file_are_those_of_the_document():
    assert list(ENTRIES) == ["m", "~parts/1", "w", "~parts/3"]
    assert DOCUMENT["patterns"] == ["m", "w", "x.\n"]
    assert DOCUMENT["tensors"] == {"pattern": [0, 1, 2, 2], "numbers": [7, 2], "kind": [0, 1, 2, 3]}
    assert DOCUMENT["records"]["name"] == [None, None, "~b"]
    assert DOCUMENT["sizes"] == [4, 2]
    assert len(DOCUMENT["digests"]) == 6


HOSTILE = {
    "overlap": put("w", entry("F32", [2], 0, 8)),
    "hole": put("w", entry("F32", [2], 16, 24)),
    "shape and size disagree": put("w", entry("F32", [3], 8, 16)),
    "float offset": put("w", entry("F32", [2], 8, 16.0)),
    "boolean shape": put("m", entry("U8", [3, True], 0, 3)),
    "entry of another type than its tensor": put("w", entry("I32", [2], 8, 16)),
    "entry of another shape than its tensor": put("w", entry("F32", [2, 1], 8, 16)),
    "bytes that are numbers": put("~parts/3", entry("U16", [3], 16, 22)),
    "bytes of two dims": put("~parts/3", entry("U8", [2, 3], 16, 22)),
    "missing entry": lambda entries, _: entries.pop("~parts/3"),
    "missing filler": lambda entries, _: entries.pop("~parts/1"),
    "entry that nothing claims": put("more", entry("U8", [0], 22, 22)),
    "two entries for one run of bytes": lambda entries, _: entries.update(
        {"~parts/3": entry("U8", [4], 16, 20), "~parts/4": entry("U8", [2], 20, 22)}
    ),
    "format true": say("format", True),
    "format 0": say("format", 0),
    "no writer": lambda _, document: document.pop("writer"),
    "writer that is null": say("writer", None),
    "scheme that is a number": say("scheme", 1),
    "parent that is text": say("parent", "a"),
    "unknown key": say("more", 1),
    "missing key": lambda _, document: document.pop("tree"),
    "pattern that is a number": say("patterns", 0, 1),
    "name that is a number": say("patterns", 0, [1]),
    "pattern of two texts": say("patterns", 0, ["a", "b"]),
    "pattern with a number more": say("patterns", 0, "m\n"),
    "two tensors of one name": say("patterns", 0, "w"),
    "no patterns": say("patterns", []),
    "kind of unknown dtype": say("kinds", 0, ["F33", [3], "other"]),
    "empty kind of unknown dtype": say("kinds", 3, ["F33", [0], "other"]),
    "kind of negative size": say("kinds", 0, ["U8", [-1], "other"]),
    "kind of float size": say("kinds", 0, ["U8", [1.0], "other"]),
    "kind larger than any file": say("kinds", 2, ["U8", [2**40, 2**40], "other"]),
    "kind of many dims": say("kinds", 2, ["U8", [2**62] * 100_000, "other"]),
    "kind of unknown role": say("kinds", 0, ["U8", [3], "boss"]),
    "kind with a field less": say("kinds", 0, ["U8", [3]]),
    "kind with more offsets than dims": say("kinds", 3, ["F32", [1], "other", [0, 0]]),
    "kind with a negative offset": say("kinds", 3, ["F32", [1], "other", [-1]]),
    "pattern out of range": say("tensors", "pattern", 0, 3),
    "pattern from the end": say("tensors", "pattern", 0, -1),
    "pattern true": say("tensors", "pattern", 1, True),
    "a pattern less": lambda _, document: document["tensors"]["pattern"].pop(),
    "number below 0": say("tensors", "numbers", 0, -1),
    "number of 64 bits": say("tensors", "numbers", 0, 2**63),
    "number that is a float": say("tensors", "numbers", 0, 7.0),
    "numbers that sum to 64 bits": say("tensors", "numbers", [2**62, 2**62]),
    "a number more": say("tensors", "numbers", [7, 2, 0]),
    "a number less": say("tensors", "numbers", [7]),
    "two numbers of one name": say("tensors", "numbers", 1, 0),
    "kind out of range": say("tensors", "kind", 0, 4),
    "column of tensors missing": lambda _, document: document["tensors"].pop("kind"),
    "column of tensors more": say("tensors", "more", []),
    "records that are a list": say("records", []),
    "column of records shorter": lambda _, document: document["records"]["base"].pop(),
    "two records of one name": say("records", "name", 0, "w"),
    "record name that is a number": say("records", "name", 0, 7),
    "recipe out of range": say("records", "recipe", 0, 2),
    "recipe from the end": say("records", "recipe", 0, -1),
    "no recipes": say("recipes", []),
    "record without tensors": say("records", "tensors", [0, 2, 2]),
    "records of more tensors": say("records", "tensors", [1, 1, 3]),
    "records of very many tensors": say("records", "tensors", [1, 1, 2**62]),
    "parts out of range": say("records", "parts", 0, 2),
    "parts twice of one name": say("part_names", 1, ["p", "p"]),
    "part that is a number": say("part_names", 1, ["p", 1]),
    "part more": say("part_names", 1, ["p", "q", "r"]),
    "part less": say("part_names", 1, ["p"]),
    "plain record of two parts": say("part_names", 0, ["p", "q"]),
    "plain record of no parts": say("part_names", 0, []),
    "plain record that was coded": say("records", "recipe", 2, 0),
    "base 2": say("records", "base", 0, 2),
    "base true": say("records", "base", 2, True),
    "base more": say("records", "base", 0, 1),
    "negative size": say("sizes", [-4, 10]),
    "other sizes": say("sizes", [4, 3]),
    "sizes of 64 bits": say("sizes", [2**63 - 1, 2**63 - 1]),
    "a size more": say("sizes", [4, 2, 0]),
    "a digest less": lambda _, document: document["digests"].pop(),
    "a digest more": lambda _, document: document["digests"].append("0" * 32),
    "a digest that is short": say("digests", 5, "0" * 30),
}


def test_index_that_lies_is_corrupt():
    for change in HOSTILE.values():
        assert_corrupt(DATA, change)


def with_text(index):
    """The file of `DATA` with another index."""
    return with_index(ENTRIES, {"format": 3, "writer": "x"}, index, PAYLOAD)


def index_of(document):
    members = {key: document[key] for key in document if key not in ("format", "writer", "digests")}
    return json.dumps(members).encode()


DIGESTS = bytes.fromhex("".join(DOCUMENT["digests"]))
SOUND = zlib.compress(index_of(DOCUMENT)) + DIGESTS
STREAMS = {
    "nothing": b"",
    "no stream": b"x" * 100,
    "a cut stream": SOUND[:40],
    "a stream without its checksum": zlib.compress(index_of(DOCUMENT))[:-4],
    "a wrong checksum": zlib.compress(index_of(DOCUMENT))[:-4] + bytes(4) + DIGESTS,
    "a dictionary": b"\x78\xbb" + SOUND[2:],
    "gzip": zlib.compress(index_of(DOCUMENT), wbits=31) + DIGESTS,
    "no JSON": zlib.compress(b"{") + DIGESTS,
    "not UTF-8": zlib.compress(b'"\xff"') + DIGESTS,
    "a list": zlib.compress(b"[]") + DIGESTS,
    "deep lists": zlib.compress(b"[" * 200_000) + DIGESTS,
    "a duplicate key": zlib.compress(index_of(DOCUMENT)[:-1] + b',"tree":0}') + DIGESTS,
    "NaN": zlib.compress(index_of({**DOCUMENT, "tree": float("nan")})) + DIGESTS,
    "no digests": zlib.compress(index_of(DOCUMENT)),
    "half a digest": SOUND[:-8],
    "another stream behind": SOUND + zlib.compress(b"{}"),
}


def test_index_that_is_no_index_is_corrupt():
    for index in STREAMS.values():
        with pytest.raises(CorruptError) as caught:
            reader(with_text(index))
        assert all([caught.value.found, caught.value.expected, caught.value.do])
        assert reader(with_text(SOUND)).records


def test_entries_without_an_index_are_corrupt():
    data = with_text(SOUND)
    for name in ("~inde", "index"):
        with pytest.raises(CorruptError):
            reader(data.replace(b"~index", name.encode()))
    entries = {**ENTRIES, "z": entry("U8", [0], 22, 22)}
    with pytest.raises(CorruptError, match="entry"):
        reader(with_index(entries, {"format": 3, "writer": "x"}, SOUND, PAYLOAD))


@pytest.mark.parametrize("digest", [None, "0" * 32, "0" * 31, 1])
def test_index_of_another_digest_is_corrupt(digest):
    text, payload = split(with_text(SOUND))
    outer = json.loads(text)
    fields = json.loads(outer["__metadata__"]["shrinkpoint"])
    outer["__metadata__"]["shrinkpoint"] = json.dumps({**fields, "index": digest})
    with pytest.raises(CorruptError, match="index"):
        reader(sealed(json.dumps(outer, separators=(",", ":")).encode(), payload))


def test_stream_that_expands_without_bound_is_refused_before_it_is_expanded(monkeypatch):
    parsed = []
    monkeypatch.setattr(indexing, "load_json", lambda *text: parsed.append(text))
    with pytest.raises(CorruptError, match="expands to more than"):
        reader(with_text(zlib.compress(b" " * (indexing.MIN_TEXT_LIMIT + 1))))
    assert not parsed


def test_index_larger_than_a_header_may_be_is_refused_unread(monkeypatch):
    monkeypatch.setattr(indexing, "MAX_INDEX_BYTES", len(SOUND) - 1)
    with pytest.raises(CorruptError, match=f"an index of {len(SOUND)} bytes; expected at most"):
        reader(with_text(SOUND))


def test_state_of_a_larger_index_is_refused_when_it_is_saved(monkeypatch):
    monkeypatch.setattr("shrinkpoint.container.writer.MAX_INDEX_BYTES", 100)
    with pytest.raises(PolicyError, match="several files"):
        file(RECORDS)


BOMBS = {
    "a long name": {"patterns": ["m", "w", "x" * 100_000 + "\n"]},
    "a long shape": {"kinds": [["F32", [0] * 10_000, "other"]] * 4},
    "very many tensors": {},
}


@pytest.mark.parametrize("fields", BOMBS.values(), ids=BOMBS.keys())
def test_few_bytes_that_describe_very_much_are_refused(fields, monkeypatch):
    monkeypatch.setattr(indexing, "join_names", lambda *_: pytest.fail("names were made"))
    count = 300_000 if not fields else 3000
    tensors = {"pattern": [0, 1] + [2] * count, "numbers": [1] * count, "kind": [0, 1] + [2] * count}
    with pytest.raises(CorruptError, match="whose names and shapes take"):
        reader(with_text(zlib.compress(index_of({**DOCUMENT, "tensors": tensors, **fields})) + DIGESTS))


def test_state_that_compresses_better_than_readers_allow_is_stored_uncompressed(monkeypatch):
    tree = [0] * 30_000
    small = file([plain("w")], tree=tree)
    monkeypatch.setattr(indexing, "MIN_TEXT_LIMIT", 1 << 12)
    with pytest.raises(CorruptError, match="expands to more than"):
        reader(small)
    data = file([plain("w")], tree=tree)
    assert reader(data).tree == tree
    assert len(small) < 2000 and len(data) > 60_000


def test_very_many_tensors_of_few_bytes_are_written_so_that_they_are_read(monkeypatch):
    infos = [TensorInfo(str(i), (0,), "F32") for i in range(3000)]
    small = file([coded("~0", {"p": b""}, infos)])
    monkeypatch.setattr(indexing, "MIN_SIZE_LIMIT", 1 << 16)
    with pytest.raises(CorruptError, match="whose names and shapes take"):
        reader(small)
    assert [*reader(file([coded("~0", {"p": b""}, infos)])).records[0].infos] == infos


def test_junk_anywhere_in_an_index_is_refused_or_harmless():
    for junk in JUNK:
        whole = {"entries": ENTRIES, "document": DOCUMENT}
        for path in everywhere(whole):
            if len(path) > 1:
                read_or_refused(changed(DATA, _put(path, junk)), PAYLOAD)


def _put(path, junk):
    def change(entries, document):
        at({"entries": entries, "document": document}, path[:-1])[path[-1]] = junk

    return change


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1 << 30))
def test_any_changed_index_is_read_or_refused(seed):
    def change(entries, document):
        whole = {"entries": entries, **copy.deepcopy(document)}
        Mutator(str(seed)).mutate(whole)
        document.clear()
        document.update({"digests": [], **{key: whole[key] for key in whole if key != "entries"}})
        if isinstance(whole.get("entries"), dict):
            entries.clear()
            entries.update(whole["entries"])

    data = None
    with suppress(KeyError, ValueError, TypeError, AttributeError):  # what cannot be written
        data = changed(DATA, change)
    if data is not None:
        read_or_refused(data, PAYLOAD)


@pytest.mark.parametrize(("name", "kept"), [("weight", 1), ("w" * 5000, 0)])
def test_long_names_do_not_stay_in_memory(tmp_path, name, kept):
    sp.save({name: torch.zeros(9)}, tmp_path / "file")
    shared_info.cache_clear()
    assert list(sp.load(tmp_path / "file")) == [name]
    assert shared_info.cache_info().currsize == kept
