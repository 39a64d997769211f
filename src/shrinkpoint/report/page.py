"""A page about stores, runs or files: one file of HTML that needs nothing else and asks nothing of the network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shrinkpoint import html, humanize
from shrinkpoint.errors import PolicyError
from shrinkpoint.report.checkpoints import CheckpointReport
from shrinkpoint.report.files import TensorRow
from shrinkpoint.report.run import RunReport
from shrinkpoint.store.loss_increase import LossIncrease

if TYPE_CHECKING:
    from shrinkpoint.report.figures import Figure

_SHOWN_ROWS, _MAX_ROWS = 50, 2000
"""Rows of a table that are seen at once, and those that a click adds."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
"""What a browser lets the page do: nothing with the network, whatever names of tensors say."""


def render_page(runs: Sequence[RunReport]) -> str:
    """Render one run, or two side by side.

    Raises:
        PolicyError: plotly is not installed.
    """
    check_plotly("report")
    from plotly.offline import get_plotlyjs

    from shrinkpoint.report.figures import series_figures, tensor_figures

    figures = [*series_figures(runs), *tensor_figures(runs)]
    now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")
    title = " and ".join(run.name for run in runs)
    style, script = (files("shrinkpoint.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    body = [
        f"<header><div><h1>{html.text(title)}</h1><p>shrinkpoint report, {now}</p></div>"
        '<button id="theme" type="button">Dark</button></header><main>',
        _columns(_summary(run, len(runs) > 1) for run in runs),
        f'<div class="figures">{"".join(_figure_html(index, figure) for index, figure in enumerate(figures))}</div>',
        _columns(_tables(run, len(runs) > 1) for run in runs),
        "</main>",
    ]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{html.text(title)}: shrinkpoint</title><style>{style}</style></head><body>{''.join(body)}"
        f'<script type="application/json" id="figures">{_figures_json(figures)}</script>'
        f"<script>{get_plotlyjs()}</script><script>{script}</script></body></html>\n"
    )


def check_plotly(argument: str) -> None:
    """Raise a PolicyError if plotly, which draws figures, is not installed."""
    if find_spec("plotly") is None:
        raise PolicyError(argument, found="no plotly", expected="plotly", do='pip install "shrinkpoint[cli]"')


def _columns(parts: Iterator[str]) -> str:
    return f'<div class="runs">{"".join(f"<section>{part}</section>" for part in parts)}</div>'


def _summary(run: RunReport, several: bool) -> str:
    heading = f"<h2>{html.text(run.name)}</h2>" if several else ""
    return heading + html.pairs(run.totals())


def _figure_html(index: int, figure: Figure) -> str:
    buttons = "".join(
        f'<button type="button" data-figure="{index}" data-switch="{number}" aria-pressed="{str(not number).lower()}">'
        f"{html.text(name)}</button>"
        for number, (name, _) in enumerate(figure.switches)
    )
    return (
        f'<figure><h2 id="title-{index}">{html.text(figure.title)}</h2>{buttons}'
        f'<div class="plot" id="plot-{index}" role="group" aria-labelledby="title-{index}"></div>'
        f"<figcaption>{html.text(figure.caption)}</figcaption></figure>"
    )


def _figures_json(figures: Sequence[Figure]) -> str:
    """All figures as JSON that no text in it can break out of."""
    documents = [
        {**figure.figure.to_plotly_json(), "switches": [values for _, values in figure.switches]} for figure in figures
    ]
    return json.dumps(documents, separators=(",", ":")).replace("<", "\\u003c")


def _tables(run: RunReport, several: bool) -> str:
    suffix = f": {run.name}" if several else ""
    parts = []
    if run.checkpoints:
        rows = [_checkpoint_row(run, row) for row in reversed(run.checkpoints)]
        parts.append(_long_table(f"Checkpoints{suffix}", _CHECKPOINT_HEADS, rows, _CHECKPOINT_NUMBERS))
    if run.store is not None and run.store.broken:
        parts.append(_long_table(f"Unreadable{suffix}", ("where", "found"), run.store.broken, ()))
    parts.append(_decisions(run, suffix))
    return "".join(parts)


