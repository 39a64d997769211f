"""Step sizes of the lattices of weights, and the weights of one state quantized with any step size."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import humanize
from shrinkpoint.codec.lattice import (
    MAX_SCALE_EXPONENT,
    STEPS_PER_OCTAVE,
    Lattice,
    LatticeTensor,
    as_matrix,
    scale_counts,
)
from shrinkpoint.codec.parallel import map_tensors
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, QuantizedTensor, Reference, RowSample, tensor_rows
from shrinkpoint.device.reads import Reads, copy_together
from shrinkpoint.errors import warn_user
from shrinkpoint.quantize.lattice import quantize_with_feedback
from shrinkpoint.quantize.layer_types import EMBEDDING, HEAD, layer_type_from_name
from shrinkpoint.schemes.fisher import rounding
from shrinkpoint.schemes.fisher.curvature import Curvature, GlobalWeights, exponent_bits, total_entropy_bits
from shrinkpoint.schemes.fisher.feedback import FeedbackFactors
from shrinkpoint.schemes.fisher.rounding import (
    Hysteresis,
    PreviousPoints,
    choose_stochastic_rounding,
    points_in_range,
    quantize_weight,
)
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState

ROW_COL_EXPONENT = 0.25
"""The power of the squared gradients by which steps fall between rows and columns. 1/2 would be right if a step cost
bits by its logarithm. If what is coded is whether a weight has left its cell, it costs by its inverse: 1/3; 1/4
measured best."""
TENSOR_EXPONENT = 1 / 3
"""The same between tensors."""
PROBED_EXPONENT = 1 / 2
"""The same where curvature was probed: such checkpoints are mostly keyframes, and a step costs by its logarithm."""
MAX_STEP_STD = 2.0
"""The largest mean step of a row, in standard deviations of its tensor: above, little but signs remains."""
MAX_STEP_RATIO = 8.0
"""The largest mean step of a row, relative to the step size that is asked for. A bias before a batch normalization has
no gradient in training, and changes the outputs in evaluation: its steps must shrink with those of others."""
FEEDBACK_MAX_STEP_STD = 6.0
"""The same where errors are fed back: the sum over many weights then says what each of them no longer does."""
SENSITIVE_STEP = 0.25
"""The relative step of tensors whose values matter more, or likely do: vectors (biases, gains), which are few;
embeddings and heads if nothing is known of any weight; a weight if nothing is known of it alone, unless the rise of the
loss is measured and the optimizer trains it."""
MIN_RELATIVE_CURVATURE = 1e-4
"""The least mean square of a row or column, relative to that of its tensor, so that every step is bounded."""


def step_scale(
    name: str,
    weight: Tensor,
    curvature: Curvature,
    reference_curvature: float,
    layer_types: Mapping[str, str],
    *,
    is_measured: bool = False,
) -> float:
    """The step of a weight relative to that of others, by its kind and by how little is known of it.

    Args:
        name: of the global tensor.
        reference_curvature: see `make_lattice`; 0 if nothing is known of any weight.
        layer_types: by name of a weight; missing ones are guessed from the name.
        is_measured: the rise of the loss decides the steps of all weights.
    """
    if weight.dim() < 2:
        return SENSITIVE_STEP
    if reference_curvature > 0:
        is_trained = curvature.first is not None  # Muon's weights beside AdamW's have a first moment alone
        return 1.0 if curvature.mean > 0 or (is_measured and is_trained) else SENSITIVE_STEP
    layer_type = layer_types.get(name, layer_type_from_name(name, weight.dim()))
    return SENSITIVE_STEP if layer_type in (EMBEDDING, HEAD) else 1.0


def make_lattice(
    shape: tuple[int, ...], curvature: Curvature, reference_curvature: float, seed: int, std: float
) -> Lattice | None:
    """The lattice of a weight: steps of one standard deviation, smaller where the loss is more sensitive.

    Args:
        shape: of the weight.
        reference_curvature: the mean squared gradient of a tensor that gets steps of `std`.
        std: the standard deviation of the weight, times its `step_scale`.

    Returns:
        None if the weight does not vary.
    """
    if not 0 < std < math.inf:
        return None
    rows, columns = scale_counts("linear", shape, curvature.num_rows(shape))
    level = _mean_log2_step(curvature, reference_curvature, std)
    by_row, by_column = (torch.zeros(count, dtype=torch.float32) for count in (rows, columns))
    if rows > 1:
        by_row, by_column = (
            _log_step_profile(curvature.mean_along(axis), count) for axis, count in ((1, rows), (0, columns))
        )
    low, high = -MAX_SCALE_EXPONENT // 2, MAX_SCALE_EXPONENT // 2
    row_exponents, column_exponents = (
        exponents.round().clamp(low, high).to(torch.int16).cpu()
        for exponents in ((by_row + level) * STEPS_PER_OCTAVE, by_column * STEPS_PER_OCTAVE)
    )
    return Lattice("linear", row_exponents, column_exponents, seed=seed)


def _mean_log2_step(curvature: Curvature, reference_curvature: float, std: float) -> float:
    """log2 of the geometric mean of the steps of a weight; arguments as of `make_lattice`."""
    power = PROBED_EXPONENT if curvature.probed else TENSOR_EXPONENT
    is_known = curvature.mean > 0 and reference_curvature > 0
    return math.log2(std) - (power * math.log2(curvature.mean / reference_curvature) if is_known else 0.0)


def _log_step_profile(means: Tensor | None, count: int) -> Tensor:
    """log2 of the steps along an axis, given the means of squares along it (None: constant); 0 on average."""
    if means is None:
        return torch.zeros(count, dtype=torch.float32)
    means = means.clamp(min=float(means.mean()) * MIN_RELATIVE_CURVATURE)
    if not bool((means > 0).all()):
        return torch.zeros_like(means)
    logs = means.log2() * -ROW_COL_EXPONENT
    return logs - logs.mean()


def weight_dither_seed(global_name: str, lossy_restores: int, seed: int) -> int:
    """The dither seed of a weight: 0 (no dither) before the first restore, and another one after each."""
    if lossy_restores == 0:
        return 0
    return zlib.crc32(f"{seed}/{lossy_restores}/{global_name}".encode()) or 1


def rescale(lattice: Lattice, log_step: int, max_step: float = math.inf) -> Lattice:
    """The lattice with its steps multiplied by 2 ** (log_step / 8), but no row's mean step above `max_step`."""
    rows = lattice.rows.numpy() + log_step  # numpy: they are short
    if 0 < max_step < math.inf:
        np.minimum(rows, math.floor(math.log2(max_step) * STEPS_PER_OCTAVE), out=rows)
    return Lattice(lattice.spacing, torch.from_numpy(rows), lattice.columns, lattice.step, lattice.seed)


