"""Plots rate against distortion and against the rise of the loss, all schemes in one picture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shrinkpoint.bench.result import BenchResult
from shrinkpoint.errors import PolicyError

_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
)
_MARKERS = ("circle", "square", "diamond", "x")
_RATE, _RATIO = "bits a weight, median of deltas", "raw bytes for each stored byte of the whole state, deltas"
_ERROR, _RISE = "relative error of the weights", "worst relative rise of the loss"


@dataclass(frozen=True)
class _Panel:
    """Two quantities of a result and the titles of their axes; on the y axis, values <= 0 lie at the foot."""

    x_title: str
    x: Callable[[BenchResult], float | None]
    y_title: str
    y: Callable[[BenchResult], float | None]


def write_plot(results: Sequence[BenchResult], path: Path, title: str) -> list[Path]:
    """Writes `path`.html, and `path`.png if kaleido is installed; returns the files written.

    Raises:
        PolicyError: plotly is not installed.
    """
    if find_spec("plotly") is None:
        expected, do = "plotly", "pip install 'shrinkpoint[plot]'"
        raise PolicyError("plot", found="no plotly", expected=expected, do=do)
    figure = _figure([result for result in results if result.rows], title)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(".html")]
    figure.write_html(written[0], include_plotlyjs=True)
    if find_spec("kaleido") is not None:
        written.append(path.with_suffix(".png"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kaleido warns about the version of Python
            figure.write_image(written[1], scale=2, width=1500, height=560)
    return written


def _panels(results: Sequence[BenchResult]) -> list[_Panel]:
    def bits(result: BenchResult) -> float | None:
        return result.median(lambda row: row.bits.get("W"))

    def error(result: BenchResult) -> float | None:
        return result.median(lambda row: row.errors.get("W"))

    def rise(result: BenchResult) -> float | None:
        return result.worst(lambda row: row.rise)

    panels = [_Panel(_RATE, bits, _ERROR, error)]
    if any(rise(result) is not None for result in results):
        panels += [_Panel(_RATE, bits, _RISE, rise), _Panel(_RATIO, lambda result: result.delta_ratio, _RISE, rise)]
    return panels


def _figure(results: Sequence[BenchResult], title: str) -> Any:
    from plotly.subplots import make_subplots

    panels, named = _panels(results), set[str]()
    figure = make_subplots(1, len(panels), horizontal_spacing=0.07)
    for column, panel in enumerate(panels, 1):
        _draw(figure, column, panel, results, named)
        figure.update_xaxes(title_text=panel.x_title, type="log", dtick="D2", row=1, col=column)
        figure.update_yaxes(title_text=panel.y_title, type="log", exponentformat="power", dtick=1, row=1, col=column)
    figure.update_layout(title=title, template="plotly_white", legend={"font": {"size": 10}})
    return figure


def _draw(figure: Any, column: int, panel: _Panel, results: Sequence[BenchResult], legend_names: set[str]) -> None:
    from plotly import graph_objects

    values = [panel.y(result) for result in results]
    foot = min((y for y in values if y is not None and y > 0), default=1.0) / 3
    for index, (result, y) in enumerate(zip(results, values, strict=True)):
        x = panel.x(result)
        if x is None or y is None:
            continue
        marker = {"size": 11, "color": _COLOURS[index % len(_COLOURS)], "symbol": _MARKERS[index // len(_COLOURS)]}
        point = graph_objects.Scatter(
            x=[x],
            y=[max(y, foot)],
            mode="markers",
            name=result.name,
            legendgroup=result.name,
            marker=marker,
            showlegend=result.name not in legend_names,
            hovertext=[f"{result.name}<br>{x:.3g}, {y:.3g}"],
            hoverinfo="text",
        )
        figure.add_trace(point, row=1, col=column)
        legend_names.add(result.name)
