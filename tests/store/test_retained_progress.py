"""How much of training's progress a lossy checkpoint keeps, and that too little of it is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.codebooks import Rounding
from helpers.strategies import difference
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.errors import LossWarning
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import Store
from shrinkpoint.store.delta_base import MIN_RETENTION, retained_fraction


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return tensors


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 99), st.floats(-2, 2), st.sampled_from([torch.float32, torch.bfloat16]))
def test_it_is_the_share_of_the_step_that_was_written(seed, share, dtype):
    before, step, offset = (randn(50, seed=seed + i) for i in range(3))
    now = (before + step).to(dtype)
    moved = now.float() - before.to(dtype).float()
    kept = retained_fraction(of(w=before.to(dtype)), of(w=offset), of(w=now), of(w=offset + share * moved))
    assert kept == pytest.approx(share, abs=1e-5)


def test_an_exact_scheme_keeps_all_and_frozen_codes_nothing():
    before, now = of(w=randn(50), b=randn(5)), of(w=randn(50, seed=1), b=randn(5, seed=1))
    assert retained_fraction(before, before, now, now) == 1.0
    assert retained_fraction(before, of(w=randn(50), b=randn(5)), now, of(w=randn(50), b=randn(5))) == 0.0


def test_a_checkpoint_that_catches_up_has_more_than_all():
    zero, one = torch.zeros(3), torch.ones(3)
    assert retained_fraction(of(w=zero), of(w=-one), of(w=one), of(w=one)) == 2.0


def test_what_cannot_be_compared_is_left_out_and_nothing_left_is_none():
    x, y = randn(50), randn(50, seed=1)
    assert retained_fraction({}, {}, of(w=x), of(w=x)) is None
    assert retained_fraction(of(w=x), of(w=x), {}, {}) is None
    assert retained_fraction(of(w=x), of(w=x), of(w=x.reshape(5, 10)), of(w=x)) is None
    assert retained_fraction(of(w=x), of(w=x), of(w=x.clone()), of(w=y)) is None
    assert retained_fraction(of(w=x), of(w=x), of(w=x * torch.nan), of(w=y)) is None
    assert retained_fraction(of(w=x), of(w=x), of(w=y), of(w=y * torch.inf)) is None
    assert retained_fraction(of(w=x[:0]), of(w=x[:0]), of(w=x[:0]), of(w=x[:0])) is None
    assert retained_fraction(of(w=x), of(w=x), of(w=y, new=x), of(w=y, new=y)) == 1.0


def test_a_step_along_the_loss_counts_and_noise_across_it_does_not():
    before, now = torch.zeros(2), torch.tensor([1.0, 0.0])
    assert retained_fraction(of(w=before), of(w=before), of(w=now), of(w=torch.tensor([0.5, 9.0]))) == 0.5


def test_after_a_spike_that_was_rolled_back_what_counts_is_how_much_of_the_weights_is_stored():
    spike, now = of(w=torch.full((3,), 1e3)), of(w=torch.ones(3))
    for share in (0.0, 0.5, 1.0):
        assert retained_fraction(spike, spike, now, of(w=torch.full((3,), share))) == share


# in a store


def state(shift: float) -> dict[str, Any]:
    return {"model": {"w": randn(40, 30) * 0.1 + shift}, "other": torch.arange(600) + int(shift * 1000)}


def test_a_store_reports_what_the_next_checkpoint_keeps():
    store = Store(MemoryStorage())
    assert store.save(1, state(0.0), scheme=Rounding(bins=200)).retention is None
    kept = store.save(2, state(0.02), scheme=Rounding(bins=200)).retention
    assert kept == pytest.approx(1.0, abs=0.1)
    assert store.save(3, state(0.02), scheme=Rounding(bins=200)).retention is None  # nothing has moved


def test_a_lossless_store_has_nothing_to_report():
    store = Store(MemoryStorage())
    assert [store.save(step, state(step / 100)).retention for step in (1, 2, 3)] == [None] * 3


def test_after_exact_checkpoints_the_first_lossy_one_reports_too():
    store = Store(MemoryStorage())
    store.save(1, state(0.0))
    assert store.save(2, state(0.02), scheme=Rounding(bins=200)).retention == pytest.approx(1.0, abs=0.1)


def test_training_that_is_rounded_away_after_a_restore_is_said():
    """Restored weights lie on the centers: a small step leaves every one of them nearest to the same."""
    store, scheme = Store(MemoryStorage()), Rounding(bins=8)
    store.save(1, state(0.0), scheme=scheme)
    restored = store.restore().state
    restored["model"]["w"] += 0.001
    with pytest.warns(LossWarning, match="holds [01]% of the progress"):
        report = store.save(2, restored, scheme=scheme)
    assert report.retention is not None and report.retention < 0.02 < MIN_RETENTION
    restored["model"]["w"] += 0.001
    with pytest.warns(LossWarning):
        store.save(3, restored, scheme=scheme)


@pytest.mark.parametrize(
    ("movement", "more_bins"),
    [
        pytest.param(1e-5, 1, id="other centers, whose errors are 1000 times the movement and have no direction"),
        pytest.param(1e-8, 0, id="codes that stay: not one of 1200 weights is expected to reach another center"),
    ],
)
def test_a_movement_far_below_the_rounding_errors_is_not_judged_by_chance(movement: float, more_bins: int):
    store = Store(MemoryStorage())
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossWarning)
        for step in range(6):
            weight = randn(40, 30) * 0.1 + step * movement * randn(40, 30, seed=1)
            report = store.save(step, {"model": {"w": weight}}, scheme=Rounding(bins=20 + more_bins * step))
            assert report.retention is None


def test_a_share_that_may_be_low_by_chance_is_reported_without_a_warning():
    """40 weights that moved by less than a center's width: three standard errors are more than the whole share."""
    store = Store(MemoryStorage())
    store.save(1, {"model": {"w": randn(4, 10, seed=6) * 0.1}}, scheme=Rounding())
    moved = randn(4, 10, seed=6) * 0.1 + 0.01 * randn(4, 10, seed=106)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossWarning)
        retention = store.save(2, {"model": {"w": moved}}, scheme=Rounding()).retention
    assert retention is not None and retention < MIN_RETENTION


