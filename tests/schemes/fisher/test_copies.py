"""Weights beside the model that track it are lossy as it is: averages, target networks, teachers, references."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers.parameters import each_value
from helpers.sharded_states import Ranks, cut
from helpers.small_training import Run, Silent, digits, unchanged
from helpers.strategies import difference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shrinkpoint as sp
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.errors import LossWarning
from shrinkpoint.schemes.evaluate import ShardedModelEvaluator
from shrinkpoint.schemes.fisher.copies import match_weights
from shrinkpoint.schemes.planner import plan_shards
from shrinkpoint.sharding.global_tensors import ShardLayout
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.tensors.flat_state import FlatState, flatten


class ShadowParams:
    """An average as diffusers' `EMAModel` keeps it: a list of the parameters, without names."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow_params = [p.detach().clone() for p in model.parameters()]

    def update_parameters(self, model: nn.Module) -> None:
        for slow, fast in zip(self.shadow_params, model.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.05)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.95, "shadow_params": self.shadow_params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow_params = [x.clone() for x in state["shadow_params"]]

    def copy_to(self, model: nn.Module) -> nn.Module:
        for own, p in zip(self.shadow_params, model.parameters(), strict=True):
            p.data.copy_(own)
        return model


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)


AVERAGES: dict[str, Any] = {"averaged model": averaged, "shadow params": ShadowParams}


class Averaging:
    """A training with an average of its weights beside it, whose loss is known independently."""

    def __init__(self, kind: str = "averaged model", steps: int = 20) -> None:
        self.run = Run(steps=20)
        self.ema = AVERAGES[kind](self.run.model)
        self.steps(steps)

    def steps(self, count: int) -> Averaging:
        for _ in range(count):
            self.run.steps(1)
            self.ema.update_parameters(self.run.model)
        return self

    @property
    def parts(self) -> dict[str, Any]:
        return {**self.run.parts, "ema": self.ema}

    def ema_loss(self, ema: Any = None) -> float:
        ema = ema or self.ema
        is_list = isinstance(ema, ShadowParams)
        return self.run.loss(ema.copy_to(copy.deepcopy(self.run.model)) if is_list else ema.module)

    def restored(self, storage: Any, step: int, kind: str) -> Any:
        other = AVERAGES[kind](self.run.model)
        other.load_state_dict(sp.Store(storage).load(step)["ema"])
        return other


@pytest.mark.parametrize(("kind", "background"), each_value(AVERAGES, [False, True]))
def test_loss_of_an_average_stays_within_the_budget_along_a_chain_and_a_resume(kind, background):
    training, storage = Averaging(kind), MemoryStorage()
    ratios = []

    def manage() -> sp.CheckpointManager:
        scheme = sp.Fisher(budget="2%", evaluate=training.run.evaluate)
        return sp.CheckpointManager(storage, scheme=scheme, background=background, keyframe_every=100)

    manager = manage()
    for step in range(12):
        if step == 6:  # the run goes on from the checkpoint
            manager.close()
            training = Averaging(kind, steps=0)
            manager = manage()
            manager.restore(**training.parts)
        training.steps(5)
        before = training.run.photo(), copy.deepcopy(training.ema.state_dict())
        with Silent():
            report = manager.save(step, **training.parts)
            manager.wait()
        assert unchanged(training.run, before[0]) and difference(before[1], training.ema.state_dict()) is None
        (found,) = report.copies.values()
        live, stored = training.ema_loss(), training.ema_loss(training.restored(storage, step, kind))
        assert stored <= 1.02 * live
        assert found.rise == pytest.approx(stored / live - 1, abs=1e-5) and 0 < found.error < 0.5
        assert f", of ema/{'module.' * (kind == 'averaged model') or 'shadow_params/'} {found}" in str(report)
        assert found.tensors == 7 and report.keyframe is (step == 0)
        ratios.append(report.roles["copy"].raw / report.roles["copy"].stored)
    manager.close()
    assert min(ratios[1:]) > 10


