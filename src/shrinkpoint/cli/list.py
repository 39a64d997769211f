"""`shrinkpoint list`: what a store holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli import humanize
from shrinkpoint.cli.console import print_json, print_line, print_note
from shrinkpoint.cli.location import JsonOption, Location, RunArgument, open_store
from shrinkpoint.cli.report.store import (
    CheckpointReport,
    DirectoryReport,
    RunReport,
    StoreReport,
    run_report,
    store_report,
)
from shrinkpoint.cli.table import Column, print_table
from shrinkpoint.store.directory import find_checkpoints
from shrinkpoint.store.loss_increase import LossIncrease


def command(
    store: RunArgument,
    every: Annotated[bool, typer.Option("--all", help="Also the forgotten ones.")] = False,
    json: JsonOption = False,
) -> None:
    """List the checkpoints of a store, or of a framework's run: when, how large, what they stand on, their metrics."""
    storage, listing = open_store(store, allow_run=True)
    if Location(Path(store)).is_run:
        run = run_report(Path(store))
        print_json(run.to_json()) if json else _print_run(run)
        return
    summary = store_report(
        storage.describe(),
        (listing.manifests if every else listing.visible).values(),
        forgotten=listing.forgotten,
        broken=((error.where, f"{error.found}") for error in listing.broken.values()),
    )
    if beside := find_checkpoints(store):
        print_note(
            f"{store}: {humanize.count(len(beside), 'checkpoint')} of a framework, such as {beside[-1]}, are not listed"
        )
    if json:
        print_json(summary.to_json())
    else:
        _print(store, summary, hidden=0 if every else len(listing.forgotten & set(listing.manifests)))


def _print(store: str, summary: StoreReport, hidden: int) -> None:
    rows = summary.checkpoints
    if not rows:
        print_line(f"{store}: no checkpoint yet")
    else:
        totals = f"{humanize.size(summary.raw_bytes)} of state in {humanize.size(summary.stored_bytes)}"
        print_line(f"{store}: {humanize.count(len(rows), 'checkpoint')}, {totals} ({_ratio(summary)})")
        print_line("")
        print_table(_columns(rows), styles=["dim" if row.forgotten else "" for row in rows])
    if hidden:
        print_note(f"{humanize.count(hidden, 'checkpoint')} forgotten, shown by --all, deleted by `prune`")
    for where, found in summary.broken:
        print_note(f"{where}: {found} (see `shrinkpoint verify {store}`)", "unreadable", "bold red")


def _print_run(run: RunReport) -> None:
    rows = run.checkpoints
    totals = f"{humanize.size(run.raw_bytes)} of state in {humanize.size(run.stored_bytes)}"
    ratio = humanize.ratio(run.raw_bytes, run.stored_bytes)
    print_line(f"{run.where}: {humanize.count(len(rows), 'checkpoint')}, {totals} ({ratio})")
    print_line("")
    print_table(
        [
            Column("folder", [row.folder for row in rows], wrap=True),
            Column("step", ["" if row.step is None else str(row.step) for row in rows], align_right=True, drop_order=1),
            Column("age", [humanize.age(row.created) for row in rows], align_right=True, drop_order=3),
            Column("kind", ["keyframe" if not row.depth else f"delta {row.depth}" for row in rows], drop_order=2),
            Column("ranks", [str(row.ranks) for row in rows], align_right=True, drop_order=6),
            Column("scheme", [row.scheme for row in rows], drop_order=7),
            Column("state", [humanize.size(row.raw_bytes) for row in rows], align_right=True, drop_order=4),
            Column("stored", [humanize.size(row.stored_bytes) for row in rows], align_right=True),
            Column("ratio", [humanize.ratio(row.raw_bytes, row.stored_bytes) for row in rows], align_right=True),
            *rise_columns(rows, drop_order=5),
            *metric_columns(rows, drop_order=5),
            Column("note", [row.note for row in rows], drop_order=8, wrap=True),
        ]
    )
    for where, found in run.broken:
        print_note(f"{where}: {found} (see `shrinkpoint verify {run.where}`)", "unreadable", "bold red")


def _columns(rows: Sequence[CheckpointReport]) -> list[Column]:
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
    """`keyframe`, or what a delta stands on and how far above the keyframe it is."""
    text = "keyframe" if row.keyframe else f"delta {row.depth} on {row.chain[-2]}"
    return f"{text}, forgotten" if row.forgotten else text


def rise_columns(rows: Sequence[CheckpointReport | DirectoryReport], drop_order: int) -> list[Column]:
    """What checkpoints cost the loss; no column where none of them lost anything."""
    told = [str(LossIncrease.from_loss(row.loss)) for row in rows]
    return [Column("loss rise", told, align_right=True, drop_order=drop_order)] if any(told) else []


def metric_columns(rows: Sequence[CheckpointReport | DirectoryReport], drop_order: int = 4) -> list[Column]:
    """One column a metric, the ones that most checkpoints have first."""
    names = Counter(name for row in rows for name in row.metrics)
    return [
        Column(
            name,
            [humanize.number(row.metrics[name]) if name in row.metrics else "" for row in rows],
            True,
            drop_order + at,
        )
        for at, (name, _) in enumerate(names.most_common())
    ]


def _ratio(summary: StoreReport) -> str:
    return humanize.ratio(summary.raw_bytes, summary.stored_bytes)
