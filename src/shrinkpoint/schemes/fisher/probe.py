"""Estimates curvature by perturbing groups of weights and measuring the loss."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix, dither, matrix_shape
from shrinkpoint.progress import track
from shrinkpoint.schemes.fisher.curvature import Curvature, GlobalWeights
from shrinkpoint.sharding.global_tensors import Marginals

MAX_GROUPS = 16
"""Groups at most, each of which costs one evaluation: the largest ones, and one of all other weights."""
PROBE_STEP = 1.0
"""The step of the grid that makes the errors, in standard deviations. At half of it, the effect was hardly seen."""
MIN_CURVATURE_RATIO = 1e-3
"""The least curvature that a group is taken to have, relative to the most sensitive one: small rises are noise."""

MeasureLossIncrease = Callable[[Mapping[str, Tensor]], float]
"""Measures by how much the loss rises when some tensors, by name, have other values."""


def group_by_pattern(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """The group of each weight: its name without numbers, so that layers of one kind are perturbed together.

    All vectors are one group, and so are the smallest groups if there are more than `MAX_GROUPS`.

    >>> group_by_pattern({"model/blocks.0.up.weight": torch.zeros(2, 2), "model/blocks.1.up.weight": torch.zeros(2, 2)})
    {'model/blocks.0.up.weight': 'model/blocks.*.up.weight', 'model/blocks.1.up.weight': 'model/blocks.*.up.weight'}
    """
    patterns = {name: re.sub(r"\d+", "*", name) if x.dim() > 1 else "vectors" for name, x in weights.items()}
    numels: dict[str, int] = {}
    for name, pattern in patterns.items():
        numels[pattern] = numels.get(pattern, 0) + weights[name].numel()
    largest = sorted(numels, key=lambda pattern: -numels[pattern])[: MAX_GROUPS - (len(numels) > MAX_GROUPS)]
    return {name: pattern if pattern in largest else "others" for name, pattern in patterns.items()}


def probe(weights: GlobalWeights, loss_increase: MeasureLossIncrease) -> dict[str, float]:
    """The mean curvature of the loss by group of weights, from one measured rise of each: `2 rise / sum(d^2)`.

    A collective: all ranks perturb their shards of a group at once. A group whose rise is not finite gets the largest
    curvature.

    Returns:
        Nothing if no group raises the loss.
    """
    groups = group_by_pattern(weights.templates)
    seeds = {name: number for number, name in enumerate(weights.templates, 1)}
    measurements = dict[str, tuple[float, float]]()
    for group in track(dict.fromkeys(groups.values()), "fisher: probing the curvature"):
        members = {n: x for n, x in weights.local.items() if groups[weights.tensors.global_names[n]] == group}
        perturbed = {}
        for name, weight in members.items():
            title = weights.tensors.global_names[name]
            shard = weights.tensors.local_shards[name]
            seed = shard.spec.dither_seed(seeds[title], shard.sizes)
            perturbed[name] = add_uniform_noise(weight, seed, weights.std[title])
        squares = sum(
            float((perturbed[name].float() - weight.float()).square().sum())
            for name, weight in members.items()
            if name in weights.tensors.primary
        )
        measurements[group] = loss_increase(perturbed), weights.tensors.collectives.sum_over_ranks(squares)[0]
    raw = {
        group: 2 * rise / squares if squares > 0 and math.isfinite(rise) else math.nan
        for group, (rise, squares) in measurements.items()
    }
    largest = max((value for value in raw.values() if value > 0), default=None)
    if largest is None:
        return {}
    return {
        group: max(value, MIN_CURVATURE_RATIO * largest) if math.isfinite(value) else largest
        for group, value in raw.items()
    }


def curvatures_from_probe(weights: GlobalWeights, group_curvatures: Mapping[str, float]) -> dict[str, Curvature]:
    """The curvature of this rank's shard of every weight, from that of its group; constant within a tensor."""
    groups, default = group_by_pattern(weights.templates), max(group_curvatures.values())
    curvatures = {}
    for name, weight in weights.local.items():
        template = weights.templates[weights.tensors.global_names[name]]
        value = group_curvatures.get(groups[weights.tensors.global_names[name]], default)
        squares = torch.full((1, 1), value, dtype=torch.float32, device=weight.device).expand(as_matrix(weight).shape)
        marginals = None if name in weights.tensors.whole else _constant_marginals(tuple(template.shape), value)
        curvatures[name] = Curvature(squares, probed=True, marginals=marginals)
    return curvatures


def _constant_marginals(shape: tuple[int, ...], value: float) -> Marginals:
    rows, columns = matrix_shape(shape)
    row_ones, column_ones = torch.ones(rows, dtype=torch.float64), torch.ones(columns, dtype=torch.float64)
    return Marginals(shape, value * rows * columns, row_ones * value * columns, column_ones * value * rows)


def add_uniform_noise(weight: Tensor, seed: int, std: float) -> Tensor:
    """The weight with a uniformly distributed error, like that of a lattice with dither.

    Args:
        std: the standard deviation of the weight.
    """
    step = PROBE_STEP * std
    if not 0 < step < math.inf:
        return weight
    noise = dither(seed, (1, weight.numel()), weight.device).reshape(weight.shape)
    return (((weight.float() / step - noise).round() + noise) * step).to(weight.dtype)
