"""All schemes on the same checkpoints: the tables of two documents out of the results that are committed.

    python benchmarks/schemes_tables.py            # writes them between the marks of each document
    python benchmarks/schemes_tables.py --check    # says whether they are what the results give

`schemes.py` measures; its output is results/schemes_gpt.json and so on, a file a subject.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import document_tables
from workloads import REPO

from shrinkpoint.bench.systems import SYSTEMS
from shrinkpoint.schemes.registry import needs_evaluation

RESULTS = REPO / "benchmarks" / "results"
DOCS = REPO / "docs"
PLACES = {"gpt": "scheme_studies", "resnet": "scheme_studies", "ssl": "scheme_studies", "wikitext": "benchmarks"}
"""The document that has the table of a subject."""
COLUMNS = ("scheme", "W bits", "m bits", "v bits", "delta x", "run x", "W error", "update error", "rise %", "worst %")
COLUMNS += ("least retention", "enc / dec GB/s")

Result = Mapping[str, Any]


def deltas(result: Result) -> Sequence[Result]:
    """The rows of deltas; all if every checkpoint is a keyframe."""
    rows: Sequence[Result] = result["rows"]
    return [row for row in rows if not row["keyframe"]] or rows


def middle(result: Result, key: Callable[[Result], float | None]) -> float | None:
    """The median of a quantity over the deltas that have it."""
    values = [value for value in map(key, deltas(result)) if value is not None]
    return median(values) if values else None


def per_cent(value: float | None) -> str:
    """
    >>> per_cent(0.00134), per_cent(-0.01), per_cent(0.00001), per_cent(None)
    ('+.13', '-1.00', '0', '')
    """
    if value is None:
        return ""
    text = f"{100 * value:+.2f}"
    return "0" if text.endswith("0.00") else text.replace("0.", ".", 1) if text[1] == "0" else text


def title(name: str, threshold: float) -> str:
    """How a table calls a scheme: its name, its settings, and what one that searches may lose.

    >>> title("lc-checkpoint(bits=2, paper=True)", 0.01), title("qd", 0.01), title("fisher", 0.01)
    ('lc-checkpoint, `bits=2, paper=True`', 'qd, 1 %', 'fisher, `budget="1%"`')
    """
    plain, _, settings = name.removesuffix(")").partition("(")
    if name == "fisher":
        settings = f'budget="{100 * threshold:g}%"'
    elif plain in SYSTEMS and needs_evaluation(name):
        plain += f", {100 * threshold:g} %"
    return f"{plain}, `{settings}`" if settings else plain


def row(result: Result, threshold: float) -> str:
    """A line of a table; bits, errors and the first rise are medians of the deltas."""
    errors = {key: middle(result, lambda row, key=key: row["errors"].get(key)) for key in ("W", "update")}
    cells = [
        title(result["name"], threshold),
        *(document_tables.figure(middle(result, lambda row, key=key: row["bits"].get(key))) for key in "Wmv"),
        document_tables.figure(result["delta_ratio"]),
        document_tables.figure(result["ratio"]),
        *map(document_tables.figure, errors.values()),
        per_cent(result["rise"]),
        per_cent(result["worst_rise"]),
        document_tables.figure(result["least_retention"], 2),
        f"{document_tables.figure(result['encode_gb_s'], 2)} / {document_tables.figure(result['decode_gb_s'], 2)}",
    ]
    return f"| {' | '.join(cells)} |"


def table(document: Result) -> str:
    """All schemes of a committed result, in the order of the harness, and where and when they were measured."""
    result, order = document["result"], list(SYSTEMS)
    (found,) = result["subjects"].values()
    found = sorted(found, key=lambda one: order.index(one["name"]) if one["name"] in SYSTEMS else len(order))
    lines = [row(one, result["threshold"]) for one in found if not one.get("failure")]
    cpu, day = result["machine"]["cpu"], result["date"]
    head = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join([*head, *lines, "", f"(One thread on an {cpu}, {day}, other work on the other core.)"])


def documents() -> dict[Path, dict[str, str]]:
    """The tables of each document by the name of their part."""
    out: dict[Path, dict[str, str]] = {}
    for subject, page in PLACES.items():
        text = (RESULTS / f"schemes_{subject}.json").read_text()
        out.setdefault(DOCS / f"{page}.md", {})[subject] = table(json.loads(text))
    return out


if __name__ == "__main__":
    document_tables.main(__doc__, "schemes_tables", documents())
