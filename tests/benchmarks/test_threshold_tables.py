"""Promise: the table of thresholds and restores in docs/scheme_studies.md is what the committed runs give."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any


def test_the_table_is_what_the_results_give(tables: ModuleType) -> None:
    document = tables.DOCUMENT.read_text()
    table = tables.table(json.loads(tables.RESULT.read_text()))
    assert tables.document_tables.written(document, "threshold_tables", table) == document
    assert table.count("\n") >= 15


def test_rows_stand_by_system_threshold_and_restores_with_the_means_of_their_seeds(tables: ModuleType) -> None:
    runs = [
        _run(threshold=0.01, restores=10, seed=1, final=2.0),
        _run(threshold=0.01, restores=10, seed=0, final=1.0),
        _run(threshold=0.05, restores=20),
        _run(threshold=0.05, restores=0),
        _run(threshold=0.05, restores=10, paper=True),
        _run(threshold=0.05, restores=10, workload="reader"),
        _run(threshold=0.05, restores=10, cpu="another"),
        _run(threshold=0.05, restores=10, system="lc-checkpoint(bits=2)"),
    ]
    lines = tables.table({"machine": {"cpu": "this"}, "runs": runs}).splitlines()[2:]
    assert lines == [
        "| gpt, inshrinkerator | 5 % | 0 |  | +1.00 | 30.0 | 90 | 1.80 | 0.50 |",
        "| gpt, inshrinkerator | 5 % | 20 | +3.00 | +1.00 | 30.0 | 90 | 1.80 | 0.50 |",
        "| gpt, inshrinkerator | 1 % | 10, 2 seeds | +3.00 | +1.50 ± 0.50 | 30.0 | 90 | 1.80 | 0.50 |",
        "| gpt, inshrinkerator, paper | 5 % | 10 | +3.00 | +1.00 | 30.0 | 90 | 1.80 | 0.50 |",
    ]


def _run(
    *,
    threshold: float,
    restores: int,
    seed: int = 0,
    final: float = 1.0,
    paper: bool = False,
    workload: str = "gpt",
    system: str = "inshrinkerator",
    cpu: str = "this",
) -> dict[str, Any]:
    settings = {"workload": workload, "seed": seed, "system": system, "threshold": threshold, "restores": restores}
    run = {
        "cpu": cpu,
        "settings": settings | {"paper": paper, "optimizer": "exact"},
        "higher is better": True,
        "ratio weights": 30.0,
        "ratio full": 1.8,
        "retention": {"least": 0.5, "median": 0.9},
        "deltas": {"best ratio of the weights": 90.0},
        "against the uninterrupted run, %": {"final": final},
    }
    return run | ({"change of the evaluation at each restore, %": [-3.0, 1.0]} if restores else {})
