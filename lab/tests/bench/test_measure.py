"""Every scheme on the same checkpoints: what is said of it is what happened."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.small_training import Digits, Run, Silent

import shrinkpoint as sp
from shrinkpoint.cli.arguments import import_function
from shrinkpoint.errors import NotFoundError, PolicyError
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint_lab.bench.measure import Distortion, measure
from shrinkpoint_lab.bench.result import TABLE_HEADER, table_rows
from shrinkpoint_lab.bench.series import QualityFunction, open_series
from shrinkpoint_lab.bench.systems import SYSTEMS, make_system

STEPS = (1, 2, 3)
EXACT_AT_FIRST = (
    "lc-checkpoint(bits=2)",
    "lc-checkpoint(bits=3)",
    "lc-checkpoint(bits=2, paper=True)",
    "lc-checkpoint(bits=3, paper=True)",
    "scar",
    "topn",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    run, folder = Run(steps=30), tmp_path_factory.mktemp("harness")
    with sp.Store(folder) as store:
        for step in STEPS:
            store.save(step, {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})
            run.steps(10)
    return run, folder


@pytest.fixture(scope="module")
def evaluate(recorded):
    run, _ = recorded
    model = Digits()

    def loss(state):
        model.load_state_dict(state["model"])
        return run.evaluate(model)

    return loss


def outcome(name, recorded, evaluate, **more):
    with Silent():
        return measure(
            make_system(name, evaluate=evaluate, threshold=0.05, **more),
            open_series([recorded[1]]),
            QualityFunction(evaluate),
        )


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_scheme_runs_and_says_what_it_lost(name, recorded, evaluate):
    found = outcome(name, recorded, evaluate)
    assert [row.step for row in found.rows] == list(STEPS) and not found.failure
    assert found.rows[0].keyframe and not any(row.keyframe for row in found.rows[1:])
    for row in found.rows:
        assert row.raw > row.stored > 0 and row.encode > 0 and row.decode > 0
        assert row.exact is (name == "lossless" or (row.keyframe and name in EXACT_AT_FIRST))
        assert row.rise == pytest.approx((row.returned - row.quality) / row.quality)
        assert set(row.bits) == set(row.values) == {"W", "m", "v"}
    assert found.ratio == sum(row.raw for row in found.rows) / sum(row.stored for row in found.rows)
    assert len(table_rows([found])[0]) == len(TABLE_HEADER)


def test_what_loses_nothing_has_no_error_and_no_rise(recorded, evaluate):
    found = outcome("lossless", recorded, evaluate)
    assert all(set(row.errors.values()) == {0.0} and row.rise == 0 and row.retention is None for row in found.rows)


def test_a_chain_may_have_an_end(recorded, evaluate):
    found = outcome("lc-checkpoint(bits=3)", recorded, evaluate, keyframe_every=2)
    assert [row.keyframe for row in found.rows] == [True, False, True]
    assert [row.errors["W"] == 0 for row in found.rows] == [True, False, True]


def test_schemes_that_search_keep_the_threshold_and_say_what_they_chose(recorded, evaluate):
    found = outcome("inshrinkerator", recorded, evaluate)
    assert all(row.rise <= 0.05 and row.choice["bins"] > 1 and row.searched > 0 for row in found.rows)


def test_errors_are_those_of_the_definition():
    state = {"weight": torch.tensor([[3.0, 4.0]] * 2)}
    flat = flatten(state)
    found = Distortion.measure(flat, {"weight": torch.tensor([[3.0, 3.0]] * 2)})
    assert found.weights == pytest.approx(1 / 5) and found.moment1 is None and found.update is None and not found.exact
    assert Distortion.measure(flat, {"weight": torch.full((2, 2), math.nan)}).weights != 0


def test_a_scheme_that_fails_does_not_stop_the_others(recorded, monkeypatch):
    def broken(*_, **__):
        raise PolicyError("qd", found="boom", do="stop")

    monkeypatch.setattr(sp.QD, "plan", broken)
    with Silent():
        found = measure(make_system("qd", evaluate=lambda state: 1.0), open_series([recorded[1]]))
    assert not found.rows and "boom" in found.failure and found.to_json() == {"name": "qd", "failure": found.failure}


def test_who_needs_a_quality_says_so():
    with pytest.raises(PolicyError, match="--evaluate"):
        make_system("inshrinkerator")
    with pytest.raises(PolicyError, match="lossless"):
        make_system("zip")


def test_files_are_a_series_too(recorded, tmp_path):
    run, _ = recorded
    paths = []
    for step in range(3):
        paths.append(tmp_path / f"{step}.safetensors")
        sp.save({"model": run.model.state_dict()}, paths[-1])
    found = measure(make_system("lossless"), open_series(paths))
    assert [row.step for row in found.rows] == [1, 2, 3] and found.rows[-1].exact


def test_what_is_no_series_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match="a store with checkpoints"):
        open_series([tmp_path])
    with pytest.raises(NotFoundError, match="nothing"):
        open_series([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(NotFoundError, match="a directory"):
        open_series([tmp_path, tmp_path])


@pytest.mark.parametrize("text", ["evaluate", ":f", "math:", "no_such_module_here:f", "math:nothing", "math:pi"])
def test_a_quality_that_is_not_there_is_refused(text):
    with pytest.raises(PolicyError, match="evaluate"):
        import_function(text, "evaluate")


def test_a_quality_is_found_by_its_name():
    assert import_function("math:sqrt", "evaluate") is math.sqrt


@pytest.mark.parametrize("value", ["no number", None])
def test_an_answer_that_is_no_number_is_refused(value):
    with pytest.raises(PolicyError, match="a loss or a score"):
        QualityFunction(lambda state: value).value_of({})


def test_a_score_falls_where_a_loss_rises():
    assert QualityFunction(abs, higher_is_better=True).rise(0.8, 0.6) == pytest.approx(0.25)
    assert QualityFunction(abs).rise(0.8, 0.6) == pytest.approx(-0.25)
    assert QualityFunction(abs).rise(0.0, 0.1) == pytest.approx(0.1)
