"""The plugin through which a Trainer, or Fabric, saves and loads."""

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
from shrinkpoint.schemes import Scheme, Settling
from shrinkpoint.store import SaveReport
from shrinkpoint.train.lightning.forms import plain, unplain
from shrinkpoint.train.lightning.place import folder_of, local, remove_empty, vacated
from shrinkpoint.train.lightning.removals import Lock, Removals
from shrinkpoint.train.settling import alone
from shrinkpoint.train.trail import Trail

_log = logging.getLogger("shrinkpoint")
_HINTS = {
    "state['hyper_parameters']": "leave it out with save_hyperparameters(ignore=[...])",
    "state['datamodule_hyper_parameters']": "leave it out with save_hyperparameters(ignore=[...])",
    "state['callbacks']": "let the callback's state_dict return plain values and tensors",
}
_TUNERS = (".lr_find_", ".scale_batch_size_")
"""How files begin that a Tuner saves, restores and removes at once: nothing may be lost in them, nor stand on them."""
_URGENT = "hpc_ckpt_"
"""How those begin that are saved because the process will be ended."""
_HINT = "convert it to plain values or tensors, for a Trainer in on_save_checkpoint"


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
        self, scheme: str | Scheme = "lossless", *, keyframe_every: int | None = 20, background: bool = False,
        threads: int | None = None, model: str = "state_dict",
    ) -> None:  # fmt: skip
        self._background, self._model, self._threads = background, model, threads
        self.stall = 0.0
        """Seconds for which the last save held up the loop."""
        self._trail = Trail(
            scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads, model=model
        )
        alone(self._trail.scheme, "ShrinkIO")
        self._stock = TorchCheckpointIO()
        self._module: nn.Module | None = None
        self._writing: Path | None = None  # what is written in the background, as far as we know
        self._removals, self._lock = Removals(), Lock()
        self._home: int | None = threading.get_ident()  # the thread of the loop
        self._torn_down = False  # and nothing was saved since
        self._final: object = None  # the step of what was saved first since then

    def __repr__(self) -> str:
        return f"ShrinkIO({self._trail.scheme!r})"

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
                self._save_now(checkpoint, path)
        finally:
            self.stall = time.perf_counter() - began

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
        folder = local(path)
        if folder is None or not folder.is_dir():
            mapped = {} if map_location is None else {"map_location": map_location}
            stock: dict[str, Any] = self._stock.load_checkpoint(path, **mapped, weights_only=weights_only)
            return stock
        leads = getattr(rank_zero_only, "rank", 0) == 0  # the others never save, and need not hold a base
        trail = self._trail if leads else Trail(threads=self._threads)
        with self._lock:
            self._removals.forget()
            return loaded(trail, folder, map_location)

    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a checkpoint, ours or not; absent, nothing happens. What the next delta stands on is kept.

        One that is being written is waited for. While another one is being written, removal waits for that; where
        another thread is saving, it waits until one is whole that was saved later.

        Raises:
            StorageError: deleting failed.
        """
        folder = local(path)
        if folder is None:
            self._stock.remove_checkpoint(path)
        elif not self._removals.add_of_another(folder):
            with self._lock:
                if self._writing is None or self._writing == folder:
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
            writing, self._writing = self._writing, None
            try:
                report = self._trail.wait()
            except BaseException:
                if writing is not None:
                    remove_empty(writing)
                self._spare()
                raise
            self._remove_pending()
            return report

    def teardown(self) -> None:
        """Wait, and free the memory. A later save begins a new chain.

        Raises:
            whatever a save raised in the background, once.
        """
        with self._lock:
            self._torn_down = True
            try:
                self.wait()
            finally:
                self._trail.close()

    def _save_now(self, checkpoint: dict[str, Any], path: _PATH) -> None:
        name, step = Path(str(path)).name, _step(checkpoint)
        if name.startswith(_TUNERS):
            self.wait()
            self._stock.save_checkpoint(checkpoint, path)
            return
        folder = folder_of(path)
        self.wait()
        beside = self._is_beside()
        self._removals.begin(folder, step, beside=beside)
        try:
            self._save(checkpoint, path)
            if self._is_last_word(checkpoint) or name.startswith(_URGENT) or beside:
                self.wait()
        except BaseException:
            self._removals.end()
            self._spare()
            raise
        self._removals.end()
        if self._writing is None:
            self._remove_pending()

    def _save(self, checkpoint: dict[str, Any], path: _PATH) -> None:
        folder, parts = folder_of(path), self._parts(checkpoint)
        aside = vacated(folder)
        folder.mkdir(parents=True, exist_ok=True)  # ModelCheckpoint looks whether a name is taken
        try:
            self._trail.save(
                folder, plain(checkpoint), parts=parts, step=_step(checkpoint), metrics=_metrics(checkpoint, path),
                extra={"lightning": checkpoint.get("pytorch-lightning_version")},
            )  # fmt: skip
        except BaseException as error:
            remove_empty(folder)
            if aside is not None:
                with suppress(OSError):
                    aside.replace(folder)
            if isinstance(error, StateError):
                raise _explained(error) from error
            raise
        self._writing = folder if self._background else None
        if aside is not None:
            self.remove_checkpoint(aside)

    def _is_last_word(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether nobody might come to wait for this save: no training has begun, or it is still where it ended."""
        step = _step(checkpoint)
        if self._torn_down:
            self._torn_down, self._final = False, (step,)
        return self._background and (self._final == (step,) or _is_idle(checkpoint))

    def _is_beside(self) -> bool:
        """Whether somebody saves beside the loop already, who will tell the loop of an error, and never call `wait`."""
        if self._home is None:
            self._home = threading.main_thread().ident
        return threading.get_ident() != self._home

    def _parts(self, checkpoint: Mapping[str, Any]) -> dict[str, nn.Module]:
        scheme = self._trail.scheme
        if self._model not in checkpoint and self._module is not None:
            return {}
        if self._module is not None and _is_behind(self._module, checkpoint[self._model]):
            return {self._model: self._module}
        if isinstance(scheme, Settling) and scheme.evaluate is not None:
            do = "add ShrinkCallback() to the Trainer's callbacks; with Fabric, call watch(model) of this plugin"
            if self._is_beside():
                do = "leave AsyncCheckpointIO out, and pass background=True: what is evaluated must not train meanwhile"
            found = f"{scheme!r}, which evaluates, and no module"
            if self._module is not None:
                found = f"{scheme!r}, which evaluates, and another module"
                do += "; where averaged weights are saved, take a scheme that does not evaluate"
            raise PolicyError("ShrinkIO", found=found, expected="the module whose weights are saved", do=do)
        return {}

    def _remove(self, folder: Path) -> None:
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        else:
            self._trail.discard(folder)

    def _remove_pending(self) -> None:
        for folder in self._removals.take():
            try:
                self._remove(folder)
            except (StorageError, OSError) as error:  # of a checkpoint too many nobody dies
                _log.warning("%s is not removed: %s", folder, error)

    def _spare(self) -> None:
        for folder in self._removals.take():
            _log.warning("%s is not removed: what was to take its place was not written", folder)


