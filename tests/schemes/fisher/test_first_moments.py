"""First moments by what they move: coarse beside coarse weights, and left out where a restore can do without them."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from helpers.small_training import Silent
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning
from shrinkpoint.schemes.fisher.first_moments import SHARE_OF_WEIGHTS
from shrinkpoint.schemes.fisher.run_memory import Progress
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import SaveReport


class Descent:
    """A weight whose loss falls as fast as asked, by hand, with gradients of noise; a manager saves it."""

    def __init__(self, scheme: sp.Fisher | None = None, lr: float = 1e-3, **settings: object) -> None:
        self.random, self.loss, self.steps = torch.Generator().manual_seed(0), 1.0, 0
        self.weight = nn.Parameter(torch.randn(96, 64, generator=self.random))
        self.best = self.weight.detach().clone()
        self.model = nn.ParameterDict({"weight": self.weight})
        self.optimizer = torch.optim.AdamW([self.weight], lr=lr, **settings)
        self.storage = MemoryStorage()
        self.scheme = sp.Fisher(budget="1%", evaluate=self.evaluate, moments="auto") if scheme is None else scheme
        self.manager = sp.CheckpointManager(self.storage, scheme=self.scheme, threads=1)

    def evaluate(self, model: nn.Module) -> Tensor:
        weight = dict(model.named_parameters())["weight"].detach()
        return self.loss + 1e-3 * (weight - self.best).square().mean(1)

    def train(self, steps: int, fall: float = 0.0) -> Descent:
        for _ in range(steps):
            self.weight.grad = torch.randn(self.weight.shape, generator=self.random)
            self.optimizer.step()
        self.best = self.weight.detach().clone()
        self.steps, self.loss = self.steps + steps, self.loss - fall * steps
        return self

    def save(self) -> SaveReport:
        with Silent():
            return self.manager.save(self.steps, model=self.model, optimizer=self.optimizer)

    def restore(self) -> None:
        self.manager.restore(model=self.model, optimizer=self.optimizer)

    def restored_error(self) -> float:
        """The root mean square error of first moments after a restore, in roots of unbiased second moments."""
        before, second = self.first.clone(), self.optimizer.state[self.weight]["exp_avg_sq"] / (1 - 0.999**self.steps)
        self.restore()
        return float(((self.first - before) / second.sqrt()).square().mean().sqrt())

    @property
    def mode(self) -> object:
        """How the newest checkpoint has moments."""
        return self.manager.store.manifest(self.steps).loss["chosen"]["moments"]

    @property
    def first(self) -> Tensor:
        return self.optimizer.state[self.weight]["exp_avg"]


@pytest.mark.parametrize(("lr", "coarser"), [(1.0, 1.0), (1e-2, 1.85), (1e-4, 16.0)])
def test_first_moments_are_as_coarse_as_what_they_move_beside_their_weights(lr, coarser):
    """A step of the weight is 1: a third of it may be moved, and 18 learning rates are with the finest steps."""
    run = Descent(sp.Fisher(relative_error=1 / math.sqrt(12)), lr=lr, weight_decay=0.0)
    with torch.no_grad():
        run.weight.div_(run.weight.std())
    errors = []
    for _ in range(2):
        run.train(60).save()
        errors.append(run.restored_error())
    fine, coarse = errors  # beside no checkpoint, and beside the first one
    assert 0.5 * coarser < coarse / fine < 1.5 * coarser


def test_the_more_often_a_run_was_restored_the_finer_its_first_moments_are():
    run = Descent(sp.Fisher(relative_error=0.3), lr=5e-3, weight_decay=0.0)
    run.train(60).save()
    errors = []
    for _ in range(4):
        run.train(60).save()
        errors.append(run.restored_error())
    assert errors[0] > 1.5 * errors[1] > 1.5 * errors[3]


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_a_learning_rate_that_has_fallen_may_rise_again(is_scheduled):
    """The rate of the schedule's begin counts, or the largest one that was seen at a save."""
    errors = []
    for falls in (False, True):
        run = Descent(sp.Fisher(relative_error=0.3), lr=1e-2, weight_decay=0.0)
        group = run.optimizer.param_groups[0]
        if is_scheduled:
            group["initial_lr"], group["lr"] = 1e-2, 5e-3
        run.train(60).save()
        if falls:
            group["lr"] = 0.0 if is_scheduled else 1e-4
        run.train(60).save()
        before = run.first.clone()
        run.restore()
        errors.append(float((run.first - before).square().mean().sqrt()))
    assert errors[1] < 1.5 * errors[0]


