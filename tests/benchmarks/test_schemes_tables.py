"""Promise: the tables of all schemes on the same checkpoints are what the committed results give."""

from __future__ import annotations

import doctest
from types import ModuleType

from shrinkpoint_lab.bench.result import BenchResult, ResultRow


def test_the_tables_are_what_the_results_give(tables: ModuleType) -> None:
    for page, parts in tables.documents().items():
        document = page.read_text()
        for part, inner in parts.items():
            assert tables.document_tables.written(document, "schemes_tables", inner, part) == document, part


def test_a_row_has_medians_of_deltas_and_the_worst_of_all_rows(tables: ModuleType) -> None:
    deltas = [_row(bits, retention=kept) for bits, kept in ((0.5, 0.3), (1.0, 0.9), (0.25, 0.249))]
    result = BenchResult("excp", [_row(32.0, keyframe=True, stored=370, rise=0.0123), *deltas])
    assert f"| {' | '.join(tables.row(result, 0.01))} |" == (
        "| excp | .500 | 26.0 |  | 123 | 12.3 | .250 | 2.00 | 0 | +1.23 | .25 | .031 / 1.3 |"
    )


def test_the_examples_of_the_program_are_right(tables: ModuleType) -> None:
    assert doctest.testmod(tables) == (0, 2)


def _row(bits: float, *, keyframe: bool = False, stored: int = 10, rise: float = 0.0, retention: float | None = None):
    sizes = {"raw": 1234, "stored": stored, "values": {}, "bits": {"W": bits, "m": 26.0}}
    errors = {"W": bits / 2, "update": 0.0 if keyframe else 2.0}
    seconds = {"encode": 1234 / 0.0312e9, "decode": 1234 / 1.26e9}
    return ResultRow(1, keyframe, **sizes, errors=errors, exact=False, **seconds, rise=rise, retention=retention)
