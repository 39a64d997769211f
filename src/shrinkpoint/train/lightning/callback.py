"""Gives a scheme the Trainer's module, gradients and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.optim import Optimizer

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.lightning.io import ShrinkIO, require_place
from shrinkpoint.train.save_decision import SaveDecisionPolicy, SaveSchedule, check_policy
from shrinkpoint.train.state_alignment import NAMES_KEY, align_state, collect_names
from shrinkpoint.train.state_dicts import check_optimizer_kind, check_scheduler_kind, stride_slots


class ShrinkIOCallback(pl.Callback):
    """Tells the Trainer's `ShrinkIO` which module it saves and which batches it trains on, and records gradients.

    With it, optimizers are restored by the names of their parameters; without, by their order.

    Gradients are recorded on the process that saves, before they are clipped; with several optimizers, when the first
    one steps. After a restore, recording starts afresh.

    Args:
        gradients: a recorder of the same module, which must also be passed to the scheme.
        save_decision_policy: when to save, besides what `ModelCheckpoint` says: into `step=STEP.ckpt` beside its
            checkpoints. After SIGTERM, where the policy watches for that, the run saves before Lightning ends it.
            Metrics are those that were logged.
        log_saves: send the numbers of every checkpoint to the Trainer's loggers, as "checkpoint/bytes" and so on: with
            the step of the save, in the loop's thread, after the batch in which it was committed.

    Raises:
        PolicyError: `gradients` is no recorder, or `log_saves` no bool.
    """

    def __init__(
        self,
        gradients: GradientRecorder | None = None,
        *,
        log_saves: bool = False,
        save_decision_policy: SaveDecisionPolicy | None = None,
    ) -> None:
        self._policy = None if save_decision_policy is None else check_policy(save_decision_policy)
        self._schedule: SaveSchedule | None = None
        self._loaded: dict[str, Any] | None = None  # a checkpoint whose optimizers are not restored yet
        self._logs_saves = validate.check_bool("log_saves", log_saves)
        expected = "a recorder, shrinkpoint.train.GradientRecorder(module)"
        do = "make one, and pass it to the scheme, too"
        self._gradients = validate.check_instance(
            "gradients", gradients, GradientRecorder, expected=expected, do=do, allow_none=True
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Register the module with the plugin, and take the place behind all callbacks but those that save.

        `BackboneFinetuning` adds groups to optimizers when a fit starts, which have to be there first.

        Raises:
            PolicyError: the Trainer has no ShrinkIO, or does not save to a local file system or a bucket.
        """
        plugin = trainer.strategy.checkpoint_io
        if not isinstance(plugin, ShrinkIO):
            found, expected = validate.type_name(plugin), "ShrinkIO as the checkpoint plugin"
            do = "pass Trainer(plugins=[ShrinkIO(...)]), with background=True if wanted"
            raise PolicyError("ShrinkIOCallback", found=found, expected=expected, do=do)
        callback_dirs = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        for directory in (trainer.default_root_dir, *callback_dirs):
            if directory is not None:
                require_place(directory)  # refuses a URL now, and not after the first epoch
        plugin.watch(pl_module)
        self._loaded = None
        savers = trainer.checkpoint_callbacks
        others = [callback for callback in trainer.callbacks if callback not in (self, *savers)]
        trainer.callbacks = [*others, self, *savers]  # another list: Lightning is iterating over this one

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the names of the parameters of optimizers."""
        if "optimizer_states" in checkpoint and (names := collect_names(_live_objects(trainer, pl_module))):
            checkpoint[NAMES_KEY] = names

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Hold the checkpoint until there are optimizers."""
        self._loaded = checkpoint

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put what is to be restored into the order of the optimizers' parameters, by their names.

        Raises:
            MismatchError: optimizers or schedulers of another kind, or optimizers over other parameters, were saved.
            StateError: hyperparameters, or what callbacks keep, cannot be stored: now, and not after the first epoch.
        """
        if isinstance(trainer.strategy.checkpoint_io, ShrinkIO) and trainer.is_global_zero:
            flatten(_settings(trainer, pl_module))
        checkpoint, self._loaded = self._loaded, None
        objects = _live_objects(trainer, pl_module)
        if checkpoint is None or not objects or "optimizer_states" not in checkpoint:
            return
        where = str(trainer.ckpt_path or "checkpoint")
        found, expected = (len(nest["optimizer_states"]) for nest in (checkpoint, objects))
        if found != expected:
            do = "configure the optimizers that were saved, or load the weights alone"
            raise MismatchError(where, found=f"{found} optimizers", expected=f"{expected}", do=do)
        alternative = "or load the weights alone"
        aligned = align_state(objects, checkpoint, where, strict=True, alternative=alternative)
        for key, check in (("optimizer_states", check_optimizer_kind), ("lr_schedulers", check_scheduler_kind)):
            for number, (live, saved) in enumerate(zip(objects[key], aligned.state.get(key, ()), strict=False)):
                check(live, saved, f"{where}, {key}/{number}", alternative)
        checkpoint.update(aligned.state)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Show the plugin the batch, for schemes that count the terms of the loss or measure it."""
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, ShrinkIO) and trainer.is_global_zero:
            plugin.note_batch(batch, batches_per_step=trainer.world_size * trainer.accumulate_grad_batches)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Log what has been saved, and save if the policy says so.

        Raises:
            Exception: whatever the policy raises, on all processes.
        """
        self._log_saves(trainer)
        if self._schedule is None:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self._schedule.should_save(trainer.global_step, metrics=metrics):
            callback = trainer.checkpoint_callback
            root = getattr(callback, "dirpath", None) or Path(trainer.default_root_dir) / "checkpoints"
            trainer.save_checkpoint(f"{root}/step={trainer.global_step}.ckpt")
        trainer.should_stop |= self._schedule.reached_preemption

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wait for the last save, and log it."""
        plugin = trainer.strategy.checkpoint_io
        if self._schedule is not None:
            self._schedule.close()
        if self._logs_saves and isinstance(plugin, ShrinkIO):
            plugin.wait()
            self._log_saves(trainer)

    def _log_saves(self, trainer: pl.Trainer) -> None:
        plugin = trainer.strategy.checkpoint_io
        for report in plugin.take_reports() if self._logs_saves and isinstance(plugin, ShrinkIO) else ():
            step = trainer.global_step if report.step is None else report.step
            for logger in trainer.loggers:
                logger.log_metrics(report.metrics("checkpoint/"), step=step)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give moments their strides, the recorder the step that training starts at, and begin to ask the policy."""
        for optimizer in trainer.optimizers:
            stride_slots(optimizer)
        if self._policy is not None:
            group = dist.group.WORLD if trainer.world_size > 1 else None
            self._schedule = SaveSchedule(self._policy, group=group)
        if self._gradients is not None:
            self._gradients.set_step(trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the gradients. Lightning changes them after this hook, so copies are waited for at once."""
        if self._gradients is None or not trainer.is_global_zero:
            return
        own: Any = optimizer  # with manual optimization, a wrapper
        first: Any = trainer.optimizers[0]
        if getattr(own, "optimizer", own) is getattr(first, "optimizer", first):
            self._gradients.after_backward()
            self._gradients.before_zero_grad()


def _settings(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """Entries of checkpoints beside the state of training, under Lightning's names."""
    owners: list[Any] = [owner for owner in (pl_module, getattr(trainer, "datamodule", None)) if owner is not None]
    callbacks: list[Any] = trainer.callbacks
    return {
        **{owner.CHECKPOINT_HYPER_PARAMS_KEY: owner.hparams for owner in owners if owner.hparams},
        "callbacks": {callback.state_key: callback.state_dict() for callback in callbacks},
    }


def _live_objects(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """The module, optimizers and schedulers, by key of a checkpoint; empty where a strategy stores names itself."""
    if trainer.strategy.restore_checkpoint_after_setup:
        return {}
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return {"state_dict": pl_module, "optimizer_states": list(trainer.optimizers), "lr_schedulers": schedulers}
