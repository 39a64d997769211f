"""Saves and restores the whole state of an Accelerator: a class, and functions that attach it to the Accelerator."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

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
from shrinkpoint.schemes.base import PlanningScheme, Scheme
from shrinkpoint.sharding.collectives import gather_or_raise
from shrinkpoint.store import SaveReport, SkippedCheckpoint
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.directory import read_directory_manifest, verify_directory
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.tensors.flat_state import unflatten
from shrinkpoint.train.accelerate import checkpoint_dirs, prepared_state
from shrinkpoint.train.accelerate.sharded_checkpointer import ShardedCheckpointer, is_sharded_checkpoint
from shrinkpoint.train.checkpointer import Checkpointer, wait_for_writes
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.restore import RestoreReport, RestoreResult

_log = logging.getLogger("shrinkpoint")
_SKIPPABLE = (ChainError, FormatError, NotFoundError, StorageError)


class AcceleratorCheckpointer:
    """Saves and restores what an Accelerator has prepared and registered.

    All processes call all methods but `close`, like those of the Accelerator. The main process writes (with
    `save_on_each_node`, one process of each node), and every process gets its own random generators back. Shards of a
    model (FSDP2) are written by every process.

    Host memory on the writing process: one state; two with `background`, or if the state is on a GPU.

    Args:
        accelerator: models may be prepared, and objects registered, before or after.
        scheme: "lossless", or a scheme. Its `evaluate` is called with the unwrapped model, on the writing process.
        keyframe_every: greatest number of checkpoints in a chain, including its keyframe; None: unlimited.
        background: `save_state` returns once the state is copied, and the copy is written while training continues.
        threads: native threads for coding; None: all cores.

    Raises:
        PolicyError: an unknown scheme, or a number out of range.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        scheme: str | Scheme = "lossless",
        keyframe_every: int | None = 20,
        background: bool = False,
        threads: int | None = None,
    ) -> None:
        validate.check_instance(
            "accelerator",
            accelerator,
            Accelerator,
            expected="an Accelerator",
            do="pass the one that prepares the model",
        )
        if accelerator.project_configuration.project_dir is not None:
            checkpoint_dirs.numbered_root(accelerator)
        self.stall_seconds = 0.0
        """Seconds for which the last `save_state` blocked training."""
        self._accelerator, self._background, self._threads = accelerator, background, threads
        self._checkpointer = Checkpointer(
            scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads
        )
        self._sharded_checkpointer = ShardedCheckpointer(
            accelerator, scheme=scheme, keyframe_every=keyframe_every, threads=threads
        )
        self._loaded_dir: Path | None = None  # of the checkpoint that the first save is a delta against
        self._has_saved = False

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
        output_dir: str | Path | None = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        note: str = "",
        keyframe: bool = False,
    ) -> SaveReport | None:
        """Save, as `Accelerator.save_state` does; checkpoints beyond `total_limit` are deleted once it is complete.

        Args:
            output_dir: the directory, unless checkpoints are numbered (`automatic_checkpoint_naming`). A checkpoint in
                it is replaced only once the new one is complete.
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
            any error of the previous background save; this call has saved nothing then.
        """
        start = time.perf_counter()
        try:
            prepared_state.check_engine(self._accelerator)
            gather_or_raise(self._sharded_checkpointer.wait)
            directory = gather_or_raise(lambda: self._prepare_dir(output_dir))[0]
            if step is None and checkpoint_dirs.numbered_root(self._accelerator) is not None:
                step = self._accelerator.save_iteration
            report = self._write(directory, step=step, metrics=metrics, note=note, keyframe=keyframe)
            self._has_saved = True
            self._accelerator.project_configuration.iteration += 1
            if not self._background:
                self._prune()
            return report
        finally:
            self.stall_seconds = time.perf_counter() - start

    def load_state(self, input_dir: str | Path | None = None, *, strict: bool = True) -> RestoreResult[int | None]:
        """Load, as `Accelerator.load_state` does; the next save is a delta against what was loaded.

        The next numbered checkpoint gets the number after the highest one that exists.

        Args:
            input_dir: a directory that `save_state` or Accelerate itself saved to; None: the newest numbered checkpoint
                that all processes can load; a warning is logged for each one that is skipped.
            strict: raise if keys of a model are missing or unexpected.

        Raises:
            NotFoundError: there is no such checkpoint, or none that can be loaded.
            MismatchError: it does not fit what is prepared and registered; nothing was changed.
            ChainError, FormatError, StorageError: the checkpoint in `input_dir` cannot be loaded.
        """
        prepared_state.check_engine(self._accelerator)
        self._drain()
        start = time.perf_counter()
        skipped: list[SkippedCheckpoint] = []
        for directory in gather_or_raise(lambda: self._find_candidates(input_dir))[0]:
            try:
                manifest = self._load(directory, strict=strict)
            except _SKIPPABLE as error:
                if input_dir is not None:
                    raise
                skipped.append(SkippedCheckpoint(str(error), directory=directory, error=error))
                self._warn_main("%s is passed over: %s", directory, error)
            else:
                self._advance_iteration()
                return _restore_result(manifest, time.perf_counter() - start, directory, tuple(skipped))
        reasons = "; ".join(checkpoint.reason for checkpoint in skipped)
        raise checkpoint_dirs.NoCheckpointError(
            str(directory.parent),
            found=f"no checkpoint that loads ({reasons})",
            do="look at the reason for each of them, or begin again",
        )

    def wait(self) -> SaveReport | None:
        """Wait until the last save is durable, on all processes.

        Returns:
            The report of the last save that succeeded; None if there is none, and on processes that do not write.

        Raises:
            any error of a background save, once.
        """
        reports: list[SaveReport | None] = []
        gather_or_raise(self._sharded_checkpointer.wait)
        gather_or_raise(lambda: reports.append(self._checkpointer.wait()))
        self._prune()
        return reports[0]

    def close(self) -> None:
        """Wait, and free the memory. A later `save_state` begins a new chain.

        Raises:
            any error of a background save, once.
        """
        try:
            self._sharded_checkpointer.wait()
        finally:
            self._checkpointer.close()

    def take_over(self, other: AcceleratorCheckpointer) -> None:
        """Replace one that has loaded and not saved: the next save is a delta against what it has loaded."""
        directory, self._loaded_dir = other._loaded_dir, other._loaded_dir
        other.close()

        def load() -> None:
            if directory is not None and self._uses_checkpointer:
                self._checkpointer.load(directory)

        try:
            gather_or_raise(load)
        except _SKIPPABLE as error:
            self._warn_main("%s has gone since it was loaded, the next checkpoint is a keyframe: %s", directory, error)

    @property
    def has_saved(self) -> bool:
        """Whether anything was saved."""
        return self._has_saved

    # which process does what

    @property
    def _is_writer(self) -> bool:
        on_each_node = self._accelerator.project_configuration.save_on_each_node
        return bool(self._accelerator.is_local_main_process if on_each_node else self._accelerator.is_main_process)

    @property
    def _uses_checkpointer(self) -> bool:
        """Whether this process writes, or takes part in a search for the scheme's settings."""
        scheme = self._checkpointer.scheme
        return self._is_writer or (isinstance(scheme, PlanningScheme) and not scheme.is_writer)

    def _warn_main(self, text: str, *args: object) -> None:
        if self._accelerator.is_main_process:
            _log.warning(text, *args)

    # saving

    def _prepare_dir(self, output_dir: str | Path | None) -> Path:
        """On the writer: wait for the previous save, prune, and make the directory."""
        if not self._is_writer:
            return Path()
        directory = checkpoint_dirs.save_dir(self._accelerator, output_dir)
        self._checkpointer.wait()
        self._prune()
        _make_dir(directory)
        return directory

    def _write(self, directory: Path, **save_options: Any) -> SaveReport | None:
        """Collect the state on all processes, then write it, or the shards of it."""
        collected: list[prepared_state.PreparedState] = []
        is_sharded = prepared_state.has_sharded_model(self._accelerator)

        def collect() -> dict[str, Any]:
            collected.append(prepared_state.collect_prepared(self._accelerator, directory, models=not is_sharded))
            return {} if is_sharded else collected[0].per_rank

        per_rank_states = gather_or_raise(collect)
        prepared = collected[0]
        if not is_sharded:
            return self._write_whole(directory, prepared, per_rank_states, save_options)
        self._sharded_checkpointer.save(
            directory, prepared.state, prepared.per_rank, background=self._background, **save_options
        )
        return None

    def _write_whole(
        self,
        directory: Path,
        prepared: prepared_state.PreparedState,
        per_rank_states: list[dict[str, Any]],
        save_options: Mapping[str, Any],
    ) -> SaveReport | None:
        state = prepared.state | {"ranks": per_rank_states}
        reports: list[SaveReport | None] = []

        def save() -> None:
            if self._uses_checkpointer:
                extra = {"framework": "accelerate"}
                reports.append(
                    self._checkpointer.save(directory, state, objects=prepared.objects, extra=extra, **save_options)
                )

        gather_or_raise(save)
        return reports[0] if reports else None

    def _prune(self) -> None:
        """Delete checkpoints beyond `total_limit`; a failure is logged, since it is no reason to end a run."""
        root = checkpoint_dirs.numbered_root(self._accelerator)
        if root is None or not self._is_writer:
            return
        try:
            for directory in checkpoint_dirs.expired_dirs(root, self._accelerator.project_configuration.total_limit):
                self._discard(directory)
        except OSError as error:
            _log.warning("%s", error)

    def _discard(self, directory: Path) -> None:
        try:
            self._checkpointer.discard(directory)
        except ShrinkpointError as error:
            _log.warning("%s", error)

    # loading

    def _drain(self) -> None:
        """Wait for background saves; their errors are logged, since they concern no existing checkpoint."""
        for wait in (self._sharded_checkpointer.wait, self._checkpointer.wait):
            try:
                gather_or_raise(wait)
            except Exception as error:
                self._warn_main("the last save failed: %s", error)

    def _find_candidates(self, input_dir: str | Path | None) -> list[Path]:
        if not self._accelerator.is_main_process:
            return []
        return checkpoint_dirs.load_candidates(self._accelerator, input_dir)

    def _load(self, directory: Path, *, strict: bool) -> DirectoryManifest | None:
        self._loaded_dir = None
        wait_for_writes(directory)
        if gather_or_raise(lambda: checkpoint_dirs.is_stock_checkpoint(directory))[0]:
            self._checkpointer.close()
            gather_or_raise(lambda: self._accelerator.load_state(str(directory)))
            return None
        manifests: list[DirectoryManifest] = []
        read = verify_directory if self._is_writer else read_directory_manifest
        gather_or_raise(lambda: manifests.append(read(directory)))
        if is_sharded_checkpoint(manifests[0]):
            self._load_shards(directory)
        else:
            self._load_whole(directory, strict=strict)
        return manifests[0]

    def _load_whole(self, directory: Path, *, strict: bool) -> None:
        states: list[Any] = []
        gather_or_raise(lambda: states.append(self._read_state(directory)))
        state, models, where = states[0], list(self._accelerator._models), str(directory)
        gather_or_raise(lambda: self._check_fit(state, models, directory, strict=strict))
        gather_or_raise(lambda: prepared_state.load_prepared(self._accelerator, state, models, where, strict=strict))

    def _load_shards(self, directory: Path) -> None:
        """Load a sharded checkpoint; the small parts are checked before anything is changed."""
        self._checkpointer.close()
        state = self._sharded_checkpointer.read_auxiliary_state(directory)
        gather_or_raise(lambda: self._check_fit(state, [], directory, strict=True))
        self._sharded_checkpointer.load(directory)
        gather_or_raise(lambda: prepared_state.load_auxiliary_state(self._accelerator, state, str(directory)))

    def _read_state(self, directory: Path) -> Any:
        """The state in a directory; kept as the reference of the next delta only on processes that will save."""
        if prepared_state.has_sharded_model(self._accelerator):
            raise MismatchError(
                str(directory),
                found="the state of a model that was not sharded",
                expected="shards",
                do="load it without FSDP, and save the model by itself",
            )
        if self._uses_checkpointer:
            state = self._checkpointer.load(directory).state
            self._loaded_dir = directory
            return state
        decoded = decode_directory(directory, threads=self._threads)
        return unflatten(
            decoded.tree, decoded.reference.tensors, where=str(directory), max_bytes=decoded.max_copy_bytes
        )

    def _check_fit(self, state: Any, models: list[Any], directory: Path, *, strict: bool) -> None:
        """Call the registered hooks, which may remove models from the list, and check the state against the rest."""
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(models, str(directory))
        prepared_state.check_prepared(self._accelerator, state, models, str(directory), strict=strict)

    def _advance_iteration(self) -> None:
        """Set the number of the next checkpoint above all existing ones."""
        root = checkpoint_dirs.numbered_root(self._accelerator)
        if root is not None:
            number = gather_or_raise(lambda: checkpoint_dirs.next_free_number(root))[0]
            project = self._accelerator.project_configuration
            project.iteration = max(project.iteration, number)


