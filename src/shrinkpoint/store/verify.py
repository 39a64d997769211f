"""Verifies a store: every file exists and holds what was written. Findings are plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from shrinkpoint.errors import NotFoundError, ShrinkpointError
from shrinkpoint.progress import Task, track
from shrinkpoint.storage import Storage
from shrinkpoint.store import chain, layout
from shrinkpoint.store.chain import ChainFile
from shrinkpoint.store.listing import Listing, read_step, scan
from shrinkpoint.store.manifest import ChainLink, Manifest
from shrinkpoint.store.retention import inode_key
from shrinkpoint.store.step_storage import StepStorage


@dataclass(frozen=True)
class Finding:
    """One problem of a store.

    Attributes:
        step: of the checkpoint; None if it concerns none.
        where: a file or a directory.
        problem: in words.
        do: what to do about it.
        loads: every visible checkpoint loads nevertheless.
    """

    step: int | None
    where: str
    problem: str
    do: str
    loads: bool = False


def verify(storage: Storage, *, deep: bool = False, threads: int | None = None) -> list[Finding]:
    """Check manifest, headers and the digests of the stored bytes of every visible checkpoint.

    Args:
        deep: also decode everything, compare the digests of the decoded values, and build the states: a checkpoint
            without a finding loads.
        threads: native threads for decoding; None: every core.

    Raises:
        StorageError: the store cannot be listed.
    """
    listing = scan(storage)
    findings: list[Finding] = []
    for step, error in listing.broken.items():
        if step not in listing.forgotten:
            where = error.where or storage.describe(layout.manifest_key(step))
            do = f"restore another checkpoint; `forget` and `prune` step {step}"
            findings.append(Finding(step, where, str(error), do))
    checker = _FileChecker(storage)
    stored_bytes = sum(manifest.stored_bytes for manifest in listing.visible.values())
    with Task(f"reading {storage.describe()}", stored_bytes, "bytes") as task:
        for manifest in listing.visible.values():
            findings += _find_in_current(storage, manifest, checker.findings)
            task.advance(manifest.stored_bytes)
    if not isinstance(storage, StepStorage):
        findings += _missing_bases(storage, listing)
    if deep:
        failed_steps = {finding.step for finding in findings if not finding.loads}
        findings += _decode_failures(storage, listing, failed_steps, threads)
    problem, do = "left by an interrupted save", "the next save removes it"
    orphans = listing.orphans()
    if orphans:  # others are of saves that are complete by now, or are deleted
        orphans = sorted({*orphans} & {*scan(storage).orphans()})
    return findings + [Finding(None, storage.describe(key), problem, do, loads=True) for key in orphans]


def _find_in_current(
    storage: Storage, manifest: Manifest, check: Callable[[Manifest], Iterable[Finding]]
) -> list[Finding]:
    """The findings of a checkpoint; of the present one, if it was written again or deleted meanwhile."""
    findings: list[Finding] = []
    for _ in range(chain.MAX_READS):
        findings = [*check(manifest)]
        if not findings:
            break
        entry = read_step(storage, manifest.step)
        if entry is None or not entry.is_visible:
            return []
        if entry.manifest is None or chain.manifest_identity(entry.manifest) == chain.manifest_identity(manifest):
            break
        manifest = entry.manifest
    return findings


class _FileChecker:
    """Checks each file once, even if it has several names."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._results: dict[object, ShrinkpointError | None] = {}

    def findings(self, manifest: Manifest) -> Iterator[Finding]:
        for base, file in zip(chain.chain_links(manifest), chain.store_chain(self._storage, manifest), strict=True):
            errors = {key: self._error(key, file) for key in file.keys}
            loads = None in errors.values()
            for key, error in errors.items():
                missing = isinstance(error, NotFoundError)
                other_steps = missing and key == base.sibling_key and base.step != manifest.step
                if error is None or (loads and other_steps):  # `_missing_bases` reports those once
                    continue
                what = "its payload" if base.step == manifest.step else f"its base from step {base.step}"
                problem = f"{what} is missing" if missing else f"{what}: {error}"
                do = f"`compact` step {manifest.step}"
                if not loads:
                    do = "restore another checkpoint; `forget` and `prune` this one"
                yield Finding(manifest.step, self._storage.describe(key), problem, do, loads)

    def _error(self, key: str, file: ChainFile) -> ShrinkpointError | None:
        identity = (inode_key(self._storage, key), file.digest)
        if identity not in self._results:
            try:
                with self._storage.open(key) as source:
                    self._results[identity] = next(file.verify(source, self._storage.describe(key)).check(), None)
            except NotFoundError as error:  # it may be there for another checkpoint, or a moment later
                return error
            except ShrinkpointError as error:
                self._results[identity] = error
        return self._results[identity]


def _missing_bases(storage: Storage, listing: Listing) -> Iterator[Finding]:
    """Steps that were deleted or saved again, while deltas still have a link to the old file."""
    dependents: dict[ChainLink, list[int]] = {}
    for manifest in listing.visible.values():
        for base in manifest.bases:
            if base.step not in listing.manifests and base.step not in listing.broken and base.name:
                dependents.setdefault(replace(base, name=""), []).append(manifest.step)
    for base, steps in dependents.items():
        numbers = ", ".join(map(str, steps))
        problem = f"step {base.step} is gone; steps {numbers} are deltas that need it"
        do = "nothing is lost while they have their own links; `compact` makes them independent of this step"
        yield Finding(base.step, storage.describe(layout.step_dir(base.step)), problem, do, loads=True)


def _decode_failures(
    storage: Storage, listing: Listing, failed_steps: set[int | None], threads: int | None
) -> Iterator[Finding]:
    """Decode from the newest checkpoint backwards; what was decoded on the way is not decoded again."""
    from shrinkpoint.store.checkpoint_file import build_state  # these need torch, and nothing else here
    from shrinkpoint.store.decode import iter_chain

    proven: set[tuple[str, ...]] = set()  # chains: the same file may not decode after other bases, or after none

    def decode(manifest: Manifest) -> Iterator[Finding]:
        files = chain.store_chain(storage, manifest)
        digests = tuple(file.digest for file in files)
        if digests in proven:
            return
        try:
            for count, (file, decoded) in enumerate(iter_chain(files, threads=threads), start=1):
                build_state(decoded, f"step {file.step}")
                proven.add(digests[:count])
        except ShrinkpointError as error:
            do = f"restore another checkpoint; `forget` and `prune` step {manifest.step}"
            yield Finding(manifest.step, error.where, str(error), do)

    for manifest in track([*reversed(listing.visible.values())], f"decoding {storage.describe()}"):
        if manifest.step not in failed_steps:
            yield from _find_in_current(storage, manifest, decode)
