"""All schemes on the same checkpoints: the tables of two documents out of the results that are committed.

    python -m lab.studies.schemes.table            # writes them between the marks of each document
    python -m lab.studies.schemes.table --check    # says whether they are what the results give

`run.py` measures; its output is results/schemes_gpt.json and so on, a file a subject.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.studies.harness import DOCS, RESULTS, document_tables
from shrinkpoint.schemes.registry import needs_evaluation
from shrinkpoint_lab.bench.result import BenchResult, ResultRow
from shrinkpoint_lab.bench.systems import SYSTEMS

SUBJECTS = ("gpt", "resnet", "ssl", "wikitext")
COLUMNS = ("scheme", "W bits", "m bits", "v bits", "delta x", "run x", "W error", "update error", "rise %", "worst %")
COLUMNS += ("least retention", "enc / dec GB/s")
SUMMARY = ("scheme", "weights, bits a value", "whole run", "rise of the loss: median, worst", "least retention")
SUMMARY += ("save / load, GB/s",)


def read(subject: str) -> tuple[dict[str, Any], list[BenchResult]]:
    """The committed result of a subject: what it says of its run, and the schemes in the order of the harness."""
    head = json.loads((RESULTS / f"schemes_{subject}.json").read_text())["result"]
    (listed,) = head["subjects"].values()
    found = [BenchResult(one["name"], [ResultRow(**row) for row in one.get("rows", ())]) for one in listed]
    order = list(SYSTEMS)
    return head, sorted(found, key=lambda one: order.index(one.name) if one.name in SYSTEMS else len(order))


def per_cent(value: float | None) -> str:
    """
    >>> per_cent(0.00134), per_cent(-0.01), per_cent(0.00001), per_cent(None)
    ('+0.13', '-1.00', '0', '')
    """
    if value is None:
        return ""
    text = f"{100 * value:+.2f}"
    return "0" if text[1:] == "0.00" else text


def title(name: str, threshold: float) -> str:
    """How a table calls a scheme: its name, its settings, and what one that searches may lose.

    >>> title("lc-checkpoint(bits=2, paper=True)", 0.01), title("qd", 0.01), title("fisher", 0.01)
    ('lc-checkpoint, `bits=2, paper=True`', 'qd, 1%', 'fisher, `budget="1%"`')
    """
    plain, _, settings = document_tables.label(name).removesuffix(")").partition("(")
    if name == "fisher":
        settings = f'budget="{100 * threshold:g}%"'
    elif plain in SYSTEMS and needs_evaluation(name):
        plain += f", {100 * threshold:g}%"
    return f"{plain}, `{settings}`" if settings else plain


def row(result: BenchResult, threshold: float) -> list[str]:
    """The cells of a line; bits, errors and the first rise are medians of the deltas."""
    figure = document_tables.figure
    return [
        title(result.name, threshold),
        *(figure(result.median(lambda row, key=key: row.bits.get(key))) for key in "Wmv"),
        figure(result.delta_ratio),
        figure(result.ratio),
        *(figure(result.median(lambda row, key=key: row.errors.get(key))) for key in ("W", "update")),
        per_cent(result.median(lambda row: row.rise)),
        per_cent(result.worst(lambda row: row.rise)),
        figure(result.min_retention, 2),
        f"{figure(result.encode_speed, 2)} / {figure(result.decode_speed, 2)}",
    ]


def table(subject: str) -> str:
    """All schemes on a subject, and where and when they were measured."""
    head, found = read(subject)
    lines = document_tables.table(COLUMNS, (row(one, head["threshold"]) for one in found if one.rows))
    return f"{lines}\n\n(One thread, {head['machine']['cpu']}, {head['date']}.)"


def summary(subject: str) -> str:
    """The columns that a reader asks for first, in the notation of guides."""

    def number(value: float | None, digits: int = 3) -> str:
        return "" if value is None else f"{value:#.{digits}g}".rstrip(".")

    head, found = read(subject)
    lines = [
        (
            title(one.name, head["threshold"]),
            number(one.median(lambda row: row.bits.get("W"))),
            f"{number(one.ratio)}x",
            ", ".join(f"{100 * (rise or 0):+.2f}%" for rise in (one.median(_rise), one.worst(_rise))),
            number(one.min_retention, 2),
            f"{number(one.encode_speed, 2)} / {number(one.decode_speed, 2)}",
        )
        for one in found
        if one.rows
    ]
    return document_tables.table(SUMMARY, lines)


def _rise(row: ResultRow) -> float | None:
    return row.rise


def documents() -> dict[Path, dict[str, str]]:
    """The tables of each document by the name of their part."""
    full = {subject: table(subject) for subject in SUBJECTS}
    return {DOCS / "scheme_studies.md": full, DOCS / "benchmarks.md": {"wikitext": summary("wikitext")}}


if __name__ == "__main__":
    document_tables.main(__doc__, __file__, documents())
