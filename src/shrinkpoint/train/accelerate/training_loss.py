"""The loss of an Accelerator's model as a scheme's default: on batches of its training dataset."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from shrinkpoint.errors import PolicyError, error_text
from shrinkpoint.schemes.evaluate import Reading
from shrinkpoint.tensors.nest import iter_tensors
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint.train.default_evaluation import DefaultEvaluation, LossSource
from shrinkpoint.train.recent_batches import (
    DEFAULT_BATCHES,
    MAX_BYTES,
    LossOfBatch,
    copy_batch,
    count_terms,
    measure_batches,
)

_ADVICE = "pass scheme=Fisher(evaluate=RecentBatches(loss))"


class TrainingLoss(DefaultEvaluation):
    """Measures the loss of the prepared model, on batches of the dataset of the first prepared dataloader.

    They are drawn once, evenly from the whole dataset and beside the dataloader, whose position and generators stay.

    Args:
        accelerator: models and dataloaders may be prepared later.
        loss: called with the model, or the list of several prepared ones, and a batch; None: the model returns its
            loss, as those of transformers do.
    """

    def __init__(self, accelerator: Accelerator, loss: LossOfBatch | None) -> None:
        self._accelerator, self._loss = accelerator, loss_of_output if loss is None else loss
        self._batches: list[Any] = []
        super().__init__([LossSource(self._measure, self._describe)])

    def _measure(self, model: Any) -> Reading:
        self._batches = self._batches or draw_batches(self._accelerator, DEFAULT_BATCHES)
        try:
            with self._accelerator.autocast():
                return measure_batches(self._loss, model, self._batches)
        except Exception as error:
            if not isinstance(model, list):
                raise
            hint = f"loss= gets the list of the {len(model)} prepared models, and a batch"
            return Reading(math.nan, failure=f"{error_text(error)}; {hint}")

    def _describe(self) -> str:
        return f"{len(self._batches)} batches of the training dataset"


def draw_batches(accelerator: Accelerator, count: int) -> list[Any]:
    """Batches from the dataset of the first prepared dataloader, evenly from all of it.

    Raises:
        PolicyError: there is no such dataloader, or its dataset has no numbered examples.
    """
    loader: Any = next(iter(accelerator._dataloaders), None)
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        found = "no dataloader" if loader is None else f"a dataset of type {type(dataset).__name__}"
        raise PolicyError("Accelerator", found=found, expected="a prepared dataset with numbered examples", do=_ADVICE)
    size, rng_state = _batch_size(loader), get_rng_state()
    total = min(len(dataset), count * size)
    indices = [number * len(dataset) // total for number in range(total)]
    try:
        batches = [
            loader.collate_fn([dataset[index] for index in indices[start : start + size]])
            for start in range(0, total, size)
        ]
    finally:
        set_rng_state(rng_state)
    copies = [copy_batch(batch, MAX_BYTES // count) for batch in batches]
    return [copy for copy in copies if copy is not None]


def count_step_terms(accelerator: Accelerator) -> float | None:
    """Loss terms that an optimizer step averages, by one batch of the dataset; None if they cannot be counted."""
    try:
        batch, loader = draw_batches(accelerator, 1)[0], accelerator._dataloaders[0]
    except Exception:  # whatever a dataset raises: training will say so better
        return None
    num_examples = next((len(tensor) for tensor in iter_tensors(batch) if tensor.dim()), 0)
    if not num_examples:
        return None
    num_batches = accelerator.num_processes * accelerator.gradient_accumulation_steps
    return float(int(count_terms(batch)) / num_examples * _batch_size(loader) * num_batches)


def loss_of_output(model: Any, batch: Any) -> Tensor:
    """The loss in the output of a model of transformers.

    Raises:
        PolicyError: the batch is no mapping, or the output has no loss.
    """
    output = model(**batch) if isinstance(batch, Mapping) else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        found, do = "a model that returns no loss for a batch", "pass loss=, a function of a model and a batch"
        raise PolicyError("Accelerator", found=found, expected="the loss", do=do)
    return loss


def _batch_size(loader: Any) -> int:
    """Examples of a batch on one process; a dataloader that splits batches has fewer."""
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or getattr(loader, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else 1
