"""Of each tensor that an optimizer keeps it is known what it is to the step, or that it is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict

from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.optimizers import MomentKind, moment_kinds
from shrinkpoint.train.dcp.save_plan import collect_plan_items

MEAN, SQUARES, SUM = MomentKind.GRADIENT_MEAN, MomentKind.SQUARE_MEAN, MomentKind.ACCUMULATOR
EXACT, UNKNOWN, MOMENTUM = MomentKind.EXACT, MomentKind.UNKNOWN, MomentKind.MOMENTUM
MUON, SIGN, SCALED = MomentKind.ORTHOGONALIZED, MomentKind.SIGN, MomentKind.SCALED
ADAM = {"exp_avg": MEAN, "exp_avg_sq": SQUARES}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def stepped(net: nn.Module, *optimizers: optim.Optimizer) -> dict[str, Any]:
    for _ in range(2):
        for optimizer in optimizers:

            def closure() -> torch.Tensor:
                net.zero_grad()
                loss = net(torch.randn(5, 8)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    return {"model": net.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}


def kinds_of(flat: FlatState, number: int = 0) -> dict[str, MomentKind]:
    """By name of the slot, of one optimizer."""
    found = {n: kind for n, kind in flat.moment_kinds.items() if n.startswith(f"optimizers/{number}/")}
    return {name.split("/")[4]: kind for name, kind in found.items()}


TORCH: dict[str, tuple[Any, dict[str, Any], dict[str, MomentKind]]] = {
    "Adadelta": (optim.Adadelta, {}, {"square_avg": SQUARES, "acc_delta": SUM}),
    "Adafactor": (optim.Adafactor, {}, {"row_var": EXACT, "col_var": EXACT}),
    "Adagrad": (optim.Adagrad, {}, {"sum": SUM}),
    "Adam": (optim.Adam, {}, ADAM),
    "amsgrad": (optim.Adam, {"amsgrad": True}, ADAM | {"max_exp_avg_sq": SUM}),
    "Adamax": (optim.Adamax, {}, {"exp_avg": SCALED, "exp_inf": SUM}),
    "AdamW": (optim.AdamW, {}, ADAM),
    "ASGD": (optim.ASGD, {}, {"ax": EXACT}),
    "LBFGS": (optim.LBFGS, {"max_iter": 2}, dict.fromkeys(("d", "prev_flat_grad"), MomentKind.HISTORY)),
    "Muon": (optim.Muon, {}, {"momentum_buffer": MUON}),
    "NAdam": (optim.NAdam, {}, ADAM),
    "RAdam": (optim.RAdam, {}, ADAM),
    "RMSprop": (optim.RMSprop, {}, {"square_avg": SQUARES}),
    "RMSprop, momentum": (
        optim.RMSprop,
        {"momentum": 0.9},
        {"square_avg": SQUARES, "momentum_buffer": MOMENTUM},
    ),
    "RMSprop, centered": (optim.RMSprop, {"centered": True}, {"square_avg": EXACT, "grad_avg": EXACT}),
    "Rprop": (optim.Rprop, {}, {"prev": EXACT, "step_size": EXACT}),
    "SGD": (optim.SGD, {"momentum": 0.9}, {"momentum_buffer": MOMENTUM}),
}


@pytest.mark.parametrize("name", TORCH)
def test_each_optimizer_of_torch_is_recognized(name: str) -> None:
    make, settings, expected = TORCH[name]
    net = model()
    flat = flatten(stepped(net, make(net.parameters(), lr=1e-3, **settings)))
    assert kinds_of(flat) == expected
    if name != "LBFGS":  # which keeps all under its first parameter
        assert len(flat.moment_kinds) == 3 * len(expected)


def test_sparse_adam_is_recognized() -> None:
    net = nn.Embedding(9, 4, sparse=True)
    optimizer = optim.SparseAdam(net.parameters())
    net(torch.arange(3)).sum().backward()
    optimizer.step()
    assert kinds_of(flatten({"model": net.state_dict(), "optimizers": [optimizer.state_dict()]})) == ADAM


def test_the_optimizers_of_a_run_are_recognized_each_by_itself() -> None:
    net = model()
    muon, adamw = optim.Muon([net[0].weight, net[1].weight]), optim.AdamW([net[2].weight])
    flat = flatten(stepped(net, muon, adamw))
    assert kinds_of(flat, 0) == {"momentum_buffer": MUON} and kinds_of(flat, 1) == ADAM


@pytest.mark.parametrize("is_flat", [False, True])
def test_under_the_names_of_dcp_muon_is_recognized(is_flat: bool) -> None:
    net = model()
    optimizers = optim.Muon([net[0].weight]), optim.AdamW([net[1].weight, net[2].weight])
    stepped(net, *optimizers)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    weights, moments = get_state_dict(net, optimizers, options=options)
    flat = planned({"model": weights, "optim": moments})
    kinds = {tuple(name.split(".")[-3:]): kind for name, kind in flat.moment_kinds.items()}
    assert kinds.pop(("0", "weight", "momentum_buffer")) is MUON
    assert sorted(kinds) == [(n, "weight", slot) for n in "12" for slot in ADAM]
    assert {slot: kind for (_, _, slot), kind in kinds.items()} == ADAM


def test_flat_names_of_two_optimizers_are_told_apart() -> None:
    net, state = model(), dict[str, Any]()
    for number, head in enumerate(("generator", "judge")):
        part = net[number]
        optimizer = optim.AdamW(part.parameters(), betas=(0.5 + number / 10, 0.9))
        part(torch.ones(8)).sum().backward()
        optimizer.step()
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for name, value in get_optimizer_state_dict(part, optimizer, options=options).items():
            state[f"{head}.{name}".replace(".weight.", f".{number}.weight.")] = value
    infos = planned({"model": net.state_dict(), **state}).optimizer_info
    assert [infos[f"model.{number}.weight"].beta1 for number in (0, 1)] == [0.5, 0.6]


def planned(state: dict[str, Any]) -> FlatState:
    """What a writer of torch.distributed.checkpoint makes of a state."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    plan = planner.create_local_plan()
    (plan,), _ = planner.create_global_plan([plan])
    return collect_plan_items(planner.finish_plan(plan), planner).state


