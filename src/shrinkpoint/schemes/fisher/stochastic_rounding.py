"""Stochastic rounding of weights of which some values have not changed since they were restored (rows of an embedding).

Another dither would move those values with every restore. So such a weight stays on the points that it was restored
from, and the values that have changed are rounded there up or down at random: progress is kept on average. Their error
is then larger than that of subtractive dither (docs/fisher.md), and that of the others is 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, Lattice, LatticeTensor, as_matrix, dither
from shrinkpoint.codec.reference import Reference
from shrinkpoint.quantize.lattice import lattice_positions
from shrinkpoint.schemes.fisher.pool import Pool
from shrinkpoint.schemes.select import equal_elements

MIN_UNCHANGED_SHARE = 1 / 16
"""Of a weight's values, so many that have not moved. For fewer (a dead input) all others would be rounded worse."""


@dataclass(frozen=True)
class StochasticRounding:
    """What such a weight is rounded by.

    Attributes:
        parent_points: its points in the checkpoint before.
        unchanged: where it has not moved; bool, a matrix.
        seed: of chance: the same until the next restore, so that a code changes only where its value moves.
    """

    parent_points: LatticeTensor
    unchanged: Tensor = field(repr=False)
    seed: int

    def keep_steps(self, lattice: Lattice) -> Lattice:
        """The same, but for rows that have not moved at all: these keep the steps they had."""
        rows = torch.where(self.unchanged.all(1).cpu(), self.parent_points.lattice.rows, lattice.rows)
        return replace(lattice, rows=rows)

    def quantize(self, weight: Tensor, lattice: Lattice) -> LatticeTensor | None:
        """The points of a weight; None where they do not reach as far as it."""
        at = lattice_positions(weight, lattice)
        codes = (at + dither(self.seed, (at.shape[0], at.shape[1]), weight.device)).round() if self.seed else at.round()
        alike = (lattice.rows == self.parent_points.lattice.rows).to(weight.device)[:, None]
        alike = alike & (lattice.columns == self.parent_points.lattice.columns).to(weight.device)[None, :]
        codes = torch.where(
            self.unchanged & alike, as_matrix(self.parent_points.codes).to(weight.device, torch.float32), codes
        )
        if not bool((codes.abs() <= MAX_LATTICE_CODE).all()):
            return None
        return LatticeTensor(codes.to(torch.int16).reshape(weight.shape), lattice)


def choose_stochastic_rounding(
    weights: Mapping[str, Tensor], seeds: Mapping[str, int], reference: Reference | None, pool: Pool
) -> dict[str, StochasticRounding]:
    """Of those weights that have other points before them than those of a dither of these seeds; a collective.

    Args:
        weights: those whose steps are inherited from points of `reference`.
        seeds: of their dither since the last restore, by name; 0: none.
    """
    found: dict[str, StochasticRounding] = {}
    before = Reference({}) if reference is None else reference
    for name, x in weights.items():
        held = before.quantized[name]
        kept = before.get_like(name, tuple(x.shape), x.dtype)
        if isinstance(held, LatticeTensor) and held.lattice.seed != seeds[name] and kept is not None:
            found[name] = StochasticRounding(held, as_matrix(equal_elements(x, kept)), seeds[name])
    shares = pool.shares({name: (int(one.unchanged.sum()), one.unchanged.numel()) for name, one in found.items()})
    return {name: one for name, one in found.items() if shares.get(pool.title(name), 0.0) >= MIN_UNCHANGED_SHARE}
