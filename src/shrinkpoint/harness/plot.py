"""Rate against rise, all schemes in one picture."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shrinkpoint.errors import PolicyError
from shrinkpoint.harness.outcome import Outcome

_FLOOR = 1e-6
"""What is drawn of a rise, or an error, that is smaller or none: the axis is logarithmic."""


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
            figure.write_image(written[1], scale=2, width=1100, height=560)
    return written


def _figure(outcomes: Sequence[Outcome], title: str) -> Any:
    from plotly.subplots import make_subplots

    evaluated = any(row.rise is not None for one in outcomes for row in one.rows)
    columns = 2 if evaluated else 1
    titles = ["whole state against error of the weights", "whole state against worst rise of the loss"][:columns]
    figure = make_subplots(1, columns, subplot_titles=titles)
    for one in outcomes:
        error = one.median(lambda row: row.errors.get("W"))
        _point(figure, 1, one.name, one.delta_ratio, error)
        if evaluated:
            _point(figure, 2, one.name, one.delta_ratio, one.worst(lambda row: row.rise))
    for column, label in ((1, "relative error of W, median of deltas"), (2, "worst relative rise"))[:columns]:
        figure.update_xaxes(title_text="raw bytes for each stored byte, deltas", type="log", row=1, col=column)
        figure.update_yaxes(title_text=label, type="log", row=1, col=column, exponentformat="e")
    figure.update_layout(title=title, template="plotly_white", showlegend=False)
    return figure


def _point(figure: Any, column: int, name: str, x: float, y: float | None) -> None:
    from plotly import graph_objects

    if y is None:
        return
    place = max(y, _FLOOR)
    said = f"{name}<br>{x:.2f}x, {y:.3g}"
    marker = {"size": 10, "symbol": "circle" if y > _FLOOR else "triangle-down"}
    point = graph_objects.Scatter(
        x=[x], y=[place], mode="markers+text", text=[name], textposition="top center", hovertext=[said],
        hoverinfo="text", marker=marker, textfont={"size": 9},
    )  # fmt: skip
    figure.add_trace(point, row=1, col=column)
