"""Rounds weights to the points of a lattice: to the nearest, with hysteresis, or up and down at random."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, Lattice, LatticeTensor, as_matrix, dither
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, Reference
from shrinkpoint.quantize.lattice import (
    ErrorSums,
    ErrorWeights,
    hysteresis_sums,
    lattice_positions,
    quantize_with_errors,
)
from shrinkpoint.schemes.fisher.global_weights import GlobalWeights
from shrinkpoint.schemes.select import equal_elements
from shrinkpoint.tensors.dtypes import copy_to_host

_HYSTERESIS_LEVELS = 64


@dataclass(frozen=True)
class PreviousPoints:
    """The points of a weight in the parent checkpoint, on the lattice that it has now.

    Attributes:
        codes: integers, of the weight's shape.
        name: of the weight.
        reference: the parent checkpoint.
    """

    codes: Tensor = field(repr=False)
    name: str
    reference: Reference = field(repr=False)

    @classmethod
    def from_reference(
        cls, name: str, weight: Tensor, lattice: Lattice, reference: Reference | None
    ) -> PreviousPoints | None:
        """The points that `reference` has of a weight; None if there are none on this lattice."""
        points = None if reference is None else reference.quantized.get(name)
        if (
            reference is None
            or not isinstance(points, LatticeTensor)
            or points.lattice != lattice
            or points.codes.shape != weight.shape
        ):
            return None
        return cls(points.codes, name, reference)

    @property
    def lattice(self) -> Lattice:
        """The lattice as the parent checkpoint holds it."""
        points = self.reference.quantized[self.name]
        assert isinstance(points, LatticeTensor)
        return points.lattice

    def values(self, rows: slice) -> Tensor:
        """What a reader decoded of some rows of the weight, viewed as a matrix."""
        return self.reference.rows(self.name, rows)

    def originals(self, rows: slice) -> Tensor | None:
        """The same rows in training at that save, before the weight was quantized; None if they are unknown."""
        return self.reference.original_rows(self.name, tuple(self.codes.shape), rows)


def quantize_weight(
    weight: Tensor,
    lattice: Lattice,
    previous: PreviousPoints | None,
    hysteresis: float,
    weights: ErrorWeights | None = None,
    threads: int | None = None,
) -> tuple[LatticeTensor, ErrorSums] | None:
    """The nearest point of each value, or its previous one if that is at most `hysteresis` steps away; and the errors.

    Args:
        hysteresis: in steps, at least 1/2 (the nearest). Weights that only fluctuate then keep their points, and a
            checkpoint is more of an average over time.
        weights: of the errors; None: zero.
        threads: native threads; None: as many as torch uses.

    Returns:
        None if codes do not reach as far as the weight, or its dtype not as far as the points.
    """
    codes = None if previous is None else previous.codes
    result = quantize_with_errors(
        weight, lattice, weights or ErrorWeights(), previous_codes=codes, hysteresis=hysteresis, threads=threads
    )
    return None if result is None or points_in_range(result[0], weight.dtype) is None else result


def points_in_range(points: LatticeTensor | None, dtype: torch.dtype) -> LatticeTensor | None:
    """The same points; None if some of them are not finite in this dtype."""
    if points is not None and dtype == torch.float16 and not bool(points.dequantize(dtype).isfinite().all()):
        return None
    return points


def fit_hysteresis(
    weights: GlobalWeights,
    lattices: Mapping[str, Lattice],
    previous: Mapping[str, PreviousPoints],
    min_retained: float,
    max_hysteresis: float,
) -> float:
    """The largest hysteresis, in steps, that retains enough of the weights' progress; a collective.

    Progress is measured on a sample of the rows of each weight, for 64 thresholds at once.

    Args:
        lattices, previous: by local name.
        min_retained: the share of progress since the parent checkpoint that must remain.
        max_hysteresis: at most; at least 1/2, rounding to the nearest.
    """
    written, movement, has_sample = np.zeros(_HYSTERESIS_LEVELS + 1), 0.0, False
    for name, points in previous.items():
        rows = weights.sampled_rows(name, MAX_SAMPLED_VALUES)
        original = points.originals(rows) if weights.is_primary(name) else None
        if original is not None:
            matrix = as_matrix(weights.local[name])
            values, indices = matrix[rows], range(matrix.shape[0])[rows]
            values = values if values.is_cpu and values.is_contiguous() else copy_to_host(values)
            squared, parts = hysteresis_sums(
                values, lattices[name], points.values(rows), original, indices, max_hysteresis, _HYSTERESIS_LEVELS
            )
            movement, written, has_sample = movement + squared, written + parts, True
    reports = weights.tensors.all_gather((has_sample, movement, written.tolist()))
    if not any(has_any for has_any, *_ in reports):
        return 0.5
    moved = math.fsum(movement for _, movement, _ in reports)
    by_threshold = [math.fsum(parts) for parts in zip(*(parts for *_, parts in reports), strict=True)]
    low, high = 0, _HYSTERESIS_LEVELS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if math.fsum(by_threshold[middle:]) >= min_retained * moved else (low, middle)
    return 0.5 + (max_hysteresis - 0.5) * low / _HYSTERESIS_LEVELS


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
        values = parent.get_like(name, tuple(weight.shape), weight.dtype)
        if values is not None:
            roundings[name] = StochasticRounding(points, as_matrix(equal_elements(weight, values)), seeds[name])
    shares = weights.share_by_tensor(
        {name: (int(rounding.unchanged.sum()), rounding.unchanged.numel()) for name, rounding in roundings.items()}
    )
    return {
        name: rounding
        for name, rounding in roundings.items()
        if shares.get(weights.global_name(name), 0.0) >= MIN_UNCHANGED_SHARE
    }
