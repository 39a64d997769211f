"""`shrinkpoint list`: what a store holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli import words
from shrinkpoint.cli.console import emit, note, say
from shrinkpoint.cli.table import Column, show
from shrinkpoint.cli.target import JsonOption, RunArgument, Target, open_store
from shrinkpoint.report import CheckpointSummary, FolderSummary, RunSummary, StoreSummary, run_summary, store_summary
from shrinkpoint.store.folder import found_in
from shrinkpoint.store.rise import Rise


def command(
    store: RunArgument,
    every: Annotated[bool, typer.Option("--all", help="Also the forgotten ones.")] = False,
    json: JsonOption = False,
) -> None:
    """List the checkpoints of a store, or of a framework's run: when, how large, what they stand on, their metrics."""
    storage, listing = open_store(store, run=True)
    if Target(Path(store)).is_run:
        run = run_summary(Path(store))
        emit(run.to_json()) if json else _print_run(run)
        return
    summary = store_summary(
        storage.describe(),
        (listing.manifests if every else listing.shown).values(),
        forgotten=listing.forgotten,
        broken=((error.where, f"{error.found}") for error in listing.broken.values()),
    )
    if beside := found_in(store):
        note(f"{store}: {words.count(len(beside), 'checkpoint')} of a framework, such as {beside[-1]}, are not listed")
    if json:
        emit(summary.to_json())
    else:
        _print(store, summary, hidden=0 if every else len(listing.forgotten & set(listing.manifests)))


def _print(store: str, summary: StoreSummary, hidden: int) -> None:
    rows = summary.checkpoints
    if not rows:
        say(f"{store}: no checkpoint yet")
    else:
        totals = f"{words.size(summary.raw_bytes)} of state in {words.size(summary.stored_bytes)}"
        say(f"{store}: {words.count(len(rows), 'checkpoint')}, {totals} ({_ratio(summary)})")
        say("")
        show(_columns(rows), styles=["dim" if row.forgotten else "" for row in rows])
    if hidden:
        note(f"{words.count(hidden, 'checkpoint')} forgotten, shown by --all, deleted by `prune`")
    for where, found in summary.broken:
        note(f"{where}: {found} (see `shrinkpoint verify {store}`)", "unreadable", "bold red")


def _print_run(run: RunSummary) -> None:
    rows = run.checkpoints
    totals = f"{words.size(run.raw_bytes)} of state in {words.size(run.stored_bytes)}"
    ratio = words.ratio(run.raw_bytes, run.stored_bytes)
    say(f"{run.where}: {words.count(len(rows), 'checkpoint')}, {totals} ({ratio})")
    say("")
    show([
        Column("folder", [row.folder for row in rows], wrap=True),
        Column("step", ["" if row.step is None else str(row.step) for row in rows], right=True, rank=1),
        Column("age", [words.age(row.created) for row in rows], right=True, rank=3),
        Column("kind", ["keyframe" if not row.depth else f"delta {row.depth}" for row in rows], rank=2),
        Column("ranks", [str(row.ranks) for row in rows], right=True, rank=6),
        Column("scheme", [row.scheme for row in rows], rank=7),
        Column("state", [words.size(row.raw_bytes) for row in rows], right=True, rank=4),
        Column("stored", [words.size(row.stored_bytes) for row in rows], right=True),
        Column("ratio", [words.ratio(row.raw_bytes, row.stored_bytes) for row in rows], right=True),
        *rise_columns(rows, rank=5),
        *metric_columns(rows, rank=5),
        Column("note", [row.note for row in rows], rank=8, wrap=True),
    ])  # fmt: skip
    for where, found in run.broken:
        note(f"{where}: {found} (see `shrinkpoint verify {run.where}`)", "unreadable", "bold red")


def _columns(rows: Sequence[CheckpointSummary]) -> list[Column]:
    return [
        Column("step", [str(row.step) for row in rows], right=True),
        Column("age", [words.age(row.created) for row in rows], right=True, rank=2),
        Column("kind", [kind(row) for row in rows], rank=1),
        Column("scheme", [row.scheme for row in rows], rank=6),
        Column("state", [words.size(row.raw_bytes) for row in rows], right=True, rank=3),
        Column("stored", [words.size(row.stored_bytes) for row in rows], right=True),
        Column("ratio", [words.ratio(row.raw_bytes, row.stored_bytes) for row in rows], right=True),
        *rise_columns(rows, rank=4),
        *metric_columns(rows),
        Column("lossy restores", [str(row.lossy_restores or "") for row in rows], right=True, rank=5),
        Column("note", [row.note for row in rows], rank=7, wrap=True),
    ]


def kind(row: CheckpointSummary) -> str:
    """`keyframe`, or what a delta stands on and how far above the keyframe it is."""
    text = "keyframe" if row.keyframe else f"delta {row.depth} on {row.chain[-2]}"
    return f"{text}, forgotten" if row.forgotten else text


def rise_columns(rows: Sequence[CheckpointSummary | FolderSummary], rank: int) -> list[Column]:
    """What checkpoints cost the loss; no column where none of them lost anything."""
    told = [str(Rise.of(row.loss)) for row in rows]
    return [Column("loss rise", told, right=True, rank=rank)] if any(told) else []


def metric_columns(rows: Sequence[CheckpointSummary | FolderSummary], rank: int = 4) -> list[Column]:
    """One column a metric, the ones that most checkpoints have first."""
    names = Counter(name for row in rows for name in row.metrics)
    return [
        Column(name, [words.number(row.metrics[name]) if name in row.metrics else "" for row in rows], True, rank + at)
        for at, (name, _) in enumerate(names.most_common())
    ]


def _ratio(summary: StoreSummary) -> str:
    return words.ratio(summary.raw_bytes, summary.stored_bytes)
