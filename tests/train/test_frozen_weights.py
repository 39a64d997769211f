"""Weights that do not move keep the values that they have, through however many restores."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.parameters import each_value
from helpers.small_training import Run, Silent
from helpers.strategies import bits
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.container import FileReader as ContainerReader
from shrinkpoint.schemes import Scheme
from shrinkpoint.storage import LocalStorage, MemoryStorage
from shrinkpoint.train import Checkpointer

BINS = {"bins": 16, "embedding_bins": 16, "prune": 0.1, "protect": 0.005}
SCHEMES: dict[str, Callable[[], Scheme | str]] = {
    "lossless": lambda: "lossless",
    "fisher": lambda: sp.Fisher(relative_error=0.3),
    "fisher, moments exact": lambda: sp.Fisher(relative_error=0.3, moments="exact"),
    "fisher, by prediction": lambda: sp.Fisher(terms=128),
    "fisher, by ratio": lambda: sp.Fisher(ratio=6),
    "inshrinkerator": lambda: sp.Inshrinkerator(config=BINS),
    "inshrinkerator as printed": lambda: sp.Inshrinkerator(config=BINS, paper=True),
    "qd": lambda: sp.QD(config={"least": 8, "most": 64}),
    "cnr": lambda: sp.CNR(config={"bins": 16, "steps": 50, "range": 0.3}),
    "gobo": lambda: sp.GOBO(config={"bins": 16, "embedding_bins": 16}),
    "lc": sp.LCCheckpoint,
    "scar": sp.SCAR,
    "topn": sp.TOPN,
    "excp": sp.ExCP,
}
RESTORES = 5


class Frozen(nn.Module):
    """A backbone that is not trained, and a head that is."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU()).requires_grad_(False)
        self.body = nn.Linear(64, 80)
        self.head = nn.Linear(80, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.backbone(x))))


class FrozenRun(Run):
    def __init__(self) -> None:
        super().__init__(Frozen)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=3e-3)


def backbone(model: nn.Module) -> dict[str, bytes]:
    return {name: bits(x) for name, x in model.state_dict().items() if name.startswith("backbone")}


def through_a_manager(path: Path, make: Callable[[], Any]) -> list[dict[str, bytes]]:
    """The frozen weights after each restore; every restore is in a process of its own, as far as the library knows."""
    out, run = [], FrozenRun()
    with sp.CheckpointManager(path, scheme=make(), keyframe_every=3) as manager:
        manager.save(0, **run.steps(3).parts)
    for step in range(1, RESTORES + 1):
        run = FrozenRun()
        with sp.CheckpointManager(path, scheme=make(), keyframe_every=3) as manager:
            manager.restore(**run.parts)
            out.append(backbone(run.model))
            run.steps(2)
            manager.save(step, **run.parts)
    return out


@pytest.mark.parametrize("name", SCHEMES)
def test_the_error_of_a_frozen_backbone_does_not_grow_with_restores(tmp_path, name):
    with Silent():
        found = through_a_manager(tmp_path, SCHEMES[name])
    assert all(one == found[0] for one in found)


def through_a_trail(path: Path, make: Callable[[], Any]) -> list[dict[str, bytes]]:
    """The same in folders of a framework's own, where a keyframe has nothing below it."""
    out, run = [], FrozenRun()
    with Checkpointer(scheme=make(), keyframe_every=2) as checkpointer:
        checkpointer.save(
            path / "0", {name: one.state_dict() for name, one in run.steps(3).parts.items()}, objects=run.parts
        )
    for step in range(1, RESTORES + 1):
        run = FrozenRun()
        with Checkpointer(scheme=make(), keyframe_every=2) as checkpointer:
            state = checkpointer.load(path / str(step - 1)).state
            run.model.load_state_dict(state["model"]), run.optimizer.load_state_dict(state["optimizer"])
            out.append(backbone(run.model))
            now = {name: one.state_dict() for name, one in run.steps(2).parts.items()}
            checkpointer.save(path / str(step), now, objects=run.parts, keyframe=step == 5)
    return out


def through_a_store(path: Path, make: Callable[[], Any]) -> list[dict[str, bytes]]:
    """The same by hand, with keyframes that are asked for."""
    out, run, scheme = [], FrozenRun(), make()
    with sp.Store(path) as store:
        store.save(0, {name: one.state_dict() for name, one in run.steps(3).parts.items()}, scheme=scheme)
    for step in range(1, RESTORES + 1):
        run, scheme = FrozenRun(), make()
        with sp.Store(path) as store:
            found = store.restore()
            scheme.resume(found.manifest.loss, step)
            state = found.state
            run.model.load_state_dict(state["model"]), run.optimizer.load_state_dict(state["optimizer"])
            out.append(backbone(run.model))
            now = {name: one.state_dict() for name, one in run.steps(2).parts.items()}
            store.save(step, now, scheme=scheme, keyframe=step % 2 == 0)
    return out


