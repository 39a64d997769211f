"""The checkpoint plugin of a Trainer or of Fabric: saves, loads and removes checkpoint directories, also while another
thread saves."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.types import _PATH
from lightning.fabric.wrappers import is_wrapped
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from shrinkpoint.errors import ChainError, FormatError, NotFoundError, PolicyError, StateError, StorageError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.storage import ObjectUrl, hide_credentials, is_object_url, is_url, resolve_directory
from shrinkpoint.store import Keep, SaveReport
from shrinkpoint.store.identify import is_checkpoint
from shrinkpoint.store.retention import check_keep
from shrinkpoint.store.save_settings import OnSave, SaveSettings
from shrinkpoint.tensors.wrappers import match_state_keys
from shrinkpoint.threads import ForkSafeLock
from shrinkpoint.train.background import require_single_process
from shrinkpoint.train.checkpointer import Checkpointer
from shrinkpoint.train.default_evaluation import add_evaluation
from shrinkpoint.train.lightning.slot_tensors import keep_slot_dtypes
from shrinkpoint.train.lightning.training_loss import OTHER_WEIGHTS, TrainingLoss
from shrinkpoint.train.recent_batches import TermCounter, counts_terms, note_terms

_log = logging.getLogger("shrinkpoint")
_HINT_BY_KEY = {
    "state['hyper_parameters']": "leave it out with save_hyperparameters(ignore=[...])",
    "state['datamodule_hyper_parameters']": "leave it out with save_hyperparameters(ignore=[...])",
    "state['callbacks']": "let the callback's state_dict return plain values and tensors",
}
_DEFAULT_HINT = "convert it to plain values or tensors, for a Trainer in on_save_checkpoint"
_TUNER_PREFIXES = (".lr_find_", ".scale_batch_size_")
"""Prefixes of files that a Tuner saves, restores and removes at once: they are saved lossless and outside the chain."""
_MAX_REPORTS = 100  # Reports of saves that are held for a callback that logs them, and which may not be there
_PREEMPTION_PREFIX = "hpc_ckpt_"  # Prefix of checkpoints that are saved because the process is about to be ended


class ShrinkIO(CheckpointIO):
    """Saves checkpoints as small directories: `Trainer(plugins=[ShrinkIO()])` or `Fabric(plugins=[ShrinkIO()])`.

    Each checkpoint is a delta against the one saved before it, and needs no other directory: any other one may be
    deleted. It holds what Lightning puts into it, and is read without unpickling. Files of the stock plugin can be
    loaded, too. A path may be a URL such as "s3://bucket/run/last.ckpt"; there every checkpoint is a keyframe.

    With a Trainer, `ShrinkIOCallback` tells the plugin which module is trained; schemes that evaluate need it.

    Args:
        scheme, keyframe_every, background, threads, max_bytes, on_save: see `SaveSettings`. A scheme must have no
            process group: only rank 0 calls it. With `ShrinkIOCallback`, "fisher" measures the loss on validation
            batches, or on the last training batches, and keeps it within 0.1%. A Trainer's loggers get the numbers of
            each save with `ShrinkIOCallback(log_saves=True)`.

            With `background`, a directory that Lightning removes during a write is removed after the write has
            succeeded, and kept if it failed. A save outside of training is waited for, and so is one on another thread
            than the training loop's, such as that of `AsyncCheckpointIO`.
        model: the key of the model in what is saved: for a Trainer the default; for Fabric, the key in `fabric.save`.
        keep: rules by which this deletes checkpoints, of those beside each other whose names differ in numbers alone;
            `metric` is what a `ModelCheckpoint` monitors, which then needs `save_top_k=-1`. None: Lightning deletes.

    Raises:
        PolicyError: an unknown scheme, a scheme with a group, or a number out of range.
    """

    def __init__(
        self,
        scheme: str | Scheme = "lossless",
        *,
        keyframe_every: int | None = 20,
        background: bool = False,
        threads: int | None = None,
        max_bytes: int | None = None,
        model: str = "state_dict",
        on_save: OnSave | None = None,
        keep: Keep | None = None,
    ) -> None:
        self._keep = check_keep(keep)
        scheme = add_evaluation(scheme, TrainingLoss())
        self._settings = SaveSettings(scheme, keyframe_every, background, threads, max_bytes, on_save)
        self._model = model
        self.stall_seconds = 0.0
        """Seconds for which the last save blocked training."""
        self._counter = TermCounter()
        self._checkpointer = Checkpointer(**vars(replace(self._settings, on_save=self._note_saved)), model=model)
        self._new_reports: deque[SaveReport] = deque(maxlen=_MAX_REPORTS)
        require_single_process(self._checkpointer.scheme, "ShrinkIO")
        self._stock_io = TorchCheckpointIO()
        self._module: nn.Module | None = None
        self._rules: dict[str, Keep | None] = {}  # by which each ModelCheckpoint deletes
        self._writing_dir: Path | ObjectUrl | None = None  # the directory of a background save that was not waited for
        self._removals, self._lock = PendingRemovals(), ForkSafeLock()
        self._loop_thread: int | None = threading.get_ident()
        self._is_torn_down = False  # and nothing was saved since
        self._final_step: object = None  # the step of the first save since then

    def __repr__(self) -> str:
        return f"ShrinkIO({self._checkpointer.scheme!r})"

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, whose threads are others."""
        return {**self.__dict__, "_loop_thread": None}

    def watch(self, module: nn.Module) -> None:
        """Set the module whose state is saved; `ShrinkIOCallback` calls this on the thread of the training loop."""
        self._loop_thread = threading.get_ident()
        inner: Any = module.module if is_wrapped(module) else module
        self._module = inner

    def note_batch(self, batch: Any, *, batches_per_step: int = 1) -> None:
        """Count the loss terms of a training batch, and keep a copy if the loss is measured on it.

        `ShrinkIOCallback` calls this; with Fabric, the loop does.

        Args:
            batches_per_step: whose gradients one optimizer step averages, over all processes.
        """
        scheme = self._checkpointer.scheme
        if counts_terms(scheme):
            self._counter.add([batch], scale=batches_per_step)
        evaluate = scheme.evaluate if isinstance(scheme, Planner) else None
        if isinstance(evaluate, TrainingLoss):
            evaluate.add(batch)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Save the state of this moment, also in the background.

        Raises:
            TypeError: `storage_options` is given.
            StateError: something cannot be stored; `where` names it.
            PolicyError: the path is neither local nor in a bucket; or the scheme evaluates, and no module is set.
            StorageError: writing failed; all other checkpoints can still be loaded.
            Exception: any error of the previous background save; this call has saved nothing then.
        """
        if storage_options is not None:
            raise _OptionsError("ShrinkIO", found="storage_options", expected="none", do="pass options to ShrinkIO")
        start = time.perf_counter()
        try:
            with self._lock.lock:
                self._save_under_lock(checkpoint, path)
        finally:
            self.stall_seconds = time.perf_counter() - start

    def take_reports(self) -> list[SaveReport]:
        """The reports of the checkpoints that have been committed since the last call, of many the newest."""
        reports = []
        while self._new_reports:
            reports.append(self._new_reports.popleft())
        return reports

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint dict; the next save is a delta against it.

        Args:
            path: a directory of ours, also in a bucket, or anything that the stock plugin reads.
            map_location: a device, or a dict or function as for `torch.load`, applied to tensors on the CPU. None: the
                CPU.
            weights_only: for files of the stock plugin; ours are never unpickled.

        Raises:
            FileNotFoundError: there is nothing at `path`.
            NotFoundError: a directory without a complete checkpoint.
            ChainError, FormatError: the checkpoint is damaged.
            StorageError: reading failed.
        """
        directory = place_or_none(path)
        if directory is None or not is_own_directory(directory):
            options = {} if map_location is None else {"map_location": map_location}
            stock: dict[str, Any] = self._stock_io.load_checkpoint(path, **options, weights_only=weights_only)
            return stock
        is_writer = getattr(rank_zero_only, "rank", 0) == 0  # other ranks never save: they keep no reference
        checkpointer = self._checkpointer
        if not is_writer:
            checkpointer = Checkpointer(threads=self._settings.threads, max_bytes=self._settings.max_bytes)
        with self._lock.lock:
            self._removals.clear_unwritten()
            checkpoint = load_checkpoint_dict(checkpointer, directory, map_location)
        weights = checkpoint.get(self._model)
        if self._module is not None and isinstance(weights, Mapping):
            checkpoint[self._model] = match_state_keys(weights, self._module.state_dict())
        return checkpoint

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a checkpoint, ours or another one, if it exists; the base of the next delta is kept.

        A checkpoint that is being written is waited for. While another one is being written, the removal is delayed
        until that is complete; if another thread saves, until a later checkpoint is complete.

        Raises:
            StorageError: deleting failed.
        """
        directory = place_or_none(path)
        if directory is None:
            self._stock_io.remove_checkpoint(path)
        elif not self._removals.add_if_other_thread(directory):
            with self._lock.lock:
                if self._writing_dir is None or self._writing_dir == directory:
                    self._remove(directory)
                else:
                    self._removals.add(directory)

    def wait(self) -> SaveReport | None:
        """Wait until the last save is durable, and run the delayed removals.

        Returns:
            The report of the last save; None if nothing was saved yet.

        Raises:
            Exception: any error of a background save, once.
        """
        with self._lock.lock:
            writing_dir, self._writing_dir = self._writing_dir, None
            try:
                report = self._checkpointer.wait()
            except BaseException:
                if writing_dir is not None:
                    remove_empty(writing_dir)
                self._cancel_removals()
                raise
            self._remove_pending()
            return report

    def teardown(self) -> None:
        """Wait, and free the memory. A later save begins a new chain.

        Raises:
            Exception: any error of a background save, once.
        """
        with self._lock.lock:
            self._is_torn_down = True
            try:
                self.wait()
            finally:
                self._checkpointer.close()

    def _note_saved(self, report: SaveReport) -> None:
        self._new_reports.append(report)
        if self._settings.on_save is not None:
            self._settings.on_save(report)

    def _save_under_lock(self, checkpoint: dict[str, Any], path: _PATH) -> None:
        name, step = Path(str(path)).name, _global_step(checkpoint)
        if name.startswith(_TUNER_PREFIXES):
            self.wait()
            self._stock_io.save_checkpoint(checkpoint, path)
            return
        directory = require_place(path)
        self.wait()
        is_other_thread = self._is_other_thread()
        try:
            with self._removals.during_save(directory, step, is_other_thread=is_other_thread):
                self._save(checkpoint, path, directory)
                if self._is_torn_down:
                    self._is_torn_down, self._final_step = False, (step,)
                # no later call may wait where training has not begun, or has ended at this step
                is_final = self._settings.background and (self._final_step == (step,) or _is_idle(checkpoint))
                if is_final or name.startswith(_PREEMPTION_PREFIX) or is_other_thread:
                    self.wait()
        except BaseException:
            self._cancel_removals()
            raise
        if self._writing_dir is None:
            self._remove_pending()

    def _save(self, checkpoint: dict[str, Any], path: _PATH, directory: Path | ObjectUrl) -> None:
        objects, moved_file = self._model_objects(checkpoint), None
        self._retain(checkpoint)
        note_terms(self._checkpointer.scheme, self._counter.terms)
        if isinstance(directory, Path):
            moved_file = move_aside(directory)
            directory.mkdir(parents=True, exist_ok=True)  # ModelCheckpoint looks whether a name is taken
        try:
            self._checkpointer.save(
                directory,
                checkpoint,
                objects=objects,
                step=_global_step(checkpoint),
                metrics=_monitored_metrics(checkpoint, path),
                extra={"lightning": checkpoint.get("pytorch-lightning_version")},
            )
        except BaseException as error:
            remove_empty(directory)
            if moved_file is not None and isinstance(directory, Path):
                with suppress(OSError):
                    moved_file.replace(directory)
            if isinstance(error, StateError):
                hints = (hint for where, hint in _HINT_BY_KEY.items() if error.where.startswith(where))
                do = next(hints, _DEFAULT_HINT)
                raise StateError(error.where, found=error.found, expected=error.expected, do=do) from error
            raise
        self._writing_dir = directory if self._settings.background else None
        if moved_file is not None:
            self.remove_checkpoint(moved_file)

    def _retain(self, checkpoint: Mapping[str, Any]) -> None:
        """Tell the checkpointer by which rules checkpoints of the run are deleted."""
        if self._keep is not None:
            self._checkpointer.retain(self._keep, deletes=True, protected=_best_paths(checkpoint))
            return
        if (saver := _calling_saver(checkpoint)) is not None:
            self._rules.pop("", None)
            self._rules[saver.state_key] = _rules_of(saver)
        elif not self._rules and "pytorch-lightning_version" in checkpoint:  # Fabric deletes none
            self._rules[""] = Keep(best=1)  # whoever saves, as `AsyncCheckpointIO` in its thread, may delete
        rules = {*self._rules.values()} - {None}
        is_exact = len(self._rules) == 1 and "" not in self._rules and "callbacks" in checkpoint  # else without metrics
        keep = None if not rules else rules.pop() if is_exact else Keep(best=1)
        self._checkpointer.retain(keep, is_exact=is_exact, protected=_top_paths(checkpoint))

    def _is_other_thread(self) -> bool:
        """True if this is not the thread of the training loop: such a caller reports errors, and never calls `wait`."""
        if self._loop_thread is None:
            self._loop_thread = threading.main_thread().ident
        return threading.get_ident() != self._loop_thread

    def _model_objects(self, checkpoint: Mapping[str, Any]) -> dict[str, nn.Module]:
        """The module behind the saved weights, by its key; empty if it is not known, or not behind them."""
        scheme = self._checkpointer.scheme
        if self._model not in checkpoint and self._module is not None:
            return {}
        if self._module is not None and _owns_parameters(self._module, checkpoint[self._model]):
            return {self._model: self._module}
        evaluate = scheme.evaluate if isinstance(scheme, Planner) else None
        if isinstance(evaluate, TrainingLoss) and self._module is not None:
            evaluate.unknown = OTHER_WEIGHTS
        if evaluate is None or isinstance(evaluate, TrainingLoss):
            return {}
        do = "add ShrinkIOCallback() to the Trainer's callbacks; with Fabric, call watch(model) of this plugin"
        if self._is_other_thread():
            do = "leave AsyncCheckpointIO out, and pass background=True: training must wait for evaluations"
        if self._module is not None:
            do += "; where averaged weights are saved, take a scheme that does not evaluate"
        found = f"{scheme!r}, which evaluates, and {'no' if self._module is None else 'another'} module"
        raise PolicyError("ShrinkIO", found=found, expected="the module whose weights are saved", do=do)

    def _remove(self, directory: Path | ObjectUrl) -> None:
        if isinstance(directory, Path) and (directory.is_symlink() or directory.is_file()):
            directory.unlink()
        else:
            self._checkpointer.discard(directory)

    def _remove_pending(self) -> None:
        for directory in self._removals.pop_ready():
            try:
                self._remove(directory)
            except (StorageError, OSError) as error:  # a checkpoint too many is no reason to end a run
                _log.warning("%s is not removed: %s", directory, error)

    def _cancel_removals(self) -> None:
        for directory in self._removals.pop_ready():
            _log.warning("%s is not removed: the checkpoint that was to replace it was not written", directory)


class PendingRemovals:
    """Directories that Lightning wants removed, and that must be kept for now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._is_other_thread = False  # whether the last save was on another thread than the training loop's
        self._directory: Path | ObjectUrl | None = None  # of the last save, complete or not
        self._step = 0
        self._is_writing = False
        self._to_remove: dict[Path | ObjectUrl, None] = {}  # in order, each once; removed once another one is written
        # Directories to remove that are not written yet -> step of the last save
        self._unwritten: dict[Path | ObjectUrl, int] = {}

    @contextmanager
    def during_save(self, directory: Path | ObjectUrl, step: int | None, *, is_other_thread: bool) -> Iterator[None]:
        """Register a save, while which removals wait. A pending removal of its directory is cancelled, unless the save
        is older than that.

        Args:
            is_other_thread: the save is on another thread than the training loop's.
        """
        with self._lock.lock:
            self._is_other_thread, self._directory = is_other_thread, directory
            self._step, self._is_writing = step or 0, True
            self._to_remove.pop(directory, None)
            if self._unwritten.pop(directory, self._step + 1) <= self._step:
                self._to_remove[directory] = None
        try:
            yield
        finally:
            with self._lock.lock:
                self._is_writing = False

    def add(self, directory: Path | ObjectUrl) -> None:
        """Remove a directory once another checkpoint is written."""
        with self._lock.lock:
            self._to_remove[directory] = None

    def add_if_other_thread(self, directory: Path | ObjectUrl) -> bool:
        """If another thread saves: add what it is writing, wrote last, or may have queued; else return False."""
        with self._lock.lock:
            if not self._is_other_thread:
                return False
            exists = os.path.lexists(directory) if isinstance(directory, Path) else is_checkpoint(directory)
            if not exists and directory != self._directory:
                self._unwritten[directory] = self._step
            elif self._is_writing or directory == self._directory:
                self._to_remove[directory] = None
            else:
                return False
            return True

    def pop_ready(self) -> list[Path | ObjectUrl]:
        """Return the directories to remove once a save is complete; its own directory stays pending."""
        with self._lock.lock:
            ready = [directory for directory in self._to_remove if directory != self._directory]
            self._to_remove = {directory: None for directory in self._to_remove if directory == self._directory}
            return ready

    def clear_unwritten(self) -> None:
        """Forget directories that were to be removed before they were written: no save is queued any more."""
        with self._lock.lock:
            self._unwritten.clear()


