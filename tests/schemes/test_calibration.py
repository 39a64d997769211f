"""No scheme trusts `evaluate` blindly: one that lies, is noisy or has no number costs bytes, and never values."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.parameters import each_value
from helpers.sharded_states import Ranks, cut
from helpers.small_state import run as tiny_run
from helpers.small_training import LettersRun, Run, Silent, digits
from helpers.strategies import difference, same
from torch import nn

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.schemes.calibration import REPEAT_INTERVAL, Calibration
from shrinkpoint.schemes.evaluate import DegradationMetric, Reading, ShardedModelEvaluator
from shrinkpoint.schemes.planner import plan_shards
from shrinkpoint.sharding.global_tensors import ShardLayout
from shrinkpoint.storage import MemoryStorage

SCHEMES: dict[str, Callable[..., Any]] = {
    "fisher by nats": lambda **more: sp.Fisher(nats=0.01, **more),
    "fisher by share": lambda **more: sp.Fisher(budget="1%", **more),
    "fisher by error": lambda **more: sp.Fisher(relative_error=0.3, **more),
    "fisher by ratio": lambda **more: sp.Fisher(ratio=8, **more),
    "fisher, moments dropped": lambda **more: sp.Fisher(budget="1%", moments="drop", **more),
    "inshrinkerator": lambda **more: sp.Inshrinkerator(threshold=0.05, **more),
    "inshrinkerator, lossy moments": lambda **more: sp.Inshrinkerator(threshold=0.05, optimizer="lossy", **more),
    "inshrinkerator, reset moments": lambda **more: sp.Inshrinkerator(threshold=0.05, optimizer="reset", **more),
    "inshrinkerator on paper": lambda **more: sp.Inshrinkerator(threshold=0.05, paper=True, **more),
    "inshrinkerator, safest": lambda **more: sp.Inshrinkerator(threshold=0.05, fallback="safest", **more),
    "qd": lambda **more: sp.QD(threshold=0.05, **more),
    "cnr": lambda **more: sp.CNR(threshold=0.05, **more),
    "gobo": lambda **more: sp.GOBO(threshold=0.05, **more),
}
"""Every scheme that measures."""


def closed_over(run: Run) -> Callable[[Any], Any]:
    """Looks at a model of its own, and not at what it is given."""
    model = copy.deepcopy(run.model)
    return lambda _: run.evaluate(model)


def cached(run: Run) -> Callable[[Any], Any]:
    """Measures once."""
    answers: list[Any] = []

    def evaluate(_: Any) -> Any:
        answers.append(answers[0] if answers else run.evaluate(run.model))
        return answers[-1]

    return evaluate


def examples_of_its_first_call(run: Run) -> Callable[[Any], Any]:
    """Measures each example, once."""
    answers: list[torch.Tensor] = []

    def evaluate(_: Any) -> torch.Tensor:
        answers.append(answers[0] if answers else run.evaluate(run.model) * torch.linspace(0.5, 1.5, 50))
        return answers[-1]

    return evaluate


def losses(model: Any, start: int, count: int = 400) -> torch.Tensor:
    """The loss of each of some images."""
    images, labels = digits()
    return nn.functional.cross_entropy(
        model.eval()(images[start : start + count]), labels[start : start + count], reduction="none"
    )


def noisy_and_closed_over(run: Run) -> Callable[[Any], Any]:
    """The same, of other batches at every call."""
    model, factors = copy.deepcopy(run.model), itertools.cycle([1.0, 1.05, 0.98])
    return lambda _: float(run.evaluate(model)) * next(factors)


LIARS: dict[str, Callable[[Run], Callable[[Any], Any]]] = {
    "closed over": closed_over,
    "cached": cached,
    "examples of its first call": examples_of_its_first_call,
    "constant": lambda run: lambda model: 0.003,
    "noisy and closed over": noisy_and_closed_over,
    "nan": lambda run: lambda model: math.nan,
    "infinite": lambda run: lambda model: math.inf,
    "minus infinite": lambda run: lambda model: -math.inf,
    "nan the second time": lambda run: (lambda answers: lambda model: next(answers))(
        itertools.chain([1.0], itertools.repeat(math.nan))
    ),
    "examples of a cache": lambda run: (lambda answer: lambda model: answer)(torch.arange(50.0)),
}


@pytest.mark.parametrize(("name", "liar"), each_value(SCHEMES, LIARS))
def test_what_evaluate_does_not_tell_is_not_lost_neither_weights_nor_moments(name, liar):
    run, storage = Run(steps=20), MemoryStorage()
    before = run.photo()
    with sp.CheckpointManager(storage, scheme=SCHEMES[name](evaluate=LIARS[liar](run))) as manager:
        with pytest.warns(LossWarning, match=r"evaluate .*, so this checkpoint is (exact|lossless), weights and mom"):
            report = manager.save(1, **run.parts)
        assert difference(before, run.photo()) is None
    other = Run()
    sp.CheckpointManager(storage).restore(**other.parts)
    assert same(run.model.state_dict(), other.model.state_dict())
    assert same(run.optimizer.state_dict(), other.optimizer.state_dict())
    manifest = sp.Store(storage).manifest(1)
    assert not manifest.is_lossy and manifest.loss == report.loss_report and report.loss_report.get("chosen") is None
    assert report.loss_report["exact"].startswith("evaluate ")


@pytest.mark.parametrize(("name", "liar"), each_value(["fisher by nats", "inshrinkerator", "gobo"], LIARS))
def test_a_bare_state_is_exact_where_evaluate_looks_elsewhere(tmp_path, name, liar):
    run = LettersRun(steps=10)
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    with pytest.warns(LossWarning, match="evaluate "):
        sp.save(state, tmp_path / "a", scheme=SCHEMES[name](evaluate=LIARS[liar](run)))
    assert difference(copy.deepcopy(state), sp.load(tmp_path / "a")) is None


@pytest.mark.parametrize("name", SCHEMES)
def test_an_evaluate_that_has_no_number_for_other_weights_does_react(name):
    run = Run(steps=20)
    plain = run.model.body[0].weight.detach().clone()

    def evaluate(model: Any) -> Any:
        far = float((model.body[0].weight - plain).norm() / plain.norm())
        return run.evaluate(model) if far < 0.5 else math.nan

    with sp.CheckpointManager(MemoryStorage(), scheme=SCHEMES[name](evaluate=evaluate)) as manager, Silent():
        report = manager.save(1, **run.parts)
    assert report.loss_report["chosen"] is not None and "exact" not in report.loss_report


@pytest.mark.parametrize("name", ["fisher by nats", "inshrinkerator"])
def test_a_score_at_the_level_of_chance_costs_one_checkpoint_and_not_the_run(name):
    run, chance = Run(steps=30), [True]

    def evaluate(model: Any) -> float:
        return 0.1 if chance else -float(run.evaluate(model))

    with sp.CheckpointManager(
        MemoryStorage(), scheme=SCHEMES[name](evaluate=evaluate, higher_is_better=True)
    ) as manager:
        with pytest.warns(LossWarning, match=r"evaluate returns 0\.1 for clearly different weights as well"):
            assert "exact" in manager.save(1, **run.parts).loss_report
        chance.clear()
        with Silent():
            assert manager.save(2, **run.parts).loss_report["chosen"] is not None


def test_of_a_score_at_the_level_of_chance_the_examples_tell_that_it_reacts():
    run = Run()

    def right(model: Any) -> torch.Tensor:
        """As many as ever, and others."""
        return (torch.arange(100) % 10 == 0).float().roll(round(float(model.body[0].weight.sum())))

    quality = DegradationMetric(lambda values: Reading.from_answer(right(run.model)), higher_is_better=True)
    with torch.no_grad():
        assert Calibration().find_problem(quality, [lambda: moved(run.model)]) is None


def moved(model: Any) -> dict[str, torch.Tensor]:
    """A model whose own weights are others from now on."""
    model.body[0].weight.add_(0.1)
    return {}


# what it costs


def test_examples_of_a_first_save_cost_three_evaluations_and_those_of_later_ones_two():
    run, calls = Run(steps=40), []

    def evaluate(model: Any) -> torch.Tensor:
        calls.append(1)
        return losses(model, 1200)

    costs = []
    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(budget="5%", evaluate=evaluate)) as manager, Silent():
        for step in range(6):
            calls.clear()
            report = manager.save(step, **run.steps(5).parts)
            costs.append(len(calls) - trials(report.loss_report))
    assert costs == [1, 2, 1, 1, 1, 1]  # the second save asks whether the answer repeats itself


@pytest.mark.parametrize("rounding", [0.0, 1e-8])
def test_a_metric_that_is_the_answer_replaces_it(rounding):
    run, costs = Run(steps=40), []
    scheme = sp.Fisher(budget="5%", evaluate=run.evaluate)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager, Silent():
        for step in range(12):
            loss = run.steps(5).loss()
            run.calls = 0
            report = manager.save(step, metrics={"accuracy": 0.9, "loss": loss * (1 + rounding)}, **run.parts)
            costs.append(run.calls - trials(report.loss_report))
            loaded = Run()
            loaded.model.load_state_dict(manager.store.load(step)["model"])
            assert report.loss_increase == pytest.approx(loaded.loss() / loss - 1, abs=1e-6)
            assert report.loss_increase <= 0.05
    assert costs == [2, 1, 1, *[0] * 9]


@pytest.mark.parametrize(
    "metric",
    [
        lambda losses: losses[max(0, len(losses) // 4 * 4 - 1)],  # measured at every fourth save
        lambda losses: losses[-1] * (1 + 1e-4),  # of other examples
        lambda losses: losses[max(0, len(losses) - 2)],  # of the last save
        lambda losses: math.nan,
    ],
    ids=["old", "another", "of the last save", "nan"],
)
def test_a_metric_that_is_not_the_answer_replaces_nothing(metric):
    run, found, costs = Run(steps=40), list[float](), []
    scheme = sp.Fisher(budget="5%", evaluate=run.evaluate)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager, Silent():
        for step in range(10):
            found.append(run.steps(5).loss())
            run.calls = 0
            report = manager.save(step, metrics={"loss": metric(found)}, **run.parts)
            costs.append(run.calls - trials(report.loss_report))
    assert costs == [2, *[1] * 9]


def test_a_metric_of_a_save_that_failed_is_not_that_of_the_next_one():
    run = Run(steps=40)
    scheme = sp.Fisher(budget="5%", evaluate=run.evaluate)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager, Silent():
        for step in range(4):
            manager.save(step, metrics={"loss": run.steps(5).loss()}, **run.parts)
        with pytest.raises(PolicyError):
            manager.save(4, metrics={"loss": run.steps(5).loss()}, more=object(), **run.parts)
        loss = run.steps(5).loss()
        assert manager.save(5, **run.parts).loss_report["quality"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in SCHEMES if "dropped" not in name])  # which asks about kinds, too
def test_evaluate_is_asked_for_its_noise_and_whether_it_looks_once_in_a_run(name):
    run, storage = Run(steps=20), MemoryStorage()
    scheme, further = SCHEMES[name](evaluate=run.evaluate), []
    with sp.CheckpointManager(storage, scheme=scheme) as manager, Silent():
        for step in range(3):
            calls = run.calls
            report = manager.save(step, **run.parts)
            further.append(run.calls - calls - trials(report.loss_report) - 1)
        manager.restore(**run.parts)
        calls = run.calls
        again = run.calls - calls
        report = manager.save(3, **run.steps(1).parts)
        again = run.calls - calls - trials(report.loss_report) - 1
    # The state again, and, unless trials tell it, clearly other weights. Both weights can be followed to the answer.
    assert further == [2 - scheme.learns_from_trials, 0, 0] and again == further[0]


def trials(loss: dict[str, Any]) -> int:
    if "tried" in loss:
        return sum(1 + ("opposite" in one) for one in loss["tried"])
    return sum(len(one["trials"]) for one in loss["searches"])


# noise


class Noisy:
    """The loss on other images at every call; what is true is the loss on all of them.

    Attributes:
        spread: how large the noise is, relative to the loss.
    """

    def __init__(self, run: Run, spread: float) -> None:
        self.run, self.spread = run, spread
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, model: Any) -> float:
        noise = float(torch.randn((), generator=self.generator))
        return float(self.run.evaluate(model)) * (1 + self.spread * noise)


@pytest.mark.parametrize("name", ["fisher by share", "inshrinkerator"])
@pytest.mark.parametrize("spread", [0.003, 0.1])
def test_the_budget_counts_against_the_measured_rise_and_the_noise(name, spread):
    allowed = 0.05
    run = Run(steps=60)
    noisy = Noisy(run, spread)
    schemes = {
        "fisher by share": lambda: sp.Fisher(budget="5%", evaluate=noisy),
        "inshrinkerator": lambda: sp.Inshrinkerator(threshold=allowed, evaluate=noisy),
    }
    storage = MemoryStorage()
    with sp.CheckpointManager(storage, scheme=schemes[name]()) as manager, Silent():
        for step in range(5):
            loss = manager.save(step, **run.steps(5).parts).loss_report
            other = Run()
            sp.CheckpointManager(storage).restore(step, **other.parts)
            true = run.loss(other.model) / run.loss() - 1
            assert loss["noise"] > 0
            if "exact" in loss:
                assert true == 0
                continue
            rise = loss["degradation"] if "degradation" in loss else (loss["rise"] or 0.0) / loss["quality"]
            assert rise + loss["noise"] <= allowed * (1 + 1e-9) or loss["rise"] is None
            assert true <= allowed + 2 * spread


@pytest.mark.parametrize("name", ["fisher by share", "fisher by nats", "inshrinkerator", "qd"])
def test_a_budget_below_the_noise_is_refused_with_words_and_the_checkpoint_is_exact(name):
    run, storage = Run(steps=20), MemoryStorage()
    manager = sp.CheckpointManager(storage, scheme=SCHEMES[name](evaluate=Noisy(run, 0.3)))
    with manager, pytest.warns(LossWarning, match=r"evaluate differs by .*% between calls .* only .*% may be lost"):
        manager.save(1, **run.parts)
    other = Run()
    sp.CheckpointManager(storage).restore(**other.parts)
    assert same(run.model.state_dict(), other.model.state_dict())
    assert same(run.optimizer.state_dict(), other.optimizer.state_dict())


def test_other_examples_at_every_call_are_noise_though_a_first_save_asks_once():
    run, starts, noise = Run(steps=40), itertools.count(0, 40), []

    def evaluate(model: Any) -> torch.Tensor:
        return losses(model, 1200 + next(starts) % 400, 40)

    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(budget="1%", evaluate=evaluate)) as manager, Silent():
        for step in range(2):
            loss = manager.save(step, **run.steps(5).parts).loss_report
            assert loss["chosen"] is None and loss["exact"].startswith("evaluate differs by")
            noise.append(loss["noise"])
    assert min(noise) > 0.01


def test_the_same_examples_in_another_order_at_every_call_are_no_noise():
    run, generator = Run(steps=40), torch.Generator().manual_seed(1)

    def evaluate(model: Any) -> torch.Tensor:
        return losses(model, 1200)[torch.randperm(400, generator=generator)]

    scheme = sp.Fisher(budget="5%", evaluate=evaluate)
    with warnings.catch_warnings(), sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager:
        warnings.filterwarnings("ignore", "evaluate measures a rise")
        loss = manager.save(1, **run.steps(5).parts).loss_report
    assert loss["chosen"] is not None and loss["noise"] < 1e-9 and loss["rise"] <= 0.05 * loss["quality"]


def test_noise_that_is_seen_late_counts_from_then_on():
    run, calls = Run(steps=20), []

    def evaluate(model: Any) -> float:
        calls.append(1)
        late = len(seen) >= REPEAT_INTERVAL
        return float(run.evaluate(model)) * (1 + late * 0.002 * (len(calls) % 2))

    seen: list[float] = []
    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(budget="10%", evaluate=evaluate)) as manager, Silent():
        for step in range(REPEAT_INTERVAL + 1):
            seen.append(manager.save(step, **run.parts).loss_report["noise"])
    assert seen[:REPEAT_INTERVAL] == [0.0] * REPEAT_INTERVAL and seen[REPEAT_INTERVAL] == pytest.approx(0.002, rel=0.01)


def test_one_bad_moment_does_not_make_a_whole_run_lossless():
    run, calls = Run(steps=20), []

    def evaluate(model: Any) -> float:
        calls.append(1)
        return float(run.evaluate(model)) * (1.2 if len(calls) == 2 else 1.0)

    exact = []
    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(budget="5%", evaluate=evaluate)) as manager, Silent():
        for step in range(20):
            exact.append("exact" in manager.save(step, **run.parts).loss_report)
    assert exact[0] and not exact[-1] and exact == sorted(exact, reverse=True)


# ranks


class Held(nn.Module):
    """A rank's boxes of all parameters."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(x, requires_grad=False) for x in tensors.values()])


