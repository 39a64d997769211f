"""The loss that a module's steps return, measured without a trace in its logs and attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.evaluate import Reading
from shrinkpoint.train.planning import AttributeSnapshot

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
        self._key = validate.check_str("key", key, do="name the key of the loss")
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
        self._batches = self._batches or _first_batches(trainer, self._num_batches)
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
    """The loss that a step of a module has returned.

    Raises:
        PolicyError: it returned none.
    """
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
