"""A forged tree is refused and makes no memory."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
from helpers import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.errors import CorruptError
from shrinkpoint.tensors.flat_state import flatten, unflatten

TENSORS = {"w": torch.zeros(4), "i": torch.zeros(2, dtype=torch.int32), "m": torch.zeros(2, 2)}


def _nested(tag: str | None) -> Any:
    tree: Any = []
    for _ in range(300):
        tree = [tree] if tag is None else {tag: [tree]}
    return tree


def test_a_forged_tree_is_refused() -> None:
    for tree in [
        {"$": []},
        {"$x": 1},
        {"$t": [], "w": 1},
        {"a": 1, "$t": []},
        {"$t": ["missing"]},
        {"$t": []},
        {"$t": "w"},
        {"$t": [3]},
        {"$t": ["w", 0]},
        {"$t": ["w", 0, [5], [1]]},
        {"$t": ["w", 4, [1], [1]]},
        {"$t": ["w", -1, [1], [1]]},
        {"$t": ["w", 0, [1], [-1]]},
        {"$t": ["w", 0, [2, 2], [1]]},
        {"$t": ["w", True, [1], [1]]},
        {"$t": ["w", 0, [2**40, 2**40], [0, 0]]},
        {"$t": ["w", 0, [2**63], [0]]},
        {"$t": ["w", 0, [2], [2**62]]},
        {"$t": ["w", 5, [0], [1]]},
        {"$t": ["w", 0, [1] * 65, [1] * 65]},
        {"$t": ["w", 0, [2], [1], "F64x"]},
        {"$t": ["w", 0, [3], [1], "F64"]},
        {"$t": ["w", 0, [1], [1], 3]},
        {"$p": ["i"]},
        {"$n": ["<f4", ["i"]]},
        {"$n": ["object", ["w"]]},
        {"$n": ["|O", ["w"]]},
        {"$n": ["w"]},
        {"$g": ["<f4", "00"]},
        {"$g": ["<f4", "zz"]},
        {"$B": ["w"]},
        {"$b": "!"},
        {"$b": "é"},
        {"$b": 3},
        {"$i": "x"},
        {"$i": 5},
        {"$f": "00"},
        {"$s": "ff"},
        {"$u": {}},
        {"$z": [-1]},
        {"$z": ["a"]},
        {"$d": [[1]]},
        {"$d": [[1, 1], [1, 2]]},
        {"$d": [[{"$u": 1}, 1]]},
        {"$d": [[[1], 1]]},
        {"$d": [[{"$t": ["w"]}, 1]]},
        {"$o": []},
        {"$c": 3},
        {"$m": [{}]},
        {"$m": [{}, []]},
        float("nan"),
        object(),
        _nested(None),
        _nested("$u"),
        {"$d": [[_nested("$u"), 1]]},
    ]:
        with pytest.raises(CorruptError, match=r"file\.safetensors: state"):
            unflatten(tree, TENSORS, where="file.safetensors")


JSONS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.sampled_from(["w", "<f4"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
        st.dictionaries(st.sampled_from(["$" + c for c in "tpqngucuzifsbBdom"]), inner, min_size=1, max_size=1),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(JSONS)
def test_any_json_is_a_state_or_corrupt(tree: Any) -> None:
    for tie in (True, False):
        with contextlib.suppress(CorruptError):
            unflatten(tree, TENSORS, tie=tie)


@settings(deadline=None, max_examples=60)
@given(strategies.states(), st.data())
def test_a_state_with_a_tensor_missing_is_corrupt(state: Any, data: st.DataObject) -> None:
    flat = flatten(state)
    if flat.tensors:
        lost = data.draw(st.sampled_from(list(flat.tensors)))
        tensors = {name: tensor for name, tensor in flat.tensors.items() if name != lost}
        with pytest.raises(CorruptError):
            unflatten(json.loads(json.dumps(flat.tree)), tensors)
