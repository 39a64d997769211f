"""Promise: a merged row has means of deltas, and takes the place of an earlier one of its settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.studies.fisher import merge


def test_rises_are_percent_of_a_loss_and_points_of_an_accuracy() -> None:
    (row,) = merge.sizes(_chain("gpt", bits=0.25, rises=[0.008, 0.002, -0.004]))
    assert row["weights x"] == 128
    assert row["keyframe bits"] == 2.5
    assert row["mean rise"] == pytest.approx(-0.05)  # of a loss of 2; the keyframe's is apart
    assert row["worst rise"] == pytest.approx(0.1)
    assert row["rise of the keyframe"] == pytest.approx(0.4)
    (points,) = merge.sizes(_chain("resnet", bits=0.25, rises=[0, 1.0, 2.0]) | {"higher_is_better": True})
    assert (points["mean rise"], points["worst rise"], points["unit of rises"]) == (1.5, 2.0, "points")


def test_rows_of_a_chain_and_of_a_file_alone() -> None:
    alone, middle, plain, chain = merge.restores(_restored(1))
    assert alone["settings"] | {"workload": "gpt", "seed": 1} == alone["settings"]
    assert (middle["quality"], plain["quality"]) == (2.5, 2.0)
    assert chain["bits"] == {"parameter": pytest.approx(0.3), "moment1": pytest.approx(0.4)}
    assert chain["retention"] == [0.9, 1.0] and chain["saves"] == 3 and chain["state x"] == 90
    assert chain["worse"] == pytest.approx(0.1)
    points = list(merge.restores(_restored(1) | {"higher_is_better": True}))[3]
    assert points["worse"] == pytest.approx(-0.1)


def test_later_runs_replace_those_of_their_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SIZES", "RESTORES"):
        monkeypatch.setattr(merge, name, tmp_path / f"{name}.json")
    earlier = next(iter(merge.sizes(_chain("gpt", 0.5, [0.0, 0.01, 0.01]))))
    del earlier["settings"]["share"]  # as files of before 2026-11-24 have it
    merge.SIZES.write_text(json.dumps({"runs": [earlier]}))
    for number, document in enumerate([_chain("gpt", bits, [0.0, 0.01, 0.01]) for bits in (0.5, 0.25)]):
        _merge(monkeypatch, tmp_path / f"sizes-{number}.json", document)
    for seed, quality in ((1, 2.1), (0, 2.3), (1, 2.3)):
        document = _restored(seed)
        document["restores"]["error .3, every 50"]["quality"] = quality
        _merge(monkeypatch, tmp_path / f"restores-{seed}-{quality}.json", document)
    sizes, restores = (json.loads(path.read_text())["runs"] for path in (merge.SIZES, merge.RESTORES))
    assert [(run["settings"]["share"], run["weights x"]) for run in sizes] == [(0.8, 64), (0.93, 128)]
    assert [(run["settings"]["study"], run["settings"]["seed"]) for run in restores] == [
        *(("alone", seed) for seed in (0, 1)),
        *(("restores", seed) for seed in (0, 0, 0, 1, 1, 1)),
    ]
    assert {run["worse"] for run in restores if "worse" in run} == {0.3}


def _merge(monkeypatch: pytest.MonkeyPatch, path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document))
    monkeypatch.setattr(sys, "argv", ["merge", str(path)])
    merge.main()


def _head(workload: str, seed: int) -> dict[str, Any]:
    head = {"workload": workload, "seed": seed, "interval": 50, "date": "2026-11-23", "commit": "abc"}
    return head | {"machine": {"cores": 2, "cpu": "some processor"}, "higher_is_better": False}


def _chain(workload: str, bits: float, rises: list[float]) -> dict[str, Any]:
    def save(keyframe: bool, rise: float) -> dict[str, Any]:
        rest = {"ratio": 50.0, "quality": 2.0, "rise": rise, "retention": None if keyframe else 0.9}
        return {"keyframe": keyframe, "bits": {"parameter": 10 * bits if keyframe else bits, "moment1": 0.5}, **rest}

    return _head(workload, 0) | {"sizes": {"error 0.3": [save(n == 0, rise) for n, rise in enumerate(rises)]}}


def _restored(seed: int) -> dict[str, Any]:
    def saved(keyframe: bool, bits: float, retention: float | None, ratio: float) -> dict[str, Any]:
        roles = {"parameter": bits, "moment1": bits + 0.1}
        return {"keyframe": keyframe, "bits": roles, "retention": retention, "ratio": ratio}

    saves = [saved(True, 2.0, None, 10), saved(False, 0.2, 0.9, 80), saved(False, 0.4, 1.0, 100)]
    restored = {"middle": 2.5, "uninterrupted": 2.0, "error .3, every 50": {"quality": 2.1, "saves": saves}}
    return _head("gpt", seed) | {"restores": restored, "alone": {"error .3": [12.0, 0.001]}}
