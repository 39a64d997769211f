"""`shrinkpoint prune`: delete checkpoints that no rule keeps, and the moments of older ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from enum import Enum
from typing import Annotated

import typer

from shrinkpoint import humanize
from shrinkpoint.cli.arguments import JsonOption, Location, RunArgument, open_store, parse_store, preview
from shrinkpoint.cli.console import Column, print_json, print_line, print_note, print_table, show_progress
from shrinkpoint.errors import ChainError, FormatError, NotFoundError
from shrinkpoint.store.chain import file_sizes
from shrinkpoint.store.directory import delete_checkpoint, find_run, read_directory_manifest
from shrinkpoint.store.directory_retention import Directory, RunPlan, chains_to_strip, group_by_chain, plan_run
from shrinkpoint.store.listing import Listing, scan
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.store.prune import prune
from shrinkpoint.store.retention import Keep, PrunePlan

_BASE_REASON = re.compile(r"base of step ([0-9]+)")


class MetricMode(str, Enum):
    """Direction of a metric: the smallest or the largest value is best."""

    MIN = "min"
    MAX = "max"


LastOption = Annotated[int | None, typer.Option("--keep-last", min=1, metavar="N", help="Keep the newest N.")]
EveryOption = Annotated[
    int | None, typer.Option("--keep-every", min=1, metavar="N", help="Keep steps that are multiples of N.")
]
BestOption = Annotated[int | None, typer.Option("--keep-best", min=1, metavar="N", help="Keep the N best by --metric.")]
MetricOption = Annotated[str, typer.Option("--metric", metavar="NAME", help="Metric of --keep-best.")]
ModeOption = Annotated[MetricMode, typer.Option("--mode", help="Whether the smallest or the largest metric is best.")]
WithinOption = Annotated[
    str | None, typer.Option("--keep-within", metavar="SPAN", help="Keep checkpoints younger than 90s, 12h, 7d, ...")
]


def command(
    store: RunArgument,
    last: LastOption = None,
    every: EveryOption = None,
    best: BestOption = None,
    metric: MetricOption = "val_loss",
    mode: ModeOption = MetricMode.MIN,
    within: WithinOption = None,
    moments_last: Annotated[
        int | None,
        typer.Option("--moments-last", min=1, metavar="N", help="Keep moments only in the newest N kept checkpoints."),
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="Rewrite kept deltas so that bases that no rule keeps can go.")
    ] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Delete; without it, only print the plan.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what would be deleted and why; delete it with --apply.

    A checkpoint is kept if any rule selects it. The newest one and every base of a kept one are always kept. Without a
    rule, only forgotten checkpoints are deleted.

    --moments-last and --compact rewrite chains if that frees bytes. Every kept checkpoint decodes to the same bits
    before, during and after. Without --apply, chains of a store are encoded too, to print the sizes.
    """
    keep = Keep(
        last=last, every=every, best=best, metric=metric, mode=mode.value, within=within, moments_last=moments_last
    )
    now = datetime.now(timezone.utc)
    location = parse_store(store)
    if location.is_run:
        _prune_run(location, keep, now, compact=compact, apply=apply, json=json)
        return
    storage, listing = open_store(store)
    with show_progress(f"pruning {store}"):
        if apply:
            with storage.lock():
                listing = scan(storage)
                plan = prune(storage, listing, keep, now, dry_run=False, compact=compact)
        else:
            plan = prune(storage, listing, keep, now, dry_run=True, compact=compact)
    if json:
        reasons = {str(step): list(why) for step, why in plan.reasons.items()}
        print_json({"applied": apply, **asdict(plan), "reasons": reasons})
    else:
        _print(store, listing, plan, apply)


def _prune_run(location: Location, keep: Keep, now: datetime, *, compact: bool, apply: bool, json: bool) -> None:
    """Delete, or only name, what no rule keeps of the run of a framework."""
    plan = plan_run(find_run(location.path)[::-1], keep, now)
    before = sum(file_sizes([*plan.keep.values(), *_manifests_of(plan.delete)]).values())
    rewritten: list[Directory] = []
    if apply:
        with show_progress(f"pruning {location}"):
            for path in plan.delete:
                delete_checkpoint(path)
            rewritten = [*_write_again(plan, keep, compact)]
    after = sum(file_sizes(_manifests_of(plan.keep) if apply else plan.keep.values()).values())
    if not json:
        _print_run(location, plan, rewritten, before - after, apply)
        return
    lists = {"delete": plan.delete, "keep": plan.keep, "rewrite": rewritten}
    summary = {key: [path.name for path in paths] for key, paths in lists.items()}
    reasons = {path.name: list(why) for path, why in plan.reasons.items()}
    print_json({"applied": apply, **summary, "bytes": before - after, "reasons": reasons})


