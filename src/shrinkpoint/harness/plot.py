"""Rate against distortion and against rise, all schemes in one picture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shrinkpoint.errors import PolicyError
from shrinkpoint.harness.outcome import Outcome

_COLOURS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22",
)  # fmt: skip
_SYMBOLS = ("circle", "square", "diamond", "x")
_RATE, _RATIO = "bits a weight, median of deltas", "raw bytes for each stored byte of the whole state, deltas"
_ERROR, _RISE = "relative error of the weights", "worst relative rise of the loss"


@dataclass(frozen=True)
class _Panel:
    """What is drawn against what; `y` on a logarithmic axis, where nothing and less than nothing lie at its foot."""

    x_title: str
    x: Callable[[Outcome], float | None]
    y_title: str
    y: Callable[[Outcome], float | None]


def write(outcomes: Sequence[Outcome], path: Path, title: str) -> list[Path]:
    """`path`.html, and `path`.png where kaleido is there.

    Raises:
        PolicyError: plotly is not installed.
    """
    if find_spec("plotly") is None:
        expected, do = "plotly", "pip install 'shrinkpoint[plot]'"
        raise PolicyError("plot", found="no plotly", expected=expected, do=do)
    figure = _figure([one for one in outcomes if one.rows], title)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(".html")]
    figure.write_html(written[0], include_plotlyjs=True)
    if find_spec("kaleido") is not None:
        written.append(path.with_suffix(".png"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kaleido's own, about the Python it was written for
            figure.write_image(written[1], scale=2, width=1500, height=560)
    return written


def _panels(outcomes: Sequence[Outcome]) -> list[_Panel]:
    def bits(one: Outcome) -> float | None:
        return one.median(lambda row: row.bits.get("W"))

    def error(one: Outcome) -> float | None:
        return one.median(lambda row: row.errors.get("W"))

    def rise(one: Outcome) -> float | None:
        return one.worst(lambda row: row.rise)

    panels = [_Panel(_RATE, bits, _ERROR, error)]
    if any(rise(one) is not None for one in outcomes):
        panels += [_Panel(_RATE, bits, _RISE, rise), _Panel(_RATIO, lambda one: one.delta_ratio, _RISE, rise)]
    return panels


def _figure(outcomes: Sequence[Outcome], title: str) -> Any:
    from plotly.subplots import make_subplots

    panels, named = _panels(outcomes), set[str]()
    figure = make_subplots(1, len(panels), horizontal_spacing=0.07)
    for column, panel in enumerate(panels, 1):
        _draw(figure, column, panel, outcomes, named)
        figure.update_xaxes(title_text=panel.x_title, type="log", dtick="D2", row=1, col=column)
        figure.update_yaxes(title_text=panel.y_title, type="log", exponentformat="power", dtick=1, row=1, col=column)
    figure.update_layout(title=title, template="plotly_white", legend={"font": {"size": 10}})
    return figure


def _draw(figure: Any, column: int, panel: _Panel, outcomes: Sequence[Outcome], named: set[str]) -> None:
    from plotly import graph_objects

    found = [panel.y(one) for one in outcomes]
    foot = min((y for y in found if y is not None and y > 0), default=1.0) / 3
    for index, (one, y) in enumerate(zip(outcomes, found, strict=True)):
        x = panel.x(one)
        if x is None or y is None:
            continue
        marker = {"size": 11, "color": _COLOURS[index % len(_COLOURS)], "symbol": _SYMBOLS[index // len(_COLOURS)]}
        point = graph_objects.Scatter(
            x=[x], y=[max(y, foot)], mode="markers", name=one.name, legendgroup=one.name, marker=marker,
            showlegend=one.name not in named, hovertext=[f"{one.name}<br>{x:.3g}, {y:.3g}"], hoverinfo="text",
        )  # fmt: skip
        figure.add_trace(point, row=1, col=column)
        named.add(one.name)
