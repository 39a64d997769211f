"""Values that are neither tensors nor JSON come back as they were, or as the ordinary value that stands for them."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum, IntEnum, IntFlag
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.errors import CorruptError, StateError
from shrinkpoint.tensors.compare import differing_paths
from shrinkpoint.tensors.flat_state import flatten, unflatten
from shrinkpoint.tensors.names import named_leaves
from shrinkpoint.tensors.tree_decoder import list_leaves
from shrinkpoint.train.dcp import Reader, Writer, reset_chains


class Color(Enum):
    RED = 1
    PLACE = Path("x")


class Word(str, Enum):
    A = "a"


class Level(IntEnum):
    HIGH = 3


class Bits(IntFlag):
    ONE = 1
    TWO = 2


class Text(str):
    """Text of a library's own kind."""


@dataclass
class Settings:
    rate: float
    weights: Any


@dataclass(frozen=True)
class Point:
    x: int


Pair = namedtuple("Pair", "left right")
LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.sampled_from([*Color, *Word, Level.HIGH, Bits.TWO]),
    st.builds(Path, st.just("a/b")),
    st.sampled_from([torch.float16, torch.int8, torch.device("cuda", 1), slice(1, None), range(2, 9, 3)]),
    st.timedeltas(),
    st.datetimes(timezones=st.sampled_from([None, timezone.utc, timezone(timedelta(hours=-3))])),
    st.sampled_from([datetime(2026, 10, 25, 2, 30, fold=1), time(2, 30, fold=1)]),
    st.dates(),
    st.times(),
    st.complex_numbers(allow_nan=False),
    st.frozensets(st.one_of(st.integers(0, 9), st.sampled_from([*Word])), max_size=3),
    st.sets(st.text(max_size=2), max_size=3),
)
KEYS = st.one_of(st.text(max_size=3), st.integers(0, 3), st.sampled_from([*Word, Path("k"), (Color.RED, 1), 1j]))
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "$x", ""]), inner, max_size=2).map(lambda items: Namespace(**items)),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items)),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=4)),
    ),
    max_leaves=8,
)


def there_and_back(value: Any) -> Any:
    flat = flatten({"it": value})
    return unflatten(json.loads(json.dumps(flat.tree)), flat.tensors, where="test")["it"]


def typed(value: Any) -> Any:
    """With the types of containers and the `fold` of times, which == passes over."""
    if isinstance(value, dict):
        return type(value), [(key, typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", 0), [typed(item) for item in value]
    return (
        (type(value), typed(vars(value)))
        if isinstance(value, Namespace)
        else (type(value), value, getattr(value, "fold", 0))
    )


@given(NESTS)
def test_values_of_many_kinds_come_back_as_they_were(value):
    restored = there_and_back(value)
    assert typed(restored) == typed(value)
    assert not [*differing_paths(restored, value)]


@given(NESTS)
def test_the_leaves_of_a_tree_have_the_names_of_its_states(value):
    state = {"it": value}
    assert [*list_leaves(flatten(state).tree, "test")] == [*named_leaves(state)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Pair(1, [2]), (1, [2])),
        (Settings(0.1, {"a": Pair(1, 2)}), {"rate": 0.1, "weights": {"a": (1, 2)}}),
        (Text("a"), "a"),
        (np.str_("a"), "a"),
        (defaultdict(lambda: 3, {"a": 1}), {"a": 1}),
        (Bits.ONE | Bits.TWO, 3),
        ({Pair(1, 2): 3, np.str_("b"): 4}, {(1, 2): 3, "b": 4}),
    ],
)
def test_what_has_an_ordinary_value_becomes_that(value, expected):
    assert typed(there_and_back(value)) == typed(expected)


