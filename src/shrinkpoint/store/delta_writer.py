"""Writes a chain of checkpoints, each into a directory that a framework names."""

from __future__ import annotations

import os
import posixpath
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.storage import AnyDirectory, LocalStorage, ObjectUrl, directory_storage, resolve_directory
from shrinkpoint.storage.local import is_process_alive, link_error
from shrinkpoint.storage.paths import parse_object_url
from shrinkpoint.store import layout
from shrinkpoint.store.chain import directory_chain
from shrinkpoint.store.chain_limit import ChainBytes
from shrinkpoint.store.chain_writer import ChainWriter, CheckpointPlace, WrittenPayload
from shrinkpoint.store.checkpoint_file import DecodedFile
from shrinkpoint.store.decode import decode_chain
from shrinkpoint.store.delta_base import StoredFile, as_delta_base, warn_lost_progress
from shrinkpoint.store.identify import has_file, refuse_store_checkpoint
from shrinkpoint.store.manifest import Payload
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON
from shrinkpoint.threads import reset_in_children

_BASE_DIR_PREFIX = ".shrinkpoint.base-"
"""Prefix of the hidden directory that keeps the bases of the next delta when theirs is deleted; then a process id."""


class DirectoryPlace(CheckpointPlace):
    """The directory of a checkpoint: a delta finds its base in `bases`, or in a bucket by the name that it is given."""

    def __init__(self, directory: Path | ObjectUrl, rank: int) -> None:
        super().__init__(directory_storage(directory), None, None)
        self.directory, self._rank = directory, rank
        self._parent: JSON = None

    def hold_base(self, base: ChainBytes, reference: Reference, parent: JSON) -> None:
        """Let the payload be a delta against a base whose files are in the directory, or elsewhere in its bucket."""
        self.base, self.base_reference, self._parent = base, reference, parent

    def keep_base(self) -> JSON:
        return self._parent

    def free_key(self) -> str:
        # Names of this rank only are asked for: were the directory listed, N ranks would list the files of N ranks.
        names = layout.payload_names(self.storage, self._rank)
        if isinstance(self.storage, LocalStorage):
            root = self.storage.path
            return next(name for name in names if not os.path.lexists(root / name))
        return next(name for name in names if not has_file(self.directory, name))


def link_chain(place: DirectoryPlace, base_dir: Path, base: Payload) -> Sequence[StoredFile] | None:
    """Link the files of a payload's chain into the directory of a delta against it; None if links are impossible.

    Raises:
        StorageError: a file is not there, or its directory cannot be written.
    """
    storage = place.storage
    assert isinstance(storage, LocalStorage)
    for path, digest in _base_files(base_dir, base):
        key = layout.base_name(digest)
        if not (storage.path / key).is_file():
            place.written_keys.append(key)
            if not storage.link_file(path, key):
                return None
    storage.flush_dir(layout.BASES)
    return [StoredFile(digest, size, storage, layout.base_name(digest)) for digest, size in chain_digests(base)]


