"""Saves and restores the whole state of an Accelerator: a class, and functions that attach it to the Accelerator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate import Accelerator

from shrinkpoint import validate
from shrinkpoint.errors import (
    ChainError,
    FormatError,
    MismatchError,
    NotFoundError,
    PolicyError,
    ShrinkpointError,
    StorageError,
)
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.sharding.collectives import gather_or_raise
from shrinkpoint.storage import AnyDirectory, ObjectUrl
from shrinkpoint.store import Keep, SaveReport
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.directory import read_directory_manifest, verify_directory
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.store.newest import newest_that_loads
from shrinkpoint.store.save_settings import OnSave, SaveSettings
from shrinkpoint.tensors.flat_state import unflatten
from shrinkpoint.train.accelerate import prepared_state
from shrinkpoint.train.accelerate.checkpoint_dirs import CheckpointDirs, is_stock_checkpoint
from shrinkpoint.train.accelerate.prepared_state import collect_prepared
from shrinkpoint.train.accelerate.sharded_checkpointer import ShardedCheckpointer
from shrinkpoint.train.accelerate.training_loss import TrainingLoss, count_step_terms
from shrinkpoint.train.checkpointer import Checkpointer, wait_for_writes
from shrinkpoint.train.default_evaluation import add_evaluation
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.newest_valid import NoCheckpointError
from shrinkpoint.train.recent_batches import LossOfBatch, counts_terms, note_terms
from shrinkpoint.train.restore_result import RestoreReport, RestoreResult
from shrinkpoint.train.save_decision import SaveDecisionPolicy, ScheduledSaver
from shrinkpoint.train.state_alignment import AlignedState, align_state

T = TypeVar("T")
_log = logging.getLogger("shrinkpoint")
_SKIPPABLE = (ChainError, FormatError, NotFoundError, StorageError)
_ATTRIBUTE = "_shrinkpoint"
UNSET: Any = type("Unset", (), {"__repr__": lambda self: "..."})()
"""Default of settings that a call does not change."""


class AcceleratorCheckpointer(ScheduledSaver):
    """Saves and restores what an Accelerator has prepared and registered.

    All processes call all methods but `close`, like those of the Accelerator. The main process writes (with
    `save_on_each_node`, one process of each node), and every process gets its own random generators back. Shards of a
    model (FSDP2) are written by every process.

    Host memory on the writing process: one state; two with `background`, or if the state is on a GPU.

    Args:
        accelerator: models may be prepared, and objects registered, before or after.
        scheme, keyframe_every, background, threads, max_bytes, on_save: see `SaveSettings`. A scheme's `evaluate` is
            called with the unwrapped model, on the writing process. "fisher" measures the loss on batches of the
            training dataset, and keeps it within 0.1%. `on_save` is called on the process that commits.
        loss: for "fisher": called with the model and a batch; returns the loss. None: the model returns it, as those of
            transformers do.
        keep: rules by which checkpoints are deleted, in place of `total_limit`. Where the caller names them, those
            beside each other whose names differ in numbers alone are one run.
        save_decision_policy: what `should_save` asks, on all processes; None: the loop decides itself.

    Raises:
        PolicyError: an unknown scheme, a number out of range, or `keep` beside `total_limit`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        scheme: str | Scheme = "lossless",
        keyframe_every: int | None = 20,
        background: bool = False,
        threads: int | None = None,
        max_bytes: int | None = None,
        on_save: OnSave | None = None,
        loss: LossOfBatch | None = None,
        keep: Keep | None = None,
        save_decision_policy: SaveDecisionPolicy | None = None,
    ) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        super().__init__(save_decision_policy, dist.group.WORLD if is_distributed else None)
        do = "pass the one that prepares the model"
        validate.check_instance("accelerator", accelerator, Accelerator, expected="an Accelerator", do=do)
        self._accelerator = accelerator
        self._dirs = CheckpointDirs(accelerator, keep)
        self._last_dir: Path | ObjectUrl | None = None  # which was saved last
        if accelerator.project_configuration.project_dir is not None:
            _ = self._dirs.root  # refuses a URL
        self.stall_seconds = 0.0
        """Seconds for which the last `save_state` blocked training."""
        validate.check_optional_callable("loss", loss, expected="a function of a model and a batch")
        scheme = add_evaluation(scheme, TrainingLoss(accelerator, loss))
        settings = vars(SaveSettings(scheme, keyframe_every, background, threads, max_bytes, on_save))
        self._whole = _WholeCheckpointer(accelerator, **settings)
        self._background, self._scheme = background, self._whole.scheme
        self._counts_terms = counts_terms(self._scheme)
        self._sharded = ShardedCheckpointer(
            accelerator, **{name: value for name, value in settings.items() if name != "background"}
        )
        self.has_saved = False
        """True if anything was saved."""

    def __enter__(self) -> AcceleratorCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()  # raises on all processes what failed on one of them
        self.close()

    def save_state(
        self,
        output_dir: AnyDirectory | None = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        note: str = "",
        keyframe: bool = False,
    ) -> SaveReport | None:
        """Save, as `Accelerator.save_state` does; checkpoints beyond `total_limit` are deleted once it is complete.

        Args:
            output_dir: the directory, or a URL such as "s3://bucket/run/10", unless checkpoints are numbered
                (`automatic_checkpoint_naming`). A checkpoint in it is replaced only once the new one is complete.
            step: for the manifest; None: the number of the checkpoint, if it has one.
            metrics: name -> number, for the manifest.
            note: for the manifest.
            keyframe: do not make a delta. Not supported for sharded models.

        Returns:
            The report; None with `background`, where `wait` returns it, on processes that do not write, and for sharded
            models.

        Raises:
            StateError: an object holds something that cannot be stored.
            PolicyError: no directory is given, its number is taken, or the distributed engine is not supported.
            StorageError: writing failed; all earlier checkpoints can still be loaded.
            Exception: any error of the previous background save; this call has saved nothing then.
        """
        start = time.perf_counter()
        try:
            prepared_state.check_engine(self._accelerator)
            gather_or_raise(self._sharded.wait)
            directory = gather_or_raise(lambda: self._prepare_dir(output_dir))[0]
            if step is None and self._dirs.root is not None:
                step = self._accelerator.save_iteration
            options: dict[str, Any] = {"step": step, "metrics": metrics, "note": note, "keyframe": keyframe}
            if self._counts_terms:
                note_terms(self._scheme, count_step_terms(self._accelerator))
                self._counts_terms = False
            is_sharded = prepared_state.has_sharded_model(self._accelerator)
            state, objects, per_rank = _run_on_all(
                lambda: collect_prepared(self._accelerator, directory, models=not is_sharded)
            )
            report = None
            if is_sharded:
                options |= {"keep": self._dirs.keep, "make_plan": lambda keep: self._dirs.plan(keep, directory)}
                self._sharded.save(directory, state, per_rank, self._background, **options)
            else:
                self._whole.retain(self._dirs.keep)
                state["ranks"] = gather_or_raise(lambda: per_rank)
                report = _run_on_all(lambda: self._whole.save_prepared(directory, state, objects, **options))
            self.has_saved, self._last_dir = True, directory
            self._note_saved(step, validate.as_floats(metrics))
            self._accelerator.project_configuration.iteration += 1
            if not self._background:
                self._prune()
            return report
        finally:
            self.stall_seconds = time.perf_counter() - start

    def load_state(self, input_dir: AnyDirectory | None = None, *, strict: bool = True) -> RestoreResult[int | None]:
        """Load, as `Accelerator.load_state` does; the next save is a delta against what was loaded.

        The next numbered checkpoint gets the number after the highest one that exists.

        Args:
            input_dir: a directory that `save_state` or Accelerate itself saved to, or a URL; None: the newest numbered
                checkpoint that all processes can load; a warning is logged for each one that is skipped.
            strict: raise if keys of a model are missing or unexpected.

        Raises:
            NotFoundError: there is no such checkpoint, or none that can be loaded.
            MismatchError: it does not fit what is prepared and registered; nothing was changed.
            ChainError, FormatError, StorageError: the checkpoint in `input_dir` cannot be loaded.
        """
        prepared_state.check_engine(self._accelerator)
        for wait in (self._sharded.wait, self._whole.wait):
            try:
                gather_or_raise(wait)
            except Exception as error:  # of no checkpoint that exists
                self._warn_main("the last save failed: %s", error)
        start = time.perf_counter()
        is_main = self._accelerator.is_main_process
        directories = gather_or_raise(lambda: self._dirs.load_candidates(input_dir) if is_main else [])[0]
        loaded, skipped = newest_that_loads(
            ((directory, partial(self._load, directory, strict=strict)) for directory in directories),
            errors=_SKIPPABLE if input_dir is None else (),
            warn=is_main,
        )
        if loaded is None:
            reasons = "; ".join(checkpoint.reason for checkpoint in skipped)
            found, do = f"no checkpoint that loads ({reasons})", "check the reason for each of them, or start a new run"
            raise NoCheckpointError(str(self._dirs.root), found=found, do=do)
        directory, manifest, aligned = loaded
        if (root := self._dirs.root) is not None:
            project, number = self._accelerator.project_configuration, self._dirs.run(root).next_number
            project.iteration = max(project.iteration, gather_or_raise(number)[0])
        seconds = time.perf_counter() - start
        self._note_restored(None if manifest is None else manifest.step)
        fields: dict[str, Any] = {"directory": directory, "skipped": skipped}
        if manifest is None:  # Accelerate itself wrote the checkpoint
            return RestoreResult(RestoreReport(seconds), None, None, **fields)
        if aligned is not None:
            if is_main:
                aligned.report(str(directory))
            fields |= {"missing_keys": aligned.missing_keys, "unexpected_keys": aligned.unexpected_keys}
        return RestoreResult.from_manifest(manifest, seconds, **fields)

    def wait(self) -> SaveReport | None:
        """Wait until the last save is durable, on all processes.

        Returns:
            The report of the last save that succeeded; None if there is none, and on processes that do not write.

        Raises:
            Exception: any error of a background save, once.
        """
        gather_or_raise(self._sharded.wait)
        report = _run_on_all(self._whole.wait)
        self._prune()
        return report

    def close(self) -> None:
        """Wait, and free the memory. A later `save_state` begins a new chain.

        Raises:
            Exception: any error of a background save, once.
        """
        self._close_schedule()
        try:
            self._sharded.wait()
        finally:
            self._whole.close()

    def take_over(self, other: AcceleratorCheckpointer) -> None:
        """Replace one that has loaded and not saved: the next save is a delta against what it has loaded."""
        directory = self._whole.loaded_dir = other._whole.loaded_dir
        other.close()

        def load() -> None:
            if directory is not None and self._whole.participates:
                self._whole.load(directory)

        try:
            gather_or_raise(load)
        except _SKIPPABLE as error:
            self._warn_main("%s has gone since it was loaded, the next checkpoint is a keyframe: %s", directory, error)

    @property
    def _is_saving(self) -> bool:
        return self._whole._worker.is_running

    def _warn_main(self, text: str, *args: object) -> None:
        if self._accelerator.is_main_process:
            _log.warning(text, *args)

    def _prepare_dir(self, output_dir: AnyDirectory | None) -> Path | ObjectUrl:
        """On the writer: wait for the previous save, prune, and make the directory."""
        if not self._whole.is_writer:
            return Path()
        directory = self._dirs.next_dir(output_dir)
        self._whole.wait()
        self._prune()
        if isinstance(directory, ObjectUrl):
            return directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            do = "choose another one"
            raise StorageError(str(directory), found=f"{error}", expected="a directory", do=do) from error
        return directory

    def _prune(self) -> None:
        """Delete checkpoints that no rule keeps; a failure is logged, since it is no reason to end a run."""
        if (keep := self._dirs.keep) is None or not self._whole.is_writer:
            return
        try:
            for directory in self._dirs.plan(keep, self._last_dir).delete:
                try:
                    self._whole.discard(directory)
                except ShrinkpointError as error:
                    _log.warning("%s", error)
        except (ShrinkpointError, OSError) as error:
            _log.warning("%s", error)

    def _load(
        self, directory: Path | ObjectUrl, *, strict: bool
    ) -> tuple[Path | ObjectUrl, DirectoryManifest | None, AlignedState | None]:
        """Load a checkpoint on all processes: its place, manifest (None if Accelerate itself wrote it), and state."""
        self._whole.loaded_dir = None
        wait_for_writes(directory)
        if gather_or_raise(lambda: is_stock_checkpoint(directory))[0]:
            self._whole.close()
            gather_or_raise(lambda: self._accelerator.load_state(str(directory)))
            return directory, None, None
        read = verify_directory if self._whole.is_writer else read_directory_manifest
        manifest = _run_on_all(lambda: read(directory))
        if manifest.weights_only:
            found, do = "weights only: retention has deleted the moments", "load a newer one; shrinkpoint.load reads it"
            raise NoCheckpointError(str(directory), found=found, expected="a checkpoint to resume from", do=do)
        if manifest.is_dcp:
            self._whole.close()
            self._sharded.load(directory)
            return directory, manifest, None
        return directory, manifest, self._whole.load_prepared(directory, strict=strict)


