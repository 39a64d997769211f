"""A search finds a setting that holds, remembers it, and says what it did when it cannot."""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import pytest
import torch
from helpers.small_training import Digits, Run, Silent
from helpers.strategies import difference, same

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.schemes import SearchScheme, get_scheme
from shrinkpoint.schemes.inshrinkerator.scheme import SPACE
from shrinkpoint.schemes.search.space import is_dominated
from shrinkpoint.tensors.flat_state import flatten

CONFIG = {"bins": 8, "embedding_bins": 32, "prune": 0.2, "protect": 0.005}
SAFEST = {"bins": 32, "embedding_bins": 32, "prune": 0.0, "protect": 0.01, "metric": "magnitude"}


class Distance:
    """An `evaluate` without a forward pass: one, and the relative squared distance from given weights, scaled.

    Attributes:
        strict: the scale.
        calls: how often it was asked.
    """

    def __init__(self, state, strict: float = 1.0) -> None:
        self.origin = copy.deepcopy(dict(state))
        self.strict, self.calls = strict, 0

    def __call__(self, state) -> float:
        self.calls += 1
        far = size = 0.0
        for name, x in self.origin.items():
            if x.dim() == 2:
                far, size = far + float((state[name] - x).square().sum()), size + float(x.square().sum())
        return 1 + self.strict * far / size


def a_state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"a.weight": torch.randn(80, 80), "a.bias": torch.randn(80), "b.weight": 0.1 * torch.randn(96, 64)}


def settled(scheme: SearchScheme, state, reference=None):
    return scheme.plan(flatten(state), reference)


def loss_of(scheme: SearchScheme, state):
    return settled(scheme, state).loss


# transfer: one call on a bare state


def test_a_bare_state_becomes_a_small_file_of_the_quality_that_was_asked_for(tmp_path):
    run = Run(lambda: Digits(width=256), steps=150)
    state = run.model.state_dict()
    before = copy.deepcopy(dict(state))

    def evaluate(candidate):
        fresh = Digits(width=256)
        fresh.load_state_dict(candidate)
        return run.evaluate(fresh)

    path = tmp_path / "small.safetensors"
    report = sp.save(state, path, scheme=sp.Inshrinkerator(threshold=0.05, evaluate=evaluate))
    assert difference(dict(state), before) is None
    loaded, plain = sp.load(path), run.loss()
    assert evaluate(loaded).item() <= 1.05 * plain
    assert report.weights_ratio > 6 and path.stat().st_size == report.stored_bytes < report.raw_bytes / 5
    assert report.loss_report["degradation"] == pytest.approx(evaluate(loaded).item() / plain - 1)


def test_evaluate_may_load_the_candidates_into_the_very_model_they_came_from(tmp_path):
    run = Run(steps=60)
    before = run.photo()

    def evaluate(candidate):
        run.model.load_state_dict(candidate)
        return run.evaluate(run.model)

    run.model.eval()
    before["training"] = [module.training for module in run.model.modules()]
    sp.save(run.model.state_dict(), tmp_path / "a", scheme=sp.Inshrinkerator(threshold=0.1, evaluate=evaluate))
    assert difference(before, run.photo()) is None
    assert not same(dict(run.model.state_dict()), dict(sp.load(tmp_path / "a")))


def test_a_second_file_may_be_a_delta_to_the_first(tmp_path):
    first, scheme = a_state(), sp.Inshrinkerator(config=CONFIG)
    sp.save(first, tmp_path / "a", scheme=scheme)
    second = {name: x + 0.001 * x.std() for name, x in first.items()}
    whole, delta = (
        sp.save(second, tmp_path / "b", scheme=scheme),
        sp.save(second, tmp_path / "c", scheme=scheme, base=tmp_path / "a"),
    )
    assert delta.weights_ratio > 1.5 * whole.weights_ratio
    assert sp.load(tmp_path / "c")["a.bias"].equal(second["a.bias"])


def test_after_an_error_the_file_is_exact(tmp_path):
    def evaluate(candidate):
        raise OSError("the data are gone")

    with pytest.warns(LossWarning, match="OSError: the data are gone"):
        sp.save(a_state(), tmp_path / "a", scheme=sp.Inshrinkerator(evaluate=evaluate))
    assert difference(a_state(), sp.load(tmp_path / "a")) is None


# what is chosen, and what comes after