def load_checkpoint_dict(
    checkpointer: Checkpointer, directory: Path | ObjectUrl, map_location: Any = None
) -> dict[str, Any]:
    """Return the checkpoint dict that a directory of ours holds.

    Raises:
        NotFoundError, ChainError, FormatError, StorageError: as `Checkpointer.load`.
    """
    try:
        restored = checkpointer.load(directory, device=_target_device(map_location))
    except (NotFoundError, ChainError, FormatError) as error:
        advice = "resume from another one: ckpt_path=latest_valid(directory), of shrinkpoint.train.lightning"
        do = f"{advice}; or {error.do}" if "max_bytes" in error.do else advice
        raise type(error)(error.where, found=error.found, expected=error.expected, do=do) from error
    state: dict[str, Any] = restored.state
    if restored.manifest is not None and restored.manifest.weights_only:
        state.pop("optimizer_states", None)  # Lightning then says that the checkpoint contains only the model
    return keep_slot_dtypes(state)


def place_or_none(path: _PATH) -> Path | ObjectUrl | None:
    """Return an absolute path on this machine's file system, or a place in a bucket; None for any other URL."""
    location = path.removeprefix("file://") if isinstance(path, str) else path
    return None if is_url(location) and not is_object_url(location) else resolve_directory(location, "path")


