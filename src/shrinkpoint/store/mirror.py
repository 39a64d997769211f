"""A second place of a store's checkpoints, which is a store itself at every moment. No torch.

A checkpoint is copied file by file, those that it depends on first, and its manifest last. Files have other names there
where those they have are taken, and no links: the manifest that is written says where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone

from shrinkpoint.container import FileReader
from shrinkpoint.errors import FormatError, PolicyError, ShrinkpointError
from shrinkpoint.storage import LocalStorage, Source, Storage, copy_object
from shrinkpoint.store import chain, layout
from shrinkpoint.store.chain import ChainFile
from shrinkpoint.store.history import oldest_first, place_of
from shrinkpoint.store.identify import refuse_run
from shrinkpoint.store.listing import Lister, Listing, StepDirectory, forget, put_manifest, scan
from shrinkpoint.store.manifest import Manifest, encode_store_manifest
from shrinkpoint.store.retention import Keep, apply_policy, check_metric, plan_deletion

_log = logging.getLogger("shrinkpoint")
_MAX_REPLACED = 64  # Replaced checkpoints of a step that a mirror remembers


class UnreadableError(Exception):
    """A file of a checkpoint that is to be copied cannot be read, or is damaged."""

    def __init__(self, error: ShrinkpointError) -> None:
        super().__init__(str(error))
        self.error = error


class Mirror:
    """Copies the checkpoints of a store to another place.

    The caller holds the lock of the other place from `begin` on, and calls one method at a time.

    Args:
        source: the storage of the store.
        target: where its checkpoints are copied to.
        keep: which checkpoints to keep there; None keeps all.

    Raises:
        PolicyError: one place is within the other.
    """

    def __init__(self, source: Storage, target: Storage, keep: Keep | None = None) -> None:
        _check_apart(source, target)
        self.source, self.target = source, target
        self._keep = keep
        self._lister = Lister(source)
        self._content = Listing({})  # of the target
        self._has_begun = False
        self._superseded: set[str] = set()  # ids of checkpoints that another writer has replaced in the target
        self._unreadable: set[str] = set()  # digests of checkpoints that cannot be copied

    def begin(self) -> None:
        """Read what is in the target; again whenever a call has failed.

        Raises:
            MismatchError: a framework has saved there.
            StorageError: it cannot be listed, or a manifest cannot be read now.
            VersionError: a newer release has written there.
        """
        refuse_run(self.target)
        content = scan(self.target)
        content.raise_unreadable()
        if self._has_begun:
            self._note_others(content)
        self._content, self._has_begun = content, True

    def _note_others(self, content: Listing) -> None:
        """Leave steps as they are that another process has committed since the last look.

        That process has taken the target's lock, so that this one has stood still since then: its checkpoint of the
        same step, if there is one by now, is the older one.
        """
        for step, mine in self._lister.scan().visible.items():
            before, now = (listing.manifests.get(step) for listing in (self._content, content))
            if now is not None and now.id != mine.id and (before is None or now.id != before.id):
                self._superseded.add(mine.id)
                text = "%s: another process has saved step %d there while this one stood still: that one stays"
                _log.warning(text, self.target.describe(), step)

    def missing(self) -> Sequence[Manifest]:
        """The checkpoints that are to be copied, oldest first; raises StorageError if the store cannot be listed."""
        now = datetime.now(timezone.utc)
        manifests = select_missing(self._lister.scan(), self._content, self._keep, now)
        return [
            manifest
            for manifest in manifests
            if manifest.digest not in self._unreadable and manifest.id not in self._superseded
        ]

    def find_newer(self) -> tuple[Manifest, Manifest | None] | None:
        """The newest checkpoint of the store, and one of another run in the target that a restore prefers to it.

        Returns:
            None if the store has no checkpoint yet; in place of the second one, None if the target has none such.
        """
        mine = self._lister.scan().visible.values()
        if not mine:
            return None
        ids = {manifest.id for manifest in mine}
        newest = oldest_first([*self._content.visible.values(), *mine], place_of)[-1]
        return oldest_first(mine, place_of)[-1], None if newest.id in ids else newest

    def copy(self, manifest: Manifest) -> bool:
        """Copy a checkpoint, with what it depends on.

        Returns:
            False if it cannot be read: it was deleted meanwhile, or is damaged, which is logged.

        Raises:
            StorageError: the target cannot be read or written.
            LockedError: another process has taken the target's lock.
        """
        try:
            placed = self._copy_files(manifest)
        except UnreadableError as unreadable:
            if manifest.digest in {other.digest for other in self._lister.scan().visible.values()}:
                self._unreadable.add(manifest.digest)
                _log.warning("step %d is not copied to %s: %s", manifest.step, self.target.describe(), unreadable.error)
            return False
        # The ids of the checkpoints that a copy replaces
        copy = self._content.manifests.get(manifest.step)
        ids = () if copy is None else (*copy.replaced, copy.id)
        placed = replace(placed, replaced=tuple(id for id in dict.fromkeys(ids) if id != manifest.id)[-_MAX_REPLACED:])
        put_manifest(self.target, placed, encode_store_manifest(placed))
        names = self._content.file_names(manifest.step) | {layout.MANIFEST}
        self._content = self._content.replace(manifest.step, StepDirectory(manifest.step, names, placed))
        return True

    def tidy(self) -> None:
        """Hide what is forgotten in the store, and delete what `keep` does not keep.

        Raises:
            StorageError: the target cannot be written.
            LockedError: another process has taken the target's lock.
        """
        if self._content.broken:  # one may depend on any file
            return
        local = self._lister.scan()
        for step in sorted(local.forgotten - self._content.forgotten):
            mine, copy = local.manifests.get(step), self._content.manifests.get(step)
            if mine is not None and copy is not None and mine.id == copy.id:
                forget(self.target, self._content, step)
                self._content = self._content.with_files(step, (layout.FORGOTTEN,), is_forgotten=True)
        keep = _effective_keep(self._keep, self._content.visible)
        plan = plan_deletion(self._content, keep, datetime.now(timezone.utc))
        for key in plan.keys:
            self.target.delete(key)
        self._content = self._content.without(plan.keys)

    def _copy_files(self, manifest: Manifest) -> Manifest:
        """Copy the files of a checkpoint that the target lacks; returns its manifest with their places there."""
        files = chain.store_chain(self.source, manifest)
        placed, places = self._place_files(manifest)
        known = {key for key, is_missing in places if not is_missing}
        if known and not known <= {*self.target.list()}:  # somebody has deleted some of them
            self.begin()
            placed, places = self._place_files(manifest)
        for file, (key, is_missing) in zip(files, places, strict=True):
            if is_missing:
                with _open_intact(file) as source:
                    copy_object(source, self.target, key)
            if key not in self._content:
                head, _, name = key.partition("/")
                step = layout.step_of_dir(head)
                assert step is not None
                self._content = self._content.with_files(step, (name,))
        return placed

    def _place_files(self, manifest: Manifest) -> tuple[Manifest, list[tuple[str, bool]]]:
        """Find a place for each file of a checkpoint's chain, in the directory of the step it belongs to.

        No file that is there is ever written over.

        Returns:
            The manifest as it is written to the target; and for each file of the chain, keyframe first, its key there,
            and whether it is to be copied.
        """
        content = self._content
        digests: dict[str, str] = {}  # of the files that manifests name there, by key
        for entry in content.directories.values():
            for base in entry.manifest.bases if entry.manifest is not None else ():
                if base.name not in entry.names:
                    digests[base.sibling_key] = base.digest
        for other in content.manifests.values():
            digests.update({other.key(payload.name): payload.digest for payload in other.payloads})
        links, places = [], []
        for link in chain.chain_links(manifest):
            head = layout.step_dir(link.step)
            names = sorted(content.file_names(link.step), key=lambda name: name != link.file)
            keys = {name: f"{head}/{name}" for name in names if layout.PAYLOAD.fullmatch(name)}
            name = next((name for name, key in keys.items() if digests.get(key) == link.digest), None)
            if name is None:
                free = (name for name, key in keys.items() if key not in digests and self._holds(key, link.digest))
                name = next(free, None)
            is_missing = name is None
            if name is None:
                is_free = link.file not in names and not getattr(self.target, "lock_expires", False)
                name = link.file if is_free else layout.payload_name(self.target, names)
            places.append((f"{head}/{name}", is_missing))
            links.append(replace(link, file=name, name=""))
        payload = replace(manifest.payloads[0], name=links[-1].file)
        payloads, bases = (payload, *manifest.payloads[1:]), tuple(links[:-1])
        return replace(manifest, payloads=payloads, bases=bases), places

    def _holds(self, key: str, digest: str) -> bool:
        """True if an object of the target that no manifest names is the file with this digest."""
        with suppress(FormatError), self.target.open(key) as source:
            return FileReader(source, key).digest == digest
        return False


def select_missing(local: Listing, content: Listing, keep: Keep | None, now: datetime) -> list[Manifest]:
    """The checkpoints that a mirror lacks and would keep, oldest first, and then those of steps that it has already.

    A step that retention has made weights-only waits for the newer one that a run resumes from. Of two different ones
    of the same step, the store's is right, unless the mirror had it before: then another store has replaced it there.
    Times of saving do not count: they are of several clocks.

    Args:
        local: the store.
        content: what is in the mirror.
        keep: which checkpoints are kept there; None: all.
        now: the time from which `Keep(within=)` counts back.
    """
    missing = {}
    for step, manifest in local.visible.items():
        copy = content.manifests.get(step)
        is_same = copy is not None and (copy.id, copy.digest) == (manifest.id, manifest.digest)
        if not is_same and (copy is None or manifest.id not in copy.replaced):
            missing[step] = manifest
    both = {**content.manifests, **missing}
    forgotten = content.forgotten - missing.keys()
    visible = {step: manifest for step, manifest in both.items() if step not in forgotten}
    decision = apply_policy(both.values(), _effective_keep(keep, visible), now, forgotten=forgotten)
    return sorted(
        (missing[step] for step in decision.keep if step in missing), key=lambda m: m.step in content.manifests
    )


def _effective_keep(keep: Keep | None, visible: Mapping[int, Manifest]) -> Keep:
    """The rules, or none while no checkpoint has the metric by which the best are chosen."""
    if keep is None:
        return Keep()
    try:
        check_metric(visible.values(), keep)
    except PolicyError:
        return Keep()
    return keep


def _open_intact(file: ChainFile) -> Source:
    """Open a file of a chain under the first of its keys that leads to it, once all of its bytes have been verified.

    Raises:
        UnreadableError: no key does.
    """

    def verify(source: Source, where: str) -> Source:
        try:
            for error in file.verify(source, where).check():
                raise error
        except BaseException:
            source.close()
            raise
        return source

    try:
        return file.try_keys(verify)
    except ShrinkpointError as error:
        raise UnreadableError(error) from error


def _check_apart(source: Storage, target: Storage) -> None:
    first, second = (
        storage.path.resolve().as_posix() if isinstance(storage, LocalStorage) else str(getattr(storage, "url", ""))
        for storage in (source, target)
    )
    is_within = first and second and f"{first}/".startswith(f"{second}/")
    if source is target or is_within or (first and second and f"{second}/".startswith(f"{first}/")):
        found, do = f"{target.describe()!r} beside a store in {source.describe()!r}", "name another place"
        raise PolicyError("mirror", found=found, expected="a place outside of the store", do=do)
