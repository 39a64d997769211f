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

from shrinkpoint.codec.lattice import matrix
from shrinkpoint.schemes.picks import largest
from shrinkpoint.schemes.wholes import Margins
from shrinkpoint.state import AdamFacts, FlatState


class Recorder(Protocol):
    """What squared gradients come from where the optimizer has none: `train.Gradients`, or anything like it."""

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
        shape_alone: the squares are those of momentum.
        probed: the squares are the curvature itself, from measured rises: of a single loss term, N is 1.
        margins: of the squares of a whole tensor, where this is a part of it.
    """

    squares: Tensor | None = field(default=None, repr=False)
    slope: Tensor | None = field(default=None, repr=False)
    shape_alone: bool = False
    probed: bool = False
    margins: Margins | None = field(default=None, repr=False)

    @cached_property
    def mean(self) -> float:
        """Of the squares; 0 where nothing is known."""
        if self.margins is not None:
            return self.margins.mean
        if self.squares is None or self.squares.numel() == 0:
            return 0.0
        return float(self.squares.sum(dtype=torch.float32)) / self.squares.numel()

    def means(self, axis: int) -> Tensor | None:
        """Of the squares, along an axis: 1 gives one of each row; None: nothing is known."""
        if self.margins is not None:
            return self.margins.means(axis).to(torch.float32)
        return None if self.squares is None else self.squares.mean(axis)

    @classmethod
    def of(cls, name: str, x: Tensor, flat: FlatState, recorded: Mapping[str, Tensor]) -> Curvature:
        """From the second moment, its factors, or its 8 bits; else from what was recorded; else from momentum, whose
        square has the same shape.

        The last is too small by a factor that all weights have in common, which the number of terms makes up for. What
        is not finite (in a run that diverges) is not known.
        """
        found = cls.found(x, flat, flat.optim.get(name), recorded.get(name))
        return found if math.isfinite(found.mean) else cls()

    @classmethod
    def found(cls, x: Tensor, flat: FlatState, facts: AdamFacts | None, recorded: Tensor | None) -> Curvature:
        """As `of`, finite or not."""
        first = None if facts is None else _moment(flat, facts.moment1, x)
        second = None if facts is None else _moment(flat, facts.moment2, x)
        slope = None
        if first is not None and facts is not None:
            adam = second is not None
            slope = unbiased(first, facts.beta1, facts.step) if adam else first * (1 - (facts.beta1 or 0.0))
        if second is not None and facts is not None:
            return cls(unbiased(second, facts.beta2, facts.step), slope)
        made = None
        if facts is not None and facts.factors is not None:
            made = _product(flat, facts.factors, x)
        elif facts is not None and facts.blocks is not None:
            made = _unpacked(flat, facts.blocks, x)
        if made is not None:
            return cls(made, slope)
        if recorded is not None and recorded.shape == x.shape:
            return cls(matrix(recorded).to(x.device, torch.float32), slope)
        return cls(None if slope is None else slope.square(), slope, shape_alone=True)

    def rise(self, error: Tensor) -> tuple[float, float]:
        """(slope term, curvature term of one loss term) of an error as a matrix; zeros where nothing is known."""
        flat = error.reshape(-1)
        first = 0.0 if self.slope is None else float(torch.dot(self.slope.reshape(-1), flat))
        second = 0.0 if self.squares is None else float(torch.dot(self.squares.reshape(-1), flat.square())) / 2
        return first, second


def curvatures(weights: Mapping[str, Tensor], flat: FlatState, recorded: Mapping[str, Tensor]) -> dict[str, Curvature]:
    """Of every weight, by name; `recorded` are mean squared gradients by the names of the state.

    Squares of momentum are nothing beside mean squares (of another optimizer, for other weights): then these count.
    """
    return comparable({name: Curvature.of(name, x, flat, recorded) for name, x in weights.items()})


def comparable(out: dict[str, Curvature]) -> dict[str, Curvature]:
    """The same, without what is known by its shape alone where more is known of others."""
    if any(one.mean > 0 and not one.shape_alone for one in out.values()):
        out = {name: Curvature(slope=one.slope) if one.shape_alone else one for name, one in out.items()}
    return out


def _moment(flat: FlatState, name: str | None, like: Tensor) -> Tensor | None:
    """A moment as a matrix; None where there is none, or none that can be used."""
    x = None if name is None else flat.tensors.get(name)
    if x is None or x.shape != like.shape or not x.is_floating_point():
        return None
    x = matrix(x).to(like.device, torch.float32)
    return x if math.isfinite(largest(x)) else None


def _product(flat: FlatState, names: tuple[str, str], like: Tensor) -> Tensor | None:
    """Second moments out of their means by row and by column, over the last two axes; as a matrix.

    Of Adafactor (arXiv 1804.04235, algorithm 4), whose averages need no correction: their decay begins at 0.
    """
    rows, columns = (flat.tensors.get(name) for name in names)
    if rows is None or columns is None or like.dim() < 2:
        return None
    rows = rows.to(like.device, torch.float32).reshape(*like.shape[:-1], 1)
    columns = columns.to(like.device, torch.float32).reshape(*like.shape[:-2], 1, like.shape[-1])
    usual = rows.mean(-2, keepdim=True)
    made = matrix(torch.where(usual > 0, rows * columns / usual, 0.0))
    return made if math.isfinite(largest(made)) else None


def _unpacked(flat: FlatState, names: tuple[str, str, str], like: Tensor) -> Tensor | None:
    """Second moments out of 8 bits (bitsandbytes, arXiv 2110.02861), as a matrix; Adam's bias is left in them."""
    codes, values, largest_ones = (flat.tensors.get(name) for name in names)
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
    made = matrix(made.reshape(like.shape)).to(like.device)
    return made if math.isfinite(largest(made)) else None


def unbiased(moment: Tensor, beta: float | None, step: int | None) -> Tensor:
    """Without what is left of Adam's bias towards zero after so many steps."""
    if beta is None or step is None or not 0 <= beta < 1 or step < 1:
        return moment
    grown = 1 - beta**step
    return moment if grown > 1 - 1e-6 else moment / grown
