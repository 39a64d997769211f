"""Deletes checkpoints that nothing kept depends on: first a plan, which can be shown, then its execution."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from shrinkpoint.errors import NotFoundError
from shrinkpoint.storage import LocalStorage, Storage
from shrinkpoint.store import layout
from shrinkpoint.store.listing import Listing
from shrinkpoint.store.retention import Keep, apply_policy, check_metric


@dataclass(frozen=True)
class PrunePlan:
    """What a prune deletes, and why.

    Attributes:
        delete, keep: steps, rising.
        bytes: what the deletion frees; a file with a hard link elsewhere frees nothing.
        reasons: by step, sentences that say why it is kept or deleted.
        keys: what is deleted, in this order: manifests first, so that no crash leaves one without its payload.
    """

    delete: tuple[int, ...]
    keep: tuple[int, ...]
    bytes: int
    reasons: dict[int, tuple[str, ...]]
    keys: tuple[str, ...]


def plan(storage: Storage, listing: Listing, keep: Keep, now: datetime) -> PrunePlan:
    """Decide what to delete; nothing is deleted.

    Raises:
        PolicyError: the best are to be kept by a metric that no checkpoint has.
        StorageError: a manifest cannot be read now, so its bases are unknown.
        VersionError: a newer release wrote one.
    """
    listing.raise_unreadable()
    check_metric(listing.visible.values(), keep)
    decision = apply_policy(listing.manifests.values(), keep, now, forgotten=listing.forgotten)
    broken = {step for step in listing.broken if step in listing.forgotten}
    reasons = {**decision.reasons, **dict.fromkeys(broken, ("forgotten, and its manifest is broken",))}
    drop = sorted({*decision.drop, *broken})
    keys = _keys(listing, decision.keep, drop)
    return PrunePlan(
        tuple(drop), decision.keep, reclaimable_bytes(storage, listing, keys), dict(sorted(reasons.items())), keys
    )


def execute(storage: Storage, plan: PrunePlan) -> None:
    """Delete the keys of a plan. A crash leaves intact checkpoints, and orphaned files that the next save removes.

    Raises:
        StorageError: deleting failed.
    """
    for key in plan.keys:
        storage.delete(key)


def _keys(listing: Listing, keep: Iterable[int], drop: list[int]) -> tuple[str, ...]:
    manifests = [layout.manifest_key(step) for step in reversed(drop)]  # a delta goes before its bases
    needed = listing.referenced_keys(tuple(keep))
    unreadable = {step for step in listing.broken if step not in drop}
    others = sorted(key for key in listing.keys - needed - set(manifests) if layout.step_of(key) not in unreadable)
    return (*manifests, *others)


def reclaimable_bytes(storage: Storage, listing: Listing, keys: Iterable[str]) -> int:
    """The bytes that deleting `keys` frees; a file with several names counts if all of them are deleted."""
    deleted = set(keys)
    names: dict[object, int] = {}
    total: dict[object, tuple[int, int]] = {}
    digests = dict(_digests(listing))
    for key in deleted:
        with suppress(NotFoundError, FileNotFoundError):
            file, links, size = _file_identity(storage, key, digests)
            links = links or sum(digests.get(other) == file for other in listing.keys)
            names[file] = names.get(file, 0) + 1
            total[file] = (links, size)
    return sum(size for file, (links, size) in total.items() if names[file] >= links)


def inode_key(storage: Storage, key: str) -> object:
    """Equal for two keys only if they are the same file."""
    if isinstance(storage, LocalStorage):
        with suppress(OSError):
            status = Path(storage.describe(key)).stat()
            return status.st_dev, status.st_ino
    return key


def _file_identity(storage: Storage, key: str, digests: dict[str, str]) -> tuple[object, int, int]:
    """(identity of the file, number of its names or 0 if only the listing knows that, size in bytes)."""
    if isinstance(storage, LocalStorage):
        status = Path(storage.describe(key)).stat()
        return (status.st_dev, status.st_ino), status.st_nlink, status.st_size
    with storage.open(key) as source:
        return (digests[key], 0, source.size) if key in digests else (key, 1, source.size)


def _digests(listing: Listing) -> Iterable[tuple[str, str]]:
    """(key, header digest) of every payload and link that a manifest names; equal digests share bytes."""
    for manifest in listing.manifests.values():
        yield from ((manifest.key(payload.name), payload.digest) for payload in manifest.payloads)
        yield from ((manifest.key(base.name), base.digest) for base in manifest.bases if base.name)
