"""Saves the states of one training run into directories that a framework names, keeps and deletes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from shrinkpoint import validate
from shrinkpoint.codec.reference import Reference, is_mostly_codes
from shrinkpoint.errors import MismatchError, ShrinkpointError, StorageError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.storage import AnyDirectory, ObjectUrl, is_object_url, resolve_directory
from shrinkpoint.store import Keep, SaveReport
from shrinkpoint.store import directory as directories
from shrinkpoint.store.chain import manifest_identity, use_current
from shrinkpoint.store.checkpoint_file import DecodedFile, Device, build_state
from shrinkpoint.store.decode import decode_payload
from shrinkpoint.store.delta_writer import DeltaWriter
from shrinkpoint.store.directory_retention import chains_to_strip, directories_to_reverse, plan_run
from shrinkpoint.store.directory_rewrite import MomentFilter, RunRewriter
from shrinkpoint.store.identify import is_checkpoint
from shrinkpoint.store.manifest import DirectoryManifest, check_note
from shrinkpoint.store.retention import check_keep
from shrinkpoint.store.rewrite import has_memory_to_reverse
from shrinkpoint.store.save_settings import OnSave, SaveSettings
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import JSON
from shrinkpoint.threads import ForkSafeLock
from shrinkpoint.train.background import BackgroundSaver, make_save_plan
from shrinkpoint.train.restore_result import RestoreResult
from shrinkpoint.train.state_dicts import mark_parameters

_log = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class SaveOptions:
    """Arguments of one save into a directory."""

    step: int | None = None  # number of the training step; None if not given
    metrics: Mapping[str, float] = field(default_factory=dict)  # numbers by name, for people
    note: str = ""  # free text, for people
    keyframe: bool = False  # write a keyframe even where a delta is possible
    extra: JSON = None  # JSON for the framework's own reader

    def manifest_fields(self) -> dict[str, Any]:
        """The fields of the manifest that these options fill."""
        return {"step": self.step, "metrics": self.metrics, "note": self.note, "extra": self.extra}


class Checkpointer(BackgroundSaver):
    """Saves the states of one run into directories, each a delta that needs no other directory to be read.

    A directory may be a URL such as "s3://bucket/run/step-100". There it is a keyframe: a bucket has no links.

    Memory on the host, beyond the loop's own: the reference of the next delta, one state, but a byte a value of what is
    on lattices (the scheme `fisher`). With `background`, or a state that is not on the CPU, one state more: the
    snapshot that is being written, whose memory the next one takes. With `background`, CUDA devices that have twice the
    state's size free hold a copy of it until it has been planned for and brought to the host.

    Args:
        scheme, keyframe_every, background, threads, max_bytes, on_save: see `SaveSettings`.
        model: name of the object that a scheme evaluates.

    Raises:
        PolicyError: an unknown scheme, or a number out of range.
    """

    def __init__(
        self,
        *,
        scheme: str | Scheme = "lossless",
        keyframe_every: int | None = 20,
        background: bool = False,
        threads: int | None = None,
        max_bytes: int | None = None,
        model: str = "model",
        on_save: OnSave | None = None,
    ) -> None:
        super().__init__(SaveSettings(scheme, keyframe_every, background, threads, max_bytes, on_save))
        self._take_scheme(id(self))
        self._model = validate.check_str("model", model)
        self._delta_writer = DeltaWriter(keyframe_every=keyframe_every, threads=threads)
        self._restored: tuple[Path | ObjectUrl, DirectoryManifest] | None = None  # which the next save goes on from
        self._root: Path | ObjectUrl | None = None  # the directory of the run that is saved
        self._deletes, self._is_exact, self._protected = False, False, tuple[Path | ObjectUrl, ...]()  # see `retain`
        self._settled: set[str] = set()  # digests of what is not written again without moments: that frees nothing
        self._last_step: int | None = None  # of the last save
        self._pending_directory = ""  # real path of the last directory that was written

    @property
    def _load_limits(self) -> dict[str, Any]:
        return {"threads": self._settings.threads, "max_bytes": self._settings.max_bytes}

    def retain(
        self,
        keep: Keep | None,
        *,
        deletes: bool = False,
        is_exact: bool = True,
        protected: Collection[Path | ObjectUrl] = (),
    ) -> None:
        """Set the rules of retention, by which chains end before they hold more than plain checkpoints would.

        The checkpoints of a run are those beside each other whose names differ in numbers alone. After each save, older
        ones are written again where the rules want that (`moments_last`) or where it saves bytes.

        Args:
            keep: None: all are kept, or nobody knows.
            deletes: this deletes what the rules do not keep; False: the framework does.
            is_exact: the framework keeps just what the rules keep.
            protected: never deleted; where the framework deletes, these are of the run whatever their names are.

        Raises:
            PolicyError: `keep` is no `Keep`.
        """
        limit = self._delta_writer.chain_limit
        limit.keep = check_keep(keep)
        limit.can_reverse = has_memory_to_reverse if is_exact else None
        self._deletes, self._is_exact = deletes, is_exact
        self._protected = tuple(map(resolve_directory, protected))

    def save(
        self,
        directory: AnyDirectory,
        state: Mapping[str, Any],
        *,
        objects: Mapping[str, Any] | None = None,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        note: str = "",
        keyframe: bool = False,
        extra: Any = None,
    ) -> SaveReport | None:
        """Save the state as it is now: the caller may take the next step as soon as this returns.

        Args:
            directory: where; it may exist and hold other files. A checkpoint in it stays valid until the new one is
                complete.
            state: any nest of dicts, lists, tuples, tensors and plain values.
            objects: the live objects behind top-level keys of `state`: they tell parameters from buffers, and a scheme
                may evaluate one of them.
            step: number of the training step.
            metrics: numbers, for people.
            note: free text, for people.
            keyframe: True: do not write a delta.
            extra: JSON, for the framework's own reader.

        Returns:
            The report of the save; None if another process writes. In the background a `PendingReport`, which has the
            same attributes: asking for one waits for the save, `done()` does not.

        Raises:
            StateError: the state holds something that cannot be stored.
            PolicyError: a metric that is not a number, a note that is no text, an `extra` that nests too deep; a scheme
                that evaluates a model, and there is none.
            StorageError: writing failed; every checkpoint that was there still loads.
            Exception: whatever the previous save raised in the background; then this call has saved nothing.
        """
        with self._next_save():
            target = resolve_directory(directory)
            keyframe = keyframe or isinstance(target, ObjectUrl)
            options = SaveOptions(step, validate.as_floats(metrics), check_note(note), keyframe, extra)
            if isinstance(self._scheme, Planner):
                self._scheme.note_metrics(options.metrics)
            flat_state = mark_parameters(flatten(dict(state)), objects or {})
            self._delta_writer.chain_limit.repeats = step is not None and step == self._last_step
            self._last_step = step
            reference = self._delta_writer.last_reference if isinstance(self._scheme, Planner) else None
            if keyframe and reference is not None:
                reference = replace(reference, is_base=False)
            plan = make_save_plan(
                self._scheme, flat_state, reference, objects or {}, self._model, defer=self._background
            )
            if plan is None:
                return None
            with _WRITERS_LOCK.lock:  # `wait_for_writes` finds this writer by the directory
                self._pending_directory = _real_name(target)
                _WRITERS.add(self)

            def write(copy: FlatState, scheme: Scheme, adopt: bool) -> SaveReport:
                return self._write(target, copy, scheme, options, adopt=adopt)

            return self._save(f"saving {target}", flat_state, plan, write)

    @torch.inference_mode(False)  # training cannot change tensors that are made within that mode
    @torch.no_grad()
    def load(self, directory: AnyDirectory, *, device: Device = None, tie: bool = True) -> RestoreResult[int | None]:
        """Load a checkpoint; the next save is a delta against it.

        Waits for what this process is writing into the directory.

        Args:
            device: where the tensors go; None: the CPU.
            tie: tensors that shared memory share it again.

        Returns:
            The state as it was saved, or as near to it as its scheme has kept it, and its manifest.

        Raises:
            NotFoundError: there is no checkpoint of ours.
            MismatchError: several ranks wrote it: torch.distributed.checkpoint reads it.
            ChainError, FormatError: bytes are damaged or missing.
            StorageError: reading failed.
        """
        start = time.perf_counter()
        place = resolve_directory(directory) if is_object_url(directory) else directory
        place = Path(place) if isinstance(place, str) else place
        self.join()
        wait_for_writes(directory)
        manifest, decoded = use_current(
            lambda: directories.read_directory_manifest(directory),
            lambda manifest: (manifest, self._decode(directory, manifest)),
            manifest_identity,
        )
        holds = is_mostly_codes(decoded.reference.tensors)
        state = build_state(decoded, str(directory), tie=tie, device=device, copy=holds)
        if holds:
            self._delta_writer.adopt(directory, manifest.payloads[0], decoded)
        else:  # a copy of all tensors would take a state of memory, and as long as decoding them
            self._delta_writer.adopt_encoded(directory, manifest.payloads[0])
        self._drop_snapshots()
        self._resume_from(manifest)
        self._restored = resolve_directory(directory).parent, manifest
        seconds = time.perf_counter() - start
        _log.info("loaded %s (%s), in %.2f s", directory, manifest.kind, seconds)
        return RestoreResult.from_manifest(manifest, seconds, state=state, directory=place)

    def _decode(self, directory: AnyDirectory, manifest: DirectoryManifest) -> DecodedFile:
        if len(manifest.payloads) != 1:
            found, do = f"the files of {len(manifest.payloads)} ranks", "load it with shrinkpoint.train.dcp.load"
            raise MismatchError(str(directory), found=found, expected="the file of one process", do=do)
        self._delta_writer.drop()  # otherwise three states would be in memory
        return decode_payload(directory, manifest.payloads[0], **self._load_limits)

    def discard(self, directory: AnyDirectory) -> None:
        """Delete a directory with all its files, once nothing is being written into it; a missing one is no error.

        The base of the next delta is kept until that is written.

        Raises:
            StorageError: deleting failed.
        """
        self.join()
        path = resolve_directory(directory)
        if isinstance(path, Path):
            self._delta_writer.keep_base(path)
        directories.delete_checkpoint(path)

    def _last_reference(self) -> Reference | None:
        return self._delta_writer.last_reference

    def _release(self) -> None:
        self._delta_writer.drop()

    def _write(
        self, directory: Path | ObjectUrl, state: FlatState, scheme: Scheme, options: SaveOptions, *, adopt: bool
    ) -> SaveReport:
        condition = directories.manifest_condition(directory)
        report = self._delta_writer.write(directory, state, scheme=scheme, keyframe=options.keyframe, adopt=adopt)
        payload, stall = self._delta_writer.payload, self._stall()
        disk_bytes = payload.size + sum(size for _, size in payload.bases)
        report = replace(report, path=str(directory), step=options.step, depth=len(payload.bases))
        report = replace(report, stall_seconds=stall, disk_bytes=disk_bytes)
        if self._restored is not None or self._root != directory.parent:
            root, manifest = self._restored or (None, None)
            directories.note_restored(directory, manifest if root == directory.parent else None)
            self._restored, self._root = None, directory.parent
        try:
            manifest = directories.commit(
                directory,
                [payload],
                scheme=report.scheme,
                lossy_restores=self._lossy_restores,
                loss=report.loss_report,
                stats=report.stats,
                condition=condition,
                **options.manifest_fields(),
            )
        except BaseException:
            # The manifest may have been replaced before the error: then its payload must stay.
            if _may_be_committed(directory, payload.digest):
                self._delta_writer.commit_reference()
            else:
                self._delta_writer.rollback()
            raise
        self._delta_writer.commit_reference()
        _log.info("saved %s, in %.2f s", report, report.seconds)
        try:
            self._apply_retention(directory, manifest)
        except (ShrinkpointError, OSError, MemoryError, RuntimeError) as error:  # torch reports what it cannot allocate
            _log.warning("older checkpoints stay, or take more bytes than they need: %s", error)
        return report

    def _apply_retention(self, directory: Path | ObjectUrl, manifest: DirectoryManifest) -> None:
        """Delete what the rules do not keep, and write older checkpoints again where they want that."""
        limit = self._delta_writer.chain_limit
        keep = limit.keep
        if keep is None or keep.keeps_all or not self._is_exact:
            return
        wants_reverse = limit.wants_reverse(manifest)
        if not (self._deletes or keep.moments_last or wants_reverse):
            return
        others = () if self._deletes else filter(is_checkpoint, self._protected)
        run = {*directories.find_siblings(directory), *others}
        plan = plan_run(run, keep, datetime.now(timezone.utc), protected=self._protected)
        directories.delete_expired(plan.delete if self._deletes else ())
        limit.kept = len(plan.keep)
        rewriter = RunRewriter(plan.keep, threads=self._settings.threads)
        for chain in chains_to_strip(plan):
            digests = {plan.keep[member].digest for member in chain}
            if not digests <= self._settled and not rewriter.rewrite(chain, MomentFilter()):
                self._settled |= digests
        parents = directories_to_reverse(plan, keep) if wants_reverse else {}
        if parents:
            limit.note_reversed(rewriter.reverse({0: parents}, keep)[0])


_WRITERS_LOCK = ForkSafeLock()
_WRITERS: WeakSet[Checkpointer] = WeakSet()  # The checkpointers of this process that have written something


def wait_for_writes(directory: AnyDirectory) -> None:
    """Wait for what this process is writing into a directory; an error of it is raised where it was saved."""
    target = _real_name(resolve_directory(directory))
    with _WRITERS_LOCK.lock:
        writers = [checkpointer for checkpointer in _WRITERS if checkpointer._pending_directory == target]
    for checkpointer in writers:
        checkpointer.join()


def _real_name(directory: Path | ObjectUrl) -> str:
    return os.path.realpath(directory) if isinstance(directory, Path) else str(directory)


def _may_be_committed(directory: Path | ObjectUrl, digest: str) -> bool:
    """True if a directory's manifest names this payload; True if the manifest cannot be read."""
    try:
        manifest = directories.read_directory_manifest(directory)
        return any(payload.digest == digest for payload in manifest.payloads)
    except StorageError:
        return True
    except ShrinkpointError:
        return False