@pytest.mark.parametrize("value", [{Point(1)}, [frozenset({(1, Point(2))})], {frozenset({Point(1)}): 0}])
def test_a_set_of_what_would_become_a_dict_is_refused_before_it_is_written(value):
    assert there_and_back([{1}, Point(2)]) == [{1}, {"x": 2}]
    with pytest.raises(StateError, match=r"stored as a dict.*Make the set a list"):
        flatten(value)


def test_containers_of_omegaconf_become_dicts_and_lists():
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"lr": 0.1, "again": "${lr}", "sizes": [1, {"path": Path("a")}], "none": None})
    plain = {"lr": 0.1, "again": "${lr}", "sizes": [1, {"path": Path("a")}], "none": None}
    assert typed(there_and_back({"config": config})) == typed({"config": plain})


def test_an_enum_is_looked_up_and_nothing_is_imported():
    class Here(Enum):
        ONE = 1

    with pytest.raises(StateError, match="Here"):
        there_and_back(Here.ONE)  # nobody could find it again
    for place in (
        ["no.such", "A", "B"],
        ["os", "path", "join"],
        [__name__, "Color", "GREEN"],
        [__name__, "LEAVES", "x"],
    ):
        assert unflatten({"$x": ["enum", [*place, 7]]}, {}) == 7
    assert unflatten({"$x": ["enum", [__name__, "Color", "RED", 7]]}, {}) is Color.RED
    assert unflatten({"$x": ["callback", ["subprocess", "Popen"]]}, {}) == "subprocess.Popen"


@pytest.mark.parametrize("array", [["ab", "c"], [[b"x"], [b"abc"]], [["", "\ud800é"]], [], "one"])
def test_arrays_of_texts_come_back(array):
    for made in (
        np.array(array, dtype="S" if "b'" in repr(array) else "U"),
        np.array(array, dtype="U9")[..., ::-1] if np.ndim(array) else np.array("x"),
    ):
        restored = there_and_back(made)
        assert restored.tolist() == made.tolist() and restored.shape == made.shape and restored.dtype == made.dtype
    wide = there_and_back(np.array(["abc"], dtype="U4000"))
    assert wide.tolist() == ["abc"] and wide.dtype == np.dtype("U3")


@pytest.mark.parametrize("size", [0, 3, 5000])
def test_a_buffer_comes_back_with_its_bytes_and_its_position(tmp_path, size):
    buffer = BytesIO(bytes(size))
    buffer.seek(7)
    sp.save({"a": {"buffer": buffer, "b": 1}}, tmp_path / "x.safetensors")
    for only in (None, "a.buffer", "*.1"):
        found = sp.load(tmp_path / "x.safetensors", only=only)["a"]["buffer"]
        assert found.getvalue() == bytes(size) and found.tell() == 7


def test_tensors_in_namespaces_and_deques_are_tensors_of_the_state(tmp_path):
    weight = torch.randn(5, 5)
    state = {"n": Namespace(w=weight, old=deque([weight, weight + 1], maxlen=3)), "d": Settings(1.0, weight)}
    report = sp.save(state, tmp_path / "x.safetensors")
    assert report.raw_bytes == 200  # the shared one once
    loaded = sp.load(tmp_path / "x.safetensors")
    assert torch.equal(loaded["n"].w, weight) and loaded["n"].old.maxlen == 3
    assert loaded["n"].w.data_ptr() == loaded["n"].old[0].data_ptr() == loaded["d"]["weights"].data_ptr()
    part = sp.load(tmp_path / "x.safetensors", only="n.old.1")
    assert [*vars(part["n"])] == ["old"] and torch.equal(part["n"].old[0], weight + 1)
    assert fnmatch(str(sp.inspect(tmp_path / "x.safetensors").tensors[0].name), "n/w")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_integration_stores_them(tmp_path):
    value = {
        "path": Path("a"),
        "when": date(2020, 1, 2),
        "kinds": {1, 2},
        "color": Color.RED,
        "z": 1j,
    }
    with sp.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(1, model=torch.nn.Linear(2, 2), extra=value)
        assert manager.restore().extra == value
    reset_chains()
    state = {"w": torch.ones(2), "value": value, "deep": {"when": datetime(2020, 1, 1)}}
    torch.distributed.checkpoint.save(state, storage_writer=Writer(tmp_path / "dcp"), no_dist=True)
    target: dict[str, Any] = {"w": torch.zeros(2), "value": dict.fromkeys(value), "deep": {"when": None}}
    torch.distributed.checkpoint.load(target, storage_reader=Reader(tmp_path / "dcp"), no_dist=True)
    assert target["value"] == value and target["deep"] == state["deep"]