@pytest.mark.parametrize(("name", "answer"), each_value(["fisher by nats", "inshrinkerator", "cnr"], [0.5, math.nan]))
def test_ranks_that_have_parts_agree_that_nothing_is_lost(name, answer):
    parts = cut(copy.deepcopy(tiny_run()[0]), 3)

    def work(rank: int, gather: Any) -> Any:
        mine = parts[rank]
        weights = {name: x for name, x in mine.flat.tensors.items() if name.startswith("model/")}
        target = ShardedModelEvaluator(mine.flat, lambda model: answer, Held(weights))
        scheme = SCHEMES[name](evaluate=lambda model: answer)
        return plan_shards(scheme, mine.flat, None, ShardLayout(mine.places, gather), target).quantize(mine.flat, None)

    with Silent():
        found = Ranks(3).all(work)
    assert all(not kept.quantized and kept.loss["exact"] == found[0].loss["exact"] for kept in found)
    for kept, part in zip(found, parts, strict=True):
        assert all(torch.equal(x, part.flat.tensors[name]) for name, x in kept.state.tensors.items())


def test_a_number_of_each_example_may_be_returned_and_nothing_else():
    losses = torch.rand(7)
    array = losses.numpy()
    array.flags.writeable = False
    for answer in (losses, array, array[::-1], array.tolist(), [*losses]):
        reading = Reading.from_answer(answer)
        assert reading.examples is not None and reading.examples.sort().values.tolist() == sorted(array.tolist())
        assert reading.value == pytest.approx(float(losses.double().mean()))
    for answer in (3.0, torch.tensor(2), torch.rand(1), np.float16(0.5), np.array(0.5), np.ones(1), [0.5]):
        reading = Reading.from_answer(answer)
        assert reading.examples is None and reading.value == float(torch.as_tensor(answer))
    run = Run(steps=2)
    for answer in (torch.rand(2, 2), torch.rand(0), None, [], [losses], np.ones((2, 2)), (1.0, 2.0)):
        with (
            sp.CheckpointManager(
                MemoryStorage(), scheme=sp.Fisher(evaluate=lambda model, answer=answer: answer)
            ) as manager,
            pytest.warns(LossWarning, match="Error: .*return a loss or a score"),
        ):
            assert not manager.save(1, **run.parts).loss_report["chosen"]


