"""One writer's end of a chain whose checkpoints lie in folders of a framework's own."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shrinkpoint import validate
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.schemes.base import QuantizedState, Scheme
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.storage import LocalStorage, local_path
from shrinkpoint.store import layout
from shrinkpoint.store.base_verification import BaseVerifier, StoredFile
from shrinkpoint.store.chain import directory_chain
from shrinkpoint.store.checkpoint_file import DecodedFile, SaveReport, write_file
from shrinkpoint.store.directory import own_keys, read_directory_manifest
from shrinkpoint.store.manifest import Payload
from shrinkpoint.store.reference import ReferenceCache, as_delta_base, warn_low_retention
from shrinkpoint.tensors.flat_state import FlatState

_BASE_DIR_PREFIX = ".shrinkpoint.base-"
"""How the directory is called that keeps, beside a deleted folder, what the next delta stands on; then a process id."""


class DeltaWriter:
    """What one writer holds of the last checkpoint of its chain: its values, and where its files lie.

    Expects: `write`, then, once the checkpoint is committed, `commit_reference`; or `rollback`. Until
        `commit_reference`, the next delta
    would stand on what it stood on before.

    Memory: one state on the CPU; of what a lossy scheme quantizes also the values before that, and a byte for each.

    Args:
        keyframe_every: a chain has at most this many files, its keyframe included; None: no bound.
        threads: native threads for coding; None: every core.

    Raises:
        PolicyError: one of them is no such number.
    """

    def __init__(self, *, keyframe_every: int | None = 20, threads: int | None = None) -> None:
        keyframe_every, threads = validate.check_keyframe_every(keyframe_every), validate.check_threads(threads)
        self._max_files, self._threads = keyframe_every, threads
        self._can_link = True  # as far as is known
        self._reference_cache: ReferenceCache[Payload] = ReferenceCache()
        self._base_verifier = BaseVerifier()
        self._base_dir: Path | None = None  # the directory with the files of what is held
        self._own_base_dir: Path | None = None  # that directory, where it is one of ours
        self._uncommitted: _UncommittedPayload | None = None

    @property
    def reference(self) -> Reference | None:
        """What a reader gets of the last checkpoint; None: the next one is a keyframe, as far as can be told."""
        return self._reference_cache.reference if self._usable_base() is not None else None

    @property
    def last_reference(self) -> Reference | None:
        """What a reader gets of the last checkpoint, whether or not the next one can be a delta; None: not known."""
        return (
            None
            if self._reference_cache.manifest is None
            else as_delta_base(self._reference_cache.reference, base=self._usable_base() is not None)
        )

    @property
    def payload(self) -> Payload:
        """What `write` wrote."""
        if self._uncommitted is None:
            raise PolicyError("Tip", found="nothing that was written", expected="`write` first")
        return self._uncommitted.payload

    def write(
        self,
        directory: str | Path,
        state: FlatState,
        *,
        scheme: Scheme,
        rank: int = 0,
        keyframe: bool = False,
        adopt: bool = False,
    ) -> SaveReport:
        """Write a payload and the links it needs, durably; no checkpoint before `folder.commit`.

        Args:
            keyframe: True: do not make a delta.
            adopt: the tensors of `state` become the tip's own; else they must stay as they are until `promote`, which
                copies them, or `rollback`.

        Raises:
            StorageError: writing failed; nothing of it is left.
        """
        self.rollback()
        storage = LocalStorage(local_path(directory).absolute())
        made: list[str] = []
        try:
            base = None if keyframe else self._link_base(storage, made)
            reference = None if base is None else self._reference_cache.reference
            key = layout.payload_name(own_keys(storage.path), rank)
            kept = scheme.quantize(state, reference) if base is not None else self._keyframe_of(scheme, state)
            if kept.keyframe:
                _remove(storage, made)
                made.clear()
                base = reference = None
            made.append(key)
            written = write_file(
                storage, key, kept, scheme=scheme, reference=reference, parent=_parent_json(base), threads=self._threads
            )
            report = replace(
                written.report, retention=self._reference_cache.retained_progress(state, written.reference)
            )
            warn_low_retention(report.retention)
        except BaseException:
            _remove(storage, made)
            raise
        payload = Payload(key, report.stored_bytes, report.digest, report.raw_bytes, _base_digests(base))
        stamp = StoredFile(payload.digest, payload.size, storage, key).stamp()
        self._uncommitted = _UncommittedPayload(storage, made, payload, written.reference, state, adopt, stamp)
        return report

    def commit_reference(self) -> None:
        """The checkpoint is committed: the next delta stands on it. Nothing happens where nothing was written."""
        written, self._uncommitted = self._uncommitted, None
        if written is None:
            return
        take = self._reference_cache.adopt if written.adopt else self._reference_cache.copy
        take(written.payload, written.reference, written.state.tensors)
        self._base_verifier.mark_verified({written.payload.digest: written.stamp})
        self._base_dir = written.storage.path
        self._remove_own_base_dir()

    def rollback(self) -> None:
        """The checkpoint is not to be: remove what was written of it. The base stays."""
        written, self._uncommitted = self._uncommitted, None
        if written is not None:
            _remove(written.storage, written.written_keys)

    def adopt(self, directory: str | Path, decoded: DecodedFile, rank: int = 0) -> None:
        """What was loaded is what the next delta stands on; its tensors become the tip's own."""
        self.rollback()
        payload, storage = read_directory_manifest(directory).payloads[rank], LocalStorage(Path(directory).absolute())
        self._reference_cache.adopt(payload, decoded.reference)
        self._base_dir = storage.path
        keys = [file.keys[0] for file in directory_chain(storage.path, payload)]
        files = [
            StoredFile(digest, size, storage, key)
            for (digest, size), key in zip(_base_digests(payload), keys, strict=True)
        ]
        self._base_verifier.mark_verified({file.digest: file.stamp() for file in files})
        self._remove_own_base_dir()

    def keep_base(self, directory: str | Path) -> None:
        """The caller is about to delete this folder: keep what the next delta stands on, until it is written.

        It goes into a hidden directory beside the folder. Where that is impossible, the next checkpoint is a keyframe.
        """
        root, payload = Path(directory).absolute(), self._reference_cache.manifest
        if payload is None or self._base_dir != root:
            return
        kept = root.parent / f"{_BASE_DIR_PREFIX}{os.getpid()}"
        storage = LocalStorage(kept)
        with suppress(ShrinkpointError, OSError):
            _remove_stale_base_dirs(root.parent)
            if all(storage.link_file(path, layout.base_name(digest)) for path, digest in _base_files(root, payload)):
                self._base_dir = self._own_base_dir = kept

    def drop(self) -> None:
        """Hold nothing, and free the memory: the next checkpoint is a keyframe."""
        self.rollback()
        self._reference_cache.drop()
        self._base_dir = None
        self._remove_own_base_dir()

    def _usable_base(self) -> Payload | None:
        """What the next delta would stand on; None: nothing can."""
        payload = self._reference_cache.manifest
        if payload is None or self._base_dir is None or not self._can_link:
            return None
        if self._max_files is not None and len(payload.bases) + 1 >= self._max_files:
            return None
        return payload if all(path.is_file() for path, _ in _base_files(self._base_dir, payload)) else None

    def _link_base(self, storage: LocalStorage, written_keys: list[str]) -> Payload | None:
        """Link the chain into a folder; None, and no links, where that cannot be done."""
        payload = self._usable_base()
        if payload is None or self._base_dir is None:
            return None
        try:
            self._can_link = all(
                _link_file(path, storage, layout.base_name(digest), written_keys)
                for path, digest in _base_files(self._base_dir, payload)
            )
            if self._can_link and self._base_verifier.find_damage(_linked_files(storage, payload)) is None:
                return payload
        except (ShrinkpointError, OSError):  # deleted meanwhile
            pass
        _remove(storage, written_keys)
        written_keys.clear()
        return None

    def _keyframe_of(self, scheme: Scheme, state: FlatState) -> QuantizedState:
        """What a scheme keeps for a keyframe, even if it has decided for a delta, before that turned out impossible."""
        if not isinstance(scheme, QuantizationPlan):
            return scheme.quantize(state, None)
        kept = scheme.quantize(state, self._reference_cache.reference)
        differences = {name for name, one in kept.quantized.items() if isinstance(one, CodebookTensor) and one.residual}
        return replace(kept, quantized={name: one for name, one in kept.quantized.items() if name not in differences})

    def _remove_own_base_dir(self) -> None:
        kept, self._own_base_dir = self._own_base_dir, None
        if kept is not None and kept != self._base_dir:
            shutil.rmtree(kept, ignore_errors=True)


