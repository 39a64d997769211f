"""Retention of a framework's run: which of its checkpoints, each in a directory of its own, stay. No torch.

The rules are those of a store. But no checkpoint here is the base of another: on this machine a delta has hard links to
its bases. What the rules want to be smaller is written again by `directory_rewrite`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeAlias

from shrinkpoint.errors import CorruptError, NotFoundError, TruncatedError
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.store.directory import last_number, read_directory_manifest, sort_by_history
from shrinkpoint.store.history import Place, place_of
from shrinkpoint.store.manifest import DirectoryManifest, Manifest
from shrinkpoint.store.retention import Keep, check_metric, match_rules, parents_to_reverse

Directory: TypeAlias = Path | ObjectUrl


@dataclass(frozen=True)
class RunPlan:
    """The plan of retention for the checkpoints of a run."""

    delete: tuple[Directory, ...]  # oldest first
    keep: dict[Directory, DirectoryManifest]  # the manifests of the others that have one, oldest first
    strip: tuple[Directory, ...]  # of `keep`, those that lose what the optimizers keep for each parameter, oldest first
    reasons: dict[Directory, tuple[str, ...]]  # by directory, sentences that say why it is kept or deleted


def plan_run(
    directories: Iterable[Directory], keep: Keep, now: datetime, *, protected: Collection[Directory] = ()
) -> RunPlan:
    """Decide which checkpoints of a run to delete; nothing is deleted.

    A checkpoint without a manifest that can be read, such as one of the framework itself, counts as well. It has no
    metrics, and its time is that of its directory.

    Args:
        directories: complete checkpoints.
        now: with a time zone; `Keep.within` counts back from here.
        protected: never deleted, whatever the rules say.

    Raises:
        PolicyError: the best are to be kept by a metric that no checkpoint has.
        VersionError: a newer release wrote one.
        StorageError: one cannot be read now.
    """
    found = ((directory, _manifest_of(directory)) for directory in directories)
    unsorted = {directory: manifest for directory, manifest in found if manifest is not None}
    places = {
        directory: place_of(manifest) if manifest.payloads else Place(last_number(directory.name))
        for directory, manifest in unsorted.items()
    }
    manifests = {directory: unsorted[directory] for directory in sort_by_history(places)}
    check_metric(manifests.values(), keep)
    with_steps = {directory: _with_step(manifest, directory.name) for directory, manifest in manifests.items()}
    by_id = {id(manifest): directory for directory, manifest in with_steps.items()}
    reasons: dict[Directory, list[str]] = {directory: [] for directory in manifests}
    for manifest, reason in match_rules([*with_steps.values()], keep, now):
        reasons[by_id[id(manifest)]].append(reason)
    for directory in protected:
        reasons.get(directory, []).append("the framework needs it")
    bases = _keep_bases(manifests, reasons)
    kept = [directory for directory, why in reasons.items() if why]
    resumable = kept if keep.moments_last is None else kept[-keep.moments_last :]
    return RunPlan(
        tuple(directory for directory, why in reasons.items() if not why),
        {directory: manifests[directory] for directory in kept if manifests[directory].payloads},
        tuple(
            directory
            for directory in kept
            if directory not in {*resumable, *bases}
            and manifests[directory].payloads
            and not manifests[directory].weights_only
        ),
        {directory: tuple(why) or ("no rule keeps it",) for directory, why in reasons.items()},
    )


def _manifest_of(directory: Directory) -> DirectoryManifest | None:
    """The manifest; one without payloads if there is none of ours that can be read, None if the directory is gone."""
    try:
        return read_directory_manifest(directory)
    except (NotFoundError, CorruptError, TruncatedError):
        pass  # it goes when its time has come
    try:
        seconds = directory.stat().st_mtime if isinstance(directory, Path) else 0.0
    except FileNotFoundError:
        return None
    created = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
    unknown: DirectoryManifest = Manifest(id="", created=created, scheme="", payloads=(), step=None)
    return unknown


def _with_step(manifest: DirectoryManifest, name: str) -> DirectoryManifest:
    """A copy of a manifest with its step, or else the last number in the name of its directory."""
    return replace(manifest, step=last_number(name)) if manifest.step is None else manifest


def _keep_bases(manifests: dict[Directory, DirectoryManifest], reasons: dict[Directory, list[str]]) -> set[Directory]:
    """Keep what deltas in a bucket need, where there are no links, and return it."""
    bases: set[Directory] = set()
    for directory, manifest in manifests.items():
        needed = {digest for payload in manifest.payloads for digest, _ in payload.bases}
        if not needed or not reasons[directory] or isinstance(directory, Path):
            continue
        for other, base in manifests.items():
            if other != directory and needed & {payload.digest for payload in base.payloads}:
                reasons[other].append(f"base of {directory.name}")
                bases.add(other)
    return bases


def group_by_chain(manifests: Mapping[Directory, DirectoryManifest]) -> list[list[Directory]]:
    """The checkpoints of each chain, in the order in which they are given."""
    chains: dict[str, list[Directory]] = {}
    for directory, manifest in manifests.items():
        first = manifest.payloads[0]
        chains.setdefault(first.bases[0][0] if first.bases else first.digest, []).append(directory)
    return [*chains.values()]


def chains_to_strip(plan: RunPlan) -> list[list[Directory]]:
    """Checkpoints that lose their moments, by chain, oldest first; only chains that hold no others.

    A chain of which a checkpoint keeps its moments may still grow, and its files stay on the disk in any case.
    """
    return [chain for chain in group_by_chain(plan.keep) if {*chain} <= {*plan.strip}]


def directories_to_reverse(plan: RunPlan, keep: Keep, rank: int = 0) -> dict[Path, Path | None]:
    """Directories on this machine whose payloads of a rank are reversed, as `parents_to_reverse` says it."""
    parts = {place: manifest.of_rank(rank) for place, manifest in plan.keep.items() if isinstance(place, Path)}
    kept = {place: _with_step(part, place.name) for place, part in parts.items() if part is not None}
    parents = parents_to_reverse(kept, keep, lambda manifest: not manifest.depth)
    newest = next(reversed(kept), None)
    if newest not in (None, [*plan.keep][-1]) and kept[newest].depth and not kept[newest].weights_only:
        return {newest: None, **parents}  # the rank saves no more: nothing newer can be its base
    return parents
