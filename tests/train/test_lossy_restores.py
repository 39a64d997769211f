"""Restored again and again: what is kept of the progress is measured, and a run gets where it would have got."""

from __future__ import annotations

import warnings
from functools import lru_cache

import pytest
from helpers.small_training import Run, Silent

import shrinkpoint as sp
from shrinkpoint.errors import UnmeasuredLossWarning

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
