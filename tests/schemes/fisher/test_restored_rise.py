"""What restores leave of a rise, and that a budget counts it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.adam_states import adam, global_weights, known_of, normal
from helpers.quadratic_loss import TERMS, Bowl
from helpers.sharded_states import saved, whole
from helpers.small_state import run
from helpers.small_training import Silent
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, Reference
from shrinkpoint.schemes.fisher.curvature import remaining_share
from shrinkpoint.schemes.fisher.objective import MIN_BUDGET_SHARE, LossBudget
from shrinkpoint.schemes.fisher.run_memory import rise_after_restore
from shrinkpoint.schemes.fisher.steps import StepCandidates
from shrinkpoint.storage import MemoryStorage

WEIGHTS = {"a": normal(64, 96, scale=0.02), "b": normal(96, 64, seed=1), "bias": normal(96, seed=2)}
KNOWN = known_of(adam(WEIGHTS))


def restored(log_step: int = -8) -> Reference:
    """The checkpoint of `WEIGHTS` as it is after a restart."""
    points = StepCandidates(global_weights(WEIGHTS), KNOWN, None, None, 0, 0).quantize(log_step).points
    return Reference({name: x.dequantize(torch.float32) for name, x in points.items()}, dict(points))


def share(weights: dict[str, Tensor], reference: Reference | None) -> float:
    return remaining_share(global_weights(weights), KNOWN, reference)


def test_nothing_is_made_good_where_nothing_has_moved():
    reference = restored()
    assert share(dict(reference.tensors), reference) == 1.0
    assert share(WEIGHTS, None) == 1.0
    assert share({name: x * math.nan for name, x in WEIGHTS.items()}, reference) == 1.0  # nothing can be said


def test_the_further_weights_move_the_less_is_left():
    reference = restored()
    noise = {name: normal(*x.shape, seed=7) * x.std() for name, x in WEIGHTS.items()}
    shares = [
        share({name: x + by * noise[name] for name, x in reference.tensors.items()}, reference)
        for by in (0.003, 0.03, 0.3, 3.0, 300.0)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99 and 0.3 < shares[2] < 0.9 and shares[-1] < 0.01


def test_what_lies_where_the_loss_is_steep_counts_more():
    """The first half of the columns is a million times as steep: whether the others move makes no difference."""
    steep = torch.where(torch.arange(96) < 48, 1.0, 1e-6).expand(64, 96)
    weights = {"a": WEIGHTS["a"]}
    known = known_of(adam(weights, {"a": steep.clone()}))
    points = StepCandidates(global_weights(weights), known, None, None, 0, 0).quantize(-8).points
    reference = Reference({"a": points["a"].dequantize(torch.float32)}, dict(points))

    def left(columns: slice) -> float:
        moved = reference.tensors["a"].clone()
        moved[:, columns] += 10.0
        return remaining_share(global_weights({"a": moved}), known, reference)

    assert left(slice(48, None)) > 0.9 and left(slice(0, 48)) < 0.1


@pytest.mark.parametrize(("moved", "left"), [({"a": 0.5}, 0.6), ({"a": 1.0}, 0.2), ({"b": 1.0}, 0.8)])
def test_a_sample_of_a_large_weight_tells_what_all_of_it_does(moved, left):
    """Of a weight four times as large as the sample, and of another that is sampled whole, a share moves far."""
    weights = {name: normal(n * MAX_SAMPLED_VALUES // 64, 64, scale=0.02) for name, n in (("a", 4), ("b", 1))}
    known = known_of(adam(weights, {name: torch.ones_like(x) for name, x in weights.items()}))
    points = StepCandidates(global_weights(weights), known, None, None, 0, 0).quantize(-8).points
    values = {name: x.dequantize(torch.float32) for name, x in points.items()}
    chance = torch.Generator().manual_seed(0)
    now = {
        name: torch.where(torch.rand(x.shape, generator=chance) < moved.get(name, 0.0), 1e3, x)
        for name, x in values.items()
    }
    found = remaining_share(global_weights(now), known, Reference(values, dict(points)))
    assert found == pytest.approx(left, abs=0.02)


@pytest.mark.parametrize(
    ("loss", "rise"),
    [
        ({}, 0.0),
        ({"chosen": {"moments": "coded"}, "rise": 0.02}, 0.02),
        ({"chosen": {"moments": "coded"}, "rise": 0.02, "restored_rise": 0.03}, 0.05),
        ({"chosen": None, "rise": 0.02, "restored_rise": 0.03}, 0.03),  # an exact checkpoint
        ({"chosen": {"moments": "coded"}, "rise": -0.05, "restored_rise": 0.03}, 0.0),
        ({"chosen": {"moments": "coded"}, "rise": "nan", "restored_rise": [1]}, 0.0),
        ({"chosen": {"moments": "coded"}, "rise": math.inf, "restored_rise": math.nan}, 0.0),
        ({"chosen": {"moments": "coded"}, "rise": None, "restored_rise": -1.0}, 0.0),
        ({"chosen": {"moments": "coded"}, "rise": None, "tried": [{"predicted": 0.1}, {"predicted": 0.04}]}, 0.04),
        ({"chosen": {"moments": "coded"}, "rise": 0.02, "tried": [{"predicted": 0.1}]}, 0.02),
        ({"chosen": {"moments": "coded"}, "rise": None, "tried": [3]}, 0.0),
    ],
)
def test_rise_after_a_restore_is_what_the_manifest_says(loss, rise):
    assert rise_after_restore(loss) == pytest.approx(rise)


def test_some_of_a_budget_is_always_left():
    budget = LossBudget(1.0)
    assert budget.after_restores(0.25).budget == 0.75
    assert budget.after_restores(5.0).budget == MIN_BUDGET_SHARE


class RestoredBowl(Bowl):
    """A bowl whose weights are those of a restored checkpoint, and not in the middle."""

    live: dict[str, Tensor] | None = None

    @property
    def state(self) -> dict[str, Any]:
        return adam(self.center if self.live is None else self.live, self.v)


def restore_after_every_save(count: int, move: float) -> list[float]:
    """The rises beside a run that is never restored, after each restore; in each interval the weights move a little."""
    bowl, storage, rises = RestoredBowl(), MemoryStorage(), []
    loss: dict[str, Any] = {}
    for step in range(count):
        scheme = sp.Fisher(budget="1%", evaluate=bowl.evaluate, terms=TERMS)
        scheme.resume(loss, step)
        with Silent(), sp.Store(storage) as store:  # as after a restart
            loss = store.save(step, bowl.state, scheme=scheme).loss_report
            bowl.live = store.load(step)["model"]
        rises.append(bowl.rise(bowl.live) / 3.0)
        change = {name: move * normal(*x.shape, seed=100 * step + i) for i, (name, x) in enumerate(bowl.center.items())}
        bowl.center = {name: x + change[name] for name, x in bowl.center.items()}
        bowl.live = {name: x + change[name] for name, x in bowl.live.items()}
    return rises


def test_restores_without_training_between_them_stay_within_the_budget():
    """Without the count each of them would add a part of the budget."""
    rises = restore_after_every_save(8, 0.003)
    assert max(rises) < 0.0125 and rises[0] > 0.002


def resumed() -> sp.Fisher:
    scheme = sp.Fisher(nats=0.05, terms=TERMS)
    scheme.resume({"scheme": "fisher", "chosen": {"moments": "coded"}, "restored_rise": 0.02, "size": 0}, 1)
    return scheme


def test_ranks_with_rows_find_what_one_process_finds():
    expected, found = whole(resumed(), run()), saved(resumed, run(), 3)
    rises = [[loss["restored_rise"] for loss in one.loss] for one in found]
    assert all(ranks == [ranks[0]] * 3 for ranks in rises)
    assert [ranks[0] for ranks in rises] == pytest.approx([one.loss[0]["restored_rise"] for one in expected])
    assert 0.02 == rises[0][0] > rises[1][0] > 0  # nothing is known at first, and then weights have moved
