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

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, ShrinkpointError, StorageError
from shrinkpoint.schemes.base import Resumable, Scheme
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.storage import local_path, storage_error
from shrinkpoint.store import SaveReport, SkippedCheckpoint
from shrinkpoint.store import directory as folders
from shrinkpoint.store.checkpoint_file import Device, to_device
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.delta_writer import DeltaWriter
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.tensors.flat_state import FlatState, snapshot
from shrinkpoint.tensors.flatten import flatten, unflatten
from shrinkpoint.train.background import BackgroundWorker
from shrinkpoint.train.planning import make_plan
from shrinkpoint.train.state_dicts import as_floats, mark_parameters

_log = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class DirectoryRestore:
    """What a folder held.

    Attributes:
        state: as it was saved, or as near as its scheme kept it.
        manifest: what the checkpoint says of itself.
    """

    state: Any
    manifest: DirectoryManifest


class Checkpointer:
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
        self,
        *,
        scheme: str | Scheme = "lossless",
        keyframe_every: int | None = 20,
        background: bool = False,
        threads: int | None = None,
        model: str = "model",
    ) -> None:
        self.stall_seconds = 0.0
        """Seconds for which the last `save` held up the loop."""
        self._scheme, self._background = get_scheme(scheme), validate.check_bool("background", background)
        self._model, self._threads = validate.check_str("model", model), validate.check_threads(threads)
        self._delta_writer = DeltaWriter(keyframe_every=keyframe_every, threads=threads)
        self._worker = BackgroundWorker()
        self._pending_directory = ""  # what is written in the background, or was
        self._last_report: SaveReport | None = None
        self._reference_snapshot: FlatState | None = None  # the snapshot that the tip holds
        self._free_snapshot: FlatState | None = None  # the one before it, whose memory is free
        self._lossy_restores = 0  # behind the state that is being trained

    def __enter__(self) -> Checkpointer:
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
        directory: str | Path,
        state: Mapping[str, Any],
        *,
        objects: Mapping[str, Any] | None = None,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        note: str = "",
        keyframe: bool = False,
        extra: Any = None,
    ) -> SaveReport | None:
        """Save. The state is that of this moment: the caller may step as soon as this returns.

        Args:
            directory: where; it may exist, with files of others in it. A checkpoint that is in it stands until this one
                is whole.
            state: any nest of dicts, lists, tuples, tensors and plain values.
            objects: the live objects behind top-level keys of `state`: they tell parameters from buffers, and a scheme
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
            target = local_path(directory, "folder").absolute()
            about = _SaveOptions(step, as_floats(metrics), note, keyframe, extra, self._lossy_restores)
            flat = mark_parameters(flatten(dict(state)), objects or {})
            known = self._delta_writer.last_reference
            if keyframe and known is not None:
                known = replace(known, is_base=False)
            scheme = make_plan(self._scheme, flat, known, objects or {}, self._model)
            if scheme is None:
                return None
            if not self._background and all(tensor.device.type == "cpu" for tensor in flat.tensors.values()):
                return self._write(target, flat, scheme, about, adopt=False)
            spare, self._free_snapshot = self._free_snapshot, None
            copy = snapshot(flat, reuse=spare)
            if not self._background:
                return self._write(target, copy, scheme, about, adopt=True)
            self._register_writer(target)
            self._worker.start(f"saving {target}", lambda: self._write(target, copy, scheme, about, adopt=True))
            return None
        finally:
            self.stall_seconds = time.perf_counter() - began

    def load(self, directory: str | Path, *, device: Device = None, tie: bool = True) -> DirectoryRestore:
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
        self._worker.join()
        wait_for_writes(directory)
        manifest = folders.read_directory_manifest(directory)
        if len(manifest.payloads) != 1:
            found, do = f"the payloads of {len(manifest.payloads)} ranks", "read it with shrinkpoint.train.dcp"
            raise MismatchError(str(directory), found=found, expected="the payload of one process", do=do)
        self._delta_writer.drop()  # else there would be three states in memory
        decoded = decode_directory(directory, threads=self._threads)
        tensors = to_device(decoded.reference.tensors, device, copy=True)
        state = unflatten(decoded.tree, tensors, tie=tie, where=str(directory), max_bytes=decoded.max_copy_bytes)
        self._delta_writer.adopt(directory, decoded)
        self._reference_snapshot, self._free_snapshot = None, None
        self._lossy_restores = manifest.lossy_restores + manifest.is_lossy
        if isinstance(self._scheme, Resumable):
            self._scheme.resume(manifest.loss, self._lossy_restores)
        return DirectoryRestore(state, manifest)

    def discard(self, directory: str | Path) -> None:
        """Delete a folder with all that is in it, once nothing is being written into it; absent, nothing happens.

        What the next delta stands on is kept until that is written.

        Raises:
            StorageError: deleting failed.
        """
        self._worker.join()
        path = local_path(directory, "folder")
        self._delta_writer.keep_base(path)
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
        return self._last_report

    def close(self) -> None:
        """Wait, and free the memory. A later `save` begins a new chain.

        Raises:
            whatever a save raised in the background, once.
        """
        try:
            self._worker.wait()
        finally:
            self._reference_snapshot, self._free_snapshot = None, None
            self._delta_writer.drop()

    def _register_writer(self, directory: Path) -> None:
        """Let `settle` know what is going to be written."""
        with _WRITERS_LOCK:
            self._pending_directory = os.path.realpath(directory)
            _WRITERS.add(self)

    @torch.no_grad()
    def _write(
        self, directory: Path, state: FlatState, scheme: Scheme, save_options: _SaveOptions, *, adopt: bool
    ) -> SaveReport:
        last, self._reference_snapshot = (
            self._reference_snapshot,
            None,
        )  # should saving fail, nobody knows which of them is held
        report = self._delta_writer.write(directory, state, scheme=scheme, keyframe=save_options.keyframe, adopt=adopt)
        try:
            folders.commit(
                directory,
                [self._delta_writer.payload],
                scheme=report.scheme,
                step=save_options.step,
                metrics=save_options.metrics,
                lossy_restores=save_options.lossy_restores,
                loss=report.loss_report,
                note=save_options.note,
                extra=save_options.extra,
            )
        except BaseException:
            # The manifest may stand all the same (a power cut's worth of doubt): then its payload must, too.
            if _may_be_committed(directory, self._delta_writer.payload.digest):
                self._delta_writer.commit_reference()
            else:
                self._delta_writer.rollback()
            raise
        self._delta_writer.commit_reference()
        if adopt:
            self._reference_snapshot, self._free_snapshot = state, last
        self._last_report = replace(report, path=str(directory))
        return self._last_report


@dataclass(frozen=True)
class _SaveOptions:
    step: int | None
    metrics: Mapping[str, float]
    note: str
    keyframe: bool
    extra: Any
    lossy_restores: int


_WRITERS_LOCK = threading.Lock()
_WRITERS: WeakSet[Checkpointer] = WeakSet()
"""Trails of this process that have written in the background."""


def wait_for_writes(directory: str | Path) -> None:
    """Wait for what this process is writing into a folder; an error of that stays for who saves there."""
    target = os.path.realpath(local_path(directory, "folder"))
    with _WRITERS_LOCK:
        writers = [trail for trail in _WRITERS if trail._pending_directory == target]
    for trail in writers:
        trail._worker.join()


def latest_valid(candidates: Iterable[Path], *, deep: bool = True) -> tuple[Path | None, tuple[SkippedCheckpoint, ...]]:
    """The first folder with a whole checkpoint, and those before it that have none; these are said aloud.

    Args:
        candidates: the newest first.
        deep: compare every stored byte with its digest, as reading would.
    """
    passed: list[SkippedCheckpoint] = []
    for folder in candidates:
        try:
            folders.verify_directory(folder, deep=deep)
            return folder, tuple(passed)
        except ShrinkpointError as error:
            passed.append(SkippedCheckpoint(str(error), directory=folder))
            _log.warning("%s is passed over: %s", folder, error)
    return None, tuple(passed)


def _may_be_committed(directory: Path, digest: str) -> bool:
    """Whether a folder's manifest names this payload; where nobody can tell, it might."""
    try:
        return any(one.digest == digest for one in folders.read_directory_manifest(directory).payloads)
    except StorageError:
        return True
    except ShrinkpointError:
        return False
