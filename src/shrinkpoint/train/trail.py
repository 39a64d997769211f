"""A run whose checkpoints lie in folders that a framework names, keeps and deletes."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch

from shrinkpoint import arguments
from shrinkpoint.errors import MismatchError, ShrinkpointError, StorageError
from shrinkpoint.schemes import Resuming, Scheme, named
from shrinkpoint.state import FlatState, flatten, snapshot, unflatten
from shrinkpoint.storage import local_path, storage_error
from shrinkpoint.store import SaveReport
from shrinkpoint.store import folder as folders
from shrinkpoint.store.foldermanifest import FolderManifest
from shrinkpoint.store.placed import Device, placed
from shrinkpoint.store.tip import Tip
from shrinkpoint.store.unfold import decode
from shrinkpoint.train.metrics import numbers
from shrinkpoint.train.roles import with_parameters
from shrinkpoint.train.settling import settled
from shrinkpoint.train.worker import Worker

_log = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class Loaded:
    """What a folder held.

    Attributes:
        state: as it was saved, or as near as its scheme kept it.
        manifest: what the checkpoint says of itself.
    """

    state: Any
    manifest: FolderManifest


@dataclass(frozen=True)
class Passed:
    """A folder that was passed over, and why."""

    folder: Path
    reason: str


class Trail:
    """Saves the states of one run into folders, each a delta against the one before that needs no other folder.

    Memory on the host, beyond the loop's own: one state, the reference of the next delta; with `background`, or a
    state that is not on the CPU, a second one, the snapshot that is being written.

    Args:
        scheme: "lossless", or a scheme of one's own settings.
        keyframe_every: each chain has at most this many checkpoints, its keyframe included; None: no bound.
        background: `save` returns as soon as the state is copied, and writing goes on beside the loop; a save that
            comes too early waits for the one before.
        threads: native threads for coding; None: every core.
        model: which of the parts a scheme measures.

    Raises:
        PolicyError: a scheme nobody knows, or a number out of range.
    """

    def __init__(
        self, *, scheme: str | Scheme = "lossless", keyframe_every: int | None = 20, background: bool = False,
        threads: int | None = None, model: str = "model",
    ) -> None:  # fmt: skip
        self.stall = 0.0
        """Seconds for which the last `save` held up the loop."""
        self._scheme, self._background = named(scheme), arguments.flag("background", background)
        self._model, self._threads = arguments.text("model", model), arguments.threads(threads)
        self._tip = Tip(keyframe_every=keyframe_every, threads=threads)
        self._worker = Worker()
        self._target = ""  # what is written in the background, or was
        self._report: SaveReport | None = None
        self._last: FlatState | None = None  # the snapshot that the tip holds
        self._spare: FlatState | None = None  # the one before it, whose memory is free
        self._lossy_restores = 0  # behind the state that is being trained

    def __enter__(self) -> Trail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def scheme(self) -> Scheme:
        """What loses what."""
        return self._scheme

    def save(
        self,
        folder: str | Path,
        state: Mapping[str, Any],
        *,
        parts: Mapping[str, Any] | None = None,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        note: str = "",
        keyframe: bool = False,
        extra: Any = None,
    ) -> SaveReport | None:
        """Save. The state is that of this moment: the caller may step as soon as this returns.

        Args:
            folder: where; it may exist, with files of others in it. A checkpoint that is in it stands until this one
                is whole.
            state: any nest of dicts, lists, tuples, tensors and plain values.
            parts: the live objects behind top-level keys of `state`: they tell parameters from buffers, and a scheme
                may measure one of them.
            step: counts training steps.
            metrics: numbers, for people.
            keyframe: True: do not make a delta.
            extra: JSON, for the framework's own reader.

        Returns:
            What the save did; None in the background, where `wait` returns it, and where another process writes.

        Raises:
            StateError: the state holds something that cannot be stored.
            PolicyError: a metric that is no number; a scheme that measures a model, and there is none.
            StorageError: writing failed; every checkpoint that was there still loads.
            whatever the save before raised in the background; then this call has saved nothing.
        """
        began = time.perf_counter()
        try:
            self._worker.wait()
            target = local_path(folder, "folder").absolute()
            about = _About(step, numbers(metrics), note, keyframe, extra, self._lossy_restores)
            flat = with_parameters(flatten(dict(state)), parts or {})
            known = self._tip.known
            if keyframe and known is not None:
                known = replace(known, base=False)
            scheme = settled(self._scheme, flat, known, parts or {}, self._model)
            if scheme is None:
                return None
            if not self._background and all(tensor.device.type == "cpu" for tensor in flat.tensors.values()):
                return self._write(target, flat, scheme, about, adopt=False)
            spare, self._spare = self._spare, None
            copy = snapshot(flat, reuse=spare)
            if not self._background:
                return self._write(target, copy, scheme, about, adopt=True)
            self._announce(target)
            self._worker.start(f"saving {target}", lambda: self._write(target, copy, scheme, about, adopt=True))
            return None
        finally:
            self.stall = time.perf_counter() - began

    def load(self, folder: str | Path, *, device: Device = None, tie: bool = True) -> Loaded:
        """What a folder holds; training goes on from it, and the next save is a delta against it.

        What this process is writing into it is waited for.

        Args:
            device: where its tensors go; None: the CPU.
            tie: tensors that shared memory share it again.

        Raises:
            NotFoundError: there is no checkpoint of ours.
            MismatchError: several ranks wrote it: it is for torch.distributed.checkpoint to read.
            ChainError, FormatError: bytes are at fault.
            StorageError: reading failed.
        """
        self._worker.settle()
        settle(folder)
        manifest = folders.read_manifest(folder)
        if len(manifest.payloads) != 1:
            found, do = f"the payloads of {len(manifest.payloads)} ranks", "read it with shrinkpoint.train.dcp"
            raise MismatchError(str(folder), found=found, expected="the payload of one process", do=do)
        self._tip.drop()  # else there would be three states in memory
        decoded = decode(folder, threads=self._threads)
        tensors = placed(decoded.reference.tensors, device, copy=True)
        state = unflatten(decoded.tree, tensors, tie=tie, where=str(folder), max_bytes=decoded.left)
        self._tip.adopt(folder, decoded)
        self._last, self._spare = None, None
        self._lossy_restores = manifest.lossy_restores + manifest.is_lossy
        if isinstance(self._scheme, Resuming):
            self._scheme.resume(manifest.loss, self._lossy_restores)
        return Loaded(state, manifest)

    def discard(self, folder: str | Path) -> None:
        """Delete a folder with all that is in it, once nothing is being written into it; absent, nothing happens.

        What the next delta stands on is kept until that is written.

        Raises:
            StorageError: deleting failed.
        """
        self._worker.settle()
        path = local_path(folder, "folder")
        self._tip.release(path)
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(str(path), "deleting", error) from error

    def wait(self) -> SaveReport | None:
        """Wait until the last save is durable.

        Returns:
            What the last save that succeeded did; None if there is none yet.

        Raises:
            whatever a save raised in the background, once.
        """
        self._worker.wait()
        return self._report

    def close(self) -> None:
        """Wait, and free the memory. A later `save` begins a new chain.

        Raises:
            whatever a save raised in the background, once.
        """
        try:
            self._worker.wait()
        finally:
            self._last, self._spare = None, None
            self._tip.drop()

    def _announce(self, target: Path) -> None:
        """Let `settle` know what is going to be written."""
        with _GUARD:
            self._target = os.path.realpath(target)
            _WRITERS.add(self)

    @torch.no_grad()
    def _write(self, folder: Path, flat: FlatState, scheme: Scheme, about: _About, *, adopt: bool) -> SaveReport:
        last, self._last = self._last, None  # should saving fail, nobody knows which of them is held
        report = self._tip.write(folder, flat, scheme=scheme, keyframe=about.keyframe, adopt=adopt)
        try:
            folders.commit(
                folder, [self._tip.payload], scheme=report.scheme, step=about.step, metrics=about.metrics,
                lossy_restores=about.lossy_restores, loss=report.search, note=about.note, extra=about.extra,
            )  # fmt: skip
        except BaseException:
            # The manifest may stand all the same (a power cut's worth of doubt): then its payload must, too.
            if _stands(folder, self._tip.payload.digest):
                self._tip.promote()
            else:
                self._tip.abandon()
            raise
        self._tip.promote()
        if adopt:
            self._last, self._spare = flat, last
        self._report = replace(report, path=str(folder))
        return self._report


@dataclass(frozen=True)
class _About:
    step: int | None
    metrics: Mapping[str, float]
    note: str
    keyframe: bool
    extra: Any
    lossy_restores: int


_GUARD = threading.Lock()
_WRITERS: WeakSet[Trail] = WeakSet()
"""Trails of this process that have written in the background."""


def settle(folder: str | Path) -> None:
    """Wait for what this process is writing into a folder; an error of that stays for who saves there."""
    target = os.path.realpath(local_path(folder, "folder"))
    with _GUARD:
        writers = [trail for trail in _WRITERS if trail._target == target]
    for trail in writers:
        trail._worker.settle()


def first_whole(candidates: Iterable[Path], *, deep: bool = True) -> tuple[Path | None, tuple[Passed, ...]]:
    """The first folder with a whole checkpoint, and those before it that have none; these are said aloud.

    Args:
        candidates: the newest first.
        deep: compare every stored byte with its digest, as reading would.
    """
    passed: list[Passed] = []
    for folder in candidates:
        try:
            folders.check(folder, deep=deep)
            return folder, tuple(passed)
        except ShrinkpointError as error:
            passed.append(Passed(folder, str(error)))
            _log.warning("%s is passed over: %s", folder, error)
    return None, tuple(passed)


def _stands(folder: Path, digest: str) -> bool:
    """Whether a folder's manifest names this payload; where nobody can tell, it might."""
    try:
        return any(one.digest == digest for one in folders.read_manifest(folder).payloads)
    except StorageError:
        return True
    except ShrinkpointError:
        return False