def test_a_forged_form_is_an_error_of_ours():
    for form in [
        1,
        [],
        ["path"],
        [1, 2],
        ["spell", 1],
        ["enum", ["a", "b", "c"]],
        ["enum", 3],
        ["callback", [1, 2]],
        ["callback", None],
        ["timedelta", [10**30]],
        ["namespace", [1]],
        ["namespace", {"$d": [[1, 2]]}],
        ["device", "nowhere:x"],
        ["range", [0, 1, 0]],
        ["complex", ["a", "b"]],
        ["complex", [1, 2]],
        ["set", [[]]],
        ["set", [1, 1]],
        ["frozenset", [[index * ((1 << 61) - 1) for index in range(1, 99)]][0]],
        ["path", 1],
        ["attributes", 7],
        ["dtype", "load"],
        ["dtype", 5],
        ["slice", []],
        ["datetime", "yesterday"],
        ["datetime", ["2026-01-01T00:00:00", 2]],
        ["datetime", ["2026-01-01T00:00:00", 0, 1]],
        ["datetime", ["2026-01-01T00:00:00", 0, "../etc"]],
        ["time", ["00:00:00", 0, "UTC", "UTC"]],
        ["deque:1", [1, 2]],
        ["deque:x", []],
        ["deque:99999999999999999999", []],
        ["defaultdict:eval", {}],
        ["defaultdict:list", []],
        ["buffer", [0, "text"]],
        ["buffer", [-1, {"$b": ""}]],
        ["texts", ["U", 2**40, [1], ["a"]]],
        ["texts", ["U", 3, [-1], ["a"]]],
        ["texts", ["U", 3, [2], ["a"]]],
        ["texts", ["O", 3, [1], ["a"]]],
    ]:
        with pytest.raises(CorruptError):
            unflatten({"a": {"$x": form}}, {}, where="test")


def test_times_keep_their_zone():
    zone, unknown = ZoneInfo("Europe/Berlin"), ["datetime", ["2026-07-01T12:00:00+02:00", 0, "Nowhere/Else"]]
    for value in (datetime(2026, 7, 1, 12, tzinfo=zone), datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zone)):
        restored = there_and_back(value)
        assert restored == value and restored.tzinfo is zone and restored.fold == value.fold
        assert restored + timedelta(180) == value + timedelta(180)
    assert there_and_back(time(1, 2, tzinfo=zone)) == time(1, 2, tzinfo=zone)
    assert there_and_back(time(1, 2, tzinfo=zone)).tzinfo is zone
    assert unflatten({"$x": unknown}, {}, where="test") == datetime(2026, 7, 1, 12, tzinfo=zone)


def test_texts_take_no_more_memory_than_they_may():
    texts = ["a" * 100_000, *[""] * 100_000]
    with pytest.raises(CorruptError, match="max_bytes"):
        unflatten({"$x": ["texts", ["U", 100_000, [100_001], texts]]}, {}, where="test")


@pytest.mark.parametrize("form", [["set", [1]], ["namespace", {}], ["deque", []], ["buffer", [0, {"$b": ""}]]])
def test_a_key_that_cannot_be_one_is_an_error_of_ours(form):
    with pytest.raises(CorruptError, match="key"):
        unflatten({"$d": [[{"$x": form}, 1]]}, {}, where="test")
