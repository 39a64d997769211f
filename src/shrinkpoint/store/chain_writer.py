"""Writes the checkpoints of one run, each as a delta against the one before where that is possible.

A `ChainWriter` holds what the next delta is made against, and knows where chains end. A `CheckpointPlace` says how one
checkpoint keeps the files of its base (by links or by reference) and which name is free for its payload. How a
checkpoint is committed is up to whoever owns the place: its manifest comes after the payload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from shrinkpoint import validate
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.storage import Storage
from shrinkpoint.store.chain_limit import ChainBytes, ChainLimit
from shrinkpoint.store.checkpoint_file import write_file
from shrinkpoint.store.delta_base import BaseVerifier, ReferenceCache, StoredFile, as_delta_base
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON

M = TypeVar("M")


class CheckpointPlace(ABC):
    """The place of one checkpoint. Until its manifest is there, `remove` undoes what was written.

    Args:
        storage: what holds its files.
        base: the files of the chain that it is a delta against; None for a keyframe.
        reference: the base's decoded tensors.

    Attributes:
        storage, base: as given; `base` is None after `add` has written a keyframe.
        base_reference: as given, until `add`. Marked as no base, it has the values that a plan for a delta needs where
            a keyframe is written after all.
        payload_key: key of the payload, after `add`.
        written_keys: keys of what was written, in this order.
        reference: the decoded tensors of the new checkpoint, after `add`.
    """

    def __init__(self, storage: Storage, base: ChainBytes | None, reference: Reference | None) -> None:
        self.storage, self.base = storage, base
        self.payload_key = ""
        self.written_keys: list[str] = []
        self.reference: Reference | None = None
        self.base_reference = reference

    @abstractmethod
    def keep_base(self) -> JSON:
        """Make sure that the base's files stay; returns the header entry by which a reader of the payload finds it."""

    @abstractmethod
    def free_key(self) -> str:
        """A key for the payload that no file has."""

    def add(self, state: FlatState, *, scheme: Scheme, threads: int | None = None) -> SaveReport:
        """Write the payload, durably, after whatever keeps its base.

        Raises:
            StorageError: writing failed; the caller calls `remove`.
        """
        reference, self.base_reference = self.base_reference, None
        quantized = scheme.quantize(state, reference)
        if reference is not None and not reference.is_base:
            # A plan for a delta that then was impossible has differences: these tensors are stored exactly
            tensors = {
                name: tensor
                for name, tensor in quantized.quantized.items()
                if not (isinstance(tensor, CodebookTensor) and tensor.residual)
            }
            quantized = replace(quantized, quantized=tensors)
        if quantized.keyframe or self.base is None:
            self.remove()  # what was to keep the base
            self.base = reference = None
        parent = None if self.base is None else self.keep_base()
        self.payload_key = self.free_key()
        self.written_keys.append(self.payload_key)  # before it is there: an interrupt may come at any line
        written = write_file(
            self.storage,
            self.payload_key,
            quantized,
            scheme=scheme,
            reference=reference,
            parent=parent,
            originals=state.tensors,
            threads=threads,
        )
        self.reference = written.reference
        return written.report

    def remove(self) -> None:
        """Remove what was written; what cannot be removed now, a later save removes."""
        for key in reversed(self.written_keys):
            with suppress(ShrinkpointError):
                self.storage.delete(key)
        self.written_keys.clear()


class WrittenPayload(NamedTuple):
    """A payload whose checkpoint is not committed yet."""

    place: CheckpointPlace
    report: SaveReport
    stamp: object  # `StoredFile.stamp` of its file
    adopt: bool  # its tensors may be held as they are; else they are copied
    is_progress_lost: bool  # too little of the weights' progress is in it, of which a warning tells


class ChainWriter(Generic[M]):
    """Writes payloads, each a delta against the last checkpoint, and holds that as the reference of the next one.

    Call `write_payload`, then `commit_payload` once the checkpoint is committed. The reference changes with
    `commit_payload` only.

    Memory: one state on the CPU; of a tensor on a lattice a byte a value, and a sample of its original values.

    Args:
        keyframe_every, threads: see `SaveSettings`.

    Raises:
        PolicyError: one of them is out of range.
    """

    def __init__(self, *, keyframe_every: int | None = 20, threads: int | None = None) -> None:
        keyframe_every, self.threads = validate.check_keyframe_every(keyframe_every), validate.check_threads(threads)
        self.chain_limit = ChainLimit(keyframe_every)  # where chains end; whoever deletes checkpoints sets its `keep`
        self.references: ReferenceCache[M] = ReferenceCache()  # the last checkpoint that was committed or loaded
        self.base_verifier = BaseVerifier()  # finds damage in the files of the base

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: the next payload of a copy is a keyframe."""
        return {**vars(self), "references": ReferenceCache(), "base_verifier": BaseVerifier()}

    def reset_after_fork(self) -> None:
        """In a forked child: leave files to the parent; the next payload is a keyframe."""
        self.references, self.base_verifier = ReferenceCache(), BaseVerifier()

    def write_payload(
        self, place: CheckpointPlace, state: FlatState, *, scheme: Scheme, adopt: bool = False
    ) -> WrittenPayload | None:
        """Write the payload of a checkpoint, while the share of its base that is due is read again.

        Args:
            adopt: take over the tensors of `state`; else they must not change until `commit_payload`, which copies
                them.

        Returns:
            None for a delta that would hold more bytes than it saves: it is removed, and a keyframe is due.
        """
        if place.base is None and isinstance(scheme, QuantizationPlan) and self.references.manifest is not None:
            place.base_reference = as_delta_base(self.references.reference, base=False)
        with self.base_verifier.read_share():
            report = place.add(state, scheme=scheme, threads=self.threads)
        if place.base is not None and not self.chain_limit.accepts_delta(
            place.base, report.stored_bytes, report.raw_bytes
        ):
            place.remove()
            return None
        assert place.reference is not None
        progress = self.references.retained_progress(place.reference)
        report = replace(report, retention=progress.fraction)
        own = StoredFile(report.digest, report.stored_bytes, place.storage, place.payload_key)
        return WrittenPayload(place, report, own.stamp(), adopt, progress.is_lost)

    def commit_payload(self, manifest: M, written: WrittenPayload) -> None:
        """Make the checkpoint of a payload, which is committed, the reference for the next delta."""
        assert written.place.reference is not None
        store_reference = self.references.adopt if written.adopt else self.references.copy
        store_reference(manifest, written.place.reference)
        self.base_verifier.mark_verified({written.report.digest: written.stamp})
