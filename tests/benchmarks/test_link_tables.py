"""Promise: the steps of pipelines in docs/wire_studies.md are what the committed result gives."""

from __future__ import annotations

import doctest
import json
from types import ModuleType


def test_the_tables_are_what_the_result_gives(tables: ModuleType) -> None:
    document = tables.DOCUMENT.read_text()
    inner = tables.tables(json.loads(tables.RESULT.read_text())["result"])
    assert tables.document_tables.written(document, "link_tables", inner) == document


def test_the_slowest_link_comes_first_and_one_without_a_limit_last(tables: ModuleType) -> None:
    rows = [
        {"rate": rate, "name": name, "seconds": seconds, "gain": gain, "steps": 12, "sent": 5e6}
        for rate in (0, 1000, 100)
        for name, seconds, gain in (("none", 2.5, 1.0), ("q4:64 / q8:64", 0.25, 10.0))
    ]
    found = {"job": {"world": 2}, "machine": "2 cores", "date": "2026-11-27", "rows": rows}
    text = tables.tables({"pipeline": {"1F1B": found}, "stages": {}})
    head, plain, coded = (text.splitlines()[line] for line in (2, 4, 5))
    assert head == "|  | 100 Mbit/s | 1 Gbit/s | no limit | MB |"
    assert plain == "| uncompressed | 2.50 | 2.50 | 2.50 | 5.00 |"
    assert coded == "| `q4:64` / `q8:64` | .250 (10.0) | .250 (10.0) | .250 (10.0) | 5.00 |"


def test_figures_have_three_digits(tables: ModuleType) -> None:
    assert doctest.testmod(tables.document_tables) == (0, 1)
