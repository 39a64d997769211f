"""Moments find their parameters without names, and a wrong guess is never an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import strategies
from hypothesis import given, settings
from torch import nn

from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import Role


class Net(nn.Module):
    """Buffers, tied weights and many parameters of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)])
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x)) @ self.frozen)


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def links(flat: FlatState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every link is the true one."""
    names = {id(p): f"model/{name}" for name, p in model.named_parameters()}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    true = {names[id(p)]: f"optimizer/state/{i}/exp_avg" for i, p in enumerate(order) if p in optimizer.state}
    assert {name: facts.moment1 for name, facts in flat.optimizer_info.items()} == true
    for facts in flat.optimizer_info.values():
        assert facts.moment2 == f"{facts.moment1}_sq"


def test_one_group() -> None:
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, betas=(0.8, 0.95))
    flat = flatten(stepped(optimizer, model))
    links(flat, model, optimizer)
    facts = flat.optimizer_info["model/embedding.weight"]
    assert (facts.step, facts.lr, facts.beta1, facts.beta2, facts.eps) == (1, 0.01, 0.8, 0.95, 1e-8)
    assert (facts.weight_decay, facts.decoupled) == (0.01, True)


def test_parameters_without_gradients_are_passed_over() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    flat = flatten(stepped(optimizer, model))
    assert "model/frozen" not in flat.optimizer_info
    links(flat, model, optimizer)


def test_groups_by_weight_decay() -> None:
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() == 1]}]
    optimizer = torch.optim.AdamW(groups)
    links(flatten(stepped(optimizer, model)), model, optimizer)


@pytest.mark.parametrize("is_hybrid", [False, True])
@pytest.mark.parametrize("is_muon_first", [False, True])
def test_matrices_of_muon_are_not_the_embedding_of_their_shape(is_muon_first: bool, is_hybrid: bool) -> None:
    weights = {f"{name}.weight": torch.randn(6, 6) for name in ("position", "blocks.0", "blocks.1")}
    weights["norm.weight"] = torch.randn(6)
    others = ["position.weight", "norm.weight"]
    matrices = ["blocks.0.weight", "blocks.1.weight"]
    optimizers = []
    for names, group, slots in (
        (matrices, {"ns_steps": 5}, ("momentum_buffer",)),
        (others, {"betas": (0.9, 0.95)}, ("exp_avg", "exp_avg_sq")),
    ):
        state = {name: {slot: torch.randn_like(weights[name]) for slot in slots} for name in names}
        optimizers.append((group | {"params": names, "lr": 1e-3}, state))
    optimizers = optimizers if is_muon_first else optimizers[::-1]
    numbers = {name: i for i, name in enumerate(name for group, _ in optimizers for name in group["params"])}

    def numbered(parts: list[Any]) -> dict[str, Any]:
        groups = [group | {"params": [numbers[name] for name in group["params"]]} for group, _ in parts]
        return {"state": {numbers[n]: slot for _, state in parts for n, slot in state.items()}, "param_groups": groups}

    dicts = [numbered(optimizers)] if is_hybrid else [numbered([one]) for one in optimizers]
    flat = flatten({"model": weights, "optimizer": dicts})
    for name, number in numbers.items():
        moment = flat.optimizer_info[f"model/{name}"].moment1
        slot = "momentum_buffer" if name in matrices else "exp_avg"
        assert moment is not None and moment.endswith(f"state/{number}/{slot}"), (name, moment)


def test_names_the_optimizer_knows_come_first() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(list(reversed([(n, p) for n, p in model.named_parameters() if p.requires_grad])))
    links(flatten(stepped(optimizer, model)), model, optimizer)


def test_an_average_of_the_weights_does_not_take_the_moments() -> None:
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ema = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flat = flatten({"ema": ema, **stepped(optimizer, model)})
    links(flat, model, optimizer)


def test_two_optimizers_find_their_own_models() -> None:
    one, two = Net(), nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 5))
    state = stepped(torch.optim.AdamW(one.parameters()), one)
    state["other"] = stepped(torch.optim.AdamW(two.parameters()), two)
    optim = flatten(state).optimizer_info
    assert optim["other/model/1.bias"].moment1 == "other/optimizer/state/2/exp_avg"
    assert optim["model/embedding.weight"].moment1 == "optimizer/state/1/exp_avg"  # 0 is frozen


def test_roles() -> None:
    model = Net()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], amsgrad=True)
    state = stepped(optimizer, model)
    state["fp32_master"] = {"w": torch.ones(3)}
    state["grads"] = {"w": torch.ones(3)}
    infos = flatten(state).infos
    roles = {name.removeprefix("optimizer/state/0/"): info.role for name, info in infos.items()}
    assert roles["exp_avg"] is Role.MOMENT1
    assert roles["exp_avg_sq"] is roles["max_exp_avg_sq"] is Role.MOMENT2
    assert roles["step"] is Role.OTHER
    assert roles["model/blocks.0.1.running_mean"] is Role.BUFFER
    assert roles["model/blocks.0.1.num_batches_tracked"] is Role.BUFFER
    assert roles["model/frozen"] is roles["model/blocks.0.0.weight"] is Role.PARAMETER
    assert roles["fp32_master/w"] is Role.MASTER
    assert roles["grads/w"] is Role.GRADIENT


def test_sgd_has_one_moment() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    facts = flatten(stepped(optimizer, model)).optimizer_info["model/embedding.weight"]
    assert (facts.moment1, facts.moment2, facts.beta1) == ("optimizer/state/1/momentum_buffer", None, 0.9)


def test_before_the_first_step_nothing_is_linked() -> None:
    model = Net()
    flat = flatten({"model": model.state_dict(), "optimizer": torch.optim.AdamW(model.parameters()).state_dict()})
    assert flat.optimizer_info == {}
    assert flat.infos["model/embedding.weight"].role is Role.PARAMETER


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": {}, "param_groups": []},
        {"state": {0: 3}, "param_groups": [{"params": [0, 1]}, 7, {"params": None}]},
        {"state": {0: {"exp_avg": 3, "step": "x"}}, "param_groups": [{"params": [0], "betas": (1,), "lr": None}]},
        {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0, 0], "param_names": [None]}]},
        {"state": {(0,): {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [(0,), [1]]}]},
    ],
)
def test_odd_optimizers_are_stored_all_the_same(optimizer: dict[str, Any]) -> None:
    flatten({"model": {"w": torch.ones(2)}, "optimizer": optimizer})


@settings(deadline=None, max_examples=30)
@given(strategies.states(), strategies.states())
def test_any_optimizer_state_is_stored_all_the_same(state: Any, other: Any) -> None:
    optimizer = {"state": {0: {"exp_avg": other}}, "param_groups": [{"params": [0], "lr": state}]}
    flat = flatten({"model": state, "o": optimizer})
    for name, facts in flat.optimizer_info.items():
        assert name in flat.tensors
        assert all(moment is None or moment in flat.tensors for moment in (facts.moment1, facts.moment2))


def test_settings_of_a_dtype_without_numbers_are_left_out() -> None:
    narrow = getattr(torch, "float4_e2m1fn_x2", None)
    if narrow is None:
        pytest.skip("this torch has no such dtype")
    weight = torch.zeros(3, 2)
    optimizer = {
        "state": {0: {"exp_avg": weight.clone(), "exp_avg_sq": weight.clone(), "step": 3}},
        "param_groups": [{"params": [0], "lr": torch.zeros((), dtype=torch.uint8).view(narrow), "eps": 1e-8}],
    }
    info = flatten({"model": {"layer.weight": weight}, "optimizer": optimizer}).optimizer_info["model/layer.weight"]
    assert (info.lr, info.eps, info.step) == (None, 1e-8, 3)
