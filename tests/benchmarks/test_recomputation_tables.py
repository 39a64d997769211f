"""Promise: the tables of what a failure costs in docs/scheme_studies.md are what the committed result gives."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any


def test_the_tables_are_what_the_result_gives(tables: ModuleType) -> None:
    document = tables.DOCUMENT.read_text()
    result = json.loads(tables.RESULT.read_text())["result"]
    assert tables.document_tables.written(document, "recomputation_tables", tables.tables(result)) == document
    assert {course["seeds"] for course in result["courses"]} == {3}


def test_a_scheme_has_its_mean_over_courses_and_scars_rework_beside_its_own(tables: ModuleType) -> None:
    rows = [_row("mlr mnist, sgd", "lossless", 4), _row("mf, adam", "lossless", 4)]
    rows += [_row("mlr mnist, sgd", "lc x=2", 9), _row("mf, adam", "lc x=2", 11)]
    rows += [_row("mlr mnist, sgd", "scar largest", 18), _row("mf, adam", "scar largest", 22)]
    every = [*rows, *(_row("mf, adam", system, 5) for system in tables.SYSTEMS if system not in _systems(rows))]
    every += [_row("mlr mnist, sgd", system, 5) for system in tables.SYSTEMS if system not in _systems(rows)]
    quick = [{"course": "mlr mnist, sgd", "system": "lc x=2", "speed-up": 2.0}]
    (line,) = [one for one in tables.schemes({"rows": every, "speed-ups": quick}).splitlines() if "2 bits |" in one]
    assert line == "| lc-checkpoint, 2 bits | 30 to 30 | 20 to 20 | 10.0 | +6.0 ± 1.0 | 0 | 2.0 | 2.0 to 2.0 |"


def test_a_course_is_of_one_model(tables: ModuleType) -> None:
    courses = ["mlr mnist, sgd", "mlr fashion, adam", "mf, sgd", "mf movielens, sgd"]
    found = {name: [course for course in courses if belongs(course)] for name, belongs in tables._kinds()}
    assert found["MLR, SGD"] == ["mlr mnist, sgd"]
    assert found["MLR, Adam"] == ["mlr fashion, adam"]
    assert found["MF, made here, SGD"] == ["mf, sgd"]
    assert found["MF, MovieLens, SGD"] == ["mf movielens, sgd"]


def _systems(rows: list[dict[str, Any]]) -> set[str]:
    return {row["system"] for row in rows}


def _row(course: str, system: str, rework: float) -> dict[str, Any]:
    ratios = {"ratio": 20.0, "ratio of the quantized": 30.0}
    counts = {"given up": 0, "failures": 4}
    return {"course": course, "system": system, "rework": [rework, 1.0], "extra": [rework - 4, 1.0], **ratios, **counts}
