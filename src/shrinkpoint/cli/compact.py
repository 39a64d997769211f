"""`shrinkpoint compact`: rewrite deltas against fewer bases."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import JsonOption, StoreArgument, complete_step, find_manifest, open_store, parse_store
from shrinkpoint.cli.console import Column, print_json, print_line, print_table, show_progress
from shrinkpoint.report.checkpoints import CheckpointReport
from shrinkpoint.store import chain
from shrinkpoint.store.listing import Listing

_STEP_HELP = "Make this checkpoint a keyframe; without it, merge deltas."
OneStepOption = Annotated[
    int | None, typer.Option("--step", min=0, metavar="N", help=_STEP_HELP, autocompletion=complete_step)
]


def command(
    store: StoreArgument,
    step: OneStepOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which would be written again.")] = False,
    json: JsonOption = False,
) -> None:
    """Merge deltas so that none depends on a forgotten or deleted checkpoint, or make one checkpoint a keyframe.

    Every checkpoint decodes to the same bits before, during and after; each is replaced atomically.
    """
    _, before = open_store(store)
    steps = _steps_to_rewrite(before, store, step)
    if steps and not dry_run:
        from shrinkpoint.store.store import Store

        with (
            show_progress(f"writing {humanize.count(len(steps), 'checkpoint')} of {store} again"),
            Store(store) as opened,
        ):
            opened.compact(step)
    _, after = open_store(store)
    rows = [
        (CheckpointReport(before.manifests[rewritten]), CheckpointReport(after.manifests[rewritten]))
        for rewritten in steps
        if rewritten in after.manifests
    ]
    if json:
        changes = [
            {"step": a.manifest.step, "before": _chain_json(a), "after": None if dry_run else _chain_json(b)}
            for a, b in rows
        ]
        print_json({"applied": not dry_run, "rewritten": changes})
    else:
        _print(store, rows, dry_run)


def _steps_to_rewrite(listing: Listing, store: str, step: int | None) -> list[int]:
    if step is not None:
        return [step] if find_manifest(listing, replace(parse_store(store), step=step)).bases else []
    return chain.orphaned_deltas(listing.visible)


def _chain_json(row: CheckpointReport) -> dict[str, object]:
    return {"depth": row.manifest.depth, "chain": row.chain, "stored_bytes": row.manifest.stored_bytes}


def _print(store: str, rows: list[tuple[CheckpointReport, CheckpointReport]], dry_run: bool) -> None:
    if not rows:
        print_line(f"{store}: nothing to do, no delta depends on anything forgotten or gone")
        return
    columns = [
        Column("step", [str(a.manifest.step) for a, _ in rows], align_right=True),
        Column("chain", [_format_chain(a) for a, _ in rows], wrap=True),
        Column("stored", [humanize.size(a.manifest.stored_bytes) for a, _ in rows], align_right=True, drop_order=1),
    ]
    if not dry_run:
        columns += [
            Column("chain now", [_format_chain(b) for _, b in rows], wrap=True),
            Column("stored now", [humanize.size(b.manifest.stored_bytes) for _, b in rows], align_right=True),
        ]
    print_table(columns)
    print_line("")
    verb, advice = ("would write", "; leave out --dry-run to do it") if dry_run else ("wrote", "")
    print_line(f"{store}: {verb} {humanize.count(len(rows), 'checkpoint')} again{advice}")


def _format_chain(row: CheckpointReport) -> str:
    if not row.manifest.depth:
        return "keyframe"
    steps = [str(step) for step in row.chain]
    return " > ".join(steps if len(steps) < 6 else [steps[0], f"({len(steps) - 3} more)", *steps[-2:]])
