"""Lightning with compressed checkpoints: one plugin, and everything else as always.

    pip install "shrinkpoint[lightning]" scikit-learn
    python examples/lightning_module.py

A classifier of scikit-learn's handwritten digits. The second Trainer does what a new process does after a crash.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from shrinkpoint.train.lightning import ShrinkIO, latest_valid, load_from_checkpoint

FOLDER = "runs/lightning"


class Digits(pl.LightningModule):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    pl.seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target))
    train, held_out = random_split(data, [0.8, 0.2])
    batches, held_out_batches = DataLoader(train, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=512)

    for epochs in (4, 8):
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            plugins=[ShrinkIO(background=True)],  # all there is to it
            callbacks=[ModelCheckpoint(FOLDER, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last="link")],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        newest = latest_valid(FOLDER)  # None at first; it skips what a crash has left behind
        trainer.fit(Digits(), batches, held_out_batches, ckpt_path=newest)
        print(f"trained until epoch {trainer.current_epoch}, from {newest.name if newest else 'nothing'}")

    model = load_from_checkpoint(Digits, f"{FOLDER}/last.ckpt").eval()
    images, labels = next(iter(held_out_batches))
    print(f"accuracy {(model.net(images).argmax(1) == labels).float().mean():.3f}")


if __name__ == "__main__":
    main()
