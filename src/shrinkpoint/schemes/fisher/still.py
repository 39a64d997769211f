"""Weights of which some values have not moved since they were restored: rows of an embedding that nobody looks up.

Another dither would move those values, too, with every restore. So such a weight stays on the points that it was
restored from, and the values that have moved are rounded there up or down by chance, so that progress is kept on
average. Their error is then larger than that of subtractive dither (docs/fisher.md), and that of the others is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec import Lattice, Points, Reference
from shrinkpoint.codec.lattice import MOST_CODE, dither, matrix
from shrinkpoint.codec.quantize.points import positions
from shrinkpoint.schemes.fisher.pool import Pool
from shrinkpoint.schemes.unmoved import still

MIN_SHARE = 1 / 16
"""Of a weight's values, so many that have not moved. For fewer (a dead input) all others would be rounded worse."""


@dataclass(frozen=True)
class Still:
    """What such a weight is rounded by.

    Attributes:
        held: its points in the checkpoint before.
        places: where it has not moved; bool, a matrix.
        seed: of chance: the same until the next restore, so that a code changes only where its value moves.
    """

    held: Points
    places: Tensor = field(repr=False)
    seed: int

    def steps(self, lattice: Lattice) -> Lattice:
        """The same, but for rows that have not moved at all: these keep the steps they had."""
        rows = torch.where(self.places.all(1).cpu(), self.held.lattice.rows, lattice.rows)
        return replace(lattice, rows=rows)

    def points(self, x: Tensor, lattice: Lattice) -> Points | None:
        """The points of a weight; None where they do not reach as far as it."""
        at = positions(x, lattice)
        codes = (at + dither(self.seed, (at.shape[0], at.shape[1]), x.device)).round() if self.seed else at.round()
        alike = (lattice.rows == self.held.lattice.rows).to(x.device)[:, None]
        alike = alike & (lattice.columns == self.held.lattice.columns).to(x.device)[None, :]
        codes = torch.where(self.places & alike, matrix(self.held.codes).to(x.device, torch.float32), codes)
        if not bool((codes.abs() <= MOST_CODE).all()):
            return None
        return Points(codes.to(torch.int16).reshape(x.shape), lattice)


def stills(
    weights: Mapping[str, Tensor], seeds: Mapping[str, int], reference: Reference | None, pool: Pool
) -> dict[str, Still]:
    """Of those weights that have other points before them than those of a dither of these seeds; a collective.

    Args:
        weights: those whose steps are inherited from points of `reference`.
        seeds: of their dither since the last restore, by name; 0: none.
    """
    found: dict[str, Still] = {}
    before = Reference({}) if reference is None else reference
    for name, x in weights.items():
        held = before.symbols[name]
        kept = before.matching(name, tuple(x.shape), x.dtype)
        if isinstance(held, Points) and held.lattice.seed != seeds[name] and kept is not None:
            found[name] = Still(held, matrix(still(x, kept)), seeds[name])
    shares = pool.shares({name: (int(one.places.sum()), one.places.numel()) for name, one in found.items()})
    return {name: one for name, one in found.items() if shares.get(pool.title(name), 0.0) >= MIN_SHARE}
