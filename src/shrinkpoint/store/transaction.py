"""The lock of a store, and the transaction that writes one of its checkpoints."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError, StorageError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.storage import Storage
from shrinkpoint.store import chain, layout
from shrinkpoint.store.chain_limit import ChainBytes
from shrinkpoint.store.chain_writer import CheckpointPlace
from shrinkpoint.store.history import Place
from shrinkpoint.store.identify import refuse_run
from shrinkpoint.store.listing import Lister, Listing, put_manifest
from shrinkpoint.store.manifest import ChainLink, Manifest, Payload, encode_store_manifest, new_manifest
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON
from shrinkpoint.threads import ForkSafeLock


class StoreLock:
    """A store's lock; the files of interrupted saves are removed once after it is taken.

    Args:
        storage: the store's.
        lister: lists it.
        mutex: held by threads of this process while they write.
    """

    def __init__(self, storage: Storage, lister: Lister, mutex: ForkSafeLock) -> None:
        self._storage, self._lister, self._mutex = storage, lister, mutex
        self._storage_lock: Generator[None, None, None] | None = None
        self._is_clean = False

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: a copy does not hold the lock."""
        return {**vars(self), "_storage_lock": None, "_is_clean": False}

    def acquire(self) -> None:
        """Take the lock until `release`, again if it was deleted, and remove the files of interrupted saves.

        Raises:
            LockedError: another process holds it.
            MismatchError: a framework has saved here; the lock is held nevertheless.
            StorageError: removing failed; the lock is held nevertheless.
        """
        holds_lock = getattr(self._storage, "holds_lock", None)
        if self._storage_lock is not None and holds_lock is not None and not holds_lock():
            self.release()  # by now another process may have taken the place
        if self._storage_lock is None:
            # Stored before it is taken: an interrupt may come at any line.
            self._storage_lock = lock = self._hold_storage_lock()
            try:
                next(lock)
            except BaseException:
                self._storage_lock = None
                lock.close()
                raise
        if not self._is_clean:
            refuse_run(self._storage)
            self._storage.remove_stale(layout.is_step_dir)
            self._delete_orphans()
            self._is_clean = True

    def _hold_storage_lock(self) -> Generator[None, None, None]:
        with self._storage.lock():
            yield

    def release(self) -> None:
        try:
            if self._storage_lock is not None:
                self._storage_lock.close()
        finally:
            self._storage_lock, self._is_clean = None, False

    def leave_to_parent(self) -> None:
        """In a forked child: the lock is the parent's, and the next `acquire` asks for it."""
        self._storage_lock, self._is_clean = None, False

    @contextmanager
    def for_writing(self) -> Iterator[None]:
        """Hold the lock for this block; keep it afterwards if it was held before."""
        with (
            self._mutex.lock,
            self.cleanup_on_error(),
            nullcontext() if self._storage_lock is not None else self._storage.lock(),
        ):
            yield

    @contextmanager
    def cleanup_on_error(self) -> Iterator[None]:
        """If the block fails, let the next `acquire` remove orphaned files."""
        try:
            yield
        except BaseException:
            self._is_clean = False
            raise

    def remove_orphans(self) -> None:
        """Remove the files that a commit replaced; if that fails, the next `acquire` does it."""
        try:
            self._delete_orphans()
        except StorageError:
            self._is_clean = False

    def _delete_orphans(self) -> None:
        for key in self._lister.scan().orphans():
            self._storage.delete(key)


