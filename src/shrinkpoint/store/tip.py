"""One writer's end of a chain whose checkpoints lie in folders of a framework's own."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shrinkpoint import arguments
from shrinkpoint.codec import Reference, Symbols
from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.schemes import Kept, Scheme, Settled
from shrinkpoint.state import FlatState
from shrinkpoint.storage import LocalStorage, local_path
from shrinkpoint.store import layout
from shrinkpoint.store.file import Decoded, SaveReport, write_file
from shrinkpoint.store.folder import files, names, read_manifest
from shrinkpoint.store.foldermanifest import Payload
from shrinkpoint.store.held import Held, as_base, warn_of
from shrinkpoint.store.verification import Link, Verification

_KEPT = ".shrinkpoint.base-"
"""How the directory is called that keeps, beside a deleted folder, what the next delta stands on; then a process id."""


class Tip:
    """What one writer holds of the last checkpoint of its chain: its values, and where its files lie.

    Expects: `write`, then, once the checkpoint is committed, `promote`; or `abandon`. Until `promote`, the next delta
    would stand on what it stood on before.

    Memory: one state on the CPU; of what a lossy scheme quantizes also the values before that, and a byte for each.

    Args:
        keyframe_every: a chain has at most this many files, its keyframe included; None: no bound.
        threads: native threads for coding; None: every core.

    Raises:
        PolicyError: one of them is no such number.
    """

    def __init__(self, *, keyframe_every: int | None = 20, threads: int | None = None) -> None:
        keyframe_every, threads = arguments.keyframe_every(keyframe_every), arguments.threads(threads)
        self._most, self._threads = keyframe_every, threads
        self._links = True  # as far as is known
        self._held: Held[Payload] = Held()
        self._verification = Verification()
        self._at: Path | None = None  # the directory with the files of what is held
        self._kept: Path | None = None  # that directory, where it is one of ours
        self._written: _Written | None = None

    @property
    def reference(self) -> Reference | None:
        """What a reader gets of the last checkpoint; None: the next one is a keyframe, as far as can be told."""
        return self._held.reference if self._standing() is not None else None

    @property
    def known(self) -> Reference | None:
        """What a reader gets of the last checkpoint, whether or not the next one can be a delta; None: not known."""
        return None if self._held.manifest is None else as_base(self._held.reference, base=self._standing() is not None)

    @property
    def payload(self) -> Payload:
        """What `write` wrote."""
        if self._written is None:
            raise PolicyError("Tip", found="nothing that was written", expected="`write` first")
        return self._written.payload

    def write(
        self, folder: str | Path, flat: FlatState, *, scheme: Scheme, rank: int = 0, keyframe: bool = False,
        adopt: bool = False,
    ) -> SaveReport:  # fmt: skip
        """Write a payload and the links it needs, durably; no checkpoint before `folder.commit`.

        Args:
            keyframe: True: do not make a delta.
            adopt: the tensors of `flat` become the tip's own; else they must stay as they are until `promote`, which
                copies them, or `abandon`.

        Raises:
            StorageError: writing failed; nothing of it is left.
        """
        self.abandon()
        storage = LocalStorage(local_path(folder).absolute())
        made: list[str] = []
        try:
            base = None if keyframe else self._linked(storage, made)
            reference = None if base is None else self._held.reference
            key = layout.payload_name(names(storage.path), rank)
            kept = scheme.quantize(flat, reference) if base is not None else self._alone(scheme, flat)
            if kept.keyframe:
                _remove(storage, made)
                made.clear()
                base = reference = None
            made.append(key)
            written = write_file(
                storage, key, kept, scheme=scheme, reference=reference, parent=_parent(base), threads=self._threads
            )
            report = replace(written.report, retention=self._held.progress(flat, written.reference))
            warn_of(report.retention)
        except BaseException:
            _remove(storage, made)
            raise
        payload = Payload(key, report.stored_bytes, report.digest, report.raw_bytes, _below(base))
        stamp = Link(payload.digest, payload.size, storage, key).stamp()
        self._written = _Written(storage, made, payload, written.reference, flat, adopt, stamp)
        return report

    def promote(self) -> None:
        """The checkpoint is committed: the next delta stands on it. Nothing happens where nothing was written."""
        written, self._written = self._written, None
        if written is None:
            return
        take = self._held.adopt if written.adopt else self._held.copy
        take(written.payload, written.reference, written.flat.tensors)
        self._verification.learn({written.payload.digest: written.stamp})
        self._at = written.storage.path
        self._drop_kept()

    def abandon(self) -> None:
        """The checkpoint is not to be: remove what was written of it. The base stays."""
        written, self._written = self._written, None
        if written is not None:
            _remove(written.storage, written.made)

    def adopt(self, folder: str | Path, decoded: Decoded, rank: int = 0) -> None:
        """What was loaded is what the next delta stands on; its tensors become the tip's own."""
        self.abandon()
        payload, storage = read_manifest(folder).payloads[rank], LocalStorage(Path(folder).absolute())
        self._held.adopt(payload, decoded.reference)
        self._at = storage.path
        links = [Link(digest, size, storage, key) for key, digest, size in files(payload)]
        self._verification.learn({link.digest: link.stamp() for link in links})
        self._drop_kept()

    def release(self, folder: str | Path) -> None:
        """The caller is about to delete this folder: keep what the next delta stands on, until it is written.

        It goes into a hidden directory beside the folder. Where that is impossible, the next checkpoint is a keyframe.
        """
        root, payload = Path(folder).absolute(), self._held.manifest
        if payload is None or self._at != root:
            return
        kept = root.parent / f"{_KEPT}{os.getpid()}"
        storage = LocalStorage(kept)
        with suppress(ShrinkpointError, OSError):
            _sweep(root.parent)
            if all(storage.link_file(path, layout.base_name(digest)) for path, digest in _files(root, payload)):
                self._at = self._kept = kept

    def drop(self) -> None:
        """Hold nothing, and free the memory: the next checkpoint is a keyframe."""
        self.abandon()
        self._held.drop()
        self._at = None
        self._drop_kept()

    def _standing(self) -> Payload | None:
        """What the next delta would stand on; None: nothing can."""
        payload = self._held.manifest
        if payload is None or self._at is None or not self._links:
            return None
        if self._most is not None and len(payload.bases) + 1 >= self._most:
            return None
        return payload if all(path.is_file() for path, _ in _files(self._at, payload)) else None

    def _linked(self, storage: LocalStorage, made: list[str]) -> Payload | None:
        """Link the chain into a folder; None, and no links, where that cannot be done."""
        payload = self._standing()
        if payload is None or self._at is None:
            return None
        try:
            self._links = all(
                _link(path, storage, layout.base_name(digest), made) for path, digest in _files(self._at, payload)
            )
            if self._links and self._verification.doubt(_links(storage, payload)) is None:
                return payload
        except (ShrinkpointError, OSError):  # deleted meanwhile
            pass
        _remove(storage, made)
        made.clear()
        return None

    def _alone(self, scheme: Scheme, flat: FlatState) -> Kept:
        """What a scheme keeps for a keyframe, even if it has decided for a delta, before that turned out impossible."""
        if not isinstance(scheme, Settled):
            return scheme.quantize(flat, None)
        kept = scheme.quantize(flat, self._held.reference)
        differences = {name for name, one in kept.symbols.items() if isinstance(one, Symbols) and one.residual}
        return replace(kept, symbols={name: one for name, one in kept.symbols.items() if name not in differences})

    def _drop_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None and kept != self._at:
            shutil.rmtree(kept, ignore_errors=True)


