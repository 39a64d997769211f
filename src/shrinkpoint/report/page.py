"""A page about stores, runs or files: one file of HTML that needs nothing else and asks nothing of the network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files

from shrinkpoint import html, humanize
from shrinkpoint.report.checkpoints import CheckpointReport
from shrinkpoint.report.figures import series_charts, tensor_boxes
from shrinkpoint.report.files import TensorRow
from shrinkpoint.report.run import RunReport, seconds_text
from shrinkpoint.store.save_report import LossIncrease

_SHOWN_ROWS, _MAX_ROWS = 50, 2000
"""Rows of a table that are seen at once, and those that a click adds."""


def render_page(runs: Sequence[RunReport]) -> str:
    """Renders one run, or two side by side."""
    style, script = (files("shrinkpoint.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    tips = json.dumps([run.tips() for run in runs], separators=(",", ":"))
    return html.render(
        "page.html",
        title=" and ".join(run.name for run in runs),
        now=datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC"),
        runs=runs,
        charts=[*series_charts(runs)],
        maps=[(run, tensor_boxes([row for file in run.files for row in file.tensors])) for run in runs],
        details=[_details(run, f": {run.name}" if len(runs) > 1 else "") for run in runs],
        tips=tips.replace("<", "\\u003c"),  # JSON that no text in it can break out of
        style=style,
        script=script,
        shown_rows=_SHOWN_ROWS,
        max_rows=_MAX_ROWS,
    )


@dataclass(frozen=True)
class _Table:
    """A table whose first rows are seen, and others after a click. `numbers` names columns aligned to the right."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()


@dataclass(frozen=True)
class _Details:
    """Tables of one run below its figures."""

    tables: list[_Table]  # of checkpoints
    settings: list[tuple[str, str]]  # that the scheme chose for the checkpoint that is shown
    tensors: list[_Table]  # tables of what stayed exact, and of how each tensor is coded


def _details(run: RunReport, suffix: str) -> _Details:
    tables: list[_Table] = []
    rows: list[tuple[str, ...]]
    if run.checkpoints:
        rows = [_checkpoint_row(run, row) for row in reversed(run.checkpoints)]
        filled = [number for number, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
        heads = [_CHECKPOINT_HEADS[number] for number in filled]
        rows = [tuple(row[number] for number in filled) for row in rows]
        tables.append(_Table(f"Checkpoints{suffix}", heads, rows, _CHECKPOINT_NUMBERS))
    if run.store is not None and run.store.broken:
        tables.append(_Table(f"Unreadable{suffix}", ("where", "found"), run.store.broken))
    loss = run.shown.manifest.loss if run.shown is not None and isinstance(run.shown.manifest.loss, dict) else {}
    chosen = loss.get("chosen")
    settings = [(str(k).replace("_", " "), str(v)) for k, v in chosen.items()] if isinstance(chosen, dict) else []
    tensors = sorted((row for file in run.files for row in file.tensors), key=lambda row: -row.stored_bytes)
    rows = [_tensor_row(row) for row in tensors]
    named = _Table(f"Tensors of {run.shown_name}{suffix}", _TENSOR_HEADS, rows, _TENSOR_HEADS[5:])
    return _Details(tables, settings, [*_exact_tables(loss.get("stayed_exact")), named])


_TENSOR_HEADS = ("tensor", "role", "shape", "dtype", "coding", "state", "stored", "bits a value", "ratio")
_CHECKPOINT_HEADS = (
    *("step", "made", "kind", "scheme", "state", "stored", "ratio", "loss rise"),
    *("progress held", "wait", "time", "next prune", "note"),
)
_CHECKPOINT_NUMBERS = ("step", "state", "stored", "ratio", "loss rise", "progress held", "wait", "time")


def _checkpoint_row(run: RunReport, row: CheckpointReport) -> tuple[str, ...]:
    stats = row.manifest.stats
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
        f"{100 * stats['retention']:.3g}%" if "retention" in stats else "",
        *(seconds_text(stats[name]) if name in stats else "" for name in ("stall", "seconds")),
        fate if run.doomed else "",
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
