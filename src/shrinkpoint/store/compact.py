"""Writing checkpoints again, in place, so that fewer files stand below them."""

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
"""A checkpoint before, after, and what writing it again did."""


def rewrite_as_keyframe(storage: Storage, manifest: Manifest, *, threads: int | None = None) -> Rewrite:
    """Write a delta again as a keyframe; what was made against the delta keeps standing on its old file.

    Raises:
        ChainError, FormatError: it does not load; nothing is changed.
        StorageError: reading or writing failed; the checkpoint is whole, as it was or as a keyframe.
    """
    return _rewrite(storage, manifest, None, threads)


def merge_orphaned_deltas(storage: Storage, *, threads: int | None = None) -> Iterator[Rewrite]:
    """Write again each delta that stands on a file which no checkpoint shows any more.

    It becomes a delta against the nearest checkpoint of its chain that is still shown, or a keyframe where none is. So
    a run of deltas whose middle is forgotten merges into one. Memory: three states.
    """
    for step in scan(storage).visible:
        listing = scan(storage)
        listing.raise_unreadable()
        manifest = listing.visible[step]
        if all(chain.is_current(listing.visible, base) for base in manifest.bases):
            continue
        yield _rewrite(storage, manifest, _nearest_visible(listing, manifest), threads)


def _nearest_visible(listing: Listing, manifest: Manifest) -> Manifest | None:
    """The closest ancestor that is shown and holds the values it held when the delta was made (so says its id)."""
    for base in reversed(manifest.bases):
        other = listing.visible.get(base.step)
        if other is not None and other.id == base.id:
            return other
    return None


def _rewrite(storage: Storage, manifest: Manifest, parent: Manifest | None, threads: int | None) -> Rewrite:
    """Lossless whatever the scheme was: what is stored now is already what a reader gets."""
    below = decode_chain(chain.store_chain(storage, parent), threads=threads).reference if parent else None
    decoded = decode_chain(chain.store_chain(storage, manifest), threads=threads)
    with CheckpointTransaction(storage, scan(storage), manifest.step, parent, below) as pending:
        scheme = Recode(decoded.reference.quantized, manifest.loss, manifest.scheme)
        report = pending.add(_to_flat_state(decoded, manifest), scheme=scheme, threads=threads)
        return manifest, pending.commit(metadata_from=manifest), report


def _to_flat_state(decoded: DecodedFile, manifest: Manifest) -> FlatState:
    """The state again as a save sees it, with roles and optimizer facts found anew; shares the decoded memory."""
    return flatten(
        unflatten(
            decoded.tree, decoded.reference.tensors, where=f"step {manifest.step}", max_bytes=decoded.max_copy_bytes
        )
    )
