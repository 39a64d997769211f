"""The checkpoint plugin of a Trainer or of Fabric: saving, loading, and removing checkpoint directories, also while
another thread saves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.types import _PATH
from lightning.fabric.wrappers import is_wrapped
from torch import Tensor, nn

from shrinkpoint.errors import ChainError, FormatError, NotFoundError, PolicyError, StateError, StorageError
from shrinkpoint.schemes.base import PlanningScheme, Scheme
from shrinkpoint.storage import is_url, local_path
from shrinkpoint.store import SaveReport
from shrinkpoint.train.checkpointer import Checkpointer
from shrinkpoint.train.lightning.plain_types import from_plain, to_plain
from shrinkpoint.train.planning import require_single_process


def local_path_or_none(path: _PATH) -> Path | None:
    """A path of the file system of this machine; None: it is somewhere else."""
    given: object = path.removeprefix("file://") if isinstance(path, str) else path
    return None if is_url(given) else local_path(given).absolute()


def require_local_path(path: _PATH) -> Path:
    """The directory that a checkpoint is to be.

    Raises:
        PolicyError: it is not on a file system of this machine.
    """
    found = local_path_or_none(path)
    if found is None:
        do = "save to a local or mounted directory, and copy what is to be kept elsewhere from there"
        raise PolicyError("ShrinkIO", found=str(path), expected="a path of a local file system", do=do)
    return found


def move_aside(directory: Path) -> Path | None:
    """Make room for a directory: a link is removed, not followed; a file, such as a checkpoint of the stock plugin,
    gets another name, under which it still loads.

    Returns:
        The file's other name; None: there was none.
    """
    if directory.is_symlink():
        directory.unlink()
    elif directory.is_file():
        aside = directory.with_name(f"{directory.stem}-before{directory.suffix}")
        directory.replace(aside)
        return aside
    return None


def remove_empty(directory: Path) -> None:
    """Remove a directory into which nothing was saved."""
    with suppress(OSError):
        (directory / "bases").rmdir()
    with suppress(OSError):
        directory.rmdir()


class PicklableRLock:
    """A lock that one thread may take several times; in another process it is a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[PicklableRLock], tuple[()]]:
        return (PicklableRLock, ())


class PendingRemovals:
    """Which removals are pending. Every method may be called by any thread."""

    def __init__(self) -> None:
        self._lock = PicklableRLock()
        self._is_other_thread = False  # the last save was one of another thread than the loop's
        self._directory: Path | None = None  # what it writes, or has written
        self._step = 0
        self._is_writing = False
        self._to_remove: list[Path] = []  # to go once another checkpoint is written
        self._unwritten: dict[Path, int] = {}  # removed before they were written, and the step of what was written then

    def begin(self, directory: Path, step: int | None, *, is_other_thread: bool) -> None:
        """A save into this folder begins. If the folder was to be removed, that is taken back, unless it came later.

        Args:
            is_other_thread: on another thread than the loop's.
        """
        with self._lock:
            self._is_other_thread, self._directory, self._step, self._is_writing = (
                is_other_thread,
                directory,
                step or 0,
                True,
            )
            if directory in self._to_remove:
                self._to_remove.remove(directory)
            if self._unwritten.pop(directory, self._step + 1) <= self._step:
                self._to_remove.append(directory)

    def end(self) -> None:
        """The save has ended, whether it succeeded or not: what comes now is not for `take` to wait for."""
        with self._lock:
            self._is_writing = False

    def add(self, directory: Path) -> None:
        """To be removed once another checkpoint is written."""
        with self._lock:
            self._to_remove.append(directory)

    def add_if_other_thread(self, directory: Path) -> bool:
        """Where another thread saves: `add` what it is writing or has written last, or may have queued; else False."""
        with self._lock:
            if not self._is_other_thread:
                return False
            there = directory.exists() or directory.is_symlink()
            if not there and directory != self._directory:
                self._unwritten[directory] = self._step
            elif self._is_writing or directory == self._directory:
                self._to_remove.append(directory)
            else:
                return False
            return True

    def pop_ready(self) -> list[Path]:
        """What is to be removed now that what was being written stands; that itself stays for the one after it."""
        with self._lock:
            ready = [folder for folder in self._to_remove if folder != self._directory]
            self._to_remove = [folder for folder in self._to_remove if folder == self._directory]
            return ready

    def clear_unwritten(self) -> None:
        """Nothing is queued any more."""
        with self._lock:
            self._unwritten.clear()


