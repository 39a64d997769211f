"""All ways to write the weights of one state: one for each size of the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec import Lattice, Points, Reference
from shrinkpoint.codec.lattice import FINE, matrix
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.schemes.fisher.weights import (
    WIDEST,
    Before,
    care,
    deviation,
    hold_for,
    lattice_of,
    points_of,
    scaled,
    seed_of,
    usual_squares,
)

RETAINED = 0.93
"""Of the weights' progress since the checkpoint before, at least."""
LONGEST = 0.75
"""Steps from its point at which a weight leaves it, at most."""
_SAMPLE = 1 << 14


@dataclass(frozen=True)
class Draft:
    """One way to write the weights.

    Attributes:
        size: of its steps, in eighths of an octave: 0 is a standard deviation, in the geometric mean over all weights.
        points: by name of a weight.
        slope, curved: the two terms of the predicted rise, the second one of a single loss term.
        hold: see `weights.points_of`.
        left_out: weights that stay exact, since points would not reach as far as they do.
        values: what the points stand for, of the weights' dtypes and on their devices.
    """

    size: int
    points: Mapping[str, Points] = field(repr=False)
    slope: float
    curved: float
    hold: float
    left_out: tuple[str, ...] = ()
    values: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


class Drafts:
    """Drafts of the weights of one state.

    Args:
        weights: by name; finite.
        known: of each.
        reference: what a reader has of the checkpoint before; None: nothing.
        size: of the steps of that checkpoint; None: not known, or not to be kept.
        generation: lossy restores behind the weights.
        seed: of the dither.
        kinds: of layers, by name of a weight, where there is more to go by than the name.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], known: Mapping[str, Curvature], reference: Reference | None,
        size: int | None, generation: int, seed: int, kinds: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._reference, self._size = reference, size
        self._inherited: set[str] = set()
        self.steps: dict[str, Lattice] = {}
        """Of size 0, of those weights that have points."""
        usual = usual_squares(known, weights)
        cares = {name: care(name, x, known[name], usual, kinds or {}) for name, x in weights.items()}
        for name, x in weights.items():
            lattice = self._like(name, x, size)
            number = seed_of(name, generation, seed)
            if lattice is None:
                made = lattice_of(x, known[name], usual, number, cares[name])
            else:
                made = _reseeded(lattice, number)
                self._inherited.add(name)
            if made is not None:
                self.steps[name] = made
        self.weights = {name: weights[name] for name in self.steps}
        self.supposed = usual <= 0
        """Nothing is known of any weight: the prediction is in no unit."""
        self.known = {name: _supposed(x, len(weights)) for name, x in self.weights.items()} if self.supposed else known
        self._most = {name: WIDEST * cares[name] * deviation(x) for name, x in self.weights.items()}

    def curved(self, size: int) -> float:
        """What errors spread evenly over each cell raise the loss by, for a single loss term."""
        total = 0.0
        for name in self.steps:
            squares = self.known[name].squares
            if squares is not None:
                steps = self._sized(name, size).scales(device=squares.device)
                total += float((squares * steps.square()).sum(dtype=torch.float64)) / 24
        return total

    def draft(self, size: int) -> Draft:
        """With steps of this size. Weights whose points would not reach far enough are left out, and stay exact."""
        lattices = {name: self._sized(name, size) for name in self.steps}
        before = {name: Before.of(name, self.weights[name], one, self._reference) for name, one in lattices.items()}
        same = {name: one for name, one in before.items() if one is not None}
        hold = hold_for(self.weights, lattices, same, RETAINED, LONGEST)
        found = {name: points_of(self.weights[name], one, before[name], hold) for name, one in lattices.items()}
        points = {name: one for name, one in found.items() if one is not None}
        values = {name: one.values(self.weights[name].dtype) for name, one in points.items()}
        slope = curved = 0.0
        for name, made in values.items():
            error = matrix(made).to(torch.float32) - matrix(self.weights[name]).to(torch.float32)
            first, second = self.known[name].rise(error)
            slope, curved = slope + first, curved + second
        return Draft(
            size, points, slope, curved, hold, tuple(name for name in self.steps if name not in points), values
        )

    def bits(self, size: int) -> float:
        """What its points cost, about: the entropy of the differences in a part of them."""
        return sum(self._bits(name, self._sized(name, size)) for name in self.steps)

    def _sized(self, name: str, size: int) -> Lattice:
        """Steps that were capped once are not capped again: a deviation that has changed a little would change them."""
        kept = name in self._inherited and self._size is not None and size <= self._size
        return scaled(self.steps[name], size, math.inf if kept else self._most[name])

    def _bits(self, name: str, lattice: Lattice) -> float:
        x = self.weights[name]
        every = slice(None, None, max(1, x.numel() // _SAMPLE))
        steps = replace(lattice, rows=lattice.rows[every]).scales(device=x.device)
        codes = (matrix(x)[every].to(torch.float32) / steps).round()
        held = None if self._reference is None else self._reference.matching(name, tuple(x.shape), x.dtype)
        if held is not None:
            codes = codes - (matrix(held)[every].to(x.device, torch.float32) / steps).round()
        return entropy(codes) * x.numel() / max(1, codes.numel())

    def _like(self, name: str, x: Tensor, size: int | None) -> Lattice | None:
        """The steps of the checkpoint before, as of one standard deviation then."""
        held = None if self._reference is None or size is None else self._reference.symbols.get(name)
        if not isinstance(held, Points) or held.codes.shape != x.shape or held.lattice.law != "linear" or size is None:
            return None
        return scaled(held.lattice, -size)


def entropy(codes: Tensor) -> float:
    """Bits of all of them, each coded by how often it occurs."""
    counts = torch.bincount(codes.reshape(-1).to(torch.int64).clamp(-4096, 4095) + 4096).double()
    counts = counts[counts > 0]
    return float((counts * (counts.sum() / counts).log2()).sum())


def size_of(multiplier: float) -> int:
    """A number of standard deviations, in eighths of an octave."""
    return round(math.log2(multiplier) * FINE)


def multiplier_of(size: int) -> float:
    return float(2.0 ** (size / FINE))


def _supposed(x: Tensor, count: int) -> Curvature:
    """Where nothing is known of any of so many weights: a rise by the share of their variances that is lost.

    What that is in the loss's own unit, only a measurement can say; then `terms` is the factor between the two.
    """
    share = 1.0 / (deviation(x) ** 2 * x.numel() * count)
    return Curvature(torch.full((1, 1), share, device=x.device).expand(matrix(x).shape))


def _reseeded(lattice: Lattice, seed: int) -> Lattice:
    return Lattice(lattice.law, lattice.rows, lattice.columns, seed=seed)
