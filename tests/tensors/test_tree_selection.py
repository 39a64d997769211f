"""Leaves of a tree are selected by their paths; a tree that no release writes is an error of our tree, or stays one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.errors import CorruptError
from shrinkpoint.tensors.flat_state import flatten, unflatten
from shrinkpoint.tensors.tree_decoder import match_patterns, select_leaves

TAGS = ["$t", "$p", "$q", "$n", "$g", "$u", "$z", "$i", "$f", "$s", "$b", "$B", "$d", "$o", "$m", "$c", "$x"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab$./", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", *TAGS]), inner, max_size=2)
        | st.builds(lambda tag, body: {tag: body}, st.sampled_from(TAGS), inner)
    ),
    max_leaves=12,
)


def chosen(state: Any, *patterns: str) -> Any:
    flat = flatten(state)
    selected = select_leaves(flat.tree, match_patterns(patterns), "state")
    tensors = {name: flat.tensors[name] for name in selected.tensors}  # no others are needed
    return None if selected.is_empty else unflatten(selected.tree, tensors)


@given(JSON, st.sampled_from(["*", "a*", "b", "?", "zzz"]))
def test_any_tree_is_selected_from_or_is_corrupt(tree, pattern):
    try:
        selected = select_leaves(tree, match_patterns([pattern]), "file")
        unflatten(selected.tree, {}, where="file")
    except CorruptError:
        return


def test_containers_keep_their_types_and_the_versions_of_modules():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    state = {"model": module.state_dict(), "o": OrderedDict(b=1, a=2), 3: {"x": 1, (1, "k"): 2}}
    part = chosen(state, "model.0.weight", "o.a", "3.*k*")
    assert [*part["model"]] == ["0.weight"] and part["model"]._metadata["0"] == {"version": 2}
    assert part["o"] == OrderedDict(a=2) and type(part["o"]) is OrderedDict
    assert part[3] == {(1, "k"): 2}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["a"], {"a": {"b": [1, {}], "c.d": 2}}),
        (["a.c.d"], {"a": {"c.d": 2}}),
        (["a/c.d"], {"a": {"c.d": 2}}),
        (["*.b.0"], {"a": {"b": [1]}}),
        (["e"], {"e": {}}),
        (["A", "a.B"], None),
        ([r"a.[bc].[1]"], {"a": {"b": [{}]}}),
    ],
)
def test_patterns_match_keys_joined_by_dots_or_slashes(patterns, expected):
    assert chosen({"a": {"b": [1, {}], "c.d": 2}, "e": {}}, *patterns) == expected


def test_a_state_that_is_one_tensor_has_the_name_state():
    x = torch.ones(3)
    assert chosen(x, "state") is not None and chosen(x, "*") is not None and chosen(x, "model") is None
    assert chosen({"state": x, "source": 1}, "state").keys() == {"state"}