class _WholeCheckpointer(Checkpointer):
    """Saves and loads the state of an Accelerator whose models are not sharded; one process writes."""

    def __init__(self, accelerator: Accelerator, **settings: Any) -> None:
        super().__init__(**settings)
        self._accelerator = accelerator
        self.loaded_dir: Path | ObjectUrl | None = None  # loaded last, as a reference

    @property
    def is_writer(self) -> bool:
        """True if this process writes."""
        on_each_node = self._accelerator.project_configuration.save_on_each_node
        return bool(self._accelerator.is_local_main_process if on_each_node else self._accelerator.is_main_process)

    @property
    def participates(self) -> bool:
        """True if this process writes, or takes part in a search for the scheme's settings."""
        return self.is_writer or (isinstance(self.scheme, Planner) and not self.scheme.is_writer)

    def save_prepared(
        self, directory: Path | ObjectUrl, state: dict[str, Any], objects: dict[str, Any], **options: Any
    ) -> SaveReport | None:
        """Save what every process has collected; one returns the report."""
        if not self.participates:
            return None
        return self.save(directory, state, objects=objects, extra={"framework": "accelerate"}, **options)

    def load_prepared(self, directory: Path | ObjectUrl, *, strict: bool) -> AlignedState:
        """Load a checkpoint; all processes call this."""
        accelerator, where = self._accelerator, str(directory)
        state = _run_on_all(lambda: self._read_state(directory))
        models = list(accelerator._models)
        aligned = _run_on_all(
            lambda: align_state(prepared_state.live_objects(accelerator), state, where, strict=strict)
        )
        state = aligned.state
        options: dict[str, Any] = {"strict": strict, "saved_dtypes": aligned.saved_dtypes}
        gather_or_raise(lambda: prepared_state.check_prepared(accelerator, state, models, where, **options))
        gather_or_raise(lambda: prepared_state.load_prepared(accelerator, state, models, where, **options))
        return aligned

    def _read_state(self, directory: Path | ObjectUrl) -> Any:
        """The state in a directory; kept as the reference of the next delta only on processes that will save."""
        if prepared_state.has_sharded_model(self._accelerator):
            found = "the state of a model that was not sharded"
            do = "load it without FSDP, and save the model by itself"
            raise MismatchError(str(directory), found=found, expected="shards", do=do)
        if self.participates:
            state = self.load(directory).state
            self.loaded_dir = directory
            return state
        decoded = decode_directory(directory, **self._load_limits)
        tensors, max_bytes = decoded.reference.tensors, decoded.max_copy_bytes
        return unflatten(decoded.tree, tensors, where=str(directory), max_bytes=max_bytes)


