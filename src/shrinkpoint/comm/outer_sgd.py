"""The outer optimizer of local steps, as settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shrinkpoint import validate

OuterOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Makes the optimizer of the global weights, whose `grad` is the mean pseudo-gradient."""


@dataclass(frozen=True)
class OuterSGD:
    """SGD on the global weights, with Nesterov's momentum (arXiv 2311.08105, algorithm 1).

    The defaults are those of DiLoCo. SparseLoCo (arXiv 2508.15706) has no outer momentum, since error feedback takes
    its place: `OuterSGD(lr=1.0, momentum=0.0)`, whose step is the mean of what all ranks sent.

    Attributes:
        lr: the learning rate; with 1 and no momentum the global weights become the mean of all ranks' weights.
        momentum: from 0, without a memory, to 1.
        nesterov: whether the momentum is Nesterov's.

    Raises:
        PolicyError: a number out of range.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        validate.check_float("OuterSGD, lr", self.lr)
        validate.check_float("OuterSGD, momentum", self.momentum, maximum=1.0, exclusive=False)
        validate.check_bool("OuterSGD, nesterov", self.nesterov)

    def __call__(self, weights: list[Tensor]) -> torch.optim.Optimizer:
        """Make the optimizer of global weights."""
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(weights, lr=self.lr, momentum=self.momentum, nesterov=nesterov)
