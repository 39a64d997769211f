"""What a writer writes a reader reads: everything, however the header comes about."""

from __future__ import annotations

import json

import pytest
from helpers.malformed import coded, comparable, contents, file, plain, reader, some, split, unpacked
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint._native import xxh3_128
from shrinkpoint.container import writer as writing
from shrinkpoint.container.header import MARKER_ENTRY
from shrinkpoint.errors import PolicyError, StateError
from shrinkpoint.tensors.info import ITEMSIZE, EncodedRecord, Role, TensorInfo

MANY = [plain(f"layer.{i}/weight", "F32", (i % 5,), seed=i) for i in range(300)]

names = st.text(max_size=12)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
parents = st.none() | st.dictionaries(st.text(), trees, max_size=2)
hexes = st.integers(0, 2**128 - 1).map("{:032x}".format)


@st.composite
def records(draw):
    found = []
    for name in draw(st.lists(names, max_size=8, unique=True)):
        if draw(st.booleans()):
            found.append(plain(name, draw(st.sampled_from(sorted(ITEMSIZE))), draw(shapes), draw(st.integers(0, 250))))
            continue
        count = draw(st.integers(1, 3))
        members = [
            TensorInfo(
                f"{name}#{i}",
                shape := draw(shapes),
                draw(st.sampled_from(sorted(ITEMSIZE))),
                draw(st.sampled_from(list(Role))),
                draw(st.none() | st.just(tuple(range(len(shape))))),
            )
            for i in range(count)
        ]
        parts = draw(st.dictionaries(names, st.binary(max_size=20), max_size=3))
        recipe = draw(st.fixed_dictionaries({"kind": st.sampled_from(["a", "b"])}, optional={"more": trees}))
        found.append(EncodedRecord(name, tuple(members), recipe, parts, draw(hexes), draw(st.none() | hexes)))
    return found


@settings(deadline=None, max_examples=60)
@given(records(), trees, trees, parents, st.sampled_from([None, 0, 17]))
def test_any_records_come_back_equal_and_in_order(records, tree, report, parent, spool):
    data = file(records, spool=spool, tree=tree, report=report, parent=parent)
    assert contents(data) == [comparable(record) for record in records]
    opened = reader(data)
    assert (opened.tree, opened.report, opened.parent, opened.scheme) == (tree, report, parent, "lossless")
    assert opened.size == len(data)
    assert opened.writer.startswith("shrinkpoint ")


@pytest.mark.parametrize("expected", [None, ()], ids=["expected", "surprising"])
def test_small_spilled_and_moved_files_hold_the_same(expected):
    for spool in [0, 1, 9, 50, 10_000, None]:
        data = file(some() + MANY, spool=spool, expected=expected, tree={"a": [1]})
        assert contents(data) == [comparable(record) for record in some() + MANY]


@pytest.mark.parametrize("block", [1, 8, 1000, 1 << 20])
def test_payload_moves_when_the_reserved_room_is_too_small(monkeypatch, block):
    monkeypatch.setattr(writing, "_BLOCK", block)
    records = some() + MANY
    moved = file(records, spool=0, expected=())
    assert len(moved) == len(file(records))  # just enough room, as if it had been known
    assert contents(moved) == [comparable(record) for record in records]


def test_reserved_room_is_enough_and_not_much_more():
    large = [plain(f"layer.{i}/weight", "F32", (1500,), seed=i) for i in range(100)]
    exact, reserved = file(large), file(large, spool=0)
    assert len(split(exact)[0]) <= len(split(reserved)[0]) <= 3 * len(split(exact)[0]) + 8192


def test_file_without_records_is_a_file():
    data = file([], tree={"epoch": 3})
    assert reader(data).records == ()
    assert reader(data).tree == {"epoch": 3}
    assert unpacked(data)[2] == b""


def test_same_input_gives_the_same_bytes():
    assert file(some()) == file(some())


def test_entries_wider_than_a_byte_are_aligned_in_the_file_and_bytes_are_packed():
    data = file(some())
    start = len(data) - len(split(data)[1])
    assert start % 8 == 0
    entries = json.loads(split(data)[0])
    del entries["__metadata__"]
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        assert begin % 8 == 0 or entry["dtype"] in ("U8", "BOOL") or begin == end, name
    assert [name for name in entries if name.startswith("~")] == ["~parts/2", "~parts/4", MARKER_ENTRY, "~index"]
    assert not any(unpacked(data)[2][11:16])  # the filler, whose entry is ~parts/2


