"""Writing checkpoints again, in place, so that fewer files stand below them."""

from __future__ import annotations

from collections.abc import Iterator

from shrinkpoint.schemes import Again
from shrinkpoint.state import FlatState, flatten, unflatten
from shrinkpoint.storage import Storage
from shrinkpoint.store import chain
from shrinkpoint.store.file import Decoded, SaveReport
from shrinkpoint.store.listing import Listing, scan
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.pending import Pending
from shrinkpoint.store.walk import decode_chain

Rewritten = tuple[Manifest, Manifest, SaveReport]
"""A checkpoint before, after, and what writing it again did."""


def to_keyframe(storage: Storage, manifest: Manifest, *, threads: int | None = None) -> Rewritten:
    """Write a delta again as a keyframe; what was made against the delta keeps standing on its old file.

    Raises:
        ChainError, FormatError: it does not load; nothing is changed.
        StorageError: reading or writing failed; the checkpoint is whole, as it was or as a keyframe.
    """
    return _rewrite(storage, manifest, None, threads)


def to_merged(storage: Storage, *, threads: int | None = None) -> Iterator[Rewritten]:
    """Write again each delta that stands on a file which no checkpoint shows any more.

    It becomes a delta against the nearest checkpoint of its chain that is still shown, or a keyframe where none is. So
    a run of deltas whose middle is forgotten merges into one. Memory: three states.
    """
    for step in scan(storage).shown:
        listing = scan(storage)
        listing.insist()
        manifest = listing.shown[step]
        if all(chain.is_live(listing.shown, base) for base in manifest.bases):
            continue
        yield _rewrite(storage, manifest, _nearest(listing, manifest), threads)


def _nearest(listing: Listing, manifest: Manifest) -> Manifest | None:
    """The closest ancestor that is shown and holds the values it held when the delta was made (so says its id)."""
    for base in reversed(manifest.bases):
        other = listing.shown.get(base.step)
        if other is not None and other.id == base.id:
            return other
    return None


def _rewrite(storage: Storage, manifest: Manifest, parent: Manifest | None, threads: int | None) -> Rewritten:
    """Lossless whatever the scheme was: what is stored now is already what a reader gets."""
    below = decode_chain(storage, parent, threads=threads).reference if parent else None
    decoded = decode_chain(storage, manifest, threads=threads)
    with Pending(storage, scan(storage), manifest.step, parent, below) as pending:
        scheme = Again(decoded.reference.symbols, manifest.loss, manifest.scheme)
        report = pending.add(_flat(decoded, manifest), scheme=scheme, threads=threads)
        return manifest, pending.commit(like=manifest), report


def _flat(decoded: Decoded, manifest: Manifest) -> FlatState:
    """The state again as a save sees it, with roles and optimizer facts found anew; shares the decoded memory."""
    return flatten(
        unflatten(decoded.tree, decoded.reference.tensors, where=f"step {manifest.step}", max_bytes=decoded.left)
    )