def require_place(path: _PATH) -> Path | ObjectUrl:
    """Return the absolute path of a checkpoint directory, or its place in a bucket.

    Raises:
        PolicyError: it is neither.
    """
    place = place_or_none(path)
    if place is None:
        expected = "a path of a local file system, or an s3://, gs:// or az:// URL"
        do = "save to a local or mounted directory, and copy checkpoints elsewhere from there"
        raise PolicyError("ShrinkIO", found=hide_credentials(str(path)), expected=expected, do=do)
    return place


def is_own_directory(place: Path | ObjectUrl) -> bool:
    """True if a place is to be read as a checkpoint of ours: on this machine any directory."""
    return place.is_dir() if isinstance(place, Path) else is_checkpoint(place)


def move_aside(directory: Path) -> Path | None:
    """Free the name of a directory: a link is removed, and a file, such as a stock checkpoint, is renamed.

    Returns:
        The file's new path, from which it can still be loaded; None if there was no file.
    """
    if directory.is_symlink():
        directory.unlink()
    elif directory.is_file():
        new_path = directory.with_name(f"{directory.stem}-before{directory.suffix}")
        directory.replace(new_path)
        return new_path
    return None


def remove_empty(directory: Path | ObjectUrl) -> None:
    """Remove a directory if nothing was saved into it."""
    if not isinstance(directory, Path):
        return
    with suppress(OSError):
        (directory / "bases").rmdir()
    with suppress(OSError):
        directory.rmdir()


