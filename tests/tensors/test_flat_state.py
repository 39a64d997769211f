"""A state comes back equal in every type and bit, and nobody's memory is touched."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from helpers import strategies
from helpers.strategies import difference
from hypothesis import given, settings

from shrinkpoint.container.strict_json import MAX_JSON_DEPTH, json_depth
from shrinkpoint.errors import StateError
from shrinkpoint.tensors.dtypes import dtype_name, torch_dtype
from shrinkpoint.tensors.flat_state import flatten, snapshot, unflatten
from shrinkpoint.tensors.info import ITEMSIZE
from shrinkpoint.tensors.tree import MAX_DEPTH

relaxed = settings(deadline=None, max_examples=60)


def there_and_back(state: Any, *, tie: bool = True) -> Any:
    flat = snapshot(flatten(state))
    return unflatten(json.loads(json.dumps(flat.tree, allow_nan=False)), flat.tensors, tie=tie)


@relaxed
@given(strategies.states())
def test_any_state_comes_back_equal(state: Any) -> None:
    assert difference(state, there_and_back(state)) is None
    assert difference(state, there_and_back(state, tie=False)) is None


@relaxed
@given(strategies.states())
def test_flattening_and_copying_leave_the_state_alone(state: Any) -> None:
    before = there_and_back(state)
    there_and_back(state)
    assert difference(before, state) is None


@relaxed
@given(strategies.states())
def test_names_shapes_and_dtypes_are_those_of_the_tensors(state: Any) -> None:
    flat = flatten(state)
    assert list(flat.tensors) == list(flat.infos)
    for name, tensor in flat.tensors.items():
        info = flat.infos[name]
        assert (info.name, info.shape, torch_dtype(info.dtype)) == (name, tuple(tensor.shape), tensor.dtype)
        assert name.encode() and not name.startswith("~") and name != "__metadata__"
        assert info.nbytes == tensor.numel() * tensor.element_size()


def test_every_dtype_is_stored_under_its_name() -> None:
    for dtype in strategies.DTYPES:
        tensor = strategies.from_bytes(bytes([1]) * 4 * ITEMSIZE[dtype], dtype, (2, 2))
        assert dtype_name(tensor.dtype) == dtype
        assert difference([tensor, tensor.t()], there_and_back([tensor, tensor.t()])) is None


def test_keys_that_look_alike_stay_apart() -> None:
    state = {1: torch.tensor(1), "1": torch.tensor(2), (1,): torch.tensor(3), "(1,)": torch.tensor(4), "a/b": {"": 5}}
    assert difference(state, there_and_back(state)) is None


def test_the_metadata_of_a_state_dict_survives() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    back = there_and_back(state)
    assert type(back) is OrderedDict
    assert back._metadata[""] == {"version": 2}


class Custom:
    pass


class Subclass(torch.Tensor):
    pass


def _cycle() -> list[Any]:
    nest: list[Any] = []
    nest.append(nest)
    return nest


def _deep() -> list[Any]:
    nest: list[Any] = []
    for _ in range(5000):
        nest = [nest]
    return nest


def _deep_key() -> tuple[Any, ...]:
    key: tuple[Any, ...] = ()
    for _ in range(100):
        key = (key,)
    return key


def test_what_cannot_be_stored_is_refused_by_its_path() -> None:
    for thing in [
        {1, Custom()},
        {torch.ones(1)},
        Custom(),
        bytearray(b"x"),
        torch.zeros(2).as_subclass(Subclass),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.empty(4, dtype=torch.uint8).view(torch.bits8),
        np.array([object()]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.longdouble(1),
        np.zeros(2).view(np.recarray),
        {Custom(): 1},
        {(1, Custom()): 1},
        {b"bytes": 1},
        {_deep_key(): 1},
        {np.int64(3): 1},
        _cycle(),
        _deep(),
    ]:
        with pytest.raises(StateError, match=r"state\['a'\]\[1\]") as caught:
            flatten({"a": [0, thing]})
        assert isinstance(caught.value, TypeError)
        assert caught.value.expected
    with pytest.raises(StateError, match="Run a batch through the model first"):
        flatten(torch.nn.LazyLinear(3).state_dict())


def test_who_passes_a_model_is_told_to_pass_its_state_dict() -> None:
    with pytest.raises(StateError, match=r"Save its state_dict\(\)"):
        flatten({"model": torch.nn.Linear(2, 2)})


def test_the_deepest_nest_fits_into_a_container() -> None:
    state: Any = torch.ones(3).expand(2, 3)
    for _ in range(MAX_DEPTH - 3):
        layer = OrderedDict({1: state})
        layer._metadata = {"": {"version": 7}}
        state = layer
    assert json_depth(flatten([state]).tree) <= MAX_JSON_DEPTH - 8
    assert difference([state], there_and_back([state])) is None


def test_a_snapshot_is_not_changed_by_later_steps() -> None:
    weight = torch.ones(5)
    flat = snapshot(flatten({"w": weight, "wt": weight.expand(2, 5)}))
    weight.zero_()
    assert unflatten(flat.tree, flat.tensors)["w"].sum() == 5


def test_a_snapshot_reuses_the_memory_of_an_earlier_one() -> None:
    first = snapshot(flatten({"w": torch.ones(5), "b": torch.ones(2)}))
    second = snapshot(flatten({"w": torch.zeros(5), "b": torch.zeros(3)}), reuse=first.tensors)
    assert second.tensors["w"].data_ptr() == first.tensors["w"].data_ptr()
    assert second.tensors["b"].tolist() == [0, 0, 0]
    assert second.tensors["w"].sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool])
def test_a_snapshot_of_large_tensors_has_their_bits_wherever_they_lie(dtype: torch.dtype) -> None:
    numel = (3 << 20) // dtype.itemsize + 5
    data = torch.randint(0, 2, ((numel + 3) * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    tensors = {"whole": data[:numel], "offset": data[3:], "transposed": data[: numel // 2 * 2].reshape(-1, 2).T}
    tensors |= {"conjugated": data[1:].conj()} if dtype.is_complex else {}
    flat = flatten({name: tensor.clone() if name == "whole" else tensor for name, tensor in tensors.items()})
    earlier = {name: torch.ones_like(tensor.resolve_conj().contiguous()) for name, tensor in flat.tensors.items()}
    for reuse in ({}, earlier):
        copies = snapshot(flat, reuse=reuse).tensors
        assert all(bool((copies[name] == tensor).all()) for name, tensor in flat.tensors.items())
        assert not {copy.data_ptr() for copy in copies.values()} & {tensor.data_ptr() for tensor in tensors.values()}


def test_of_parameters_alone_it_comes_back_whether_they_require_a_gradient():
    """As the documentation says; of a plain tensor it is a matter of the graph that made it."""
    state = {"p": torch.nn.Parameter(torch.ones(2)), "q": torch.nn.Parameter(torch.ones(2), requires_grad=False)}
    found = there_and_back(state | {"t": torch.ones(2, requires_grad=True)})
    assert {name: (type(x), x.requires_grad) for name, x in found.items()} == {
        "p": (torch.nn.Parameter, True),
        "q": (torch.nn.Parameter, False),
        "t": (torch.Tensor, False),
    }
