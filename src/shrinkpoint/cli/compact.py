"""`shrinkpoint compact`: rewrite deltas against fewer bases."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import (
    JsonOption,
    Location,
    RunArgument,
    complete_step,
    find_manifest,
    open_store,
    parse_store,
)
from shrinkpoint.cli.console import Column, print_json, print_line, print_table, show_progress
from shrinkpoint.errors import NotFoundError, PolicyError, ShrinkpointError
from shrinkpoint.report.checkpoints import CheckpointReport
from shrinkpoint.store import chain
from shrinkpoint.store.chain import file_sizes
from shrinkpoint.store.directory import find_run, read_directory_manifest
from shrinkpoint.store.directory_retention import Directory, group_by_chain
from shrinkpoint.store.manifest import DirectoryManifest

_STEP_HELP = "Make this checkpoint a keyframe."
OneStepOption = Annotated[
    int | None, typer.Option("--step", min=0, metavar="N", help=_STEP_HELP, autocompletion=complete_step)
]


def command(
    store: RunArgument,
    step: OneStepOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print which checkpoints would be rewritten.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Rewrite deltas so that none depends on a forgotten or deleted checkpoint, or make one checkpoint a keyframe.

    Each checkpoint is replaced atomically and decodes to the same bits. In a framework's run, chains that hold files of
    deleted checkpoints are rewritten if that frees bytes.
    """
    location = parse_store(store)
    if location.is_run:
        _compact_run(location, step, dry_run=dry_run, json=json)
        return
    _, before = open_store(store)
    if step is None:
        steps = chain.orphaned_deltas(before.visible)
    else:
        steps = [step] if find_manifest(before, replace(location, step=step)).bases else []
    if steps and not dry_run:
        from shrinkpoint.store.store import Store

        title = f"writing {humanize.count(len(steps), 'checkpoint')} of {store} again"
        with show_progress(title), Store(store) as opened:
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


def _compact_run(location: Location, step: int | None, *, dry_run: bool, json: bool) -> None:
    """Write the chains of a framework's run again, where that frees bytes."""
    if step is not None:
        found, do = f"--step {step} of a framework's run", "name the directory of that checkpoint"
        raise PolicyError(str(location), found=found, expected="a store", do=do)
    directories = find_run(location.path)[::-1]
    before = _manifests(directories)
    # Each needs the files of its chain, of which some may be nobody else's any more.
    own = {payload.digest for manifest in before.values() for payload in manifest.payloads}
    chains = [
        chain
        for chain in group_by_chain(before)
        if any({digest for digest, _ in p.bases} - own for path in chain for p in before[path].payloads)
    ]
    rewritten: list[Directory] = []
    if not dry_run:
        from shrinkpoint.store.directory_rewrite import RunRewriter  # which imports torch

        with show_progress(f"writing checkpoints of {location} again"):
            rewriter = RunRewriter(before)
            for chain in chains:
                try:
                    rewritten += chain if rewriter.rewrite(chain) else []
                except ShrinkpointError:
                    if _manifests(chain) == {path: before[path] for path in chain}:
                        raise  # else the training has deleted one of them meanwhile, or has written it again
    after = _manifests(directories)
    sizes = [sum(file_sizes(manifests.values()).values()) for manifests in (before, after)]
    names = [path.name for path in (rewritten if not dry_run else [path for chain in chains for path in chain])]
    if json:
        print_json({"applied": not dry_run, "rewritten": names, "bytes": sizes[0] - sizes[1]})
    elif not names:
        print_line(f"{location}: nothing to do: no delta needs a deleted file, or a rewrite frees nothing")
    elif dry_run:
        print_line(f"{location}: would write again, if that frees bytes: {', '.join(names)}")
    else:
        print_line(f"{location}: wrote {', '.join(names)} again, {humanize.size(sizes[0] - sizes[1])} less")


def _manifests(directories: Iterable[Directory]) -> dict[Directory, DirectoryManifest]:
    """The manifests of those of some checkpoints that a training has not deleted meanwhile."""
    manifests: dict[Directory, DirectoryManifest] = {}
    for directory in directories:
        with suppress(NotFoundError):
            manifests[directory] = read_directory_manifest(directory)
    return manifests


def _chain_json(row: CheckpointReport) -> dict[str, object]:
    return {"depth": row.manifest.depth, "chain": row.chain, "stored_bytes": row.manifest.stored_bytes}


def _print(store: str, rows: list[tuple[CheckpointReport, CheckpointReport]], dry_run: bool) -> None:
    if not rows:
        print_line(f"{store}: nothing to do: no delta depends on a forgotten or deleted checkpoint")
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
