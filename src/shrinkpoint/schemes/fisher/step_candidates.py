"""The weights of one state, quantized with any step size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import STEPS_PER_OCTAVE, Lattice, LatticeTensor, as_matrix
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.schemes.fisher.hysteresis import fit_hysteresis
from shrinkpoint.schemes.fisher.pool import ALONE, Pool
from shrinkpoint.schemes.fisher.steps import (
    MAX_STEP_STD,
    PreviousPoints,
    points_in_range,
    quantize_weight,
    rescale,
    step_scale,
    weight_dither_seed,
)
from shrinkpoint.schemes.fisher.stochastic_rounding import choose_stochastic_rounding

MIN_RETAINED = 0.93
"""Of the weights' progress since the checkpoint before, at least."""
MAX_HYSTERESIS = 0.75
"""Steps from its point at which a weight leaves it, at most."""
MAX_STEP_EXCESS = STEPS_PER_OCTAVE
"""Eighths of an octave by which the steps before may be larger than those that a weight would get now. They are more
where it has shrunk since, or was saved while it was far too large, and then they would round it away."""
_BITS_SAMPLE = 1 << 14


@dataclass(frozen=True)
class QuantizedWeights:
    """One way to write the weights.

    Attributes:
        log_step: of its steps, in eighths of an octave: 0 is a standard deviation, in the geometric mean over all
            weights.
        points: by name of a weight.
        slope, curved: the two terms of the predicted rise, the second one of a single loss term.
        hysteresis: see `weights.points_of`.
        left_out: weights that stay exact, since points would not reach as far as they do.
        values: what the points stand for, of the weights' dtypes and on their devices.
    """

    log_step: int
    points: Mapping[str, LatticeTensor] = field(repr=False)
    slope_term: float
    curvature_term: float
    hysteresis: float
    left_out: tuple[str, ...] = ()
    values: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


