"""How much the loss minds errors in a kind of weights, where nothing tells but the loss itself: by making some."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import dither, matrix
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.schemes.fisher.spread import deviation

MOST = 16
"""Kinds that are tried one by one, those with the most weights; the others together. Each costs one evaluation."""
STEP = 1.0
"""Standard deviations, of the grid that makes the errors: at half of it, what one kind did was hardly seen."""
LEAST = 1e-3
"""Of the most sensitive kind's curvature; none is taken to have less, for a small rise is a matter of chance."""

Rise = Callable[[Mapping[str, Tensor]], float]
"""By how much some tensors in the places of others raise the loss."""


def kinds_of(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """What each weight has in common with those that are tried together with it.

    The name without numbers, so that layers of one kind are one; vectors are one kind altogether.

    >>> kinds_of({"model/blocks.0.up.weight": torch.zeros(2, 2), "model/blocks.1.up.weight": torch.zeros(2, 2)})
    {'model/blocks.0.up.weight': 'model/blocks.*.up.weight', 'model/blocks.1.up.weight': 'model/blocks.*.up.weight'}
    """
    kinds = {name: re.sub(r"\d+", "*", name) if x.dim() > 1 else "vectors" for name, x in weights.items()}
    sizes: dict[str, int] = {}
    for name, kind in kinds.items():
        sizes[kind] = sizes.get(kind, 0) + weights[name].numel()
    alone = sorted(sizes, key=lambda kind: -sizes[kind])[: MOST - (len(sizes) > MOST)]
    return {name: kind if kind in alone else "others" for name, kind in kinds.items()}


def probe(weights: Mapping[str, Tensor], rise: Rise) -> dict[str, float]:
    """The mean curvature of the loss by kind of weights, from one measured rise of each: `2 rise / sum(d^2)`.

    Returns:
        Nothing where no kind raises the loss.
    """
    kinds, found = kinds_of(weights), dict[str, tuple[float, float]]()
    for kind in dict.fromkeys(kinds.values()):
        made = {
            name: noisy(x, seed, deviation(x))
            for seed, (name, x) in enumerate(weights.items(), 1)
            if kinds[name] == kind
        }
        squares = sum(float((one.float() - weights[name].float()).square().sum()) for name, one in made.items())
        found[kind] = rise(made), squares
    return curvature_of(found)


def curvature_of(measured: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """By kind of weights, from a rise and the sum of the squared errors that caused it."""
    found = {
        kind: 2 * rise / squares if squares > 0 and math.isfinite(rise) else math.nan
        for kind, (rise, squares) in measured.items()
    }
    known = [one for one in found.values() if one > 0]
    if not known:
        return {}
    top = max(known)
    return {kind: max(one, LEAST * top) if math.isfinite(one) else top for kind, one in found.items()}


def probed(weights: Mapping[str, Tensor], found: Mapping[str, float]) -> dict[str, Curvature]:
    """What `probe` has told, of every weight; the same all over a tensor."""
    out = {}
    for name, kind in kinds_of(weights).items():
        square = torch.full((1, 1), found.get(kind, max(found.values())), device=weights[name].device)
        out[name] = Curvature(square.expand(matrix(weights[name]).shape), probed=True)
    return out


def noisy(x: Tensor, seed: int, spread: float) -> Tensor:
    """The weight with an error that is evenly distributed, as that of a lattice with dither.

    Args:
        spread: its standard deviation.
    """
    step = STEP * spread
    if not 0 < step < math.inf:
        return x
    noise = dither(seed, (1, x.numel()), x.device).reshape(x.shape)
    return (((x.float() / step - noise).round() + noise) * step).to(x.dtype)
