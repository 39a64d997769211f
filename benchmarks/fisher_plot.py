"""The picture of docs/fisher.md: bits a weight against the rise of the loss, all schemes on the same checkpoints.

python benchmarks/fisher_plot.py results/schemes.json results/schemes_fisher_gpt.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

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
    "fisher": "1 %",
    "fisher(relative_error=.6)": ".6",
    "fisher(relative_error=.3)": ".3",
    "fisher(relative_error=.15)": ".15",
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


def points(path: Path, subject: str) -> dict[str, Point]:
    out = {}
    for one in json.loads(path.read_text())["subjects"].get(subject, []):
        rows = [row for row in one.get("rows", []) if not row["keyframe"] and row.get("rise") is not None]
        if rows and one["name"] in (*OTHERS, *OURS):
            bits, rise = (statistics.median(row) for row in ([r["bits"]["W"] for r in rows], [r["rise"] for r in rows]))
            kept = statistics.median(1.0 if row["retention"] is None else row["retention"] for row in rows)
            out[one["name"]] = Point(one["name"], bits, 100 * rise, kept)
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
    parser.add_argument("results", nargs="+", type=Path, help="what schemes.py wrote")
    parser.add_argument("--subject", default="gpt")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/fisher.svg"))
    options = parser.parse_args()
    found: dict[str, Point] = {}
    for path in options.results:
        found |= points(path, options.subject)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure(found).write_image(options.out, width=820, height=480)
    print("written:", options.out)


if __name__ == "__main__":
    main()
