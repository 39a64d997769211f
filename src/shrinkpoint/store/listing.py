"""Finds the checkpoints of a store by listing its keys: there is no index that could be wrong."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias

from shrinkpoint.errors import CorruptError, FormatError, NotFoundError, ShrinkpointError, StorageError, VersionError
from shrinkpoint.storage import LocalStorage, ObjectUrl, Storage, map_requests
from shrinkpoint.storage.local import link_error
from shrinkpoint.store import layout
from shrinkpoint.store.history import Others, Place, abandoned_steps, oldest_first, place_of
from shrinkpoint.store.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    decode_store_manifest,
    read_limited,
)

_MIN_AGE = 2 * 10**9  # Nanoseconds after its last change from which on a directory's times are trusted
_Stamps = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that a restore passed over.

    Attributes:
        reason: why it does not load.
        step: its step in a store; None in a framework's run.
        directory: its directory in a framework's run, or the place in a bucket; None in a store.
        error: why, as an exception; None if several processes had one each.
    """

    reason: str
    step: int | None = None
    directory: Path | ObjectUrl | None = None
    error: Exception | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class StoreRestore:
    """The newest checkpoint of a store that loads.

    Attributes:
        step: of the checkpoint.
        state: as it was saved.
        manifest: of the checkpoint.
        skipped: newer checkpoints that do not load, newest first.
        where: the store that it was read from.
    """

    step: int
    state: Any = field(repr=False)
    manifest: Manifest
    skipped: tuple[SkippedCheckpoint, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class StepDirectory:
    """The directory of one step."""

    step: int
    names: frozenset[str]  # of the store's files in it, relative to it
    manifest: Manifest | None = None  # of its checkpoint; None if there is none, or it cannot be read
    error: ShrinkpointError | None = None  # why a manifest that exists cannot be read
    is_forgotten: bool = False  # its checkpoint is hidden until `prune` deletes it

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its files."""
        head = layout.step_dir(self.step)
        return tuple(f"{head}/{name}" for name in self.names)

    @property
    def is_visible(self) -> bool:
        """True if there is a checkpoint that is not forgotten; its manifest may be broken."""
        return (self.manifest is not None or self.error is not None) and not self.is_forgotten

    @property
    def has_manifest(self) -> bool:
        """True if there is a checkpoint that is not forgotten, and its manifest can be read."""
        return self.manifest is not None and not self.is_forgotten

    @property
    def place(self) -> Place:
        """Its checkpoint's place in the history of the run; that of its step if the manifest cannot be read."""
        return Place(self.step) if self.manifest is None else place_of(self.manifest)

    def read_manifest(self) -> Manifest:
        """The manifest of its checkpoint, which exists.

        Raises:
            FormatError, StorageError: it cannot be read.
        """
        if self.error is not None:
            raise self.error
        assert self.manifest is not None
        return self.manifest

    @cached_property
    def own_names(self) -> frozenset[str]:
        """The names of its checkpoint's files and links, there or not."""
        if self.manifest is None:
            return frozenset()
        own = (payload.name for payload in self.manifest.payloads)
        links = (base.name for base in self.manifest.bases if base.name in self.names)
        return frozenset((layout.MANIFEST, layout.FORGOTTEN, *own, *links))

    @cached_property
    def foreign_keys(self) -> frozenset[str]:
        """The keys of its checkpoint's bases in other directories, where it has no link of its own."""
        bases = () if self.manifest is None else self.manifest.bases
        return frozenset(base.sibling_key for base in bases if base.name not in self.names)

    @property
    def needed_keys(self) -> frozenset[str]:
        """The keys of all files that its checkpoint needs, there or not."""
        head = layout.step_dir(self.step)
        return self.foreign_keys.union(f"{head}/{name}" for name in self.own_names - {layout.FORGOTTEN})

    @cached_property
    def spare_keys(self) -> tuple[str, ...]:
        """The keys of its files that its own checkpoint does not need."""
        head = layout.step_dir(self.step)
        return tuple(f"{head}/{name}" for name in self.names - self.own_names)


@dataclass(frozen=True)
class Listing:
    """A store at one moment, or some of its steps.

    Attributes:
        directories: of every step, by rising step.
    """

    directories: dict[int, StepDirectory]

    @cached_property
    def manifests(self) -> dict[int, Manifest]:
        """Every readable manifest by step, rising, forgotten checkpoints included."""
        return {step: entry.manifest for step, entry in self.directories.items() if entry.manifest is not None}

    @cached_property
    def forgotten(self) -> frozenset[int]:
        """Steps of checkpoints that are hidden until `prune` deletes them."""
        return frozenset(step for step, entry in self.directories.items() if entry.is_forgotten)

    @cached_property
    def broken(self) -> dict[int, ShrinkpointError]:
        """By step, why a manifest that exists cannot be read."""
        return {step: entry.error for step, entry in self.directories.items() if entry.error is not None}

    @cached_property
    def keys(self) -> frozenset[str]:
        """Every key in every step's directory."""
        return frozenset(key for entry in self.directories.values() for key in entry.keys)

    @cached_property
    def visible(self) -> dict[int, Manifest]:
        """The checkpoints that are not forgotten."""
        return {step: manifest for step, manifest in self.manifests.items() if step not in self.forgotten}

    @cached_property
    def by_age(self) -> list[Manifest]:
        """The checkpoints that are not forgotten, oldest first; those that the present line left behind are older."""
        return oldest_first(self.visible.values(), place_of)

    def others(self, step: int) -> Others:
        """All checkpoints but that of one step, which is about to be saved."""
        visible = {f"step {other}": (other, place_of(m)) for other, m in self.visible.items() if other != step}
        return Others(visible, [entry.place.sequence for entry in self.directories.values()])

    @cached_property
    def abandoned(self) -> frozenset[int]:
        """Steps of the checkpoints that the present line of history left behind."""
        return abandoned_steps(self.visible.values())

    def __contains__(self, key: object) -> bool:
        """True if there is such a key."""
        head, _, name = str(key).partition("/")
        step = layout.step_of_dir(head)
        return step is not None and name in self.file_names(step)

    def replace(self, step: int, entry: StepDirectory | None) -> Listing:
        """This listing with another directory of one step; None: without it."""
        directories = {**self.directories, step: entry}
        return Listing({step: entry for step, entry in sorted(directories.items()) if entry is not None})

    def with_files(self, step: int, names: Iterable[str], **changes: Any) -> Listing:
        """This listing with more files in the directory of a step, and with other fields of the directory changed."""
        entry = self.directories.get(step, StepDirectory(step, frozenset()))
        return self.replace(step, replace(entry, names=entry.names.union(names), **changes))

    def without(self, keys: Collection[str]) -> Listing:
        """This listing after these keys were deleted."""
        deleted: dict[int, set[str]] = {}
        for key in keys:
            if (step := layout.step_of(key)) is not None:
                deleted.setdefault(step, set()).add(key.partition("/")[2])
        directories = {**self.directories}
        for step, names in deleted.items():
            entry = directories.pop(step)
            if left_over := entry.names - names:
                has_manifest = layout.MANIFEST in left_over
                directories[step] = replace(entry, names=left_over) if has_manifest else StepDirectory(step, left_over)
        return Listing(dict(sorted(directories.items())))

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
        entry = self.directories.get(step)
        return frozenset() if entry is None else entry.names

    def depth(self, step: int) -> int:
        """Number of files that a checkpoint depends on: whatever depends on it has a greater one."""
        manifest = self.manifests.get(step)
        return 0 if manifest is None else manifest.depth

    def unneeded_keys(self, keep: Collection[int], except_in: Collection[int]) -> list[str]:
        """The keys that no checkpoint of the steps in `keep` needs, sorted.

        Args:
            except_in: steps whose directories are passed over.
        """
        needed = {key for step in keep for key in self.directories[step].foreign_keys}
        keys = (
            entry.spare_keys if step in keep else entry.keys
            for step, entry in self.directories.items()
            if step not in except_in
        )
        return sorted(key for some in keys for key in some if key not in needed)

    def orphans(self) -> list[str]:
        """Keys of orphaned files: those of interrupted saves, and payloads that were replaced.

        Files beside a broken manifest are not orphaned. In a storage without links, or where a newer release has
        written, a manifest that cannot be read may name any payload: then there are no orphans.
        """
        newer = any(isinstance(error, VersionError) for error in self.broken.values())
        if newer or (self.broken and not any("/bases/" in key for key in self.keys)):
            return []
        return self.unneeded_keys(self.manifests, self.broken)


_ReadStep: TypeAlias = Callable[[Storage, int], StepDirectory | None]


class Lister:
    """Lists a store again and again.

    What was read of a step's directory in a local storage is not read again while the inodes and times of the
    directory, of its links, of its manifest and of its mark are unchanged; in a storage that lists `versions`, while
    these are.

    Args:
        storage: the store's.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._cache: dict[int, tuple[_Stamps, StepDirectory]] = {}
        self._version_cache: dict[int, tuple[dict[str, object], StepDirectory]] = {}
        self._listing = Listing({})

    def scan(self) -> Listing:
        """List a store and read its manifests; payloads are not opened.

        Raises:
            StorageError: the store cannot be listed. (A manifest that cannot be read is in `broken` instead.)
        """
        entries = self.read_all(read_step)
        if entries != [*self._listing.directories.values()]:
            self._listing = Listing({entry.step: entry for entry in entries})
        return self._listing

    def scan_steps(self, steps: Iterable[int]) -> Listing:
        """As `scan`, of some steps only; nothing else is listed."""
        entries = (read_step(self.storage, step) for step in sorted({*steps}))
        return Listing({entry.step: entry for entry in entries if entry is not None})

    def scan_chain(self, step: int, parent: int) -> Listing:
        """As `scan`, of what a delta of `step` against `parent` has to do with: both, and where the parent's bases are.

        Of steps that only have bases the manifests are not read. Where all keys come in one list, all are listed.
        """
        if hasattr(self.storage, "versions"):
            return self.scan()
        listing = self.scan_steps((step, parent))
        entry = listing.directories.get(parent)
        steps = {layout.step_of(key) for key in entry.foreign_keys} if entry is not None else set()
        others = {other: read_names(self.storage, other) for other in steps if other is not None}
        bases = {other: StepDirectory(other, names) for other, names in others.items() if names}
        return Listing(dict(sorted({**bases, **listing.directories}.items())))

    def version(self, key: str) -> object:
        """The version of a file, as the last `scan` has listed it; None if it has not."""
        head, _, name = key.partition("/")
        step = layout.step_of_dir(head)
        versions, _ = self._version_cache.get(-1 if step is None else step, ({}, None))
        return versions.get(name)

    def iter_directories(self) -> Iterator[StepDirectory]:
        """The directories of all steps, the highest step first, each read when it is asked for.

        Raises:
            StorageError: the store cannot be listed. (Why a step's directory cannot be listed is its `error`.)
        """
        dirs = {*_list_dirs(self.storage), *map(layout.step_dir, _linked_steps(self.storage))}
        names = sorted(dirs, key=lambda name: (len(name), name), reverse=True)
        for step in map(layout.step_of_dir, names):
            entry = None if step is None else _read_leniently(self.storage, step)
            if entry is not None:
                yield entry

    def read_all(self, read: _ReadStep | None = None) -> list[StepDirectory]:
        """The directories of all steps, by rising step.

        Args:
            read: reads a directory on this machine; None: as `iter_directories`, whose errors this raises.
        """
        if isinstance(self.storage, LocalStorage):
            return self._read_directories(self.storage, read or _read_leniently)
        return self._read_keys()

    def _read_keys(self) -> list[StepDirectory]:
        """The directories of all steps, from a list of all keys; those that have changed read again."""
        list_versions: Callable[[], Mapping[str, object]] | None = getattr(self.storage, "versions", None)
        versions = dict.fromkeys(self.storage.list("")) if list_versions is None else list_versions()
        names = layout.files_by_step(versions)
        old = {step: entry for step, (seen, entry) in self._version_cache.items() if names.get(step) == seen}
        changed = names.keys() - old.keys()

        def read_manifest(step: int) -> StepDirectory:
            return _read_manifest_of(self.storage, step, frozenset(names[step]))

        new = map_requests(self.storage, read_manifest, sorted(changed))
        entries = sorted((*old.values(), *new), key=lambda entry: entry.step)
        if list_versions is not None:
            self._version_cache = {entry.step: (names[entry.step], entry) for entry in entries if entry.error is None}
        return entries

    def _read_directories(self, storage: LocalStorage, read: _ReadStep) -> list[StepDirectory]:
        entries, cache = [], {}
        for step in sorted({*list_steps(storage), *_linked_steps(storage)}):
            old = self._cache.get(step)
            if old is not None and old[0] == _stamps(storage, step, old[0]):
                cache[step] = old
                entries.append(old[1])
                continue
            stamps = _stamps(storage, step)  # before reading, so that what changes meanwhile is read next time
            entry = read(storage, step)
            if entry is None:
                continue
            entries.append(entry)
            if entry.error is None and _is_old(stamps):
                cache[step] = stamps, entry
        self._cache = cache
        return entries


def iter_newest(listers: Sequence[Lister]) -> Iterator[tuple[StepDirectory, int]]:
    """The directories of all steps of copies of a store, each with the index of its copy, the newest first.

    Of one step, that in the first copy comes first. Unless the run went back to an older step, each is read when it is
    asked for.

    Raises:
        StorageError: a copy cannot be listed. (Why a step's directory cannot be listed is its `error`.)
    """
    # The order of saving is that of the steps, unless a run went back to an older step: then manifests tell it
    if not any(layout.ROLLBACK in lister.storage.list(layout.ROLLBACK) for lister in listers):
        copies = [zip(lister.iter_directories(), repeat(index)) for index, lister in enumerate(listers)]
        yield from heapq.merge(*copies, key=lambda pair: -pair[0].step)
        return
    pairs = [(entry, index) for index, lister in [*enumerate(listers)][::-1] for entry in lister.read_all()]
    oldest = oldest_first(pairs, lambda pair: pair[0].place, counts=lambda pair: pair[0].has_manifest)
    yield from reversed(oldest)


def scan(storage: Storage) -> Listing:
    """List a store and read its manifests, as `Lister.scan` does."""
    return Lister(storage).scan()


def list_steps(storage: Storage) -> list[int]:
    """The steps that have a directory, rising; it may be without a checkpoint.

    Raises:
        StorageError: the store cannot be listed.
    """
    return sorted(step for name in _list_dirs(storage) if (step := layout.step_of_dir(name)) is not None)


def _list_dirs(storage: Storage) -> Collection[str]:
    """The names of the directories at the top; of a storage that cannot list them, from its keys."""
    list_dirs: Callable[[], Collection[str]] | None = getattr(storage, "list_dirs", None)
    return {key.partition("/")[0] for key in storage.list("")} if list_dirs is None else list_dirs()


def _linked_steps(storage: Storage) -> set[int]:
    """The steps of which the directory is a symbolic link: no checkpoint is read or written through it."""
    names = storage.linked_dirs() if isinstance(storage, LocalStorage) else []
    return {step for name in names if (step := layout.step_of_dir(name)) is not None}


def read_step(storage: Storage, step: int) -> StepDirectory | None:
    """The directory of one step; None if it has no file of a store.

    Raises:
        StorageError: it cannot be listed. (A manifest that cannot be read is in `error` instead.)
    """
    if isinstance(storage, LocalStorage) and (path := storage.path / layout.step_dir(step)).is_symlink():
        return StepDirectory(step, frozenset(), error=link_error(storage.describe(path.name), CorruptError))
    names = read_names(storage, step)
    return _read_manifest_of(storage, step, names) if names else None


def _read_leniently(storage: Storage, step: int) -> StepDirectory | None:
    """As `read_step`, but why the directory cannot be listed is in `error`."""
    try:
        return read_step(storage, step)
    except StorageError as error:
        return StepDirectory(step, frozenset(), error=error)


def read_names(storage: Storage, step: int) -> frozenset[str]:
    """The names of the store's files in the directory of one step; raises StorageError if it cannot be listed."""
    keys = storage.list(layout.step_dir(step) + "/")
    return frozenset(layout.files_by_step(dict.fromkeys(keys)).get(step, ()))


def _read_manifest_of(storage: Storage, step: int, names: frozenset[str]) -> StepDirectory:
    """The directory of one step that has these files."""
    if layout.MANIFEST not in names:
        return StepDirectory(step, names)
    has_mark = layout.FORGOTTEN in names
    try:
        manifest = read_manifest(storage, step)
        return StepDirectory(step, names, manifest, is_forgotten=has_mark and _is_hidden(storage, manifest))
    except ShrinkpointError as error:
        key = layout.manifest_key(step)
        if isinstance(error, NotFoundError) and key not in storage.list(key):
            return StepDirectory(step, names)  # deleted since it was listed; not a pipe, or a link to nothing
        return StepDirectory(step, names, error=error, is_forgotten=has_mark)


_SUBPATHS = ("", "/bases", f"/{layout.MANIFEST}", f"/{layout.FORGOTTEN}")


def _stamps(storage: LocalStorage, step: int, old: _Stamps | None = None) -> _Stamps:
    """The stamps of a step's directory, of its links, of its manifest and of its mark.

    Args:
        old: earlier stamps: what was not there then is not there now, or the directory's own stamp has changed.
    """
    head = layout.step_dir(step)
    if old is None:
        return tuple([storage.stamp(head + path) for path in _SUBPATHS])
    return tuple([stamp and storage.stamp(head + path) for path, stamp in zip(_SUBPATHS, old, strict=True)])


def _is_old(stamps: _Stamps) -> bool:
    """True if another change would leave a trace: of two in one tick of a file system's clock only one does."""
    newest = max((max(stamp[1:3]) for stamp in stamps if stamp), default=0)
    return time.time_ns() - newest > _MIN_AGE


def put_manifest(storage: Storage, manifest: Manifest, data: bytes) -> None:
    """Write a checkpoint's manifest, and before it the mark of a store whose order of saving is not that of the steps.

    Args:
        data: the manifest as `encode_store_manifest` encodes it.

    Raises:
        StorageError: writing failed.
    """
    if place_of(manifest) != Place(manifest.step):
        storage.put(layout.ROLLBACK, b"The run went back to an older step: manifests tell the order of saving.\n")
    storage.put(layout.manifest_key(manifest.step), data)


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
    """True if the marker hides this checkpoint, and not an earlier one of the same step."""
    try:
        with storage.open(layout.forgotten_key(manifest.step)) as source:
            mark = _encode_mark(manifest.id)
            return source.size == len(mark) and bytes(source.read(0, source.size)) == mark
    except NotFoundError:
        return False


def forget(storage: Storage, listing: Listing, step: int) -> None:
    """Mark a step as forgotten; the caller holds the store's lock.

    The mark names the checkpoint by its id, so that the step is visible again once it is saved again.

    Raises:
        StorageError: writing failed.
    """
    mark = listing.manifests[step].id if step in listing.manifests else "broken"
    storage.put(layout.forgotten_key(step), _encode_mark(mark))


def _encode_mark(id: str) -> bytes:
    """The bytes of the marker that hides a checkpoint; JSON, from which its id comes, may have lone surrogates."""
    return id.encode("utf-8", "surrogatepass")
