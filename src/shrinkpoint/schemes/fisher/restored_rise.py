"""Estimates the rise of the loss that earlier restores have left and training has not made good yet.

A budget is promised beside a run that was never restored. So the checkpoints after a restore may add only what it has
left of the budget. Training makes an error good by moving the weight: once a weight has moved x standard errors, a
share of 1 / (1 + x^2 / 2) is taken to be left. The errors of weights that hardly move, such as rarely used rows of an
embedding, add up from restore to restore; those of other weights are gone after a few saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from shrinkpoint.codec.lattice import LatticeTensor, as_matrix
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, Reference, tensor_rows
from shrinkpoint.schemes.fisher.curvature import Curvature, GlobalWeights

_HEALING = 0.5
"""How fast movement makes errors good: measured on trainings that were restored eight times."""


def remaining_share(weights: GlobalWeights, curvatures: Mapping[str, Curvature], reference: Reference | None) -> float:
    """The share, from 0 to 1, that is left of the rise that a save before the parent checkpoint had; a collective.

    Args:
        curvatures: of local weights, by name: by them errors count.
        reference: the parent checkpoint, beside which movement is measured. What is unknown has not moved.
    """
    left = total = 0.0
    for name, weight in weights.local.items():
        if name in weights.tensors.primary and reference is not None:
            rows = weights.tensors.local_shards[name].spec.sampled_rows(MAX_SAMPLED_VALUES)
            part = _sampled_errors(name, weight, rows, curvatures.get(name, Curvature()), reference)
            left, total = left + part[0], total + part[1]
    left, total = weights.tensors.collectives.sum_over_ranks(left, total)
    return min(1.0, left / total) if 0 < total < math.inf and left >= 0 else 1.0


def _sampled_errors(
    name: str, weight: Tensor, rows: slice, curvature: Curvature, reference: Reference
) -> tuple[float, float]:
    """The rise, up to a factor that all weights share, by what is left of a weight's errors, and by all of them."""
    points, shape, matrix = reference.quantized.get(name), tuple(weight.shape), as_matrix(weight.detach())
    sampled = matrix[rows].cpu().double()
    if not isinstance(points, LatticeTensor) or not reference.has_like(name, shape, weight.dtype) or not len(sampled):
        return 0.0, 0.0
    before = reference.original_rows(name, shape, rows)
    before = tensor_rows(reference.tensors, name, rows) if before is None else before
    squares = points.lattice.row_steps(shape, rows).double().square() / 12
    moved = (sampled - before.cpu().double()).square()
    remaining = squares / (squares + _HEALING * moved)
    rises = squares.expand_as(sampled)
    if curvature.second is not None:
        second = as_matrix(curvature.second.reshape(shape))[rows]
        rises = rises * second.cpu().double() * curvature.second_factor
    extent = weight.numel() / sampled.numel()
    return extent * float((rises * remaining).sum()), extent * float(rises.sum())
