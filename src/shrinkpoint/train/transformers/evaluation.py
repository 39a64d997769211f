"""The Trainer's own evaluation, as something that a scheme measures with."""

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
"""What whoever calls an Evaluation puts back."""


class Evaluation:
    """One number of a Trainer's evaluation loop, for the values that its model has now.

    Nothing is logged, no callback hears of it, and the Trainer is as it was before. The batches are the first ones of
    the evaluation dataset, always the same.

    Args:
        trainer: a Trainer with an evaluation dataset.
        metric: its name, as in the log: "eval_loss"; "eval_NAME_loss" where there are several datasets.
        batches: how many; None: all.

    Raises:
        PolicyError: there is no such dataset, or several processes evaluate together.
    """

    def __init__(self, trainer: Any, metric: str, batches: int | None) -> None:
        if trainer.args.world_size > 1:
            found, do = f"{trainer.args.world_size} processes", "pass the scheme a function that needs one process"
            raise PolicyError("Shrink, evaluate", found=found, expected="one, where the Trainer measures", do=do)
        self._trainer, self._metric = trainer, metric if metric.startswith("eval_") else f"eval_{metric}"
        self._prefix, self._dataset = _find_dataset(trainer.eval_dataset, self._metric)
        self._batches, self._loader = batches, None

    @property
    def higher_is_better(self) -> bool:
        """Whether more of it is better."""
        args = self._trainer.args
        best = args.metric_for_best_model
        if (
            best is not None
            and args.greater_is_better is not None
            and f"eval_{best.removeprefix('eval_')}" == self._metric
        ):
            return bool(args.greater_is_better)
        return not self._metric.endswith("loss")

    def __call__(self, model: Any = None) -> float:
        """Measure. `model` is the Trainer's own, whatever its values are now."""
        return self.reading(model).value

    def reading(self, model: Any = None) -> Reading:
        """The same, with each batch's loss where the metric is their mean: these say how far it can be trusted."""
        losses: list[tuple[float, int | None]] = []
        value = self._evaluate(losses)
        known = torch.tensor([loss for loss, _ in losses], dtype=torch.float64)
        is_mean = len({count for _, count in losses}) == 1 and math.isclose(float(known.mean()), value, rel_tol=1e-5)
        return Reading(value, known if len(losses) > 1 and is_mean else None)

    def _evaluate(self, losses: list[tuple[float, int | None]]) -> float:
        """The metric.

        Args:
            losses: gets the loss of each batch, and how many examples it has.
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
            found = f"no {self._metric!r}, only " + ", ".join(map(repr, output.metrics))
            raise PolicyError("Shrink, evaluate", found=found, expected="a metric of the evaluation", do="name one")
        return float(output.metrics[self._metric])

    def _get_loader(self) -> Any:
        if self._loader is None:
            prepared = self._trainer.accelerator._dataloaders
            before = len(prepared)
            self._loader = self._trainer.get_test_dataloader(self._subset())
            del prepared[before:]
        return self._loader

    def _subset(self) -> Any:
        """As much of the dataset as is measured with."""
        if self._batches is None:
            return self._dataset
        count = self._batches * self._trainer.args.eval_batch_size
        if not hasattr(self._dataset, "__len__"):
            return [*islice(iter(self._dataset), count)]
        indices = range(min(count, len(self._dataset)))
        return self._dataset.select(indices) if hasattr(self._dataset, "select") else Subset(self._dataset, indices)


@contextmanager
def _record_batch_losses(trainer: Any, losses: list[tuple[float, int | None]]) -> Iterator[None]:
    """Note each batch's loss, and its size."""
    step = trainer.prediction_step

    def prediction_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = step(model, inputs, *args, **kwargs)
        loss = found[0] if isinstance(found, tuple) else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            losses.append((float(loss), find_batch_size(inputs)))
        return found

    trainer.prediction_step = prediction_step
    try:
        yield
    finally:
        del trainer.prediction_step


def _find_dataset(datasets: Any, metric: str) -> tuple[str, Any]:
    """The prefix of a metric and the dataset it is measured on."""
    if isinstance(datasets, dict):
        fitting = [name for name in datasets if metric.startswith(f"eval_{name}_")]
        if fitting:
            name = max(fitting, key=len)
            return f"eval_{name}", datasets[name]
        found, expected = f"{metric!r}", " or ".join(f"'eval_{name}_loss'" for name in datasets)
        raise PolicyError("Shrink, evaluate", found=found, expected=expected, do="name the dataset, too")
    if datasets is None:
        raise PolicyError(
            "Shrink, evaluate", found="no evaluation dataset", expected="one", do="pass eval_dataset= to the Trainer"
        )
    return "eval", datasets


@contextmanager
def _isolate(trainer: Any) -> Iterator[None]:
    """The Trainer as an evaluation may change it, and as it was again; with what it, and its model, collect meanwhile.

    No optimizer: those without schedules change the weights when they are told of an evaluation.
    """
    before = AttributeSnapshot([trainer, *trainer.model.modules()], exclude=_TENSOR_ATTRIBUTES)
    handler = trainer.callback_handler
    trainer.callback_handler = CallbackHandler(
        [DefaultFlowCallback], handler.model, handler.processing_class, None, None
    )
    trainer.optimizer, trainer.is_in_train = None, True
    try:
        yield
    finally:
        before.restore()