class CheckpointTransaction(CheckpointPlace):
    """One checkpoint of a store that is being written; it exists once `commit` returns.

    Call `add` once, then `commit`; or `abort` at any time before. As a context manager it aborts at the end of the
    block unless it was committed. The caller holds the store's lock.

    Args:
        storage: the store's.
        listing: its content: at least the directories of this step, of the parent, and of those that have its bases.
        step: of the new checkpoint.
        parent: the checkpoint to write a delta against; None for a keyframe.
        reference: the parent's decoded tensors.
        place: in the history of the run; None: that of the step.

    Attributes:
        parent: as given; None after a keyframe was written.
        replaces: there are files of an earlier checkpoint of this step.
    """

    def __init__(
        self,
        storage: Storage,
        listing: Listing,
        step: int,
        parent: Manifest | None,
        reference: Reference | None,
        place: Place | None = None,
    ) -> None:
        super().__init__(storage, None if parent is None else ChainBytes.of_manifest(parent), reference)
        self._place = Place(step) if place is None else place
        self.step, self._given_parent = step, parent
        self.replaces = bool(listing.file_names(step))
        self._listing = listing
        self._written: tuple[SaveReport, Payload] | None = None
        self._bases: tuple[ChainLink, ...] = ()
        self._state: Literal["open", "committing", "closed"] = "open"

    @property
    def parent(self) -> Manifest | None:
        return None if self.base is None else self._given_parent

    @property
    def is_open(self) -> bool:
        """True if it can still be committed."""
        return self._state == "open"

    def __enter__(self) -> CheckpointTransaction:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def add(self, state: FlatState, *, scheme: Scheme, threads: int | None = None) -> SaveReport:
        """Write the payload.

        Raises:
            PolicyError: it has been written already, or the transaction is closed.
            StorageError: writing failed.
        """
        if self._state != "open" or self._written is not None:
            raise self._misuse_error("a second payload" if self._written else "closed")
        report = super().add(state, scheme=scheme, threads=threads)
        disk_bytes = report.stored_bytes + sum(base.size for base in self._bases)
        report = replace(report, step=self.step, depth=len(self._bases), disk_bytes=disk_bytes)
        name = self.payload_key.partition("/")[2]
        self._written = report, Payload(name, report.stored_bytes, report.digest, report.raw_bytes)
        return report

    def keep_base(self) -> JSON:
        """Hard-link each file of the parent's chain into this step's directory, which then needs no other."""
        assert self._given_parent is not None
        parent = self._given_parent
        self._bases = tuple(
            replace(base, name=layout.base_name(base.digest) if self._link_file(parent, base) else "")
            for base in chain.chain_links(parent)
        )
        flush_dir = getattr(self.storage, "flush_dir", None)
        if flush_dir is not None and any(base.name for base in self._bases):
            flush_dir(f"{layout.step_dir(self.step)}/{layout.BASES}")
        base = self._bases[-1]
        return {"name": base.name or f"../{base.sibling_key}", "digest": base.digest, "step": base.step}

    def _link_file(self, parent: Manifest, base: ChainLink) -> bool:
        key = f"{layout.step_dir(self.step)}/{layout.base_name(base.digest)}"
        if key in self._listing:
            return True
        for source in dict.fromkeys((parent.key(base.name), base.sibling_key)):
            if source in self._listing and getattr(self.storage, "has_links", True):
                self.written_keys.append(key)
                if self.storage.link(source, key):
                    return True
                self.written_keys.pop()
        return False

    def free_key(self) -> str:
        return f"{layout.step_dir(self.step)}/{layout.payload_name(self.storage, self._listing.file_names(self.step))}"

    def commit(
        self,
        *,
        metrics: Mapping[str, float] | None = None,
        lossy_restores: int = 0,
        note: str = "",
        stats: Mapping[str, float] | None = None,
    ) -> Manifest:
        """Write the manifest, by which the checkpoint exists.

        Args:
            stats: what the save measured of itself.

        Raises:
            PolicyError: there is no payload yet; or a reader would refuse the manifest, and nothing was written.
            StorageError: writing failed; the checkpoint may exist or not, and is complete if it does.
        """
        report, payload = self._check_written()
        manifest: Manifest = new_manifest(
            step=self.step,
            scheme=report.scheme,
            payloads=(payload,),
            bases=self._bases,
            metrics=metrics,
            lossy_restores=lossy_restores,
            loss=report.loss_report,
            note=note,
            stats=stats,
            sequence=self._place.sequence,
            abandoned=self._place.abandoned,
        )
        self.commit_manifest(manifest)
        return manifest

    def rewritten_manifest(self, manifest: Manifest, *, weights_only: bool) -> Manifest:
        """The manifest of a checkpoint whose payload was written again here: everything but the files is as it was.

        Raises:
            PolicyError: there is no payload yet.
        """
        _, payload = self._check_written()
        return replace(
            manifest, payloads=(payload,), bases=self._bases, stored_bytes=payload.size, weights_only=weights_only
        )

    def commit_manifest(self, manifest: Manifest) -> None:
        """Write this manifest, by which the checkpoint exists; raises as `commit` does."""
        self._check_written()
        data = encode_store_manifest(manifest)  # raises while nothing is written
        # From here on the manifest may exist even if this call fails: nothing may be removed.
        self._state = "committing"
        put_manifest(self.storage, manifest, data)
        self._state = "closed"

    def take_reference(self) -> Reference:
        """The decoded tensors of the new checkpoint, which the transaction lets go of.

        Raises:
            PolicyError: there is no payload yet.
        """
        self._check_written()
        reference, self.reference = self.reference, None
        assert reference is not None
        return reference

    @property
    def written_names(self) -> frozenset[str]:
        """Names of the files and links that were written, relative to the step's directory."""
        return frozenset(key.partition("/")[2] for key in self.written_keys)

    def abort(self) -> None:
        """Remove what was written so far; what cannot be removed now, the next save removes."""
        if self._state == "open":
            self._state = "closed"
            self.remove()

    def _check_written(self) -> tuple[SaveReport, Payload]:
        if self._state != "open" or self._written is None:
            raise self._misuse_error("no payload" if self._state == "open" else "closed")
        return self._written

    def _misuse_error(self, found: str) -> PolicyError:
        do = "begin another checkpoint"
        return PolicyError(f"step {self.step}", found=found, expected="one add, then one commit", do=do)
