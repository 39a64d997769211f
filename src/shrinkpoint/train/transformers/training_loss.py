"""The loss of a Trainer as a scheme's default: on its evaluation dataset, or on its last training batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shrinkpoint.schemes.evaluate import Reading
from shrinkpoint.train.default_evaluation import DefaultEvaluation, LossSource
from shrinkpoint.train.recent_batches import DEFAULT_BATCHES, BatchRing
from shrinkpoint.train.transformers.config import Evaluation, isolate


class TrainingLoss(DefaultEvaluation):
    """Measures a Trainer's loss, without a callback or a logger that hears of it.

    With an evaluation dataset and one process: on its first batches, by the Trainer's own evaluation. Else by
    `compute_loss` on the last training batches of the process that saves.

    Args:
        trainer: the Trainer.
        batches: how many; None: all of the evaluation dataset.
    """

    def __init__(self, trainer: Any, batches: int | None) -> None:
        self._trainer, self._ring = trainer, BatchRing(DEFAULT_BATCHES if batches is None else batches)
        datasets = trainer.eval_dataset
        self._evaluates = bool(datasets) if isinstance(datasets, dict) else datasets is not None
        self._evaluates = self._evaluates and trainer.args.world_size == 1
        if self._evaluates:
            metric = f"eval_{next(iter(datasets))}_loss" if isinstance(datasets, dict) else "eval_loss"
            evaluation = Evaluation(trainer, metric, batches)
            source = LossSource(evaluation.reading, evaluation.describe)
        else:
            source = LossSource(self._measure_ring, self._ring.describe)
        super().__init__([source])

    def add(self, batches: Sequence[Any]) -> None:
        """Keep the batches of an optimizer step, if they will be measured."""
        for batch in () if self._evaluates else batches:
            self._ring.add(batch)

    def _measure_ring(self, model: Any) -> Reading:
        with isolate(self._trainer):
            return self._ring.measure(self._loss_of_batch, model)

    def _loss_of_batch(self, model: Any, batch: Any) -> Any:
        with self._trainer.compute_loss_context_manager():
            return self._trainer.compute_loss(model, self._trainer._prepare_inputs(batch))