def _run_on_all(compute: Callable[[], T]) -> T:
    """Result of this process; if any process fails, all raise the error of the first that does."""
    results: list[T] = []
    gather_or_raise(lambda: results.append(compute()))
    return results[0]


def record_gradients(
    accelerator: Accelerator,
    *,
    index: int = 0,
    save_interval: int | None = None,
    batches: int = 50,
    beta: float = 0.9,
    paper: bool | None = None,
    squares: bool = False,
) -> GradientRecorder:
    """Return a gradient recorder of a prepared model, attached to its prepared optimizer.

    Args:
        index: of the model and its optimizer, in the order in which they were prepared.
        save_interval, batches, beta, paper, squares: of `GradientRecorder`.

    Raises:
        PolicyError: no such model is prepared, or an argument is out of range.
    """
    validate.check_int("index", index, minimum=0, do="pass 0, the first")
    num_models, num_optimizers = len(accelerator._models), len(accelerator._optimizers)
    if index >= min(num_models, num_optimizers):
        found, expected = f"{num_models} models and {num_optimizers} optimizers", f"at least {index + 1}"
        raise PolicyError("gradients", found=found, expected=expected, do="call accelerator.prepare first")
    model = prepared_state.unwrap_model(accelerator._models[index])
    recorder = GradientRecorder(
        model, save_interval=save_interval, batches=batches, beta=beta, paper=paper, squares=squares
    )
    return recorder.attach(accelerator._optimizers[index].optimizer)


