"""Restored again and again: what is kept of the progress is measured, and a run gets where it would have got."""

from __future__ import annotations

import warnings
from functools import lru_cache

import pytest
import torch
from helpers.small_training import Run, Silent

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning, UnmeasuredLossWarning

FINE = {"bins": 32, "embedding_bins": 32, "prune": 0.0, "protect": 0.005}
COARSE = {"bins": 4, "embedding_bins": 16, "prune": 0.5, "protect": 0.0005}


def relay(where, scheme, rounds: int, steps: int, lr: float = 3e-3):
    """Train and save, and rebuild all and restore after every save; the last run, and the reports."""
    reports = []
    run = Run(steps=30, lr=lr)
    for count in range(rounds):
        with sp.CheckpointManager(where, scheme=scheme(run)) as manager:
            if count:
                assert manager.restore(**run.parts).report.lossy_restores == count
            run.steps(steps)
            reports.append(manager.save(count, **run.parts))
        run = Run(lr=lr)
    with sp.CheckpointManager(where) as manager:
        manager.restore(**run.parts)
    return run, reports


def fixed(config, **more):
    return lambda run: sp.Inshrinkerator(config=config, **more)


@lru_cache
def whole(steps: int) -> float:
    return Run(steps=steps).loss()


def test_restores_are_counted_and_every_save_says_what_it_kept(tmp_path):
    with Silent():
        _, reports = relay(tmp_path, fixed(FINE), 5, 5)
    manifests = sp.Store(tmp_path).list()
    assert [manifest.lossy_restores for manifest in manifests] == [0, 1, 2, 3, 4]
    assert all(manifest.is_lossy for manifest in manifests)
    assert reports[0].retention is None and all(0.2 < report.retention < 1.5 for report in reports[1:])


def test_with_few_bins_and_tiny_steps_lost_progress_gives_a_warning(tmp_path):
    with pytest.warns(LossWarning, match="progress since the one before"):
        _, reports = relay(tmp_path, fixed(COARSE, dither=False), 3, 1, lr=1e-5)
    assert all(report.retention < 0.7 for report in reports[1:])


@pytest.mark.parametrize(("config", "lr"), [(COARSE, 1e-4), (FINE, 1e-4), (FINE, 1e-5)])
def test_rounding_at_random_keeps_what_rounding_to_the_nearest_loses(tmp_path, config, lr):
    """In the mean over all weights; of a single one nothing can be said."""
    kept = {}
    for dither in (False, True):
        with Silent():
            _, reports = relay(tmp_path / str(dither), fixed(config, dither=dither), 5, 2, lr=lr)
        kept[dither] = sum(report.retention for report in reports[1:]) / 4
    assert kept[False] < 0.7 < kept[True] < 1.3


def test_with_large_steps_there_is_nothing_to_say(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UnmeasuredLossWarning)
        _, reports = relay(tmp_path, fixed(FINE), 4, 40, lr=1e-2)
    assert all(0.7 < report.retention < 1.3 for report in reports[1:])


def test_a_save_without_a_restore_is_compared_with_the_one_before(tmp_path):
    run = Run(steps=30)
    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(config=FINE)) as manager:
        retentions = [manager.save(step, **run.steps(20).parts).retention for step in range(4)]
        assert manager.save(4, **run.parts).retention is None  # nothing has moved
    assert retentions[0] is None and all(0.7 < retention < 1.5 for retention in retentions[1:])


def test_lossless_saves_have_nothing_to_compare(tmp_path):
    run = Run(steps=5)
    with sp.CheckpointManager(tmp_path) as manager:
        reports = [manager.save(step, **run.steps(2).parts) for step in range(2)]
    assert [report.retention for report in reports] == [None, None] and reports[0].loss_report is None


@pytest.mark.parametrize("background", [False, True])
def test_moments_that_are_lossy_take_no_part(tmp_path, background):
    runs = {mode: Run(steps=30) for mode in ("exact", "lossy")}
    found = {}
    for mode, run in runs.items():
        scheme = sp.Inshrinkerator(config=FINE, optimizer=mode)
        with sp.CheckpointManager(tmp_path / mode, scheme=scheme, background=background) as manager:
            manager.save(1, **run.parts)
            torch.manual_seed(5)
            manager.save(2, **run.steps(20).parts)
            found[mode] = manager.wait().retention
    assert found["lossy"] == pytest.approx(found["exact"], rel=1e-6)


def test_a_run_that_is_restored_after_every_save_gets_where_it_would_have_got(tmp_path):
    """Within 10% of the loss of a run that was never touched, after ten restores on the way."""
    with Silent():
        run, reports = relay(tmp_path, fixed(FINE), 10, 20)
    plain, start = whole(30 + 200), Run(steps=30).loss()
    assert run.loss() < 1.1 * plain < 0.8 * start, (run.loss(), plain, start)
    assert sum(report.retention for report in reports[1:]) / 9 > 0.7


def test_so_does_one_whose_settings_are_searched_for(tmp_path):
    def searched(run):
        return sp.Inshrinkerator(threshold=0.01, evaluate=lambda model: run_evaluate(model))

    run_evaluate = Run().evaluate
    with Silent():
        run, reports = relay(tmp_path, searched, 10, 20)
    plain = whole(30 + 200)
    assert run.loss() < 1.1 * plain, (run.loss(), plain)
    assert all(report.loss_report["degradation"] <= 0.01 or "fallback" in report.loss_report for report in reports)


def test_saving_what_was_just_restored_changes_nothing(tmp_path):
    run = Run(steps=30)
    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(config=COARSE)) as manager:
        manager.save(1, **run.parts)
    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(config=COARSE)) as manager:
        manager.restore(**run.parts)
        before = {name: x.clone() for name, x in run.model.state_dict().items()}
        report = manager.save(2, **run.parts)
        assert report.retention is None
        manager.restore(**run.parts)
    for name, x in run.model.state_dict().items():
        assert float((before[name] != x).float().mean()) < 0.002


@pytest.mark.parametrize("keyframe_every", [1, 3])
def test_chains_of_lossy_checkpoints_are_read_back_one_by_one(tmp_path, keyframe_every):
    run, seen = Run(steps=10), {}
    scheme = sp.Inshrinkerator(config=FINE, optimizer="lossy")
    with sp.CheckpointManager(tmp_path, scheme=scheme, keyframe_every=keyframe_every) as manager, Silent():
        for step in range(5):
            manager.save(step, **run.steps(5).parts)
            seen[step] = {name: x.clone() for name, x in manager.store.reference.tensors.items()}
    assert [manifest.depth for manifest in sp.Store(tmp_path).list()] == [step % keyframe_every for step in range(5)]
    for step, tensors in seen.items():
        other = Run()
        sp.CheckpointManager(tmp_path).restore(step, **other.parts)
        for name, x in other.model.state_dict().items():
            assert torch.equal(x, tensors[f"model/{name}"])
        assert torch.equal(other.optimizer.state[other.model.head.bias]["step"], torch.tensor(10.0 + 5 * (step + 1)))
    assert sp.Store(tmp_path).verify(deep=True) == []