class DeltaWriter(ChainWriter[Payload]):
    """Writes payloads into directories, each a delta against the one before, and holds the reference for the next.

    Call `write`, then `commit_reference` once the checkpoint is committed, or `rollback`.
    """

    def __init__(self, *, keyframe_every: int | None = 20, threads: int | None = None) -> None:
        super().__init__(keyframe_every=keyframe_every, threads=threads)
        self._can_link = True  # until a link fails
        self._base_dir: Path | ObjectUrl | None = None  # the directory with the files of the reference
        self._base_chain: tuple[StoredFile, ...] = ()  # in a bucket: these files, keyframe first, wherever they lie
        self._own_base_dir: Path | None = None  # the same, if it is a hidden one of ours
        self._uncommitted: _UncommittedPayload | None = None
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._uncommitted = self._own_base_dir = None
        self._base_dir, self._base_chain = None, ()

    @property
    def reference(self) -> Reference | None:
        """The decoded tensors of the last checkpoint; None if the next one will be a keyframe."""
        return self.references.reference if self._usable_base() is not None else None

    @property
    def last_reference(self) -> Reference | None:
        """The decoded tensors of the last checkpoint, even if the next one will be a keyframe; None if unknown."""
        if self.references.manifest is None:
            return None
        return as_delta_base(self.references.reference, base=self._usable_base() is not None)

    @property
    def payload(self) -> Payload:
        """The payload that `write` wrote."""
        if self._uncommitted is None:
            raise PolicyError("DeltaWriter", found="no payload", expected="a payload", do="call `write` first")
        return self._uncommitted.payload

    def write(
        self,
        directory: AnyDirectory,
        state: FlatState,
        *,
        scheme: Scheme,
        rank: int = 0,
        keyframe: bool = False,
        adopt: bool = False,
    ) -> SaveReport:
        """Write a payload and hard links to its bases, durably; the checkpoint exists after `directory.commit`.

        In a bucket a delta needs the directories that hold its bases.

        Args:
            keyframe: do not write a delta.
            adopt: as for `write_payload`.

        Raises:
            MismatchError: the directory is that of a checkpoint in a store.
            StorageError: writing failed, or the directory is a symbolic link; what was written is removed.
        """
        self.rollback()
        root = resolve_directory(directory)
        refuse_store_checkpoint(root)
        if isinstance(root, Path) and root.is_symlink():
            raise link_error(str(directory))
        place = DirectoryPlace(root, rank)
        try:
            base = None if keyframe else self._prepare_base(place)
            written = self.write_payload(place, state, scheme=scheme, adopt=adopt)
            if written is None:
                return self.write(directory, state, scheme=scheme, rank=rank, keyframe=True, adopt=adopt)
            if place.base is None:
                self.chain_limit.note_keyframe()
            report = written.report
            if written.is_progress_lost:
                warn_lost_progress(report.retention)
        except BaseException:
            place.remove()
            raise
        bases = () if base is None or place.base is None else chain_digests(base)
        payload = Payload(place.payload_key, report.stored_bytes, report.digest, report.raw_bytes, bases)
        own = StoredFile(payload.digest, payload.size, place.storage, payload.name)
        chain = () if isinstance(root, Path) else (*(self._base_chain if bases else ()), own)
        self._uncommitted = _UncommittedPayload(root, written, payload, chain)
        return report

    def commit_reference(self) -> None:
        """Make the committed checkpoint the reference for the next delta; nothing happens if nothing was written."""
        written, self._uncommitted = self._uncommitted, None
        if written is None:
            return
        self.commit_payload(written.payload, written.written)
        self._base_dir, self._base_chain = written.directory, written.chain
        self._remove_own_base_dir()

    def rollback(self) -> None:
        """Remove the uncommitted payload; the reference for the next delta is unchanged."""
        written, self._uncommitted = self._uncommitted, None
        if written is not None:
            written.written.place.remove()

    def adopt(self, directory: AnyDirectory, payload: Payload, decoded: DecodedFile) -> None:
        """Make a loaded payload the reference for the next delta, and take over its tensors."""
        self._take_base(directory, payload)
        self.references.adopt(payload, decoded.reference)

    def adopt_encoded(self, directory: AnyDirectory, payload: Payload) -> None:
        """Make a payload that was loaded the reference for the next delta, which decodes it again."""
        self._take_base(directory, payload)
        self.references.adopt_encoded(payload, lambda: self._decode_base(payload))

    def _take_base(self, directory: AnyDirectory, payload: Payload) -> None:
        """Make the files of a payload that was loaded the base of the next delta."""
        self.rollback()
        place = resolve_directory(directory)
        chain = directory_chain(place, payload)
        files = tuple(StoredFile(file.digest, file.size or 0, file.storage, *file.keys) for file in chain)
        self._base_dir, self._base_chain = place, () if isinstance(place, Path) else files
        self.base_verifier.mark_verified({file.digest: file.stamp() for file in files})
        self._remove_own_base_dir()

    def _decode_base(self, payload: Payload) -> Reference:
        assert self._base_dir is not None
        if isinstance(self._base_dir, Path):
            *_, (own_path, _) = _base_files(self._base_dir, payload)
            payload = replace(payload, name=str(own_path.relative_to(self._base_dir)))
        files = directory_chain(self._base_dir, payload)
        return decode_chain(files, threads=self.threads).reference

    def keep_base(self, directory: str | Path) -> None:
        """Keep the files that the next delta depends on; to be called before this directory is deleted.

        They are linked into a hidden directory beside it. If that is impossible, the next checkpoint is a keyframe.
        """
        root, payload = Path(directory).absolute(), self.references.manifest
        if payload is None or self._base_dir != root:
            return
        base_dir = root.parent / f"{_BASE_DIR_PREFIX}{os.getpid()}"
        storage = LocalStorage(base_dir)
        with suppress(ShrinkpointError, OSError):
            _remove_stale_base_dirs(root.parent)
            if all(storage.link_file(path, layout.base_name(digest)) for path, digest in _base_files(root, payload)):
                self._base_dir = self._own_base_dir = base_dir

    def drop(self) -> None:
        """Free the reference: the next checkpoint is a keyframe."""
        self.rollback()
        self.references.drop()
        self._base_dir, self._base_chain = None, ()
        self._remove_own_base_dir()

    def _usable_base(self) -> Payload | None:
        payload = self.references.manifest
        if payload is None or self._base_dir is None:
            return None
        if not self.chain_limit.allows_delta(chain_bytes(payload)):
            return None
        if not isinstance(self._base_dir, Path):  # whether its files are there is asked when they are needed
            return payload
        has_files = self._can_link and all(path.is_file() for path, _ in _base_files(self._base_dir, payload))
        return payload if has_files else None

    def _prepare_base(self, place: DirectoryPlace) -> Payload | None:
        """Let the payload be a delta, its chain hard-linked into the directory or in the same bucket; returns the base.

        None, and no links, if that is impossible. The links come first: who owns the base may delete it at any time.
        """
        payload, root = self._usable_base(), place.directory
        if payload is None or not _can_refer(root, self._base_dir):
            return None
        with suppress(ShrinkpointError, OSError):  # deleted meanwhile
            chain: Sequence[StoredFile] | None = self._base_chain
            if isinstance(root, Path):
                assert isinstance(self._base_dir, Path)
                name, chain = layout.base_name(payload.digest), link_chain(place, self._base_dir, payload)
                self._can_link = chain is not None
            else:
                name = posixpath.relpath(parse_object_url(self._base_chain[-1].where).prefix, root.prefix or ".")
            is_intact = chain is not None and self.base_verifier.find_damage(chain) is None
            if is_intact and self.references.ensure_decoded():
                parent = {"name": name, "digest": payload.digest}
                place.hold_base(chain_bytes(payload), self.references.reference, parent)
                return payload
        place.remove()
        return None

    def _remove_own_base_dir(self) -> None:
        base_dir, self._own_base_dir = self._own_base_dir, None
        if base_dir is not None and base_dir != self._base_dir:
            shutil.rmtree(base_dir, ignore_errors=True)