def test_movement_at_the_resolution_of_float32_is_not_judged_after_a_restore():
    """A learning rate that has fallen to nearly 0: restored weights lie on the centers, and stay there."""
    store, scheme = Store(MemoryStorage()), Rounding(bins=20)
    store.save(1, {"model": {"w": torch.linspace(0.05, 0.25, 1200).view(40, 30)}}, scheme=scheme)
    restored = store.restore().state
    restored["model"]["w"] *= 1 + 2**-23
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossWarning)
        assert store.save(2, restored, scheme=scheme).retention is None


def test_the_originals_are_compared_and_not_what_was_kept_of_them():
    """Two half steps: the first is rounded away, the second catches up with both."""
    store, scheme = Store(MemoryStorage()), Rounding(bins=2, width=1.0)
    half = [torch.full((200, 300), x) for x in (-0.04, -0.02, 0.02)]
    store.save(1, {"model": {"w": half[0]}}, scheme=scheme)
    with pytest.warns(LossWarning):
        assert store.save(2, {"model": {"w": half[1]}}, scheme=scheme).retention == 0.0
    assert store.save(3, {"model": {"w": half[2]}}, scheme=scheme).retention == pytest.approx(2.0 / 0.04)


def test_quantized_moments_are_no_progress():
    store = Store(MemoryStorage())
    scheme = Rounding(picks=("model/", "optimizer/"), bins=200, width=0.5)
    for step, shift in ((1, 0.0), (2, 0.05)):
        moment = torch.full((40, 30), 0.001 * (-1) ** step)  # moves, and is rounded away
        optimizer = {
            "state": {0: {"exp_avg": 400 * moment + 0.1, "exp_avg_sq": moment}},
            "param_groups": [{"params": [0]}],
        }
        report = store.save(step, {"model": {"w": state(shift)["model"]["w"]}, "optimizer": optimizer}, scheme=scheme)
    assert report.retention == pytest.approx(1.0, abs=0.1)


def test_a_warning_that_is_an_error_leaves_a_checkpoint_that_the_next_one_stands_on():
    store, scheme = Store(MemoryStorage()), Rounding(bins=8)
    store.save(1, state(0.0), scheme=scheme)
    restored = store.restore().state
    restored["model"]["w"] += 0.001
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LossWarning):
            store.save(2, restored, scheme=scheme)
    store.save(3, state(0.1), scheme=scheme)
    assert store.manifest(3).bases[-1].step == 2
    fresh = Store(store.storage)
    assert difference(fresh.load(3), scheme.expected(state(0.1))) is None


def test_a_state_of_other_shapes_is_not_compared():
    store, scheme = Store(MemoryStorage()), Rounding()
    store.save(1, {"model": {"w": randn(40, 30) * 0.1}}, scheme=scheme)
    assert store.save(2, {"model": {"w": randn(30, 40) * 0.1}}, scheme=scheme).retention is None
    assert store.save(3, {"model": {"v": randn(30, 40) * 0.1}}, scheme=scheme).retention is None