def _write_again(plan: RunPlan, keep: Keep, compact: bool) -> Iterator[Directory]:
    """Write checkpoints without moments, or with fewer bases, where that frees bytes; yields them."""
    from shrinkpoint.convert.framework_layouts import framework_of
    from shrinkpoint.store.directory_rewrite import MomentFilter, RunRewriter  # which imports torch

    def moments_of(manifest: DirectoryManifest) -> MomentFilter:
        if framework_of(manifest) != "dcp":
            return MomentFilter()
        from shrinkpoint.train.dcp.checkpoint_metadata import MOMENTS

        return MOMENTS

    stripped = chains_to_strip(plan) if keep.moments_last else []
    others = {path: manifest for path, manifest in plan.keep.items() if not any(path in chain for chain in stripped)}
    rewriter = RunRewriter(plan.keep)
    for chain in [*stripped, *(group_by_chain(others) if compact else [])]:
        try:
            if rewriter.rewrite(chain, moments_of(plan.keep[chain[0]]) if chain in stripped else None):
                yield from chain
        except (ChainError, FormatError) as error:
            print_note(f"{chain[-1].name} and its chain stay as they are: {error}")


def _print_run(location: Location, plan: RunPlan, rewritten: list[Directory], freed: int, is_applied: bool) -> None:
    deletion = "deleted" if is_applied else "delete"
    paths = [*plan.delete, *(path for path in plan.reasons if path not in plan.delete)]
    fates = [deletion if path in plan.delete else "written again" if path in rewritten else "keep" for path in paths]
    print_table(
        [
            Column("folder", [path.name for path in paths], wrap=True),
            Column("", fates),
            Column("because", [join_reasons(plan.reasons[path]) for path in paths], wrap=True),
        ],
        styles=["red" if path in plan.delete else "" for path in paths],
    )
    print_line("")
    what = f"{humanize.count(len(plan.delete), 'checkpoint')} and {humanize.size(freed)}"
    if is_applied:
        again = f", wrote {len(rewritten)} again" if rewritten else ""
        print_line(f"{location}: deleted {what}, kept {len(plan.keep)}{again}")
    else:
        print_line(f"{location}: would delete {what}, keep {len(plan.keep)}. Nothing is deleted yet; add --apply")


def _manifests_of(directories: Iterable[Directory]) -> Iterator[DirectoryManifest]:
    """The manifests of checkpoints, but for those that have none that can be read."""
    for directory in directories:
        with suppress(NotFoundError, FormatError):
            yield read_directory_manifest(directory)


def _print(store: str, listing: Listing, plan: PrunePlan, is_applied: bool) -> None:
    steps = sorted(plan.reasons)
    manifests = [listing.manifests.get(step) for step in steps]
    if steps:
        ages = [humanize.age(manifest.created) if manifest else "?" for manifest in manifests]
        stored = [humanize.size(manifest.stored_bytes) if manifest else "?" for manifest in manifests]
        fates = dict.fromkeys(steps, "keep") | dict.fromkeys(plan.weights_only, "weights only")
        fates |= dict.fromkeys(plan.delete, "deleted" if is_applied else "delete")
        print_table(
            [
                Column("step", [str(step) for step in steps], align_right=True),
                Column("age", ages, align_right=True, drop_order=2),
                Column("stored", stored, align_right=True, drop_order=1),
                Column("", [fates[step] for step in steps]),
                Column("because", [join_reasons(plan.reasons[step]) for step in steps], wrap=True),
            ],
            styles=["red" if step in plan.delete else "" for step in steps],
        )
        print_line("")
    print_line(_verdict(store, plan, is_applied))
    if plan.bases:
        held = humanize.size(sum(listing.manifests[step].stored_bytes for step in plan.bases))
        count = humanize.count(len(plan.bases), "checkpoint")
        print_note(f"{count} ({held}) kept only as bases of deltas: {preview(plan.bases)} (see --compact)")


def join_reasons(reasons: Sequence[str]) -> str:
    """Joins reasons into one line; the steps that a checkpoint is a base of become one reason.

    >>> join_reasons(["one of the last 2", "base of step 30", "base of step 40"])
    'one of the last 2; base of 30, 40'
    """
    dependent_steps = [int(match[1]) for reason in reasons if (match := _BASE_REASON.fullmatch(reason))]
    joined = [reason for reason in reasons if not _BASE_REASON.fullmatch(reason)]
    if dependent_steps:
        joined.append(f"base of {preview(dependent_steps)}")
    return "; ".join(joined)


def _verdict(store: str, plan: PrunePlan, is_applied: bool) -> str:
    what = f"{humanize.count(len(plan.delete), 'checkpoint')} and {humanize.size(plan.bytes)}"
    if not plan.keys:
        return f"{store}: nothing to delete, {humanize.count(len(plan.keep), 'checkpoint')} kept"
    again = f", {{}} {len(plan.rewrite)} again ({humanize.size(plan.written)})" if plan.rewrite else ""
    if is_applied:
        return f"{store}: deleted {what}, kept {len(plan.keep)}{again.format('wrote')}"
    again = again.format("write")
    return f"{store}: would delete {what}, keep {len(plan.keep)}{again}. Nothing is deleted yet; add --apply"
