"""Promise: the study's tables in docs/wire_studies.md are what the committed results give, each run with its date."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any


def test_the_tables_of_the_study_are_what_the_results_give(tables: ModuleType) -> None:
    document = tables.DOCUMENT.read_text()
    assert tables.document_tables.written(document, "wire_tables", tables.tables(tables.read())) == document


def test_every_committed_run_has_what_a_row_needs(tables: ModuleType) -> None:
    runs = tables.read()
    assert len(runs) > 100
    for run in runs:
        assert run["cpu"]
        assert run["date"][:10] >= "2026-11-21"
        assert set(run["bits"]) == {"forward", "backward"}
    later = json.loads(tables.RESULTS[-1].read_text())
    assert {len(run["code"]) for run in later["runs"]} == {12}
    assert later["machine"]["torch"]


def test_a_number_that_the_results_have_not_is_seen(tables: ModuleType) -> None:
    document = tables.DOCUMENT.read_text()
    forged = document.replace("| 57.5, 56.6, 54.8 |", "| 57.5, 56.6, 58.8 |", 1)
    assert forged != document
    assert tables.document_tables.written(forged, "wire_tables", tables.tables(tables.read())) == document


def test_a_row_has_the_seeds_of_one_processor_and_the_day_of_its_last_run(tables: ModuleType) -> None:
    runs = [_run(1, 50.04, date="2026-11-25T23:59:59"), _run(0, 51.26, date="2026-11-25T22:00:00")]
    (line,) = _lines(tables, runs)
    assert line == "| `top10` / `same` | 3.73 / 3.20 | 51.3, 50.0 | 41.3, 40.0 | 2026-11-25 |"
    (line,) = _lines(tables, runs[:1])
    assert line.endswith("| 2026-11-25, seed 1 |")


def test_runs_of_another_processor_stay_until_the_newer_one_has_their_seeds(tables: ModuleType) -> None:
    older = [_run(seed, 50, cpu="Xeon", date="2026-11-21", code=None) for seed in (0, 1, 2)]
    again = _run(0, 49, cpu="Xeon", date="2026-11-22")  # one seed beside three
    newer = [_run(0, 48), _run(1, 47), _run(2, 46)]
    assert [line.split("|")[3].strip() for line in _lines(tables, [*older, again, newer[0]])] == [
        "50.0, 50.0, 50.0",
        "48.0",
    ]
    assert [line.split("|")[3].strip() for line in _lines(tables, [*older, again, *newer])] == ["48.0, 47.0, 46.0"]


def test_a_lost_training_and_a_warm_up_are_named(tables: ModuleType) -> None:
    lost = _run(0, 50) | {"on": None, "off": None}
    lost["settings"]["warmup"] = 0.25
    plain = _run(0, 50)
    lines = _lines(tables, [lost, plain])
    assert lines[0].startswith("| `top10` / `same` |")
    assert lines[1].startswith("| `top10` / `same`, after 25% of the steps | 3.73 / 3.20 | not finite | not finite |")


def test_operators_stand_in_the_table_of_their_kind(tables: ModuleType) -> None:
    kinds = {
        "range": [("", ""), ("q4", "q8")],
        "groups": [("q4:64", "q8:64"), ("h64(n3:64)", "h64(n3:64)"), ("q4:row", "q4:row")],
        "topk": [("top10", ""), ("", "top10"), ("top10:q4:64", "same:q4:64")],
        "feedback": [("ef(top10)", "ef(top10)"), ("aq(q2:64)", "q4:64"), ("ef21(top10)", "ef21(top10)")],
    }
    for kind, pairs in kinds.items():
        assert [tables.section(pair) for pair in pairs] == [kind] * len(pairs)


def _lines(tables: ModuleType, runs: list[dict[str, Any]]) -> list[str]:
    text: str = tables.tables(runs)
    return [line for line in text.splitlines() if line.startswith("| `")]


def _run(
    seed: int, on: float, *, cpu: str = "EPYC", date: str = "2026-11-25", code: str | None = "0123456789ab"
) -> dict[str, Any]:
    settings = {"task": "image", "seed": seed, "forward": "top10", "backward": "same", "quick": False}
    bits = {"forward": 3.73, "backward": 3.2}
    made = {"settings": settings, "date": date, "cpu": cpu, "on": on, "off": on - 10, "bits": bits}
    return made | ({"code": code} if code else {})
