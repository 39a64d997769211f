"""Decode a checkpoint: from its keyframe, delta by delta, to the step that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from shrinkpoint.codec import Reference
from shrinkpoint.storage import Storage
from shrinkpoint.store import chain
from shrinkpoint.store.allowance import Allowance
from shrinkpoint.store.file import Decoded, decode_records
from shrinkpoint.store.manifest import Base, Manifest
from shrinkpoint.store.resolve import resolve


def decode_chain(
    storage: Storage, manifest: Manifest, *, threads: int | None = None, max_bytes: int | None = None
) -> Decoded:
    """Decode the payload of `manifest`; at most two states are in memory at a time.

    Args:
        max_bytes: as of `Allowance`.

    Raises:
        ChainError: a base is missing, or none found is the one the delta was made against.
        FormatError: bytes are at fault.
        StorageError: reading failed.
    """
    for _, decoded in walk(storage, manifest, threads=threads, max_bytes=max_bytes):
        last = decoded
    return last


def walk(
    storage: Storage, manifest: Manifest, *, threads: int | None = None, max_bytes: int | None = None
) -> Iterator[tuple[Base, Decoded]]:
    """Every file of the chain with its content, keyframe first; raises as `decode_chain` does."""
    reference: Reference | None = None
    allowance = Allowance(max_bytes)
    for base in chain.files(manifest):
        read = partial(decode_records, reference=reference, threads=threads, allowance=allowance)
        decoded = resolve(storage, manifest, base, read)
        reference = decoded.reference
        yield base, decoded
