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
from shrinkpoint.schemes.fisher.hold import hold_for
from shrinkpoint.schemes.fisher.pool import ALONE, Pool
from shrinkpoint.schemes.fisher.still import stills
from shrinkpoint.schemes.fisher.weights import (
    WIDEST,
    Before,
    care,
    points_of,
    reached,
    scaled,
    seed_of,
)

RETAINED = 0.93
"""Of the weights' progress since the checkpoint before, at least."""
LONGEST = 0.75
"""Steps from its point at which a weight leaves it, at most."""
COARSE = FINE
"""Eighths of an octave by which the steps before may be larger than those that a weight would get now. They are more
where it has shrunk since, or was saved while it was far too large, and then they would round it away."""
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
        pool: what there is of these weights elsewhere. Then this process has boxes of some of them, and `known` has the
            margins of the whole weights; every method is called by all processes.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], known: Mapping[str, Curvature], reference: Reference | None,
        size: int | None, generation: int, seed: int, kinds: Mapping[str, str] | None = None, pool: Pool = ALONE,
    ) -> None:  # fmt: skip
        self._reference, self._size, self._pool = reference, size, pool
        self._inherited: set[str] = set()
        self.steps: dict[str, Lattice] = {}
        """Of size 0, of those weights that have points."""
        usual = pool.usual(known, weights)
        titled = {pool.title(name): kind for name, kind in (kinds or {}).items()}
        cares = {name: care(pool.title(name), x, known[name], usual, titled) for name, x in weights.items()}
        seeds = {name: pool.seed(name, seed_of(pool.title(name), generation, seed)) for name in weights}
        likes = {name: self._like(name, x, size) for name, x in weights.items()}
        like = {name: one for name, one in likes.items() if one is not None}
        fresh = {
            name: pool.lattice(name, x, known[name], usual, seeds[name], cares[name]) for name, x in weights.items()
        }
        self._stills = stills({name: weights[name] for name in like}, seeds, reference, pool)
        moved = {name: one for name, one in like.items() if name not in self._stills}
        outgrown = pool.anywhere(name for name, one in moved.items() if _is_coarse(one, fresh[name]))
        like = {name: one for name, one in like.items() if pool.title(name) not in outgrown}
        for name in weights:
            lattice = like.get(name)
            if lattice is None:
                made = fresh[name]
            else:
                made = lattice if name in self._stills else replace(lattice, seed=seeds[name])
                self._inherited.add(name)
            if made is not None:
                self.steps[name] = made
        self.weights = {name: weights[name] for name in self.steps}
        self.supposed = usual <= 0
        """Nothing is known of any weight: the prediction is in no unit."""
        self.known = dict(known)
        if self.supposed:
            self.known = {name: self._supposed(name, x, pool.count(weights)) for name, x in self.weights.items()}
        self._most = {name: WIDEST * cares[name] * pool.deviation(name, x) for name, x in self.weights.items()}

    def curved(self, size: int) -> float:
        """What errors spread evenly over each cell raise the loss by, for a single loss term."""
        total = 0.0
        for name in self.steps:
            squares = self.known[name].squares if self._pool.counts(name) else None
            if squares is not None:
                steps = self._sized(name, size).scales(device=squares.device)
                total += float((squares * steps.square()).sum(dtype=torch.float64)) / 24
        return self._pool.total(total)[0]

    def draft(self, size: int) -> Draft:
        """With steps of this size. Weights whose points would not reach far enough are left out, and stay exact."""
        lattices = {name: self._sized(name, size) for name in self.steps}
        before = {name: self._before(name, one) for name, one in lattices.items()}
        same = {name: one for name, one in before.items() if one is not None}
        hold = hold_for(self.weights, lattices, same, RETAINED, LONGEST, self._pool)
        found = {name: self._points(name, one, before[name], hold) for name, one in lattices.items()}
        left_out = self._pool.anywhere(name for name, one in found.items() if one is None)
        points = {n: one for n, one in found.items() if one is not None and self._pool.title(n) not in left_out}
        values = {name: one.values(self.weights[name].dtype) for name, one in points.items()}
        slope = curved = 0.0
        for name, made in values.items():
            error = matrix(made).to(torch.float32) - matrix(self.weights[name]).to(torch.float32)
            first, second = self.known[name].rise(error) if self._pool.counts(name) else (0.0, 0.0)
            slope, curved = slope + first, curved + second
        slope, curved = self._pool.total(slope, curved)
        titles = dict.fromkeys((*map(self._pool.title, self.steps), *sorted(left_out)))
        return Draft(size, points, slope, curved, hold, tuple(one for one in titles if one in left_out), values)

    def bits(self, size: int) -> float:
        """What its points cost, about: the entropy of the differences in a part of them."""
        codes = {name: self._some(name, self._sized(name, size)) for name in self.steps}
        return self._pool.bits(codes, self.weights)

    def _points(self, name: str, lattice: Lattice, before: Before | None, hold: float) -> Points | None:
        x = self.weights[name]
        if name in self._stills:
            return reached(self._stills[name].points(x, lattice), x.dtype)
        return points_of(x, lattice, before, hold)

    def _before(self, name: str, lattice: Lattice) -> Before | None:
        """None of weights that are not held, but rounded by chance."""
        return None if name in self._stills else Before.of(name, self.weights[name], lattice, self._reference)

    def _sized(self, name: str, size: int) -> Lattice:
        """Steps that were capped once are not capped again: a deviation that has changed a little would change them."""
        kept = name in self._inherited and self._size is not None and size <= self._size
        made = scaled(self.steps[name], size, math.inf if kept else self._most[name])
        return self._stills[name].steps(made) if name in self._stills else made

    def _some(self, name: str, lattice: Lattice) -> Tensor:
        """Differences of points, of some rows."""
        x = self.weights[name]
        every = self._pool.rows(name, x, _SAMPLE)
        steps = replace(lattice, rows=lattice.rows[every]).scales(device=x.device)
        codes = (matrix(x)[every].to(torch.float32) / steps).round()
        held = None if self._reference is None else self._reference.matching(name, tuple(x.shape), x.dtype)
        if held is not None:
            codes = codes - (matrix(held)[every].to(x.device, torch.float32) / steps).round()
        return codes

    def _supposed(self, name: str, x: Tensor, count: int) -> Curvature:
        """Where nothing is known of any of so many weights: a rise by the share of their variances that is lost.

        What that is in the loss's own unit, only a measurement can say; then `terms` is the factor between the two.
        """
        share = 1.0 / (self._pool.deviation(name, x) ** 2 * self._pool.numel(name, x) * count)
        return Curvature(torch.full((1, 1), share, device=x.device).expand(matrix(x).shape))

    def _like(self, name: str, x: Tensor, size: int | None) -> Lattice | None:
        """The steps of the checkpoint before, as of one standard deviation then."""
        held = None if self._reference is None or size is None else self._reference.symbols.get(name)
        if not isinstance(held, Points) or size is None or not is_linear(held, x) or not self._pool.inherits(name):
            return None
        return scaled(held.lattice, -size)


def size_of(multiplier: float) -> int:
    """A number of standard deviations, in eighths of an octave."""
    return round(math.log2(multiplier) * FINE)


def multiplier_of(size: int) -> float:
    return float(2.0 ** (size / FINE))


def is_linear(points: Points, x: Tensor) -> bool:
    """Whether these are points that the next ones of `x` can lie on."""
    return points.codes.shape == x.shape and points.lattice.law == "linear"


def _is_coarse(steps: Lattice, fresh: Lattice | None) -> bool:
    """Whether they are, in the mean of their logarithms."""
    if fresh is None:
        return False
    means = (sum(float(side.float().mean()) for side in (one.rows, one.columns)) for one in (steps, fresh))
    before, now = means
    return before > now + COARSE
