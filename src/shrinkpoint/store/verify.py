"""Is everything still there, and is it what was written? Answers are plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shrinkpoint.errors import NotFoundError, ShrinkpointError
from shrinkpoint.storage import Storage
from shrinkpoint.store import chain, layout
from shrinkpoint.store.listing import Listing, places, scan
from shrinkpoint.store.manifest import Base, Manifest
from shrinkpoint.store.prune import identity
from shrinkpoint.store.resolve import vouch


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        step: the checkpoint it concerns; None when it is none.
        where: a file or a directory.
        problem: what was found.
        do: what to do about it.
        loads: True when every checkpoint that is shown loads all the same.
    """

    step: int | None
    where: str
    problem: str
    do: str
    loads: bool = False


def verify(storage: Storage, *, deep: bool = False, threads: int | None = None) -> list[Finding]:
    """Check every checkpoint that is shown: manifest, headers and the digests of the stored bytes.

    Args:
        deep: decode everything too, check the digests of what was decoded, and make the states of it: what is not found
            here, loads.

    Raises:
        StorageError: the store cannot be listed.
    """
    listing = scan(storage)
    findings = list(_broken(storage, listing))
    check = _Check(storage)
    for manifest in listing.shown.values():
        findings += check.checkpoint(manifest)
    findings += _gone(storage, listing)
    if deep:
        findings += _undecodable(storage, listing, {one.step for one in findings if not one.loads}, threads)
    return findings + list(_litter(storage, listing))


class _Check:
    """Looks at each file once, under however many names it is met."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._seen: dict[object, ShrinkpointError | None] = {}

    def checkpoint(self, manifest: Manifest) -> Iterator[Finding]:
        for base in chain.files(manifest):
            errors = {key: self._error(key, manifest, base) for key in places(manifest, base)}
            loads = None in errors.values()
            for key, error in errors.items():
                missing = isinstance(error, NotFoundError)
                other_steps = missing and key == base.sibling_key and base.step != manifest.step
                if error is not None and not (loads and other_steps):  # `_gone` tells of those, once
                    yield self._finding(manifest, base, key, error, loads)

    def _finding(self, manifest: Manifest, base: Base, key: str, error: ShrinkpointError, loads: bool) -> Finding:
        what = "its payload" if base.step == manifest.step else f"its base from step {base.step}"
        problem = f"{what} is missing" if isinstance(error, NotFoundError) else f"{what}: {error}"
        do = f"`compact` step {manifest.step}" if loads else "restore another checkpoint; `forget` and `prune` this one"
        return Finding(manifest.step, self._storage.describe(key), problem, do, loads)

    def _error(self, key: str, manifest: Manifest, base: Base) -> ShrinkpointError | None:
        file = (identity(self._storage, key), base.digest)
        if file not in self._seen:
            try:
                with self._storage.open(key) as source:
                    damage = vouch(source, self._storage.describe(key), manifest, base).check()
                    self._seen[file] = next((finding.error for finding in damage), None)
            except ShrinkpointError as error:
                self._seen[file] = error
        return self._seen[file]


def _broken(storage: Storage, listing: Listing) -> Iterator[Finding]:
    for step, error in listing.broken.items():
        if step not in listing.forgotten:
            where = storage.describe(layout.manifest_key(step))
            yield Finding(step, where, str(error), f"restore another checkpoint; `forget` and `prune` step {step}")


def _gone(storage: Storage, listing: Listing) -> Iterator[Finding]:
    """Steps that are gone, or were saved again, under deltas that carry a link to what was there."""
    above: dict[Base, list[int]] = {}
    for manifest in listing.shown.values():
        for base in manifest.bases:
            if base.step not in listing.manifests and base.step not in listing.broken and base.name:
                above.setdefault(Base(base.step, base.id, base.digest, base.size, base.file), []).append(manifest.step)
    for base, steps in above.items():
        standing = ", ".join(map(str, steps))
        problem = f"step {base.step} is gone; deltas were made against it (steps {standing})"
        do = "nothing is lost while their own links stand; `compact` frees them of it"
        yield Finding(base.step, storage.describe(layout.directory(base.step)), problem, do, loads=True)


def _undecodable(storage: Storage, listing: Listing, known: set[int | None], threads: int | None) -> Iterator[Finding]:
    """Decode from the newest down; what lay on the way of a chain need not be decoded again."""
    from shrinkpoint.store.file import grow  # these need torch, and nothing else here
    from shrinkpoint.store.walk import walk

    proven: set[str] = set()
    for manifest in reversed(listing.shown.values()):
        if manifest.step in known or manifest.digest in proven:
            continue
        try:
            for base, decoded in walk(storage, manifest, threads=threads):
                grow(decoded, f"step {base.step}")
                proven.add(base.digest)
        except ShrinkpointError as error:
            do = f"restore another checkpoint; `forget` and `prune` step {manifest.step}"
            yield Finding(manifest.step, error.where, str(error), do)


def _litter(storage: Storage, listing: Listing) -> Iterator[Finding]:
    for key in listing.litter():
        yield Finding(None, storage.describe(key), "left by an interrupted save", "the next save sweeps it", loads=True)
