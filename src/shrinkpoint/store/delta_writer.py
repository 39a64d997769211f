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

from shrinkpoint import validate
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import QuantizedState, Scheme
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.storage import (
    AnyDirectory,
    LocalStorage,
    ObjectUrl,
    Storage,
    directory_storage,
    resolve_directory,
)
from shrinkpoint.storage.local import is_process_alive, link_error
from shrinkpoint.storage.object_url import parse_object_url
from shrinkpoint.store import layout
from shrinkpoint.store.chain import directory_chain
from shrinkpoint.store.chain_limit import ChainBytes, ChainLimit
from shrinkpoint.store.checkpoint_file import DecodedFile, write_file
from shrinkpoint.store.decode import decode_chain
from shrinkpoint.store.delta_base import (
    BaseVerifier,
    ReferenceCache,
    StoredFile,
    as_delta_base,
    warn_low_retention,
)
from shrinkpoint.store.directory import free_payload_name
from shrinkpoint.store.manifest import Payload
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.threads import reset_in_children

_BASE_DIR_PREFIX = ".shrinkpoint.base-"
"""Prefix of the hidden directory that keeps the bases of the next delta when theirs is deleted; then a process id."""


class DeltaWriter:
    """Writes payloads, each a delta against the one before, and holds the reference for the next.

    Call `write`, then `commit_reference` once the checkpoint is committed, or `rollback`. The reference for the next
    delta changes with `commit_reference` only.

    Memory: one state on the CPU; of a tensor on a lattice a byte a value, and a sample of its original values.

    Args:
        keyframe_every: a chain has at most this many files, its keyframe included; it ends earlier where they have four
            times the bytes of the state. None: no bound.
        threads: native threads for coding; None: every core.

    Attributes:
        chain_limit: where chains end; whoever deletes checkpoints sets its `keep`.

    Raises:
        PolicyError: one of them is out of range.
    """

    def __init__(self, *, keyframe_every: int | None = 20, threads: int | None = None) -> None:
        keyframe_every, threads = validate.check_keyframe_every(keyframe_every), validate.check_threads(threads)
        self.chain_limit, self._threads = ChainLimit(keyframe_every), threads
        self._can_link = True  # until a link fails
        self._reference_cache: ReferenceCache[Payload] = ReferenceCache()
        self._base_verifier = BaseVerifier()
        self._base_dir: Path | ObjectUrl | None = None  # the directory with the files of the reference
        self._base_chain: tuple[StoredFile, ...] = ()  # in a bucket: these files, keyframe first, wherever they lie
        self._own_base_dir: Path | None = None  # the same, if it is a hidden one of ours
        self._uncommitted: _UncommittedPayload | None = None
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """In a forked child: leave files to the parent; the next payload is a keyframe."""
        self._uncommitted = self._own_base_dir = None
        self._reference_cache, self._base_verifier = ReferenceCache(), BaseVerifier()
        self._base_dir, self._base_chain = None, ()

    @property
    def reference(self) -> Reference | None:
        """The decoded tensors of the last checkpoint; None if the next one will be a keyframe."""
        return self._reference_cache.reference if self._usable_base() is not None else None

    @property
    def last_reference(self) -> Reference | None:
        """The decoded tensors of the last checkpoint, even if the next one will be a keyframe; None if unknown."""
        if self._reference_cache.manifest is None:
            return None
        return as_delta_base(self._reference_cache.reference, base=self._usable_base() is not None)

    @property
    def payload(self) -> Payload:
        """The payload that `write` wrote."""
        if self._uncommitted is None:
            raise PolicyError("DeltaWriter", found="no payload", expected="`write` first", do="call `write`")
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
            adopt: take over the tensors of `state`; else they must not change until `commit_reference`, which copies
                them, or `rollback`.

        Raises:
            StorageError: writing failed, or the directory is a symbolic link; what was written is removed.
        """
        self.rollback()
        place = resolve_directory(directory)
        if isinstance(place, Path) and place.is_symlink():
            raise link_error(str(directory))
        storage = directory_storage(place)
        written_keys: list[str] = []
        try:
            base = None if keyframe else self._prepare_base(place, storage, written_keys)
            reference = None if base is None else self._reference_cache.reference
            key = free_payload_name(place, rank)
            quantized = scheme.quantize(state, reference) if base is not None else self._keyframe_of(scheme, state)
            if quantized.keyframe:
                _remove(storage, written_keys)
                written_keys.clear()
                base = reference = None
            written_keys.append(key)
            # By this a reader of the payload finds its base.
            parent = None if base is None else {"name": self._base_name(place, base), "digest": base.digest}
            with self._base_verifier.read_share():
                written = write_file(
                    storage,
                    key,
                    quantized,
                    scheme=scheme,
                    reference=reference,
                    parent=parent,
                    originals=state.tensors,
                    threads=self._threads,
                )
            if base is None:
                self.chain_limit.note_keyframe()
            elif not self.chain_limit.accepts_delta(
                _chain_bytes(base), written.report.stored_bytes, written.report.raw_bytes
            ):
                _remove(storage, written_keys)
                return self.write(directory, state, scheme=scheme, rank=rank, keyframe=True, adopt=adopt)
            retention = self._reference_cache.retained_progress(written.reference)
            report = replace(written.report, retention=retention)
            warn_low_retention(retention)
        except BaseException:
            _remove(storage, written_keys)
            raise
        payload = Payload(key, report.stored_bytes, report.digest, report.raw_bytes, _base_digests(base))
        own = StoredFile(payload.digest, payload.size, storage, key)
        chain = () if isinstance(place, Path) else (*(self._base_chain if base is not None else ()), own)
        self._uncommitted = _UncommittedPayload(
            place, storage, written_keys, payload, written.reference, adopt, own.stamp(), chain
        )
        return report

    def commit_reference(self) -> None:
        """Make the committed checkpoint the reference for the next delta; nothing happens if nothing was written."""
        written, self._uncommitted = self._uncommitted, None
        if written is None:
            return
        store_reference = self._reference_cache.adopt if written.adopt else self._reference_cache.copy
        store_reference(written.payload, written.reference)
        self._base_verifier.mark_verified({written.payload.digest: written.stamp})
        self._base_dir, self._base_chain = written.place, written.chain
        self._remove_own_base_dir()

    def rollback(self) -> None:
        """Remove the uncommitted payload; the reference for the next delta is unchanged."""
        written, self._uncommitted = self._uncommitted, None
        if written is not None:
            _remove(written.storage, written.written_keys)

    def adopt(self, directory: AnyDirectory, payload: Payload, decoded: DecodedFile) -> None:
        """Make a loaded payload the reference for the next delta, and take over its tensors."""
        self._take_base(directory, payload)
        self._reference_cache.adopt(payload, decoded.reference)

    def adopt_encoded(self, directory: AnyDirectory, payload: Payload) -> None:
        """Make a payload that was loaded the reference for the next delta, which decodes it again."""
        self._take_base(directory, payload)
        self._reference_cache.adopt_encoded(payload, lambda: self._decode_base(payload))

    def _take_base(self, directory: AnyDirectory, payload: Payload) -> None:
        """Make the files of a payload that was loaded the base of the next delta."""
        self.rollback()
        place = resolve_directory(directory)
        chain = directory_chain(place, payload)
        files = tuple(StoredFile(file.digest, file.size or 0, file.storage, *file.keys) for file in chain)
        self._base_dir, self._base_chain = place, () if isinstance(place, Path) else files
        self._base_verifier.mark_verified({file.digest: file.stamp() for file in files})
        self._remove_own_base_dir()

    def _decode_base(self, payload: Payload) -> Reference:
        """Decode the files of the reference, wherever they are now."""
        assert self._base_dir is not None
        if isinstance(self._base_dir, Path):
            *_, (own_path, _) = _base_files(self._base_dir, payload)
            payload = replace(payload, name=str(own_path.relative_to(self._base_dir)))
        files = directory_chain(self._base_dir, payload)
        return decode_chain(files, threads=self._threads).reference

    def keep_base(self, directory: str | Path) -> None:
        """Keep the files that the next delta depends on; to be called before this directory is deleted.

        They are linked into a hidden directory beside it. If that is impossible, the next checkpoint is a keyframe.
        """
        root, payload = Path(directory).absolute(), self._reference_cache.manifest
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
        self._reference_cache.drop()
        self._base_dir, self._base_chain = None, ()
        self._remove_own_base_dir()

    def _usable_base(self) -> Payload | None:
        """The payload that the next delta can be made against; None if there is none."""
        payload = self._reference_cache.manifest
        if payload is None or self._base_dir is None:
            return None
        if not self.chain_limit.allows_delta(_chain_bytes(payload)):
            return None
        if not isinstance(self._base_dir, Path):  # whether its files are there is asked when they are needed
            return payload
        has_files = self._can_link and all(path.is_file() for path, _ in _base_files(self._base_dir, payload))
        return payload if has_files else None

    def _prepare_base(self, place: Path | ObjectUrl, storage: Storage, written_keys: list[str]) -> Payload | None:
        """The payload to write a delta against, its chain hard-linked into the directory, or in the same bucket; None,
        and no links, if that is impossible."""
        payload = self._usable_base()
        if payload is None or not _can_refer(place, self._base_dir):
            return None
        try:
            chain: Sequence[StoredFile] | None = self._base_chain
            if isinstance(storage, LocalStorage):
                chain = self._link_chain(storage, payload, written_keys)
            is_intact = chain is not None and self._base_verifier.find_damage(chain) is None
            if is_intact and self._reference_cache.ensure_decoded():
                return payload
        except (ShrinkpointError, OSError):  # deleted meanwhile
            pass
        _remove(storage, written_keys)
        written_keys.clear()
        return None

    def _link_chain(
        self, storage: LocalStorage, payload: Payload, written_keys: list[str]
    ) -> Sequence[StoredFile] | None:
        """Hard-link the files of the base into a directory; None if that is impossible."""
        assert isinstance(self._base_dir, Path)
        self._can_link = all(
            _link_file(path, storage, layout.base_name(digest), written_keys)
            for path, digest in _base_files(self._base_dir, payload)
        )
        if not self._can_link:
            return None
        storage.flush_dir(layout.BASES)
        return [StoredFile(base, size, storage, layout.base_name(base)) for base, size in _base_digests(payload)]

    def _base_name(self, place: Path | ObjectUrl, base: Payload) -> str:
        """The name of the base's file, relative to the directory that is written."""
        if isinstance(place, Path):
            return layout.base_name(base.digest)
        return posixpath.relpath(parse_object_url(self._base_chain[-1].where).prefix, place.prefix or ".")

    def _keyframe_of(self, scheme: Scheme, state: FlatState) -> QuantizedState:
        """Quantize for a keyframe, even if the scheme has planned a delta, which then turned out to be impossible."""
        if not isinstance(scheme, QuantizationPlan):
            return scheme.quantize(state, None)
        quantized = scheme.quantize(state, self._reference_cache.reference)
        tensors = {
            name: tensor
            for name, tensor in quantized.quantized.items()
            if not (isinstance(tensor, CodebookTensor) and tensor.residual)
        }
        return replace(quantized, quantized=tensors)

    def _remove_own_base_dir(self) -> None:
        base_dir, self._own_base_dir = self._own_base_dir, None
        if base_dir is not None and base_dir != self._base_dir:
            shutil.rmtree(base_dir, ignore_errors=True)