class _UncommittedPayload:
    """A payload that waits for its checkpoint to be committed."""

    def __init__(
        self,
        storage: LocalStorage,
        written_keys: list[str],
        payload: Payload,
        reference: Reference,
        state: FlatState,
        adopt: bool,
        stamp: object,
    ) -> None:
        self.stamp = stamp
        self.storage, self.written_keys, self.payload = storage, written_keys, payload
        self.reference, self.state, self.adopt = reference, state, adopt


def _base_files(directory: Path, payload: Payload) -> list[tuple[Path, str]]:
    """The files of a chain and their digests, keyframe first."""
    bases = [(directory / layout.base_name(digest), digest) for digest, _ in payload.bases]
    own = directory / layout.base_name(payload.digest)  # where the folder itself is gone
    return [*bases, (own if own.is_file() else directory / payload.name, payload.digest)]


def _linked_files(storage: LocalStorage, payload: Payload) -> list[StoredFile]:
    """A chain's files as they are linked into the folder of the next checkpoint."""
    chain = [*payload.bases, (payload.digest, payload.size)]
    return [StoredFile(digest, size, storage, layout.base_name(digest)) for digest, size in chain]


def _base_digests(base: Payload | None) -> tuple[tuple[str, int], ...]:
    return () if base is None else (*base.bases, (base.digest, base.size))


def _parent_json(base: Payload | None) -> dict[str, str] | None:
    """How a reader of the payload alone finds its base."""
    return None if base is None else {"name": layout.base_name(base.digest), "digest": base.digest}


def _link_file(path: Path, storage: LocalStorage, key: str, written_keys: list[str]) -> bool:
    if (storage.path / key).is_file():
        return True
    written_keys.append(key)
    return storage.link_file(path, key)


def _remove(storage: LocalStorage, keys: list[str]) -> None:
    for key in reversed(keys):
        with suppress(ShrinkpointError):
            storage.delete(key)


def _remove_stale_base_dirs(parent: Path) -> None:
    """Remove what processes kept that are no more; one on another machine then writes a keyframe."""
    for path in parent.glob(f"{_BASE_DIR_PREFIX}*"):
        pid = path.name.removeprefix(_BASE_DIR_PREFIX)
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
