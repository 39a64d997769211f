"""Finds the checkpoints of a store by listing its keys: there is no index that could be wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shrinkpoint.errors import CorruptError, FormatError, NotFoundError, ShrinkpointError, VersionError
from shrinkpoint.storage import Storage
from shrinkpoint.store import layout
from shrinkpoint.store.chain import candidate_keys
from shrinkpoint.store.manifest import MAX_MANIFEST_BYTES, Manifest, decode_store_manifest, read_limited


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that a restore passed over.

    Attributes:
        reason: why it does not load.
        step: its step in a store; None in a framework's run.
        directory: its directory in a framework's run; None in a store.
        error: why, as an exception; None if several processes had one each.
    """

    reason: str
    step: int | None = None
    directory: Path | None = None
    error: Exception | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Listing:
    """A store at one moment.

    Attributes:
        manifests: every readable manifest by step, rising, forgotten checkpoints included.
        forgotten: steps of checkpoints that are hidden until `prune` deletes them.
        broken: by step, why a manifest that exists cannot be read.
        keys: every key in every step's directory.
    """

    manifests: dict[int, Manifest]
    forgotten: frozenset[int]
    broken: dict[int, ShrinkpointError]
    keys: frozenset[str]

    @property
    def visible(self) -> dict[int, Manifest]:
        """The checkpoints that are not forgotten."""
        return {step: manifest for step, manifest in self.manifests.items() if step not in self.forgotten}

    def raise_unreadable(self) -> None:
        """Raise if an unreadable manifest hides which files other checkpoints depend on.

        Raises:
            StorageError: a manifest cannot be read now.
            VersionError: a newer release wrote one.
        """
        for step, error in self.broken.items():
            if step not in self.forgotten and (isinstance(error, VersionError) or not isinstance(error, FormatError)):
                raise error

    def file_names(self, step: int) -> frozenset[str]:
        """The names in the directory of `step`, relative to it."""
        head = layout.step_dir(step) + "/"
        return frozenset(key[len(head) :] for key in self.keys if key.startswith(head))

    def referenced_keys(self, steps: Collection[int]) -> frozenset[str]:
        """The keys of the checkpoints in `steps`, and of their bases where they have no link of their own."""
        return frozenset(key for step in steps for key in self._keys_of(self.manifests[step]))

    def _keys_of(self, manifest: Manifest) -> Iterator[str]:
        yield layout.manifest_key(manifest.step)
        yield layout.forgotten_key(manifest.step)
        yield from (manifest.key(payload.name) for payload in manifest.payloads)
        for base in manifest.bases:
            own, *siblings = candidate_keys(manifest, base)
            yield own if own in self.keys else (siblings or [own])[0]

    def orphans(self) -> list[str]:
        """Keys of orphaned files: those of interrupted saves, and payloads that were replaced.

        Files beside a broken manifest are not orphaned. In a storage without links, or where a newer release has
        written, a manifest that cannot be read may name any payload: then there are no orphans.
        """
        newer = any(isinstance(error, VersionError) for error in self.broken.values())
        if newer or (self.broken and not any("/bases/" in key for key in self.keys)):
            return []
        needed = self.referenced_keys(self.manifests)
        return sorted(key for key in self.keys - needed if layout.step_of(key) not in self.broken)


def scan(storage: Storage) -> Listing:
    """List a store and read its manifests; payloads are not opened.

    Raises:
        StorageError: the store cannot be listed. (A manifest that cannot be read is in `broken` instead.)
    """
    keys = frozenset(key for key in storage.list("") if layout.step_of(key) is not None)
    manifests: dict[int, Manifest] = {}
    broken: dict[int, ShrinkpointError] = {}
    forgotten: set[int] = set()
    for step in sorted({step for key in keys if (step := layout.step_of(key)) is not None}):
        if layout.manifest_key(step) not in keys:
            continue
        try:
            manifests[step] = read_manifest(storage, step)
            is_hidden = layout.forgotten_key(step) in keys and _is_hidden(storage, manifests[step])
        except ShrinkpointError as error:
            key = layout.manifest_key(step)
            if isinstance(error, NotFoundError) and key not in storage.list(key):
                continue  # deleted since the keys were listed; not a pipe, or a link to nothing
            manifests.pop(step, None)
            broken[step], is_hidden = error, layout.forgotten_key(step) in keys
        if is_hidden:
            forgotten.add(step)
    return Listing(manifests, frozenset(forgotten), broken, keys)


def read_manifest(storage: Storage, step: int) -> Manifest:
    """The manifest of one step.

    Raises:
        NotFoundError: there is none.
        FormatError: it is damaged, or is in another step's directory.
        StorageError: it cannot be read.
    """
    key = layout.manifest_key(step)
    where = storage.describe(key)
    manifest = decode_store_manifest(read_limited(storage, key, MAX_MANIFEST_BYTES), where)
    if manifest.step != step:
        found, do = f"the manifest of step {manifest.step}", "give a copied directory its own step's name back"
        raise CorruptError(where, found=found, expected=f"that of step {step}", do=do)
    return manifest


def _is_hidden(storage: Storage, manifest: Manifest) -> bool:
    """Whether the marker hides this checkpoint, and not an earlier one of the same step."""
    try:
        with storage.open(layout.forgotten_key(manifest.step)) as source:
            id = manifest.id.encode("utf-8", "surrogatepass")
            return source.size == len(id) and bytes(source.read(0, source.size)) == id
    except NotFoundError:
        return False


def forget(storage: Storage, listing: Listing, step: int) -> None:
    """Mark a step as forgotten; the caller holds the store's lock.

    The mark names the checkpoint by its id, so that the step is visible again once it is saved again.

    Raises:
        StorageError: writing failed.
    """
    mark = listing.manifests[step].id if step in listing.manifests else "broken"
    storage.put(layout.forgotten_key(step), mark.encode())