def test_add_tells_the_bytes_a_record_takes():
    sink = writing.BytesIO()
    writer = writing.FileWriter(sink, scheme="x", parent=None, tree=None)
    assert [writer.add(plain("a", "U8", (3,))), writer.add(plain("b")), writer.add(coded("c", {}))] == [3, 5 + 8, 0]


def test_head_tells_stored_bytes_without_reading():
    heads = {head.name: head for head in reader(file(some())).records}
    assert heads["v"].stored == 3
    assert heads["w"].stored == 24 + 5
    assert heads["w"].infos[0].nbytes == 24


def test_equal_recipes_are_stored_once():
    assert unpacked(file(MANY))[1]["recipes"] == [{"kind": "plain"}]


def test_a_file_of_very_many_tensors_costs_few_bytes_for_each():
    infos = [TensorInfo(f"layers.{i}.weight", (4,), "F32") for i in range(10_000)]
    assert len(file([coded("~0", {"codes": b""}, infos)])) < 4 * len(infos)


def test_plain_record_with_a_digest_of_other_bytes_is_refused():
    info = TensorInfo("w", (2,), "F32")
    with pytest.raises(PolicyError, match="digest"):
        file([EncodedRecord("w", (info,), {"kind": "plain"}, {"values": bytes(8)}, "0" * 32)])


def test_parts_are_copied_at_once_and_never_changed():
    part = bytearray(b"12345678")
    info = TensorInfo("w", (2,), "F32")
    sink = writing.BytesIO()
    writer = writing.FileWriter(sink, scheme="x", parent=None, tree=None)
    writer.add(EncodedRecord("w", (info,), {"kind": "plain"}, {"values": part}, xxh3_128(part)))
    assert part == b"12345678"
    part[:] = b"overwrit"
    writer.finish()
    assert contents(sink.getvalue())[0][3] == {"values": b"12345678"}


def deep(levels):
    tree = None
    for _ in range(levels):
        tree = [tree]
    return tree


def test_tree_may_nest_as_deep_as_the_format_says_and_no_deeper():
    assert reader(file([], tree=deep(248))).tree == deep(248)
    for levels in (249, 100_000):
        with pytest.raises(StateError, match=r"nested too deeply|recursion"):
            file([], tree=deep(levels))


NOT_JSON = {"nan": float("nan"), "inf": float("inf"), "set": {1}, "bytes": b"", "too long": 10**5000}


@pytest.mark.parametrize("tree", NOT_JSON.values(), ids=NOT_JSON)
def test_tree_that_is_not_json_is_refused(tree):
    with pytest.raises(StateError, match="JSON"):
        file([], tree={"a": tree})


@pytest.mark.parametrize(
    "wrong",
    [
        [plain("a"), plain("a")],
        [plain("a"), coded("b", {}, [TensorInfo("a", (), "F32")])],
        [coded("b", {}, [TensorInfo("a", (), "F32")] * 2)],
        [coded("b", {}), coded("b", {}, [TensorInfo("c", (), "F32")])],
        [EncodedRecord("a", (), {"kind": "x"}, {}, "0" * 32)],
        [coded("a", {"values": b"123"}, [TensorInfo("a", (1,), "F32")], None, {"kind": "plain"})],
        [coded("a", {"one": b"12", "two": b"34"}, [TensorInfo("a", (1,), "F32")], None, {"kind": "plain"})],
        [coded("a", {}, [TensorInfo("a", (1,), "F32")], None, {"kind": "plain"})],
    ],
)
def test_record_that_contradicts_itself_is_refused_before_anything_of_it_is_written(wrong):
    with pytest.raises(PolicyError, match="record"):
        file(wrong)


def test_header_longer_than_safetensors_takes_is_refused(monkeypatch):
    monkeypatch.setattr("shrinkpoint.container.header.MAX_HEADER_BYTES", 1000)
    with pytest.raises(PolicyError, match="several files"):
        file(MANY)