def test_on_paper_the_search_goes_along_the_diagonal():
    scheme = sp.Inshrinkerator(threshold=0.05, evaluate=Distance(a_state()), paper=True)
    assert [one["method"] for one in loss_of(scheme, a_state())["searches"]] == ["diagonal"]


def test_a_later_choice_is_never_more_aggressive_unless_that_is_allowed():
    for coarser in (False, True):
        evaluate = Distance(a_state(), 4.0)
        scheme = sp.Inshrinkerator(threshold=0.05, evaluate=evaluate, coarser=coarser)
        first = loss_of(scheme, a_state())
        points, tried = [SPACE.point(first["chosen"])], []
        evaluate.strict = 0.0  # from now on everything holds
        for _ in range(3):
            later = loss_of(scheme, a_state())
            points.append(SPACE.point(later["chosen"]))
            tried += [SPACE.point(one["settings"]) for search in later["searches"] for one in search["trials"]]
        assert any(is_dominated(b, a) for a, b in itertools.pairwise(points)) is coarser
        if not coarser:
            assert not any(is_dominated(one, points[0]) for one in tried)


def test_where_no_neighbour_holds_the_whole_space_is_searched_but_for_what_is_bolder():
    evaluate = Distance(a_state(), 0.5)
    scheme = sp.Inshrinkerator(threshold=0.05, evaluate=evaluate)
    last = SPACE.point(loss_of(scheme, a_state())["chosen"])
    evaluate.strict = 10.0
    loss = loss_of(scheme, a_state())
    assert [one["method"] for one in loss["searches"]] == ["neighbourhood", "branch and bound"]
    assert loss["degradation"] <= 0.05
    tried = [SPACE.point(one["settings"]) for search in loss["searches"] for one in search["trials"]]
    assert not any(is_dominated(one, last) for one in tried)


def test_a_scheme_goes_on_from_what_a_manifest_says():
    state = a_state()
    evaluate = Distance(state, 2.0)
    loss = loss_of(sp.Inshrinkerator(threshold=0.05, evaluate=evaluate), state)
    other = sp.Inshrinkerator(threshold=0.05, evaluate=evaluate)
    other.resume(loss)
    assert [one["method"] for one in loss_of(other, state)["searches"]] == ["neighbourhood"]
    for foreign in (
        None,
        "junk",
        {},
        {"scheme": "qd", "chosen": loss["chosen"]},
        {**loss, "chosen": {"bins": 3}},
        {**loss, "fallback": "safest"},
        {**loss, "chosen": None},
    ):
        fresh = sp.Inshrinkerator(threshold=0.05, evaluate=evaluate)
        fresh.resume(foreign)
        assert [one["method"] for one in loss_of(fresh, state)["searches"]] == ["branch and bound"]


def test_the_record_says_what_was_tried_measured_and_chosen():
    seen = []
    scheme = sp.Inshrinkerator(
        threshold=0.05, evaluate=Distance(a_state()), progress=lambda trial, best, left: seen.append((trial, left))
    )
    loss = loss_of(scheme, a_state())
    assert loss["scheme"] == "inshrinkerator" and loss["threshold"] == 0.05 and loss["optimizer"] == "exact"
    assert loss["quality"] == 1.0 and loss["noise"] == 0.0 and loss["left_out"] == [] and loss["seconds"] >= 0
    trials = [one for search in loss["searches"] for one in search["trials"]]
    assert [one["settings"] for one in trials] == [SPACE.settings(trial.point) for trial, _ in seen]
    assert [one["degradation"] for one in trials] == [trial.degradation for trial, _ in seen]
    assert any(one["settings"] == loss["chosen"] and one["degradation"] == loss["degradation"] for one in trials)
    assert seen[-1][1] == 0


def test_a_line_a_trial_is_written_if_asked_for(capsys):
    for progress in (True, False):
        loss = loss_of(sp.Inshrinkerator(evaluate=Distance(a_state()), progress=progress), a_state())
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (sum(len(one["trials"]) for one in loss["searches"]) if progress else 0)
        assert not lines or "done" in lines[-1]


def test_a_score_that_is_better_when_higher():
    state = a_state()
    far = Distance(state)
    for higher in (True, False):
        scheme = sp.Inshrinkerator(threshold=0.05, higher_is_better=higher, evaluate=lambda one: 2 - far(one))
        loss = loss_of(scheme, state)
        assert loss["degradation"] > 0 if higher else loss["degradation"] < 0
        bins = (loss["chosen"]["bins"], loss["chosen"]["prune"])
        assert bins > (4, 0.5) if higher else bins == (4, 0.5)


