"""Rewrites checkpoints in place, so that they depend on fewer files."""

from __future__ import annotations

from collections.abc import Iterator

from shrinkpoint.schemes.recode import Recode
from shrinkpoint.storage import Storage
from shrinkpoint.store import chain
from shrinkpoint.store.checkpoint_file import DecodedFile, SaveReport
from shrinkpoint.store.decode import decode_chain
from shrinkpoint.store.listing import Listing, scan
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.transaction import CheckpointTransaction
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.flatten import flatten, unflatten

Rewrite = tuple[Manifest, Manifest, SaveReport]
"""The manifests of a checkpoint before and after it was rewritten, and the report of that save."""


def rewrite_as_keyframe(storage: Storage, manifest: Manifest, *, threads: int | None = None) -> Rewrite:
    """Rewrite a delta as a keyframe; deltas that were made against it keep its old file.

    Raises:
        ChainError, FormatError: it does not load; nothing is changed.
        StorageError: reading or writing failed; the checkpoint loads, unchanged or as a keyframe.
    """
    return _rewrite(storage, manifest, None, threads)


def merge_orphaned_deltas(storage: Storage, *, threads: int | None = None) -> Iterator[Rewrite]:
    """Rewrite each delta that depends on a file of a checkpoint which is forgotten, deleted or saved again.

    It becomes a delta against its nearest ancestor that is still visible, or a keyframe if there is none. So a sequence
    of deltas whose middle is forgotten merges into one. Memory: three states.
    """
    for step in scan(storage).visible:
        listing = scan(storage)
        listing.raise_unreadable()
        manifest = listing.visible[step]
        if all(chain.is_current(listing.visible, base) for base in manifest.bases):
            continue
        yield _rewrite(storage, manifest, _nearest_visible(listing, manifest), threads)


def _nearest_visible(listing: Listing, manifest: Manifest) -> Manifest | None:
    """The closest ancestor that is visible and, by its id, holds the values it held when the delta was made."""
    for base in reversed(manifest.bases):
        other = listing.visible.get(base.step)
        if other is not None and other.id == base.id:
            return other
    return None


def _rewrite(storage: Storage, manifest: Manifest, parent: Manifest | None, threads: int | None) -> Rewrite:
    """Rewrite without further loss, whatever the scheme was: the decoded values are encoded exactly."""
    reference = decode_chain(chain.store_chain(storage, parent), threads=threads).reference if parent else None
    decoded = decode_chain(chain.store_chain(storage, manifest), threads=threads)
    with CheckpointTransaction(storage, scan(storage), manifest.step, parent, reference) as transaction:
        scheme = Recode(decoded.reference.quantized, manifest.loss, manifest.scheme)
        report = transaction.add(_to_flat_state(decoded, manifest), scheme=scheme, threads=threads)
        return manifest, transaction.commit(metadata_from=manifest), report


def _to_flat_state(decoded: DecodedFile, manifest: Manifest) -> FlatState:
    """The state as a save sees it, with roles and optimizer facts derived anew; shares the decoded memory."""
    return flatten(
        unflatten(
            decoded.tree, decoded.reference.tensors, where=f"step {manifest.step}", max_bytes=decoded.max_copy_bytes
        )
    )
