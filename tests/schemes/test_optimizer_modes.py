"""What becomes of an optimizer's moments is what was asked for."""

from __future__ import annotations

import torch
from helpers.small_training import Run
from helpers.strategies import same

import shrinkpoint as sp
from shrinkpoint.schemes.plan import quantize_moments, zeroed_moments
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.store import SaveReport
from shrinkpoint.tensors.flat_state import flatten

CONFIG = {"bins": 16, "embedding_bins": 32, "prune": 0.1, "protect": 0.005}


def through(run: Run, where, **settings) -> tuple[Run, SaveReport]:
    """Another run, restored from a checkpoint of this one."""
    with sp.CheckpointManager(where, scheme=sp.Inshrinkerator(config=CONFIG, **settings)) as manager:
        report = manager.save(1, **run.parts)
    other = Run()
    assert sp.CheckpointManager(where).restore(**other.parts) is not None
    return other, report


def slots(run: Run):
    for state in run.optimizer.state_dict()["state"].values():
        yield from state.items()


def test_exact_moments_come_back_bit_by_bit_beside_lossy_weights(tmp_path):
    run = Run(steps=30)
    other, _ = through(run, tmp_path)
    assert same(run.optimizer.state_dict(), other.optimizer.state_dict())
    assert not same(run.model.state_dict(), other.model.state_dict())


def test_after_a_reset_an_optimizer_begins_anew(tmp_path):
    run = Run(steps=30)
    other, report = through(run, tmp_path, optimizer="reset")
    assert all(not value.any() for _, value in slots(other))
    groups = (one.optimizer.state_dict()["param_groups"] for one in (run, other))
    assert same(*groups)
    before = other.loss()
    assert other.steps(10).loss() < before * 1.5  # without the bias correction the first steps would be far too long
    assert all(value == 10 for name, value in slots(other) if name == "step")
    assert report.ratio > 4 and any(value.any() for _, value in slots(run))


def test_a_reset_knows_the_slots_of_other_optimizers():
    model = torch.nn.Linear(64, 64)
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, momentum=0.9),
    ):
        optimizer = make(model.parameters())
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        flat = flatten({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        fresh = dict(zeroed_moments(flat))
        assert {*fresh} == {name for name in flat.tensors if name.startswith("optimizer")}
        assert all(one.shape == flat.tensors[name].shape and not one.any() for name, one in fresh.items())


def test_lossy_moments_are_near_and_second_ones_never_vanish(tmp_path):
    run = Run(steps=30)
    other, report = through(run, tmp_path, optimizer="lossy")
    large = 0
    for (name, value), (_, found) in zip(slots(run), slots(other), strict=True):
        if name == "step" or value.numel() < 4096:
            assert torch.equal(value, found)
            continue
        large += 1
        assert torch.equal(found == 0, value == 0) or name == "exp_avg"
        if name == "exp_avg_sq":
            assert bool((found >= 0).all())
        kept = value.abs() >= value.abs()[value != 0].quantile(0.002)
        assert bool(((found - value).abs() <= 0.1 * value.abs())[kept].all())
    assert large == 4
    before = other.loss()
    assert other.steps(10).loss() < before * 1.3
    assert report.ratio > 2.5


def test_moments_that_are_small_or_not_finite_stay_exact():
    flat = flatten(Run(steps=2).optimizer.state_dict())
    name = next(name for name, x in flat.tensors.items() if name.endswith("exp_avg") and x.numel() >= 4096)
    assert name in quantize_moments(flat, GlobalStats(GlobalTensors.from_state(flat)))
    flat.tensors[name][0, 0] = torch.nan
    assert name not in quantize_moments(flat, GlobalStats(GlobalTensors.from_state(flat)))
    assert all(
        flat.tensors[other].numel() >= 4096
        for other in quantize_moments(flat, GlobalStats(GlobalTensors.from_state(flat)))
    )