def save_state(
    accelerator: Accelerator,
    output_dir: AnyDirectory | None = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    note: str = "",
    keyframe: bool = False,
    scheme: str | Scheme = UNSET,
    keyframe_every: int | None = UNSET,
    background: bool = UNSET,
    threads: int | None = UNSET,
    max_bytes: int | None = UNSET,
    on_save: OnSave | None = UNSET,
    loss: LossOfBatch | None = UNSET,
    keep: Keep | None = UNSET,
) -> SaveReport | None:
    """Save as `AcceleratorCheckpointer.save_state` does.

    Args:
        output_dir, step, metrics, note, keyframe: of `AcceleratorCheckpointer.save_state`.
        scheme, keyframe_every, background, threads, max_bytes, on_save, loss, keep: of `AcceleratorCheckpointer`. Give
            them in the first call only, or the same ones in every call; make a scheme once, before the loop.

    Raises:
        PolicyError: the settings differ from those of an earlier call, or one is out of range.
        StateError, StorageError: as `AcceleratorCheckpointer.save_state`.
    """
    checkpointer = _checkpointer_of(
        accelerator,
        scheme=scheme,
        keyframe_every=keyframe_every,
        background=background,
        threads=threads,
        max_bytes=max_bytes,
        on_save=on_save,
        loss=loss,
        keep=keep,
    )
    return checkpointer.save_state(output_dir, step=step, metrics=metrics, note=note, keyframe=keyframe)


