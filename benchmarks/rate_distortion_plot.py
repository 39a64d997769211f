"""The picture of rivals at the same rise: bits a weight and save against the rise of the loss, a curve for each.

python benchmarks/rate_distortion_plot.py [benchmarks/results/rate_distortion.json]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from rate_distortion import HERE, KEPT
from rate_distortion_curves import Point, monotone

STYLES = {
    "fisher": ("#d62728", "solid"),
    "NNCodec": ("#1f5f99", "solid"),
    "NNCodec, no differences": ("#1f5f99", "dot"),
    "EntroPack of residuals": ("#4f9da6", "solid"),
    "EntroPack": ("#4f9da6", "dot"),
    "Inshrinkerator": ("#3a7d44", "solid"),
    "QD+": ("#8c564b", "solid"),
    "LC-Checkpoint": ("#7b4b94", "solid"),
    "ExCP": ("#b08900", "solid"),
    "ExCP, as released": ("#b08900", "dot"),
    "deltatensors": ("#e377c2", "solid"),
    "moonclip": ("#777777", "dot"),
    "lossless": ("#000000", "solid"),
}
"""Colour and line of each curve."""
NAMES = {"lossless": "shrinkpoint, lossless"}
LINEAR = 0.05
"""Per cent below which the axis of rises is linear."""
TICKS = (-5, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10, 30)


def symlog(rise: float) -> float:
    """Where a rise in per cent lies on the axis."""
    return math.copysign(math.log10(1 + abs(rise) / LINEAR), rise)


def figure(rows: list[dict[str, Any]]) -> Any:
    """All curves of one workload; hollow: retention below `KEPT`."""
    drawn = go.Figure()
    for rival, (colour, dash) in STYLES.items():
        found = sorted(
            (row["bits"], row["rise"], row["retention"]) for row in rows if row["rival"] == rival and "bits" in row
        )
        if not found:
            continue
        symbols = ["circle" if kept >= KEPT else "circle-open" for *_, kept in found]
        drawn.add_scatter(
            x=[bits for bits, *_ in found],
            y=[symlog(rise) for _, rise, _ in found],
            mode="lines+markers",
            name=NAMES.get(rival, rival),
            line={"color": colour, "dash": dash, "width": 3 if rival == "fisher" else 1.5},
            marker={"size": 8, "color": colour, "symbol": symbols},
        )
    ours = [row for row in rows if row["rival"] == "fisher" and row.get("bound")]
    bound = monotone(Point(row["bound"], row["rise"]) for row in ours)
    drawn.add_scatter(
        x=[point.bits for point in bound],
        y=[symlog(point.rise) for point in bound],
        mode="lines",
        name="bound for fisher's errors",
        line={"color": "#d62728", "dash": "dash", "width": 1.5},
    )
    ticks = [0.03, 0.1, 0.3, 1, 3, 10, 32]
    drawn.update_xaxes(title="bits a weight and save, 50 steps apart", type="log", tickvals=ticks, ticktext=ticks)
    labels = [f"{tick:g} %" for tick in TICKS]
    drawn.update_yaxes(title="rise of the loss at once", tickvals=[symlog(x) for x in TICKS], ticktext=labels)
    drawn.update_layout(template="plotly_white", margin={"t": 20, "r": 20, "b": 60}, font={"size": 13})
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=HERE / "results" / "rate_distortion.json")
    parser.add_argument("--workload", default="gpt")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/rate_distortion.svg"))
    options = parser.parse_args()
    rows = [row for row in json.loads(options.results.read_text())["rows"] if row["workload"] == options.workload]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure(rows).write_image(options.out, width=900, height=560)
    print("written:", options.out)


if __name__ == "__main__":
    main()
