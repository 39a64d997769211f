"""Deletes the checkpoints that no rule keeps; before that, writes others again, so that more can go.

Two things hold bytes that no rule wants: deltas against a checkpoint that no rule selects, and moments of checkpoints
that are to be weights only. A chain in which this is so is written again: all payloads first, then the manifests, each
atomically, and then what nothing needs any more is deleted. Deltas that are to be against newer checkpoints are written
one by one, and the file of each before is deleted at once: so the disk holds at most one of them twice.

After a crash at any point every checkpoint loads, as it was or as it is written again, and the next prune goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from shrinkpoint.errors import ChainError, FormatError, ShrinkpointError
from shrinkpoint.progress import track
from shrinkpoint.storage import Storage
from shrinkpoint.storage.sizing import DryRunStorage
from shrinkpoint.store import chain, layout
from shrinkpoint.store.listing import Listing
from shrinkpoint.store.manifest import DirectoryManifest, Manifest, encode_store_manifest
from shrinkpoint.store.retention import (
    FreedBytes,
    Keep,
    PrunePlan,
    RewriteTarget,
    apply_policy,
    frees_bytes,
    parents_to_reverse,
    plan_deletion,
    reversed_shares,
)

if TYPE_CHECKING:
    from shrinkpoint.codec.reference import Reference
    from shrinkpoint.store.rewrite import RewrittenCheckpoint

_log = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class RewriteChain:
    """Checkpoints that rules select, of which some are to be written again."""

    manifests: tuple[Manifest, ...]  # all of them, and what they are to be deltas against
    targets: tuple[RewriteTarget, ...]  # those that are to be written again, each after its parent


def prune(
    storage: Storage,
    listing: Listing,
    keep: Keep,
    now: datetime,
    *,
    dry_run: bool,
    compact: bool = False,
    defer: bool = False,
    threads: int | None = None,
    settled: set[str] | None = None,
    wants_reverse: Callable[[Manifest], bool] | None = None,
    known: Mapping[int, Reference] | None = None,
) -> PrunePlan:
    """Delete the checkpoints that no rule keeps, and write others again where that frees bytes.

    Args:
        storage: the store's; the caller holds its lock unless this is a dry run.
        listing: its content.
        now: with a time zone; `Keep.within` counts back from here.
        dry_run: only compute what would be done: payloads are encoded as well, and thrown away.
        compact: also write deltas again that need a checkpoint which no rule selects.
        defer: leave chains as they are of which a checkpoint keeps its moments: they may still grow.
        threads: native threads; None: every core.
        settled: digests of checkpoints to leave as they are: without moments, or writing their chain again freed
            nothing; more are added. None: look at all of them.
        wants_reverse: called with the newest checkpoint: True if older ones are to be written again as deltas against
            newer ones; None: they are not.
        known: values of checkpoints that are in memory, by step; None: of none.

    Raises:
        PolicyError: the best are to be kept by a metric that no checkpoint has.
        StorageError: reading, writing or deleting failed; every checkpoint still loads.
        VersionError: a newer release has written here, and its manifests cannot be read.
    """
    run = _Prune(storage, listing, keep, now, dry_run=dry_run, threads=threads)
    run.delete_unneeded()
    if keep.moments_last is not None or compact:
        settled = set() if settled is None else settled
        for rewrite in _plan_rewrites(storage, run.listing, keep, now, compact=compact, defer=defer, settled=settled):
            if not run.write_again(rewrite):
                settled.update(target.manifest.digest for target in rewrite.targets)
    if wants_reverse is not None and (reverse := _plan_reverse(run.listing, keep, now, wants_reverse)):
        try:
            run.reverse(reverse, known)
        except (ShrinkpointError, MemoryError, RuntimeError) as error:  # torch reports what it cannot allocate so
            _log.warning("older checkpoints stay as they are, and take more bytes than they need: %s", error)
    plan = run.finish()
    if plan.keys and not dry_run:
        _log.info("pruned %s: %r", storage.describe(), plan)
    return plan


class _Prune:
    """A prune under way, or a dry run of it; a dry run does the same with a storage that drops what is written."""

    def __init__(
        self, storage: Storage, listing: Listing, keep: Keep, now: datetime, *, dry_run: bool, threads: int | None
    ) -> None:
        self.listing = listing
        self._keep, self._now, self._threads = keep, now, threads
        self._storage: Storage = storage
        self._is_dry_run = dry_run
        if dry_run:
            # A delta written here gets links to its bases, as far as those that are there tell
            bases = [base for manifest in listing.manifests.values() for base in manifest.bases]
            has_links = not bases or any(base.name for base in bases)
            self._storage = DryRunStorage(storage, has_links=getattr(storage, "has_links", True) and has_links)
        self._freed = FreedBytes(storage, listing)
        self._plan = PrunePlan((), (), 0, {}, ())
        self._notes: dict[int, str] = {}

    def finish(self) -> PrunePlan:
        notes = {step: (*self._plan.reasons[step], note) for step, note in self._notes.items()}
        return replace(self._plan, reasons={**self._plan.reasons, **notes})

    def delete_unneeded(self) -> None:
        """Delete what nothing needs now."""
        plan, before = plan_deletion(self.listing, self._keep, self._now), self._plan
        self._freed.add(plan.keys)
        keys = plan.keys if self._is_dry_run else track(plan.keys, f"deleting from {self._storage.describe()}")
        for key in keys:
            self._storage.delete(key)
        self.listing = self.listing.without(frozenset(plan.keys))
        self._plan = replace(
            plan,
            delete=tuple(sorted({*before.delete, *plan.delete})),
            bytes=self._freed.total - before.written,
            reasons=dict(sorted({**before.reasons, **plan.reasons}.items())),
            keys=(*before.keys, *plan.keys),
            rewrite=before.rewrite,
            weights_only=before.weights_only,
            written=before.written,
            reversed_shares=before.reversed_shares,
        )

    def write_again(self, rewrite: RewriteChain) -> bool:
        """Write checkpoints of a chain again, and delete what nothing needs then; whether that frees bytes.

        Where it would free nothing, or a checkpoint does not load, all stay as they are.
        """
        from shrinkpoint.store.rewrite import write_again  # which imports torch

        title = f"writing a chain of {self._storage.describe()} again"
        with ExitStack() as transactions:  # those that are open at the end are aborted
            try:
                rewritten = write_again(
                    self._storage, self.listing, rewrite.targets, transactions, self._threads, title
                )
            except (ChainError, FormatError) as error:
                _log.warning("a chain is not written again, since it does not load: %s", error)
                self._note(rewrite, "stays as it is, since its chain does not load")
                return False
            after = {item.after.step: item.after for item in rewritten}
            if _needed_bytes(rewrite.manifests) <= _needed_bytes([after.get(m.step, m) for m in rewrite.manifests]):
                self._note(rewrite, "stays as it is, since writing its chain again frees nothing")
                return False
            for item in rewritten:
                self._commit(item)
        stripped = [item.after.step for item in rewritten if item.after.weights_only and not item.before.weights_only]
        self._note(rewrite, "written again, without what no rule keeps")
        self._notes.update(dict.fromkeys(stripped, f"weights only: the newest {self._keep.moments_last} keep moments"))
        self._plan = replace(
            self._plan,
            rewrite=tuple(sorted({*self._plan.rewrite, *after})),
            weights_only=tuple(sorted({*self._plan.weights_only, *stripped})),
        )
        self.delete_unneeded()
        return True

    def reverse(self, rewrite: RewriteChain, known: Mapping[int, Reference] | None) -> None:
        """Write checkpoints again as deltas against newer ones, and after each delete what nothing needs then.

        Where it would free nothing, or a checkpoint does not load, the others stay as they are.
        """
        from shrinkpoint.store.rewrite import write_reversed  # which imports torch

        before, after = {manifest.step: manifest for manifest in rewrite.manifests}, dict[int, Manifest]()
        waiting = [target.manifest.step for target in rewrite.targets]
        title = f"writing a chain of {self._storage.describe()} again"
        with ExitStack() as transactions:  # those that are open at the end are aborted
            for item in write_reversed(
                self._storage, self.listing, rewrite.targets, transactions, self._threads, title, known
            ):
                step = waiting.pop(0)
                after[step] = item.after
                self._plan = replace(self._plan, reversed_shares=reversed_shares(after.values()))
                if not frees_bytes(before, after, waiting, self._keep):
                    self._notes[step] = "stays as it is, since writing its chain again frees nothing"
                    return
                self._commit(item)
                self._notes[step] = "written again, without what no rule keeps"
                self._plan = replace(self._plan, rewrite=tuple(sorted({*self._plan.rewrite, step})))
                self.delete_unneeded()

    def _note(self, rewrite: RewriteChain, text: str) -> None:
        self._notes.update({target.manifest.step: text for target in rewrite.targets})

    def _commit(self, item: RewrittenCheckpoint) -> None:
        step = item.after.step
        self._freed.add([layout.manifest_key(step)])  # it is replaced
        written = item.after.stored_bytes + len(encode_store_manifest(item.after))
        self._plan = replace(self._plan, written=self._plan.written + written)
        item.transaction.commit_manifest(item.after)
        self.listing = self.listing.with_files(step, item.names, manifest=item.after)


def _needed_bytes(manifests: Sequence[Manifest]) -> int:
    return sum(chain.file_sizes(manifests).values()) + sum(
        len(encode_store_manifest(manifest)) for manifest in manifests
    )


def _plan_rewrites(
    storage: Storage, listing: Listing, keep: Keep, now: datetime, *, compact: bool, defer: bool, settled: set[str]
) -> Iterator[RewriteChain]:
    """The chains to write again; those without moments that are to go only if `compact`."""
    steps = apply_policy(listing.manifests.values(), keep, now, forgotten=listing.forgotten).selected
    selected = {step: listing.manifests[step] for step in sorted(steps)}
    resumable = {*steps} if keep.moments_last is None else {*steps[-keep.moments_last :]}
    chains: dict[str, list[Manifest]] = {}
    for manifest in selected.values():
        chains.setdefault(chain.chain_links(manifest)[0].digest, []).append(manifest)
    for manifests in chains.values():
        manifests.sort(key=lambda manifest: manifest.depth)  # a parent comes before its deltas
        older = [manifest for manifest in manifests if manifest.step not in resumable and not manifest.weights_only]
        may_grow = defer and any(manifest.step in resumable for manifest in manifests)
        if may_grow or not (older or compact):
            continue
        stripped = _with_moments(storage, older, settled)
        targets = _targets(selected, manifests, stripped) if stripped or compact else ()
        if targets:
            yield RewriteChain(tuple(manifests), targets)


def _plan_reverse(
    listing: Listing, keep: Keep, now: datetime, wants_reverse: Callable[[Manifest], bool]
) -> RewriteChain | None:
    """Plan older checkpoints that a rule selects as deltas against newer ones; None: all stay as they are."""
    selected = apply_policy(listing.manifests.values(), keep, now, forgotten=listing.forgotten).selected
    if not selected or not wants_reverse(listing.manifests[selected[-1]]):
        return None

    def needs_none(manifest: DirectoryManifest) -> bool:
        return all(chain.is_current(listing.manifests, b) and keep.is_permanent(b.step) for b in manifest.bases)

    kept = {step: listing.manifests[step] for step in selected}
    parents = parents_to_reverse(kept, keep, needs_none)
    targets = tuple(RewriteTarget(kept[step], False, parent) for step, parent in parents.items())
    return RewriteChain((*kept.values(),), targets) if targets else None


def _with_moments(storage: Storage, manifests: Sequence[Manifest], settled: set[str]) -> frozenset[int]:
    """The steps of the checkpoints whose optimizers have state for their parameters."""
    unknown = [manifest for manifest in manifests if manifest.digest not in settled]
    if not unknown:
        return frozenset()
    from shrinkpoint.store.rewrite import has_moments  # which imports torch

    steps = set()
    for manifest in unknown:
        if has_moments(storage, manifest):
            steps.add(manifest.step)
        else:
            settled.add(manifest.digest)
    return frozenset(steps)


def _targets(
    selected: Mapping[int, Manifest], manifests: Sequence[Manifest], stripped: frozenset[int]
) -> tuple[RewriteTarget, ...]:
    """Rewrites after which a chain has neither the moments of `stripped` nor what no rule selects.

    A checkpoint becomes a delta against its nearest ancestor among them that is like it: with moments, or without.

    Args:
        selected: by step, what rules select, of all chains.
        manifests: those of this chain, by rising step.
    """
    weights_only = {manifest.id: manifest.weights_only or manifest.step in stripped for manifest in manifests}
    targets: dict[int, RewriteTarget] = {}
    for manifest in manifests:
        step = manifest.step
        is_stale = any(base.step in targets or not chain.is_current(selected, base) for base in manifest.bases)
        if step in stripped or is_stale:
            like = weights_only[manifest.id]
            parents = (base.step for base in reversed(manifest.bases) if weights_only.get(base.id) is like)
            targets[step] = RewriteTarget(manifest, like, next(parents, None))
    return tuple(targets.values())
