"""What is known of the loss around the weights: its slope, and mean squared gradients in place of its curvature.

Where a batch of N terms (tokens, images) is averaged, the gradient g of a batch varies around its mean with a variance
of F / N, F being the diagonal of the empirical Fisher information, which near a minimum of a log-likelihood is that of
the Hessian. So the mean of g^2 that Adam keeps (v, without its bias towards zero) is about H / N, and

    rise(d) = sum(m d) + 1/2 N sum(v d^2)

predicts by how much an error d of the weights raises the loss; m, Adam's first moment, is the mean gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix
from shrinkpoint.schemes.select import max_abs
from shrinkpoint.sharding.global_tensors import Marginals
from shrinkpoint.tensors.flat_state import FlatState, OptimizerInfo


class SquaredGradientSource(Protocol):
    """What squared gradients come from where the optimizer has none: `train.GradientRecorder`, or anything like it."""

    @property
    def ready(self) -> bool:
        """Whether anything was recorded."""
        ...

    @property
    def square(self) -> Mapping[str, Tensor]:
        """Averages of squares by name of a parameter in the model."""
        ...


@dataclass(frozen=True)
class Curvature:
    """Of one weight, seen as a matrix.

    Attributes:
        squares: mean squared gradients, float32; None: nothing is known.
        slope: mean gradients, float32; None: nothing is known.
        relative_only: the squares are those of momentum.
        probed: the squares are the curvature itself, from measured rises: of a single loss term, N is 1.
        marginals: of the squares of a whole tensor, where this is a part of it.
    """

    squares: Tensor | None = field(default=None, repr=False)
    slope: Tensor | None = field(default=None, repr=False)
    relative_only: bool = False
    probed: bool = False
    marginals: Marginals | None = field(default=None, repr=False)

    @cached_property
    def mean(self) -> float:
        """Of the squares; 0 where nothing is known."""
        if self.marginals is not None:
            return self.marginals.mean
        if self.squares is None or self.squares.numel() == 0:
            return 0.0
        return float(self.squares.sum(dtype=torch.float32)) / self.squares.numel()

    def mean_along(self, axis: int) -> Tensor | None:
        """Of the squares, along an axis: 1 gives one of each row; None: nothing is known."""
        if self.marginals is not None:
            return self.marginals.mean_along(axis).to(torch.float32)
        return None if self.squares is None else self.squares.mean(axis)

    @classmethod
    def from_state(cls, name: str, weight: Tensor, state: FlatState, recorded: Mapping[str, Tensor]) -> Curvature:
        """From the second moment, its factors, or its 8 bits; else from what was recorded; else from momentum, whose
        square has the same shape.

        The last is too small by a factor that all weights have in common, which the number of terms makes up for. What
        is not finite (in a run that diverges) is not known.
        """
        found = cls.from_optimizer(weight, state, state.optimizer_info.get(name), recorded.get(name))
        return found if math.isfinite(found.mean) else cls()

    @classmethod
    def from_optimizer(
        cls, weight: Tensor, state: FlatState, optimizer_info: OptimizerInfo | None, recorded: Tensor | None
    ) -> Curvature:
        """As `of`, finite or not."""
        first = None if optimizer_info is None else _moment_matrix(state, optimizer_info.moment1, weight)
        second = None if optimizer_info is None else _moment_matrix(state, optimizer_info.moment2, weight)
        slope = None
        if first is not None and optimizer_info is not None:
            adam = second is not None
            slope = (
                correct_bias(first, optimizer_info.beta1, optimizer_info.step)
                if adam
                else first * (1 - (optimizer_info.beta1 or 0.0))
            )
        if second is not None and optimizer_info is not None:
            return cls(correct_bias(second, optimizer_info.beta2, optimizer_info.step), slope)
        made = None
        if optimizer_info is not None and optimizer_info.factors is not None:
            made = _adafactor_moment(state, optimizer_info.factors, weight)
        elif optimizer_info is not None and optimizer_info.blocks is not None:
            made = _bnb_moment(state, optimizer_info.blocks, weight)
        if made is not None:
            return cls(made, slope)
        if recorded is not None and recorded.shape == weight.shape:
            return cls(as_matrix(recorded).to(weight.device, torch.float32), slope)
        return cls(None if slope is None else slope.square(), slope, relative_only=True)

    def rise_terms(self, error: Tensor) -> tuple[float, float]:
        """(slope term, curvature term of one loss term) of an error as a matrix; zeros where nothing is known."""
        flat = error.reshape(-1)
        first = 0.0 if self.slope is None else float(torch.dot(self.slope.reshape(-1), flat))
        second = 0.0 if self.squares is None else float(torch.dot(self.squares.reshape(-1), flat.square())) / 2
        return first, second


def estimate_curvatures(
    weights: Mapping[str, Tensor], state: FlatState, recorded: Mapping[str, Tensor]
) -> dict[str, Curvature]:
    """Of every weight, by name; `recorded` are mean squared gradients by the names of the state.

    Squares of momentum are nothing beside mean squares (of another optimizer, for other weights): then these count.
    """
    return drop_relative({name: Curvature.from_state(name, x, state, recorded) for name, x in weights.items()})


def drop_relative(curvatures: dict[str, Curvature]) -> dict[str, Curvature]:
    """The same, without what is known by its shape alone where more is known of others."""
    if any(one.mean > 0 and not one.relative_only for one in curvatures.values()):
        curvatures = {
            name: Curvature(slope=one.slope) if one.relative_only else one for name, one in curvatures.items()
        }
    return curvatures


def _moment_matrix(state: FlatState, name: str | None, like: Tensor) -> Tensor | None:
    """A moment as a matrix; None where there is none, or none that can be used."""
    x = None if name is None else state.tensors.get(name)
    if x is None or x.shape != like.shape or not x.is_floating_point():
        return None
    x = as_matrix(x).to(like.device, torch.float32)
    return x if math.isfinite(max_abs(x)) else None


def _adafactor_moment(state: FlatState, names: tuple[str, str], like: Tensor) -> Tensor | None:
    """Second moments out of their means by row and by column, over the last two axes; as a matrix.

    Of Adafactor (arXiv 1804.04235, algorithm 4), whose averages need no correction: their decay begins at 0.
    """
    rows, columns = (state.tensors.get(name) for name in names)
    if rows is None or columns is None or like.dim() < 2:
        return None
    rows = rows.to(like.device, torch.float32).reshape(*like.shape[:-1], 1)
    columns = columns.to(like.device, torch.float32).reshape(*like.shape[:-2], 1, like.shape[-1])
    usual = rows.mean(-2, keepdim=True)
    made = as_matrix(torch.where(usual > 0, rows * columns / usual, 0.0))
    return made if math.isfinite(max_abs(made)) else None


def _bnb_moment(state: FlatState, names: tuple[str, str, str], like: Tensor) -> Tensor | None:
    """Second moments out of 8 bits (bitsandbytes, arXiv 2110.02861), as a matrix; Adam's bias is left in them."""
    codes, values, largest_ones = (state.tensors.get(name) for name in names)
    if codes is None or values is None or largest_ones is None or codes.shape != like.shape:
        return None
    blocks, count = largest_ones.numel(), codes.numel()
    if values.numel() != 256 or not blocks or not count:
        return None
    size = 1 << (-(-count // blocks) - 1).bit_length()
    if -(-count // size) != blocks:
        return None
    scales = largest_ones.reshape(-1).to(torch.float32).repeat_interleave(size)[:count]
    made = values.reshape(-1).to(torch.float32)[codes.reshape(-1).to(values.device).long()] * scales.to(values.device)
    made = as_matrix(made.reshape(like.shape)).to(like.device)
    return made if math.isfinite(max_abs(made)) else None


def correct_bias(moment: Tensor, beta: float | None, step: int | None) -> Tensor:
    """Without what is left of Adam's bias towards zero after so many steps."""
    if beta is None or step is None or not 0 <= beta < 1 or step < 1:
        return moment
    grown = 1 - beta**step
    return moment if grown > 1 - 1e-6 else moment / grown
