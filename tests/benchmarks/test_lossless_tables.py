"""Promise: the lossless ratios and speeds of docs/benchmarks.md are what the committed result gives."""

from __future__ import annotations

import doctest
import json
from types import ModuleType


def test_the_tables_are_what_the_result_gives(tables: ModuleType) -> None:
    document = tables.DOCUMENT.read_text()
    for part, inner in tables.parts(json.loads(tables.RESULT.read_text())).items():
        assert tables.document_tables.written(document, "lossless_tables", inner, part) == document, part


def test_a_line_has_our_ratio_and_the_best_of_the_others(tables: ModuleType) -> None:
    rivals = {"zipnn": 50, "pcodec": 40, "dcp-zstd": 80}
    stream = {"raw": 100, "values": 25, "ours": 30, "ours_raw": 105, "entropy": 8.0, "rivals": rivals}
    line = tables.sizes({"W + m + v, 100 later": stream}).splitlines()[2]
    assert line == "| whole state, 100 steps later | **3.500** | 2.500 pcodec | 1.250 | 4.000 |"


def test_ours_come_before_the_rivals(tables: ModuleType) -> None:
    one = {name: {way: {"cpu": 1.5} for way in ("encode", "decode")} for name in ("zipnn", "ours: W", "ours: v")}
    assert tables.speeds({"1": one}).splitlines()[2:] == [
        "| as the tensors of the model, digests included | 1.50 | 1.50 |",
        "| zipnn | 1.50 | 1.50 |",
    ]


def test_the_examples_of_the_program_are_right(tables: ModuleType) -> None:
    assert doctest.testmod(tables) == (0, 2)
