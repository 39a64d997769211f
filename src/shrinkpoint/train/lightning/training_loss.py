"""The loss of a module as a scheme's default: on validation batches, or on the last training batches.

Modules leave no trace in their logs and attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.evaluate import Reading
from shrinkpoint.train.default_evaluation import AttributeSnapshot, DefaultEvaluation, LossSource
from shrinkpoint.train.recent_batches import DEFAULT_BATCHES, BatchRing

_ADVICE = "add ShrinkIOCallback() to the Trainer's callbacks, or with Fabric pass Fisher(evaluate=RecentBatches(...))"

OTHER_WEIGHTS = Reading(
    math.nan,
    failure="the weights that are saved are not the module's own, such as averages of them",
    advice='take a scheme that does not evaluate, such as "fisher(relative_error=0.3)"',
)


class TrainingLoss(DefaultEvaluation):
    """Measures the loss of the module that a Trainer trains.

    On the first validation batches, if `validation_step` returns a loss; else by `training_step` on the last training
    batches. With several processes, the one that saves measures alone.
    """

    def __init__(self) -> None:
        self._ring, self._validation = BatchRing(), Validation(DEFAULT_BATCHES)
        validated = LossSource(self._measure_validation, self._validation.describe)
        recent = LossSource(self._measure_ring, self._ring.describe)
        super().__init__([validated, recent], advice=_ADVICE)

    def add(self, batch: Any) -> None:
        """Keep a batch of training."""
        self._ring.add(batch)

    def _measure_validation(self, module: LightningModule) -> Reading:
        if module.trainer.world_size > 1 and module.trainer.val_dataloaders is None:  # making them may be collective
            raise PolicyError("Validation", found="no validation data on this process", do="wait for the first epoch")
        return self._validation.reading(module)

    def _measure_ring(self, module: LightningModule) -> Reading:
        if not module.automatic_optimization:
            found, do = "manual optimization, where it changes the weights", "return a loss from validation_step"
            raise PolicyError("training_step", found=found, expected="one that only computes the loss", do=do)
        module.eval()
        with silence_logging(module):
            return self._ring.measure(self._loss_of_batch, module)

    @torch.no_grad()
    def _loss_of_batch(self, module: LightningModule, batch: Any) -> float:
        with module.trainer.precision_plugin.train_step_context():
            out: Any = module.training_step(module.trainer.strategy.batch_to_device(batch), 0)
        return loss_of_output(out, "training_step")


_SKIPPED_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "training")
"""Not saved here: the caller of a Validation restores tensors, modules and modes itself."""


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
        self._key = validate.check_str("key", key, do="pass the key of the loss")
        self._batches: list[Any] = []

    def describe(self) -> str:
        """Description of the measurements, in words."""
        return f"{len(self._batches)} validation batches"

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
        if not self._batches:
            if trainer.val_dataloaders is None:
                trainer.fit_loop.epoch_loop.val_loop.setup_data()
            loaders: Any = trainer.val_dataloaders
            loader = loaders[0] if isinstance(loaders, list | tuple) and loaders else loaders
            self._batches = [batch for batch, _ in zip(loader or (), range(self._num_batches), strict=False)]
        if not self._batches:
            do = "pass one to fit"
            raise PolicyError("Validation", found="no validation data", expected="a val_dataloader", do=do)
        module.eval()  # the caller restores the modes
        with silence_logging(module):
            losses = [self._loss(trainer, module, batch, index) for index, batch in enumerate(self._batches)]
        return Reading.of_batches(losses)

    def _loss(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> float:
        batch = trainer.strategy.batch_to_device(batch)
        with trainer.precision_plugin.val_step_context():
            out: Any = module.validation_step(batch, index)
        return loss_of_output(out, "validation_step", self._key)


def loss_of_output(out: Any, step: str, key: str = "loss") -> float:
    """The loss that a step of a module has returned; raises PolicyError if it returned none."""
    loss = out.get(key) if isinstance(out, Mapping) else out
    if not isinstance(loss, Tensor | float | int):
        found, expected = validate.type_name(loss), f"a loss, or a dict with {key!r}"
        raise PolicyError(step, found=found, expected=expected, do="return the loss")
    return float(loss)


@contextmanager
def silence_logging(module: pl.LightningModule) -> Iterator[None]:
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


def _noop(*_: Any, **__: Any) -> None:
    """Does nothing; unlike a lambda, it does not keep a module from being pickled in a validation step."""