@pytest.mark.parametrize("way", [through_a_trail, through_a_store])
@pytest.mark.parametrize("name", ["fisher", "cnr"])
def test_it_does_not_grow_where_keyframes_stand_alone(tmp_path, name, way):
    with Silent():
        found = way(tmp_path, SCHEMES[name])
    assert all(one == found[0] for one in found)


def test_frozen_weights_cost_next_to_nothing_after_a_restore(tmp_path):
    make = SCHEMES["fisher"]
    with Silent():
        through_a_manager(tmp_path, make)
        with sp.CheckpointManager(tmp_path, scheme=make()) as manager:
            run = FrozenRun()
            manager.restore(**run.parts)
            manager.save(99, **run.steps(1).parts)
    key = sp.Store(tmp_path).manifest(99)
    (path,) = (tmp_path).glob(f"*99*/{key.payloads[0].name}")
    with LocalStorage(path.parent).open(path.name) as source:
        recipes = {info.name: head.recipe for head in ContainerReader(source, "file").records for info in head.infos}
    frozen = {name: recipe for name, recipe in recipes.items() if "backbone" in name}
    assert len(frozen) == 4 and all(recipe == {"kind": "same"} for recipe in frozen.values())


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wte, self.head = nn.Embedding(120, 48), nn.Linear(48, 10)


def looked_up(model: Lookup, optimizer: torch.optim.Optimizer, steps: int, used: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        at = torch.randint(0, used, (64,))
        nn.functional.cross_entropy(model.head(model.wte(at)), at % 10).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("budget", "used"), each_value([{"relative_error": 0.3}, {"relative_error": 0.05}, {"terms": 1000}], [30, 100])
)
def test_rows_without_lookups_keep_their_values_and_the_others_their_progress(tmp_path, used, budget):
    """By element: of one tensor, some values move and some do not."""
    rows, kept = [], []
    for step in range(RESTORES + 1):
        model = Lookup()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
        with sp.CheckpointManager(tmp_path, scheme=sp.Fisher(**budget), keyframe_every=3) as manager, Silent():
            if step:
                manager.restore(model=model, optimizer=optimizer)
                rows.append(bits(model.wte.weight[used:].detach()))
            for i in range(2):  # of each generation, chance is the same
                looked_up(model, optimizer, 3, used)
                report = manager.save(2 * step + i, model=model, optimizer=optimizer)
                kept.append(report.retention)
    assert len({*rows}) == 1
    assert min(one for one in kept if one is not None) > 0.7
    assert sum(one for one in kept if one is not None) / (len(kept) - 1) == pytest.approx(1, abs=0.12)


def test_moments_of_a_layer_that_is_not_trained_any_more_stay_as_they_are(tmp_path):
    run = Run(steps=3)
    found = []
    for step in range(RESTORES + 1):
        with (
            sp.CheckpointManager(tmp_path, scheme=sp.Fisher(relative_error=0.3), keyframe_every=3) as manager,
            Silent(),
        ):
            if step:
                run = Run()
                manager.restore(**run.parts)
                state = run.optimizer.state[run.model.body[3].weight]
                found.append((bits(state["exp_avg"]), bits(state["exp_avg_sq"])))
                run.model.body[3].requires_grad_(False)
            run.steps(2 if step else 0)
            manager.save(step, **run.parts)
    assert all(one == found[0] for one in found)


def test_a_weight_that_is_trained_again_after_a_restore_is_coded_again(tmp_path):
    make = SCHEMES["fisher"]
    with Silent():
        through_a_manager(tmp_path, make)
        with sp.CheckpointManager(tmp_path, scheme=make()) as manager:
            run = FrozenRun()
            manager.restore(**run.parts)
            before = copy.deepcopy(run.model.state_dict())
            with torch.no_grad():
                for parameter in run.model.backbone.parameters():
                    parameter.add_(torch.randn_like(parameter) * parameter.std())
            manager.save(99, **run.parts)
            now = copy.deepcopy(run.model.state_dict())
            manager.restore(**run.parts)
    for name, x in run.model.state_dict().items():
        if name.startswith("backbone") and x.dim() > 1:
            assert (x - now[name]).norm() < 0.4 * (before[name] - now[name]).norm()


@pytest.mark.parametrize("background", [False, True])
def test_only_an_infinity_that_no_training_keeps_constant_warns_of_divergence(background: bool) -> None:
    run = Run(steps=2)
    run.model.mask = nn.Parameter(torch.full((80, 80), -math.inf).triu(1), requires_grad=False)
    diverged = "weights with nan or infinite values stay exact: model/mask"

    def warned(step: int) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            manager.save(step, **run.parts)
            manager.wait()
        return any(str(warning.message).startswith(diverged) for warning in caught)

    scheme = sp.Fisher(relative_error=0.1)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme, background=background) as manager:
        assert [warned(step) for step in (1, 2)] == [False, False]
        run.model.mask.data[3, 3] = math.nan
        assert [warned(step) for step in (3, 4)] == [True, False]
        run.model.mask.requires_grad_()
        assert warned(5)