class _UncommittedPayload(NamedTuple):
    """A payload that waits for its checkpoint to be committed."""

    place: Path | ObjectUrl
    storage: Storage
    written_keys: list[str]
    payload: Payload
    reference: Reference
    adopt: bool
    stamp: object
    chain: tuple[StoredFile, ...]


def _can_refer(place: Path | ObjectUrl, base: Path | ObjectUrl | None) -> bool:
    """Whether a delta in one directory can name files of another one."""
    if isinstance(place, Path) or not isinstance(base, ObjectUrl):
        return isinstance(place, Path) and isinstance(base, Path)
    return (place.scheme, place.bucket) == (base.scheme, base.bucket)


def _base_files(directory: Path, payload: Payload) -> list[tuple[Path, str]]:
    """The paths of a chain's files and their digests, keyframe first."""
    bases = [(directory / layout.base_name(digest), digest) for digest, _ in payload.bases]
    own = directory / layout.base_name(payload.digest)  # if the directory itself was deleted
    return [*bases, (own if own.is_file() else directory / payload.name, payload.digest)]


def _chain_bytes(payload: Payload) -> ChainBytes:
    return ChainBytes(tuple(size for _, size in _base_digests(payload)), payload.raw_bytes)


def _base_digests(base: Payload | None) -> tuple[tuple[str, int], ...]:
    return () if base is None else (*base.bases, (base.digest, base.size))


def _link_file(path: Path, storage: LocalStorage, key: str, written_keys: list[str]) -> bool:
    if (storage.path / key).is_file():
        return True
    written_keys.append(key)
    return storage.link_file(path, key, flush=False)


def _remove(storage: Storage, keys: list[str]) -> None:
    for key in reversed(keys):
        with suppress(ShrinkpointError):
            storage.delete(key)


def _remove_stale_base_dirs(parent: Path) -> None:
    """Remove the hidden directories of processes that no longer run; one on another machine then writes a keyframe."""
    for path in parent.glob(f"{_BASE_DIR_PREFIX}*"):
        pid = path.name.removeprefix(_BASE_DIR_PREFIX)
        if pid.isdecimal() and not is_process_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
