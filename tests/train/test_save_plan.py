"""States that are planned for where they are: the copy that is written has no values of what is on lattices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.parameters import each_value
from helpers.small_training import Run
from helpers.strategies import same

import shrinkpoint as sp
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.tensors import flat_state
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.train import background

SCHEMES: dict[str, Callable[[Run], Any]] = {
    "fisher, measured": lambda run: sp.Fisher(budget="5%", evaluate=run.evaluate),
    "fisher": lambda run: sp.Fisher(relative_error=0.2),
    "lossless": lambda run: "lossless",
}


def chain(folder: Path, kind: str, *, in_background: bool, make: Callable[..., Run] = Run) -> list[bytes]:
    """The payloads of a run of five saves with a resume after the third."""
    run, reports = make(steps=3), []
    for part in (range(3), range(3, 5)):
        with sp.CheckpointManager(folder, scheme=SCHEMES[kind](run), background=in_background) as manager:
            if part.start:
                manager.restore(**run.parts, rng=False)
            for step in part:
                manager.save(step, **run.steps(2).parts, rng=False)
                run.steps(1)  # while the state is on its way to the host
                reports.append(manager.wait() if in_background else manager._last_report)
    assert (reports[1].retention is None) == (kind == "lossless")
    assert [report.keyframe for report in reports[:3]] == [True, False, False]
    return [path.read_bytes() for path in sorted(folder.rglob("rank-*.safetensors"))]


@pytest.fixture
def elsewhere(monkeypatch):
    """Every state counts as one on an accelerator; the names of which copies have no values are collected."""
    names: list[frozenset[str]] = []

    def snapshot(state, *, reuse=None, without=frozenset(), wait=True):
        names.append(without)
        return flat_state.snapshot(state, reuse=reuse, without=without)

    monkeypatch.setattr(FlatState, "is_on_cpu", property(lambda self: False))
    monkeypatch.setattr(background, "snapshot", snapshot)
    return names


@pytest.mark.parametrize(("kind", "in_background", "free_bytes"), each_value(SCHEMES, [False, True], [0, 1 << 40]))
def test_codes_alone_are_copied_from_an_accelerator_and_the_files_are_the_same(
    tmp_path, elsewhere, monkeypatch, kind, in_background, free_bytes
):
    monkeypatch.setattr(flat_state, "_free_bytes", lambda device: free_bytes)
    torch.manual_seed(0)
    moved = chain(tmp_path / "moved", kind, in_background=in_background)
    assert len(elsewhere) == 5
    for names in elsewhere if kind != "lossless" else ():
        assert any(name.endswith("weight") for name in names) and any(name.endswith("exp_avg") for name in names)
    monkeypatch.undo()
    torch.manual_seed(0)
    assert chain(tmp_path / "here", kind, in_background=False) == moved


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("free_bytes", [0, 1 << 40])
@pytest.mark.parametrize("kind", ["fisher", "lossless"])
def test_the_state_on_a_gpu_is_saved_as_it_was_whatever_is_enqueued_afterwards(tmp_path, monkeypatch, kind, free_bytes):
    monkeypatch.setattr(flat_state, "_free_bytes", lambda device: free_bytes)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    moved, here = (
        sp.CheckpointManager(tmp_path / name, scheme=SCHEMES[kind](Run()), background=name == "moved")
        for name in ("moved", "here")
    )
    with moved, here:
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            still = copy.deepcopy(state)
            moved.save(
                step, rng=False, **{name: SimpleNamespace(state_dict=lambda x=x: x) for name, x in state.items()}
            )
            for parameter in model.parameters():  # at once, and for long
                for _ in range(20):
                    parameter.data.mul_(0.9).add_(1)
                optimizer.state[parameter]["exp_avg"].zero_()
            here.save(step, rng=False, **{name: SimpleNamespace(state_dict=lambda x=x: x) for name, x in still.items()})
            model.load_state_dict(still["model"])
            optimizer.load_state_dict(still["optimizer"])
    for step in range(4):
        assert same(sp.Store(tmp_path / "moved").load(step), sp.Store(tmp_path / "here").load(step))


def test_a_plan_that_measures_saves_the_copy_of_what_it_has_quantized(monkeypatch):
    """In the background, and in host memory."""
    copies = []

    def snapshot(state, *, reuse=None, without=frozenset(), wait=True):
        copies.append(flat_state.snapshot(state, reuse=reuse, without=without))
        return copies[-1]

    monkeypatch.setattr(background, "snapshot", snapshot)
    run = Run(steps=3)
    with sp.CheckpointManager(MemoryStorage(), scheme=SCHEMES["fisher, measured"](run), background=True) as manager:
        for step in range(3):
            manager.save(step, **run.steps(1).parts, rng=False)
            expected = run.photo()
        manager.wait()
        state = manager.store.load()
    for host_copy in copies:
        held = sum(tensor.nbytes for tensor in host_copy.tensors.values() if not tensor.is_meta)
        assert held < 0.1 * host_copy.nbytes
    assert not same(state["model"], expected["model"]) and state["model"].keys() == expected["model"].keys()
