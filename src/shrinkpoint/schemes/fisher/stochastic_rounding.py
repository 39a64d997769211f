"""Stochastic rounding of weights of which some values have not changed since they were restored (rows of an embedding).

Another dither would move those values with every restore. So such a weight stays on the points that it was restored
from, and the values that have changed are rounded there up or down at random: progress is kept on average. Their error
is then larger than that of subtractive dither (docs/fisher.md), and that of the others is 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, Lattice, LatticeTensor, as_matrix, dither
from shrinkpoint.codec.reference import Reference
from shrinkpoint.quantize.lattice import lattice_positions
from shrinkpoint.schemes.fisher.global_weights import GlobalWeights
from shrinkpoint.schemes.select import equal_elements

MIN_UNCHANGED_SHARE = 1 / 16
"""The least share of unchanged values. With fewer (a dead input), all others would be rounded worse for them."""


@dataclass(frozen=True)
class StochasticRounding:
    """How one weight with unchanged values is rounded.

    Attributes:
        parent_points: its points in the parent checkpoint.
        unchanged: which values have not changed; bool [rows, columns].
        seed: of the random numbers: the same until the next restore, so that a code changes only where its value does.
    """

    parent_points: LatticeTensor
    unchanged: Tensor = field(repr=False)
    seed: int

    def keep_steps(self, lattice: Lattice) -> Lattice:
        """The lattice with the previous steps in those rows that have not changed at all."""
        rows = torch.where(self.unchanged.all(1).cpu(), self.parent_points.lattice.rows, lattice.rows)
        return replace(lattice, rows=rows)

    def quantize(self, weight: Tensor, lattice: Lattice) -> LatticeTensor | None:
        """The points of a weight; None if codes do not reach as far as it."""
        positions = lattice_positions(weight, lattice)
        rows, columns = positions.shape
        noise = dither(self.seed, (rows, columns), weight.device) if self.seed else 0
        codes = (positions + noise).round()
        parent = self.parent_points
        same_steps = (lattice.rows == parent.lattice.rows).to(weight.device)[:, None]
        same_steps = same_steps & (lattice.columns == parent.lattice.columns).to(weight.device)[None, :]
        parent_codes = as_matrix(parent.codes).to(weight.device, torch.float32)
        codes = torch.where(self.unchanged & same_steps, parent_codes, codes)
        if not bool((codes.abs() <= MAX_LATTICE_CODE).all()):
            return None
        return LatticeTensor(codes.to(torch.int16).reshape(weight.shape), lattice)


def choose_stochastic_rounding(
    weights: GlobalWeights, names: Collection[str], seeds: Mapping[str, int], reference: Reference | None
) -> dict[str, StochasticRounding]:
    """Choose the weights to round stochastically, by name: those with enough unchanged values; a collective.

    Args:
        names: local weights whose steps are inherited from points of `reference`.
        seeds: of their dither since the last restore, by name; 0: none. Points of the same seed need no rounding.
    """
    parent = Reference({}) if reference is None else reference
    roundings: dict[str, StochasticRounding] = {}
    for name in names:
        weight, points = weights.local[name], parent.quantized[name]
        values = parent.get_like(name, tuple(weight.shape), weight.dtype)
        if isinstance(points, LatticeTensor) and points.lattice.seed != seeds[name] and values is not None:
            roundings[name] = StochasticRounding(points, as_matrix(equal_elements(weight, values)), seeds[name])
    shares = weights.share_by_tensor(
        {name: (int(one.unchanged.sum()), one.unchanged.numel()) for name, one in roundings.items()}
    )
    return {
        name: rounding
        for name, rounding in roundings.items()
        if shares.get(weights.global_name(name), 0.0) >= MIN_UNCHANGED_SHARE
    }
