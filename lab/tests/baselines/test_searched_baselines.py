"""The baselines: the same search and the same promises, each with a quantizer and a coder of its own."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from helpers.round_trip import write
from helpers.small_training import Digits, Run

import shrinkpoint as sp
from shrinkpoint.schemes.evaluate import TrialEvaluator
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.schemes.search.candidates import PreviousCodes
from shrinkpoint.schemes.search.scheme import SearchScheme
from shrinkpoint.schemes.select import select_tensors
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import flatten

SCHEMES: dict[str, type[SearchScheme]] = {
    "inshrinkerator": sp.Inshrinkerator,
    "qd": sp.QD,
    "cnr": sp.CNR,
    "gobo": sp.GOBO,
}
CONFIGS = {
    "inshrinkerator": {"bins": 16, "embedding_bins": 32, "prune": 0.1, "protect": 0.005},
    "qd": {"least": 8, "most": 32},
    "cnr": {"bins": 16, "steps": 25, "range": 0.2},
    "gobo": {"bins": 16, "embedding_bins": 32},
}


@lru_cache
def states() -> list[dict[str, torch.Tensor]]:
    run = Run(lambda: Digits(width=256), steps=150)
    return [copy.deepcopy(dict(run.steps(8).model.state_dict())) for _ in range(3)]


def evaluate(state) -> float:
    model = Digits(width=256)
    model.load_state_dict(state)
    return Run(lambda: model).loss()


@lru_cache
def found(name: str, threshold: float = 0.05):
    """The file and the loaded state of the first of the states, as a search chose it."""
    scheme = SCHEMES[name](threshold=threshold, evaluate=evaluate)
    return write(states()[0], scheme=scheme)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_meets_the_threshold(name):
    base = evaluate(states()[0])
    written = found(name)
    loaded = written.read()
    assert evaluate(loaded) <= 1.05 * base * (1 + 1e-6)
    search = written.report.loss_report
    assert search["scheme"] == name and search["degradation"] == pytest.approx(evaluate(loaded) / base - 1, abs=1e-6)
    assert written.report.weights_ratio > 2.5
    for key, value in states()[0].items():
        exact = torch.equal(loaded[key], value)
        assert exact is (key not in ("body.0.weight", "body.3.weight"))


def test_of_the_four_inshrinkerator_is_the_smallest():
    ratios = {name: found(name).report.weights_ratio for name in SCHEMES}
    assert max(ratios, key=ratios.__getitem__) == "inshrinkerator", ratios
    assert ratios["inshrinkerator"] > 1.15 * ratios["cnr"], ratios


def codes(written) -> list[str]:
    names = {"packed": "packed", "cyclic": "cyclic"}
    recipes = [one["codes"] for one in written.recipes().values() if one["kind"] == "quantized"]
    return [next((names[key] for key in one if key in names), "run") for one in recipes]


def test_each_has_its_own_coder():
    kinds, based = {}, {}
    for name, scheme in SCHEMES.items():
        first = write(states()[0], scheme=scheme(config=CONFIGS[name]))
        second = write(states()[1], first, scheme=scheme(config=CONFIGS[name]))
        kinds[name] = {*codes(first), *codes(second)}
        based[name] = {one.get("base", False) for one in second.recipes().values() if one["kind"] == "quantized"}
        assert second.read()["head.bias"].equal(states()[1]["head.bias"])
    assert kinds["qd"] == {"cyclic"} and based["qd"] == {True}
    assert kinds["cnr"] == {"packed"} and based["cnr"] == {False}
    assert kinds["gobo"] <= {"packed", "run"} and based["gobo"] == {False}
    assert kinds["inshrinkerator"] == {"run"} and based["inshrinkerator"] == {True}


def test_outliers_of_gobo_are_exact_and_its_codes_begin_with_them():
    state = copy.deepcopy(states()[0])
    state["body.0.weight"][5, 5] = 9.0
    kept = sp.GOBO(config=CONFIGS["gobo"]).quantize(flatten(state), None)
    symbols = kept.quantized["body.0.weight"]
    assert symbols.first_code == 1 and int(symbols.codes[5, 5]) == 0
    assert torch.equal(
        kept.state.tensors["body.0.weight"][symbols.codes == 0], state["body.0.weight"][symbols.codes == 0]
    )


def test_bins_of_qd_lie_between_least_and_most():
    for least, most in ((8, 8), (8, 64), (128, 256), (256, 8)):
        kept = sp.QD(config={"least": least, "most": most}).quantize(flatten(states()[0]), None)
        assert all(least <= one.bins <= max(least, most) for one in kept.quantized.values())


@pytest.mark.parametrize("name", SCHEMES)
def test_predictions_are_near_the_files(name):
    flat = flatten(states()[0])
    scheme = SCHEMES[name](config=CONFIGS[name])
    tensors = select_tensors(flat, GlobalTensors.from_state(flat)).tensors
    guess = scheme.candidates(
        tensors, PreviousCodes(), TrialEvaluator(flat, evaluate), GlobalStats(GlobalTensors.from_state(flat), tensors)
    ).size(scheme._fixed_point)
    written = write(states()[0], scheme=scheme)
    quantized = [one for one in written.records() if one.recipe["kind"] == "quantized"]
    real = sum(memoryview(part).nbytes for one in quantized for part in one.parts.values())
    assert 0.7 < guess / real < 1.4


@pytest.mark.parametrize("name", SCHEMES)
def test_a_name_is_known_and_needs_more(name):
    with pytest.raises(sp.errors.PolicyError, match="evaluate="):
        get_scheme(name)
    assert SCHEMES[name].id == name and get_scheme(SCHEMES[name](config=CONFIGS[name])).id == name


@pytest.mark.parametrize("name", SCHEMES)
def test_wrong_settings_are_refused(name):
    with pytest.raises(sp.errors.PolicyError, match=next(iter(CONFIGS[name]))):
        SCHEMES[name](config={"fineness": 3})


@pytest.mark.parametrize("name", SCHEMES)
def test_a_search_stays_near_and_the_next_file_is_read_back(name):
    scheme = SCHEMES[name](threshold=0.1, evaluate=evaluate)
    parent = None
    for state in states():
        parent = write(state, parent, scheme=scheme)
        assert evaluate(parent.read()) <= 1.1 * evaluate(state) * (1 + 1e-6)
    assert parent.report.loss_report["searches"][0]["method"] == "neighbourhood"
