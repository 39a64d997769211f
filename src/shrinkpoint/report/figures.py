"""The figures of a page, for plotly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shrinkpoint import humanize
from shrinkpoint.html import text
from shrinkpoint.report.checkpoints import CheckpointReport
from shrinkpoint.report.run import RunReport
from shrinkpoint.report.treemap import ROLE_NAMES, Node, tensor_tree
from shrinkpoint.store.loss_increase import LossIncrease

COLORS = ("#2a78c8", "#c4622d")
"""Of the first and the second run; legible on white and on black."""
_ROLE_COLORS = ("#2465a4", "#9a4a1f", "#2c6e49", "#6b4c9a", "#8a6d1b", "#7a3b58", "#355c7d", "#4a5568")
"""Of the roles in their order; white text is legible on all of them."""
_TORCH_COLOR, _DOOMED_COLOR = "#8a8a8a", "#c0392b"


class Figure(NamedTuple):
    """A figure with what it shows, in words.

    Attributes:
        title: its heading.
        caption: how it is read.
        figure: for plotly.
        switches: (text of a button, values of the first trace) between which the page switches; may be empty.
    """

    title: str
    caption: str
    figure: go.Figure
    switches: tuple[tuple[str, list[Any]], ...] = ()


def series_figures(runs: Sequence[RunReport]) -> Iterator[Figure]:
    """The figures over steps: bytes, their sums, what was lost, and what saves cost."""
    if not any(run.checkpoints for run in runs):
        return
    yield _bytes_figure(runs)
    yield _sum_figure(runs)
    yield _chain_figure(runs)
    yield _rise_figure(runs)
    yield from _stat_figures(runs)


def tensor_figures(runs: Sequence[RunReport]) -> Iterator[Figure]:
    """A map of the tensors of each run's checkpoint that is shown."""
    for run in runs:
        nodes = tensor_tree([row for file in run.files for row in file.tensors])
        if len(nodes) > 1:
            yield _tree_figure(run, nodes, several=len(runs) > 1)


def _each(runs: Sequence[RunReport], separator: str) -> Iterator[tuple[RunReport, str, str]]:
    """Each run, its color, and what the names of its lines begin with: nothing where it is alone."""
    for run, color in zip(runs, COLORS, strict=False):
        yield run, color, f"{text(run.name)}{separator}" if len(runs) > 1 else ""


def _bytes_figure(runs: Sequence[RunReport]) -> Figure:
    figure = _figure("bytes", log=True)
    for run, color, prefix in _each(runs, ", "):
        rows = run.checkpoints
        hover = [_describe(row) for row in rows]
        raw = [row.manifest.raw_bytes or None for row in rows]
        _add(figure, f"{prefix}torch.save", run.steps, raw, _TORCH_COLOR, hover, dash="dot")
        stored = [row.manifest.stored_bytes or None for row in rows]
        symbols = ["diamond" if row.manifest.depth == 0 else "circle" for row in rows]
        _add(figure, f"{prefix}stored", run.steps, stored, color, hover, symbols)
    caption = "Bytes of each checkpoint beside those of its state, which torch.save writes. Diamonds are keyframes."
    return Figure("Bytes by step", caption, figure)


def _sum_figure(runs: Sequence[RunReport]) -> Figure:
    figure = _figure("bytes")
    for run, color, prefix in _each(runs, ", "):
        raw, stored = run.cumulative_bytes()
        hover = [
            f"{humanize.size(b)} of {humanize.size(a)}, {humanize.size(a - b)} saved"
            for a, b in zip(raw, stored, strict=True)
        ]
        _add(figure, f"{prefix}torch.save", run.steps, raw, _TORCH_COLOR, hover, dash="dot")
        _add(figure, f"{prefix}stored", run.steps, stored, color, hover)
    caption = "All bytes until a step. What lies between the lines was saved."
    return Figure("Sum of bytes", caption, figure)


def _chain_figure(runs: Sequence[RunReport]) -> Figure:
    figure = _figure("deltas above the keyframe")
    for run, color, prefix in _each(runs, ": "):
        pairs = list(zip(run.steps, run.checkpoints, strict=True))
        kept = [(step, row) for step, row in pairs if row.manifest.step not in run.doomed]
        _add_points(
            figure, f"{prefix}keyframe", [pair for pair in kept if not pair[1].manifest.depth], color, "diamond"
        )
        _add_points(figure, f"{prefix}delta", [pair for pair in kept if pair[1].manifest.depth], color, "circle")
        doomed = [(step, row) for step, row in pairs if row.manifest.step in run.doomed]
        _add_points(figure, f"{prefix}deleted by the next prune", doomed, _DOOMED_COLOR, "x", run.deletion_reason)
    caption = "A restore reads a keyframe and every delta above it. Crosses are what the next prune deletes."
    return Figure("Chains", caption, figure)


def _rise_figure(runs: Sequence[RunReport]) -> Figure:
    figure = _figure("rise of the loss", percent=True)
    for run, color, prefix in _each(runs, ": "):
        increases = [LossIncrease.from_loss(row.manifest.loss) for row in run.checkpoints]
        values = [increase.value if increase.is_lossy else 0.0 for increase in increases]
        hover = [f"{_describe(row)}<br>{text(_loss_text(row))}" for row in run.checkpoints]
        _add(figure, f"{prefix}measured, or nothing lost", run.steps, values, color, hover)
        ends = [increase.interval for increase in increases]
        if any(ends):
            figure.data[-1].error_y = {
                "type": "data",
                "symmetric": False,
                "array": [
                    max(end[1] - (value or 0.0), 0.0) if end else 0.0 for end, value in zip(ends, values, strict=True)
                ],
                "arrayminus": [
                    max((value or 0.0) - end[0], 0.0) if end else 0.0 for end, value in zip(ends, values, strict=True)
                ],
                "thickness": 1,
            }
        unmeasured = [
            (step, row)
            for step, row, increase in zip(run.steps, run.checkpoints, increases, strict=True)
            if increase.is_lossy and increase.value is None
        ]
        _add_points(figure, f"{prefix}not measured", unmeasured, color, "x-open", _loss_text, at=0.0)
    caption = (
        "By how much the loss rises where a checkpoint is restored, with the 95 % interval on other examples. "
        "Crosses at zero were not measured; a prediction, in nats, stands beside them where there is one."
    )
    return Figure("Rise of the loss", caption, figure)


