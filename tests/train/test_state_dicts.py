"""A restore refuses what it would have to change: another kind of optimizer or scheduler, a narrower dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.strategies import same
from torch import nn
from torch.optim import lr_scheduler

from shrinkpoint.errors import MismatchError
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.train import CheckpointManager
from shrinkpoint.train.state_dicts import can_represent


class Lion(torch.optim.Optimizer):
    """Somebody's own: a momentum under a name of its own, a number from the start, and a state of no parameter."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})
        self.state["run"] = {"norm": torch.zeros(())}
        for x in self.param_groups[0]["params"]:
            self.state[x]["calls"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in group["params"]:
                average = self.state[x].setdefault("average", torch.zeros_like(x))
                x.sub_(group["lr"] * average.lerp_(x.grad, 0.1).sign())


class Plus(torch.optim.Adam):
    """A kind of Adam that keeps one tensor more."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for x in self.param_groups[0]["params"]:
            self.state[x]["longer"] = torch.zeros_like(x)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    )
} | {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SGD plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "LBFGS": torch.optim.LBFGS,
    "Lion": Lion,
    "Plus": Plus,
}
ALIKE = ({"Adam", "AdamW", "RAdam"}, {"SGD", "SGD plain"})
"""What keeps the same state of a parameter, under the same names."""


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(dtype)


def stepped(kind: str, model: nn.Module | None = None, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network() if model is None else model
    optimizer = OPTIMIZERS[kind](model.parameters())
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(next(model.parameters()).dtype)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        out: torch.Tensor = model(x).square().mean()
        out.backward()
        return out

    for _ in range(steps):
        loss()
        optimizer.step(loss)
    return model, optimizer


def photo(*things: Any) -> Any:
    return [copy.deepcopy(thing.state_dict()) for thing in things]


@pytest.fixture(scope="module")
def saved() -> dict[str, CheckpointManager]:
    """By the kind of its optimizer, what saved a run."""
    managers = {kind: CheckpointManager(MemoryStorage()) for kind in OPTIMIZERS}
    for kind, manager in managers.items():
        model, optimizer = stepped(kind)
        manager.save(1, model=model, optimizer=optimizer)
    return managers


def _is_alike(ours: str, theirs: str, steps: int) -> bool:
    if ours == "Plus":  # before its first step nobody can know what it will keep, only what it is set by
        return theirs in ("Adam", "AdamW", "RAdam", "Plus", *(["Adamax"] if steps == 0 else []))
    return theirs == ours or any({theirs, ours} <= kinds for kinds in ALIKE)


@pytest.mark.parametrize("ours", OPTIMIZERS)
def test_the_state_of_another_kind_of_optimizer_is_refused(saved: dict[str, CheckpointManager], ours: str) -> None:
    for steps in [0, 1]:
        model, optimizer = stepped(ours, steps=steps)
        before = photo(model, optimizer)
        for theirs in (kind for kind in OPTIMIZERS if not _is_alike(ours, kind, steps)):
            with pytest.raises(MismatchError, match=r"another kind of optimizer|no ") as caught:
                saved[theirs].restore(model=model, optimizer=optimizer)
            assert "strict=False" in str(caught.value) and "optimizer" in str(caught.value), (ours, theirs)
        assert same(photo(model, optimizer), before)
        for theirs in (kind for kind in OPTIMIZERS if _is_alike(ours, kind, steps)):
            model, optimizer = stepped(ours, steps=steps)
            saved[theirs].restore(model=model, optimizer=optimizer)


def test_an_optimizer_with_a_tensor_more_is_another_kind_for_those_that_lack_it(
    saved: dict[str, CheckpointManager],
) -> None:
    for kind in ("Adam", "AdamW", "RAdam"):
        model, optimizer = stepped(kind)
        with pytest.raises(MismatchError, match="longer"):
            saved["Plus"].restore(model=model, optimizer=optimizer)


def test_leniently_torch_decides(saved: dict[str, CheckpointManager]) -> None:
    model, optimizer = stepped("SGD")
    saved["AdamW"].restore(model=model, optimizer=optimizer, strict=False)
    assert "exp_avg" in optimizer.state_dict()["state"][0]


def test_other_settings_of_one_kind_are_no_other_kind(tmp_path: Path) -> None:
    """Neither is what schedulers and releases of torch add to groups, on either side."""
    model = network()
    made = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True),
        torch.optim.Adam(model.parameters(), amsgrad=True),
        torch.optim.Adam(model.parameters()),
        torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), capturable=True),
        torch.optim.AdamW([{"params": [x], "name": str(i)} for i, x in enumerate(model.parameters())][:1]),
    ]
    for number, optimizer in enumerate(made):
        model(torch.randn(8, 6)).square().mean().backward()
        if number not in (1, 5):
            optimizer.step()
        if number in (0, 3):
            lr_scheduler.StepLR(optimizer, 3)
        if number == 4:
            del optimizer.param_groups[0]["decoupled_weight_decay"], optimizer.param_groups[0]["fused"]
        with CheckpointManager(tmp_path / str(number)) as manager:
            manager.save(1, optimizer=optimizer)
    for kinds in ((0, 1, 2), (3, 4, 5), (6,)):
        for theirs in kinds:
            for ours in kinds:
                CheckpointManager(tmp_path / str(theirs)).restore(optimizer=made[ours])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda one: lr_scheduler.StepLR(one, 3),
    "MultiStepLR": lambda one: lr_scheduler.MultiStepLR(one, [3, 5]),
    "ExponentialLR": lambda one: lr_scheduler.ExponentialLR(one, 0.9),
    "CosineAnnealingLR": lambda one: lr_scheduler.CosineAnnealingLR(one, 10),
    "CosineAnnealingWarmRestarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 10),
    "LinearLR": lambda one: lr_scheduler.LinearLR(one),
    "LambdaLR": lambda one: lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch),
    "ReduceLROnPlateau": lambda one: lr_scheduler.ReduceLROnPlateau(one),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, 0.1, 10),
    "SequentialLR": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one), lr_scheduler.ExponentialLR(one, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("theirs", SCHEDULERS)
def test_the_state_of_another_kind_of_scheduler_is_refused(tmp_path: Path, theirs: str) -> None:
    def made(kind: str) -> Any:
        return SCHEDULERS[kind](stepped("SGD")[1])

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, scheduler=made(theirs))
        manager.restore(scheduler=made(theirs))
        for ours in SCHEDULERS.keys() - {theirs}:
            scheduler = made(ours)
            before = photo(scheduler)
            with pytest.raises(MismatchError, match="another kind of scheduler"):
                manager.restore(scheduler=scheduler)
            assert same(photo(scheduler), before)


def test_a_scheduler_of_another_release_of_torch_is_the_same_kind(tmp_path: Path) -> None:
    scheduler = SCHEDULERS["ReduceLROnPlateau"](stepped("SGD")[1])
    state = scheduler.state_dict() | {"verbose": False}
    del state["default_min_lr"]

    class Older:
        def state_dict(self) -> Any:
            return state

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, scheduler=Older())
        assert manager.restore(scheduler=scheduler) is not None


@pytest.mark.parametrize(
    ("found", "ours"),
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
def test_values_that_a_model_cannot_hold_are_refused(tmp_path: Path, found: torch.dtype, ours: torch.dtype) -> None:
    model, optimizer = stepped("AdamW", network(found))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
        model, optimizer = stepped("AdamW", network(ours))
        before = photo(model, optimizer)
        for parts in ({"model": model, "optimizer": optimizer}, {"optimizer": optimizer}):
            with pytest.raises(MismatchError, match=f"{found} in the checkpoint") as caught:
                manager.restore(**parts)
            assert str(ours) in str(caught.value) and "strict=False" in str(caught.value)
        with pytest.raises(MismatchError, match=r"0\.weight"):
            manager.restore(model=model)
        assert same(photo(model, optimizer), before)
        manager.restore(model=model, optimizer=optimizer, strict=False)
        assert not same(photo(model, optimizer), before) and model[0].weight.dtype == ours


@pytest.mark.parametrize(
    ("found", "ours"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float64), (torch.float32, torch.float32)]
)
def test_a_wider_dtype_holds_every_value(tmp_path: Path, found: torch.dtype, ours: torch.dtype) -> None:
    model, optimizer = stepped("AdamW", network(found))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
        other, another = stepped("AdamW", network(ours))
        manager.restore(model=other, optimizer=another)
    moments = [one.state_dict()["state"][0]["exp_avg"] for one in (optimizer, another)]
    for a, b in [moments, *zip(model.parameters(), other.parameters(), strict=True)]:
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)


def test_moments_have_the_strides_of_their_parameter(tmp_path: Path) -> None:
    """As torch makes them: sums over a moment, as of its norm, depend on their order."""

    def build() -> tuple[nn.Module, torch.optim.AdamW]:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters())

    (model, optimizer), (ours, other) = build(), build()
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
        manager.restore(model=ours, optimizer=other)
    [moment, restored] = (x.state[m.weight]["exp_avg"] for m, x in ((model, optimizer), (ours, other)))
    assert restored.stride() == moment.stride() != moment.contiguous().stride()
    assert torch.equal(restored, moment)
    for part in (..., slice(0, 4)):  # of a part, too
        ours, other = build()
        with CheckpointManager(tmp_path) as manager:
            manager.restore(model=ours, optimizer=other, only={"weight": part})
        assert other.state[ours.weight]["exp_avg"].stride() == moment.stride()
        assert torch.equal(other.state[ours.weight]["exp_avg"], moment)


def test_whole_numbers_are_no_fractions() -> None:
    assert can_represent(torch.int64, torch.int32) and can_represent(torch.complex128, torch.complex64)
    for wide, narrow in (
        (torch.int32, torch.int64),
        (torch.float64, torch.int32),
        (torch.int64, torch.float32),
        (torch.complex64, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
    ):
        assert not can_represent(wide, narrow)


def test_a_gradient_scaler_that_was_off_is_refused_by_one_that_is_on(tmp_path: Path) -> None:
    off, on = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (False, True))
    model = network()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, scaler=off)
        with torch.no_grad():
            model[0].weight.add_(1)
        before = photo(model)
        with pytest.raises(MismatchError, match="scaler"):
            manager.restore(model=model, scaler=on)
        assert same(photo(model), before)
        manager.save(2, scaler=on)
        manager.restore(scaler=torch.amp.GradScaler("cpu"))
        manager.restore(scaler=off)


class Refusing:
    """An object that saves a state and refuses to load one."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("no")


def test_an_object_that_refuses_its_state_leaves_model_and_optimizer_as_they_are(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=model, optimizer=optimizer, own=[Refusing()])
    other = nn.Linear(8, 8)
    fresh, before = torch.optim.AdamW(other.parameters()), other.weight.detach().clone()
    with pytest.raises(MismatchError, match="ValueError: no; expected a state that this Refusing loads"):
        manager.restore(1, model=other, optimizer=fresh, own=[Refusing()])
    assert torch.equal(before, other.weight) and not fresh.state


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=nn.Linear(8, 8))
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    with pytest.raises(MismatchError, match="weight: a tensor on the meta device"):
        manager.restore(1, model=model)


