"""The bound of SCAR on what a failure costs (arXiv 1810.07354, theorem 1), with the constants of a recorded course.

Where iterations bring the weights nearer to an optimum x* by a factor c each, a perturbation d at iteration T costs at
most `log(1 + c^-T |d| / |x0 - x*|) / log(1 / c)` iterations more. Neither c nor x* is known of a training by batches:
x* is taken to be the mean of the weights over the last quarter of a run that goes on for three times as long, and c is
fitted to the distances from it by least squares of their logarithms. With a constant rate the
distance stops falling at the noise of the gradients; of networks that are not convex the theorem says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.studies.rework.trainings import Training

LONGER = 3
"""How many times as long the run is from whose end x* is taken."""


def flat(weights: Mapping[str, Tensor]) -> Tensor:
    """All weights in one float64 vector."""
    return torch.cat([x.detach().reshape(-1).double() for x in weights.values()])


def optimum(run: Training, steps: int) -> Tensor:
    """x* of a run that stands at its last iteration; the run goes on."""
    end = LONGER * steps
    run.advance(end - end // 4 - run.step)
    total, count = torch.zeros_like(flat(run.model.state_dict())), 0
    while run.step < end:
        run.advance()
        total += flat(run.model.state_dict())
        count += 1
    return total / count


@dataclass(frozen=True)
class Bound:
    """The constants of one course.

    Attributes:
        c: the factor of the distance from x* in one iteration.
        start: |x0 - x*| by the fit.
    """

    c: float
    start: float

    @classmethod
    def fit(cls, steps: Sequence[int], distances: Sequence[float]) -> Bound:
        """By least squares of the logarithms."""
        slope, height = np.polyfit(steps, np.log(distances), 1)
        return cls(math.exp(slope), math.exp(height))

    def iterations(self, step: int, perturbation: float) -> float | None:
        """At most so many more; None where the distance does not fall."""
        if self.c >= 1:
            return None
        return math.log1p(perturbation / (self.start * self.c**step)) / -math.log(self.c)
