"""How far a weight may lie from its point before and stay there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shrinkpoint.codec import Lattice
from shrinkpoint.codec.lattice import matrix
from shrinkpoint.schemes.fisher.pool import ALONE, Pool
from shrinkpoint.schemes.fisher.weights import Before

_SAMPLE = 1 << 16


def hold_for(
    weights: Mapping[str, Tensor], lattices: Mapping[str, Lattice], before: Mapping[str, Before], wanted: float,
    most: float, pool: Pool = ALONE,
) -> float:  # fmt: skip
    """The longest hold with which so much of the weights' progress is retained; measured on a part of the weights."""
    parts = [
        _Part.of(weights[name], lattices[name], one, pool.rows(name, weights[name], _SAMPLE))
        for name, one in before.items()
        if one.original is not None and pool.counts(name)
    ]
    if not any(pool.total(len(parts))):
        return 0.5
    low, high = 0.5, most
    for _ in range(6):
        middle = (low + high) / 2
        each = [part.progress(middle) for part in parts]
        kept, moved = pool.total(sum(one for one, _ in each), sum(one for _, one in each))
        low, high = (middle, high) if kept >= wanted * moved else (low, middle)
    return low


@dataclass(frozen=True)
class _Part:
    """Some rows of a weight.

    Attributes:
        away: how many steps it is from its points before.
        steps: of the lattice.
        moved: how far training went since.
    """

    away: Tensor
    steps: Tensor
    moved: Tensor

    @classmethod
    def of(cls, x: Tensor, lattice: Lattice, before: Before, every: slice) -> _Part:
        assert before.original is not None
        now = matrix(x)[every].to(torch.float32)
        kept, original = (matrix(one)[every].to(x.device, torch.float32) for one in (before.kept, before.original))
        steps = replace(lattice, rows=lattice.rows[every]).scales(device=x.device)
        return cls((now - kept) / steps, steps, now - original)

    def progress(self, hold: float) -> tuple[float, float]:
        written = torch.where(self.away.abs() <= hold, 0.0, self.away.round()) * self.steps
        return float((written * self.moved).sum()), float(self.moved.square().sum())