@pytest.mark.parametrize(("higher", "name"), [(False, "fisher by share"), (True, "fisher by share"), (False, "gobo")])
def test_an_answer_that_is_infinitely_better_is_not_believed(higher, name):
    run = Run(steps=20)
    plain = run.model.body[0].weight.detach().clone()

    def evaluate(model: Any) -> Any:
        loss = run.evaluate(model)
        if torch.equal(model.body[0].weight, plain):
            return -loss if higher else loss
        return math.inf if higher else -math.inf  # the logarithm of a probability that has become 0

    storage = MemoryStorage()
    scheme = SCHEMES[name](evaluate=evaluate, higher_is_better=higher)
    with sp.CheckpointManager(storage, scheme=scheme) as manager, pytest.warns(LossWarning):
        manager.save(1, **run.parts)
    other = Run()
    sp.CheckpointManager(storage).restore(**other.parts)
    assert same(run.model.state_dict(), other.model.state_dict())


def test_a_loss_near_the_smallest_number_does_not_end_a_save():
    run = Run(steps=20)
    scheme = sp.Fisher(evaluate=lambda model: float(run.evaluate(model)) * 1e-310)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager, Silent():
        assert manager.save(1, **run.parts).loss_report["quality"] < 1e-308


@pytest.mark.parametrize("higher", [False, True])
@pytest.mark.parametrize("name", ["fisher by share", "inshrinkerator", "inshrinkerator on paper"])
def test_a_score_that_is_taken_for_a_loss_costs_bytes_and_no_values(name, higher):
    run, storage = Run(steps=60), MemoryStorage()
    loss_or_score = run.evaluate if higher else lambda model: -run.evaluate(model)
    scheme = SCHEMES[name](evaluate=loss_or_score, higher_is_better=higher)
    do = "leave higher_is_better out for a loss" if higher else "pass higher_is_better=True for a score"
    with sp.CheckpointManager(storage, scheme=scheme) as manager:
        for step in range(2):
            with pytest.warns(
                LossWarning, match=f"which counts as better, for weights with noise, so .* is (exact|lossless).*{do}"
            ):
                manager.save(step, **run.parts)
            run.steps(5)
    other = Run()
    at = sp.CheckpointManager(storage).restore(**other.parts)
    assert at is not None and not at.manifest.is_lossy


def test_trials_that_are_better_by_chance_are_believed():
    run = Run(steps=20)
    state = copy.deepcopy(run.model.state_dict())

    def evaluate(model: Any) -> float:
        loss = float(run.evaluate(model))
        return loss if same(model.state_dict(), state) else 0.9 * loss

    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(budget="1%", evaluate=evaluate)) as manager, Silent():
        assert manager.save(1, **run.parts).loss_report["chosen"] is not None
