"""`shrinkpoint list`: the checkpoints of a store or of a framework's run."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import JsonOption, RunArgument, open_store, parse_store
from shrinkpoint.cli.console import Column, paged, print_json, print_line, print_note, print_table
from shrinkpoint.report.checkpoints import CheckpointReport, run_report, store_report
from shrinkpoint.store.chain import payload_bytes
from shrinkpoint.store.save_report import LossIncrease


def command(
    store: RunArgument,
    every: Annotated[bool, typer.Option("--all", help="Also list forgotten checkpoints.")] = False,
    json: JsonOption = False,
) -> None:
    """List the checkpoints of a store, or of a framework's run: age, size, base, metrics."""
    storage, listing = open_store(store, allow_run=True)
    hidden = 0
    location = parse_store(store)
    if location.is_run:
        report = run_report(location.path)
    else:
        hidden = 0 if every else len(listing.forgotten & set(listing.manifests))
        report = store_report(
            storage.describe(),
            (listing.manifests if every else listing.visible).values(),
            forgotten=listing.forgotten,
            broken=[(error.where, error.found) for error in listing.broken.values()],
            stored_bytes=payload_bytes(storage, listing),
        )
        if directories := location.directories:
            count = humanize.count(len(directories), "checkpoint")
            print_note(f"{store}: {count} of a framework, such as {directories[-1]}, are not listed")
    if json:
        print_json(report.to_json())
        return
    place = report.where if report.is_run else store
    if report.checkpoints or report.is_run:
        styles = ["dim" if row.forgotten else "" for row in report.checkpoints]
        count = humanize.count(len(report.checkpoints), "checkpoint")
        sizes = f"{humanize.size(report.raw_bytes)} of state in {humanize.size(report.stored_bytes)}"
        ratio = humanize.ratio(report.raw_bytes, report.stored_bytes)
        with paged():
            print_line(f"{place}: {count}, {sizes} ({ratio})")
            print_line("")
            print_table(_columns(report.checkpoints, report.is_run), styles=styles)
    else:
        print_line(f"{store}: no checkpoint yet")
    if hidden:
        print_note(f"{humanize.count(hidden, 'checkpoint')} forgotten, shown by --all, deleted by `prune`")
    for where, reason in report.broken:
        print_note(f"{where}: {reason} (see `shrinkpoint verify {shlex.quote(str(place))}`)", "unreadable", "bold red")


def _columns(rows: Sequence[CheckpointReport], is_run: bool) -> list[Column]:
    """The columns; scheme, sizes and loss stay longest where the terminal is narrow."""
    manifests = [row.manifest for row in rows]
    steps = ["" if manifest.step is None else str(manifest.step) for manifest in manifests]
    raw, stored = [manifest.raw_bytes for manifest in manifests], [manifest.stored_bytes for manifest in manifests]
    increases = [str(LossIncrease.from_loss(manifest.loss)) for manifest in manifests]
    ranks = [str(len(manifest.payloads)) for manifest in manifests] if is_run else []
    folders = [Column("folder", [row.folder or "" for row in rows], wrap=True)] if is_run else []
    return [
        *folders,
        Column("step", steps, align_right=True, drop_order=4 if is_run else 0),
        Column("age", [humanize.age(manifest.created) for manifest in manifests], align_right=True, drop_order=6),
        Column("kind", [_chain_label(row) for row in rows], drop_order=3, wrap=True),
        *([Column("ranks", ranks, align_right=True, drop_order=7)] if {*ranks} - {"1"} else []),
        Column("scheme", [manifest.scheme for manifest in manifests], drop_order=2),
        Column("state", [*map(humanize.size, raw)], align_right=True, drop_order=5),
        Column("stored", [*map(humanize.size, stored)], align_right=True),
        Column("ratio", [*map(humanize.ratio, raw, stored)], align_right=True),
        Column("loss rise", increases, align_right=True, drop_order=1, wrap=True),
        *_metric_columns(rows, drop_order=8),
        Column("lossy restores", [str(m.lossy_restores or "") for m in manifests], align_right=True, drop_order=99),
        Column("note", [manifest.note for manifest in manifests], drop_order=100, wrap=True),
    ]


def _chain_label(row: CheckpointReport) -> str:
    kind = f"delta {row.manifest.depth}" if row.manifest.depth else "keyframe"
    if row.manifest.depth and row.folder is None:
        kind += f" on {row.chain[-2]}"
    marks = {"weights only": row.manifest.weights_only, "left behind": row.abandoned, "forgotten": row.forgotten}
    return ", ".join([kind, *(mark for mark, is_set in marks.items() if is_set)])


def _metric_columns(rows: Sequence[CheckpointReport], drop_order: int) -> Iterator[Column]:
    """Each metric, the most frequent first."""
    frequencies = Counter(name for row in rows for name in row.manifest.metrics)
    for index, (name, _) in enumerate(frequencies.most_common()):
        cells = [humanize.number(row.manifest.metrics[name]) if name in row.manifest.metrics else "" for row in rows]
        yield Column(name, cells, align_right=True, drop_order=drop_order + index)
