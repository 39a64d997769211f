"""What the plugin cannot see: the module behind the state, and its gradients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.lightning.io import ShrinkIO, require_local_path


class ShrinkIOCallback(pl.Callback):
    """Tells the Trainer's `ShrinkIO` which module it saves, and records gradients for schemes that use them.

    Gradients are recorded on the process that saves, before they are clipped, and of several optimizers when the first
    one steps. After a restore, recording starts afresh.

    Args:
        gradients: a recorder of the same module, which the scheme has, too.
    """

    def __init__(self, gradients: GradientRecorder | None = None) -> None:
        expected, do = "a recorder, shrinkpoint.train.GradientRecorder(module)", "make one, which the scheme has, too"
        self._gradients = validate.check_instance(
            "gradients", gradients, GradientRecorder, expected=expected, do=do, allow_none=True
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the plugin.

        Raises:
            PolicyError: the Trainer has none, or saves to another machine.
        """
        plugin = trainer.strategy.checkpoint_io
        if not isinstance(plugin, ShrinkIO):
            found, do = (
                f"a {type(plugin).__name__}",
                "pass Trainer(plugins=[ShrinkIO(...)]), with background=True if wanted",
            )
            raise PolicyError("ShrinkCallback", found=found, expected="ShrinkIO as the checkpoint plugin", do=do)
        named = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
        for place in (trainer.default_root_dir, *named):
            if place is not None:
                require_local_path(place)  # a URL is refused now, and not after the first epoch
        plugin.watch(pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count on from the step that training goes on from."""
        if self._gradients is not None:
            self._gradients.set_step(trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Record; what changes gradients comes after this hook, so copies are waited for at once."""
        if (
            self._gradients is not None
            and trainer.is_global_zero
            and _is_same_optimizer(optimizer, trainer.optimizers[0])
        ):
            self._gradients.after_backward()
            self._gradients.before_zero_grad()


def _is_same_optimizer(optimizer: Any, other: Any) -> bool:
    """Whether two are one optimizer; manual optimization sees a wrapper."""
    return getattr(optimizer, "optimizer", optimizer) is getattr(other, "optimizer", other)
