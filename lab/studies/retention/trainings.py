"""The two trainings whose checkpoints are kept: a small GPT with AdamW, and a perceptron with SGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.studies.workloads import Batch, Course, Stream, Workload, evaluating, image, shuffled, text
from shrinkpoint_lab.demo.workload import GPTConfig

SHAPE = GPTConfig(layers=2, width=96, heads=4, context=64, dropout=0.0)
QUICK_SHAPE = GPTConfig(layers=2, width=64, heads=2, context=32, dropout=0.0)
HELD_OUT = 2000
"""Images that the loss of the perceptron is measured on."""


@dataclass(frozen=True)
class Training:
    """A workload, and the loss that a model of it has on held-out data."""

    workload: Workload
    held_out: Callable[[nn.Module], float] = field(repr=False)


def training(name: str, data: Path, *, quick: bool) -> Training:
    """A training by name: "gpt" or "perceptron"."""
    if name == "perceptron":
        return _perceptron(data)
    workload = text.gpt(data, shape=QUICK_SHAPE if quick else SHAPE, quick=quick)
    return Training(workload, workload.evaluate)


def _perceptron(data: Path) -> Training:
    """784-256-128-10 on Fashion-MNIST: SGD of momentum 0.9 at 0.05, weight decay 5e-4, batches of 64."""
    (images, classes), (held, labels) = image.fashion(data)
    x, held_x = _pixels(images), _pixels(held[:HELD_OUT])

    def build(seed: int) -> Course:
        torch.manual_seed(seed)
        layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

        def draw(_: torch.Generator, number: int) -> Batch:
            chosen = shuffled(len(classes), 64, number, seed)
            return x[chosen].float() / 255, classes[chosen]

        return Course(model, optimizer, scheduler, Stream(draw, seed))

    def held_out(model: nn.Module) -> float:
        with evaluating(model):
            return F.cross_entropy(model(held_x.float() / 255), labels[:HELD_OUT]).item()

    workload = Workload("perceptron", "loss", False, 640, 16, build, image.classify, held_out, held_out)
    return Training(workload, held_out)


def _pixels(images: Tensor) -> Tensor:
    """One channel of images without the frame, as rows of 784 bytes."""
    return images[:, 0, 2:30, 2:30].reshape(len(images), 784)
