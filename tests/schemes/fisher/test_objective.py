"""Three ways to ask for how much may be lost, and that each is answered."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.adam_states import adam, normal, squares
from helpers.parameters import each_value
from helpers.quadratic_loss import TERMS, Bowl, Chain
from helpers.small_training import Silent

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.schemes.evaluate import Degradation
from shrinkpoint.schemes.fisher.objective import (
    MAX_LOG_STEP,
    MAX_TRIALS,
    TARGET_SHARE,
    LossBudget,
    StateBits,
)
from shrinkpoint.schemes.fisher.rounding import MAX_HYSTERESIS
from shrinkpoint.schemes.fisher.run_memory import RunMemory
from shrinkpoint.schemes.fisher.steps import QuantizedWeights, from_log_step
from shrinkpoint.storage import MemoryStorage

# a budget that is measured


@pytest.mark.parametrize(("terms", "scale"), each_value([None, TERMS], [1e-4, 0.01, 1.0, 100.0, 1e4]))
def test_whatever_the_prediction_is_worth_no_save_is_above_the_budget(scale, terms):
    bowl = Bowl(scale)
    chain = Chain(bowl, 5, nats=0.05, evaluate=bowl.evaluate, terms=terms)
    for _ in range(8):
        with Silent():
            said = chain.save()
        assert chain.rise <= 0.05 * (1 + 1e-6)
        assert said["chosen"]["step_in_deviations"] is not None or chain.rise == 0
        assert chain.calls <= MAX_TRIALS + (1 if chain.step > 1 else 6)  # at first noise, other weights, entries
        assert said["tried"][-1]["rise"] == pytest.approx(chain.rise, rel=1e-3) or len(said["tried"]) > 1
        bowl.move()
    assert said["chosen"]["step_in_deviations"] is not None
    assert chain.rise > 0.05 / 20 or said["size"] >= MAX_LOG_STEP - 8


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_once_steps_stay_a_save_costs_two_evaluations(scale):
    bowl = Bowl(scale)
    chain = Chain(bowl, nats=0.05, evaluate=bowl.evaluate)
    calls, steps = [], []
    for _ in range(12):
        with Silent():
            steps.append(chain.save()["size"])
        calls.append(chain.calls)
        bowl.move()
    assert calls[-4:] == [2] * 4 and len({*steps[-4:]}) == 1


class FakeCandidates:
    """Candidates with a curvature term of a quarter at a step size of 8, with as much hysteresis as is allowed."""

    no_curvature = False

    def curvature_term(self, log_step: int) -> float:
        return 0.25 * 2 ** ((log_step - 8) / 4)

    def quantize(self, log_step: int, *, max_hysteresis: float = math.inf, **_: Any) -> QuantizedWeights:
        hysteresis = min(max_hysteresis, MAX_HYSTERESIS)
        return QuantizedWeights(log_step, {}, 0.0, self.curvature_term(log_step), hysteresis)


NO_BITS = StateBits(math.inf, 0.0, is_first=False)


@pytest.mark.parametrize("nearest", [0.6, 0.1])
def test_where_hysteresis_is_too_much_the_same_steps_are_rounded_to_the_nearest(nearest):
    candidates, tried = FakeCandidates(), []

    def measure(weights: QuantizedWeights, **_: Any) -> Degradation:
        tried.append((weights.log_step, weights.hysteresis))
        return Degradation(2.0 if weights.hysteresis > 0.5 else nearest)

    memory = RunMemory(log_step=8, num_terms=1.0, terms_error=0.2)
    choice = LossBudget(1.0).choose(candidates, memory, measure, NO_BITS)
    assert tried == [(8, MAX_HYSTERESIS), (8, 0.5)] and choice.rise == nearest
    assert memory.max_hysteresis == 0.5 + (MAX_HYSTERESIS - 0.5) / 2  # the next save begins with half of it
    LossBudget(1.0).choose(candidates, memory, lambda weights, **_: Degradation(0.1), NO_BITS)
    assert memory.max_hysteresis == MAX_HYSTERESIS  # and where all is well it grows again


def test_a_rise_that_no_hysteresis_explains_makes_steps_smaller():
    tried = []

    def measure(weights: QuantizedWeights, *, mirrored: bool = False) -> Degradation:
        tried.append((weights.log_step, weights.hysteresis, mirrored))
        return Degradation(2.0 if weights.log_step == 8 else 0.1)

    memory = RunMemory(log_step=8, num_terms=1.0, terms_error=0.2)
    LossBudget(1.0).choose(FakeCandidates(), memory, measure, NO_BITS)
    (*first, _), (*second, _), (*third, _), (*opposite, mirrored) = tried
    first, second = tuple(first), tuple(second)
    assert mirrored and opposite == third  # eight times what was predicted: a pair finds out why
    assert first == (8, MAX_HYSTERESIS) and second == (8, 0.5) and third[0] < 8


def test_where_nothing_is_measured_there_is_no_hysteresis():
    memory = RunMemory(log_step=8, num_terms=1.0, terms_error=0.2)
    choice = LossBudget(1.0).choose(FakeCandidates(), memory, None, NO_BITS)
    assert choice.weights is not None and choice.weights.hysteresis == 0.5


def test_what_is_measured_teaches_the_prediction():
    bowl = Bowl(7.0)
    chain = Chain(bowl, 1, nats=0.05, evaluate=bowl.evaluate)
    for _ in range(4):
        said = chain.save()
        bowl.move()
    assert said["terms"] == pytest.approx(7 * TERMS, rel=0.1)
    (line,) = said["tried"]
    assert line["curvature"] == pytest.approx(line["rise"], rel=0.1)
    assert 0.5 * TARGET_SHARE < line["rise"] / 0.05 <= 1


def test_keyframes_after_a_first_too_careful_one_take_larger_steps():
    bowl = Bowl(50.0)
    chain = Chain(bowl, 3, nats=0.05, evaluate=bowl.evaluate)
    first = chain.save()
    bowl.scale = 0.5
    sizes = []
    for _ in range(9):
        with Silent():
            said = chain.save()
        bowl.move()
        if chain.report.keyframe:
            sizes.append(said["size"])
    assert len(sizes) == 3 and sizes == sorted(sizes) and sizes[1] > first["size"] + 8


def test_where_even_the_smallest_steps_are_too_large_the_weights_are_exact_and_that_is_said():
    bowl = Bowl(1e12)
    chain = Chain(bowl, nats=1e-3, evaluate=bowl.evaluate)
    for _ in range(2):
        with pytest.warns(LossWarning, match="no step sizes keep the rise of the loss within"):
            said = chain.save()
        assert said["chosen"] == {"step_in_deviations": None, "moments": "coded"} and said["size"] is None
        assert len(said["tried"]) == MAX_TRIALS and all(line["rise"] > 1e-3 for line in said["tried"])
        assert all(torch.equal(x, chain.model[name]) for name, x in bowl.center.items())
        bowl.move()
    bowl.scale = 1.0  # what is left of it is no obstacle
    for _ in range(3):
        with Silent():
            said = chain.save()
    assert said["chosen"]["step_in_deviations"] > 0 and 0 < chain.rise <= 1e-3


def test_a_loss_that_is_nearly_zero_gets_steps_of_a_hundredth_of_a_deviation():
    """A regression that has learned its data: in a delta, exact weights would take 20 bits each."""
    bowl = Bowl(5e3)
    chain = Chain(bowl, nats=1e-3, evaluate=bowl.evaluate)
    for _ in range(3):
        with Silent():
            said = chain.save()
        assert 1 / 256 <= said["chosen"]["step_in_deviations"] < 1 / 64 and 0 < chain.rise <= 1e-3
        bowl.move(5e-4)
    assert 32 * chain.report.roles["parameter"].stored < 8 * chain.report.roles["parameter"].raw


def test_a_score_may_fall_by_the_budget():
    bowl = Bowl()
    chain = Chain(bowl, 1, nats=0.05, evaluate=lambda state: -bowl.evaluate(state), higher_is_better=True)
    other = Chain(Bowl(), 1, nats=0.05, evaluate=bowl.evaluate)
    assert chain.save()["tried"] == other.save()["tried"] and 0 < chain.rise <= 0.05


def test_what_is_better_than_before_is_within_any_budget():
    bowl = Bowl()
    chain = Chain(bowl, nats=0.01, evaluate=lambda state: -bowl.rise(state["model"]))
    assert chain.save()["chosen"]["step_in_deviations"] >= 1 and chain.save()["tried"][0]["rise"] < 0


def test_a_file_alone_takes_the_largest_steps_and_a_chain_grows_to_them(tmp_path):
    bowl = Bowl(0.2)
    alone = sp.save(bowl.state, tmp_path / "a.safetensors", scheme=sp.Fisher(nats=0.05, evaluate=bowl.evaluate))
    chain = Chain(bowl, nats=0.05, evaluate=bowl.evaluate)
    sizes = []
    for _ in range(4):
        with Silent():
            sizes.append(chain.save()["size"])
        bowl.move()
    assert alone.loss_report["size"] > sizes[0] and alone.loss_report["size"] - 4 <= sizes[-1]


# a budget that is predicted


@pytest.mark.parametrize("nats", [1e-4, 1e-3, 0.01])
def test_with_the_number_of_terms_the_prediction_decides(nats):
    bowl = Bowl()
    chain = Chain(bowl, nats=nats, terms=TERMS)
    for _ in range(3):
        said = chain.save()
        (line,) = said["tried"]
        assert line["rise"] is None and said["terms"] == TERMS and bowl.calls == 0
        assert line["curvature"] == pytest.approx(chain.rise, rel=0.05)
        assert 0.8 * TARGET_SHARE < chain.rise / nats < 1
        bowl.move(0.05)


@pytest.mark.parametrize("options", [{}, {"nats": 0.5}, {"nats": 1e-6}])
def test_with_nothing_to_go_by_steps_are_the_stated_ones(options):
    bowl = Bowl()
    chain = Chain(bowl, **options)
    for _ in range(2):
        said = chain.save()
        assert (
            said["chosen"]["step_in_deviations"] == 1.0
            and said["terms"] is None
            and said["tried"][0]["curvature"] is None
        )


def test_terms_without_any_knowledge_of_the_loss_are_nothing_to_go_by():
    scheme = sp.Fisher(terms=100, nats=1e-9)
    said = sp.Store(MemoryStorage()).save(1, {"a.weight": normal(40, 40)}, scheme=scheme).loss_report
    assert said["chosen"]["step_in_deviations"] == 1.0


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_without_any_knowledge_of_the_loss_measuring_it_is_enough(scale):
    """The prediction is then in no unit of its own, and a measurement says which."""
    bowl = Bowl(scale)
    store, rises = sp.Store(MemoryStorage(), keyframe_every=1), []
    scheme = sp.Fisher(nats=0.05, evaluate=lambda state: 2.0 + bowl.rise(state))
    for step in range(3):
        with Silent():
            store.save(step, bowl.center, scheme=scheme)
        rises.append(bowl.rise(store.load(step)))
        bowl.move()
    assert all(0.05 / 20 < rise <= 0.05 for rise in rises)


@pytest.mark.parametrize("base", [3.0, -3.0, 0.0])
def test_a_budget_in_per_cent_is_one_of_the_loss_itself(base):
    """Of one, where that is zero."""
    bowl, other = Bowl(), Bowl()
    chain = Chain(bowl, budget="2%", evaluate=lambda state: base + bowl.rise(state["model"]))
    same = Chain(other, nats=0.02 * (abs(base) or 1.0), evaluate=lambda state: base + other.rise(state["model"]))
    for _ in range(3):
        with Silent():
            assert chain.save()["tried"] == same.save()["tried"] and chain.said["budget"] == "2%"
        bowl.move(), other.move()


# an evaluation that is of no use


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_drafts_that_have_no_loss_are_not_taken(value):
    bowl = Bowl()

    def evaluate(state: Any) -> float:
        rise = bowl.rise(state["model"])
        return rise if rise < 1e-3 else value

    chain = Chain(bowl, nats=0.05, evaluate=evaluate)
    with Silent():
        said = chain.save()
    assert said["tried"][0]["rise"] == str(value)
    assert chain.rise < 1e-3


# a ratio


LARGE = {"a.weight": (300, 256), "b.weight": (256, 300), "c.bias": (300,)}


@pytest.mark.parametrize("ratio", [14.0, 20.0, 30.0])
def test_the_whole_state_becomes_as_small_as_was_asked_for(ratio):
    bowl = Bowl(shapes=LARGE)
    chain = Chain(bowl, ratio=ratio)
    for _ in range(3):
        chain.save()
        assert chain.report.ratio == pytest.approx(ratio, rel=0.1)
        bowl.move(0.03)


@pytest.mark.parametrize(("options", "most"), [({"ratio": 5000}, 20), ({"ratio": 4, "moments": "exact"}, 1.3)])
def test_a_ratio_that_cannot_be_had_is_refused_before_anything_is_written_and_what_can_be_had_is_named(options, most):
    chain = Chain(Bowl(shapes=LARGE), **options)
    with pytest.raises(PolicyError, match=f"ratio: {options['ratio']}x, .* expected at most") as caught:
        chain.save()
    assert chain.store.steps() == []
    reachable = float(caught.value.expected.removeprefix("at most "))
    assert most < reachable < options["ratio"]
    other = Chain(Bowl(shapes=LARGE), **options | {"ratio": reachable})
    with Silent():
        other.save()
    assert other.report.ratio > 0.9 * reachable


def test_a_ratio_that_cannot_be_had_any_more_does_not_end_a_run():
    bowl = Bowl(shapes=LARGE)
    chain = Chain(bowl, ratio=14)
    chain.save()
    bowl.center["d.weight"] = normal(900, 900).double()  # which no scheme touches
    bowl.v["d.weight"] = torch.ones(900, 900)
    with pytest.warns(LossWarning, match="ratio: 14x, but the largest steps"):
        assert chain.save()["size"] == MAX_LOG_STEP
    assert chain.store.steps() == [1, 2]


def test_what_costs_nothing_does_not_count_beside_a_ratio():
    """Dropped moments, copies of the weights in 16 bits, and a tied weight that is saved twice."""
    weights = {"a.weight": normal(300, 256), "b.weight": normal(256, 300, seed=1)}
    narrow = {name: x.bfloat16() for name, x in weights.items()}
    tied = adam(weights)
    tied["model"] = {**weights, "head.weight": weights["a.weight"].clone()}
    cases = [
        (adam(weights), {"ratio": 25.0, "moments": "drop"}),
        ({"model": narrow, "masters": weights}, {"ratio": 12.0}),
        (tied, {"ratio": 30.0}),
    ]
    for state, options in cases:
        report = sp.Store(MemoryStorage()).save(1, state, scheme=sp.Fisher(**options))
        assert report.ratio == pytest.approx(options["ratio"], rel=0.1)


# an error


MATRICES = {"a.weight": (96, 64), "b.weight": (64, 96), "c.weight": (16, 4, 3, 3)}


@pytest.mark.parametrize(("keyframe_every", "error"), each_value([1, None], [0.003, 0.03, 0.1]))
def test_the_error_is_as_large_as_was_asked_for(error, keyframe_every):
    """Later in a chain it may be half as large again, where weights that only shake stay at their points."""
    bowl = Bowl(shapes=MATRICES)
    bowl.v["b.weight"] = bowl.v["b.weight"] * 4
    chain = Chain(bowl, keyframe_every, relative_error=error)
    for _ in range(3):
        said = chain.save()
        found = bowl.errors(chain.model)
        assert 0.9 * error < found < (1.1 if chain.report.keyframe else 1.5) * error
        assert from_log_step(said["size"]) == pytest.approx(error * math.sqrt(12), rel=0.05)
        bowl.move(0.02)


@pytest.mark.parametrize("error", [1e-12, 1e-300])
def test_weights_that_cannot_be_written_so_finely_are_exact_and_named(error):
    bowl = Bowl()
    chain = Chain(bowl, relative_error=error)
    with pytest.warns(LossWarning, match=r"too large for the grid .*model/a\.weight"):
        said = chain.save()
    assert said["left_out"] == [f"model/{name}" for name in bowl.center] and bowl.rise(chain.model) == 0
    assert (
        "out of reach of its steps" in chain.report.exact.values() and "not finite" not in chain.report.exact.values()
    )


def test_the_largest_error_leaves_hardly_more_than_signs():
    bowl = Bowl()
    chain = Chain(bowl, relative_error=1)
    said = chain.save()
    assert said["size"] < 1 << 10 and chain.report.weights_ratio > 18
    assert all(
        float((x - bowl.center[name]).norm() / bowl.center[name].norm()) < 1.2 for name, x in chain.model.items()
    )


def test_what_is_asked_for_by_error_or_ratio_is_measured_too_where_it_can_be():
    for options in ({"relative_error": 0.05}, {"ratio": 6}):
        bowl = Bowl()
        chain = Chain(bowl, evaluate=bowl.evaluate, **options)
        (line,) = chain.save()["tried"]
        assert line["rise"] == pytest.approx(chain.rise, rel=1e-3) and chain.calls == 4 + 2  # entries


@pytest.mark.parametrize("options", [{"relative_error": 0.05}, {"ratio": 6}])
def test_what_is_asked_for_by_error_or_ratio_is_predicted_where_the_number_of_terms_is_known(options):
    (known,), (unknown,) = (Chain(Bowl(), terms=terms, **options).save()["tried"] for terms in (TERMS, None))
    assert known["curvature"] > 0 and unknown["curvature"] is None and known["slope"] == unknown["slope"]


@pytest.mark.parametrize("options", [{"relative_error": 0.05}, {"ratio": 8}])
def test_the_same_error_is_better_where_the_loss_is_known(options):
    """Of the same number of bits, more go where it matters."""

    def saved(change: Callable[[Bowl], None]) -> Chain:
        bowl = Bowl(shapes=LARGE)
        bowl.v = {name: squares(*x.shape, octaves=3, seed=i) for i, (name, x) in enumerate(bowl.center.items())}
        truth = bowl.v
        change(bowl)
        chain = Chain(bowl, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LossWarning)
            chain.save()
        bowl.v = truth
        return chain

    def blind(bowl: Bowl) -> None:
        bowl.v = {name: torch.full_like(x, float(x.mean())) for name, x in bowl.v.items()}

    known, unknown = saved(lambda bowl: None), saved(blind)
    assert known.rise < 0.8 * unknown.rise


def test_a_run_that_goes_on_knows_what_the_manifest_says():
    scheme = sp.Fisher()
    for size, terms in ((3, 5.0), (None, None), (-7, None)):
        scheme.resume({"scheme": "fisher", "size": size, "terms": terms}, 1)
        assert scheme._memory == RunMemory(size, terms)


def test_what_no_manifest_of_ours_says_is_passed_over():
    for loss in [
        None,
        [],
        "x",
        {},
        {"scheme": "inshrinkerator", "size": 3, "terms": 2.0},
        {"scheme": "fisher", "size": "3", "terms": "2"},
        {"scheme": "fisher", "size": True, "terms": -1.0},
        {"scheme": "fisher", "size": 1 << 40, "terms": math.inf},
        {"scheme": "fisher", "terms": math.nan},
    ]:
        scheme = sp.Fisher(terms=9)
        scheme.resume(loss, 2)
        assert scheme._memory == RunMemory(None, 9.0)


# after a bad moment


def test_steps_that_a_bad_moment_made_small_grow_again():
    bowl, factor = Bowl(shapes=LARGE), 1.0
    chain = Chain(bowl, budget="1%", evaluate=lambda state: 1.0 + factor * bowl.rise(state["model"]))
    steps, ratios = [], []
    for number in range(16):
        factor = 30.0 if number == 4 else 1.0
        with Silent():
            steps.append(chain.save()["tried"][-1]["step"])
        ratios.append(chain.report.ratio)
        assert number == 4 or chain.bowl.rise(chain.model) <= 0.01
        bowl.move(0.03)
    assert steps[4] < steps[3] / 4 and steps[-1] > 0.7 * steps[3]
    assert ratios[-1] > 0.8 * ratios[3] > 1.5 * ratios[5]


def test_larger_steps_that_cost_too_much_are_tried_less_and_less_and_change_nothing():
    """Of a loss that falls by what hysteresis averages, rises say that all is well; larger steps say that it is not."""
    bowl, trials = Bowl(17.0), []

    def evaluate(state: Any) -> float:
        rise = bowl.rise(state["model"])
        return 1.0 + (rise if rise > 0.007 else 0.0)

    chain = Chain(bowl, budget="1%", evaluate=evaluate)
    for _ in range(20):
        with Silent():
            said = chain.save()
        trials.append(len(said["tried"]))
        assert evaluate({"model": chain.model}) <= 1.01
        bowl.move(0.03)
    tried = [number for number, count in enumerate(trials) if count > 1 and number > 0]
    assert tried == [5, 14]  # after 4 quiet saves, and then after 8


def test_weights_near_a_constant_do_not_make_a_diverged_training():
    bowl = Bowl(shapes=LARGE)
    bowl.center["norm.weight"] = 1 + 1e-6 * normal(300)
    bowl.v["norm.weight"] = torch.full((300,), 1e-6)
    chain = Chain(bowl, budget="0.1%", evaluate=bowl.evaluate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chain.save()
    assert "model/norm.weight" in chain.report.exact