def test_what_first_moments_move_by_their_errors_is_less_than_their_weights_step():
    run = Descent(sp.Fisher(relative_error=0.3), lr=1e-4)
    for _ in range(2):
        run.train(60).save()
    before = run.first.clone()
    run.restore()
    second = run.optimizer.state[run.weight]["exp_avg_sq"] / (1 - 0.999**120)
    moved = 1e-4 * 9 * (run.first - before).abs() / second.sqrt()
    assert 0 < float(moved.max()) < 0.3 * math.sqrt(12) * SHARE_OF_WEIGHTS


def test_first_moments_keep_their_mean_however_coarse_they_are():
    run = Descent(sp.Fisher(relative_error=0.3), lr=1e-5)
    run.train(30).save()
    run.first.fill_(0.1)
    run.train(1).save()
    before = run.first.clone()
    run.restore()
    error = run.first - before
    assert float(error.std()) > 3 * float(before.abs().mean())
    assert abs(float(error.mean())) < 5 * float(error.std()) / math.sqrt(error.numel())


@pytest.mark.parametrize(
    ("steps", "fall", "mode"),
    [
        (50, 0.0, "second"),
        (50, -1e-4, "second"),  # the loss rises
        (50, 2e-4, "second"),  # nine steps of 0.0002 are less than half of 1%
        (50, 1e-3, "coded"),  # they are more
        (30, 0.0, "coded"),  # a restore would cost more than a quarter of the interval
    ],
)
def test_auto_leaves_first_moments_out_where_the_budget_pays_for_it(steps, fall, mode):
    run = Descent()
    run.train(100).save()
    assert run.mode == "coded"  # nothing is known yet
    report = run.train(steps, fall).save()
    assert run.mode == mode
    run.restore()
    assert bool(run.first.any()) == (mode == "coded") == (report.roles["moment1"].stored > 200)


def test_auto_goes_on_after_a_restore_and_counts_it():
    run = Descent()
    run.train(100).save()
    run.train(50, 2e-4).save()
    assert run.mode == "second"
    run.manager.close()
    again = Descent()
    again.storage, again.loss, again.steps = run.storage, run.loss, run.steps
    again.manager = sp.CheckpointManager(run.storage, scheme=again.scheme, threads=1)
    again.restore()
    again.train(50, 2e-4).save()
    assert again.mode == "second"
    again.restore()
    again.train(50, 2e-4).save()  # with the third restore 27 steps would be lost
    assert again.mode == "coded"


def test_auto_is_coded_where_nothing_is_measured():
    run = Descent(sp.Fisher(relative_error=0.3, moments="auto"))
    for _ in range(3):
        run.train(60).save()
        assert run.mode == "coded"


def test_a_score_that_rises_is_progress():
    better = Progress().after(100, -0.5).after(150, -0.6)  # a score of 0.6 after 0.5
    assert better.gain == pytest.approx(0.002) and not better.affords(9.0, 0, 0.01)


def test_progress_counts_from_measurement_to_measurement():
    seen = Progress().after(100, 2.0).after(150, None)
    assert (seen.interval, seen.gain) == (50, None) and not seen.affords(1.0, 0, 1.0)
    assert seen.after(200, 1.0).gain == 0.01  # over 100 updates
    assert seen.after(200, 1.0).after(200, 3.0) == seen.after(200, 1.0)  # nothing was trained
    assert seen.after(120, 1.9).interval is None  # the run went back
    assert seen.after(None, 1.0) == Progress() and seen.after(200, math.nan).gain is None


@pytest.mark.parametrize(
    "value", [None, 3, [], [1, 2, 0.5, 1], ["a"] * 5, [True, -1, math.nan, 1e9, math.inf], [1 << 70, None, "x", [], {}]]
)
def test_any_record_of_progress_can_be_read(value):
    assert Progress.from_json(value) == Progress()


def test_progress_is_what_it_was_when_it_is_read_again():
    progress = Progress().after(100, 2.0).after(150, 1.5)
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


def test_complex_momentum_is_exact_without_a_warning():
    weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    model = nn.ParameterList([weight])
    store = MemoryStorage()
    with Silent(), sp.CheckpointManager(store, scheme=sp.Fisher(relative_error=0.3)) as manager:
        warnings.simplefilter("error", UserWarning)  # torch's, of an imaginary part that is discarded
        warnings.simplefilter("ignore", LossWarning)
        for step in range(2):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
            manager.save(step, model=model, optimizer=optimizer)
        state = sp.load(store)["optimizer"]["state"][0]
    assert torch.equal(state["momentum_buffer"], optimizer.state[weight]["momentum_buffer"])
