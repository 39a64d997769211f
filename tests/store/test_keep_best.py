"""Keeping the best deletes nothing where nobody knows which is the best."""

from __future__ import annotations

import math
import warnings

import pytest
from helpers.parameters import each_value

import shrinkpoint as sp
from shrinkpoint.errors import PolicyError
from shrinkpoint.storage import MemoryStorage


def filled(metrics: list[dict[str, float]]) -> sp.Store:
    store = sp.Store(MemoryStorage(), keyframe_every=1)
    for step, one in enumerate(metrics, 1):
        store.save(step, {"a": step}, metrics=one)
    return store


@pytest.mark.parametrize(
    ("more", "dry_run", "metrics"),
    each_value([{}, {"last": 1}, {"every": 100}], [True, False], [{}, {"val_loss": 2.0}, {"valloss": math.nan}]),
)
def test_the_best_of_a_metric_that_nobody_recorded_is_an_error_and_nothing_goes(metrics, dry_run, more):
    store = filled([metrics] * 4)
    with pytest.raises(PolicyError, match=r"Keep\(metric=\): 'valloss', which no checkpoint has") as caught:
        store.prune(sp.Keep(best=1, metric="valloss", **more), dry_run=dry_run)
    assert store.steps() == [1, 2, 3, 4]
    assert ("'val_loss'" in caught.value.expected) is ("val_loss" in metrics)
    assert ("as nan" in caught.value.found) is ("valloss" in metrics)


def test_a_metric_of_forgotten_checkpoints_alone_is_one_that_nobody_recorded():
    store = filled([{"loss": 1.0}, {}, {}])
    store.forget(1)
    with pytest.raises(PolicyError, match="no checkpoint has"):
        store.prune(sp.Keep(best=1, metric="loss"), dry_run=False)
    assert store.steps() == [2, 3]


def test_of_a_metric_that_some_have_the_best_of_those_are_kept():
    store = filled([{}, {"loss": 1.0}, {"loss": 2.0}, {"loss": math.nan}, {}])
    store.prune(sp.Keep(best=1, metric="loss"), dry_run=False)
    assert store.steps() == [2, 5]  # the best, and the newest


def test_an_empty_store_is_pruned_by_any_rule():
    assert sp.Store(MemoryStorage()).prune(sp.Keep(best=1), dry_run=False).keys == ()


@pytest.mark.parametrize("background", [False, True])
def test_a_manager_deletes_nothing_while_nobody_knows_the_best_and_says_so_once(background):
    keep = sp.Keep(best=1, metric="loss", last=1)
    with sp.CheckpointManager(MemoryStorage(), keep=keep, keyframe_every=1, background=background) as manager:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(1, 5):
                manager.save(step, extra={"a": step})
            manager.wait()
        assert manager.store.steps() == [1, 2, 3, 4]
        texts = [str(one.message) for one in told]
        assert len(texts) == 1 and "no checkpoint is deleted" in texts[0] and "'loss'" in texts[0]
        assert told[0].filename == __file__  # the line that saved, whichever thread deletes
        manager.save(5, extra={"a": 5}, metrics={"loss": 3.0})
        manager.save(6, extra={"a": 6})
        manager.wait()
        assert manager.store.steps() == [5, 6]


@pytest.mark.parametrize("wrong", [3, "last", {"last": 3}, sp.Keep])
def test_what_is_no_rule_is_refused_before_anything_is_made(wrong, tmp_path):
    with pytest.raises(PolicyError, match=r"keep: .*Keep"):
        sp.CheckpointManager(tmp_path / "run", keep=wrong)
    assert not (tmp_path / "run").exists()
    with pytest.raises(PolicyError, match=r"keep: .*Keep"):
        filled([{}]).prune(wrong)
