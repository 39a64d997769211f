"""Rounds weights to the points of a lattice: to the nearest, with hysteresis, or up and down at random."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, Lattice, LatticeTensor, as_matrix, dither
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, Reference
from shrinkpoint.quantize.lattice import lattice_positions, quantize_to_lattice
from shrinkpoint.schemes.fisher.global_weights import GlobalWeights
from shrinkpoint.schemes.select import equal_elements


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

    def values(self, rows: slice) -> Tensor:
        """What a reader decoded of some rows of the weight, viewed as a matrix."""
        return self.reference.rows(self.name, rows)

    def originals(self, rows: slice) -> Tensor | None:
        """The same rows in training at that save, before the weight was quantized; None if they are unknown."""
        return self.reference.original_rows(self.name, tuple(self.codes.shape), rows)


def quantize_weight(
    weight: Tensor, lattice: Lattice, previous: PreviousPoints | None, hysteresis: float
) -> LatticeTensor | None:
    """The nearest point of each value, or its previous one if that is at most `hysteresis` steps away.

    Args:
        hysteresis: in steps, at least 1/2 (the nearest). Weights that only fluctuate then keep their points, and a
            checkpoint is more of an average over time.

    Returns:
        None if codes do not reach as far as the weight, or its dtype not as far as the points.
    """
    return points_in_range(
        quantize_to_lattice(
            weight, lattice, previous_codes=None if previous is None else previous.codes, hysteresis=hysteresis
        ),
        weight.dtype,
    )


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

    Progress is measured on a sample of the rows of each weight, by bisection.

    Args:
        lattices, previous: by local name.
        min_retained: the share of progress since the parent checkpoint that must remain.
        max_hysteresis: at most; at least 1/2, rounding to the nearest.
    """
    samples = []
    for name, points in previous.items():
        rows = weights.sampled_rows(name, MAX_SAMPLED_VALUES)
        original = points.originals(rows) if weights.is_primary(name) else None
        if original is not None:
            weight, lattice = weights.local[name], lattices[name]
            samples.append(
                _WeightSample.from_weight(weight, lattice, points.values(rows), original, rows, max_hysteresis)
            )
    if not any(weights.tensors.sum_over_ranks(len(samples))):
        return 0.5
    low, high = 0.5, max_hysteresis
    for _ in range(6):
        middle = (low + high) / 2
        progress = [sample.progress(middle) for sample in samples]
        retained, moved = weights.tensors.sum_over_ranks(
            sum(written for written, _ in progress), sum(moved for _, moved in progress)
        )
        low, high = (middle, high) if retained >= min_retained * moved else (low, middle)
    return low


@dataclass(frozen=True)
class _WeightSample:
    """Progress of some rows of a weight: what is written depends on hysteresis for few of the values only.

    Attributes:
        movement: the squared distance that training went since the parent checkpoint.
        written: how much of it is written with the largest hysteresis.
        offsets: distances from the previous points, in steps, of those values that are written with less of it only.
        gains: how much is written of these.
    """

    movement: float
    written: float
    offsets: Tensor
    gains: Tensor

    @classmethod
    def from_weight(
        cls,
        weight: Tensor,
        lattice: Lattice,
        decoded: Tensor,
        original: Tensor,
        sampled_rows: slice,
        max_hysteresis: float,
    ) -> _WeightSample:
        now = as_matrix(weight)[sampled_rows].to(torch.float32)
        decoded, original = (rows.to(weight.device, torch.float32) for rows in (decoded, original))
        steps = replace(lattice, rows=lattice.rows[sampled_rows]).scales(device=weight.device)
        movement = now - original
        offsets = (now - decoded) / steps
        gains = offsets.round() * steps * movement
        offsets = offsets.abs()
        always = offsets > max_hysteresis
        sometimes = (offsets > 0.5) & ~always
        written = float((gains * always).sum())
        return cls(float(movement.square().sum()), written, offsets[sometimes], gains[sometimes])

    def progress(self, hysteresis: float) -> tuple[float, float]:
        """(movement that is written, squared movement), each as a sum over all values."""
        return self.written + float((self.gains * (self.offsets > hysteresis)).sum()), self.movement


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
        values = parent.get_like(name, tuple(weight.shape), weight.dtype)
        if isinstance(points, LatticeTensor) and points.lattice.seed != seeds[name] and values is not None:
            roundings[name] = StochasticRounding(points, as_matrix(equal_elements(weight, values)), seeds[name])
    shares = weights.share_by_tensor(
        {name: (int(rounding.unchanged.sum()), rounding.unchanged.numel()) for name, rounding in roundings.items()}
    )
    return {
        name: rounding
        for name, rounding in roundings.items()
        if shares.get(weights.global_name(name), 0.0) >= MIN_UNCHANGED_SHARE
    }
