"""Panels of lines or bars, written as a page of its own and, where kaleido is installed, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

COLORS = ("#1f5f99", "#d1495b", "#3a7d44", "#b08900", "#7b4b94", "#4f9da6", "#8c564b", "#555555")


@dataclass(frozen=True)
class Line:
    """One series; of kind "lines", "markers" or "bars". Series of one name share a color and a legend entry."""

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]
    kind: str = "lines"


@dataclass(frozen=True)
class Panel:
    """Axes and what is drawn on them.

    Attributes:
        band: y from and to, shaded: noise.
        log, log_x: logarithmic axes.
    """

    title: str
    x: str
    y: str
    lines: list[Line] = field(default_factory=list)
    band: tuple[float, float] | None = None
    log: bool = False
    log_x: bool = False


def write(panels: Sequence[Panel], path: Path, title: str) -> None:
    """`path`.html, and `path`.png where that can be made; says what is missing."""
    if find_spec("plotly") is None:
        print("plotly is not installed (pip install -e '.[bench]'): no plot")
        return
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        print("nothing to plot yet")
        return
    figure = _figure(panels, title)
    figure.write_html(path.with_suffix(".html"), include_plotlyjs=True)
    written = [path.with_suffix(".html")]
    if find_spec("kaleido") is not None:
        figure.write_image(path.with_suffix(".png"), scale=2)
        written.append(path.with_suffix(".png"))
    print("plot:", ", ".join(map(str, written)))


def _figure(panels: Sequence[Panel], title: str) -> Any:
    from plotly.subplots import make_subplots

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = make_subplots(rows, columns, subplot_titles=[panel.title for panel in panels], vertical_spacing=0.3 / rows)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    shown: set[str] = set()
    for place, panel in enumerate(panels):
        at = {"row": place // columns + 1, "col": place % columns + 1}
        for line in panel.lines:
            color = COLORS[names.index(line.name) % len(COLORS)]
            figure.add_trace(_trace(line, color, legend=line.name not in shown), **at)
            shown.add(line.name)
        if panel.band:
            figure.add_hrect(*panel.band, fillcolor="#888888", opacity=0.15, line_width=0, **at)
        figure.update_xaxes(title_text=panel.x, type="log" if panel.log_x else None, **at)
        figure.update_yaxes(title_text=panel.y, type="log" if panel.log else "linear", **at)
    figure.update_annotations(font_size=14)
    figure.update_layout(title=title, template="simple_white", width=1100, height=120 + 380 * rows)
    return figure


def _trace(line: Line, color: str, *, legend: bool) -> Any:
    import plotly.graph_objects as go

    common = {"x": list(line.x), "y": list(line.y), "name": line.name, "legendgroup": line.name, "showlegend": legend}
    if line.kind == "bars":
        return go.Bar(**common, marker_color=color)
    mode = "markers" if line.kind == "markers" else "lines+markers" if len(line.x) <= 12 else "lines"
    return go.Scatter(**common, mode=mode, line_color=color, marker_color=color)
