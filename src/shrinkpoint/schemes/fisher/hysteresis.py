"""Hysteresis: how far a weight may move from its previous point before it gets another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import Lattice, as_matrix
from shrinkpoint.schemes.fisher.pool import ALONE, Pool
from shrinkpoint.schemes.fisher.steps import PreviousPoints

_HYSTERESIS_SAMPLE = 1 << 16


def fit_hysteresis(
    weights: Mapping[str, Tensor],
    lattices: Mapping[str, Lattice],
    previous: Mapping[str, PreviousPoints],
    min_retained: float,
    max_hysteresis: float,
    pool: Pool = ALONE,
) -> float:
    """The longest hold with which so much of the weights' progress is retained; measured on a part of the weights."""
    parts = [
        _WeightSample.from_weight(
            weights[name], lattices[name], one, pool.rows(name, weights[name], _HYSTERESIS_SAMPLE)
        )
        for name, one in previous.items()
        if one.original is not None and pool.counts(name)
    ]
    if not any(pool.total(len(parts))):
        return 0.5
    low, high = 0.5, max_hysteresis
    for _ in range(6):
        middle = (low + high) / 2
        each = [part.progress(middle) for part in parts]
        kept, moved = pool.total(sum(one for one, _ in each), sum(one for _, one in each))
        low, high = (middle, high) if kept >= min_retained * moved else (low, middle)
    return low


@dataclass(frozen=True)
class _WeightSample:
    """Some rows of a weight.

    Attributes:
        offset_in_steps: how many steps it is from its points before.
        steps: of the lattice.
        movement: how far training went since.
    """

    offset_in_steps: Tensor
    steps: Tensor
    movement: Tensor

    @classmethod
    def from_weight(
        cls, weight: Tensor, lattice: Lattice, previous: PreviousPoints, sampled_rows: slice
    ) -> _WeightSample:
        assert previous.original is not None
        now = as_matrix(weight)[sampled_rows].to(torch.float32)
        kept, original = (
            as_matrix(one)[sampled_rows].to(weight.device, torch.float32)
            for one in (previous.values, previous.original)
        )
        steps = replace(lattice, rows=lattice.rows[sampled_rows]).scales(device=weight.device)
        return cls((now - kept) / steps, steps, now - original)

    def progress(self, hysteresis: float) -> tuple[float, float]:
        written = torch.where(self.offset_in_steps.abs() <= hysteresis, 0.0, self.offset_in_steps.round()) * self.steps
        return float((written * self.movement).sum()), float(self.movement.square().sum())
