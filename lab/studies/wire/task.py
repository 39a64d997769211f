"""What the study of the wire trains: a model in four stages, its data, and how good it is on held-out data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lab.studies.workloads import Course, shuffled

Drawn = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets, and the number of each sample; a sample that comes back has its number again."""


@dataclass(frozen=True)
class Task:
    """One training, from its start to the quality at its end; nothing is chosen by looking at held-out data.

    Attributes:
        quality: what `test` returns.
        after: names of the modules after which the model is cut; their outputs cross the wire.
        steps: of the whole run; the last of `epochs` that are equally long.
        build: seed to a run at its start; its stream yields `Drawn`.
        loss: of a model on what was drawn, with its graph.
        test: quality on held-out data; the model's mode and gradients are put back.
        clip: the largest norm of the gradient, or None.
        facts: what else a reader of the results must know.
    """

    name: str
    quality: str
    higher_is_better: bool
    after: tuple[str, ...]
    steps: int
    epochs: int
    build: Callable[[int], Course] = field(repr=False)
    loss: Callable[[nn.Module, Drawn], Tensor] = field(repr=False)
    test: Callable[[nn.Module], float] = field(repr=False)
    clip: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def advance(self, course: Course, drawn: Drawn) -> float:
        """One step; returns the loss."""
        loss = self.loss(course.model, drawn)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(course.model.parameters(), self.clip)
        course.optimizer.step()
        course.scheduler.step()
        course.optimizer.zero_grad()
        return loss.item()


def epochs_of(count: int, size: int) -> Callable[[int, int], Tensor]:
    """Seed and number of a batch to its samples: each epoch shuffled anew, what is left over dropped."""

    return lambda seed, number: shuffled(count, size, number, seed)


def named(name: str, data: Path, cache: Path, *, quick: bool) -> Task:
    """ "text", or one of `wire_image.TASKS`: "image", "still" (the same without augmentation), "wide".

    Args:
        cache: a folder for what is trained once and used by all runs of "text".
        quick: a toy of it that runs in seconds and learns next to nothing.
    """
    from lab.studies.wire import image, text

    if name == "text":
        return text.task(data, cache, quick=quick)
    return image.task(name, data, quick=quick)
