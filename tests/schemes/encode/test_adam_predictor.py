"""One step apart, weights and second moments follow from what a checkpoint holds anyway, whatever the optimizer did."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from helpers.round_trip import Loop, Written, write
from helpers.strategies import difference

VARIANTS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "no decay": {"weight_decay": 0.0},
    "much decay": {"weight_decay": 0.3},
    "amsgrad": {"amsgrad": True},
    "betas": {"betas": (0.8, 0.95)},
    "maximize": {"maximize": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "large steps": {"lr": 0.1},
    "large eps": {"eps": 1e-3},
    "no eps": {"eps": 0.0},
    "fused": {"fused": True},
    "tensor lr": {"lr": torch.tensor(1e-3), "foreach": False},
    "Adam": {"optimizer": torch.optim.Adam},
    "Adam with decay": {"optimizer": torch.optim.Adam, "weight_decay": 0.1},
    "NAdam": {"optimizer": torch.optim.NAdam},
    "RAdam": {"optimizer": torch.optim.RAdam},
    "Adagrad": {"optimizer": torch.optim.Adagrad},
    "RMSprop": {"optimizer": torch.optim.RMSprop, "momentum": 0.9},
    "SGD": {"optimizer": torch.optim.SGD, "momentum": 0.9},
    "Adamax": {"optimizer": torch.optim.Adamax},
}
EXACT = [
    "AdamW",
    "no decay",
    "much decay",
    "betas",
    "maximize",
    "foreach",
    "loop",
    "large steps",
    "large eps",
    "Adam",
    "Adam with decay",
]
"""Those whose arithmetic is predicted to the last bit or nearly."""


def bits_a_value(written: Written, prefix: str, raw: int = 4) -> float:
    """Payload bits of the large tensors under a prefix, a value."""
    stored = values = 0
    for record in written.records():
        if record.infos[0].name.startswith(prefix) and record.infos[0].nbytes > raw:
            stored += sum(len(part) for part in record.parts.values())
            values += sum(info.numel for info in record.infos)
    return 8 * stored / values


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_of_any_optimizer_comes_back_bit_by_bit(name):
    loop = Loop(**VARIANTS[name])
    first = loop.steps(3)
    for state in (loop.steps(1), loop.steps(4)):
        before = write(first)
        after = write(state, before)
        assert difference(state, after.read()) is None
        first = state


@pytest.mark.parametrize("name", EXACT)
def test_weights_one_step_apart_cost_less_than_a_bit(name):
    loop = Loop(**VARIANTS[name])
    after = [loop.steps(10), loop.steps(1)]
    written = write(after[1], write(after[0]))
    assert difference(after[1], written.read()) is None
    assert bits_a_value(written, "model/") < 1
    assert {recipe["runs"][0]["predictor"] for n, recipe in written.recipes().items() if n.startswith("model/")} == {
        "adam"
    }


def test_weights_ten_steps_apart_are_not_predicted_and_come_back():
    loop = Loop()
    after = [loop.steps(10), loop.steps(10)]
    written = write(after[1], write(after[0]))
    assert difference(after[1], written.read()) is None
    assert 4 < bits_a_value(written, "model/") < 28


def test_second_moments_one_step_apart_cost_little():
    loop = Loop()
    first, second = loop.steps(10), loop.steps(1)
    written = write(second, write(first))
    names = [f"optimizer/state/{i}/exp_avg_sq" for i in (0, 2)]
    assert all(written.recipes()[name]["runs"][0]["predictor"] == "square" for name in names)
    assert sum(written.bytes_of(name) for name in names) < 4 * (16 * 36 + 64 * 96) / 2


def test_a_schedule_that_moves_the_rate_between_saves_only_costs_bytes():
    loop = Loop(weight_decay=0.1)
    sizes = []
    before = write(loop.steps(3))
    for scheduled in (False, True):
        loop.steps(1)
        if scheduled:
            loop.schedule.step()  # the rate in the state is now the next step's, not the one that made these weights
        state = loop.state()
        after = write(state, before)
        assert difference(state, after.read()) is None
        sizes.append(after.bytes_of("model/2.weight"))
        before = after
    assert sizes[0] < sizes[1]


WRONG = {
    "lr": [1.0, 0.0, -1.0, 1e30, 1e300, float("nan")],
    "eps": [0.0, 1.0, 1e300, -1.0],
    "weight_decay": [5.0, -1e9],
    "betas": [(0.0, 0.0), (0.5, 1.0), (1.5, -2.0), (0.9, 0.9999999999999999), (float("nan"), 0.5)],
    "step": [0, 1, -5, 10**9, 10**18],
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_facts_only_cost_bytes(key):
    loop = Loop()
    first, second = loop.steps(5), loop.steps(1)
    before, honest = write(first), None
    for value in [None, *WRONG[key]]:
        state = copy.deepcopy(second)
        if value is not None and key == "step":
            for slot in state["optimizer"]["state"].values():
                slot["step"] = value
        elif value is not None:
            state["optimizer"]["param_groups"][0][key] = value
        written = write(state, before)
        assert difference(state, written.read()) is None, value
        honest = honest or written.report.stored_bytes
        assert written.report.stored_bytes >= honest - 64


def test_moments_of_another_parameter_only_cost_bytes():
    loop = Loop()
    first, second = loop.steps(5), loop.steps(1)
    slots = second["optimizer"]["state"]
    for slot in slots.values():
        slot["exp_avg"], slot["exp_avg_sq"] = slot["exp_avg_sq"], slot["exp_avg"].flip(0)
    assert difference(second, write(second, write(first)).read()) is None


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2]


def test_moments_of_any_width_are_context_for_weights_of_any_width():
    for number, (weights, moment1) in enumerate(itertools.product(DTYPES, DTYPES)):
        loop, moment2 = Loop(), DTYPES[number % 4]
        states = [loop.steps(5), loop.steps(1)]
        for state in states:
            state["model"] = {name: x.to(weights) for name, x in state["model"].items()}
            for slot in state["optimizer"]["state"].values():
                slot["exp_avg"], slot["exp_avg_sq"] = slot["exp_avg"].to(moment1), slot["exp_avg_sq"].to(moment2)
        before = write(states[0])
        assert difference(states[0], before.read()) is None
        assert difference(states[1], write(states[1], before).read()) is None


def test_moments_that_are_two_floats_in_a_byte_are_no_context():
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        pytest.skip("this torch has no 4-bit floats")
    state = Loop().steps(2)
    for slot in state["optimizer"]["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            slot[key] = slot[key].view(torch.uint8)[..., : slot[key].shape[-1]].contiguous().view(dtype)
    assert difference(state, write(state).read()) is None
