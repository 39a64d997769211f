"""Promise: a chain's row has its deltas' bits and rises in the unit of the quality, and a later run takes its place."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.paths import REPOSITORY


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("fisher_sizes")


def test_rises_are_per_cent_of_a_loss_and_points_of_an_accuracy(sizes: ModuleType) -> None:
    (row,) = sizes.rows(_document("gpt", bits=0.25, rises=[0.008, 0.002, -0.004]), 0.93)
    assert row["weights x"] == 128
    assert row["keyframe bits"] == 2.5
    assert row["mean rise"] == pytest.approx(-0.05)  # of a loss of 2; the keyframe's is apart
    assert row["worst rise"] == pytest.approx(0.1)
    assert row["rise of the keyframe"] == pytest.approx(0.4)
    assert sizes.within(row)
    (points,) = sizes.rows(_document("resnet", bits=0.25, rises=[0, 1.0, 2.0]) | {"higher_is_better": True}, 0.93)
    assert (points["mean rise"], points["worst rise"], points["unit of rises"]) == (1.5, 2.0, "points")


def test_a_later_run_takes_the_place_of_its_settings(
    sizes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    earlier = next(iter(sizes.rows(_document("gpt", 0.5, [0.0, 0.01, 0.01]), 0.8)))
    del earlier["settings"]["share"]  # as files of before 2026-11-24 have it
    out.write_text(json.dumps({"runs": [earlier]}))
    for number, (workload, bits) in enumerate((("gpt", 0.5), ("reader", 1.0), ("gpt", 0.25))):
        source = tmp_path / f"{number}.json"
        source.write_text(json.dumps(_document(workload, bits, [0.0, 0.01, 0.01])))
        monkeypatch.setattr(sys, "argv", ["fisher_sizes.py", str(source), "--out", str(out)])
        sizes.main()
    runs = json.loads(out.read_text())["runs"]
    found = [(run["settings"]["workload"], run["settings"]["share"], run["weights x"]) for run in runs]
    assert found == [("gpt", 0.8, 64), ("gpt", 0.93, 128), ("reader", 0.93, 32)]
    assert capsys.readouterr().out.splitlines()[-2].split()[-1] == "no"  # half a per cent is too much


def _document(workload: str, bits: float, rises: list[float]) -> dict[str, Any]:
    def save(keyframe: bool, rise: float) -> dict[str, Any]:
        parameter = 10 * bits if keyframe else bits
        rest = {"ratio": 50.0, "quality": 2.0, "rise": rise, "retention": None if keyframe else 0.9}
        return {"keyframe": keyframe, "bits": {"parameter": parameter, "moment1": 0.5}, **rest}

    saves = [save(number == 0, rise) for number, rise in enumerate(rises)]
    head = {"workload": workload, "seed": 0, "interval": 50, "date": "2026-11-23", "commit": "abc", "quality": "loss"}
    machine = {"cores": 2, "cpu": "some processor"}
    return head | {"machine": machine, "higher_is_better": False, "sizes": {"error 0.3": saves}}