class _UncommittedPayload(NamedTuple):
    """A payload that waits for its checkpoint to be committed, and its chain in a bucket."""

    directory: Path | ObjectUrl
    written: WrittenPayload
    payload: Payload
    chain: tuple[StoredFile, ...]


def _can_refer(place: Path | ObjectUrl, base: Path | ObjectUrl | None) -> bool:
    """True if a delta in one directory can name files of another one."""
    if isinstance(place, Path) or not isinstance(base, ObjectUrl):
        return isinstance(place, Path) and isinstance(base, Path)
    return (place.scheme, place.bucket) == (base.scheme, base.bucket)


def _base_files(directory: Path, payload: Payload) -> list[tuple[Path, str]]:
    bases = [(directory / layout.base_name(digest), digest) for digest, _ in payload.bases]
    own = directory / layout.base_name(payload.digest)  # if the directory itself was deleted
    return [*bases, (own if own.is_file() else directory / payload.name, payload.digest)]


def chain_bytes(payload: Payload) -> ChainBytes:
    return ChainBytes(tuple(size for _, size in chain_digests(payload)), payload.raw_bytes)


def chain_digests(base: Payload) -> tuple[tuple[str, int], ...]:
    """Header digest and size of each file of a payload's chain, the payload last."""
    return *base.bases, (base.digest, base.size)


def _remove_stale_base_dirs(parent: Path) -> None:
    """Remove the hidden directories of processes that no longer run; one on another machine then writes a keyframe."""
    for path in parent.glob(f"{_BASE_DIR_PREFIX}*"):
        pid = path.name.removeprefix(_BASE_DIR_PREFIX)
        if pid.isdecimal() and not is_process_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