def test_a_buffer_that_cannot_be_written_is_refused_before_anything_has_changed(tmp_path: Path) -> None:
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    for model in models:
        model.register_buffer("mask", torch.ones(1, 8).expand(4, 8))
    manager, before = CheckpointManager(tmp_path), models[1].weight.detach().clone()
    manager.save(1, model=models[0])
    with pytest.raises(MismatchError, match=r"mask: a tensor whose elements share memory.*clone\(\)"):
        manager.restore(1, model=models[1])
    assert torch.equal(models[1].weight, before)
    models[1].mask = models[1].mask.clone()
    manager.restore(1, model=models[1])
    assert torch.equal(models[1].weight, models[0].weight)


class Pair(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tied:
            self.b.weight = self.a.weight


def test_two_values_for_one_tied_tensor_are_refused(tmp_path: Path) -> None:
    manager, untied, tied = CheckpointManager(tmp_path), Pair(tied=False), Pair(tied=True)
    manager.save(1, model=untied)
    with pytest.raises(MismatchError, match=r"b\.weight: another value than a\.weight has"):
        manager.restore(1, model=tied)
    manager.restore(1, model=tied, strict=False)
    assert torch.equal(tied.a.weight, untied.b.weight)
    with torch.no_grad():
        untied.a.weight.copy_(untied.b.weight)
    manager.save(2, model=untied)
    manager.restore(2, model=tied)
    manager.restore(2, model=tied, only=["a.*"])
    assert torch.equal(tied.a.weight, untied.a.weight)
