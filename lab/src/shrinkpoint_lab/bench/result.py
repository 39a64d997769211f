"""Results of systems on one series: as plain data, as cells of a table, and as a picture."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class ResultRow:
    """Measurements of one checkpoint.

    Attributes:
        step: its step in the series.
        keyframe: it needs no other checkpoint.
        raw: bytes of all tensors of the state.
        stored: bytes that were written.
        values: number of values of W, m and v.
        bits: stored bits for each value of W, m and v; groups that the system does not tell apart are missing.
        errors: relative errors of W, m, v and of Adam's "update".
        exact: every tensor came back bit for bit.
        encode: seconds, without the user's evaluation.
        decode: seconds.
        searched: seconds in the user's evaluation.
        quality: value of the original state; None: not evaluated.
        returned: value of the decoded state; None: not evaluated.
        rise: by how much `returned` is worse than `quality`, relative to it.
        peak: bytes by which memory rose while it was encoded; None: unknown.
        retention: share of the weights' progress since the previous checkpoint that was written; None: not measured.
        choice: the settings that a search chose.
    """

    step: int
    keyframe: bool
    raw: int
    stored: int
    values: Mapping[str, int]
    bits: Mapping[str, float]
    errors: Mapping[str, float]
    exact: bool
    encode: float
    decode: float
    searched: float = 0.0
    quality: float | None = None
    returned: float | None = None
    rise: float | None = None
    peak: int | None = None
    retention: float | None = None
    choice: JSON = None


@dataclass(frozen=True)
class BenchResult:
    """Results of one system on a series.

    Attributes:
        name: of the system.
        rows: one for each checkpoint.
        failure: why there are no rows; "" if there are.
    """

    name: str
    rows: Sequence[ResultRow] = field(repr=False, default=())
    failure: str = ""

    @property
    def deltas(self) -> Sequence[ResultRow]:
        """The rows of deltas; all rows if every checkpoint is a keyframe."""
        return [row for row in self.rows if not row.keyframe] or self.rows

    @property
    def ratio(self) -> float:
        """Raw bytes for each stored byte over the whole series, keyframes included."""
        return _ratio(sum(row.raw for row in self.rows), sum(row.stored for row in self.rows))

    @property
    def delta_ratio(self) -> float:
        """Raw bytes for each stored byte over the deltas."""
        return _ratio(sum(row.raw for row in self.deltas), sum(row.stored for row in self.deltas))

    @property
    def encode_speed(self) -> float:
        """GB of raw bytes a second, the user's evaluation not counted."""
        return self._gb_per_second(sum(row.encode for row in self.rows))

    @property
    def decode_speed(self) -> float:
        """GB of raw bytes a second."""
        return self._gb_per_second(sum(row.decode for row in self.rows))

    def _gb_per_second(self, seconds: float) -> float:
        return _ratio(sum(row.raw for row in self.rows), 1e9 * seconds)

    @property
    def peak(self) -> float | None:
        """The largest rise of memory, in sizes of the state."""
        rises = [row.peak / row.raw for row in self.rows if row.peak is not None and row.raw]
        return max(rises, default=None)

    def median(self, key: Callable[[ResultRow], float | None]) -> float | None:
        """The median of a quantity over the deltas that have it."""
        values = [value for value in map(key, self.deltas) if value is not None]
        return statistics.median(values) if values else None

    def worst(self, key: Callable[[ResultRow], float | None], *, smallest: bool = False) -> float | None:
        """The largest value of a quantity over all rows, or the smallest."""
        values = [value for value in map(key, self.rows) if value is not None]
        return (min if smallest else max)(values, default=None)

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object: the figures of the table, and the rows."""
        summary = {
            "ratio": self.ratio,
            "delta_ratio": self.delta_ratio,
            "encode_gb_s": self.encode_speed,
            "decode_gb_s": self.decode_speed,
            "peak": self.peak,
            "rise": self.median(lambda row: row.rise),
            "worst_rise": self.worst(lambda row: row.rise),
            "least_retention": self.min_retention,
        }
        if self.failure:
            return {"name": self.name, "failure": self.failure}
        return {"name": self.name, **summary, "rows": [asdict(row) for row in self.rows]}

    @property
    def min_retention(self) -> float | None:
        """The smallest retention over all rows."""
        return self.worst(lambda row: row.retention, smallest=True)


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("inf")


TABLE_HEADER = (
    *("scheme", "W bits", "m bits", "v bits", "delta x", "run x", "W error", "update error"),
    *("rise %", "worst %", "retention", "enc GB/s", "dec GB/s", "memory"),
)
"""Bits a value and errors are medians over the deltas; ratios are of the whole state; memory is the largest rise during
a save, in sizes of the state."""


def table_rows(results: Sequence[BenchResult]) -> list[list[str]]:
    """Cells of one table row for each result that did not fail."""
    return [_table_row(result) for result in results if result.rows]


def _table_row(result: BenchResult) -> list[str]:
    def median_text(form: str, key: Callable[[ResultRow], float | None]) -> str:
        return _format_number(result.median(key), form)

    def error_text(kind: str) -> str:
        error = result.median(lambda row: row.errors.get(kind))
        return _format_number(error, ".2e" if error else ".0f")

    rises = result.median(lambda row: row.rise), result.worst(lambda row: row.rise)
    return [
        result.name,
        median_text(".3f", lambda row: row.bits.get("W")),
        median_text(".3f", lambda row: row.bits.get("m")),
        median_text(".3f", lambda row: row.bits.get("v")),
        f"{result.delta_ratio:.2f}",
        f"{result.ratio:.2f}",
        error_text("W"),
        error_text("update"),
        *(_format_number(None if rise is None else 100 * rise, "+.3f") for rise in rises),
        _format_number(result.min_retention, ".2f"),
        f"{result.encode_speed:.3f}",
        f"{result.decode_speed:.3f}",
        _format_number(result.peak, ".2f"),
    ]


def _format_number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_COLOURS = [
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e"),
    *("#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"),
]
_MARKERS = ("circle", "square", "diamond", "x")
_RATE, _RATIO = "bits a weight, median of deltas", "raw bytes for each stored byte of the whole state, deltas"
_ERROR, _RISE = "relative error of the weights", "worst relative rise of the loss"


class _Panel(NamedTuple):
    """Two quantities of a result and the titles of their axes; on the y axis, values <= 0 lie at the foot."""

    x_title: str
    x: Callable[[BenchResult], float | None]
    y_title: str
    y: Callable[[BenchResult], float | None]


def write_plot(results: Sequence[BenchResult], path: Path, title: str) -> list[Path]:
    """Writes `path`.html, and `path`.png if kaleido is installed; returns the files written. Needs plotly."""
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