MAX_STEP_EXCESS = STEPS_PER_OCTAVE
"""By how many eighths of an octave inherited steps may exceed those that a weight would get now. They exceed them more
if it has shrunk since, or was saved while it was far too large; then they would round it away."""
_MAX_UNBOUNDED_LEVEL = 40  # octaves of a mean step up to which no row's step is at the end of the range of exponents
_NEAR_CONSTANT = 100.0  # standard deviations from 0, where codes may not reach
_BITS_SAMPLE = 1 << 14
"""Values of each weight from which bits are estimated, about."""


@dataclass(frozen=True)
class QuantizedWeights:
    """The weights of one state, quantized with one step size.

    Attributes:
        log_step: the step size in eighths of an octave: 0 is one standard deviation, in the geometric mean over all
            weights.
        points: this rank's points, or its differences to `bases`, by local name.
        slope_term, curvature_term: the two terms of the predicted rise; the second one for a single loss term, and 0
            if it was not asked for.
        hysteresis: in steps; see `rounding.quantize_weight`.
        left_out: global names of weights that stay exact, because points do not reach as far as they do.
        dtypes: of the weights, by local name.
        bases: the values that differences are added to, by local name.
    """

    log_step: int
    points: Mapping[str, QuantizedTensor] = field(repr=False)
    slope_term: float
    curvature_term: float
    hysteresis: float
    left_out: tuple[str, ...] = ()
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict, repr=False)
    bases: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def mirrored_values(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values with the opposite errors: as far from the weights on the other side.

        Args:
            weights: that were quantized, by local name.
        """
        return {name: (2 * weights[name].double() - x.double()).to(x.dtype) for name, x in self.values.items()}

    @property
    def values(self) -> dict[str, Tensor]:
        """The decoded points, in the weights' dtypes and on their devices; computed by every access."""
        return {name: x.dequantize(self.dtypes[name], self.bases.get(name)) for name, x in self.points.items()}


def reference_curvature(weights: GlobalWeights, curvatures: Mapping[str, Curvature]) -> float:
    """The geometric mean of the curvature over all weights of all ranks, 0 if none is known; a collective."""
    reports = weights.tensors.reduce_primary({n: c.mean for n, c in curvatures.items()}, lambda ranks: ranks[0])
    known = [(reports[name], x.numel()) for name, x in weights.templates.items() if reports.get(name, 0.0) > 0]
    total = sum(numel for _, numel in known)
    return math.exp(sum(numel * math.log(mean) for mean, numel in known) / total) if total else 0.0


class Candidates(Protocol):
    """Weights of one state, to be quantized with any step size; attributes and methods as of `StepCandidates`."""

    weights: dict[str, Tensor]
    curvatures: dict[str, Curvature]
    without_feedback: set[str]

    def quantize(self, log_step: int) -> QuantizedWeights: ...

    def lattice_starts(self, quantized: QuantizedWeights) -> dict[str, RowSample]: ...


class StepCandidates:
    """The weights of one state, to be quantized with any step size. All methods are collectives.

    Args:
        weights: finite.
        curvatures: of each local weight, by name.
        reference: what a reader decoded of the parent checkpoint; None: nothing. One that is no base gives steps alone:
            a keyframe has neither hysteresis nor an origin.
        parent_log_step: the step size of that checkpoint; None if unknown, or not to be kept.
        lossy_restores: how often the weights were restored with a loss.
        seed: of the dither.
        layer_types: types of layers by name of a weight; missing ones are guessed from the name.
        starts: rows of the weights as they were when their lattices began in the chain, by local name.
        factors: for rounding with error feedback; weights with points in the parent checkpoint are rounded without.
        is_measured: the rise of the loss decides the steps.

    Attributes:
        weights: local weights that have a lattice, by name.
        unit_lattices: their lattices at `log_step` 0, by name.
        curvatures: as given; if nothing is known of any weight, assumed ones.
        no_curvature: nothing is known of any weight, so that a predicted rise has no unit.
        without_feedback: weights with feedback that were rounded without, because their factors were of no use.
    """

    def __init__(
        self,
        weights: GlobalWeights,
        curvatures: Mapping[str, Curvature],
        reference: Reference | None,
        parent_log_step: int | None,
        lossy_restores: int,
        seed: int,
        layer_types: Mapping[str, str] | None = None,
        starts: Mapping[str, RowSample] | None = None,
        factors: FeedbackFactors | None = None,
        *,
        is_measured: bool = False,
    ) -> None:
        self._factors: FeedbackFactors | dict[str, Tensor | None] = {} if factors is None else factors
        self.without_feedback = set[str]()
        self._global, self._parent_log_step = weights, parent_log_step
        self._quantized = {} if reference is None else reference.quantized
        self._base = reference if reference is not None and reference.is_base else None
        self._global_names = global_names = weights.tensors.global_names
        self._shards = weights.tensors.local_shards
        self._std = {name: weights.std[global_names[name]] for name in weights.local}
        self._starts = starts or {}
        typical = reference_curvature(weights, curvatures)
        types = {global_names[name]: layer_type for name, layer_type in (layer_types or {}).items()}
        scales, seeds = dict[str, float](), dict[str, int]()
        for name, weight in weights.local.items():
            global_name, shard, known = global_names[name], self._shards[name], curvatures[name]
            scales[name] = step_scale(global_name, weight, known, typical, types, is_measured=is_measured)
            seeds[name] = weight_dither_seed(global_name, lossy_restores, seed)
            seeds[name] = shard.spec.dither_seed(seeds[name], shard.sizes)
        inherited = self._inherited_lattices()

        @cache
        def make_fresh(name: str) -> Lattice | None:
            """This rank's part of the lattice that a weight gets if it inherits none."""
            shard, std = self._shards[name], self._std[name] * scales[name]
            lattice = make_lattice(shard.spec.global_shape, curvatures[name], typical, 0, std)
            return lattice and replace(shard.spec.slice_lattice(lattice, shard.sizes), seed=seeds[name])

        def is_too_coarse(name: str) -> bool:
            lattice, std = inherited[name], scales[name] * self._std[name]
            if name in weights.tensors.whole and _is_fine(lattice, curvatures[name], typical, std):
                return False  # without making a fresh one, which takes a logarithm for each row and column
            fresh = make_fresh(name)
            return fresh is not None and _mean_exponent(lattice) > _mean_exponent(fresh) + MAX_STEP_EXCESS

        self._stochastic = choose_stochastic_rounding(weights, inherited.keys(), seeds, reference)
        too_coarse = weights.tensors.union(
            name for name in inherited if name not in self._stochastic and is_too_coarse(name)
        )
        self._inherited = {name for name in inherited if global_names[name] not in too_coarse}
        self.unit_lattices: dict[str, Lattice] = {}
        for name in weights.local:
            lattice = inherited[name] if name in self._inherited else make_fresh(name)
            if lattice is not None and name in self._inherited and name not in self._stochastic:
                lattice = replace(lattice, seed=seeds[name])
            if lattice is not None:
                self.unit_lattices[name] = lattice
        self.weights = {name: weights.local[name] for name in self.unit_lattices}
        self.no_curvature = typical <= 0
        self.curvatures = dict(curvatures)
        if self.no_curvature:
            self.curvatures = {name: self._assumed_curvature(name, weight) for name, weight in self.weights.items()}
        self._last_lattices: tuple[int | None, Mapping[str, Lattice]] = None, {}
        self._scaled_std = {name: scales[name] * self._std[name] for name in self.weights}

    def curvature_term(self, log_step: int) -> float:
        """The rise, for a single loss term, that errors uniform in each cell would cause at this step size."""
        sums = dict[str, Tensor]()
        lattices = {n: x for n, x in self._lattices_at(log_step).items() if n in self._global.tensors.primary}
        sides = [side for lattice in lattices.values() for side in (lattice.rows, lattice.columns)]
        squared = torch.exp2(torch.cat(sides).double() / 4).split([len(side) for side in sides]) if sides else ()
        for index, name in enumerate(lattices):
            rows, columns = (side.to(self.weights[name].device) for side in squared[2 * index : 2 * index + 2])
            if (part := self.curvatures[name].weighted_sum(rows, columns)) is not None:
                sums[name] = part
        total = math.fsum(float(part) / 24 for part in copy_together(sums).values())
        return self._global.tensors.collectives.sum_over_ranks(total)[0]

    def quantize(
        self, log_step: int, *, with_curvature: bool = True, max_hysteresis: float = math.inf
    ) -> QuantizedWeights:
        """Quantize with steps of this size; weights that codes do not reach as far as are left out.

        Args:
            with_curvature: compute the curvature term; on all ranks or on none.
            max_hysteresis: in steps, from 1/2 (rounding to the nearest) to `rounding.MAX_HYSTERESIS`.
        """
        tensors = self._global.tensors
        lattices = dict(self._lattices_at(log_step))
        comparable: dict[str, PreviousPoints] = {}
        for name, lattice in lattices.items():
            if name not in self._stochastic:  # which has no hysteresis
                weight, start = self.weights[name], self._starts.get(name)
                previous = PreviousPoints.from_reference(name, weight, lattice, self._base, start)
                if previous is not None:
                    comparable[name] = previous
        lattices |= {name: previous.points.lattice for name, previous in comparable.items()}  # equal, with their forms
        largest = min(max_hysteresis, rounding.MAX_HYSTERESIS)
        hysteresis = rounding.fit_hysteresis(self._global, comparable, rounding.MIN_RETAINED, largest)
        results = map_tensors(
            lambda name, threads: self._quantize_weight(
                name, lattices[name], comparable.get(name), hysteresis, threads, with_curvature=with_curvature
            ),
            {name: self.weights[name] for name in lattices},
        )
        left_out = tensors.union(name for name, result in results.items() if result is None)
        accepted = {
            name: result
            for name, result in results.items()
            if result is not None and self._global_names[name] not in left_out
        }
        points = {name: weight_points for name, (weight_points, _) in accepted.items()}
        terms = [weight_terms for name, (_, weight_terms) in accepted.items() if name in self._global.tensors.primary]
        slope, curvature = tensors.collectives.sum_over_ranks(
            sum(slope for slope, _ in terms), sum(term for _, term in terms)
        )
        names = dict.fromkeys((*(self._global_names[name] for name in self.unit_lattices), *sorted(left_out)))
        ordered = tuple(name for name in names if name in left_out)
        dtypes = {name: self.weights[name].dtype for name in points}
        return QuantizedWeights(log_step, points, slope, curvature, hysteresis.threshold, ordered, dtypes)

    def lattice_starts(self, quantized: QuantizedWeights) -> dict[str, RowSample]:
        """Rows of all weights as they were when the lattices of their points began in the chain, by local name.

        Those of weights with stochastic rounding, which have neither hysteresis nor a gain, are left out.
        """
        starts, fresh = dict[str, RowSample](), dict[str, tuple[Tensor, slice | None]]()
        for name, points in quantized.points.items():
            if name not in self._stochastic and isinstance(points, LatticeTensor):
                if points.origin is None:
                    fresh[name] = self.weights[name], self._shards[name].spec.sampled_rows(MAX_SAMPLED_VALUES)
                else:
                    starts[name] = self._starts[name]
        return starts | RowSample.from_tensors(fresh)

    def bits(self, log_step: int) -> float:
        """The estimated size of the points in bits: the entropy of their differences to the parent's, on a sample."""
        codes = {name: self._sample_codes(name, lattice) for name, lattice in self._lattices_at(log_step).items()}
        tensors = self._global.tensors
        fresh = [name for name in self.unit_lattices if self._base is None or name not in self._inherited]
        return exponent_bits(tensors, fresh) + total_entropy_bits(tensors, codes, are_sampled=True)

    def _quantize_weight(
        self,
        name: str,
        lattice: Lattice,
        previous: PreviousPoints | None,
        hysteresis: Hysteresis,
        threads: int,
        *,
        with_curvature: bool,
    ) -> Reads[tuple[LatticeTensor, tuple[float, float]] | None]:
        """The points of a weight, and the slope term and the curvature term of the rise that their errors cause."""
        weight, curvature = self.weights[name], self.curvatures[name]
        if name in self._stochastic:
            points = points_in_range(self._stochastic[name].quantize(weight, lattice), weight.dtype)
            if points is None:
                return None
            return points, curvature.rise_terms(weight, points, threads, with_curvature=with_curvature)
        if name in self._factors and previous is None:
            points = self._quantize_with_feedback(name, lattice, threads)
            if points is not None:
                return points, curvature.rise_terms(weight, points, threads, with_curvature=with_curvature)
        weights = curvature.error_weights(with_curvature=with_curvature)
        gain = hysteresis.gains.get(self._global_names[name], 1.0)
        measured = weight, lattice, previous, hysteresis.threshold, gain, weights, threads
        result = yield from quantize_weight.together(*measured)
        if result is None:
            return None
        return result[0], curvature.rise_of_errors(result[1], with_curvature=with_curvature)

    def _quantize_with_feedback(self, name: str, lattice: Lattice, threads: int) -> LatticeTensor | None:
        """The points of a weight whose errors cancel in its layer's outputs; None if that is not possible."""
        factor, weight = self._factors[name], self.weights[name]
        if lattice.rows.numel() != as_matrix(weight).shape[0]:
            factor = None  # it is of other columns
        points = None if factor is None else quantize_with_feedback(weight, lattice, factor, threads=threads)
        points = points_in_range(points, weight.dtype)
        if points is None:
            self.without_feedback.add(name)
        return points

    def _lattices_at(self, log_step: int) -> Mapping[str, Lattice]:
        """All lattices at a step size; those that were asked for last are kept."""
        if self._last_lattices[0] != log_step:
            self._last_lattices = log_step, {name: self._lattice_at(name, log_step) for name in self.unit_lattices}
        return self._last_lattices[1]

    def _lattice_at(self, name: str, log_step: int) -> Lattice:
        """The lattice at a step size. Inherited steps are not capped again: a slightly new std would change them."""
        is_inherited = name in self._inherited and self._parent_log_step is not None
        max_step = math.inf
        if not is_inherited or log_step > (self._parent_log_step or 0):
            largest = FEEDBACK_MAX_STEP_STD if name in self._factors else MAX_STEP_STD
            max_step = min(largest, MAX_STEP_RATIO * from_log_step(log_step)) * self._scaled_std[name]
        lattice = rescale(self.unit_lattices[name], log_step, max_step)
        return self._stochastic[name].keep_steps(lattice) if name in self._stochastic else lattice

    def _sample_codes(self, name: str, lattice: Lattice) -> Tensor:
        """Differences between codes and the parent's values on the same lattice, in a sample of the rows."""
        weight, rows = self.weights[name], self._shards[name].spec.sampled_rows(_BITS_SAMPLE)
        steps = lattice.row_steps(tuple(weight.shape), rows, weight.device)
        codes = (as_matrix(weight)[rows].to(torch.float32) / steps).round()
        if self._base is not None and self._base.has_like(name, tuple(weight.shape), weight.dtype):
            parent = tensor_rows(self._base.tensors, name, rows)
            codes = codes - (parent.to(weight.device, torch.float32) / steps).round()
        return codes

    def _assumed_curvature(self, name: str, weight: Tensor) -> Curvature:
        """A curvature if none is known: the rise is the share of the weights' variances that is lost.

        In the loss's own unit, that is known only from a measurement; `num_terms` is then the factor between the two.
        """
        count = len(self._global.templates)
        share = 1.0 / (self._std[name] ** 2 * self._shards[name].spec.global_numel * count)
        squares = torch.full((1, 1), share, dtype=torch.float32, device=weight.device)
        return Curvature(squares.expand(as_matrix(weight).shape))

    def _inherited_lattices(self) -> dict[str, Lattice]:
        """The parent's lattices, rescaled to `log_step` 0, of weights that have such in all their shards; by name."""
        points = {
            name: parent
            for name, weight in self._global.local.items()
            if isinstance(parent := self._quantized.get(name), LatticeTensor)
            and parent.codes.shape == weight.shape
            and parent.lattice.spacing == "linear"
        }
        inheriting = self._global.tensors.tensors_where_all({name: name in points for name in self._global.local})
        if self._parent_log_step is None:
            return {}
        return {
            name: rescale(parent.lattice, -self._parent_log_step)
            for name, parent in points.items()
            if self._global_names[name] in inheriting
        }


def warn_of_unreached(state: FlatState, tensors: GlobalTensors, global_names: Collection[str]) -> None:
    """Warns of weights that no points reach, but for those that hardly differ from a constant, as gains of norms do.

    Steps that follow how far these vary do not reach from 0 to where they are: that is no sign of a diverging training.
    """
    constants = set()
    for name, weight in state.tensors.items():
        if tensors.global_names[name] in global_names and weight.numel() > 1:
            deviation, mean = (float(x) for x in torch.std_mean(weight.detach().float()))
            if deviation * _NEAR_CONSTANT < abs(mean) < math.inf:
                constants.add(tensors.global_names[name])
    if far := [name for name in global_names if name not in constants]:
        text = f"weights too large for the grid of these steps stay exact: {humanize.names(far)}"
        warn_user(f"{text}. Check whether training has diverged")


def to_log_step(multiplier: float) -> int:
    """A number of standard deviations as a step size in eighths of an octave."""
    return round(math.log2(multiplier) * STEPS_PER_OCTAVE)


def from_log_step(log_step: int) -> float:
    """A step size in standard deviations."""
    return float(2.0 ** (log_step / STEPS_PER_OCTAVE))


def _is_fine(lattice: Lattice, curvature: Curvature, reference_curvature: float, std: float) -> bool:
    """True if an inherited lattice of a whole weight is not too coarse, by the mean step that a fresh one would have.

    Rounding moves the mean exponent of a fresh one's rows, and that of its columns, by at most a half. False: unknown.
    """
    if not 0 < std < math.inf or curvature.marginals is not None:
        return False
    level = _mean_log2_step(curvature, reference_curvature, std)
    return (
        abs(level) < _MAX_UNBOUNDED_LEVEL and _mean_exponent(lattice) < level * STEPS_PER_OCTAVE + MAX_STEP_EXCESS - 2
    )


def _mean_exponent(lattice: Lattice) -> float:
    """The geometric mean of a lattice's steps, in eighths of an octave."""
    return sum(float(side.mean(dtype=torch.float32)) for side in (lattice.rows, lattice.columns))
