"""The loss of the first validation batches, for schemes that ask what a checkpoint costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.evaluate import Reading
from shrinkpoint.train.attribute_snapshot import AttributeSnapshot

_SKIPPED_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "training")
"""What whoever calls a Validation puts back."""


class Validation:
    """`Fisher(budget="1%", evaluate=Validation(batches=4))`: the mean loss that `validation_step` returns.

    The batches are the first ones of the Trainer's validation data, taken once and kept, so that the same weights get
    the same answer. What `validation_step` logs meanwhile is not logged; what it collects in attributes of the module,
    such as a list of outputs or torchmetrics, is as it was before.

    Args:
        batches: how many.
        key: of the loss, where `validation_step` returns a dict.
    """

    def __init__(self, batches: int = 4, *, key: str = "loss") -> None:
        self._num_batches = validate.check_int("Validation, batches", batches)
        self._key = validate.check_str("key", key, do="name the key of the loss")
        self._batches: list[Any] = []

    def __call__(self, module: pl.LightningModule) -> float:
        """The mean loss of a module that a Trainer is training; see `reading`."""
        return self.reading(module).value

    @torch.no_grad()
    def reading(self, module: pl.LightningModule) -> Reading:
        """The same, with the loss of each batch: these say how far the mean can be trusted.

        Raises:
            PolicyError: there is no validation data, or `validation_step` returns no loss.
        """
        trainer = module.trainer
        self._batches = self._batches or _first_batches(trainer, self._num_batches)
        module.eval()  # whoever calls this puts the modes back
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
            found, expected = f"a {type(loss).__name__}", f"a loss, or a dict with {self._key!r}"
            raise PolicyError("validation_step", found=found, expected=expected, do="return the loss")
        return float(loss)


@contextmanager
def _silence_logging(module: pl.LightningModule) -> Iterator[None]:
    """Nothing is logged, and what is collected is forgotten."""
    parts = [*module.modules()]
    before = AttributeSnapshot(parts, exclude=_SKIPPED_ATTRIBUTES)
    silent = dict.fromkeys(("log", "log_dict"), _noop)
    vars(module).update(silent)
    try:
        for metric in (part for part in parts if isinstance(part, Metric)):
            for name in metric._defaults:  # updated in place, and maybe in inference mode: so copies are
                state = getattr(metric, name)
                setattr(metric, name, state.clone() if isinstance(state, Tensor) else list(state))
        yield
    finally:
        for name in silent:
            del vars(module)[name]
        before.restore()


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
