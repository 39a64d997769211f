"""Promise: a run takes the place of an earlier one of its settings and processor, and of no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.studies.harness import results


def test_runs_of_two_processors_stand_beside_each_other(tmp_path: Path) -> None:
    earlier = {"machine": {"cpu": "Xeon"}, "runs": [{"settings": {"seed": 0}, "on": 57.5}]}  # its processor above it
    ledger = tmp_path / "study.jsonl"
    _write(ledger, _record(0, "EPYC", 55.3), _record(0, "EPYC", 55.4))
    both = results.summary(ledger, earlier, "abc")
    assert [run["on"] for run in both["runs"]] == [57.5, 55.4]
    _write(ledger, _record(0, "Xeon", 57.6), _record(1, "Xeon", 56.6))
    again = results.summary(ledger, both | {"machine": {"cpu": "Xeon"}}, "abc")
    assert [(run.get("cpu"), run["on"]) for run in again["runs"]] == [("Xeon", 57.6), ("EPYC", 55.4), ("Xeon", 56.6)]


def test_rows_have_the_errors_of_messages() -> None:
    links = {"0 forward": {"relative_error": 0.1234567, "messages": 3}, "0 backward": {"relative_error": None}}
    row = results.row(_record(0, "EPYC", 55.3) | {"links": links})
    assert row["relative error of messages"] == {"0 forward": 0.12346, "0 backward": None}


def test_rows_have_bits_of_deltas_and_the_distance_from_the_uninterrupted_run() -> None:
    base, run = _restored_record("none", 2.0), _restored_record("lc-checkpoint(bits=2)", 2.02)
    row = results.row(run, [base, run])
    # the keyframe does not count
    assert row["deltas"] == {"bits of a weight": 1.0, "best ratio of the weights": 40.0, "ratio of the state": 48.0}
    assert row["seconds"] == {"save": 0.5, "restore": 0.1}
    assert row["change of the evaluation at each restore, %"] == [1.0, 0.0]
    # restored after steps 2 and 5 of 6: 3 and 6 come first, 5 and 6 are the last before the next restore and the end
    assert row["against the uninterrupted run, %"] == {"next": 2.0, "last": 2.0, "final": 1.0}


def test_a_worse_end_is_above_zero_for_losses_and_scores() -> None:
    for higher, worse in ((False, 1.0), (True, -1.0)):
        base = _restored_record("none", 2.0, higher=higher)
        run = _restored_record("lc-checkpoint(bits=2)", 2.02, higher=higher)
        assert results.row(run, [base, run])["against the uninterrupted run, %"]["final"] == pytest.approx(worse)


def _record(seed: int, cpu: str, on: float) -> dict[str, Any]:
    return {
        "settings": {"seed": seed},
        "version": "0123456789ab",
        "on": on,
        "machine": {"cpu": cpu},
        "at": "2026-11-25",
    }


def _write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _restored_record(
    system: str, quality: float, *, seed: int = 0, higher: bool = False, cpu: str = "Xeon", threshold: float = 0.0
) -> dict[str, Any]:
    """A run of six checkpoints, restored after the second and the fifth; the evaluation of "none" is 2 throughout."""
    plain = system == "none"
    settings = {"workload": "gpt", "system": system, "seed": seed, "paper": False, "threshold": threshold}
    settings |= {"optimizer": "exact", "quick": False, "restores": 0 if plain else 10}
    save = {"keyframe": False, "weights raw": 320, "weights stored": 14, "raw": 960, "stored": 20}
    save |= {"retention": 0.9, "seconds": 0.5}
    better = save | {"weights raw": 640, "weights stored": 16}
    restores = [
        {"step": 2, "before": 2.0, "after": 2.02, "seconds": 0.1},
        {"step": 5, "before": 2.0, "after": 2.0, "seconds": 0.1},
    ]
    return {
        "settings": settings,
        "version": "0123456789ab",
        "at": "2026-11-26",
        "machine": {"cpu": cpu},
        "quality": quality,
        "facts": {"higher_is_better": higher},
        "curve": [[step, 2.0 if plain else 2.04] for step in range(1, 7)],
        "saves": [] if plain else [save | {"keyframe": True, "weights stored": 1}, save, better],
        "restores": [] if plain else restores,
    }
