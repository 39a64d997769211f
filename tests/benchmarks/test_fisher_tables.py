"""Promise: the tables of restores with fisher in docs/fisher_studies.md are what the committed runs give."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def test_the_tables_are_what_the_results_give(tables: ModuleType) -> None:
    document, parts = tables.DOCUMENT.read_text(), tables.parts()
    assert parts.keys() == {"", "alone", "restores", "moments"}
    for part, table in parts.items():
        assert tables.document_tables.written(document, "fisher_tables", table, part) == document
        assert table.count("\n") >= 7


def test_a_line_has_the_mean_bits_and_the_end_of_each_seed(tables: ModuleType) -> None:
    runs = []
    for seed, worse in enumerate((0.01, -0.0002)):
        end = {"bits": {"parameter": 0.2 + seed / 10}, "state x": 90.4, "retention": [0.9, 1.0 + seed], "worse": worse}
        for variant, facts in (("middle", {"quality": 2.5}), ("uninterrupted", {"quality": 2.0}), ("error .3", end)):
            runs.append({"settings": {"study": "restores", "seed": seed, "variant": variant}, **facts})
        alone = {"study": "alone", "seed": seed, "variant": "weights alone"}
        runs.append({"settings": alone, "weights x": 10.0 + seed, "rise": worse})
    assert tables.restored(runs, "restores").splitlines()[2:] == [
        "| never restored: 2.0000, 2.0000, from 2.5000, 2.5000 | | | | | | 0 |",
        "| error .3 | 0.250 | - | - | 90.4x | 0.90 to 2.00 | +0.0100, -0.0002 |",
    ]
    assert tables.alone(runs).splitlines()[2:] == ["| weights alone | 10.5 | +0.0100, -0.0002 |"]


def test_a_row_has_a_figure_of_each_seed_and_budgets_stand_before_errors(tables: ModuleType) -> None:
    runs = [
        *(_run("none", seed, quality=quality, restores=0) for seed, quality in enumerate((1.0, 1.1))),
        _run("fisher(relative_error=.3)", 0, final=-1.0),
        _run("fisher", 1, threshold=0.01, final=2.0),
        _run("fisher", 0, threshold=0.01, final=1.0),
        _run("fisher", 2, threshold=0.01, final=9.0, cpu="another"),
        _run("lossless", 0),
    ]
    lines = tables.table({"machine": {"cpu": "this"}, "runs": runs}).splitlines()[2:]
    assert lines == [
        "| ResNet-20, SGD | a budget of 1 % | 0, 1 | +1.00, +2.00 (seeds differ by 6.7) | 30, 30 | 80, 80 | 0.50 |",
        "| ResNet-20, SGD | error .3 | 0 | -1.00 (seeds differ by 6.7) | 30 | 80 | 0.50 |",
    ]


def _run(
    system: str,
    seed: int,
    *,
    threshold: float = 0.0,
    restores: int = 10,
    quality: float = 1.0,
    final: float = 0.0,
    cpu: str = "this",
) -> dict[str, Any]:
    settings = {"workload": "resnet", "seed": seed, "system": system, "threshold": threshold, "restores": restores}
    return {
        "cpu": cpu,
        "settings": settings,
        "quality": quality,
        "ratio weights": 30.0,
        "ratio full": 80.0,
        "retention": {"least": 0.5, "median": 0.9},
        "against the uninterrupted run, %": {"final": final},
    }
