"""Is everything still there, and is it what was written? Answers are plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shrinkpoint.errors import NotFoundError, ShrinkpointError
from shrinkpoint.storage import Storage
from shrinkpoint.store import chain, layout
from shrinkpoint.store.chain import ChainFile
from shrinkpoint.store.listing import Listing, scan
from shrinkpoint.store.manifest import ChainLink, Manifest
from shrinkpoint.store.prune import inode_key


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
    findings = list(_broken_manifests(storage, listing))
    check = _FileChecker(storage)
    for manifest in listing.visible.values():
        findings += check.findings_of(manifest)
    findings += _missing_bases(storage, listing)
    if deep:
        findings += _decode_failures(storage, listing, {one.step for one in findings if not one.loads}, threads)
    return findings + list(_orphan_findings(storage, listing))


class _FileChecker:
    """Looks at each file once, under however many names it is met."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._results: dict[object, ShrinkpointError | None] = {}

    def findings_of(self, manifest: Manifest) -> Iterator[Finding]:
        for base, file in zip(chain.chain_links(manifest), chain.store_chain(self._storage, manifest), strict=True):
            errors = {key: self._error(key, file) for key in file.keys}
            loads = None in errors.values()
            for key, error in errors.items():
                missing = isinstance(error, NotFoundError)
                other_steps = missing and key == base.sibling_key and base.step != manifest.step
                if error is not None and not (loads and other_steps):  # `_missing_bases` tells of those, once
                    yield self._finding(manifest, base, key, error, loads)

    def _finding(self, manifest: Manifest, base: ChainLink, key: str, error: ShrinkpointError, loads: bool) -> Finding:
        what = "its payload" if base.step == manifest.step else f"its base from step {base.step}"
        problem = f"{what} is missing" if isinstance(error, NotFoundError) else f"{what}: {error}"
        do = f"`compact` step {manifest.step}" if loads else "restore another checkpoint; `forget` and `prune` this one"
        return Finding(manifest.step, self._storage.describe(key), problem, do, loads)

    def _error(self, key: str, file: ChainFile) -> ShrinkpointError | None:
        identity = (inode_key(self._storage, key), file.digest)
        if identity not in self._results:
            try:
                with self._storage.open(key) as source:
                    damage = file.verify(source, self._storage.describe(key)).check()
                    self._results[identity] = next((finding.error for finding in damage), None)
            except ShrinkpointError as error:
                self._results[identity] = error
        return self._results[identity]


def _broken_manifests(storage: Storage, listing: Listing) -> Iterator[Finding]:
    for step, error in listing.broken.items():
        if step not in listing.forgotten:
            where = storage.describe(layout.manifest_key(step))
            yield Finding(step, where, str(error), f"restore another checkpoint; `forget` and `prune` step {step}")


def _missing_bases(storage: Storage, listing: Listing) -> Iterator[Finding]:
    """Steps that are gone, or were saved again, under deltas that carry a link to what was there."""
    above: dict[ChainLink, list[int]] = {}
    for manifest in listing.visible.values():
        for base in manifest.bases:
            if base.step not in listing.manifests and base.step not in listing.broken and base.name:
                above.setdefault(ChainLink(base.step, base.id, base.digest, base.size, base.file), []).append(
                    manifest.step
                )
    for base, steps in above.items():
        standing = ", ".join(map(str, steps))
        problem = f"step {base.step} is gone; deltas were made against it (steps {standing})"
        do = "nothing is lost while their own links stand; `compact` frees them of it"
        yield Finding(base.step, storage.describe(layout.step_dir(base.step)), problem, do, loads=True)


def _decode_failures(
    storage: Storage, listing: Listing, failed_steps: set[int | None], threads: int | None
) -> Iterator[Finding]:
    """Decode from the newest down; what lay on the way of a chain need not be decoded again."""
    from shrinkpoint.store.checkpoint_file import build_state  # these need torch, and nothing else here
    from shrinkpoint.store.decode import iter_chain

    proven: set[str] = set()
    for manifest in reversed(listing.visible.values()):
        if manifest.step in failed_steps or manifest.digest in proven:
            continue
        try:
            for file, decoded in iter_chain(chain.store_chain(storage, manifest), threads=threads):
                build_state(decoded, f"step {file.step}")
                proven.add(file.digest)
        except ShrinkpointError as error:
            do = f"restore another checkpoint; `forget` and `prune` step {manifest.step}"
            yield Finding(manifest.step, error.where, str(error), do)


def _orphan_findings(storage: Storage, listing: Listing) -> Iterator[Finding]:
    for key in listing.orphans():
        yield Finding(None, storage.describe(key), "left by an interrupted save", "the next save sweeps it", loads=True)