def load_state(
    accelerator: Accelerator,
    input_dir: AnyDirectory | None = None,
    *,
    strict: bool = True,
    scheme: str | Scheme = UNSET,
    keyframe_every: int | None = UNSET,
    background: bool = UNSET,
    threads: int | None = UNSET,
    max_bytes: int | None = UNSET,
    on_save: OnSave | None = UNSET,
    loss: LossOfBatch | None = UNSET,
    keep: Keep | None = UNSET,
) -> RestoreResult[int | None]:
    """Load as `AcceleratorCheckpointer.load_state` does.

    Args:
        input_dir, strict: of `AcceleratorCheckpointer.load_state`.
        scheme, keyframe_every, background, threads, max_bytes, on_save, loss, keep: as for `save_state`.

    Raises:
        PolicyError: the settings differ from those of an earlier call, or one is out of range.
        NotFoundError, MismatchError, ChainError, FormatError, StorageError: as `AcceleratorCheckpointer.load_state`.
    """
    checkpointer = _checkpointer_of(
        accelerator,
        scheme=scheme,
        keyframe_every=keyframe_every,
        background=background,
        threads=threads,
        max_bytes=max_bytes,
        on_save=on_save,
        loss=loss,
        keep=keep,
    )
    return checkpointer.load_state(input_dir, strict=strict)


def wait(accelerator: Accelerator) -> SaveReport | None:
    """Wait for the last background save, as `AcceleratorCheckpointer.wait` does; call it before a program ends."""
    return _checkpointer_of(accelerator).wait()


def _checkpointer_of(accelerator: Accelerator, **options: object) -> AcceleratorCheckpointer:
    """The checkpointer that is attached to an accelerator; settings may be given until the first save."""
    settings: dict[str, Any] = {name: value for name, value in options.items() if value is not UNSET}
    attached, attached_settings = vars(accelerator).get(_ATTRIBUTE, (None, {}))
    if attached is not None and (not settings or settings == attached_settings):
        return attached  # type: ignore[no-any-return]
    if attached is not None and (attached_settings or attached.has_saved):
        found, do = f"{settings}", "make a scheme once, before the loop, or use an AcceleratorCheckpointer of your own"
        raise PolicyError("settings", found=found, expected=f"{attached_settings}, as in the call before", do=do)
    checkpointer = AcceleratorCheckpointer(accelerator, **settings)
    if attached is not None:
        checkpointer.take_over(attached)
    setattr(accelerator, _ATTRIBUTE, (checkpointer, settings))
    return checkpointer