_STATS = (
    (
        "retention",
        "Progress held",
        "share",
        "The share of the weights' progress since the checkpoint before that each one holds.",
    ),
    ("stall", "Wait of the loop", "seconds", "For how long each save held up the training loop."),
    ("seconds", "Time of saves", "seconds", "How long each save took, beside the loop where it ran in the background."),
)


def _stat_figures(runs: Sequence[RunReport]) -> Iterator[Figure]:
    for key, title, unit, caption in _STATS:
        if not any(key in row.manifest.stats for run in runs for row in run.checkpoints):
            continue
        figure = _figure(unit, percent=key == "retention")
        for run, color in zip(runs, COLORS, strict=False):
            values = [row.manifest.stats.get(key) for row in run.checkpoints]
            _add(figure, text(run.name), run.steps, values, color, [_describe(row) for row in run.checkpoints])
        figure.update_layout(showlegend=len(runs) > 1)
        yield Figure(title, caption, figure)


def _tree_figure(run: RunReport, nodes: Sequence[Node], *, several: bool) -> Figure:
    stored, raw = [node.stored_bytes for node in nodes], [node.raw_bytes for node in nodes]
    hover = [
        f"{text(node.id.strip('/') or 'all')}<br>{humanize.sizes(node.raw_bytes, node.stored_bytes)}" for node in nodes
    ]
    figure = go.Figure(
        go.Treemap(
            ids=[node.id or "all" for node in nodes],
            labels=[text(node.label) for node in nodes],
            parents=["" if not node.id else node.parent or "all" for node in nodes],
            values=stored,
            branchvalues="total",
            hovertext=hover,
            hoverinfo="text",
            maxdepth=4,
            tiling={"pad": 1},
            marker={"cornerradius": 3, "colors": [_role_color(node) for node in nodes]},
            textfont={"color": "#fff"},
            pathbar={"textfont": {"color": "#fff"}},
        )
    )
    figure.update_layout(margin={"l": 4, "r": 4, "t": 4, "b": 4}, height=420)
    title = f"Bytes by role and layer: {run.name}" if several else "Bytes by role and layer"
    caption = f"The tensors of {run.shown_name}. Click on a box to look into it."
    return Figure(title, caption, figure, (("stored bytes", stored), ("bytes of the state", raw)))


def _role_color(node: Node) -> str:
    """The color of a box: that of its role, the same in all maps."""
    role = node.id.split("/")[1] if node.id else ""
    colors = dict(zip(ROLE_NAMES.values(), _ROLE_COLORS, strict=True))
    return colors.get(role, "#6a737d")


def _figure(unit: str, *, log: bool = False, percent: bool = False) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        margin={"l": 60, "r": 10, "t": 10, "b": 40},
        height=340,
        hovermode="closest",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis={"title": {"text": "step"}},
        yaxis={"title": {"text": unit}, "rangemode": "tozero"},
    )
    if log:
        figure.update_yaxes(type="log", exponentformat="SI", dtick="D2")
    elif percent:
        figure.update_yaxes(tickformat=".2~%")
    else:
        figure.update_yaxes(exponentformat="SI")
    return figure


def _add(
    figure: go.Figure,
    name: str,
    steps: Sequence[int],
    values: Sequence[float | None],
    color: str,
    hover: Sequence[str],
    symbols: Sequence[str] | None = None,
    dash: str = "solid",
) -> None:
    mode = "lines" if dash != "solid" else "lines+markers"
    marker = {"symbol": symbols or "circle", "size": 8, "color": color}
    line = {"color": color, "dash": dash, "width": 1.5}
    figure.add_scatter(
        x=list(steps),
        y=list(values),
        name=name,
        mode=mode,
        marker=marker,
        line=line,
        hovertext=list(hover),
        hoverinfo="text",
        cliponaxis=False,
    )


def _add_points(
    figure: go.Figure,
    name: str,
    members: Sequence[tuple[int, CheckpointReport]],
    color: str,
    symbol: str,
    note: Callable[[CheckpointReport], str] | None = None,
    at: float | None = None,
) -> None:
    """Add a mark for each of some checkpoints, at its depth or at one height, with what a note says of it."""
    if not members:
        return
    hover = [_describe(row) + ("" if note is None else f"<br>{text(note(row))}") for _, row in members]
    heights = [row.manifest.depth if at is None else at for _, row in members]
    figure.add_scatter(
        x=[step for step, _ in members],
        y=heights,
        name=name,
        mode="markers",
        marker={"symbol": symbol, "size": 8, "color": color},
        hovertext=hover,
        hoverinfo="text",
        cliponaxis=False,
    )


def _loss_text(row: CheckpointReport) -> str:
    return f"loss {str(LossIncrease.from_loss(row.manifest.loss)) or 'as before'}"


def _describe(row: CheckpointReport) -> str:
    manifest = row.manifest
    where = f"step {manifest.step}" if row.folder is None else row.folder
    sizes = humanize.sizes(manifest.raw_bytes, manifest.stored_bytes)
    return f"{text(where)}<br>{text(manifest.scheme)}, {manifest.kind}<br>{sizes}"
