"""Promise: the model of many ranks says what real ranks send, store and hold; and its benchmark runs to the end."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.paths import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
EXACT = ("messages of rank 0", "files", "links")
SIZES = ("bytes of the manifest", "bytes rank 0 receives", "bytes rank 0 sends")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and traffic are measured by /proc")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("scale_out", "scale_out_model", "scale_out_plans", "scale_out_run")
    return {name: importlib.import_module(name) for name in names}


def errors_of(modules: dict[str, ModuleType], run: Any, operation: str, ranks: int) -> dict[str, float]:
    """The relative errors of what is predicted without a constant of this or of any other run."""
    model = modules["scale_out_model"]
    calls, none, pair = run[0]["rows"][0]["calls"], model.Linear((0.0, 0.0, 0.0)), model.Linear((1.0, 1.0))
    nothing = model.Linear((0.0, 0.0))
    constants = model.Operation(pair, none, 0.0, none, pair, calls, nothing, 0.0)
    shapes = tuple(modules["scale_out"].GPTS["tiny"].shapes())
    figures = model.predict(constants, operation, shapes, ranks, cores=2)
    return {row["figure"]: row["error"] for row in model.compare(figures, model.measured(run, operation))}


def test_messages_and_manifests_of_real_ranks_are_as_predicted(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    states = modules["scale_out"].make_states(tmp_path / "states", "tiny", steps=1)
    run = modules["scale_out_run"].run_ranks(2, states, tmp_path / "run")
    for operation in ("lossless, keyframe", "lossless, delta", "lossless, delta, warm"):
        errors = errors_of(modules, run, operation, 2)
        assert [errors.get(name, 0) for name in EXACT] == [0, 0, 0]
        assert all(abs(errors[name]) < 0.2 for name in SIZES), errors
    for rank in run:
        assert {row["operation"].partition(",")[0] for row in rank["rows"]} == {"lossless", "fisher"}


def test_measurements_on_a_line_are_met_and_no_constant_is_negative(modules: dict[str, ModuleType]) -> None:
    linear = modules["scale_out_model"].Linear
    line = linear.fit([((10.0, 1.0), 32.0), ((10.0, 4.0), 38.0), ((20.0, 1.0), 62.0)])
    assert line.constants == pytest.approx((3.0, 2.0)) and line.at(5, 5) == pytest.approx(25)
    near = linear.fit([((10.0, 1.0), 30.0), ((10.0, 4.0), 40.0), ((20.0, 1.0), 66.0)])
    assert min(near.constants) > 0 and near.at(10.0, 1.0) == pytest.approx(30, rel=0.1)
    falling = linear.fit([((10.0, 1.0), 30.0), ((10.0, 4.0), 20.0)])
    assert falling.constants[1] == 0 and 20 < falling.at(10.0, 1.0) < 30
    assert linear.fit([((10.0, 1.0), 0.0), ((10.0, 4.0), 0.0)]) == linear((0.0, 0.0))


def test_repeats_become_their_medians(modules: dict[str, ModuleType]) -> None:
    rows = [{"rows": [{"operation": "load", "seconds": seconds}], "files": 3} for seconds in (1.0, 9.0, 2.0)]
    assert modules["scale_out_model"].median(rows) == {"rows": [{"operation": "load", "seconds": 2.0}], "files": 3}


@pytest.mark.parametrize("ranks", [1, 5])
def test_made_up_metadata_is_what_a_coordinator_has(ranks: int, modules: dict[str, ModuleType], tmp_path: Path) -> None:
    plans = modules["scale_out_plans"]
    job = plans.Job(plans.transformer(2, 8, 16, 4, 20), ranks)
    row = plans.coordinate(job, tmp_path / "a")
    assert row["bytes"]["manifest"] == pytest.approx(len(job.manifest(0)), rel=0.1)
    assert row["bytes"]["metadata"] == pytest.approx(len(plans.pickle.dumps(job.metadata())), rel=0.1)
    directory = plans.look_at_directory(job, tmp_path / "b")
    assert directory["bytes"]["manifest"] == pytest.approx(row["bytes"]["manifest"], rel=0.1)


@pytest.mark.nightly
def test_the_benchmark_writes_its_checks_and_its_table(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scale_out, plans = modules["scale_out"], modules["scale_out_plans"]
    monkeypatch.setattr(scale_out, "MODELS", {"8 B": plans.transformer(2, 64, 128, 32, 500)})
    options = ["--calibrated", "tiny", "--checked", "tiny deep", "--ranks", "1", "2", "--repeats", "1"]
    options += ["--coordinated", "2", "4", "8", "--largest", "8", "--table", "8", "16"]
    folders = ["--memory", str(tmp_path), "--folder", str(tmp_path), "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["scale_out.py", *options, *folders])
    scale_out.main()
    document = json.loads((tmp_path / "out.json").read_text())
    checked = document["checks"]
    assert {row["model"] for row in checked} == {"tiny deep", "8 B"}
    assert {row["figure"] for row in checked} >= {*EXACT, *SIZES, "seconds", "memory beyond the state, mean rank"}
    assert all(row["error"] == 0 for row in checked if row["figure"] in EXACT)
    assert [row["ranks"] for row in document["table"]] == [8] * 4 + [16] * 4
    assert "within 20 %" in capsys.readouterr().out