@pytest.mark.parametrize("target", [{"nats": 0.01, "terms": 128}, {"relative_error": 0.2}, {"ratio": 8}])
def test_average_that_nothing_measures_is_lossy_by_the_curvature_of_the_model(target):
    training, storage = Averaging(), MemoryStorage()
    with Silent(), sp.CheckpointManager(storage, scheme=sp.Fisher(**target)) as manager:
        report = [manager.save(step, **training.steps(5).parts) for step in range(3)][-1]
    (found,) = report.copies.values()
    stored = training.ema_loss(training.restored(storage, 2, "averaged model"))
    assert found.rise is None and stored <= training.ema_loss() + 0.02
    if "nats" in target:
        assert 0 < found.predicted <= 0.01
    if "ratio" in target:
        assert 7 < report.ratio < 15 and report.loss_report["tried"][0]["step"] < 0.016  # the finest of a ratio


def test_frozen_copy_costs_nothing_and_is_not_measured_again():
    run, storage = Run(steps=30), MemoryStorage()
    reference = copy.deepcopy(run.model).requires_grad_(False)
    older = [{"net": copy.deepcopy(run.model)}]  # a deeper nest, whose weights are no likelier the optimizer's
    with Silent(), sp.CheckpointManager(storage, scheme=sp.Fisher(budget="1%", evaluate=run.evaluate)) as manager:
        first = manager.save(0, **run.parts, reference=reference, older=older)
        assert first.copies.keys() == {"reference/", "older/0/net/"}
        values = sp.Store(storage).load(0)["reference"]
        for step in (1, 2):
            report = manager.save(step, **run.steps(30).parts, reference=reference, older=older)
            assert report.roles["copy"].stored == 0 and report.loss_report["copies"]["reference/"]["tried"] == []
            assert report.copies["reference/"].rise == first.copies["reference/"].rise
            loaded = sp.Store(storage).load(step)["reference"]
            assert all(torch.equal(x, loaded[name]) for name, x in values.items())
        with torch.no_grad():
            reference.body[0].weight[5, 5] += 0.5  # beyond what any sample may have seen
        manager.save(3, **run.parts, reference=reference, older=older)
    loaded = sp.Store(storage).load(3)["reference"]["body.0.weight"]
    assert abs(float(loaded[5, 5] - reference.body[0].weight[5, 5])) < 0.1
    other = copy.deepcopy(run.model)
    other.load_state_dict(sp.Store(storage).load(3)["reference"])
    assert run.loss(other) <= 1.01 * run.loss(reference)


def test_networks_that_do_not_track_the_model_stay_exact():
    """One of another seed, one that an optimizer of its own trains from the same start, and a replay buffer."""
    run, storage = Run(steps=30), MemoryStorage()
    stranger, trained, diverged = Run(steps=30).model.__class__(), copy.deepcopy(run.model), copy.deepcopy(run.model)
    own = torch.optim.Adam(trained.parameters())
    F.cross_entropy(trained(digits()[0]), digits()[1]).backward()
    own.step()
    with torch.no_grad():
        diverged.body[0].weight[0, 0] = math.inf
    parts = {"trained": trained, "own": own, "stranger": stranger, "diverged": diverged}
    buffer = {"observations": torch.randn(96, 64), "actions": torch.randn(64, 96)}
    with Silent(), sp.CheckpointManager(storage, scheme=sp.Fisher(budget="5%", evaluate=run.evaluate)) as manager:
        report = manager.save(0, **run.parts, **parts, extra={"buffer": buffer})
    loaded = sp.Store(storage).load(0)
    for name, part in (("stranger", stranger), ("trained", trained), ("diverged", diverged)):
        assert all(torch.equal(x, loaded[name][key]) for key, x in part.state_dict().items())
    assert all(torch.equal(x, loaded["extra"]["buffer"][key]) for key, x in buffer.items())
    assert report.copies == {} and "copy" not in report.roles and report.loss_report["chosen"] is not None


def test_copy_whose_loss_no_steps_keep_stays_exact():
    training, storage = Averaging(), MemoryStorage()
    live = {name: x.clone() for name, x in training.run.model.state_dict().items()}

    def evaluate(model: nn.Module) -> Tensor:
        """Falls with nothing but the exact average, of which the model's own loss says nothing."""
        near = torch.equal(model.head.bias, training.ema.module.head.bias)
        exact = all(
            torch.equal(x, y) for x, y in zip(model.parameters(), training.ema.module.parameters(), strict=True)
        )
        return training.run.evaluate(model) + (1.0 if near and not exact else 0.0)

    scheme = sp.Fisher(budget="5%", evaluate=evaluate)
    with (
        sp.CheckpointManager(storage, scheme=scheme) as manager,
        pytest.warns(LossWarning, match="rise of the loss of ema/module within"),
    ):
        report = manager.save(0, **training.parts)
    loaded = sp.Store(storage).load(0)
    assert all(torch.equal(x, loaded["ema"][name]) for name, x in training.ema.state_dict().items())
    assert not torch.equal(loaded["model"]["body.0.weight"], live["body.0.weight"]) and report.copies == {}