_log = logging.getLogger("shrinkpoint")
_HINT_BY_KEY = {
    "state['hyper_parameters']": "leave it out with save_hyperparameters(ignore=[...])",
    "state['datamodule_hyper_parameters']": "leave it out with save_hyperparameters(ignore=[...])",
    "state['callbacks']": "let the callback's state_dict return plain values and tensors",
}
_TUNER_PREFIXES = (".lr_find_", ".scale_batch_size_")
"""How files begin that a Tuner saves, restores and removes at once: nothing may be lost in them, nor stand on them."""
_PREEMPTION_PREFIX = "hpc_ckpt_"
"""How those begin that are saved because the process will be ended."""
_DEFAULT_HINT = "convert it to plain values or tensors, for a Trainer in on_save_checkpoint"


class ShrinkIO(CheckpointIO):
    """Checkpoints as small directories: `Trainer(plugins=[ShrinkIO()])` or `Fabric(plugins=[ShrinkIO()])`.

    Each is a delta against the one saved before, and needs no other directory: all others may be deleted. A checkpoint
    holds what Lightning puts into it, and is read without unpickling. Files of the stock plugin still load.

    With a Trainer, `ShrinkCallback` tells the plugin which module is trained; schemes that evaluate need it.

    Args:
        scheme: "lossless", or a scheme of one's own settings, without a group of replicas: only rank 0 calls it.
        keyframe_every: each chain has at most this many checkpoints, its keyframe included; None: no bound.
        background: a save returns as soon as the state is copied, and is written beside the loop. One at a time: a
            save that comes too early waits. A directory that Lightning wants removed meanwhile goes when the write has
            succeeded, and stays where it failed. A save that no training follows is waited for, and so is one on
            another thread, such as that of `AsyncCheckpointIO`: it is beside the loop already.
        threads: native threads for coding; None: every core.
        model: the key of the model in what is saved: a Trainer's own; for Fabric, the key in `fabric.save`.

    Raises:
        PolicyError: a scheme nobody knows, or one with a group; a number out of range.
    """

    def __init__(
        self,
        scheme: str | Scheme = "lossless",
        *,
        keyframe_every: int | None = 20,
        background: bool = False,
        threads: int | None = None,
        model: str = "state_dict",
    ) -> None:
        self._background, self._model, self._threads = background, model, threads
        self.stall_seconds = 0.0
        """Seconds for which the last save held up the loop."""
        self._checkpointer = Checkpointer(
            scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads, model=model
        )
        require_single_process(self._checkpointer.scheme, "ShrinkIO")
        self._stock_io = TorchCheckpointIO()
        self._module: nn.Module | None = None
        self._writing_dir: Path | None = None  # what is written in the background, as far as we know
        self._removals, self._lock = PendingRemovals(), PicklableRLock()
        self._home: int | None = threading.get_ident()  # the thread of the loop
        self._is_torn_down = False  # and nothing was saved since
        self._final_step: object = None  # the step of what was saved first since then

    def __repr__(self) -> str:
        return f"ShrinkIO({self._checkpointer.scheme!r})"

    def __getstate__(self) -> dict[str, Any]:
        """For another process, whose threads are others."""
        return {**self.__dict__, "_home": None}

    def watch(self, module: nn.Module) -> None:
        """Say which module is behind what is saved; `ShrinkCallback` calls this, on the thread of the loop."""
        self._home = threading.get_ident()
        inner: Any = module.module if is_wrapped(module) else module
        self._module = inner

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Save; the state is that of this moment, also in the background.

        Raises:
            TypeError: storage options, of which there are none.
            StateError: something that cannot be stored; `where` says what.
            PolicyError: a path on another machine; a scheme that evaluates, and no module is known.
            StorageError: writing failed; all other checkpoints still load.
            whatever the save before raised in the background; then this call has saved nothing.
        """
        if storage_options is not None:
            raise _OptionsError("ShrinkIO", found="storage_options", expected="none", do="configure ShrinkIO itself")
        began = time.perf_counter()
        try:
            with self._lock:
                self._save_under_lock(checkpoint, path)
        finally:
            self.stall_seconds = time.perf_counter() - began

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What was saved; training goes on from it, and the next save is a delta against it.

        Args:
            path: a directory of ours, or whatever the stock plugin reads.
            map_location: a device, or as `torch.load` takes it: everything lies on the CPU at first, of which a dict or
                a function may say another place. None: the CPU.
            weights_only: for files of the stock plugin; ours are never unpickled.

        Raises:
            FileNotFoundError: there is nothing at `path`.
            NotFoundError: a directory without a whole checkpoint.
            ChainError, FormatError: bytes are at fault.
            StorageError: reading failed.
        """
        folder = local_path_or_none(path)
        if folder is None or not folder.is_dir():
            mapped = {} if map_location is None else {"map_location": map_location}
            stock: dict[str, Any] = self._stock_io.load_checkpoint(path, **mapped, weights_only=weights_only)
            return stock
        leads = getattr(rank_zero_only, "rank", 0) == 0  # the others never save, and need not hold a base
        trail = self._checkpointer if leads else Checkpointer(threads=self._threads)
        with self._lock:
            self._removals.clear_unwritten()
            return load_checkpoint_dict(trail, folder, map_location)

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a checkpoint, ours or not; absent, nothing happens. What the next delta stands on is kept.

        One that is being written is waited for. While another one is being written, removal waits for that; where
        another thread is saving, it waits until one is whole that was saved later.

        Raises:
            StorageError: deleting failed.
        """
        folder = local_path_or_none(path)
        if folder is None:
            self._stock_io.remove_checkpoint(path)
        elif not self._removals.add_if_other_thread(folder):
            with self._lock:
                if self._writing_dir is None or self._writing_dir == folder:
                    self._remove(folder)
                else:
                    self._removals.add(folder)

    def wait(self) -> SaveReport | None:
        """Wait until the last save is durable, and remove what was to be removed after it.

        Returns:
            What the last save did; None if there is none yet.

        Raises:
            whatever a save raised in the background, once.
        """
        with self._lock:
            writing, self._writing_dir = self._writing_dir, None
            try:
                report = self._checkpointer.wait()
            except BaseException:
                if writing is not None:
                    remove_empty(writing)
                self._cancel_removals()
                raise
            self._remove_pending()
            return report

    def teardown(self) -> None:
        """Wait, and free the memory. A later save begins a new chain.

        Raises:
            whatever a save raised in the background, once.
        """
        with self._lock:
            self._is_torn_down = True
            try:
                self.wait()
            finally:
                self._checkpointer.close()

    def _save_under_lock(self, checkpoint: dict[str, Any], path: _PATH) -> None:
        name, step = Path(str(path)).name, _global_step(checkpoint)
        if name.startswith(_TUNER_PREFIXES):
            self.wait()
            self._stock_io.save_checkpoint(checkpoint, path)
            return
        folder = require_local_path(path)
        self.wait()
        beside = self._is_other_thread()
        self._removals.begin(folder, step, is_other_thread=beside)
        try:
            self._save(checkpoint, path)
            if self._is_final_save(checkpoint) or name.startswith(_PREEMPTION_PREFIX) or beside:
                self.wait()
        except BaseException:
            self._removals.end()
            self._cancel_removals()
            raise
        self._removals.end()
        if self._writing_dir is None:
            self._remove_pending()

    def _save(self, checkpoint: dict[str, Any], path: _PATH) -> None:
        folder, parts = require_local_path(path), self._model_objects(checkpoint)
        aside = move_aside(folder)
        folder.mkdir(parents=True, exist_ok=True)  # ModelCheckpoint looks whether a name is taken
        try:
            self._checkpointer.save(
                folder,
                to_plain(checkpoint),
                objects=parts,
                step=_global_step(checkpoint),
                metrics=_monitored_metrics(checkpoint, path),
                extra={"lightning": checkpoint.get("pytorch-lightning_version")},
            )
        except BaseException as error:
            remove_empty(folder)
            if aside is not None:
                with suppress(OSError):
                    aside.replace(folder)
            if isinstance(error, StateError):
                raise _with_hint(error) from error
            raise
        self._writing_dir = folder if self._background else None
        if aside is not None:
            self.remove_checkpoint(aside)

    def _is_final_save(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether nobody might come to wait for this save: no training has begun, or it is still where it ended."""
        step = _global_step(checkpoint)
        if self._is_torn_down:
            self._is_torn_down, self._final_step = False, (step,)
        return self._background and (self._final_step == (step,) or _is_idle(checkpoint))

    def _is_other_thread(self) -> bool:
        """Whether somebody saves beside the loop already, who will tell the loop of an error, and never call `wait`."""
        if self._home is None:
            self._home = threading.main_thread().ident
        return threading.get_ident() != self._home

    def _model_objects(self, checkpoint: Mapping[str, Any]) -> dict[str, nn.Module]:
        scheme = self._checkpointer.scheme
        if self._model not in checkpoint and self._module is not None:
            return {}
        if self._module is not None and _owns_parameters(self._module, checkpoint[self._model]):
            return {self._model: self._module}
        if isinstance(scheme, PlanningScheme) and scheme.evaluate is not None:
            do = "add ShrinkCallback() to the Trainer's callbacks; with Fabric, call watch(model) of this plugin"
            if self._is_other_thread():
                do = "leave AsyncCheckpointIO out, and pass background=True: what is evaluated must not train meanwhile"
            found = f"{scheme!r}, which evaluates, and no module"
            if self._module is not None:
                found = f"{scheme!r}, which evaluates, and another module"
                do += "; where averaged weights are saved, take a scheme that does not evaluate"
            raise PolicyError("ShrinkIO", found=found, expected="the module whose weights are saved", do=do)
        return {}

    def _remove(self, directory: Path) -> None:
        if directory.is_symlink() or directory.is_file():
            directory.unlink()
        else:
            self._checkpointer.discard(directory)

    def _remove_pending(self) -> None:
        for folder in self._removals.pop_ready():
            try:
                self._remove(folder)
            except (StorageError, OSError) as error:  # of a checkpoint too many nobody dies
                _log.warning("%s is not removed: %s", folder, error)

    def _cancel_removals(self) -> None:
        for folder in self._removals.pop_ready():
            _log.warning("%s is not removed: what was to take its place was not written", folder)