class _OptionsError(PolicyError, TypeError):
    """The TypeError that Lightning expects of a plugin that takes no options."""


def _owns_parameters(module: nn.Module, state: Any) -> bool:
    """True if the saved tensors are a module's own parameters, and not another module's or averages of them."""
    addresses = {parameter.data_ptr() for parameter in module.parameters() if parameter.numel()}
    saved = state.values() if isinstance(state, Mapping) else ()
    return any(isinstance(value, Tensor) and value.data_ptr() in addresses for value in saved)


def _target_device(map_location: Any) -> torch.device | None:
    if map_location is None or isinstance(map_location, torch.device):
        return map_location
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get("cpu", "cpu"))
    if isinstance(map_location, Callable):  # type: ignore[arg-type]
        storage = map_location(torch.empty(0).untyped_storage(), "cpu")
        return None if storage is None else torch.device(storage.device)
    return torch.device(map_location)


def _is_idle(checkpoint: Mapping[str, Any]) -> bool:
    """True if a Trainer saved outside of an epoch: before training, after it, or without any."""
    try:
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        return bool(epochs["ready"] == epochs["completed"])
    except (KeyError, TypeError):  # of Fabric
        return False


def _calling_saver(checkpoint: Mapping[str, Any]) -> ModelCheckpoint | None:
    """The callback of a Trainer that saves; None if there is none, as in the thread of an `AsyncCheckpointIO`.

    A plugin is not told who calls it, and how many checkpoints stay.
    """
    frame = sys._getframe() if "pytorch-lightning_version" in checkpoint else None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, ModelCheckpoint):
            return caller
        frame = frame.f_back
    return None


