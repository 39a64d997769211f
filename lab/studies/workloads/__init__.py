"""What the studies train: a model, its data in a fixed order, and how good it is.

A workload says how to build a run from a seed, how to take a step, and two qualities on fixed held-out data:
`evaluate`, small, which a search may look at, and `test`, larger and disjoint, which only the study looks at.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shrinkpoint_lab.demo.train import seed_everything as seed_everything

Batch = tuple[Tensor, Tensor]


class Stream:
    """Batches by number: batch n depends on the seed and on n alone, so a position is all there is to save.

    Args:
        make: a generator seeded for this batch, and n, to a batch.
    """

    def __init__(self, make: Callable[[torch.Generator, int], Batch], seed: int) -> None:
        self._make, self._seed = make, seed
        self.drawn = 0

    def draw(self) -> Batch:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.drawn)
        self.drawn += 1
        return self._make(generator, self.drawn - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self._seed = state["drawn"], state["seed"]


def shuffled(count: int, size: int, number: int, seed: int) -> Tensor:
    """The indices of batch `number` when `count` examples are passed over in epochs, each in an order of its own."""
    epoch, place = divmod(number, count // size)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 7919 + epoch))
    return order[place * size : (place + 1) * size]


@dataclass
class Course:
    """A training in progress; all of it is saved, and all of it is rebuilt before a restore."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    stream: Stream


@dataclass(frozen=True)
class Workload:
    """One training.

    Attributes:
        name: for people and for keys.
        quality: what `evaluate` and `test` return.
        steps: of a whole run.
        interval: steps between two checkpoints.
        build: seed to a run at its start.
        loss: of a model on a batch, with its graph.
        evaluate: quality on a small held-out part, for a search; changes nothing.
        test: quality on a larger part that has nothing in common with `evaluate`'s.
        clip: the largest norm of the gradient, or None.
        facts: what else a reader of the results must know.
    """

    name: str
    quality: str
    higher_is_better: bool
    steps: int
    interval: int
    build: Callable[[int], Course] = field(repr=False)
    loss: Callable[[nn.Module, Batch], Tensor] = field(repr=False)
    evaluate: Callable[[nn.Module], float] = field(repr=False)
    test: Callable[[nn.Module], float] = field(repr=False)
    clip: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoints(self) -> int:
        return self.steps // self.interval

    def advance(self, course: Course, recorder: Any = None) -> float:
        """One step; a recorder of gradients, if there is one, hears of it. Returns the loss."""
        loss = self.loss(course.model, course.stream.draw())
        loss.backward()
        if recorder is not None:
            recorder.after_backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(course.model.parameters(), self.clip)
        course.optimizer.step()
        course.scheduler.step()
        if recorder is not None:
            recorder.before_zero_grad()
        course.optimizer.zero_grad()
        return loss.item()

    def degradation(self, quality: float, base: float) -> float:
        """Relative to `base`; above zero is worse, whatever the direction of the quality."""
        return (base - quality if self.higher_is_better else quality - base) / abs(base)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and the mode that was there before."""
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)


def cosine(warmup: int, steps: int, floor: float) -> Callable[[int], float]:
    """Factor of the peak learning rate by step: a linear rise, then a cosine down to `floor`."""

    def factor(step: int) -> float:
        along = min(1.0, step / steps)
        return min(1.0, (step + 1) / warmup) * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * along)))

    return factor


def fingerprint(model: nn.Module) -> str:
    """A digest of every bit of a model's state."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def named(name: str, data: Path, *, quick: bool) -> Workload:
    """A workload by name: "gpt", "resnet", "wide", or a variant.

    "wide" is a ResNet-20, twice as wide on half the resolution.

    Args:
        quick: a toy of it that runs in seconds and learns next to nothing.
    """
    from lab.studies.workloads import image as workload_image
    from lab.studies.workloads import text as workload_text
    from lab.studies.workloads import variants

    if name in variants.VARIANTS:
        return variants.variant(name, data, quick=quick)
    if name == "gpt":
        return workload_text.gpt(data, quick=quick)
    return workload_image.resnet(data, wide=name == "wide", quick=quick)
