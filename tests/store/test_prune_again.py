"""A prune that writes chains again: older checkpoints become weights only, and deltas let go of what no rule keeps."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stores import PLACES_AND_BUCKET, flip, payloads, place, state, stored_bytes, weights_only
from helpers.strategies import difference
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning, MismatchError, NotFoundError, VersionError
from shrinkpoint.storage import Storage
from shrinkpoint.store import Keep, Store
from shrinkpoint.store import manifest as manifests
from shrinkpoint.store.retention import PrunePlan


@pytest.fixture(params=PLACES_AND_BUCKET)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return place(request.param, tmp_path / "store")


def saved(storage: Storage, *steps: int, every: int = 4, make: Callable[[int], Any] = state) -> Store:
    store = Store(storage, keyframe_every=every, threads=1)
    for step in steps:
        store.save(step, make(step), metrics={"val_loss": 10.0 - step})
    return store


def pruned(store: Store, keep: Keep, **options: bool) -> PrunePlan:
    """Prune, after a dry run has promised what it then does."""
    promised, before = store.prune(keep, **options), stored_bytes(store.storage)
    keys = store.storage.list()
    assert store.prune(keep, **options) == promised
    assert store.storage.list() == keys
    plan = store.prune(keep, dry_run=False, **options)
    if getattr(store.storage, "lock_expires", False):  # names of files have random numbers, which compress by chance
        assert abs(plan.bytes - promised.bytes) <= 8 * len(promised.rewrite + promised.weights_only)
        promised = replace(promised, bytes=plan.bytes, written=plan.written)
    assert plan == promised
    if not store.storage.describe().startswith("memory:") or not any("/bases/" in key for key in keys):
        assert plan.bytes == before - stored_bytes(store.storage)
    return plan


def assert_holds(store: Store, full: list[int], light: list[int]) -> None:
    """These steps load bit for bit, some without moments, and nothing is left over."""
    assert list(store.steps()) == sorted(full + light)
    for step in store.steps():
        assert store.manifest(step).weights_only == (step in light)
        expected = weights_only(step) if step in light else state(step)
        assert difference(store.load(step, keep=False), expected) is None
    assert all(finding.loads for finding in store.verify(deep=True))  # a step that was saved again is not what it was
    assert store.scan().orphans() == []


def test_older_checkpoints_become_weights_only_and_the_bytes_promised_are_freed(storage: Storage) -> None:
    store = saved(storage, *range(1, 9))
    before = {manifest.step: manifest for manifest in store.list()}
    plan = pruned(store, Keep(moments_last=2))
    assert (plan.delete, plan.weights_only, plan.rewrite) == ((), (1, 2, 3, 4, 5, 6), tuple(range(1, 9)))
    assert plan.bytes > 0
    assert_holds(store, [7, 8], [1, 2, 3, 4, 5, 6])
    for manifest in store.list():
        old = before[manifest.step]
        assert (manifest.id, manifest.created, manifest.metrics) == (old.id, old.created, old.metrics)
        assert (manifest.raw_bytes < old.raw_bytes) == manifest.weights_only
    assert [manifest.depth for manifest in store.list()] == [0, 1, 2, 3, 0, 1, 0, 1]
    again = pruned(store, Keep(moments_last=2))
    assert (again.keys, again.rewrite, again.bytes) == ((), (), 0)


def test_the_next_delta_goes_on_after_its_parent_was_written_again(storage: Storage) -> None:
    store = saved(storage, 1, 2, 3, every=9)
    assert pruned(store, Keep(moments_last=1)).rewrite == (1, 2, 3)
    store.save(4, state(4))
    assert [base.step for base in store.manifest(4).bases] == [3]
    assert_holds(store, [3, 4], [1, 2])


def test_no_delta_is_made_against_moments_that_another_process_deleted(storage: Storage) -> None:
    store = saved(storage, 1, 2, 3, every=9)
    store.close()
    trained = Store(storage, keyframe_every=9, threads=1)
    trained.load(2)  # and trains on from there
    with Store(storage, threads=1) as other:
        other.prune(Keep(moments_last=1), dry_run=False)
    trained.save(4, state(4))
    trained.close()
    assert_holds(Store(storage), [3, 4], [1, 2])


def test_a_compacting_prune_deletes_what_only_deltas_needed(storage: Storage) -> None:
    store = saved(storage, *range(1, 8), every=9)
    plan = store.prune(Keep(last=1, every=3))
    assert (plan.delete, plan.bases) == ((), (1, 2, 4, 5))
    plan = pruned(store, Keep(last=1, every=3), compact=True)
    assert (plan.delete, plan.keep, plan.rewrite, plan.bases) == ((1, 2, 4, 5), (3, 6, 7), (3, 6, 7), ())
    assert [manifest.depth for manifest in store.list()] == [0, 1, 2]
    assert_holds(store, [3, 6, 7], [])


def test_a_chain_that_would_not_get_smaller_stays_as_it_is(storage: Storage) -> None:
    store = saved(storage, 1, 2, every=9)
    store.save(3, {**state(3), "noise": torch.randint(0, 256, (99_000,), dtype=torch.uint8)})
    store.save(4, {**store.load(3), "seed": 4})
    store.forget(2)
    store.forget(1)
    first = pruned(store, Keep(), compact=True)
    assert first.delete == (1, 2)  # of a few kB, for a keyframe's few bytes more
    store.save(5, {**store.load(4), "seed": 5})
    store.forget(3)
    plan = pruned(store, Keep(), compact=True)  # all of the noise would be written again, to delete a copy of it
    assert plan.delete == (3,)
    assert store.verify(deep=True) == []


def test_moments_that_only_a_longer_chain_would_lose_stay(storage: Storage) -> None:
    """Residuals of codes cannot be kept without their parent, and exact values would take more than the moments."""
    scheme = sp.LCCheckpoint(bits=3)
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()

    def make(step: int) -> dict[str, Any]:
        noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        moments = {0: {"exp_avg": torch.full((64, 64), float(step))}}
        return {
            "model": {"w.weight": weight + (step - 1) * 1e-3 * noise},
            "optimizer": {"state": moments, "param_groups": [{"params": [0]}]},
        }

    store = Store(storage, keyframe_every=9, threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        for step in (1, 2, 3):
            store.save(step, make(step), scheme=scheme)
    before = [store.load(step) for step in (1, 2, 3)]
    plan = pruned(store, Keep(moments_last=1))
    assert plan.rewrite == ()
    assert any("frees nothing" in reason for reason in plan.reasons[1])
    assert difference([store.load(step) for step in (1, 2, 3)], before) is None


@pytest.mark.parametrize("scheme", ["fisher(relative_error=.2)", "lc-checkpoint(bits=2)", "excp", "scar"])
def test_weights_of_lossy_checkpoints_keep_their_bits(scheme: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 50))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    store = Store(tmp_path, keyframe_every=4, threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        for step in range(1, 8):
            model(torch.randn(8, 40)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            store.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, scheme=scheme)
    before = {step: store.load(step, keep=False) for step in store.steps()}
    losses = {manifest.step: manifest.loss for manifest in store.list()}
    for keep in (Keep(every=2, moments_last=2), Keep(last=2, moments_last=1)):
        plan = pruned(store, keep, compact=True)
        for step in store.steps():
            expected = before[step]
            if store.manifest(step).weights_only:
                expected["optimizer"]["state"] = {}
            assert difference(store.load(step, keep=False), expected) is None
            assert store.manifest(step).loss == losses[step]
        assert store.verify(deep=True) == []
    assert plan.keep == (6, 7)


def test_a_chain_that_does_not_load_is_left_and_said(storage: Storage) -> None:
    store = saved(storage, *range(1, 9))
    data = storage.get(payloads(storage, 2)[0])
    while key := next((key for key in storage.list() if storage.get(key) == data), None):
        flip(storage, key)  # in memory, a link is a copy
    plan = store.prune(Keep(moments_last=1), dry_run=False)
    assert plan.weights_only == (5, 6, 7)
    assert "does not load" in plan.reasons[1][-1]
    for step in (1, 5, 6, 7):
        assert difference(store.load(step), (state if step == 1 else weights_only)(step)) is None


def test_a_model_without_an_optimizer_is_not_written_again(storage: Storage) -> None:
    store = saved(storage, 1, 2, 3, make=lambda seed: {"model": state(seed)["model"]})
    plan = pruned(store, Keep(moments_last=1))
    assert (plan.rewrite, plan.keys) == ((), ())


def test_masters_and_all_outside_of_the_optimizer_stay(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        master = {"master_param": torch.full((9,), 0.5 + seed), "exp_avg": torch.arange(3000).sin()}
        group = {"params": [0], "lr": torch.tensor(0.5)}
        inner = {"state": {0: master, 1: {"step": torch.tensor(3.0)}}, "param_groups": [group]}
        return {"nested": [({"opt": inner},)], "ema": {"w": torch.ones(9)}, "rng": torch.arange(5), "step": seed}

    store = saved(place("local", tmp_path), 1, 2, every=1, make=make)
    store.prune(Keep(moments_last=1), dry_run=False)
    expected = make(1)
    optimizer = expected["nested"][0][0]["opt"]
    optimizer["state"] = {0: {"master_param": optimizer["state"][0]["master_param"]}}
    assert difference(store.load(1), expected) is None
    assert difference(store.load(2), make(2)) is None


def test_restoring_passes_over_weights_only_unless_they_will_do(storage: Storage) -> None:
    store = saved(storage, 1, 2, 3)
    store.prune(Keep(moments_last=1), dry_run=False)
    flip(storage, payloads(storage, 3)[0])
    with pytest.raises(NotFoundError, match=r"step 2: weights only: retention has deleted"):
        store.restore()
    restored = store.restore(weights_only=True)
    assert (restored.step, len(restored.skipped)) == (2, 1)
    assert difference(restored.state, weights_only(2)) is None
    error = store.weights_only_error(store.manifest(2))
    assert isinstance(error, MismatchError)
    assert "one of 3" in str(error)


def test_a_release_that_does_not_know_weights_only_reads_them_as_newer(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(storage, 1, 2, 3)
    store.prune(Keep(moments_last=1), dry_run=False)
    monkeypatch.setattr(manifests, "WEIGHTS_ONLY_FORMAT", 4)  # so that 2 is unknown
    old = Store(storage)
    assert list(old.steps()) == [3]
    with pytest.raises(VersionError, match="format 2"):
        old.load(2)


@settings(deadline=None, max_examples=15)
@given(
    kind=st.sampled_from(["local", "linkless"]),
    every=st.sampled_from([None, 2, 4]),
    steps=st.lists(st.integers(1, 12), min_size=2, max_size=9),
    branches=st.sets(st.integers(0, 9), max_size=2),
    forgotten=st.sets(st.integers(1, 12), max_size=2),
    keeps=st.lists(
        st.builds(
            Keep,
            last=st.none() | st.integers(1, 4),
            every=st.none() | st.integers(2, 4),
            best=st.none() | st.integers(1, 2),
            moments_last=st.none() | st.integers(1, 4),
        ),
        min_size=1,
        max_size=2,
    ),
    compact=st.booleans(),
)
def test_any_chains_under_any_rules(kind, every, steps, branches, forgotten, keeps, compact) -> None:
    """Everything that is listed loads bit for bit, and what was promised was freed."""
    with tempfile.TemporaryDirectory() as folder:
        store = saved(place(kind, Path(folder)), every=every)
        for index, step in enumerate(steps):
            if index in branches and store.steps():
                store.load(store.steps()[0])  # the next delta is made against the oldest
            store.save(step, state(step), metrics={"val_loss": float(step % 5)})
        for step in forgotten & set(steps[:-1]):
            if step != store.steps()[-1]:
                store.forget(step)
        light: set[int] = set()
        for keep in keeps:
            plan = pruned(store, keep, compact=compact)
            light |= set(plan.weights_only)
            shown = list(store.steps())
            assert set(shown) <= set(plan.keep)
            assert_holds(
                store, [step for step in shown if step not in light], [step for step in shown if step in light]
            )
