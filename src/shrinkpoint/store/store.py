"""A place with many checkpoints."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from shrinkpoint import validate
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import ChainError, FormatError, NotFoundError, PolicyError, StorageError
from shrinkpoint.schemes.base import PlanningScheme, Scheme
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.storage import LocalStorage, Storage, local_path
from shrinkpoint.store import chain, layout, prune
from shrinkpoint.store.base_verification import MISSING, BaseVerifier, StoredFile
from shrinkpoint.store.checkpoint_file import Device, SaveReport, to_device
from shrinkpoint.store.compact import Rewrite, merge_orphaned_deltas, rewrite_as_keyframe
from shrinkpoint.store.decode import decode_chain
from shrinkpoint.store.listing import Listing, SkippedCheckpoint, forget, scan
from shrinkpoint.store.lock import StoreLock
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.reference import ReferenceCache, as_delta_base, warn_low_retention
from shrinkpoint.store.retention import Keep, check_keep
from shrinkpoint.store.transaction import CheckpointTransaction
from shrinkpoint.store.verify import Finding, verify
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.flatten import flatten, unflatten


@dataclass(frozen=True)
class StoreRestore:
    """What a walk back found: the newest checkpoint that loads, and those newer ones that do not, newest first."""

    step: int
    state: Any
    manifest: Manifest
    skipped: tuple[SkippedCheckpoint, ...] = ()


class Store:
    """Checkpoints in a directory, or in any `Storage`.

    Reading never locks. The first save takes the store's lock, sweeps what interrupted saves left behind, and keeps the
    lock until `close`; a second process that saves is refused. One store may be used by several threads of a process.

    Memory: after a save or a load, one state on the CPU, the reference of the next delta; `load` needs two at a time.
    Of what a lossy scheme quantizes also the values before that, and a byte for each.

    Args:
        where: a directory, which need not exist yet, or a storage.
        keyframe_every: each chain has at most this many checkpoints, its keyframe included; None: no bound.
        threads: native threads for coding; None: every core.

    Raises:
        PolicyError: an argument that makes no sense; a URL, or a file, where a directory should be.
    """

    def __init__(
        self, where: str | Path | Storage, *, keyframe_every: int | None = 20, threads: int | None = None
    ) -> None:
        keyframe_every, threads = validate.check_keyframe_every(keyframe_every), validate.check_threads(threads)
        self.storage = _as_storage(where)
        self._keyframe_every, self._threads = keyframe_every, threads
        self._reference_cache: ReferenceCache[Manifest] = ReferenceCache()
        self._mutex = threading.RLock()
        self._store_lock = StoreLock(self.storage, self._mutex)
        self._base_verifier = BaseVerifier()
        self._transaction: weakref.ref[CheckpointTransaction] | None = None

    def __repr__(self) -> str:
        return f"Store({self.storage.describe()!r})"

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes save here, and free the memory of the reference. A later save opens the store again."""
        with self._mutex:
            self._reference_cache.drop()
            self._store_lock.release()

    # looking

    def scan(self) -> Listing:
        """Everything there is: the checkpoints, those forgotten, those whose manifest is broken and why."""
        return scan(self.storage)

    def list(self) -> Sequence[Manifest]:
        """The committed checkpoints that are not forgotten, by rising step."""
        return [*self.scan().visible.values()]

    def steps(self) -> Sequence[int]:
        """The steps of `list`."""
        return [*self.scan().visible]

    def manifest(self, step: int | None = None) -> Manifest:
        """One checkpoint; None: the newest.

        Raises:
            NotFoundError: there is none, or it is forgotten.
            FormatError: its manifest is broken.
        """
        return self._visible_manifest(self.scan(), step)

    def verify(self, *, deep: bool = False) -> Sequence[Finding]:
        """What is not as it should be; see `verify.verify`. An empty list: every checkpoint is whole."""
        return verify(self.storage, deep=deep, threads=self._threads)

    # saving

    def begin(self, step: int, *, keyframe: bool = False) -> CheckpointTransaction:
        """Start a checkpoint that is added and committed by hand. `save` does all of it, and remembers the state.

        Raises:
            LockedError: another process saves here.
            PolicyError: `step` is not a whole number from 0, or another checkpoint is in the making.
            StorageError: the store cannot be read or swept.
        """
        pending = self._begin(step, keyframe)
        self._transaction = weakref.ref(pending)
        return pending

    def lock(self) -> None:
        """Take the store's lock, and sweep, now instead of at the first save.

        Raises:
            LockedError: another process saves here.
            PolicyError: a checkpoint is in the making.
            StorageError: the store cannot be swept.
        """
        with self._mutex:
            self._check_idle()
            self._store_lock.acquire()

    def _begin(self, step: int, keyframe: bool) -> CheckpointTransaction:
        """As `begin`; nobody else waits for its end, which may come by an interrupt at any line."""
        step = layout.check_step(step)
        with self._mutex:
            self.lock()
            listing = self.scan()
            parent = None if keyframe else self._delta_parent(listing, step)
            return CheckpointTransaction(
                self.storage, listing, step, parent, self._reference_cache.reference if parent else None
            )

    def _check_idle(self) -> None:
        """To whoever tidies, the payload of a checkpoint in the making is litter."""
        pending = self._transaction() if self._transaction else None
        if pending is not None and pending.is_open:
            found, do = f"step {pending.step} is in the making", "commit or abort it first"
            raise PolicyError(self.storage.describe(), found=found, expected="one checkpoint at a time", do=do)

    def save(
        self,
        step: int,
        state: Any,
        *,
        scheme: Scheme | str = "lossless",
        metrics: Mapping[str, float] | None = None,
        keyframe: bool = False,
        adopt: bool = False,
        lossy_restores: int = 0,
        note: str = "",
    ) -> SaveReport:
        """Save a state; when this returns, it is durable. A step that is saved again replaces the old one, atomically.

        Args:
            state: any nest of dicts, lists, tuples, tensors and plain values, or a flattened one; it is not changed. Of
                a `Parameter` `requires_grad` comes back; another tensor comes back without it.
            scheme: a scheme, or its text, such as "fisher(relative_error=.3)".
            metrics: what `Keep(best=)` and people look at.
            keyframe: True: do not make a delta.
            adopt: `state` came from `snapshot`: its tensors become the store's own instead of being copied.

        Raises:
            StateError: the state holds something that cannot be stored.
            LockedError: another process saves here.
            PolicyError: a step, or a metric, that is no number.
            StorageError: writing failed; every checkpoint that was there still loads.
        """
        chosen, measured = get_scheme(scheme), _check_metrics(metrics)
        flat = state if isinstance(state, FlatState) else flatten(state)
        with self._mutex, self._store_lock.cleanup_on_error():
            with self._begin(step, keyframe) as pending:
                if isinstance(chosen, PlanningScheme):  # a keyframe, too, looks at the checkpoint before
                    chosen = chosen.plan(flat, as_delta_base(self.reference, base=pending.parent is not None))
                report = pending.add(flat, scheme=chosen, threads=self._threads)
                made = pending.commit(metrics=measured, lossy_restores=lossy_restores, note=note)
            assert pending.reference is not None
            report = replace(report, retention=self._reference_cache.retained_progress(flat, pending.reference))
            (self._reference_cache.adopt if adopt else self._reference_cache.copy)(
                made, pending.reference, flat.tensors
            )
            written = StoredFile(made.digest, report.stored_bytes, self.storage, made.key(made.payloads[0].name))
            self._base_verifier.mark_verified({made.digest: written.stamp()})
            if pending.replaces:
                self._store_lock.remove_orphans()
            warn_low_retention(report.retention)
            return report

    @property
    def reference(self) -> Reference | None:
        """What a reader gets of the last checkpoint that was saved or loaded here; None: nothing is held."""
        return None if self._reference_cache.manifest is None else self._reference_cache.reference

    def _delta_parent(self, listing: Listing, step: int) -> Manifest | None:
        """The checkpoint to write a delta against: the one that is held, if it still stands as it was."""
        held = self._reference_cache.manifest
        parent = listing.manifests.get(held.step) if held is not None else None
        if held is None or parent is None or parent.id != held.id or parent.step >= step:
            return None
        if self._keyframe_every is not None and parent.depth + 1 >= self._keyframe_every:
            return None
        if not listing.referenced_keys((parent.step,)) <= listing.keys | {layout.forgotten_key(parent.step)}:
            return None
        return parent if self._base_verifier.find_damage(self._stored_files(parent, listing.keys)) is None else None

    def _stored_files(self, manifest: Manifest, keys: Collection[str]) -> Sequence[StoredFile]:
        """The files of a chain, each at the first of its places that is there."""
        found = []
        for base in chain.chain_links(manifest):
            at = chain.candidate_keys(manifest, base)
            key = next((key for key in at if key in keys), at[0])
            found.append(StoredFile(base.digest, base.size, self.storage, key))
        return found

    # loading

    def load(
        self,
        step: int | None = None,
        *,
        device: Device = None,
        tie: bool = True,
        keep: bool = True,
        max_bytes: int | None = None,
    ) -> Any:
        """A state as it was saved.

        Args:
            step: None: the newest.
            device: where its tensors go; None: the CPU.
            tie: tensors that shared memory share it again.
            keep: hold what was loaded as the reference of the next delta. False needs less memory, for mere reading.
            max_bytes: how much memory the tensors of one checkpoint may take; None: 1 GiB, or 1000 times the bytes of
                its chain if that is more (`SHRINKPOINT_MAX_BYTES` in the environment says otherwise).

        Raises:
            NotFoundError: there is no such checkpoint, or it is forgotten.
            ChainError: a base is missing, or is another than the delta was made against.
            FormatError: bytes are at fault, or ask for more memory than they may.
            StorageError: reading failed.
            PolicyError: the device is not there, or is full; a limit that is none.
        """
        return self._load(self.manifest(step), device, tie, keep, max_bytes)

    def restore(
        self, *, device: Device = None, tie: bool = True, keep: bool = True, max_bytes: int | None = None
    ) -> StoreRestore:
        """The newest checkpoint that loads; those that do not are skipped, and named with the reason.

        Raises:
            NotFoundError: none loads, or there is none.
            StorageError: the store cannot be listed.
        """
        listing = self.scan()
        skipped: list[SkippedCheckpoint] = []
        for step in sorted({*listing.manifests, *listing.broken} - listing.forgotten, reverse=True):
            try:
                manifest = self._visible_manifest(listing, step)
                return StoreRestore(step, self._load(manifest, device, tie, keep, max_bytes), manifest, tuple(skipped))
            except (FormatError, ChainError, StorageError, NotFoundError) as error:
                skipped.append(SkippedCheckpoint(str(error), step=step, error=error))
        raise self._no_checkpoint_error(skipped)

    def _load(self, manifest: Manifest, device: Device, tie: bool, keep: bool, max_bytes: int | None) -> Any:
        with self._mutex:
            if keep:
                self._reference_cache.drop()  # else there would be three states in memory
            stamps = self._stamps(manifest) if keep else {}
            decoded = decode_chain(
                chain.store_chain(self.storage, manifest), threads=self._threads, max_bytes=max_bytes
            )
            tensors, where = to_device(decoded.reference.tensors, device, copy=keep), f"step {manifest.step}"
            state = unflatten(decoded.tree, tensors, tie=tie, where=where, max_bytes=decoded.max_copy_bytes)
            if keep:
                self._reference_cache.adopt(manifest, decoded.reference)
                self._base_verifier.mark_verified(stamps)
            return state

    def _stamps(self, manifest: Manifest) -> dict[str, object]:
        """By digest, of the files that decoding reads; not where two that differ might be meant."""
        stamps = {
            base.digest: {
                StoredFile(base.digest, base.size, self.storage, key).stamp()
                for key in chain.candidate_keys(manifest, base)
            }
            for base in chain.chain_links(manifest)
        }
        return {
            digest: next(iter(found - {MISSING})) for digest, found in stamps.items() if len(found - {MISSING}) == 1
        }

    # tidying

    def forget(self, step: int) -> None:
        """Hide a checkpoint; `prune` deletes it once nothing kept stands on it. Saving the step again shows it again.

        Raises:
            NotFoundError: there is no such checkpoint.
            LockedError: another process saves here.
        """
        with self._store_lock.for_writing():
            listing = self.scan()
            if step not in listing.manifests and step not in listing.broken:
                raise _unknown_step_error(self.storage.describe(), listing, step)
            forget(self.storage, listing, step)

    def prune(self, keep: Keep | None = None, *, dry_run: bool = True, now: datetime | None = None) -> prune.PrunePlan:
        """Delete what `keep` does not ask for and nothing kept stands on, and whatever is forgotten.

        Args:
            keep: None: everything but the forgotten.
            dry_run: only say what would be deleted; the store is not locked for it.
            now: what `Keep(within=)` counts back from; None: this moment.

        Raises:
            PolicyError: the best are to be kept of a metric that no checkpoint has; nothing was deleted.
            LockedError: another process saves here.
            VersionError: a newer release has written here; only it knows what it stands on.
            StorageError: reading or deleting failed.
        """
        check_keep(keep)
        now = now or datetime.now(timezone.utc)
        if dry_run:
            return prune.plan(self.storage, self.scan(), keep or Keep(), now)
        with self._store_lock.for_writing():
            self._check_idle()
            plan = prune.plan(self.storage, self.scan(), keep or Keep(), now)
            prune.execute(self.storage, plan)
            return plan

    def compact(self, step: int | None = None) -> Sequence[SaveReport]:
        """Make a delta a keyframe; without a step, merge deltas so that none stands on what is forgotten or gone.

        Each checkpoint is replaced in place, atomically; what others stand on stays until they are compacted too.

        Returns:
            One report for each checkpoint that was written again.

        Raises:
            NotFoundError: there is no such checkpoint.
            ChainError, FormatError: one does not load; it stays as it is, and so do those after it.
            VersionError: a newer release has written here; only it knows what it stands on.
            LockedError: another process saves here.
            StorageError: reading or writing failed; every checkpoint still loads.
        """
        with self._store_lock.for_writing():
            self._check_idle()
            done = [report for _, _, report in self._rewrite(step)]
            self._store_lock.remove_orphans()
            return done

    def _rewrite(self, step: int | None) -> Iterator[Rewrite]:
        if step is None:
            yield from merge_orphaned_deltas(self.storage, threads=self._threads)
            return
        manifest = self._visible_manifest(self.scan(), step)
        if manifest.bases:
            yield rewrite_as_keyframe(self.storage, manifest, threads=self._threads)

    def _visible_manifest(self, listing: Listing, step: int | None) -> Manifest:
        shown = listing.visible
        if step is None and shown:
            return max(shown.values(), key=lambda manifest: manifest.step)
        if step in shown:
            return shown[step]
        if step in listing.broken and step not in listing.forgotten:
            raise listing.broken[step]
        raise _unknown_step_error(self.storage.describe(), listing, step)

    def _no_checkpoint_error(self, skipped: Sequence[SkippedCheckpoint]) -> NotFoundError:
        if not skipped:
            return NotFoundError(self.storage.describe(), found="no checkpoint", do="save one first")
        reasons = "; ".join(f"step {one.step}: {one.reason}" for one in skipped)
        return NotFoundError(self.storage.describe(), found=f"no checkpoint that loads ({reasons})", do="run `verify`")


def _as_storage(where: str | Path | Storage) -> Storage:
    if isinstance(where, str | Path) or not hasattr(where, "remove_stale"):
        return LocalStorage(local_path(where, "the directory of a store", directory=True))
    return where


def _unknown_step_error(where: str, listing: Listing, step: int | None) -> NotFoundError:
    if step is None:
        return NotFoundError(where, found="no checkpoint", do="save one first")
    found = f"step {step} is forgotten" if step in listing.forgotten else f"no checkpoint of step {step}"
    return NotFoundError(where, found=found, expected=chain.describe_steps(listing.visible), do="list the store")


def _check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise PolicyError(
            "metrics", found=repr(metrics)[:200], expected="a number for each name", do="pass floats"
        ) from error