# evaluate says odd things


def test_a_candidate_without_a_number_does_not_hold():
    distance = Distance(a_state())

    def evaluate(state):
        value = distance(state)
        return value if value < 1.02 else math.nan

    loss = loss_of(sp.Inshrinkerator(threshold=0.5, evaluate=evaluate), a_state())
    assert 0 < loss["degradation"] < 0.02
    assert any(one["degradation"] == "nan" for one in loss["searches"][0]["trials"])


@pytest.mark.parametrize("answer", [math.nan, math.inf])
@pytest.mark.parametrize("fallback", ["safest", "lossless"])
def test_where_even_the_safest_setting_breaks_the_model_nothing_is_lost(answer, fallback):
    distance = Distance(a_state())
    scheme = sp.Inshrinkerator(evaluate=lambda one: 1.0 if distance(one) == 1 else answer, fallback=fallback)
    with pytest.warns(LossWarning, match="this checkpoint is exact"):
        made = settled(scheme, a_state())
    assert not made.quantized and made.loss["fallback"] == "lossless"


def test_a_threshold_that_nothing_meets_is_said_and_the_safest_setting_taken_if_that_was_asked_for():
    evaluate = Distance(a_state(), 1e6)
    scheme = sp.Inshrinkerator(threshold=0.001, evaluate=evaluate, fallback="safest")
    with pytest.warns(LossWarning, match=r"no setting keeps the rise within 0\.10%.*the safest one is used"):
        loss = loss_of(scheme, a_state())
    assert loss["chosen"] == SAFEST and loss["fallback"] == "safest" and loss["degradation"] > 0.001
    evaluate.strict = 0.001
    assert loss_of(scheme, a_state())["chosen"]["bins"] < 32  # what was taken in need binds nobody


@pytest.mark.parametrize("fallback", ["lossless", "safest"])
def test_where_no_setting_holds_the_uniform_grids_of_qd_are_tried_before_anything_else(tmp_path, fallback):
    evaluate = Distance(a_state(), 10.0)
    scheme = sp.Inshrinkerator(threshold=0.005, evaluate=evaluate, fallback=fallback)
    report = sp.save(a_state(), tmp_path / "a", scheme=scheme)
    loss = report.loss_report
    assert loss["space"] == "qd" and "fallback" not in loss and 0 < loss["degradation"] <= 0.005
    assert [one.get("space") for one in loss["searches"]] == [None, "qd"] and loss["searches"][0]["chosen"] is None
    assert {*loss["chosen"]} == {"least", "most"} and report.weights_ratio > 3
    assert evaluate(sp.load(tmp_path / "a")) == pytest.approx(1 + loss["degradation"])
    again = sp.Inshrinkerator(threshold=0.005, evaluate=Distance(a_state(), 1e-3))
    again.resume(loss)
    assert [one["method"] for one in loss_of(again, a_state())["searches"]] == ["branch and bound"]
    with pytest.warns(LossWarning, match="no setting keeps"):
        assert "space" not in loss_of(sp.Inshrinkerator(threshold=0.005, evaluate=evaluate, paper=True), a_state())


@pytest.mark.parametrize("kind", [sp.Inshrinkerator, sp.QD, sp.CNR, sp.GOBO])
def test_no_scheme_breaks_its_threshold_unless_that_was_asked_for(kind):
    with pytest.warns(LossWarning, match="no setting keeps .* this checkpoint is exact"):
        made = settled(kind(threshold=0.0, evaluate=Distance(a_state())), a_state())
    assert not made.quantized and made.loss["fallback"] == "lossless"
    with pytest.warns(LossWarning, match="no setting keeps .* the safest one is used"):
        made = settled(kind(threshold=0.0, evaluate=Distance(a_state()), fallback="safest"), a_state())
    assert made.quantized and made.loss["degradation"] > 0


def test_and_nothing_is_lost_if_nothing_was_asked_for(tmp_path):
    scheme = sp.Inshrinkerator(threshold=0.0, evaluate=Distance(a_state()), optimizer="reset")
    with pytest.warns(LossWarning, match="this checkpoint is exact"):
        report = sp.save(a_state(), tmp_path / "a", scheme=scheme)
    assert difference(a_state(), sp.load(tmp_path / "a")) is None
    assert "chosen" not in report.loss_report and report.loss_report["fallback"] == "lossless"


