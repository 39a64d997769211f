"""Promise: a row has means of deltas, and is worse by as much as its end is than that of the uninterrupted run."""

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
def restores(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("fisher_restores")


def test_rows_of_a_chain_and_of_a_file(restores: ModuleType) -> None:
    alone, middle, plain, chain = restores.rows(_document(1, higher_is_better=False))
    assert alone["settings"] | {"workload": "gpt", "seed": 1} == alone["settings"]
    assert (middle["quality"], plain["quality"]) == (2.5, 2.0)
    assert chain["bits"] == {"parameter": pytest.approx(0.3), "moment1": pytest.approx(0.4)}
    assert chain["retention"] == [0.9, 1.0] and chain["saves"] == 3 and chain["state x"] == 90
    assert chain["worse"] == pytest.approx(0.1)
    points = list(restores.rows(_document(1, higher_is_better=True)))[3]
    assert points["worse"] == pytest.approx(-0.1)


def test_a_later_run_takes_the_place_of_its_settings(
    restores: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    for name, quality in (("a", 2.1), ("b", 2.3)):
        sources = []
        for seed in (1, 0):
            document = _document(seed, higher_is_better=False)
            document["restores"]["error .3, every 50"]["quality"] = quality
            sources.append(tmp_path / f"{name}-{seed}.json")
            sources[-1].write_text(json.dumps(document))
        monkeypatch.setattr(sys, "argv", ["fisher_restores.py", *map(str, sources), "--out", str(out)])
        restores.main()
    runs = json.loads(out.read_text())["runs"]
    assert [(run["settings"]["study"], run["settings"]["seed"]) for run in runs] == [
        *(("alone", seed) for seed in (0, 1)),
        *(("restores", seed) for seed in (0, 0, 0, 1, 1, 1)),
    ]
    assert {run["worse"] for run in runs if "worse" in run} == {0.3}


def _document(seed: int, *, higher_is_better: bool) -> dict[str, Any]:
    def saved(keyframe: bool, bits: float, retention: float | None, ratio: float) -> dict[str, Any]:
        roles = {"parameter": bits, "moment1": bits + 0.1}
        return {"keyframe": keyframe, "bits": roles, "retention": retention, "ratio": ratio}

    saves = [saved(True, 2.0, None, 10), saved(False, 0.2, 0.9, 80), saved(False, 0.4, 1.0, 100)]
    restored = {"middle": 2.5, "uninterrupted": 2.0, "error .3, every 50": {"quality": 2.1, "saves": saves}}
    head = {"workload": "gpt", "seed": seed, "date": "2026-11-27", "commit": "0" * 12, "machine": {"cpu": "this"}}
    alone = {"error .3": [12.0, 0.001]}
    return {**head, "higher_is_better": higher_is_better, "restores": restored, "alone": alone}
