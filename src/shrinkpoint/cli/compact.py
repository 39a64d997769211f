"""`shrinkpoint compact`: write deltas again so that they stand on less."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.cli import words
from shrinkpoint.cli.console import emit, say, waiting
from shrinkpoint.cli.table import Column, show
from shrinkpoint.cli.target import JsonOption, StoreArgument, Target, checkpoint, open_store
from shrinkpoint.report import CheckpointSummary, checkpoint_summary
from shrinkpoint.store import chain
from shrinkpoint.store.listing import Listing


def command(
    store: StoreArgument,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, metavar="N", help="Make this checkpoint a keyframe; without it, merge deltas."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which would be written again.")] = False,
    json: JsonOption = False,
) -> None:
    """Merge deltas so that none stands on a forgotten or deleted checkpoint, or make one checkpoint a keyframe.

    Every checkpoint decodes to the same bits before, during and after; each is replaced atomically.
    """
    _, before = open_store(store)
    steps = _affected(before, store, step)
    if steps and not dry_run:
        from shrinkpoint.store.store import Store

        with waiting(f"writing {words.count(len(steps), 'checkpoint')} of {store} again"), Store(store) as opened:
            opened.compact(step)
    _, after = open_store(store)
    rows = [(_summary(before, one), _summary(after, one)) for one in steps if one in after.manifests]
    if json:
        changes = [{"step": a.step, "before": _state(a), "after": None if dry_run else _state(b)} for a, b in rows]
        emit({"applied": not dry_run, "rewritten": changes})
    else:
        _print(store, rows, dry_run)


def _affected(listing: Listing, store: str, step: int | None) -> list[int]:
    """The steps that `Store.compact` writes again."""
    if step is not None:
        return [step] if checkpoint(listing, Target(Path(store), step)).bases else []
    shown = listing.shown
    return [one.step for one in shown.values() if not all(chain.is_live(shown, base) for base in one.bases)]


def _summary(listing: Listing, step: int) -> CheckpointSummary:
    return checkpoint_summary(listing.manifests[step])


def _state(row: CheckpointSummary) -> dict[str, object]:
    return {"depth": row.depth, "chain": row.chain, "stored_bytes": row.stored_bytes}


def _print(store: str, rows: list[tuple[CheckpointSummary, CheckpointSummary]], dry_run: bool) -> None:
    if not rows:
        say(f"{store}: nothing to do, no delta stands on anything forgotten or gone")
        return
    columns = [
        Column("step", [str(a.step) for a, _ in rows], right=True),
        Column("chain", [_chain(a) for a, _ in rows], wrap=True),
        Column("stored", [words.size(a.stored_bytes) for a, _ in rows], right=True, rank=1),
    ]
    if not dry_run:
        columns += [
            Column("chain now", [_chain(b) for _, b in rows], wrap=True),
            Column("stored now", [words.size(b.stored_bytes) for _, b in rows], right=True),
        ]
    show(columns)
    say("")
    done = "would write" if dry_run else "wrote"
    say(f"{store}: {done} {words.count(len(rows), 'checkpoint')} again{'; leave out --dry-run to do it' * dry_run}")


def _chain(row: CheckpointSummary) -> str:
    if row.keyframe:
        return "keyframe"
    steps = [str(step) for step in row.chain]
    return " > ".join(steps if len(steps) < 6 else [steps[0], f"({len(steps) - 3} more)", *steps[-2:]])
