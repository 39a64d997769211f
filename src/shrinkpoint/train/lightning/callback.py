"""The callback that gives the checkpoint plugin the module behind the state, and records gradients."""

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

    Gradients are recorded on the process that saves, before they are clipped; with several optimizers, when the first
    one steps. After a restore, recording starts afresh.

    Args:
        gradients: a recorder of the same module, which must also be passed to the scheme.

    Raises:
        PolicyError: `gradients` is no recorder.
    """

    def __init__(self, gradients: GradientRecorder | None = None) -> None:
        self._gradients = validate.check_instance(
            "gradients",
            gradients,
            GradientRecorder,
            expected="a recorder, shrinkpoint.train.GradientRecorder(module)",
            do="make one, and pass it to the scheme, too",
            allow_none=True,
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Register the module with the plugin.

        Raises:
            PolicyError: the Trainer has no ShrinkIO, or does not save to a local file system.
        """
        plugin = trainer.strategy.checkpoint_io
        if not isinstance(plugin, ShrinkIO):
            raise PolicyError(
                "ShrinkIOCallback",
                found=f"a {type(plugin).__name__}",
                expected="ShrinkIO as the checkpoint plugin",
                do="pass Trainer(plugins=[ShrinkIO(...)]), with background=True if wanted",
            )
        callback_dirs = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        for directory in (trainer.default_root_dir, *callback_dirs):
            if directory is not None:
                require_local_path(directory)  # refuses a URL now, and not after the first epoch
        plugin.watch(pl_module)

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
