"""A real run that is cut and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_training import digits
from helpers.strategies import difference
from torch import nn
from torch.nn import functional as F

from shrinkpoint.tensors.rng import get_rng_state
from shrinkpoint.train import CheckpointManager


class Order:
    """Shuffled epochs, from a generator of its own."""

    def __init__(self, count: int) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.queue = torch.empty(0, dtype=torch.int64)
        self.count = count

    def draw(self, size: int) -> torch.Tensor:
        if len(self.queue) < size:
            self.queue = torch.randperm(self.count, generator=self.generator)
        batch, self.queue = self.queue[:size], self.queue[size:]
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "queue": self.queue}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.queue = state["queue"]


def run(where: Path, last: int, *, background: bool, every: int = 5) -> Any:
    """Train up to step `last`, from the newest checkpoint; returns everything at the end."""
    images, labels = digits()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.GELU(), nn.Dropout(0.3), nn.Linear(96, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    order, losses = Order(len(images)), []
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "order": order}
    with CheckpointManager(where, background=background, keyframe_every=3) as manager:
        at = manager.restore(**parts)
        for step in range(at.step + 1 if at else 1, last + 1):
            batch = order.draw(500)
            noise = random.random() * 0.1 * torch.from_numpy(np.random.randn(500, 64)).float()
            loss = F.cross_entropy(model(images[batch] + noise), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            if step % every == 0:
                manager.save(step, **parts, metrics={"loss": loss.item()})
    return {name: part.state_dict() for name, part in parts.items()} | {"rng": get_rng_state(), "loss": losses[-1]}


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_was_cut_ends_with_the_same_bits(tmp_path: Path, background: bool) -> None:
    whole = run(tmp_path / "whole", 30, background=background)
    run(tmp_path / "cut", 13, background=background)
    run(tmp_path / "cut", 22, background=background)
    assert difference(whole, run(tmp_path / "cut", 30, background=background)) is None
    assert whole["loss"] < 1.0