def test_a_threshold_of_zero_takes_what_is_no_worse():
    plain = a_state()

    def evaluate(one):  # it minds nothing but noise and zeros
        agrees = all(
            float((x * plain[name]).mean()) > 0.5 * float(plain[name].square().mean()) for name, x in one.items()
        )
        return 3.0 + (0.0 if agrees else 1.0)

    loss = loss_of(sp.Inshrinkerator(threshold=0, evaluate=evaluate), plain)
    assert loss["degradation"] == 0 and loss["chosen"]["bins"] == 4


def test_noise_is_said_and_taken_off_the_threshold():
    distance, calls = Distance(a_state()), []

    def evaluate(state):
        calls.append(state)
        return distance(state) + (0.04 if len(calls) == 2 else 0.0)

    scheme = sp.Inshrinkerator(threshold=0.05, evaluate=evaluate)
    with pytest.warns(LossWarning, match=r"differs by 4\.00%"):
        loss = loss_of(scheme, a_state())
    assert loss["noise"] == pytest.approx(0.04) and loss["degradation"] <= 0.0101
    quiet = loss_of(sp.Inshrinkerator(threshold=0.05, evaluate=Distance(a_state())), a_state())
    assert quiet["degradation"] > 0.0101


def test_little_noise_is_no_reason_to_warn():
    distance, calls = Distance(a_state()), []

    def evaluate(state):
        calls.append(state)
        return distance(state) * (1 + 1e-4 * (len(calls) % 2))

    assert loss_of(sp.Inshrinkerator(threshold=0.05, evaluate=evaluate), a_state())["noise"] > 0


def test_a_base_of_zero_is_compared_with_one():
    distance = Distance(a_state())
    loss = loss_of(sp.Inshrinkerator(threshold=0.05, evaluate=lambda state: distance(state) - 1), a_state())
    assert 0 < loss["degradation"] <= 0.05 and loss["quality"] == 0


# arguments


def test_loss_needs_a_bound_or_a_setting():
    for name in ("inshrinkerator", "qd", "cnr", "gobo"):
        with pytest.raises(PolicyError, match="evaluate= or config="):
            get_scheme(name)
        with pytest.raises(PolicyError, match="evaluate= or config="):
            sp.save(a_state(), "nowhere/at/all", scheme=name)
    with pytest.raises(PolicyError, match="one of 'lossless', 'inshrinkerator', 'fisher'"):
        get_scheme("zip")


def test_a_wrong_setting_is_refused_and_the_choices_named():
    parts = ({"bins": 7}, {"bins": "8"}, {"bits": 3}, {"prune": 0.25}, {"metric": "luck"}, {"protect": None})
    for config in ({}, {"bins": 8}, *(CONFIG | part for part in parts), [8, 32], 8, "bins"):
        with pytest.raises(PolicyError, match=r"config: .*bins \(4, 6, 8, 12, 16, 32\).*prune .*protect .*sensitivity"):
            sp.Inshrinkerator(config=config)


def test_a_fixed_setting_needs_no_evaluate():
    for metric in ({}, {"metric": "magnitude"}, {"metric": "sensitivity"}):
        loss = loss_of(sp.Inshrinkerator(config=CONFIG | metric), a_state())
        assert loss["chosen"] == CONFIG | {"metric": "magnitude"} | metric and "searches" not in loss


# weights


def test_a_search_does_not_need_contiguous_weights(tmp_path):
    state = {"a.weight": a_state()["a.weight"].t(), "b.weight": torch.randn(200, 200)[::2, ::2]}
    sp.save(state, tmp_path / "a", scheme=sp.Inshrinkerator(evaluate=Distance(state)))
    assert sp.load(tmp_path / "a")["b.weight"].shape == (100, 100)


def test_a_warning_that_is_an_error_leaves_the_caller_as_he_was(tmp_path):
    scheme = sp.Inshrinkerator(threshold=0.0, evaluate=Distance(a_state()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LossWarning):
            sp.save(a_state(), tmp_path / "a", scheme=scheme)
    with Silent():
        sp.save(a_state(), tmp_path / "a", scheme=scheme)
