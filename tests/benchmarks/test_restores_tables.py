"""Promise: the tables of ten restores in docs/scheme_studies.md are what the committed runs give; above 0 is worse."""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def summarize(tables: ModuleType) -> ModuleType:
    return importlib.import_module("summarize")


def test_the_tables_are_what_the_results_give(tables: ModuleType) -> None:
    document = tables.DOCUMENT.read_text()
    result = json.loads(tables.RESULT.read_text())
    assert tables.document_tables.written(document, "restores_tables", tables.tables(result)) == document
    assert len(tables.shown(result)) > 40
    assert all(run["cpu"] for run in result["runs"])


def test_a_run_has_the_bits_of_its_deltas_and_its_distance_from_the_uninterrupted_one(summarize: ModuleType) -> None:
    base, run = _record("none", 2.0), _record("lc-checkpoint(bits=2)", 2.02)
    row = summarize.row(run, [base, run])
    # the keyframe does not count
    assert row["deltas"] == {"bits of a weight": 1.0, "best ratio of the weights": 40.0, "ratio of the state": 48.0}
    assert row["seconds"] == {"save": 0.5, "restore": 0.1}
    assert row["change of the evaluation at each restore, %"] == [1.0, 0.0]
    # restored after steps 2 and 5 of 6: 3 and 6 come first, 5 and 6 are the last before the next restore and the end
    assert row["against the uninterrupted run, %"] == {"next": 2.0, "last": 2.0, "final": 1.0}


def test_a_row_is_worse_above_zero_for_losses_and_for_scores(tables: ModuleType, summarize: ModuleType) -> None:
    for higher, cells in (
        (False, "+0.50, +1.00 | +2.00 | +2.00 | +1.00 |"),
        (True, "-0.50, 0 | -2.00 | -2.00 | -1.00 |"),
    ):
        base, run = _record("none", 2.0, higher=higher), _record("lc-checkpoint(bits=2)", 2.02, higher=higher)
        line = tables.row([summarize.row(run, [base, run])])
        assert line == f"| lc-checkpoint, `bits=2` (seed 0) | 1 | 48 | {cells} 0.90, 0.90 | 0.50, 0.10 |"


def test_seeds_give_an_error_and_other_processors_are_left_out(tables: ModuleType, summarize: ModuleType) -> None:
    records = []
    for seed, quality in enumerate((2.02, 2.04, 2.06)):
        records += [_record("none", 2.0, seed=seed), _record("fisher", quality, seed=seed, threshold=0.01)]
    other = [_record("none", 1.0, cpu="EPYC"), _record("fisher", 9.0, cpu="EPYC", threshold=0.01)]
    everything = [*other, *records]
    runs = [summarize.row(record, everything) for record in everything]
    (line,) = [one for one in tables.tables({"machine": {"cpu": "Xeon"}, "runs": runs}).splitlines() if "fisher" in one]
    assert line.startswith("| fisher, 1 % | 1 | 48 |")
    assert "| +2.00 ± 0.58 |" in line


def _record(
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
