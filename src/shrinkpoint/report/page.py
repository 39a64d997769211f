"""A page about stores, runs or files: one file of HTML that needs nothing else and asks nothing of the network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files
from importlib.util import find_spec

from shrinkpoint import html, humanize
from shrinkpoint.errors import PolicyError
from shrinkpoint.report.checkpoints import CheckpointReport
from shrinkpoint.report.files import TensorRow
from shrinkpoint.report.run import RunReport
from shrinkpoint.store.loss_increase import LossIncrease

_SHOWN_ROWS, _MAX_ROWS = 50, 2000
"""Rows of a table that are seen at once, and those that a click adds."""


def render_page(runs: Sequence[RunReport]) -> str:
    """Renders one run, or two side by side.

    Raises:
        PolicyError: plotly is not installed.
    """
    check_plotly("report")
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    from shrinkpoint.report.figures import series_figures, tensor_figures

    figures = [*series_figures(runs), *tensor_figures(runs)]
    documents = [
        {**figure.figure.to_plotly_json(), "switches": [values for _, values in figure.switches]} for figure in figures
    ]
    style, script = (files("shrinkpoint.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    return html.render(
        "page.html",
        title=" and ".join(run.name for run in runs),
        now=datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC"),
        runs=runs,
        details=[_details(run, f": {run.name}" if len(runs) > 1 else "") for run in runs],
        figures=figures,
        # JSON that no text in it can break out of
        figures_json=Markup(json.dumps(documents, separators=(",", ":")).replace("<", "\\u003c")),
        style=Markup(style),
        script=Markup(script),
        plotly=Markup(get_plotlyjs()),
        shown_rows=_SHOWN_ROWS,
        max_rows=_MAX_ROWS,
    )


def check_plotly(argument: str) -> None:
    """Raise a PolicyError if plotly, which draws figures, is not installed."""
    if find_spec("plotly") is None:
        raise PolicyError(argument, found="no plotly", expected="plotly", do='pip install "shrinkpoint[cli]"')


@dataclass(frozen=True)
class _Table:
    """A table whose first rows are seen, and others after a click. `numbers` names columns aligned to the right."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()


@dataclass(frozen=True)
class _Details:
    """Tables of one run below its figures.

    Attributes:
        tables: of checkpoints.
        settings: that the scheme chose for the checkpoint that is shown.
        tensors: tables of what stayed exact, and of how each tensor is coded.
    """

    tables: list[_Table]
    settings: list[tuple[str, str]]
    tensors: list[_Table]


def _details(run: RunReport, suffix: str) -> _Details:
    tables = []
    if run.checkpoints:
        rows = [_checkpoint_row(run, row) for row in reversed(run.checkpoints)]
        tables.append(_Table(f"Checkpoints{suffix}", _CHECKPOINT_HEADS, rows, _CHECKPOINT_NUMBERS))
    if run.store is not None and run.store.broken:
        tables.append(_Table(f"Unreadable{suffix}", ("where", "found"), run.store.broken))
    loss = run.shown.manifest.loss if run.shown is not None and isinstance(run.shown.manifest.loss, dict) else {}
    chosen = loss.get("chosen")
    settings = [(str(k).replace("_", " "), str(v)) for k, v in chosen.items()] if isinstance(chosen, dict) else []
    tensors = sorted((row for file in run.files for row in file.tensors), key=lambda row: -row.stored_bytes)
    heads = ("tensor", "role", "shape", "dtype", "coding", "state", "stored", "bits a value", "ratio")
    named = _Table(f"Tensors of {run.shown_name}{suffix}", heads, [_tensor_row(row) for row in tensors], heads[5:])
    return _Details(tables, settings, [*_exact_tables(loss.get("stayed_exact")), named])


_CHECKPOINT_HEADS = (
    *("step", "made", "kind", "scheme", "state", "stored", "ratio", "loss rise"),
    *("progress held", "wait", "time", "next prune", "note"),
)
_CHECKPOINT_NUMBERS = ("step", "state", "stored", "ratio", "loss rise", "progress held", "wait", "time")


def _checkpoint_row(run: RunReport, row: CheckpointReport) -> tuple[str, ...]:
    def stat(name: str, scale: float = 1.0, unit: str = "s") -> str:
        return f"{scale * row.manifest.stats[name]:.3g} {unit}" if name in row.manifest.stats else ""

    reason = run.deletion_reason(row)
    fate = f"deletes it: {reason}" if reason else "keeps it"
    return (
        row.folder or str(row.manifest.step),
        row.manifest.created[:19].replace("T", " "),
        row.manifest.kind,
        row.manifest.scheme,
        humanize.size(row.manifest.raw_bytes),
        humanize.size(row.manifest.stored_bytes),
        humanize.ratio(row.manifest.raw_bytes, row.manifest.stored_bytes),
        str(LossIncrease.from_loss(row.manifest.loss)),
        stat("retention", 100, "%"),
        stat("stall"),
        stat("seconds"),
        fate if run.store is not None and not run.store.is_run else "",
        row.manifest.note,
    )


def _exact_tables(reasons: object) -> list[_Table]:
    """Tables of the reasons for which tensors stayed exact under a lossy scheme."""
    if not isinstance(reasons, dict) or not reasons:
        return []
    rows = []
    for reason, counts in reasons.items():
        counts = counts if isinstance(counts, dict) else {}
        largest, nbytes = counts.get("largest"), counts.get("bytes")
        names = ", ".join(map(str, largest)) if isinstance(largest, list) else ""
        size = humanize.size(nbytes) if type(nbytes) is int else ""
        rows.append((str(reason), str(counts.get("tensors", "")), size, names))
    return [_Table("Stayed exact", ("reason", "tensors", "bytes", "the largest"), rows, ("tensors", "bytes"))]


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