_CHECKPOINT_HEADS = (
    *("step", "made", "kind", "scheme", "state", "stored", "ratio", "loss rise"),
    *("progress held", "wait", "time", "next prune", "note"),
)
_CHECKPOINT_NUMBERS = ("step", "state", "stored", "ratio", "loss rise", "progress held", "wait", "time")


def _checkpoint_row(run: RunReport, row: CheckpointReport) -> tuple[str, ...]:
    def stat(name: str, scale: float = 1.0, unit: str = "s") -> str:
        return f"{scale * row.stats[name]:.3g} {unit}" if name in row.stats else ""

    reason = run.deletion_reason(row)
    fate = f"deletes it: {reason}" if reason else "keeps it"
    return (
        row.folder or str(row.step),
        row.created[:19].replace("T", " "),
        row.kind,
        row.scheme,
        humanize.size(row.raw_bytes),
        humanize.size(row.stored_bytes),
        humanize.ratio(row.raw_bytes, row.stored_bytes),
        str(LossIncrease.from_loss(row.loss)),
        stat("retention", 100, "%"),
        stat("stall"),
        stat("seconds"),
        fate if run.store is not None and not run.store.is_run else "",
        row.note,
    )


def _decisions(run: RunReport, suffix: str) -> str:
    """What the scheme chose for the checkpoint that is shown, and how each tensor is coded."""
    rows = sorted((row for file in run.files for row in file.tensors), key=lambda row: -row.stored_bytes)
    loss = run.shown.loss if run.shown is not None and isinstance(run.shown.loss, dict) else {}
    chosen = loss.get("chosen")
    settings = chosen.items() if isinstance(chosen, dict) else ()
    numbers = html.pairs((str(name).replace("_", " "), str(value)) for name, value in settings)
    parts = [f"<h3>Chosen by the scheme</h3>{numbers}" if settings else "", _exact_table(loss.get("stayed_exact"))]
    heads = ("tensor", "role", "shape", "dtype", "coding", "state", "stored", "bits a value", "ratio")
    title = f"Tensors of {run.shown_name}{suffix}"
    return "".join(parts) + _long_table(title, heads, [_tensor_row(row) for row in rows], heads[5:])


def _exact_table(reasons: object) -> str:
    """Why tensors stayed exact under a lossy scheme."""
    if not isinstance(reasons, dict) or not reasons:
        return ""
    rows = []
    for reason, counts in reasons.items():
        counts = counts if isinstance(counts, dict) else {}
        largest, nbytes = counts.get("largest"), counts.get("bytes")
        names = ", ".join(map(str, largest)) if isinstance(largest, list) else ""
        size = humanize.size(nbytes) if type(nbytes) is int else ""
        rows.append((str(reason), str(counts.get("tensors", "")), size, names))
    return _long_table("Stayed exact", ("reason", "tensors", "bytes", "the largest"), rows, ("tensors", "bytes"))


def _tensor_row(row: TensorRow) -> tuple[str, ...]:
    count = math.prod(row.shape)
    return (
        row.name,
        row.role,
        " x ".join(map(str, row.shape)) or "scalar",
        row.dtype,
        row.coding,
        humanize.size(row.raw_bytes),
        ("~" if row.shared else "") + humanize.size(row.stored_bytes),
        f"{8 * row.stored_bytes / count:.2f}" if count else "",
        humanize.ratio(row.raw_bytes, row.stored_bytes),
    )


def _long_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> str:
    """A table whose first rows are seen, and others after a click."""
    first, rest = rows[:_SHOWN_ROWS], rows[_SHOWN_ROWS:_MAX_ROWS]
    parts = [f"<h3>{html.text(title)}</h3>", _scroll(title, html.table(heads, first, numbers=numbers, label=title))]
    if rest:
        more = html.table(heads, rest, numbers=numbers, label=f"{title}, more")
        parts.append(f"<details><summary>{len(rest):,} more</summary>{_scroll(f'{title}, more', more)}</details>")
    if len(rows) > _MAX_ROWS:
        parts.append(f"<p>and {len(rows) - _MAX_ROWS:,} that this page leaves out</p>")
    return "".join(parts)


def _scroll(title: str, table: str) -> str:
    """A table that scrolls for itself where the page is narrow, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{html.text(title)}">{table}</div>'
