"""The Trainer's own evaluation as the function that a scheme evaluates trial values with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_pt_utils import find_batch_size

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.evaluate import Reading
from shrinkpoint.train.attribute_snapshot import AttributeSnapshot

_TENSOR_ATTRIBUTES = ("_parameters", "_buffers", "_modules")
"""Not saved here: the caller of an Evaluation restores tensors and modules itself."""


class Evaluation:
    """Computes one metric of a Trainer's evaluation loop for the current values of its model.

    Nothing is logged, no callback is called, and the Trainer's attributes are restored afterwards. The batches are
    always the first ones of the evaluation dataset.

    Args:
        trainer: a Trainer with an evaluation dataset.
        metric: the name that is logged: "eval_loss", or "eval_NAME_loss" if there are several datasets.
        batches: number of batches; None: all.

    Raises:
        PolicyError: there is no such dataset, or there is more than one process.
    """

    def __init__(self, trainer: Any, metric: str, batches: int | None) -> None:
        if trainer.args.world_size > 1:
            raise PolicyError(
                "ShrinkConfig, evaluate",
                found=f"{trainer.args.world_size} processes",
                expected="one process, where the Trainer evaluates",
                do="pass the scheme a function that needs one process",
            )
        self._trainer, self._metric = trainer, metric if metric.startswith("eval_") else f"eval_{metric}"
        self._prefix, self._dataset = _find_dataset(trainer.eval_dataset, self._metric)
        self._batches, self._loader = batches, None

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the metric is better."""
        args = self._trainer.args
        best_metric = args.metric_for_best_model
        is_best_metric = best_metric is not None and f"eval_{best_metric.removeprefix('eval_')}" == self._metric
        if is_best_metric and args.greater_is_better is not None:
            return bool(args.greater_is_better)
        return not self._metric.endswith("loss")

    def __call__(self, model: Any = None) -> float:
        """Return the metric. `model` is ignored: it is the Trainer's own, with the values of the trial."""
        return self.reading(model).value

    def reading(self, model: Any = None) -> Reading:
        """Return the metric, and the loss of each batch if the metric is their mean, to estimate its confidence."""
        losses: list[tuple[float, int | None]] = []
        value = self._evaluate(losses)
        batch_losses = torch.tensor([loss for loss, _ in losses], dtype=torch.float64)
        has_equal_batches = len({batch_size for _, batch_size in losses}) == 1
        is_mean = has_equal_batches and math.isclose(float(batch_losses.mean()), value, rel_tol=1e-5)
        return Reading(value, batch_losses if len(losses) > 1 and is_mean else None)

    def _evaluate(self, losses: list[tuple[float, int | None]]) -> float:
        """Return the metric.

        Args:
            losses: receives loss and number of examples of each batch.
        """
        loss_only = self._metric == f"{self._prefix}_loss" or self._trainer.compute_metrics is None
        with _isolate(self._trainer), _record_batch_losses(self._trainer, losses):
            output = self._trainer.evaluation_loop(
                self._get_loader(),
                description="Measurement",
                prediction_loss_only=True if loss_only else None,
                metric_key_prefix=self._prefix,
            )
        if self._metric not in output.metrics:
            raise PolicyError(
                "ShrinkConfig, evaluate",
                found=f"no {self._metric!r}, only " + ", ".join(map(repr, output.metrics)),
                expected="a metric of the evaluation",
                do="name one",
            )
        return float(output.metrics[self._metric])

    def _get_loader(self) -> Any:
        if self._loader is None:
            prepared = self._trainer.accelerator._dataloaders
            num_prepared = len(prepared)
            self._loader = self._trainer.get_test_dataloader(self._subset())
            del prepared[num_prepared:]
        return self._loader

    def _subset(self) -> Any:
        """The part of the dataset that is evaluated."""
        if self._batches is None:
            return self._dataset
        count = self._batches * self._trainer.args.eval_batch_size
        if not hasattr(self._dataset, "__len__"):
            return [*islice(iter(self._dataset), count)]
        indices = range(min(count, len(self._dataset)))
        return self._dataset.select(indices) if hasattr(self._dataset, "select") else Subset(self._dataset, indices)


@contextmanager
def _record_batch_losses(trainer: Any, losses: list[tuple[float, int | None]]) -> Iterator[None]:
    """Append loss and number of examples of each batch to `losses`."""
    step = trainer.prediction_step

    def prediction_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = step(model, inputs, *args, **kwargs)
        loss = outputs[0] if isinstance(outputs, tuple) else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            losses.append((float(loss), find_batch_size(inputs)))
        return outputs

    trainer.prediction_step = prediction_step
    try:
        yield
    finally:
        del trainer.prediction_step


def _find_dataset(datasets: Any, metric: str) -> tuple[str, Any]:
    """The prefix of a metric's name, and the dataset that it is evaluated on."""
    if isinstance(datasets, dict):
        matches = [name for name in datasets if metric.startswith(f"eval_{name}_")]
        if matches:
            name = max(matches, key=len)
            return f"eval_{name}", datasets[name]
        raise PolicyError(
            "ShrinkConfig, evaluate",
            found=f"{metric!r}",
            expected=" or ".join(f"'eval_{name}_loss'" for name in datasets),
            do="name the dataset, too",
        )
    if datasets is None:
        raise PolicyError(
            "ShrinkConfig, evaluate",
            found="no evaluation dataset",
            expected="one",
            do="pass eval_dataset= to the Trainer",
        )
    return "eval", datasets


@contextmanager
def _isolate(trainer: Any) -> Iterator[None]:
    """Restore the attributes of the Trainer and its modules afterwards, and call no callbacks meanwhile.

    The optimizer is hidden: schedule-free ones change the weights when an evaluation starts.
    """
    attributes = AttributeSnapshot([trainer, *trainer.model.modules()], exclude=_TENSOR_ATTRIBUTES)
    handler = trainer.callback_handler
    trainer.callback_handler = CallbackHandler(
        [DefaultFlowCallback], handler.model, handler.processing_class, None, None
    )
    trainer.optimizer, trainer.is_in_train = None, True
    try:
        yield
    finally:
        attributes.restore()