def test_ranks_quantize_a_copy_alike_and_as_one_process_does():
    run = Averaging(steps=30).run
    slow = {name: x.detach() * 0.99 for name, x in run.model.named_parameters() if x.dim() > 1}
    fast = {name: x.detach().clone() for name, x in run.model.named_parameters() if x.dim() > 1}
    flat = flatten({"model": fast, "ema": slow})
    parts = cut(flat, 2)

    class Parts(nn.Module):
        def __init__(self, tensors: Mapping[str, Tensor]) -> None:
            super().__init__()
            model = [tensor for name, tensor in tensors.items() if name.startswith("model")]
            self.parts = nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in model)

    def plan(part: FlatState, layout: ShardLayout, count: int) -> Any:
        def evaluate(model: Parts) -> float:
            return 1.0 + count * sum(float(x.double().square().sum()) for x in model.parts)  # a mean over ranks

        scheme = sp.Fisher(relative_error=0.1, evaluate=evaluate)
        evaluator = ShardedModelEvaluator(part, evaluate, Parts(part.tensors))
        return plan_shards(scheme, part, None, layout, evaluator)

    with Silent():
        plans = Ranks(2).all(lambda rank, ranks: plan(parts[rank].flat, ShardLayout(parts[rank].places, ranks), 2))
        (alone,) = Ranks(1).all(lambda rank, ranks: plan(flat, ShardLayout({}, ranks), 1))
    found, other, single = (plan.loss["copies"] for plan in (*plans, alone))
    assert found == other and found.keys() == single.keys() == {"ema/"}
    for key in ("size", "tensors", "distance"):
        assert found["ema/"][key] == single["ema/"][key]
    for key in ("rise", "quality"):
        assert found["ema/"][key] == pytest.approx(single["ema/"][key], rel=1e-3)
    for plan_of_rank, part in zip(plans, parts, strict=True):
        expected = {name for name, x in part.flat.tensors.items() if x.numel()}
        assert {name for name, x in plan_of_rank.quantized.items() if isinstance(x, LatticeTensor)} == expected


def test_copies_that_are_asked_for_exactly_are_exact():
    training, storage = Averaging(), MemoryStorage()
    scheme = sp.Fisher(budget="1%", evaluate=training.run.evaluate, copies="exact")
    with Silent(), sp.CheckpointManager(storage, scheme=scheme) as manager:
        report = manager.save(0, **training.parts)
    loaded = sp.Store(storage).load(0)["ema"]
    assert all(torch.equal(x, loaded[name]) for name, x in training.ema.state_dict().items())
    assert report.copies == {} and "copy" not in report.roles


NAMES = st.lists(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join), min_size=1, max_size=6, unique=True
)


@given(names=NAMES, data=st.data())
def test_every_tensor_matches_the_weight_of_its_own_name_or_place(names, data):
    shapes = {name: (data.draw(st.integers(1, 2)), 4) for name in names}
    weights = {f"model/{name}": shape for name, shape in shapes.items()}
    prefix = data.draw(st.sampled_from(["ema/module.", "ema.", "averages/0/ema_model.", "z/"]))
    by_name = match_weights({prefix + name: shape for name, shape in shapes.items()}, weights)
    assert {name: weight for match in by_name for name, weight in match.pairs.items()} == {
        prefix + name: f"model/{name}" for name in names
    }
    by_order = match_weights({f"ema/shadow/{i}": shape for i, shape in enumerate(shapes.values())}, weights)
    assert [match.pairs for match in by_order] == [{f"ema/shadow/{i}": f"model/{n}" for i, n in enumerate(names)}]
    grown = {prefix + name: (shape[0] + 2, 4) for name, shape in shapes.items()}
    assert match_weights(grown, weights) == []
