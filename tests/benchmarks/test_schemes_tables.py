"""Promise: the tables of all schemes on the same checkpoints are what the committed results give."""

from __future__ import annotations

import doctest
from types import ModuleType


def test_the_tables_are_what_the_results_give(tables: ModuleType) -> None:
    for page, parts in tables.documents().items():
        document = page.read_text()
        for part, inner in parts.items():
            assert tables.document_tables.written(document, "schemes_tables", inner, part) == document, part


def test_a_row_has_medians_of_deltas_and_the_worst_of_all_rows(tables: ModuleType) -> None:
    rows = [_row(True, 32.0, 0.0), *(_row(False, bits, 2.0) for bits in (0.5, 1.0, 0.25))]
    result = {"name": "excp", "rows": rows, "ratio": 12.34, "delta_ratio": 123.4, "rise": 0.0, "worst_rise": 0.0123}
    others = {"least_retention": 0.249, "encode_gb_s": 0.0312, "decode_gb_s": 1.26}
    assert tables.row({**result, **others}, 0.01) == (
        "| excp | .500 | 26.0 |  | 123 | 12.3 | .250 | 2.00 | 0 | +1.23 | .25 | .031 / 1.3 |"
    )


def test_the_examples_of_the_program_are_right(tables: ModuleType) -> None:
    assert doctest.testmod(tables) == (0, 2)


def _row(keyframe: bool, bits: float, update: float) -> dict[str, object]:
    errors = {"W": bits / 2, "update": update}
    return {"keyframe": keyframe, "bits": {"W": bits, "m": 26.0}, "errors": errors}