def _is_behind(module: nn.Module, state: Any) -> bool:
    """Whether a module's own parameters are what is saved: not those of another one, and no averages of them."""
    places = {parameter.data_ptr() for parameter in module.parameters() if parameter.numel()}
    saved = state.values() if isinstance(state, Mapping) else ()
    return any(isinstance(value, Tensor) and value.data_ptr() in places for value in saved)


class _OptionsError(PolicyError, TypeError):
    """What Lightning expects of a plugin that takes no options."""


def loaded(trail: Trail, folder: Path, map_location: Any = None) -> dict[str, Any]:
    """The checkpoint dict of a directory of ours.

    Raises:
        NotFoundError, ChainError, FormatError, StorageError: as `Trail.load`.
    """
    try:
        state: dict[str, Any] = unplain(trail.load(folder, device=_device(map_location)).state)
    except (NotFoundError, ChainError, FormatError) as error:
        do = "resume from another one: ckpt_path=newest(directory), of shrinkpoint.train.lightning, finds the newest"
        raise type(error)(error.where, found=error.found, expected=error.expected, do=do) from error
    return state


def _device(map_location: Any) -> torch.device | None:
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


def _step(checkpoint: Mapping[str, Any]) -> int | None:
    step = checkpoint.get("global_step")
    return step if type(step) is int and step >= 0 else None


def _metrics(checkpoint: Mapping[str, Any], path: _PATH) -> dict[str, Any]:
    """What the ModelCheckpoint that saves this measured of it."""
    callbacks = checkpoint.get("callbacks")
    found: dict[str, Any] = {}
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        scores = state.get("best_k_models") if isinstance(state, dict) else None
        if isinstance(scores, dict) and str(path) in scores and isinstance(state.get("monitor"), str):
            found[state["monitor"]] = scores[str(path)]
    return found


def _explained(error: StateError) -> StateError:
    """The same, with what to do about it in Lightning's words."""
    do = next((hint for where, hint in _HINTS.items() if error.where.startswith(where)), _HINT)
    return StateError(error.where, found=error.found, expected=error.expected, do=do)
