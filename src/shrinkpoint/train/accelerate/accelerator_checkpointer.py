"""An Accelerator whose states are saved and loaded here."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from shrinkpoint import validate
from shrinkpoint.errors import ChainError, FormatError, MismatchError, NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.schemes.base import PlanningScheme, Scheme
from shrinkpoint.store import SaveReport, SkippedCheckpoint
from shrinkpoint.store import directory as folders
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.tensors.flatten import unflatten
from shrinkpoint.train.accelerate import checkpoint_dirs, prepared_state
from shrinkpoint.train.accelerate.everyone import gather_or_raise
from shrinkpoint.train.accelerate.sharded_checkpointer import ShardedCheckpointer, is_sharded_checkpoint
from shrinkpoint.train.checkpointer import Checkpointer, wait_for_writes
from shrinkpoint.train.restore_result import RestoreReport, RestoreResult

_log = logging.getLogger("shrinkpoint")
_SKIPPABLE = (ChainError, FormatError, NotFoundError, StorageError)


class AcceleratorCheckpointer:
    """Saves and loads what an Accelerator has prepared and registered.

    All its methods but `close` are called by all processes, like those of the Accelerator. The main
    process writes (with `save_on_each_node`, one on each node), and every process gets its own random numbers back.
    Where a model is sharded (FSDP2), every process writes its shards.

    Memory on the host: on the process that writes, one state; with `background`, or a state on a GPU, two.

    Args:
        accelerator: models may be prepared, and objects registered, before or after.
        scheme: "lossless", or a scheme of one's own settings. What it measures with gets the bare model, on the
            process that writes.
        keyframe_every: each chain has at most this many checkpoints, its keyframe included; None: no bound.
        background: `save_state` returns as soon as the state is copied, and writing goes on beside the loop.
        threads: native threads for coding; None: every core.

    Raises:
        PolicyError: a scheme nobody knows, or a number out of range.
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
        expected, do = "an Accelerator", "pass the one that prepares the model"
        validate.check_instance("accelerator", accelerator, Accelerator, expected=expected, do=do)
        if accelerator.project_configuration.project_dir is not None:
            checkpoint_dirs.numbered_root(accelerator)
        self.stall_seconds = 0.0
        """Seconds for which the last `save_state` held up the loop."""
        self._accelerator, self._background = accelerator, background
        self._checkpointer = Checkpointer(
            scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads
        )
        self._sharded_checkpointer = ShardedCheckpointer(
            accelerator, scheme=scheme, keyframe_every=keyframe_every, threads=threads
        )
        self._threads = threads
        self._loaded_dir: Path | None = None  # what the next delta stands on, before the first save
        self._has_saved = False

    def __enter__(self) -> AcceleratorCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()  # with all the others: what fails on one of them is an error on each
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
        """Save, as `Accelerator.save_state` does; older checkpoints beyond `total_limit` go once this one is whole.

        Args:
            output_dir: where, unless checkpoints are numbered (`automatic_checkpoint_naming`). What is there stands
                until this one is whole.
            step: for people; None: the number of the checkpoint, if it has one.
            metrics: numbers, for people.
            keyframe: True: do not make a delta; not with shards.

        Returns:
            What the save did; None in the background, where `wait` returns it, on processes that do not write, and
            with shards.

        Raises:
            StateError: an object holds something that cannot be stored.
            PolicyError: no directory, one whose number is taken, or an engine that keeps its state to itself.
            StorageError: writing failed; every checkpoint that was there still loads.
            whatever the save before raised in the background; then this call has saved nothing.
        """
        began = time.perf_counter()
        try:
            prepared_state.check_engine(self._accelerator)
            gather_or_raise(self._sharded_checkpointer.wait)
            folder = gather_or_raise(lambda: self._prepare_dir(output_dir))[0]
            if step is None and checkpoint_dirs.numbered_root(self._accelerator) is not None:
                step = self._accelerator.save_iteration
            report = self._write(folder, step=step, metrics=metrics, note=note, keyframe=keyframe)
            self._has_saved = True
            self._accelerator.project_configuration.iteration += 1
            if not self._background:
                self._prune()
            return report
        finally:
            self.stall_seconds = time.perf_counter() - began

    def load_state(self, input_dir: str | Path | None = None, *, strict: bool = True) -> RestoreResult[int | None]:
        """Load, as `Accelerator.load_state` does; the next save is a delta against what was loaded.

        Numbered checkpoints go on behind the newest that is there.

        Args:
            input_dir: what `save_state` was given, or a directory that Accelerate itself has saved; None: the newest
                numbered checkpoint that loads on all processes, and what is passed over is said aloud.
            strict: False: a model may lack keys or have others.

        Raises:
            NotFoundError: there is no such checkpoint, or none that loads.
            MismatchError: it does not fit what is prepared and registered; nothing was changed.
            ChainError, FormatError, StorageError: the checkpoint of that directory does not load.
        """
        prepared_state.check_engine(self._accelerator)
        self._drain()
        start = time.perf_counter()
        skipped: list[SkippedCheckpoint] = []
        for folder in gather_or_raise(lambda: self._find_candidates(input_dir))[0]:
            try:
                manifest = self._load(folder, strict=strict)
            except _SKIPPABLE as error:
                if input_dir is not None:
                    raise
                skipped.append(SkippedCheckpoint(str(error), directory=folder, error=error))
                self._warn_main("%s is passed over: %s", folder, error)
            else:
                self._advance_iteration()
                return _restore_result(manifest, time.perf_counter() - start, folder, tuple(skipped))
        reasons = "; ".join(checkpoint.reason for checkpoint in skipped)
        do = "look at what is said of each of them, or begin again"
        raise checkpoint_dirs.NoCheckpointError(
            str(folder.parent), found=f"no checkpoint that loads ({reasons})", do=do
        )

    def wait(self) -> SaveReport | None:
        """Wait until the last save is durable, on all processes.

        Returns:
            What the last save that succeeded did; None if there is none yet, and on processes that do not write.

        Raises:
            whatever a save raised in the background, once.
        """
        report: list[SaveReport | None] = []
        gather_or_raise(self._sharded_checkpointer.wait)
        gather_or_raise(lambda: report.append(self._checkpointer.wait()))
        self._prune()
        return report[0]

    def close(self) -> None:
        """Wait, and free the memory. A later `save_state` begins a new chain.

        Raises:
            whatever a save raised in the background, once.
        """
        try:
            self._sharded_checkpointer.wait()
        finally:
            self._checkpointer.close()

    def take_over(self, other: AcceleratorCheckpointer) -> None:
        """Take the place of one that has loaded, and has saved nothing yet."""
        folder, self._loaded_dir = other._loaded_dir, other._loaded_dir
        other.close()

        def load() -> None:
            if folder is not None and (self._is_writer or self._joins_search):
                self._checkpointer.load(folder)

        try:
            gather_or_raise(load)
        except _SKIPPABLE as error:
            self._warn_main("%s has gone since it was loaded, the next checkpoint is a keyframe: %s", folder, error)

    @property
    def has_saved(self) -> bool:
        """Whether it has saved anything."""
        return self._has_saved

    @property
    def _is_writer(self) -> bool:
        each = self._accelerator.project_configuration.save_on_each_node
        return bool(self._accelerator.is_local_main_process if each else self._accelerator.is_main_process)

    @property
    def _joins_search(self) -> bool:
        """Whether this process takes part in a search that another one leads."""
        return isinstance(self._checkpointer.scheme, PlanningScheme) and not self._checkpointer.scheme.is_writer

    def _warn_main(self, text: str, *args: object) -> None:
        if self._accelerator.is_main_process:
            _log.warning(text, *args)

    def _drain(self) -> None:
        """Wait for what is being written; that it fails concerns no checkpoint that is there."""
        for wait in (self._sharded_checkpointer.wait, self._checkpointer.wait):
            try:
                gather_or_raise(wait)
            except Exception as error:
                self._warn_main("the last save failed: %s", error)

    def _prepare_dir(self, output_dir: str | Path | None) -> Path:
        """Where to save, once nothing is being written and there is room."""
        if not self._is_writer:
            return Path()
        folder = checkpoint_dirs.save_dir(self._accelerator, output_dir)
        self._checkpointer.wait()
        self._prune()
        _make_dir(folder)
        return folder

    def _write(self, directory: Path, **save_options: Any) -> SaveReport | None:
        collected: list[prepared_state.PreparedState] = []
        spread = prepared_state.has_sharded_model(self._accelerator)

        def collect() -> dict[str, Any]:
            collected.append(prepared_state.collect_prepared(self._accelerator, directory, models=not spread))
            return {} if spread else collected[0].per_rank

        ranks = gather_or_raise(collect)
        if spread:
            self._sharded_checkpointer.save(
                directory, collected[0].state, collected[0].per_rank, background=self._background, **save_options
            )
            return None
        state, parts = collected[0].state | {"ranks": ranks}, collected[0].objects
        reports: list[SaveReport | None] = []

        def save() -> None:
            if self._is_writer or self._joins_search:
                reports.append(
                    self._checkpointer.save(
                        directory, state, objects=parts, extra={"framework": "accelerate"}, **save_options
                    )
                )

        gather_or_raise(save)
        return reports[0] if reports else None

    def _find_candidates(self, input_dir: str | Path | None) -> list[Path]:
        return (
            checkpoint_dirs.load_candidates(self._accelerator, input_dir) if self._accelerator.is_main_process else []
        )

    def _load(self, directory: Path, *, strict: bool) -> DirectoryManifest | None:
        self._loaded_dir = None
        wait_for_writes(directory)
        if gather_or_raise(lambda: checkpoint_dirs.is_stock_checkpoint(directory))[0]:
            self._checkpointer.close()
            gather_or_raise(lambda: self._accelerator.load_state(str(directory)))
            return None
        manifests: list[DirectoryManifest] = []
        read = folders.verify_directory if self._is_writer else folders.read_directory_manifest
        gather_or_raise(lambda: manifests.append(read(directory)))
        manifest = manifests[0]
        if is_sharded_checkpoint(manifest):
            self._load_shards(directory)
            return manifest
        states: list[Any] = []
        gather_or_raise(lambda: states.append(self._read_state(directory)))
        models = list(self._accelerator._models)
        gather_or_raise(lambda: self._check_fit(states[0], models, directory, strict=strict))
        gather_or_raise(
            lambda: prepared_state.load_prepared(self._accelerator, states[0], models, str(directory), strict=strict)
        )
        return manifest

    def _load_shards(self, directory: Path) -> None:
        """The small things first: that they fit is known before anything has changed."""
        self._checkpointer.close()
        state = self._sharded_checkpointer.read_auxiliary_state(directory)
        gather_or_raise(lambda: self._check_fit(state, [], directory, strict=True))
        self._sharded_checkpointer.load(directory)
        gather_or_raise(lambda: prepared_state.load_auxiliary_state(self._accelerator, state, str(directory)))

    def _read_state(self, directory: Path) -> Any:
        """The state that a folder holds; only who will write goes on from it."""
        if prepared_state.has_sharded_model(self._accelerator):
            found, do = (
                "the state of a model that was not sharded",
                "load it without FSDP, and save the model by itself",
            )
            raise MismatchError(str(directory), found=found, expected="shards", do=do)
        if self._is_writer or self._joins_search:
            state = self._checkpointer.load(directory).state
            self._loaded_dir = directory
            return state
        decoded = decode_directory(directory, threads=self._threads)
        return unflatten(
            decoded.tree, decoded.reference.tensors, where=str(directory), max_bytes=decoded.max_copy_bytes
        )

    def _check_fit(self, state: Any, models: list[Any], directory: Path, *, strict: bool) -> None:
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(models, str(directory))
        prepared_state.check_prepared(self._accelerator, state, models, str(directory), strict=strict)

    def _advance_iteration(self) -> None:
        root = checkpoint_dirs.numbered_root(self._accelerator)
        if root is not None:
            settings = self._accelerator.project_configuration
            settings.iteration = max(
                settings.iteration, gather_or_raise(lambda: checkpoint_dirs.next_free_number(root))[0]
            )

    def _prune(self) -> None:
        """Delete what is too many; a checkpoint that cannot be deleted is no reason to end a run."""
        root = checkpoint_dirs.numbered_root(self._accelerator)
        if root is None or not self._is_writer:
            return
        try:
            for folder in checkpoint_dirs.expired_dirs(root, self._accelerator.project_configuration.total_limit):
                self._discard(folder)
        except OSError as error:
            _log.warning("%s", error)

    def _discard(self, directory: Path) -> None:
        try:
            self._checkpointer.discard(directory)
        except ShrinkpointError as error:
            _log.warning("%s", error)


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
