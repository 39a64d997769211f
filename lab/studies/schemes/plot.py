"""The picture of docs/scheme_studies.md: bits a weight against the rise of the loss, all schemes on a GPT.

python -m lab.studies.schemes.plot    # of results/schemes_gpt.json, into docs/pictures/schemes.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from lab.studies.harness import DOCS
from lab.studies.schemes import table
from shrinkpoint_lab.bench.result import BenchResult

OTHERS = (
    "inshrinkerator",
    "qd",
    "cnr",
    "gobo",
    "lc-checkpoint(bits=2)",
    "lc-checkpoint(bits=3)",
    "scar",
    "topn",
    "excp",
)
OURS = {
    "fisher": "1%",
    "fisher(relative_error=.6)": "0.6",
    "fisher(relative_error=.3)": "0.3",
    "fisher(relative_error=.15)": "0.15",
}
KEPT = 0.6
"""Retention below which a small rise says little."""


@dataclass(frozen=True)
class Point:
    """Of one scheme: bits a weight, rise in per cent, retention; medians of deltas."""

    name: str
    bits: float
    rise: float
    retention: float


def points(results: Iterable[BenchResult]) -> dict[str, Point]:
    """The schemes of the picture, by their names."""
    out = {}
    for one in results:
        if one.name in (*OTHERS, *OURS):
            bits, rise = one.median(lambda row: row.bits["W"]), one.median(lambda row: row.rise)
            retention = one.median(lambda row: row.retention)
            assert bits is not None and rise is not None and retention is not None, one.name
            out[one.name] = Point(one.name, bits, 100 * rise, retention)
    return out


def figure(found: dict[str, Point]) -> Any:
    made = go.Figure()
    others = [found[name] for name in OTHERS if name in found]
    groups = (
        ([one for one in others if one.retention >= KEPT], "published", "#555555", "circle", "markers+text"),
        (
            [one for one in others if one.retention < KEPT],
            f"published, retention below {KEPT:g}",
            "#555555",
            "circle-open",
            "markers+text",
        ),
        (
            [found[name] for name in OURS if name in found],
            "fisher, by what is asked",
            "#d62728",
            "circle",
            "lines+markers+text",
        ),
    )
    for group, name, colour, symbol, mode in groups:
        labels = [OURS.get(one.name, one.name) for one in group]
        made.add_scatter(
            x=[one.bits for one in group],
            y=[one.rise for one in group],
            mode=mode,
            name=name,
            text=labels,
            textposition="top center",
            marker={"size": 10, "color": colour, "symbol": symbol, "line": {"width": 2}},
            textfont={"size": 12, "color": colour},
        )
    ticks = [0.2, 0.5, 1, 2, 4]
    made.update_xaxes(title="bits a weight and save, 16 steps apart", type="log", tickvals=ticks, ticktext=ticks)
    made.update_yaxes(title="rise of the loss at once, %")
    legend = {"orientation": "h", "y": 1.12}
    made.update_layout(template="plotly_white", legend=legend, margin={"t": 30, "r": 20, "b": 60})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS / "pictures" / "schemes.svg")
    options = parser.parse_args()
    _, results = table.read("gpt")
    figure(points(results)).write_image(options.out, width=820, height=480)
    print("written:", options.out)


if __name__ == "__main__":
    main()
