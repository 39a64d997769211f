"""Schemes that track a reader's state, in a training loop: restored, merged, in the background and over restarts."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from helpers.small_training import Run, Silent, unchanged
from helpers.strategies import difference
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning

SCHEMES = {
    "lc": lambda: sp.LCCheckpoint(),
    "lc paper": lambda: sp.LCCheckpoint(paper=True),
    "lc fine": lambda: sp.LCCheckpoint(bits=8, optimizer="lossy"),
    "scar": lambda: sp.SCAR(),
    "topn": lambda: sp.TOPN(),
    "scar in turn": lambda: sp.SCAR(order="round robin"),
    "excp": lambda: sp.ExCP(),
    "excp released": lambda: sp.ExCP(rule="released", paper=True, paper_fp16=True),
}
WEIGHTS = ("body.0.weight", "body.3.weight")


def weights_of(model) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def restored(where, step=None, make=Run) -> Run:
    run = make()
    with sp.CheckpointManager(where) as manager:
        assert manager.restore(step, **run.parts) is not None
    return run


@lru_cache
def plain(steps: int) -> float:
    return Run(steps=steps).loss()


@pytest.mark.parametrize(("name", "background"), [(name, name in ("lc fine", "excp")) for name in SCHEMES])
def test_what_was_held_is_what_is_restored_and_what_is_left_when_deltas_are_merged(tmp_path, name, background):
    run, seen, states = Run(steps=10), {}, {}
    with (
        sp.CheckpointManager(tmp_path, scheme=SCHEMES[name](), keyframe_every=4, background=background) as manager,
        Silent(),
    ):
        for step in range(6):
            before, addresses = run.photo(), run.addresses()
            manager.save(step, **run.parts)
            manager.wait()
            assert unchanged(run, before) and run.addresses() == addresses
            seen[step] = {key: x.clone() for key, x in manager.store.reference.tensors.items()}
            states[step] = weights_of(run.model)
            run.steps(4)
    store = sp.Store(tmp_path)
    assert [manifest.depth for manifest in store.list()] == [0, 1, 2, 3, 0, 1]
    for step in seen:
        model = restored(tmp_path, step).model.state_dict()
        assert difference({key: seen[step][f"model/{key}"] for key in model}, dict(model)) is None
        for key, x in states[step].items():
            assert torch.equal(x, model[key]) or (key in WEIGHTS and step not in (0, 4))
    whole = {step: store.load(step, keep=False) for step in seen}
    store.forget(2)
    assert len(store.compact()) == 1 and len(store.compact(5)) == 1
    assert [manifest.depth for manifest in store.list()] == [0, 1, 2, 0, 0]
    assert all(difference(store.load(step, keep=False), whole[step]) is None for step in (0, 1, 3, 4, 5))
    assert store.verify(deep=True) == []


@pytest.mark.parametrize("name", ["lc", "scar", "excp"])
def test_a_save_after_a_restore_tracks_what_was_restored(tmp_path, name):
    """Every round in a process of its own, as after a failure; the error stays where it was."""
    errors = []
    with Silent():
        for count in range(5):
            run = Run(steps=10)
            with sp.CheckpointManager(tmp_path, scheme=SCHEMES[name]()) as manager:
                if count:
                    assert manager.restore(**run.parts).report.lossy_restores == max(0, count - 1) + (name == "excp")
                report = manager.save(count, **run.steps(5).parts)
                assert report.keyframe is (count == 0)
            kept = restored(tmp_path).model.state_dict()
            errors.append(sum(float((run.model.state_dict()[key] - kept[key]).norm()) for key in WEIGHTS))
    assert errors[0] == 0 and 0 < errors[-1] < 1.5 * errors[1]


def test_round_robin_gets_round_although_every_save_is_by_another_process(tmp_path):
    """What is written is what differs from the checkpoint before; all values move in every step."""
    run, places = Run(steps=20), []
    before: dict[str, Tensor] = {}
    for count in range(6):
        with sp.CheckpointManager(tmp_path, scheme=sp.SCAR(fraction=1 / 5, order="round robin")) as manager, Silent():
            manager.restore(optimizer=run.optimizer)
            manager.save(count, **run.steps(5).parts)
        now = dict(sp.Store(tmp_path).load(count)["model"])
        if count:
            places.append(torch.cat([(now[key] != before[key]).reshape(-1) for key in WEIGHTS]))
        before = now
    written = torch.stack(places).sum(0)
    assert int(written.max()) <= 2 and float((written == 1).float().mean()) > 0.99


@pytest.mark.parametrize(("name", "least"), [("lc", 7), ("lc paper", 7), ("scar", 4), ("topn", 10), ("excp", 4)])
def test_a_report_says_what_was_lost_and_what_it_gained(tmp_path, name, least):
    run, scheme = Run(steps=30), SCHEMES[name]()
    with sp.CheckpointManager(tmp_path, scheme=scheme) as manager, Silent():
        first, *later = [manager.save(step, **run.steps(10).parts) for step in range(4)]
    assert first.retention is None and first.weights_ratio < 2
    for report, manifest in zip(later[1:], sp.Store(tmp_path).list()[2:], strict=True):
        assert report.weights_ratio > least and 0 < report.retention < 1.5
        assert report.loss_report == manifest.loss and manifest.is_lossy and report.loss_report["scheme"] == scheme.id
        assert report.loss_report["chosen"] == scheme.settings == manifest.loss["chosen"]
        assert (report.ratio > 4) is (name == "excp")  # of the others two thirds of the state are moments, exact


def test_little_written_is_little_kept_and_gives_a_warning(tmp_path):
    run = Run(steps=30)
    with sp.CheckpointManager(tmp_path, scheme=sp.TOPN(fraction=0.001)) as manager:
        manager.save(1, **run.parts)
        with pytest.warns(LossWarning, match="progress since the one before"):
            report = [manager.save(step, **run.steps(10).parts) for step in (2, 3)][-1]
    assert report.retention < 0.2


@pytest.mark.parametrize("mode", ["reset", "lossy"])
def test_the_optimizer_is_a_matter_of_its_own(tmp_path, mode):
    run = Run(steps=30)
    with sp.CheckpointManager(tmp_path, scheme=sp.LCCheckpoint(optimizer=mode)) as manager:
        reports = [manager.save(step, **run.steps(10).parts) for step in range(3)]
        assert reports[0].loss_report["optimizer"] == mode and reports[2].ratio > 3.5
        other = Run()
        assert manager.restore(**other.parts).report.lossy_restores == 1
    for key, slot in other.optimizer.state.items():
        assert bool(slot["exp_avg"].any()) is (mode == "lossy") and key.shape == slot["exp_avg"].shape


@pytest.mark.parametrize("name", ["lc", "excp"])
def test_a_run_that_is_restored_after_every_save_gets_where_it_would_have_got(tmp_path, name):
    """Within a fifth of the loss of a run that was never touched."""
    run = Run(steps=30)
    with Silent():
        for count in range(5):
            with sp.CheckpointManager(tmp_path, scheme=SCHEMES[name]()) as manager:
                if count:
                    run = Run()
                    manager.restore(**run.parts)
                manager.save(count, **run.steps(20).parts)
        run = restored(tmp_path)
    assert run.loss() < 1.2 * plain(130) < plain(30), (run.loss(), plain(130), plain(30))