class _Written:
    """A payload that waits for its checkpoint to be committed."""

    def __init__(
        self, storage: LocalStorage, made: list[str], payload: Payload, reference: Reference, flat: FlatState,
        adopt: bool, stamp: object,
    ) -> None:  # fmt: skip
        self.stamp = stamp
        self.storage, self.made, self.payload = storage, made, payload
        self.reference, self.flat, self.adopt = reference, flat, adopt


def _files(at: Path, payload: Payload) -> list[tuple[Path, str]]:
    """The files of a chain and their digests, keyframe first."""
    bases = [(at / layout.base_name(digest), digest) for digest, _ in payload.bases]
    own = at / layout.base_name(payload.digest)  # where the folder itself is gone
    return [*bases, (own if own.is_file() else at / payload.name, payload.digest)]


def _links(storage: LocalStorage, payload: Payload) -> list[Link]:
    """A chain's files as they are linked into the folder of the next checkpoint."""
    chain = [*payload.bases, (payload.digest, payload.size)]
    return [Link(digest, size, storage, layout.base_name(digest)) for digest, size in chain]


def _below(base: Payload | None) -> tuple[tuple[str, int], ...]:
    return () if base is None else (*base.bases, (base.digest, base.size))


def _parent(base: Payload | None) -> dict[str, str] | None:
    """How a reader of the payload alone finds its base."""
    return None if base is None else {"name": layout.base_name(base.digest), "digest": base.digest}


def _link(path: Path, storage: LocalStorage, key: str, made: list[str]) -> bool:
    if (storage.path / key).is_file():
        return True
    made.append(key)
    return storage.link_file(path, key)


def _remove(storage: LocalStorage, keys: list[str]) -> None:
    for key in reversed(keys):
        with suppress(ShrinkpointError):
            storage.delete(key)


def _sweep(parent: Path) -> None:
    """Remove what processes kept that are no more; one on another machine then writes a keyframe."""
    for path in parent.glob(f"{_KEPT}*"):
        pid = path.name.removeprefix(_KEPT)
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
