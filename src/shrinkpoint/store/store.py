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

from shrinkpoint import arguments
from shrinkpoint.codec import Reference
from shrinkpoint.errors import ChainError, FormatError, NotFoundError, PolicyError, StorageError
from shrinkpoint.schemes import Scheme, Settling, named
from shrinkpoint.state import FlatState, flatten, unflatten
from shrinkpoint.storage import LocalStorage, Storage, local_path
from shrinkpoint.store import chain, layout, prune
from shrinkpoint.store.compact import Rewritten, to_keyframe, to_merged
from shrinkpoint.store.file import SaveReport
from shrinkpoint.store.forget import forget
from shrinkpoint.store.held import Held, as_base, warn_of
from shrinkpoint.store.lease import Lease
from shrinkpoint.store.listing import Listing, places, scan
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.pending import Pending
from shrinkpoint.store.placed import Device, placed
from shrinkpoint.store.retention import Keep, checked_keep
from shrinkpoint.store.verification import GONE, Link, Verification
from shrinkpoint.store.verify import Finding, verify
from shrinkpoint.store.walk import decode_chain


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    step: int
    reason: str


@dataclass(frozen=True)
class Restored:
    """What a walk back found: the newest checkpoint that loads, and those newer ones that do not, newest first."""

    step: int
    state: Any
    manifest: Manifest
    skipped: tuple[Skipped, ...] = ()


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
        keyframe_every, threads = arguments.keyframe_every(keyframe_every), arguments.threads(threads)
        self.storage = _storage(where)
        self._keyframe_every, self._threads = keyframe_every, threads
        self._held: Held[Manifest] = Held()
        self._guard = threading.RLock()
        self._lease = Lease(self.storage, self._guard)
        self._verification = Verification()
        self._begun: weakref.ref[Pending] | None = None

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
        with self._guard:
            self._held.drop()
            self._lease.release()

    # looking

    def scan(self) -> Listing:
        """Everything there is: the checkpoints, those forgotten, those whose manifest is broken and why."""
        return scan(self.storage)

    def list(self) -> Sequence[Manifest]:
        """The committed checkpoints that are not forgotten, by rising step."""
        return [*self.scan().shown.values()]

    def steps(self) -> Sequence[int]:
        """The steps of `list`."""
        return [*self.scan().shown]

    def manifest(self, step: int | None = None) -> Manifest:
        """One checkpoint; None: the newest.

        Raises:
            NotFoundError: there is none, or it is forgotten.
            FormatError: its manifest is broken.
        """
        return self._shown(self.scan(), step)

    def verify(self, *, deep: bool = False) -> Sequence[Finding]:
        """What is not as it should be; see `verify.verify`. An empty list: every checkpoint is whole."""
        return verify(self.storage, deep=deep, threads=self._threads)

    # saving

    def begin(self, step: int, *, keyframe: bool = False) -> Pending:
        """Start a checkpoint that is added and committed by hand. `save` does all of it, and remembers the state.

        Raises:
            LockedError: another process saves here.
            PolicyError: `step` is not a whole number from 0, or another checkpoint is in the making.
            StorageError: the store cannot be read or swept.
        """
        pending = self._begin(step, keyframe)
        self._begun = weakref.ref(pending)
        return pending

    def lock(self) -> None:
        """Take the store's lock, and sweep, now instead of at the first save.

        Raises:
            LockedError: another process saves here.
            PolicyError: a checkpoint is in the making.
            StorageError: the store cannot be swept.
        """
        with self._guard:
            self._check_idle()
            self._lease.hold()

    def _begin(self, step: int, keyframe: bool) -> Pending:
        """As `begin`; nobody else waits for its end, which may come by an interrupt at any line."""
        step = layout.checked_step(step)
        with self._guard:
            self.lock()
            listing = self.scan()
            parent = None if keyframe else self._parent(listing, step)
            return Pending(self.storage, listing, step, parent, self._held.reference if parent else None)

    def _check_idle(self) -> None:
        """To whoever tidies, the payload of a checkpoint in the making is litter."""
        pending = self._begun() if self._begun else None
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
        chosen, measured = named(scheme), _measured(metrics)
        flat = state if isinstance(state, FlatState) else flatten(state)
        with self._guard, self._lease.settled():
            with self._begin(step, keyframe) as pending:
                if isinstance(chosen, Settling):  # a keyframe, too, looks at the checkpoint before
                    chosen = chosen.settle(flat, as_base(self.reference, base=pending.parent is not None))
                report = pending.add(flat, scheme=chosen, threads=self._threads)
                made = pending.commit(metrics=measured, lossy_restores=lossy_restores, note=note)
            assert pending.reference is not None
            report = replace(report, retention=self._held.progress(flat, pending.reference))
            (self._held.adopt if adopt else self._held.copy)(made, pending.reference, flat.tensors)
            written = Link(made.digest, report.stored_bytes, self.storage, made.key(made.files[0].name))
            self._verification.learn({made.digest: written.stamp()})
            if pending.replaces:
                self._lease.tidy()
            warn_of(report.retention)
            return report

    @property
    def reference(self) -> Reference | None:
        """What a reader gets of the last checkpoint that was saved or loaded here; None: nothing is held."""
        return None if self._held.manifest is None else self._held.reference

    def _parent(self, listing: Listing, step: int) -> Manifest | None:
        """The checkpoint to write a delta against: the one that is held, if it still stands as it was."""
        held = self._held.manifest
        parent = listing.manifests.get(held.step) if held is not None else None
        if held is None or parent is None or parent.id != held.id or parent.step >= step:
            return None
        if self._keyframe_every is not None and parent.depth + 1 >= self._keyframe_every:
            return None
        if not listing.needed((parent.step,)) <= listing.keys | {layout.forgotten_key(parent.step)}:
            return None
        return parent if self._verification.doubt(self._links(parent, listing.keys)) is None else None

    def _links(self, manifest: Manifest, keys: Collection[str]) -> Sequence[Link]:
        """The files of a chain, each at the first of its places that is there."""
        found = []
        for base in chain.files(manifest):
            at = places(manifest, base)
            key = next((key for key in at if key in keys), at[0])
            found.append(Link(base.digest, base.size, self.storage, key))
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
    ) -> Restored:
        """The newest checkpoint that loads; those that do not are skipped, and named with the reason.

        Raises:
            NotFoundError: none loads, or there is none.
            StorageError: the store cannot be listed.
        """
        listing = self.scan()
        skipped: list[Skipped] = []
        for step in sorted({*listing.manifests, *listing.broken} - listing.forgotten, reverse=True):
            try:
                manifest = self._shown(listing, step)
                return Restored(step, self._load(manifest, device, tie, keep, max_bytes), manifest, tuple(skipped))
            except (FormatError, ChainError, StorageError, NotFoundError) as error:
                skipped.append(Skipped(step, str(error)))
        raise self._none(skipped)

    def _load(self, manifest: Manifest, device: Device, tie: bool, keep: bool, max_bytes: int | None) -> Any:
        with self._guard:
            if keep:
                self._held.drop()  # else there would be three states in memory
            stamps = self._stamps(manifest) if keep else {}
            decoded = decode_chain(self.storage, manifest, threads=self._threads, max_bytes=max_bytes)
            tensors, where = placed(decoded.reference.tensors, device, copy=keep), f"step {manifest.step}"
            state = unflatten(decoded.tree, tensors, tie=tie, where=where, max_bytes=decoded.left)
            if keep:
                self._held.adopt(manifest, decoded.reference)
                self._verification.learn(stamps)
            return state

    def _stamps(self, manifest: Manifest) -> dict[str, object]:
        """By digest, of the files that decoding reads; not where two that differ might be meant."""
        stamps = {
            base.digest: {Link(base.digest, base.size, self.storage, key).stamp() for key in places(manifest, base)}
            for base in chain.files(manifest)
        }
        return {digest: next(iter(found - {GONE})) for digest, found in stamps.items() if len(found - {GONE}) == 1}

    # tidying

    def forget(self, step: int) -> None:
        """Hide a checkpoint; `prune` deletes it once nothing kept stands on it. Saving the step again shows it again.

        Raises:
            NotFoundError: there is no such checkpoint.
            LockedError: another process saves here.
        """
        with self._lease.writing():
            listing = self.scan()
            if step not in listing.manifests and step not in listing.broken:
                raise _unknown(self.storage.describe(), listing, step)
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
        checked_keep(keep)
        now = now or datetime.now(timezone.utc)
        if dry_run:
            return prune.plan(self.storage, self.scan(), keep or Keep(), now)
        with self._lease.writing():
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
        with self._lease.writing():
            self._check_idle()
            done = [report for _, _, report in self._rewritten(step)]
            self._lease.tidy()
            return done

    def _rewritten(self, step: int | None) -> Iterator[Rewritten]:
        if step is None:
            yield from to_merged(self.storage, threads=self._threads)
            return
        manifest = self._shown(self.scan(), step)
        if manifest.bases:
            yield to_keyframe(self.storage, manifest, threads=self._threads)

    def _shown(self, listing: Listing, step: int | None) -> Manifest:
        shown = listing.shown
        if step is None and shown:
            return max(shown.values(), key=lambda manifest: manifest.step)
        if step in shown:
            return shown[step]
        if step in listing.broken and step not in listing.forgotten:
            raise listing.broken[step]
        raise _unknown(self.storage.describe(), listing, step)

    def _none(self, skipped: Sequence[Skipped]) -> NotFoundError:
        if not skipped:
            return NotFoundError(self.storage.describe(), found="no checkpoint", do="save one first")
        reasons = "; ".join(f"step {one.step}: {one.reason}" for one in skipped)
        return NotFoundError(self.storage.describe(), found=f"no checkpoint that loads ({reasons})", do="run `verify`")


def _storage(where: str | Path | Storage) -> Storage:
    if isinstance(where, str | Path) or not hasattr(where, "sweep"):
        return LocalStorage(local_path(where, "the directory of a store", directory=True))
    return where


def _unknown(where: str, listing: Listing, step: int | None) -> NotFoundError:
    if step is None:
        return NotFoundError(where, found="no checkpoint", do="save one first")
    found = f"step {step} is forgotten" if step in listing.forgotten else f"no checkpoint of step {step}"
    return NotFoundError(where, found=found, expected=chain.known(listing.shown), do="list the store")


def _measured(metrics: Mapping[str, float] | None) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise PolicyError(
            "metrics", found=repr(metrics)[:200], expected="a number for each name", do="pass floats"
        ) from error
