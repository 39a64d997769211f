"""What stands in a store, found by listing it: there is no index that could be wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shrinkpoint.errors import CorruptError, FormatError, NotFoundError, ShrinkpointError, VersionError
from shrinkpoint.storage import Storage
from shrinkpoint.store import layout
from shrinkpoint.store.chain import candidate_keys
from shrinkpoint.store.digest_json import MAX_MANIFEST_BYTES
from shrinkpoint.store.manifest import Manifest, decode_store_manifest


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
        manifests: every checkpoint whose manifest is readable, by step, rising; the forgotten too.
        forgotten: the steps that are hidden.
        broken: why a manifest that exists cannot be read, by step.
        keys: every key in every step's directory.
    """

    manifests: dict[int, Manifest]
    forgotten: frozenset[int]
    broken: dict[int, ShrinkpointError]
    keys: frozenset[str]

    @property
    def visible(self) -> dict[int, Manifest]:
        """The checkpoints that are not forgotten."""
        return {step: one for step, one in self.manifests.items() if step not in self.forgotten}

    def raise_unreadable(self) -> None:
        """Refuse to go on where nobody can say what stands on what.

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
        """The keys of the checkpoints in `steps`, and of what they stand on where they have no link of their own."""
        return frozenset(key for step in steps for key in self._keys_of(self.manifests[step]))

    def _keys_of(self, manifest: Manifest) -> Iterator[str]:
        yield layout.manifest_key(manifest.step)
        yield layout.forgotten_key(manifest.step)
        yield from (manifest.key(payload.name) for payload in manifest.payloads)
        for base in manifest.bases:
            own, *siblings = candidate_keys(manifest, base)
            yield own if own in self.keys else (siblings or [own])[0]

    def orphans(self) -> list[str]:
        """Keys that no checkpoint needs: what interrupted saves left, and payloads that were replaced.

        A directory with a broken manifest is left as it is. Where links are impossible, or a newer release has
        written, a broken manifest might be all that tells which old payloads are still needed: then nothing is litter.
        """
        newer = any(isinstance(error, VersionError) for error in self.broken.values())
        if newer or (self.broken and not any("/bases/" in key for key in self.keys)):
            return []
        needed = self.referenced_keys(self.manifests)
        return sorted(key for key in self.keys - needed if layout.step_of(key) not in self.broken)


def scan(storage: Storage) -> Listing:
    """List a store and read its manifests; no payload is opened.

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
            marked = layout.forgotten_key(step) in keys and _is_hidden(storage, manifests[step])
        except NotFoundError as error:
            if layout.manifest_key(step) not in storage.list(layout.manifest_key(step)):
                continue  # deleted since the list was made
            # A pipe, or a link to nothing: whoever put it there, the payload beside it may be needed.
            manifests.pop(step, None)
            broken[step], marked = error, layout.forgotten_key(step) in keys
        except ShrinkpointError as error:
            manifests.pop(step, None)
            broken[step], marked = error, layout.forgotten_key(step) in keys
        if marked:
            forgotten.add(step)
    return Listing(manifests, frozenset(forgotten), broken, keys)


def read_manifest(storage: Storage, step: int) -> Manifest:
    """The manifest of one step.

    Raises:
        NotFoundError: there is none.
        FormatError: it is not to be trusted, or stands in another step's directory.
        StorageError: it cannot be read.
    """
    key = layout.manifest_key(step)
    where = storage.describe(key)
    with storage.open(key) as source:
        if source.size > MAX_MANIFEST_BYTES:
            found, expected = f"{source.size} bytes", f"at most {MAX_MANIFEST_BYTES}"
            raise CorruptError(where, found=found, expected=expected, do="restore another checkpoint")
        manifest = decode_store_manifest(bytes(source.read(0, source.size)), where)
    if manifest.step != step:
        found, expected = f"the manifest of step {manifest.step}", f"that of step {step}"
        raise CorruptError(where, found=found, expected=expected, do="give a copied directory its own step's name back")
    return manifest


def _is_hidden(storage: Storage, manifest: Manifest) -> bool:
    """Whether the marker hides this very checkpoint, and not one that had its step before."""
    try:
        with storage.open(layout.forgotten_key(manifest.step)) as source:
            id = manifest.id.encode("utf-8", "surrogatepass")
            return source.size == len(id) and bytes(source.read(0, source.size)) == id
    except NotFoundError:
        return False


def forget(storage: Storage, listing: Listing, step: int) -> None:
    """Mark a step of `listing` as forgotten. Only the holder of the store's lock may.

    The mark names the checkpoint it hides, so that the step, saved again, shows again.

    Raises:
        StorageError: writing failed.
    """
    mark = listing.manifests[step].id if step in listing.manifests else "broken"
    storage.put(layout.forgotten_key(step), mark.encode())
