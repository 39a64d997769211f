"""Values that Lightning saves, and that have no form of their own in a file, come back as they were."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.data import AttributeDict
from lit import QUIET, Small
from torch import nn

from shrinkpoint.errors import FormatError, MismatchError
from shrinkpoint.state import flatten, unflatten
from shrinkpoint.train.lightning.forms import plain, unplain

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class Color(Enum):
    RED = 1


class Word(str, Enum):
    A = "a"


LEAVES = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.sampled_from([*Color, *Word]), st.builds(Path, st.just("a/b")),
    st.sampled_from([torch.float16, torch.int8]), st.just(torch.device("cuda", 1)), st.timedeltas(),
    st.complex_numbers(allow_nan=False), st.builds(range, st.integers(0, 9)), st.just(slice(1, None)),
    st.frozensets(st.integers(0, 9), max_size=3),
)  # fmt: skip
KEYS = st.one_of(st.text(max_size=3), st.sampled_from(["shrinkpoint:path", "shrinkpoint::set", "shrinkpoint:?"]))
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(AttributeDict),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(lambda found: Namespace(**found)),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """With the types of containers, which == passes over."""
    if isinstance(value, dict):
        return type(value), [(key, typed(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(one) for one in value]
    return (type(value), typed(vars(value))) if isinstance(value, Namespace) else (type(value), value)


@given(NESTS)
def test_values_of_lightnings_kinds_come_back_as_they_were(value):
    flat = flatten({"it": plain(value)})
    found = unplain(unflatten(flat.tree, flat.tensors, where="test"))["it"]
    assert typed(found) == typed(value)


def test_what_needs_no_form_is_the_same_object():
    module = nn.BatchNorm1d(2)
    whole = {"state_dict": module.state_dict(), "loops": [{"a": (1, 2)}]}
    assert plain(whole) is whole and unplain(whole) is whole
    changed = plain(whole | {"path": Path("x")})
    assert changed["state_dict"] is whole["state_dict"] and changed["path"] == {"shrinkpoint:path": "x"}


def test_a_metadata_of_versions_survives_a_form_beside_it():
    found = nn.BatchNorm1d(2).state_dict()
    found["_extra_state"] = Path("x")
    assert unplain(plain(found))._metadata == found._metadata and unplain(plain(found)) == found


def test_enums_are_looked_up_and_nothing_is_imported():
    class Here(Enum):
        ONE = 1

    assert plain(Here.ONE) is Here.ONE  # nobody could find it again
    for place in (
        ["no.such", "A", "B"],
        ["os", "path", "join"],
        [__name__, "Color", "GREEN"],
        [Small.__module__, "Small", "x"],
    ):
        with pytest.raises(MismatchError, match="an enum that is imported"):
            unplain({"shrinkpoint:enum": place})
    with pytest.raises(FormatError, match="the form 'spell'"):
        unplain({"shrinkpoint:spell": 1})
    with pytest.raises(FormatError, match="load"):
        unplain({"shrinkpoint:dtype": "load"})
    assert unplain({"shrinkpoint:timedelta": [1, 2, 3]}) == timedelta(1, 2, 3)