def _rules_of(saver: ModelCheckpoint) -> Keep | None:
    """Rules that keep as many checkpoints as a callback does; None: it keeps all."""
    if saver.save_top_k == -1:
        return None
    # What it saves is one of the best, or the last one.
    best = saver.save_top_k - (saver.save_last is not True) if saver.monitor else 0
    return Keep(last=1, best=best, metric=str(saver.monitor), mode=saver.mode) if best > 0 else Keep(last=1)


def _global_step(checkpoint: Mapping[str, Any]) -> int | None:
    step = checkpoint.get("global_step")
    return step if type(step) is int and step >= 0 else None


def _monitored_metrics(checkpoint: Mapping[str, Any], path: _PATH) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for state in _callback_states(checkpoint):
        scores = state.get("best_k_models")
        if isinstance(scores, dict) and str(path) in scores and isinstance(state.get("monitor"), str):
            metrics[state["monitor"]] = scores[str(path)]
    return metrics


def _callback_states(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    states = checkpoint.get("callbacks")
    return [state for state in states.values() if isinstance(state, dict)] if isinstance(states, dict) else []


def _best_paths(checkpoint: Mapping[str, Any]) -> list[Path | ObjectUrl]:
    return _places(state.get("best_model_path") for state in _callback_states(checkpoint))


def _top_paths(checkpoint: Mapping[str, Any]) -> list[Path | ObjectUrl]:
    return _places(path for state in _callback_states(checkpoint) for path in state.get("best_k_models") or ())


def _places(paths: Iterable[object]) -> list[Path | ObjectUrl]:
    places = (place_or_none(path) for path in paths if isinstance(path, str) and path)
    return [place for place in places if place is not None]