def test_nests_of_an_optimizer_that_is_not_known_are_seen_under_the_names_of_dcp() -> None:
    """SOAP's lists of matrices, without which its state looks like Adam's."""
    slot = {"exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(4, 4), "GG": [torch.ones(4, 4), torch.ones(4, 4)]}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": ["a.weight"]}]
    flat = planned(
        {"model": {"a.weight": torch.ones(4, 4)}, "optim": {"state": {"a.weight": slot}, "param_groups": groups}}
    )
    assert {*flat.moment_kinds.values()} == {UNKNOWN}


X = torch.ones(3, 3)
ADAM_GROUP = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}
SLOTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, MomentKind]]] = {
    "Lion": ({"exp_avg": X}, {"betas": (0.9, 0.99), "weight_decay": 0.1}, {"exp_avg": SIGN}),
    "Muon of others": ({"momentum_buffer": X}, {"ns_steps": 5, "nesterov": True}, {"momentum_buffer": MUON}),
    "Muon of a hybrid": ({"momentum_buffer": X}, {"use_muon": True, "ns_steps": 5}, {"momentum_buffer": MUON}),
    "Adam of a hybrid": ({"exp_avg": X, "exp_avg_sq": X}, ADAM_GROUP | {"use_muon": False, "ns_steps": 5}, ADAM),
    "schedule-free": ({"z": X, "exp_avg_sq": X}, ADAM_GROUP, {"z": EXACT, "exp_avg_sq": SQUARES}),
    "bitsandbytes": (
        {"state1": X.to(torch.uint8), "absmax1": X[0], "qmap1": X[0]},
        ADAM_GROUP,
        {"state1": EXACT, "absmax1": EXACT, "qmap1": EXACT},
    ),
    "Adafactor of transformers": (
        {"exp_avg": X, "exp_avg_sq_row": X[0], "exp_avg_sq_col": X[0], "RMS": X.mean()},
        {"clip_threshold": 1.0, "beta1": 0.9},
        {"exp_avg": MOMENTUM, "exp_avg_sq_row": EXACT, "exp_avg_sq_col": EXACT},
    ),
    "SOAP": (
        {"exp_avg": X, "exp_avg_sq": X, "GG": [X, []], "Q": [X, []]},
        ADAM_GROUP,
        dict.fromkeys(("exp_avg", "exp_avg_sq", "GG", "Q"), UNKNOWN),
    ),
    "a momentum of nobody's": ({"momentum_buffer": X}, {"momentum": 0.9}, {"momentum_buffer": UNKNOWN}),
    "an average of nobody's": ({"exp_avg": X}, ADAM_GROUP, {"exp_avg": UNKNOWN}),
    "another tensor": ({"exp_avg": X, "exp_avg_sq": X, "slow": X}, ADAM_GROUP, dict.fromkeys((*ADAM, "slow"), UNKNOWN)),
    "another number": ({"exp_avg": X, "exp_avg_sq": X, "slow": X.mean(), "step": 3}, ADAM_GROUP, ADAM),
}


@pytest.mark.parametrize("name", SLOTS)
def test_slots_and_settings_tell_the_kinds(name: str) -> None:
    slot, settings, expected = SLOTS[name]
    assert moment_kinds(slot, settings) == expected


def test_weights_in_full_precision_do_not_make_an_optimizer_unknown() -> None:
    net = model()
    state = stepped(net, optim.AdamW(net.parameters()))
    for slot in state["optimizers"][0]["state"].values():
        slot["master_param"] = torch.ones(8, 8)
    assert kinds_of(flatten(state)) == ADAM
