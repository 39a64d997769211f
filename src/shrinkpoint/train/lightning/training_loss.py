"""The loss of a module as a scheme's default: on validation batches, or on the last training batches."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.evaluate import Reading
from shrinkpoint.train.default_evaluation import DefaultEvaluation, LossSource
from shrinkpoint.train.lightning.validation import Validation, loss_of_output, silence_logging
from shrinkpoint.train.recent_batches import DEFAULT_BATCHES, BatchRing

_ADVICE = "add ShrinkIOCallback() to the Trainer's callbacks, or with Fabric pass Fisher(evaluate=RecentBatches(...))"


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