class StepCandidates:
    """Drafts of the weights of one state.

    Args:
        weights: by name; finite.
        curvatures: of each.
        reference: what a reader has of the checkpoint before; None: nothing.
        parent_log_step: of the steps of that checkpoint; None: not known, or not to be kept.
        lossy_restores: lossy restores behind the weights.
        seed: of the dither.
        layer_types: of layers, by name of a weight, where there is more to go by than the name.
        pool: what there is of these weights elsewhere. Then this process has boxes of some of them, and `curvatures`
            has the
            margins of the whole weights; every method is called by all processes.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        curvatures: Mapping[str, Curvature],
        reference: Reference | None,
        parent_log_step: int | None,
        lossy_restores: int,
        seed: int,
        layer_types: Mapping[str, str] | None = None,
        pool: Pool = ALONE,
    ) -> None:
        self._reference, self._parent_log_step, self._pool = reference, parent_log_step, pool
        self._inherited: set[str] = set()
        self.unit_lattices: dict[str, Lattice] = {}
        """Of size 0, of those weights that have points."""
        usual = pool.usual(curvatures, weights)
        titled = {pool.title(name): kind for name, kind in (layer_types or {}).items()}
        cares = {name: step_scale(pool.title(name), x, curvatures[name], usual, titled) for name, x in weights.items()}
        seeds = {name: pool.seed(name, weight_dither_seed(pool.title(name), lossy_restores, seed)) for name in weights}
        likes = {name: self._inherited_lattice(name, x, parent_log_step) for name, x in weights.items()}
        like = {name: one for name, one in likes.items() if one is not None}
        fresh = {
            name: pool.lattice(name, x, curvatures[name], usual, seeds[name], cares[name])
            for name, x in weights.items()
        }
        self._stochastic = choose_stochastic_rounding({name: weights[name] for name in like}, seeds, reference, pool)
        moved = {name: one for name, one in like.items() if name not in self._stochastic}
        outgrown = pool.anywhere(name for name, one in moved.items() if _is_too_coarse(one, fresh[name]))
        like = {name: one for name, one in like.items() if pool.title(name) not in outgrown}
        for name in weights:
            lattice = like.get(name)
            if lattice is None:
                made = fresh[name]
            else:
                made = lattice if name in self._stochastic else replace(lattice, seed=seeds[name])
                self._inherited.add(name)
            if made is not None:
                self.unit_lattices[name] = made
        self.weights = {name: weights[name] for name in self.unit_lattices}
        self.no_curvature = usual <= 0
        """Nothing is known of any weight: the prediction is in no unit."""
        self.curvatures = dict(curvatures)
        if self.no_curvature:
            self.curvatures = {
                name: self._assumed_curvature(name, x, pool.count(weights)) for name, x in self.weights.items()
            }
        self._max_steps = {
            name: MAX_STEP_STD * cares[name] * pool.deviation(name, x) for name, x in self.weights.items()
        }

    def curvature_term(self, log_step: int) -> float:
        """What errors spread evenly over each cell raise the loss by, for a single loss term."""
        total = 0.0
        for name in self.unit_lattices:
            squares = self.curvatures[name].squares if self._pool.counts(name) else None
            if squares is not None:
                steps = self._lattice_at(name, log_step).scales(device=squares.device)
                total += float((squares * steps.square()).sum(dtype=torch.float64)) / 24
        return self._pool.total(total)[0]

    def quantize(self, log_step: int) -> QuantizedWeights:
        """With steps of this size. Weights whose points would not reach far enough are left out, and stay exact."""
        lattices = {name: self._lattice_at(name, log_step) for name in self.unit_lattices}
        before = {name: self._previous_points(name, one) for name, one in lattices.items()}
        same = {name: one for name, one in before.items() if one is not None}
        hold = fit_hysteresis(self.weights, lattices, same, MIN_RETAINED, MAX_HYSTERESIS, self._pool)
        found = {name: self._quantize_weight(name, one, before[name], hold) for name, one in lattices.items()}
        left_out = self._pool.anywhere(name for name, one in found.items() if one is None)
        points = {n: one for n, one in found.items() if one is not None and self._pool.title(n) not in left_out}
        values = {name: one.dequantize(self.weights[name].dtype) for name, one in points.items()}
        slope = curved = 0.0
        for name, made in values.items():
            error = as_matrix(made).to(torch.float32) - as_matrix(self.weights[name]).to(torch.float32)
            first, second = self.curvatures[name].rise_terms(error) if self._pool.counts(name) else (0.0, 0.0)
            slope, curved = slope + first, curved + second
        slope, curved = self._pool.total(slope, curved)
        titles = dict.fromkeys((*map(self._pool.title, self.unit_lattices), *sorted(left_out)))
        return QuantizedWeights(
            log_step, points, slope, curved, hold, tuple(one for one in titles if one in left_out), values
        )

    def bits(self, log_step: int) -> float:
        """What its points cost, about: the entropy of the differences in a part of them."""
        codes = {name: self._sample_codes(name, self._lattice_at(name, log_step)) for name in self.unit_lattices}
        return self._pool.bits(codes, self.weights)

    def _quantize_weight(
        self, name: str, lattice: Lattice, previous: PreviousPoints | None, hysteresis: float
    ) -> LatticeTensor | None:
        x = self.weights[name]
        if name in self._stochastic:
            return points_in_range(self._stochastic[name].quantize(x, lattice), x.dtype)
        return quantize_weight(x, lattice, previous, hysteresis)

    def _previous_points(self, name: str, lattice: Lattice) -> PreviousPoints | None:
        """None of weights that are not held, but rounded by chance."""
        return (
            None
            if name in self._stochastic
            else PreviousPoints.from_reference(name, self.weights[name], lattice, self._reference)
        )

    def _lattice_at(self, name: str, log_step: int) -> Lattice:
        """Steps that were capped once are not capped again: a deviation that has changed a little would change them."""
        kept = name in self._inherited and self._parent_log_step is not None and log_step <= self._parent_log_step
        made = rescale(self.unit_lattices[name], log_step, math.inf if kept else self._max_steps[name])
        return self._stochastic[name].keep_steps(made) if name in self._stochastic else made

    def _sample_codes(self, name: str, lattice: Lattice) -> Tensor:
        """Differences of points, of some rows."""
        x = self.weights[name]
        every = self._pool.rows(name, x, _BITS_SAMPLE)
        steps = replace(lattice, rows=lattice.rows[every]).scales(device=x.device)
        codes = (as_matrix(x)[every].to(torch.float32) / steps).round()
        held = None if self._reference is None else self._reference.get_like(name, tuple(x.shape), x.dtype)
        if held is not None:
            codes = codes - (as_matrix(held)[every].to(x.device, torch.float32) / steps).round()
        return codes

    def _assumed_curvature(self, name: str, weight: Tensor, count: int) -> Curvature:
        """Where nothing is known of any of so many weights: a rise by the share of their variances that is lost.

        What that is in the loss's own unit, only a measurement can say; then `terms` is the factor between the two.
        """
        share = 1.0 / (self._pool.deviation(name, weight) ** 2 * self._pool.numel(name, weight) * count)
        return Curvature(torch.full((1, 1), share, device=weight.device).expand(as_matrix(weight).shape))

    def _inherited_lattice(self, name: str, weight: Tensor, parent_log_step: int | None) -> Lattice | None:
        """The steps of the checkpoint before, as of one standard deviation then."""
        held = None if self._reference is None or parent_log_step is None else self._reference.quantized.get(name)
        if (
            not isinstance(held, LatticeTensor)
            or parent_log_step is None
            or not is_linear(held, weight)
            or not self._pool.inherits(name)
        ):
            return None
        return rescale(held.lattice, -parent_log_step)


def to_log_step(multiplier: float) -> int:
    """A number of standard deviations, in eighths of an octave."""
    return round(math.log2(multiplier) * STEPS_PER_OCTAVE)


def from_log_step(log_step: int) -> float:
    return float(2.0 ** (log_step / STEPS_PER_OCTAVE))


def is_linear(points: LatticeTensor, weight: Tensor) -> bool:
    """Whether these are points that the next ones of `weight` can lie on."""
    return points.codes.shape == weight.shape and points.lattice.spacing == "linear"


def _is_too_coarse(lattice: Lattice, fresh: Lattice | None) -> bool:
    """Whether they are, in the mean of their logarithms."""
    if fresh is None:
        return False
    means = (sum(float(side.float().mean()) for side in (one.rows, one.columns)) for one in (lattice, fresh))
    before, now = means
    return before > now + MAX_STEP_EXCESS