def _owns_parameters(module: nn.Module, state: Any) -> bool:
    """Whether a module's own parameters are what is saved: not those of another one, and no averages of them."""
    places = {parameter.data_ptr() for parameter in module.parameters() if parameter.numel()}
    saved = state.values() if isinstance(state, Mapping) else ()
    return any(isinstance(value, Tensor) and value.data_ptr() in places for value in saved)


class _OptionsError(PolicyError, TypeError):
    """What Lightning expects of a plugin that takes no options."""


def load_checkpoint_dict(checkpointer: Checkpointer, directory: Path, map_location: Any = None) -> dict[str, Any]:
    """The checkpoint dict of a directory of ours.

    Raises:
        NotFoundError, ChainError, FormatError, StorageError: as `Trail.load`.
    """
    try:
        state: dict[str, Any] = from_plain(checkpointer.load(directory, device=_target_device(map_location)).state)
    except (NotFoundError, ChainError, FormatError) as error:
        do = "resume from another one: ckpt_path=newest(directory), of shrinkpoint.train.lightning, finds the newest"
        raise type(error)(error.where, found=error.found, expected=error.expected, do=do) from error
    return state


def _target_device(map_location: Any) -> torch.device | None:
    """Where tensors that lie on the CPU are to go."""
    if map_location is None or isinstance(map_location, torch.device):
        return map_location
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get("cpu", "cpu"))
    if isinstance(map_location, Callable):  # type: ignore[arg-type]
        moved = map_location(torch.empty(0).untyped_storage(), "cpu")
        return None if moved is None else torch.device(moved.device)
    return torch.device(map_location)


def _is_idle(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a Trainer saved this while it was in no epoch: before a training, after it, or without one."""
    try:
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        return bool(epochs["ready"] == epochs["completed"])
    except (KeyError, TypeError):  # of Fabric
        return False


def _global_step(checkpoint: Mapping[str, Any]) -> int | None:
    step = checkpoint.get("global_step")
    return step if type(step) is int and step >= 0 else None


def _monitored_metrics(checkpoint: Mapping[str, Any], path: _PATH) -> dict[str, Any]:
    """What the ModelCheckpoint that saves this measured of it."""
    callbacks = checkpoint.get("callbacks")
    found: dict[str, Any] = {}
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        scores = state.get("best_k_models") if isinstance(state, dict) else None
        if isinstance(scores, dict) and str(path) in scores and isinstance(state.get("monitor"), str):
            found[state["monitor"]] = scores[str(path)]
    return found


def _with_hint(error: StateError) -> StateError:
    """The same, with what to do about it in Lightning's words."""
    do = next((hint for where, hint in _HINT_BY_KEY.items() if error.where.startswith(where)), _DEFAULT_HINT)
    return StateError(error.where, found=error.found, expected=error.expected, do=do)
