"""Writes one checkpoint of a store: payload first, durably; manifest last, atomically."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Literal

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.storage import Storage
from shrinkpoint.store import chain, layout
from shrinkpoint.store.checkpoint_file import SaveReport, write_file
from shrinkpoint.store.digest_json import utc_timestamp
from shrinkpoint.store.listing import Listing
from shrinkpoint.store.manifest import ChainLink, Manifest, Payload, encode_store_manifest
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON


class CheckpointTransaction:
    """One checkpoint that is being written; it exists once `commit` returns.

    Call `add` once, then `commit`; or `abort` at any time before. As a context manager it aborts at the end of the
    block unless it was committed. The caller holds the store's lock.

    Args:
        storage: the store's.
        listing: its content.
        step: of the new checkpoint.
        parent: the checkpoint to write a delta against; None for a keyframe.
        reference: the parent's decoded tensors.

    Attributes:
        replaces: there are files of an earlier checkpoint of this step.
        reference: the decoded tensors of the new checkpoint, after `add`.
    """

    def __init__(
        self, storage: Storage, listing: Listing, step: int, parent: Manifest | None, reference: Reference | None
    ) -> None:
        self.step, self.parent = step, parent
        self.replaces = bool(listing.file_names(step))
        self._storage, self._listing, self._reference = storage, listing, reference
        self._written_keys: list[str] = []
        self.reference: Reference | None = None
        self._report: SaveReport | None = None
        self._loss: JSON = None
        self._payload_name = ""
        self._bases: tuple[ChainLink, ...] = ()
        self._state: Literal["open", "committing", "closed"] = "open"

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed."""
        return self._state == "open"

    def __enter__(self) -> CheckpointTransaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def add(self, state: FlatState, *, scheme: Scheme, threads: int | None = None) -> SaveReport:
        """Write the payload.

        Raises:
            PolicyError: it has been written already, or the transaction is closed.
            StorageError: writing failed.
        """
        if self._state != "open" or self._report is not None:
            raise self._misuse_error("a second payload" if self._report else "closed")
        quantized = scheme.quantize(state, self._reference)
        if quantized.keyframe:
            self.parent = self._reference = None
        if self.parent is not None:
            self._bases = self._link_chain(self.parent)
        self._payload_name = layout.payload_name(self._listing.file_names(self.step))
        key = self._key(self._payload_name)
        self._written_keys.append(key)
        written = write_file(
            self._storage,
            key,
            quantized,
            scheme=scheme,
            reference=self._reference,
            parent=self._parent_json(),
            threads=threads,
        )
        self._report, self.reference, self._loss = written.report, written.reference, written.report.loss_report
        return self._report

    def commit(
        self,
        *,
        metrics: Mapping[str, float] | None = None,
        lossy_restores: int = 0,
        note: str = "",
        metadata_from: Manifest | None = None,
    ) -> Manifest:
        """Write the manifest, by which the checkpoint exists.

        Args:
            metadata_from: the checkpoint that is rewritten: take everything but the files from it.

        Raises:
            PolicyError: there is no payload yet.
            StorageError: writing failed; the checkpoint may exist or not, and is complete if it does.
        """
        if self._state != "open" or self._report is None:
            raise self._misuse_error("no payload" if self._state == "open" else "closed")
        report = self._report
        manifest = Manifest(
            id=secrets.token_hex(8),
            step=self.step,
            created=utc_timestamp(),
            scheme=report.scheme,
            payloads=(Payload(self._payload_name, report.stored_bytes, report.digest, report.raw_bytes),),
            bases=self._bases,
            metrics=dict(metrics or {}),
            lossy_restores=lossy_restores,
            loss=self._loss,
            note=note,
        )
        if metadata_from is not None:
            manifest = replace(
                manifest,
                id=metadata_from.id,
                created=metadata_from.created,
                scheme=metadata_from.scheme,
                metrics=metadata_from.metrics,
                lossy_restores=metadata_from.lossy_restores,
                loss=metadata_from.loss,
                note=metadata_from.note,
            )
        # From here on the manifest may exist even if this call fails: nothing may be removed.
        self._state = "committing"
        self._storage.put(layout.manifest_key(self.step), encode_store_manifest(manifest))
        self._state = "closed"
        return manifest

    def abort(self) -> None:
        """Remove what was written so far; what cannot be removed now, the next save removes."""
        if self._state != "open":
            return
        self._state = "closed"
        for key in reversed(self._written_keys):
            with suppress(ShrinkpointError):
                self._storage.delete(key)

    def _link_chain(self, parent: Manifest) -> tuple[ChainLink, ...]:
        """Hard-link each file of the parent's chain into this step's directory, which then needs no other."""
        return tuple(self._link_file(parent, base) for base in chain.chain_links(parent))

    def _link_file(self, parent: Manifest, base: ChainLink) -> ChainLink:
        name = layout.base_name(base.digest)
        key = self._key(name)
        if key in self._listing.keys:
            return replace(base, name=name)
        for source in dict.fromkeys((parent.key(base.name), base.sibling_key)):
            if source in self._listing.keys:
                self._written_keys.append(key)
                if self._storage.link(source, key):
                    return replace(base, name=name)
                self._written_keys.pop()
        return replace(base, name="")

    def _parent_json(self) -> JSON:
        """The header entry by which a reader of the payload finds its base, relative to the payload's directory."""
        if not self._bases:
            return None
        base = self._bases[-1]
        return {"name": base.name or f"../{base.sibling_key}", "digest": base.digest, "step": base.step}

    def _key(self, name: str) -> str:
        return f"{layout.step_dir(self.step)}/{name}"

    def _misuse_error(self, found: str) -> PolicyError:
        do = "begin another checkpoint"
        return PolicyError(f"step {self.step}", found=found, expected="add once, then commit once", do=do)
