"""Hysteresis: how many steps a weight may move from its previous point before it gets another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import Lattice, as_matrix
from shrinkpoint.schemes.fisher.global_weights import GlobalWeights
from shrinkpoint.schemes.fisher.steps import PreviousPoints

_HYSTERESIS_SAMPLE = 1 << 16
"""Values of each weight on which progress is measured, about."""


def fit_hysteresis(
    weights: GlobalWeights,
    lattices: Mapping[str, Lattice],
    previous: Mapping[str, PreviousPoints],
    min_retained: float,
    max_hysteresis: float,
) -> float:
    """The largest hysteresis, in steps, that retains enough of the weights' progress; a collective.

    Progress is measured on a sample of the rows of each weight, by bisection.

    Args:
        lattices, previous: by local name.
        min_retained: the share of progress since the parent checkpoint that must remain.
        max_hysteresis: at most; at least 1/2, rounding to the nearest.
    """
    samples = [
        _WeightSample.from_weight(
            weights.local[name], lattices[name], points, weights.sampled_rows(name, _HYSTERESIS_SAMPLE)
        )
        for name, points in previous.items()
        if points.original is not None and weights.is_primary(name)
    ]
    if not any(weights.tensors.sum_over_ranks(len(samples))):
        return 0.5
    low, high = 0.5, max_hysteresis
    for _ in range(6):
        middle = (low + high) / 2
        progress = [sample.progress(middle) for sample in samples]
        retained, moved = weights.tensors.sum_over_ranks(
            sum(written for written, _ in progress), sum(moved for _, moved in progress)
        )
        low, high = (middle, high) if retained >= min_retained * moved else (low, middle)
    return low


@dataclass(frozen=True)
class _WeightSample:
    """Some rows of a weight, as matrices of the same shape.

    Attributes:
        offset_in_steps: distance from its previous points, in steps.
        steps: step sizes of the lattice.
        movement: distance that training went since the parent checkpoint.
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
        decoded, original = (
            as_matrix(values)[sampled_rows].to(weight.device, torch.float32)
            for values in (previous.values, previous.original)
        )
        steps = replace(lattice, rows=lattice.rows[sampled_rows]).scales(device=weight.device)
        return cls((now - decoded) / steps, steps, now - original)

    def progress(self, hysteresis: float) -> tuple[float, float]:
        """(movement that is written, squared movement), each as a sum over all values."""
        written = torch.where(self.offset_in_steps.abs() <= hysteresis, 0.0, self.offset_in_steps.round()) * self.steps
        return float((written * self.movement).sum()), float(self.movement.square().sum())