def _restore_result(
    manifest: DirectoryManifest | None, seconds: float, directory: Path, skipped: tuple[SkippedCheckpoint, ...]
) -> RestoreResult[int | None]:
    """The result of a restore; `manifest` is None if Accelerate itself wrote the checkpoint."""
    if manifest is None:
        return RestoreResult(RestoreReport(seconds), None, None, directory=directory, skipped=skipped)
    return RestoreResult.from_manifest(manifest, seconds, directory=directory, skipped=skipped)


def _make_dir(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(str(directory), found=f"{error}", expected="a directory", do="name another one") from error


_ATTRIBUTE = "_shrinkpoint"
UNSET: Any = type("Unset", (), {"__repr__": lambda self: "..."})()
"""Default of settings that a call does not change."""


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
    validate.check_int("index", index, minimum=0, do="take 0, the first")
    num_models, num_optimizers = len(accelerator._models), len(accelerator._optimizers)
    if index >= min(num_models, num_optimizers):
        raise PolicyError(
            "gradients",
            found=f"{num_models} models and {num_optimizers} optimizers",
            expected=f"at least {index + 1}",
            do="call accelerator.prepare first",
        )
    model = prepared_state.unwrap_model(accelerator._models[index])
    recorder = GradientRecorder(
        model, save_interval=save_interval, batches=batches, beta=beta, paper=paper, squares=squares
    )
    return recorder.attach(accelerator._optimizers[index].optimizer)


def save_state(
    accelerator: Accelerator,
    output_dir: str | Path | None = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    note: str = "",
    keyframe: bool = False,
    scheme: str | Scheme = UNSET,
    keyframe_every: int | None = UNSET,
    background: bool = UNSET,
    threads: int | None = UNSET,
) -> SaveReport | None:
    """Save as `AcceleratorCheckpointer.save_state` does.

    Args:
        output_dir, step, metrics, note, keyframe: of `AcceleratorCheckpointer.save_state`.
        scheme, keyframe_every, background, threads: of `AcceleratorCheckpointer`. Give them in the first call only, or
            the same ones in every call; make a scheme once, before the loop.

    Raises:
        PolicyError: the settings differ from those of an earlier call, or one is out of range.
        StateError, StorageError: as `AcceleratorCheckpointer.save_state`.
    """
    settings = _set_options(scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads)
    return _checkpointer_of(accelerator, settings).save_state(
        output_dir, step=step, metrics=metrics, note=note, keyframe=keyframe
    )


def load_state(
    accelerator: Accelerator,
    input_dir: str | Path | None = None,
    *,
    strict: bool = True,
    scheme: str | Scheme = UNSET,
    keyframe_every: int | None = UNSET,
    background: bool = UNSET,
    threads: int | None = UNSET,
) -> RestoreResult[int | None]:
    """Load as `AcceleratorCheckpointer.load_state` does.

    Args:
        input_dir, strict: of `AcceleratorCheckpointer.load_state`.
        scheme, keyframe_every, background, threads: as for `save_state`.

    Raises:
        PolicyError: the settings differ from those of an earlier call, or one is out of range.
        NotFoundError, MismatchError, ChainError, FormatError, StorageError: as `AcceleratorCheckpointer.load_state`.
    """
    settings = _set_options(scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads)
    return _checkpointer_of(accelerator, settings).load_state(input_dir, strict=strict)


def wait(accelerator: Accelerator) -> SaveReport | None:
    """Wait for the last background save, as `AcceleratorCheckpointer.wait` does; call it before a program ends."""
    return _checkpointer_of(accelerator, {}).wait()


def _set_options(**settings: object) -> dict[str, Any]:
    """The settings that a call gives."""
    return {name: value for name, value in settings.items() if value is not UNSET}


def _checkpointer_of(accelerator: Accelerator, settings: dict[str, Any]) -> AcceleratorCheckpointer:
    """The checkpointer that is attached to an accelerator; settings may be given until the first save."""
    attached, attached_settings = vars(accelerator).get(_ATTRIBUTE, (None, {}))
    if attached is not None and (not settings or settings == attached_settings):
        return attached  # type: ignore[no-any-return]
    if attached is not None and (attached_settings or attached.has_saved):
        raise PolicyError(
            "settings",
            found=f"{settings}",
            expected=f"{attached_settings}, as in the call before",
            do="make a scheme once, before the loop, or use an AcceleratorCheckpointer of your own",
        )
    checkpointer = AcceleratorCheckpointer(accelerator, **settings)
    if attached is not None:
        checkpointer.take_over(attached)
    setattr(accelerator, _ATTRIBUTE, (checkpointer, settings))
    return checkpointer
