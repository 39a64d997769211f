"""Rounds weights to the points of a lattice: to the nearest, with hysteresis, or up and down at random."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, Lattice, LatticeTensor, as_matrix, dither, matrix_shape
from shrinkpoint.codec.reference import Reference, RowSample
from shrinkpoint.device.reads import Reading, Reads, copy_together
from shrinkpoint.quantize.lattice import (
    ErrorSums,
    ErrorWeights,
    are_near_first_points,
    lattice_positions,
    movement_sums,
    quantize_with_errors,
)
from shrinkpoint.schemes.fisher.curvature import GlobalWeights
from shrinkpoint.schemes.select import equal_elements

MIN_RETAINED = 0.93
"""The share of the weights' movement since the parent checkpoint that values must follow, with their gains.

At an equal rise of the loss 0.8 with smaller steps takes as many bits, and its worst rises are larger."""
MAX_HYSTERESIS = 0.6
"""The largest hysteresis, in steps, of a save without other reasons for less (`RunMemory.max_hysteresis`)."""
_HYSTERESIS_LEVELS = 64
_MIN_TOP = 0.51  # of the thresholds that are compared, in steps
_MAX_GAIN = 2.0
"""The largest gain of a weight: of one that has hardly moved, little is known."""
_GAINS_PER_UNIT = 64
_MAX_ROUNDING_ERROR = 0.501  # in steps, of what was rounded to the nearest


@dataclass(frozen=True)
class PreviousPoints:
    """The points of a weight in the parent checkpoint, on the lattice that it has now.

    Attributes:
        points: on that lattice; of the weight's shape.
        start: rows of the weight as it was when the lattice began in this chain, before it was quantized.
        originals: the same rows as they were at the save of the parent, before they were quantized.
    """

    points: LatticeTensor
    start: RowSample = field(repr=False)
    originals: Tensor = field(repr=False)

    @classmethod
    def from_reference(
        cls, name: str, weight: Tensor, lattice: Lattice, reference: Reference | None, start: RowSample | None
    ) -> PreviousPoints | None:
        """The points that `reference` has of a weight.

        Args:
            start: None if it is unknown.

        Returns:
            None if there are none on this lattice, or the lattice did not begin with `start`: after a save that failed.
        """
        points = None if reference is None else reference.quantized.get(name)
        if not isinstance(points, LatticeTensor) or points.lattice != lattice or points.codes.shape != weight.shape:
            return None
        if reference is None or start is None or start.shape != tuple(weight.shape):
            return None
        originals = reference.original_rows(name, start.shape, start.rows)
        if originals is None:
            return None
        rows = range(matrix_shape(start.shape)[0])[start.rows]
        is_start = are_near_first_points(points, start.values, rows, _MAX_ROUNDING_ERROR)
        return cls(points, start, originals) if is_start else None


@dataclass(frozen=True)
class Hysteresis:
    """Hysteresis: distance of weights from their previous points, and compensation for the movement that it loses.

    Attributes:
        threshold: in steps, at least 1/2.
        gains: of each weight that has previous points, by global name.
    """

    threshold: float = 0.5
    gains: Mapping[str, float] = field(default_factory=dict, repr=False)


@Reading
def quantize_weight(
    weight: Tensor,
    lattice: Lattice,
    previous: PreviousPoints | None,
    hysteresis: float,
    gain: float = 1.0,
    weights: ErrorWeights | None = None,
    threads: int | None = None,
) -> Reads[tuple[LatticeTensor, ErrorSums] | None]:
    """The nearest point of each value, or its previous one if that is at most `hysteresis` steps away; and the errors.

    Args:
        hysteresis: in steps, at least 1/2 (the nearest). Weights that only fluctuate then keep their points, and a
            checkpoint is more of an average over time.
        gain: of the weight, if it has previous points.
        weights: of the errors; None: zero.
        threads: native threads; None: as many as torch uses.

    Returns:
        None if codes do not reach as far as the weight, or its dtype not as far as the points.
    """
    result = yield from quantize_with_errors.together(
        weight,
        lattice,
        weights or ErrorWeights(),
        previous_codes=None if previous is None else previous.points.codes,
        hysteresis=hysteresis,
        origin=None if previous is None else previous.points.first_codes,
        gain=1.0 if previous is None else gain,
        threads=threads,
    )
    if result is not None and weight.dtype == torch.float16:
        are_finite = yield result[0].dequantize(weight.dtype).isfinite().all().to(torch.float64)
        return result if are_finite else None
    return result


def points_in_range(points: LatticeTensor | None, dtype: torch.dtype) -> LatticeTensor | None:
    """The same points; None if some of them are not finite in this dtype."""
    if points is not None and dtype == torch.float16 and not bool(points.dequantize(dtype).isfinite().all()):
        return None
    return points


def fit_hysteresis(
    weights: GlobalWeights,
    previous: Mapping[str, PreviousPoints],
    min_retained: float,
    max_hysteresis: float,
) -> Hysteresis:
    """The largest hysteresis by which checkpoints follow the weights' movement, and their gains; a collective.

    A weight's gain is `|d|^2 / <d', d>`, where d is its movement since its lattice began in the chain, and d' that of
    its points: times the gain, the points have moved as far along d as the weight has. It is measured on a sample of
    the rows of each weight, for 64 thresholds at once.

    Args:
        previous: by local name.
        min_retained: the share of the movement since the parent checkpoint that the values must follow with the gains,
            all weights together.
        max_hysteresis: in steps, at most; at least 1/2, rounding to the nearest.
    """
    matrices = {name: as_matrix(weights.local[name].detach()) for name in previous if name in weights.tensors.primary}
    rows = {name: matrix[previous[name].start.rows] for name, matrix in matrices.items()}
    rows |= copy_together({name: x for name, x in rows.items() if not (x.is_cpu and x.is_contiguous())})
    sums = {
        name: _movement_sums(values, range(len(matrices[name])), previous[name], max_hysteresis)
        for name, values in rows.items()
    }
    by_weight = weights.tensors.reduce_primary(
        sums, lambda ranks: ranks[0] if len(ranks) == 1 else [math.fsum(parts) for parts in zip(*ranks, strict=True)]
    )
    if not by_weight:
        return Hysteresis()
    table = np.array([*by_weight.values()])
    gained, (start, parent) = table[:, 0], np.split(table[:, 1:], 2, axis=1)
    (movement, before_start), (recent, before) = start[:, :2].T, parent[:, :2].T
    gains = _gains(movement[:, None], before_start[:, None] + start[:, 2:])
    retained = (gains * (parent[:, 2:] + before[:, None]) - gained[:, None]).sum(axis=0)
    low, high = 0, _HYSTERESIS_LEVELS if max_hysteresis > 0.5 else 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if retained[middle] >= min_retained * recent.sum() else (low, middle)
    threshold = 0.5 + (max_hysteresis - 0.5) * low / _HYSTERESIS_LEVELS
    return Hysteresis(threshold, dict(zip(by_weight, gains[:, low].tolist(), strict=True)))


def _movement_sums(values: Tensor, indices: range, previous: PreviousPoints, max_hysteresis: float) -> list[float]:
    """Inner products of the movement of a local weight and of its points.

    Args:
        values: the sampled rows of the weight, contiguous and in host memory.
        indices: of all rows.

    Returns:
        The movement since the parent checkpoint times that of the points before then, times the gain that they had;
        then the sums of `quantize.lattice.movement_sums` since the lattice began, and since the parent checkpoint.
    """
    start, points = previous.start, previous.points
    earlier, top = (start.values, previous.originals), max(max_hysteresis, _MIN_TOP)
    sums = movement_sums(values, points, earlier, indices[start.rows], top, _HYSTERESIS_LEVELS)
    before = sums[len(sums) // 2 + 1]
    return [before * points.gain, *sums]


def _gains(movement: NDArray[np.float64], written: NDArray[np.float64]) -> NDArray[np.float64]:
    """The gains by which what is written makes up for all of the movement; 1 where nothing is written."""
    gains = np.divide(movement, written, out=np.ones_like(written), where=written > 0)
    return np.round(np.clip(gains, 1.0, _MAX_GAIN) * _GAINS_PER_UNIT) / _GAINS_PER_UNIT


MIN_UNCHANGED_SHARE = 1 / 16
"""The least share of unchanged values. With fewer (a dead input), all others would be rounded worse for them."""


@dataclass(frozen=True)
class StochasticRounding:
    """Rounding of one weight with unchanged values.

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
        parent_codes = parent.codes.reshape(positions.shape).to(weight.device, torch.float32)
        codes = torch.where(self.unchanged & same_steps, parent_codes, codes)
        if not bool((codes.abs() <= MAX_LATTICE_CODE).all()):
            return None
        return LatticeTensor(codes.to(torch.int16).reshape(weight.shape), lattice).narrow()


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
        if not isinstance(points, LatticeTensor) or points.lattice.seed == seeds[name]:
            continue
        if parent.has_like(name, tuple(weight.shape), weight.dtype):
            values = points.points().dequantize(weight.dtype)  # what a gain has moved off its point is rounded
            shape = points.lattice.matrix_shape(tuple(weight.shape))
            roundings[name] = StochasticRounding(points, equal_elements(weight, values).reshape(shape), seeds[name])
    shares = weights.tensors.reduce_primary(
        {name: (int(rounding.unchanged.sum()), rounding.unchanged.numel()) for name, rounding in roundings.items()},
        lambda pairs: sum(unchanged for unchanged, _ in pairs) / max(1, sum(numel for _, numel in pairs)),
    )
    return {
        name: rounding
        for name, rounding in roundings.items()
        if shares.get(weights.tensors.global_names[name], 0.0) >= MIN_UNCHANGED_SHARE
    }
