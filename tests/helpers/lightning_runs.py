"""Small runs of Lightning, with what makes a resume hard: dropout, buffers, a scheduler, shuffled batches."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from helpers.timeouts import PATIENCE
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shrinkpoint import Lossless
from shrinkpoint.errors import StorageError

QUIET = (
    "ignore:.*does not have many workers.*:UserWarning",
    "ignore:.*smaller than the logging interval.*:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
    "ignore:You defined a `validation_step` but have no `val_dataloader`.*:UserWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint.*:UserWarning",
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended.*:UserWarning",
)
"""What Lightning says of runs this small."""


class Gate(Lossless):
    """Writes when it may, and fails when it must."""

    def __init__(self) -> None:
        self.open, self.entered, self.fails = threading.Event(), threading.Event(), False

    def encode(self, *arguments: Any, **options: Any) -> Any:
        self.entered.set()
        assert self.open.wait(PATIENCE)
        if self.fails:
            raise StorageError("disk", found="nothing but smoke", do="look there")
        return super().encode(*arguments, **options)


class Small(pl.LightningModule):
    """A classifier of random points; `width` decides how large it is."""

    def __init__(self, width: int = 32, lr: float = 1e-2, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4)
        )
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)]


def points(batches: int = 4, *, shuffle: bool = False, seed: int = 0) -> DataLoader:
    """`batches` batches of 8 points of 4 classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8 * batches, 8, generator=generator)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=shuffle)


def small(seed: int = 0, **options: Any) -> Small:
    torch.manual_seed(seed)
    return Small(**options)


def trainer(root: Path, *plugins: Any, epochs: int = 3, callbacks: Any = (), **options: Any) -> pl.Trainer:
    """On one CPU, and silent; it saves as a ModelCheckpoint among the callbacks says."""
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        options.setdefault("enable_checkpointing", False)
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        max_epochs=epochs,
        plugins=list(plugins),
        callbacks=list(callbacks),
        **{"devices": 1, **options},
    )


def every(root: Path, **options: Any) -> ModelCheckpoint:
    """Each epoch, and all of them, unless the options say otherwise."""
    return ModelCheckpoint(root, **{"filename": "{epoch}", "save_top_k": -1, **options})


def names(root: Path) -> list[str]:
    """What lies in a directory and is not hidden."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
