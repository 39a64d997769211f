"""`Store`: many checkpoints in a directory, saved as chains of deltas."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from shrinkpoint import validate
from shrinkpoint.codec.reference import Reference, is_mostly_codes
from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError
from shrinkpoint.guard import pause_gc
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.plan import plan_within_memory
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.storage import LocalStorage, ObjectCache, Storage, map_requests, resolve_storage
from shrinkpoint.store import chain, layout
from shrinkpoint.store.chain_limit import ChainBytes
from shrinkpoint.store.chain_writer import ChainWriter, WrittenPayload
from shrinkpoint.store.checkpoint_file import Device, build_state
from shrinkpoint.store.decode import decode_chain
from shrinkpoint.store.delta_base import MISSING, StoredFile, as_delta_base, warn_lost_progress
from shrinkpoint.store.history import Line, Place, place_of
from shrinkpoint.store.listing import Lister, Listing, StoreRestore, forget, iter_newest, read_step
from shrinkpoint.store.manifest import Manifest, check_lossy_restores, check_note
from shrinkpoint.store.newest import restore_newest
from shrinkpoint.store.prune import prune
from shrinkpoint.store.retention import Keep, PrunePlan, RewriteTarget, check_keep
from shrinkpoint.store.rewrite import has_memory_to_reverse, merge_orphaned_deltas, rewrite_and_commit
from shrinkpoint.store.save_report import SaveReport, store_html
from shrinkpoint.store.step_storage import find_store
from shrinkpoint.store.transaction import CheckpointTransaction, StoreLock
from shrinkpoint.store.verify import Finding, verify
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.threads import ForkSafeLock, reset_in_children

_log = logging.getLogger("shrinkpoint")


class Store:
    """Checkpoints in a directory, in a bucket, or in any `Storage`.

    Reading never locks. The first save takes the store's lock, removes the files of interrupted saves, and keeps the
    lock until `close`; a second process that saves gets an error. Several threads of a process may share one store.

    Memory: after a save, one state on the CPU, the reference of the next delta. Of a tensor on a lattice (the scheme
    `fisher`) it is a byte a value, and a sample of a weight's original values. After a load of exact tensors nothing is
    held: the next save decodes them again.

    Args:
        where: a directory or a URL such as "s3://bucket/run", which need not exist yet, or a storage. A copy of one
            step's directory is read as a store with that step, and nothing can be saved there.
        keyframe_every, threads: see `SaveSettings`.
        cache: of a URL: a directory on this machine for payloads that are read and written, which are not fetched
            again, or an `ObjectCache`; None: that of the environment variable `SHRINKPOINT_CACHE`, if it is set.

    Attributes:
        storage: what holds the files.
        chain_limit: where chains end; a caller that prunes sets its `keep`.
        line: of the history of the run, on which the next checkpoint is saved: that of what was saved or loaded last.

    Raises:
        PolicyError: an invalid argument; a file instead of a directory, a URL that is not one of object storage.
        MissingExtraError: a URL, and what reaches it is not installed.
    """

    def __init__(
        self,
        where: str | Path | Storage,
        *,
        keyframe_every: int | None = 20,
        threads: int | None = None,
        cache: str | Path | ObjectCache | None = None,
    ) -> None:
        self._writer: ChainWriter[Manifest] = ChainWriter(keyframe_every=keyframe_every, threads=threads)
        storage = resolve_storage(where, "the directory of a store", cache=cache)
        copied = find_store(storage) if isinstance(storage, LocalStorage) else None
        self.storage = storage if copied is None else copied
        self.chain_limit, self._threads = self._writer.chain_limit, self._writer.threads
        self.chain_limit.can_reverse = has_memory_to_reverse
        self._mutex = ForkSafeLock()
        self._lister = Lister(self.storage)
        self._store_lock = StoreLock(self.storage, self._lister, self._mutex)
        self._transaction: weakref.ref[CheckpointTransaction] | None = None
        self.line = Line()
        self._settled: set[str] = set()  # checkpoints that a prune with `defer` has found nothing to delete of
        reset_in_children(self)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: a copy writes nothing yet."""
        return {**vars(self), "_transaction": None}

    def __repr__(self) -> str:
        return f"Store({self.storage.describe()!r})"

    def _repr_html_(self) -> str:
        """Contents of the store for a notebook: totals, and the newest checkpoints."""
        listing = self.scan()
        stored = chain.payload_bytes(self.storage, listing)
        return store_html(self.storage.describe(), [*listing.visible.values()], stored)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reset_after_fork(self) -> None:
        """In a forked child: leave the lock, and what is being written, to the parent; the next save is a keyframe."""
        self._store_lock.leave_to_parent()
        self._writer.reset_after_fork()
        self._transaction = None

    def close(self) -> None:
        """Let other processes save here, and free the memory of the reference. A later save opens the store again."""
        with self._mutex.lock:
            self.line.step = None  # others may save now
            self._writer.references.drop()
            self._store_lock.release()

    # reading manifests

    def scan(self) -> Listing:
        """All checkpoints: the visible, the forgotten, and those whose manifest is broken, with the reason."""
        return self._lister.scan()

    def list(self) -> Sequence[Manifest]:
        """The manifests of the committed checkpoints that are not forgotten, by rising step.

        The last one is the newest, unless the run went back to an older step: `manifest()` is the one saved last.
        """
        return [*self.scan().visible.values()]

    def steps(self) -> Sequence[int]:
        """The steps of the committed checkpoints that are not forgotten, rising."""
        return [*self.scan().visible]

    def manifest(self, step: int | None = None) -> Manifest:
        """The manifest of one checkpoint; without a step, of the newest.

        Raises:
            NotFoundError: there is none, or it is forgotten.
            FormatError: its manifest is broken.
            PolicyError: the step is no whole number.
        """
        if step is None:
            whole = (entry for entry, _ in iter_newest([self._lister]) if entry.is_visible and entry.error is None)
            broken = (entry for entry, _ in iter_newest([self._lister]) if entry.is_visible)
            entry = next(whole, None) or next(broken, None)
        else:
            step = layout.as_step(step)
            entry = self._lister.scan_steps((step,)).directories.get(step)
        if entry is None or not entry.is_visible:
            raise self._unknown_step_error(step)
        return entry.read_manifest()

    def has_checkpoint(self) -> bool:
        """True if there is a checkpoint that is not forgotten; its manifest may be broken."""
        return any(entry.is_visible for entry in self._lister.iter_directories())

    def verify(self, *, deep: bool = False) -> Sequence[Finding]:
        """Find damage; an empty list means that every checkpoint is intact.

        Args:
            deep: also decode every checkpoint; else headers and digests of the stored bytes are compared.

        Raises:
            StorageError: the store cannot be listed.
        """
        return verify(self.storage, deep=deep, threads=self._threads)

    # saving

    def begin(self, step: int, *, keyframe: bool = False) -> CheckpointTransaction:
        """Begin a checkpoint that the caller adds and commits; `save` does both and holds the reference as well.

        Raises:
            LockedError: another process saves here.
            PolicyError: `step` is not a whole number from 0, or another transaction is open.
            StorageError: the store cannot be read, or orphaned files cannot be removed.
        """
        transaction = self._begin(step, keyframe)
        self.line.note_restored(None)  # nobody tells whether it is committed
        with self._writer.base_verifier.read_share():  # at once: nobody tells when files may be deleted
            self._transaction = weakref.ref(transaction)
        return transaction

    def lock(self) -> None:
        """Take the store's lock and remove orphaned files now, instead of at the first save.

        Raises:
            LockedError: another process saves here.
            PolicyError: a transaction is open.
            StorageError: orphaned files cannot be removed.
        """
        with self._mutex.lock:
            self._check_idle()
            self._store_lock.acquire()

    def _begin(self, step: int, keyframe: bool, fill_in: bool = False) -> CheckpointTransaction:
        """As `begin`, for `save`, which ends the transaction itself even if it is interrupted."""
        step, keyframe = layout.check_step(step), validate.check_bool("keyframe", keyframe)
        with self._mutex.lock:
            self.lock()
            reference_step = self._writer.references.manifest.step if self._writer.references.manifest else step
            place = Place(step) if fill_in else self.line.next_place(step, lambda: self._lister.scan().others(step))
            listing = self._lister.scan_chain(step, reference_step)
            parent = None if keyframe else self._delta_parent(listing, step)
            reference = self._writer.references.reference if parent else None
            if self._writer.references.manifest is None:  # it could not be decoded again
                parent = reference = None
            return CheckpointTransaction(self.storage, listing, step, parent, reference, place)

    def _check_idle(self) -> None:
        """Raise if a transaction is open: removing orphaned files would delete its payload."""
        transaction = self._transaction() if self._transaction else None
        if transaction is not None and transaction.is_open:
            found, do = f"step {transaction.step} is not committed yet", "commit or abort it first"
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
        stall: Callable[[], float] | None = None,
        fill_in: bool = False,
    ) -> SaveReport:
        """Save a state; when this returns, it is durable. A step that is saved again replaces the old one, atomically.

        Args:
            state: any nest of dicts, lists, tuples, tensors and plain values, or a flattened one; it is not changed. Of
                a `Parameter` `requires_grad` comes back; another tensor comes back without it.
            scheme: a scheme, or its text, such as "fisher(relative_error=0.3)".
            metrics: by name, for `Keep(best=)` and for people.
            keyframe: do not write a delta.
            adopt: take over the tensors of `state`, which came from `snapshot`, instead of copying them.
            lossy_restores: number of restores from lossy checkpoints behind this state.
            note: free text.
            stall: returns the seconds for which a training loop waited, for the manifest; called before it is written.
            fill_in: the checkpoint takes the place of its step among those of the run, as one that was saved then; else
                it is the newest one, whatever its step.

        Raises:
            StateError: the state holds something that cannot be stored.
            LockedError: another process saves here.
            PolicyError: a step, a metric or a number of restores that is none, or a note that is no text.
            StorageError: writing failed; every earlier checkpoint still loads.
        """
        scheme, metrics = get_scheme(scheme), validate.as_floats(metrics)
        adopt = validate.check_bool("adopt", adopt)
        note, fill_in = check_note(note), validate.check_bool("fill_in", fill_in)
        lossy_restores = check_lossy_restores(lossy_restores)
        flat_state = state if isinstance(state, FlatState) else flatten(state)
        with self._mutex.lock, self._store_lock.cleanup_on_error(), pause_gc(flat_state.nbytes):
            with ExitStack() as transactions:  # one that is open at the end is aborted
                transaction = transactions.enter_context(self._begin(step, keyframe, fill_in))
                written = self._write(transaction, flat_state, scheme, adopt)
                if written is None:
                    transaction = transactions.enter_context(self._begin(step, True, fill_in))
                    written = self._write(transaction, flat_state, scheme, adopt)
                elif transaction.base is None:  # not the one in place of a delta: it does not shorten the wait
                    self.chain_limit.note_keyframe()
                assert written is not None  # a keyframe always stays
                report = replace(written.report, stall_seconds=None if stall is None else stall())
                manifest = transaction.commit(
                    metrics=metrics, lossy_restores=lossy_restores, note=note, stats=report.stats
                )
            self._writer.commit_payload(manifest, written)
            if transaction.replaces:
                self._store_lock.remove_orphans()
            if written.is_progress_lost:
                warn_lost_progress(report.retention)
            _log.info("saved %s, in %.2f s", report, report.seconds)
            if not fill_in:
                self.line.note_saved(place_of(manifest), step, self.storage.describe(), f"step {step}")
            return report

    def _write(
        self, transaction: CheckpointTransaction, state: FlatState, scheme: Scheme, adopt: bool
    ) -> WrittenPayload | None:
        """Write the payload of a checkpoint; None for a delta that would hold more than it saves."""
        if isinstance(scheme, Planner):  # a plan for a keyframe uses the previous checkpoint, too
            base = as_delta_base(self.reference, base=transaction.parent is not None)
            scheme = scheme.of_run(self, self.place)
            scheme = plan_within_memory(partial(scheme.plan, reference=base), state, scheme)
        return self._writer.write_payload(transaction, state, scheme=scheme, adopt=adopt)

    @property
    def place(self) -> object:
        """Equal for stores of one directory or URL."""
        storage = self.storage
        return storage.path.absolute() if isinstance(storage, LocalStorage) else getattr(storage, "url", id(storage))

    @property
    def reference(self) -> Reference | None:
        """The decoded tensors of the last checkpoint that was saved or loaded here; None if nothing is held."""
        manifest = self._writer.references.manifest
        if manifest is None:
            return None
        is_base = self.chain_limit.allows_delta(ChainBytes.of_manifest(manifest))
        return replace(self._writer.references.reference, is_base=is_base)

    def _delta_parent(self, listing: Listing, step: int) -> Manifest | None:
        reference = self._writer.references.manifest
        parent = listing.manifests.get(reference.step) if reference is not None else None
        if reference is None or parent is None or parent.step >= step:
            return None
        if any(base.step == step for base in parent.bases):  # it is saved again, after a restore of an older one
            return None
        if (parent.id, parent.digest) != (reference.id, reference.digest):
            return None  # saved again, or written again by another process, perhaps without moments
        if not self.chain_limit.allows_delta(ChainBytes.of_manifest(parent)):
            return None
        if any(key not in listing for key in listing.directories[parent.step].needed_keys):
            return None
        files = []  # of the chain, each under the first of its keys that exists
        for link in chain.chain_links(parent):
            candidates = chain.candidate_keys(parent, link)
            key = next((key for key in candidates if key in listing), candidates[0])
            files.append(StoredFile(link.digest, link.size, self.storage, key, self._lister.version(key)))
        return parent if self._writer.base_verifier.find_damage(files) is None else None

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
        """Load a checkpoint.

        Args:
            step: None: the newest.
            device: of its tensors; None: the CPU.
            tie: tensors that shared memory share it again.
            keep: the next save is a delta against this checkpoint; False takes less memory.
            max_bytes: how much memory the tensors of one checkpoint may take; None: as for
                `shrinkpoint.load`.

        Raises:
            NotFoundError: there is no such checkpoint, or it is forgotten.
            ChainError: a base is missing, or is another than the delta was made against.
            FormatError: bytes are at fault, or ask for more memory than they may.
            StorageError: reading failed.
            PolicyError: the device is not there, or is full; a limit that is none.
        """
        tie, keep = validate.check_bool("tie", tie), validate.check_bool("keep", keep)

        def load(manifest: Manifest) -> Any:
            state = self._load(manifest, device, tie, keep, max_bytes)
            if keep:
                self.line.note_restored(place_of(manifest))
            return state

        return chain.use_current(lambda: self.manifest(step), load, chain.manifest_identity)

    def restore(
        self,
        *,
        device: Device = None,
        tie: bool = True,
        keep: bool = True,
        weights_only: bool = False,
        max_bytes: int | None = None,
    ) -> StoreRestore:
        """Load the newest checkpoint that loads; those skipped are in the result, each with the reason.

        Args:
            weights_only: take one whose moments retention has deleted, too; False: it is skipped, since no run can
                resume from it.
            device, tie, keep, max_bytes: as in `load`.

        Raises:
            NotFoundError: none loads, or there is none.
            StorageError: the store cannot be listed.
        """
        tie, keep = validate.check_bool("tie", tie), validate.check_bool("keep", keep)
        weights_only = validate.check_bool("weights_only", weights_only)
        restored = restore_newest(
            [self], device=device, tie=tie, keep=self if keep else None, weights_only=weights_only, max_bytes=max_bytes
        )
        if keep:
            self.line.note_restored(place_of(restored.manifest))
        return restored

    def weights_only_error(self, manifest: Manifest) -> MismatchError:
        """The error to raise where a run wants to resume from a checkpoint that has weights only."""
        others = {step: other for step, other in self.scan().visible.items() if not other.weights_only}
        found = "weights only: retention has deleted what the optimizers kept for each parameter (Keep(moments_last=))"
        expected = (
            f"moments, which {chain.describe_steps(others)} has" if others else "moments, which no checkpoint has"
        )
        do = "restore that, or load the weights alone: leave the optimizer out, or pass weights_only=True"
        where = f"{self.storage.describe()}, step {manifest.step}"
        return MismatchError(where, found=found, expected=expected, do=do)

    def _load(self, manifest: Manifest, device: Device, tie: bool, keep: bool, max_bytes: int | None) -> Any:
        began = time.perf_counter()
        with self._mutex.lock, pause_gc(manifest.raw_bytes):
            if keep:
                self._writer.references.drop()  # else there would be three states in memory
            stamps = self._stamps(manifest) if keep else {}
            files = chain.store_chain(self.storage, manifest)
            decode = partial(decode_chain, files, threads=self._threads, max_bytes=max_bytes)
            decoded = decode()
            holds = keep and is_mostly_codes(decoded.reference.tensors)
            state = build_state(decoded, f"step {manifest.step}", tie=tie, device=device, copy=holds)
            if holds:
                self._writer.references.adopt(manifest, decoded.reference)
            elif keep:  # a copy of all tensors would take as long as decoding them, and a state of memory
                self._writer.references.adopt_encoded(manifest, lambda: decode().reference)
            if keep:
                self._writer.base_verifier.mark_verified(stamps)
            where, seconds = self.storage.describe(), time.perf_counter() - began
            _log.info("loaded step %d of %s (%s), in %.2f s", manifest.step, where, manifest.kind, seconds)
            return state

    def _stamps(self, manifest: Manifest) -> dict[str, object]:
        """`StoredFile.stamp` by digest of the files that decoding reads; not of a digest with two different files."""
        files = [
            StoredFile(link.digest, link.size, self.storage, key)
            for link in chain.chain_links(manifest)
            for key in chain.candidate_keys(manifest, link)
        ]
        different: dict[str, set[object]] = {file.digest: set() for file in files}
        for file, stamp in zip(files, map_requests(self.storage, StoredFile.stamp, files), strict=True):
            different[file.digest] |= {stamp} - {MISSING}
        return {digest: stamp for digest, stamps in different.items() if len(stamps) == 1 for stamp in stamps}

    # removing and rewriting

    def forget(self, step: int) -> None:
        """Hide a checkpoint; `prune` deletes it once nothing kept depends on it. Saving the step again shows it again.

        Raises:
            NotFoundError: there is no such checkpoint.
            PolicyError: the step is no whole number.
            LockedError: another process saves here.
        """
        step = layout.as_step(step)
        with self._store_lock.for_writing():
            listing = self._lister.scan_steps((step,))
            if step not in listing.manifests and step not in listing.broken:
                raise self._unknown_step_error(step)
            forget(self.storage, listing, step)

    def prune(
        self,
        keep: Keep | None = None,
        *,
        dry_run: bool = True,
        compact: bool = False,
        defer: bool = False,
        now: datetime | None = None,
    ) -> PrunePlan:
        """Delete the forgotten checkpoints and those that `keep` does not select, unless a kept one depends on them.

        With `Keep(moments_last=)`, and with `compact`, chains are written again where that frees bytes. It takes as
        long as decoding and encoding them, in a dry run as well, and needs room for a chain besides the old one. Every
        checkpoint is replaced atomically, and what stays of it decodes to the same bits as before.

        Args:
            keep: None: keep everything but the forgotten.
            dry_run: only return what would be done; the store is not locked.
            compact: delete also what a kept checkpoint depends on and no rule selects: the deltas that need it are
                written again, as a keyframe and deltas against that.
            defer: this follows a save: leave a chain as it is while one of its checkpoints keeps its moments, since it
                may still grow, and let `chain_limit` say whether older checkpoints become deltas against newer ones.
            now: the time from which `Keep(within=)` counts back; None: the current time.

        Raises:
            PolicyError: the best are to be kept by a metric that no checkpoint has; nothing was deleted.
            LockedError: another process saves here.
            VersionError: a newer release has written here, and its manifests cannot be read.
            StorageError: reading or deleting failed.
        """
        keep, now = check_keep(keep) or Keep(), now or datetime.now(timezone.utc)
        dry_run, defer = validate.check_bool("dry_run", dry_run), validate.check_bool("defer", defer)
        compact = validate.check_bool("compact", compact)
        settings: dict[str, Any] = {"compact": compact, "defer": defer, "threads": self._threads}
        if dry_run:
            return prune(self.storage, self.scan(), keep, now, dry_run=True, **settings)
        with self._store_lock.for_writing():
            self._check_idle()
            if defer:
                settings |= {"settled": self._settled, "wants_reverse": self.chain_limit.wants_reverse}
            listing, (held, values) = self.scan(), self._writer.references.decoded
            kept = None if held is None else listing.manifests.get(held.step)
            if held and kept and values and chain.manifest_identity(kept) == chain.manifest_identity(held):
                settings["known"] = {held.step: values}
            plan = prune(self.storage, listing, keep, now, dry_run=False, **settings)
            self.chain_limit.note_pruned(plan)
            self._follow_rewrites(plan.rewrite)
            return plan

    def compact(self, step: int | None = None) -> Sequence[SaveReport]:
        """Rewrite a delta as a keyframe; without a step, merge deltas that depend on forgotten or deleted checkpoints.

        Each checkpoint is replaced atomically; files that others depend on are kept until these are compacted, too.

        Returns:
            One report for each checkpoint that was rewritten.

        Raises:
            NotFoundError: there is no such checkpoint.
            ChainError, FormatError: one does not load; it is unchanged, and so are those after it.
            VersionError: a newer release has written here, and its manifests cannot be read.
            LockedError: another process saves here.
            StorageError: reading or writing failed; every checkpoint still loads.
        """
        with self._store_lock.for_writing():
            self._check_idle()
            if step is None:
                rewrites = [*merge_orphaned_deltas(self.storage, threads=self._threads)]
            else:
                manifest = self.manifest(step)
                target = RewriteTarget(manifest, manifest.weights_only, None)
                is_delta = bool(manifest.bases)
                rewrites = [rewrite_and_commit(self.storage, self.scan(), target, self._threads)] if is_delta else []
            self._follow_rewrites([rewrite.after.step for rewrite in rewrites])
            self._store_lock.remove_orphans()
            return [rewrite.report for rewrite in rewrites]

    def _follow_rewrites(self, steps: Container[int]) -> None:
        """If the checkpoint of the reference was written again, let the next delta be against its new file."""
        held = self._writer.references.manifest
        entry = None if held is None or held.step not in steps else read_step(self.storage, held.step)
        manifest = None if entry is None else entry.manifest
        if held is None or manifest is None or manifest.id != held.id:
            return
        files = chain.store_chain(self.storage, manifest)
        self._writer.references.adopt_encoded(manifest, lambda: decode_chain(files, threads=self._threads).reference)

    def _unknown_step_error(self, step: int | None) -> NotFoundError:
        where, listing = self.storage.describe(), self.scan()
        if step is None:
            return NotFoundError(where, found="no checkpoint", do="save one first")
        found = f"step {step} is forgotten" if step in listing.forgotten else f"no checkpoint of step {step}"
        steps = chain.describe_steps(listing.visible)
        return NotFoundError(where, found=found, expected=steps, do="`shrinkpoint list` shows all steps")
