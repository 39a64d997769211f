"""`shrinkpoint list`: the checkpoints of a store or of a framework's run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli import humanize
from shrinkpoint.cli.arguments import JsonOption, Location, RunArgument, open_store
from shrinkpoint.cli.console import Column, print_json, print_line, print_note, print_table
from shrinkpoint.cli.report import CheckpointReport, StoreReport, run_report, store_report
from shrinkpoint.store.directory import find_checkpoints
from shrinkpoint.store.manifest import LossIncrease


def command(
    store: RunArgument,
    every: Annotated[bool, typer.Option("--all", help="Also the forgotten ones.")] = False,
    json: JsonOption = False,
) -> None:
    """List the checkpoints of a store, or of a framework's run: age, size, base, metrics."""
    storage, listing = open_store(store, allow_run=True)
    if Location(Path(store)).is_run:
        report = run_report(Path(store))
        print_json(report.to_json()) if json else _print_run(report)
        return
    report = store_report(
        storage.describe(),
        (listing.manifests if every else listing.visible).values(),
        forgotten=listing.forgotten,
        broken=((error.where, f"{error.found}") for error in listing.broken.values()),
    )
    if directories := find_checkpoints(store):
        count = humanize.count(len(directories), "checkpoint")
        print_note(f"{store}: {count} of a framework, such as {directories[-1]}, are not listed")
    if json:
        print_json(report.to_json())
    else:
        _print_store(store, report, hidden=0 if every else len(listing.forgotten & set(listing.manifests)))


def _print_store(store: str, report: StoreReport, hidden: int) -> None:
    if not report.checkpoints:
        print_line(f"{store}: no checkpoint yet")
    else:
        print_line(f"{store}: {_totals(report)}")
        print_line("")
        styles = ["dim" if row.forgotten else "" for row in report.checkpoints]
        print_table(_store_columns(report.checkpoints), styles=styles)
    if hidden:
        print_note(f"{humanize.count(hidden, 'checkpoint')} forgotten, shown by --all, deleted by `prune`")
    _print_broken(store, report)


def _print_run(report: StoreReport) -> None:
    print_line(f"{report.where}: {_totals(report)}")
    print_line("")
    print_table(_run_columns(report.checkpoints))
    _print_broken(report.where, report)


def _print_broken(place: str, report: StoreReport) -> None:
    for where, reason in report.broken:
        print_note(f"{where}: {reason} (see `shrinkpoint verify {place}`)", "unreadable", "bold red")


def _totals(report: StoreReport) -> str:
    count = humanize.count(len(report.checkpoints), "checkpoint")
    sizes = f"{humanize.size(report.raw_bytes)} of state in {humanize.size(report.stored_bytes)}"
    return f"{count}, {sizes} ({humanize.ratio(report.raw_bytes, report.stored_bytes)})"


def _run_columns(rows: Sequence[CheckpointReport]) -> list[Column]:
    return [
        Column("folder", [row.folder or "" for row in rows], wrap=True),
        Column("step", ["" if row.step is None else str(row.step) for row in rows], align_right=True, drop_order=1),
        Column("age", [humanize.age(row.created) for row in rows], align_right=True, drop_order=3),
        Column("kind", ["keyframe" if row.keyframe else f"delta {row.depth}" for row in rows], drop_order=2),
        Column("ranks", [str(row.ranks) for row in rows], align_right=True, drop_order=6),
        Column("scheme", [row.scheme for row in rows], drop_order=7),
        Column("state", [humanize.size(row.raw_bytes) for row in rows], align_right=True, drop_order=4),
        Column("stored", [humanize.size(row.stored_bytes) for row in rows], align_right=True),
        Column("ratio", [humanize.ratio(row.raw_bytes, row.stored_bytes) for row in rows], align_right=True),
        *rise_columns(rows, drop_order=5),
        *metric_columns(rows, drop_order=5),
        Column("note", [row.note for row in rows], drop_order=8, wrap=True),
    ]


def _store_columns(rows: Sequence[CheckpointReport]) -> list[Column]:
    return [
        Column("step", [str(row.step) for row in rows], align_right=True),
        Column("age", [humanize.age(row.created) for row in rows], align_right=True, drop_order=2),
        Column("kind", [chain_label(row) for row in rows], drop_order=1),
        Column("scheme", [row.scheme for row in rows], drop_order=6),
        Column("state", [humanize.size(row.raw_bytes) for row in rows], align_right=True, drop_order=3),
        Column("stored", [humanize.size(row.stored_bytes) for row in rows], align_right=True),
        Column("ratio", [humanize.ratio(row.raw_bytes, row.stored_bytes) for row in rows], align_right=True),
        *rise_columns(rows, drop_order=4),
        *metric_columns(rows),
        Column("lossy restores", [str(row.lossy_restores or "") for row in rows], align_right=True, drop_order=5),
        Column("note", [row.note for row in rows], drop_order=7, wrap=True),
    ]


def chain_label(row: CheckpointReport) -> str:
    """`keyframe`, or the base of a delta and how many deltas it is above the keyframe."""
    text = "keyframe" if row.keyframe else f"delta {row.depth} on {row.chain[-2]}"
    return f"{text}, forgotten" if row.forgotten else text


def rise_columns(rows: Sequence[CheckpointReport], drop_order: int) -> list[Column]:
    """The column of the loss increases; no column if no checkpoint lost anything."""
    increases = [str(LossIncrease.from_loss(row.loss)) for row in rows]
    return [Column("loss rise", increases, align_right=True, drop_order=drop_order)] if any(increases) else []


def metric_columns(rows: Sequence[CheckpointReport], drop_order: int = 4) -> list[Column]:
    """One column for each metric, the most frequent first."""
    frequencies = Counter(name for row in rows for name in row.metrics)
    return [
        Column(
            name,
            [humanize.number(row.metrics[name]) if name in row.metrics else "" for row in rows],
            align_right=True,
            drop_order=drop_order + index,
        )
        for index, (name, _) in enumerate(frequencies.most_common())
    ]
