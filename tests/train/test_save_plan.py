"""States that are planned for where they are: the copy that is written has no values of what is on lattices."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.small_training import Run
from helpers.strategies import same

import shrinkpoint as sp
from shrinkpoint.schemes import optimizer_state, plan
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.tensors import flat_state
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.train import background


def scheme(run: Run, *, measured: bool) -> sp.Fisher:
    return sp.Fisher(budget="5%", evaluate=run.evaluate) if measured else sp.Fisher(relative_error=0.2)


def chain(folder: Path, *, measured: bool, in_background: bool) -> list[bytes]:
    """The payloads of a run of five saves with a resume after the third."""
    run, reports = Run(steps=3), []
    for part in (range(3), range(3, 5)):
        with sp.CheckpointManager(folder, scheme=scheme(run, measured=measured), background=in_background) as manager:
            if part.start:
                manager.restore(**run.parts, rng=False)
            for step in part:
                run.steps(2)
                manager.save(step, **run.parts, rng=False)
                reports.append(manager.wait() if in_background else manager._last_report)
    assert reports[1].retention is not None and [report.keyframe for report in reports[:3]] == [True, False, False]
    return [path.read_bytes() for path in sorted(folder.rglob("rank-*.safetensors"))]


@pytest.fixture
def elsewhere(monkeypatch):
    """Every state counts as one on an accelerator; the names of which copies have no values are collected."""
    names: list[frozenset[str]] = []

    def snapshot(state, *, reuse=None, without=frozenset()):
        names.append(without)
        return flat_state.snapshot(state, reuse=reuse, without=without)

    monkeypatch.setattr(FlatState, "is_on_cpu", property(lambda self: False))
    monkeypatch.setattr(background, "snapshot", snapshot)
    return names


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("measured", [False, True])
def test_codes_alone_are_copied_from_an_accelerator_and_the_files_are_the_same(
    tmp_path, elsewhere, monkeypatch, measured, in_background
):
    torch.manual_seed(0)
    moved = chain(tmp_path / "moved", measured=measured, in_background=in_background)
    assert len(elsewhere) == 5
    for names in elsewhere:
        assert any(name.endswith("weight") for name in names) and any(name.endswith("exp_avg") for name in names)
    monkeypatch.undo()
    torch.manual_seed(0)
    assert chain(tmp_path / "here", measured=measured, in_background=False) == moved


def test_a_plan_that_measures_saves_the_copy_of_what_it_has_quantized(monkeypatch):
    """In the background, and in host memory."""
    copies = []

    def snapshot(state, *, reuse=None, without=frozenset()):
        copies.append(flat_state.snapshot(state, reuse=reuse, without=without))
        return copies[-1]

    monkeypatch.setattr(background, "snapshot", snapshot)
    run = Run(steps=3)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme(run, measured=True), background=True) as manager:
        for step in range(3):
            manager.save(step, **run.steps(1).parts, rng=False)
            expected = run.photo()
        manager.wait()
        state = manager.store.load()
    for copy in copies:
        held = sum(tensor.nbytes for tensor in copy.tensors.values() if not tensor.is_meta)
        assert held < 0.1 * copy.nbytes
    assert not same(state["model"], expected["model"]) and state["model"].keys() == expected["model"].keys()


def test_exact_tensors_are_copied_whatever_is_left_out():
    run = Run(steps=1)
    flat = flat_state.flatten({"model": run.model.state_dict()})
    first = next(iter(flat.tensors))
    copy = flat_state.snapshot(flat, without={first})
    again = flat_state.snapshot(flat, reuse=copy.tensors)
    assert copy.tensors[first].is_meta and copy.tensors[first].shape == flat.tensors[first].shape
    for name, tensor in flat.tensors.items():
        assert torch.equal(again.tensors[name], tensor) and again.tensors[name].data_ptr() != tensor.data_ptr()
        assert name == first or again.tensors[name].data_ptr() == copy.tensors[name].data_ptr()


def test_moments_are_quantized_beside_the_loop_where_a_search_measures_weights(tmp_path, monkeypatch):
    threads = []

    def quantize_moments(state, stats):
        threads.append(threading.current_thread())
        return optimizer_state.quantize_moments(state, stats)

    stand_in = SimpleNamespace(**vars(optimizer_state) | {"quantize_moments": quantize_moments})
    monkeypatch.setattr(plan, "optimizer_state", stand_in)
    payloads = []
    for in_background in (False, True):
        torch.manual_seed(0)
        run, folder = Run(steps=3), tmp_path / str(in_background)
        search = sp.Inshrinkerator(threshold=0.2, evaluate=run.evaluate, optimizer="lossy")
        with sp.CheckpointManager(folder, scheme=search, background=in_background) as manager:
            for step in range(2):
                manager.save(step, **run.steps(2).parts, rng=False)
                manager.wait()
        payloads.append([path.read_bytes() for path in sorted(folder.rglob("rank-*.safetensors"))])
    assert payloads[0] == payloads[1] and len(payloads[0]) == 2
    assert [thread is threading.main_thread() for thread in threads] == [True, True, False, False]
