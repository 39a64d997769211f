"""What a scheme needs of a Trainer: the module behind the state, its gradients, and the loss of validation batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.evaluate import Reading
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.lightning.io import ShrinkIO, require_place
from shrinkpoint.train.planning import AttributeSnapshot

_SKIPPED_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "training")
"""Not saved here: the caller of a Validation restores tensors, modules and modes itself."""


class ShrinkIOCallback(pl.Callback):
    """Tells the Trainer's `ShrinkIO` which module it saves, and records gradients for schemes that use them.

    Gradients are recorded on the process that saves, before they are clipped; with several optimizers, when the first
    one steps. After a restore, recording starts afresh.

    Args:
        gradients: a recorder of the same module, which must also be passed to the scheme.
        log_saves: send the numbers of every checkpoint to the Trainer's loggers, as "checkpoint/bytes" and so on: with
            the step of the save, in the loop's thread, after the batch in which it was committed.

    Raises:
        PolicyError: `gradients` is no recorder, or `log_saves` no bool.
    """

    def __init__(self, gradients: GradientRecorder | None = None, *, log_saves: bool = False) -> None:
        self._logs_saves = validate.check_bool("log_saves", log_saves)
        expected, do = (
            "a recorder, shrinkpoint.train.GradientRecorder(module)",
            "make one, and pass it to the scheme, too",
        )
        self._gradients = validate.check_instance(
            "gradients", gradients, GradientRecorder, expected=expected, do=do, allow_none=True
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Register the module with the plugin.

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

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Log what has been saved."""
        self._log_saves(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wait for the last save, and log it."""
        plugin = trainer.strategy.checkpoint_io
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
        """Set the recorder's step to the one that training starts at."""
        if self._gradients is not None:
            self._gradients.set_step(trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the gradients. Lightning changes them after this hook, so copies are waited for at once."""
        if self._gradients is None or not trainer.is_global_zero:
            return
        if _is_same_optimizer(optimizer, trainer.optimizers[0]):
            self._gradients.after_backward()
            self._gradients.before_zero_grad()


def _is_same_optimizer(optimizer: Any, other: Any) -> bool:
    """Whether two objects are the same optimizer; with manual optimization, one of them is a wrapper."""
    return getattr(optimizer, "optimizer", optimizer) is getattr(other, "optimizer", other)


class Validation:
    """`Fisher(budget="1%", evaluate=Validation(batches=4))`: the mean loss that `validation_step` returns.

    The batches are the first ones of the Trainer's validation data. They are drawn once and kept, so that equal weights
    give equal losses. Calls of `log` in `validation_step` have no effect; attributes of the module that it changes,
    such as a list of outputs or torchmetrics, are restored.

    Args:
        batches: number of batches.
        key: of the loss, if `validation_step` returns a dict.

    Raises:
        PolicyError: an argument is out of range.
    """

    def __init__(self, batches: int = 4, *, key: str = "loss") -> None:
        self._num_batches = validate.check_int("Validation, batches", batches)
        self._key = validate.check_str("key", key, do="name the key of the loss")
        self._batches: list[Any] = []

    def __call__(self, module: pl.LightningModule) -> float:
        """Return the mean loss of a module that a Trainer is training, as `reading` does."""
        return self.reading(module).value

    @torch.no_grad()
    def reading(self, module: pl.LightningModule) -> Reading:
        """Return the mean loss, with the loss of each batch to estimate its confidence.

        Raises:
            PolicyError: there is no validation data, or `validation_step` returns no loss.
        """
        trainer = module.trainer
        self._batches = self._batches or _first_batches(trainer, self._num_batches)
        module.eval()  # the caller restores the modes
        with _silence_logging(module):
            losses = [self._loss(trainer, module, batch, index) for index, batch in enumerate(self._batches)]
        examples = torch.tensor(losses, dtype=torch.float64) if len(losses) > 1 else None
        return Reading(sum(losses) / len(losses), examples)

    def _loss(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> float:
        batch = trainer.strategy.batch_to_device(batch)
        with trainer.precision_plugin.val_step_context():
            out: Any = module.validation_step(batch, index)
        loss = out.get(self._key) if isinstance(out, dict) else out
        if not isinstance(loss, Tensor | float | int):
            found, expected = validate.type_name(loss), f"a loss, or a dict with {self._key!r}"
            raise PolicyError("validation_step", found=found, expected=expected, do="return the loss")
        return float(loss)


@contextmanager
def _silence_logging(module: pl.LightningModule) -> Iterator[None]:
    """Disable `log` and `log_dict`, and restore the attributes of all modules afterwards."""
    submodules = [*module.modules()]
    attributes = AttributeSnapshot(submodules, exclude=_SKIPPED_ATTRIBUTES)
    silenced = dict.fromkeys(("log", "log_dict"), _noop)
    vars(module).update(silenced)
    try:
        for metric in (submodule for submodule in submodules if isinstance(submodule, Metric)):
            for name in metric._defaults:  # updates happen in place, perhaps in inference mode: let them change copies
                state = getattr(metric, name)
                setattr(metric, name, state.clone() if isinstance(state, Tensor) else list(state))
        yield
    finally:
        for name in silenced:
            del vars(module)[name]
        attributes.restore()


def _first_batches(trainer: pl.Trainer, count: int) -> list[Any]:
    if trainer.val_dataloaders is None:
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
    loaders: Any = trainer.val_dataloaders
    loader = loaders[0] if isinstance(loaders, list | tuple) and loaders else loaders
    batches = [batch for batch, _ in zip(loader or (), range(count), strict=False)]
    if not batches:
        raise PolicyError("Validation", found="no validation data", expected="a val_dataloader", do="pass one to fit")
    return batches


def _noop(*_: Any, **__: Any) -> None:
    pass
