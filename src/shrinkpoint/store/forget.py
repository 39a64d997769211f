"""Hide a checkpoint without deleting anything (no torch)."""

from __future__ import annotations

from shrinkpoint.storage import Storage
from shrinkpoint.store import layout
from shrinkpoint.store.listing import Listing


def forget(storage: Storage, listing: Listing, step: int) -> None:
    """Mark a step of `listing` as forgotten. Only the holder of the store's lock may.

    The mark names the checkpoint it hides, so that the step, saved again, shows again.

    Raises:
        StorageError: writing failed.
    """
    mark = listing.manifests[step].id if step in listing.manifests else "broken"
    storage.put(layout.forgotten_key(step), mark.encode())
