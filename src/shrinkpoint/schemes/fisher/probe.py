"""Estimates curvature by perturbing groups of weights and measuring the loss."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix, dither
from shrinkpoint.quantize.entropy import weight_std
from shrinkpoint.schemes.fisher.curvature import Curvature

MAX_GROUPS = 16
"""Kinds that are tried one by one, those with the most weights; the others together. Each costs one evaluation."""
PROBE_STEP = 1.0
"""Standard deviations, of the grid that makes the errors: at half of it, what one kind did was hardly seen."""
MIN_CURVATURE_RATIO = 1e-3
"""Of the most sensitive kind's curvature; none is taken to have less, for a small rise is a matter of chance."""

MeasureLossIncrease = Callable[[Mapping[str, Tensor]], float]
"""By how much some tensors in the places of others raise the loss."""


def group_by_pattern(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """What each weight has in common with those that are tried together with it.

    The name without numbers, so that layers of one kind are one; vectors are one kind altogether.

    >>> group_by_pattern({"model/blocks.0.up.weight": torch.zeros(2, 2), "model/blocks.1.up.weight": torch.zeros(2, 2)})
    {'model/blocks.0.up.weight': 'model/blocks.*.up.weight', 'model/blocks.1.up.weight': 'model/blocks.*.up.weight'}
    """
    kinds = {name: re.sub(r"\d+", "*", name) if x.dim() > 1 else "vectors" for name, x in weights.items()}
    sizes: dict[str, int] = {}
    for name, kind in kinds.items():
        sizes[kind] = sizes.get(kind, 0) + weights[name].numel()
    alone = sorted(sizes, key=lambda kind: -sizes[kind])[: MAX_GROUPS - (len(sizes) > MAX_GROUPS)]
    return {name: kind if kind in alone else "others" for name, kind in kinds.items()}


def probe(weights: Mapping[str, Tensor], loss_increase: MeasureLossIncrease) -> dict[str, float]:
    """The mean curvature of the loss by kind of weights, from one measured rise of each: `2 rise / sum(d^2)`.

    Returns:
        Nothing where no kind raises the loss.
    """
    kinds, found = group_by_pattern(weights), dict[str, tuple[float, float]]()
    for kind in dict.fromkeys(kinds.values()):
        made = {
            name: add_uniform_noise(x, seed, weight_std(x))
            for seed, (name, x) in enumerate(weights.items(), 1)
            if kinds[name] == kind
        }
        squares = sum(float((one.float() - weights[name].float()).square().sum()) for name, one in made.items())
        found[kind] = loss_increase(made), squares
    return curvature_by_group(found)


def curvature_by_group(measurements: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """By kind of weights, from a rise and the sum of the squared errors that caused it."""
    found = {
        kind: 2 * rise / squares if squares > 0 and math.isfinite(rise) else math.nan
        for kind, (rise, squares) in measurements.items()
    }
    known = [one for one in found.values() if one > 0]
    if not known:
        return {}
    top = max(known)
    return {kind: max(one, MIN_CURVATURE_RATIO * top) if math.isfinite(one) else top for kind, one in found.items()}


def curvatures_from_probe(weights: Mapping[str, Tensor], group_curvatures: Mapping[str, float]) -> dict[str, Curvature]:
    """What `probe` has told, of every weight; the same all over a tensor."""
    out = {}
    for name, kind in group_by_pattern(weights).items():
        square = torch.full(
            (1, 1), group_curvatures.get(kind, max(group_curvatures.values())), device=weights[name].device
        )
        out[name] = Curvature(square.expand(as_matrix(weights[name]).shape), probed=True)
    return out


def add_uniform_noise(weight: Tensor, seed: int, std: float) -> Tensor:
    """The weight with an error that is evenly distributed, as that of a lattice with dither.

    Args:
        std: its standard deviation.
    """
    step = PROBE_STEP * std
    if not 0 < step < math.inf:
        return weight
    noise = dither(seed, (1, weight.numel()), weight.device).reshape(weight.shape)
    return (((weight.float() / step - noise).round() + noise) * step).to(weight.dtype)
