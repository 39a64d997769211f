"""What is known already is not stored again: unchanged tensors, equal ones, and casts of a master copy."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.round_trip import Loop, write
from helpers.strategies import DTYPES, TORCH_DTYPES, difference

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import ChainError


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_frozen_model_costs_its_bytes_only_once():
    frozen = {f"layers.{i}.weight": randn(100, 200, seed=i) for i in range(20)}
    before = write({"base": frozen, "adapter.weight": randn(10, 10, seed=99)})
    after_state = {"base": copy.deepcopy(frozen), "adapter.weight": randn(10, 10, seed=98)}
    after = write(after_state, before)
    assert before.report.stored_bytes > 1_000_000 and after.report.stored_bytes < 4096
    assert difference(after_state, after.read()) is None


def test_nan_equals_itself_and_negative_zero_is_not_zero():
    state = {"nan": torch.full((500,), float("nan")), "zero": torch.zeros(500)}
    later = {"nan": state["nan"].clone(), "zero": -torch.zeros(500)}
    written = write(later, write(state))
    kinds = {name: recipe["kind"] for name, recipe in written.recipes().items()}
    assert kinds["nan"] == "same" != kinds["zero"]
    assert difference(later, written.read()) is None


@pytest.mark.parametrize("at", [0, 4095, 4096, 9999])
def test_a_tensor_that_differs_in_one_place_is_not_taken_for_its_parent_or_its_like(at):
    x = randn(10_000)
    other = x.clone()
    other[at] *= -1
    state = {"a": other, "b": x.clone(), "c": x.bfloat16(), "d": other.bfloat16()}
    assert difference(state, write(state).read()) is None
    assert difference(state, write(state, write({"a": x, "b": x, "c": x.bfloat16(), "d": x.bfloat16()})).read()) is None


def test_tied_tensors_are_stored_once_and_tied_again():
    x = randn(50, 100)
    written = write({"embedding.weight": x, "head.weight": x, "view": x[10:20], "turned": x.t()})
    assert written.report.raw_bytes == x.nbytes
    back = written.read()
    assert back["embedding.weight"] is not back["view"]
    back["head.weight"][15, 3] = 42
    assert back["embedding.weight"][15, 3] == back["view"][5, 3] == back["turned"][3, 15] == 42


def test_equal_tensors_are_stored_once_and_stay_apart():
    x = randn(50, 100)
    written = write({"model.weight": x, "teacher.weight": x.clone(), "third": x.reshape(100, 50).clone()})
    first = write({"model.weight": x, "third": x.reshape(100, 50).clone()})
    assert written.report.stored_bytes < first.report.stored_bytes + 600
    back = written.read()
    back["model.weight"].zero_()
    assert torch.equal(back["teacher.weight"], x)


def test_equal_tensors_of_any_dtype_and_layout_are_stored_once_without_a_warning():
    for name in DTYPES:
        data = torch.randint(0, 2, (600 * TORCH_DTYPES[name].itemsize,), dtype=torch.uint8)
        x = data.view(TORCH_DTYPES[name]).reshape(20, 30)
        turned = data.clone().view(TORCH_DTYPES[name]).reshape(20, 30).t()
        state = {
            "a": x,
            "b": data.clone().view(TORCH_DTYPES[name]).reshape(20, 30),
            "turned": turned,
            "again": turned[:, :],
        }
        always = torch.is_warn_always_enabled()
        try:
            torch.set_warn_always(True)  # some warnings come only once a process otherwise
            written = write(state)
            back = written.read()
        finally:
            torch.set_warn_always(always)
        assert written.recipes()["b"]["kind"] == "copy"
        assert difference(state, back) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_copies_of_masters_cost_nothing(dtype):
    master = {f"{i}.weight": randn(64, 50, seed=i) * 10.0 ** (i - 4) for i in range(6)}
    narrow = {name: x.to(dtype) for name, x in master.items()}
    alone, both = write({"master": master}), write({"master": master, "model": narrow})
    assert both.report.stored_bytes < alone.report.stored_bytes + 1200
    assert difference({"master": master, "model": narrow}, both.read()) is None
    moved = {"master": {name: x * 1.01 for name, x in master.items()}}
    moved["model"] = {name: x.to(dtype) for name, x in moved["master"].items()}
    delta = write(moved, both)
    assert {recipe["kind"] for name, recipe in delta.recipes().items() if name.startswith("model")} == {"copy"}
    assert difference(moved, delta.read()) is None


def test_casts_of_nan_are_not_left_to_the_machine():
    master = randn(3000)
    master[7] = float("nan")
    written = write({"master.weight": master, "model.weight": master.bfloat16()})
    assert written.recipes()["model.weight"]["kind"] != "copy"
    assert difference({"master.weight": master, "model.weight": master.bfloat16()}, written.read()) is None


def test_a_narrow_tensor_that_is_no_cast_is_stored():
    master = randn(3000)
    narrow = master.bfloat16()
    narrow[2999] *= 2
    state = {"master.weight": master, "model.weight": narrow}
    assert difference(state, write(state).read()) is None


def test_floats_that_hold_narrower_ones_cost_what_these_do():
    narrow = randn(200, 300).bfloat16()
    wide, short = write({"x.weight": narrow.float()}), write({"x.weight": narrow})
    assert wide.report.stored_bytes < 1.05 * short.report.stored_bytes + 512
    assert difference({"x.weight": narrow.float()}, wide.read()) is None


def test_dead_rows_and_columns_cost_next_to_nothing():
    moment = randn(300, 200).square() * 1e-6
    dead = moment.clone()
    dead[50:250], dead[:, 120:180] = 0, 0
    states = [
        {"state": {0: {"exp_avg_sq": x, "exp_avg": x.sqrt()}}, "param_groups": [{"params": [0]}]}
        for x in (moment, dead)
    ]
    sizes = [write({"optimizer": state}).bytes_of("optimizer/state/0/exp_avg_sq") for state in states]
    assert sizes[1] < sizes[0] * (100 * 140) / (300 * 200) + 1500
    assert all(difference({"optimizer": s}, write({"optimizer": s}).read()) is None for s in states)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint32, torch.uint64])
def test_counters_that_moved_on_cost_next_to_nothing(dtype):
    counts = torch.arange(5000).mul(7).remainder(30_000)
    before = write({"ids": counts.to(dtype)})
    after = write({"ids": (counts + 1).to(dtype)}, before)
    assert after.bytes_of("ids") < 100
    assert difference({"ids": (counts + 1).to(dtype)}, after.read()) is None


def test_a_delta_is_refused_on_anything_but_its_parent():
    loop = Loop()
    before = write(loop.steps(3))
    after = write(loop.steps(1), before)
    one_bit = {name: x.clone() for name, x in before.reference().tensors.items()}
    one_bit["model/2.weight"].view(torch.int32)[5, 5] ^= 1
    missing = {name: x for name, x in before.reference().tensors.items() if name != "model/2.weight"}
    for wrong in (Reference(one_bit), Reference(missing), Reference({}), write(loop.steps(1)).reference()):
        with pytest.raises(ChainError):
            after.read(wrong)
