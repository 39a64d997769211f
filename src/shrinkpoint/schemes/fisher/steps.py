"""Step sizes of the lattices of weights, and the point that each weight gets."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_SCALE_EXPONENT, STEPS_PER_OCTAVE, Lattice, LatticeTensor, scale_counts
from shrinkpoint.codec.reference import Reference
from shrinkpoint.quantize.entropy import weight_std
from shrinkpoint.quantize.lattice import quantize_to_lattice
from shrinkpoint.quantize.layer_types import EMBEDDING, HEAD, layer_type_from_name
from shrinkpoint.schemes.fisher.curvature import Curvature

ROW_COL_EXPONENT = 0.25
"""By which power of the squared gradients steps fall: 1/2 would be right where a step costs bits by its logarithm.
Where what is coded is whether a weight has left its cell, it costs by its inverse: 1/3; and 1/4 measured best."""
TENSOR_EXPONENT = 1 / 3
"""The same between tensors."""
PROBED_EXPONENT = 1 / 2
"""The same where the curvature was probed: such checkpoints mostly stand alone, and a step costs by its logarithm."""
MAX_STEP_STD = 2.0
"""Standard deviations of its tensor that a row's steps have at most: above, hardly anything is left of it but signs."""
SENSITIVE_STEP = 0.25
"""Steps beside others, where it is known or likely that each value matters more: vectors (biases, gains), of which
there are few; embeddings and heads, where nothing is known of any weight; weights of which alone nothing is known."""
MIN_RELATIVE_CURVATURE = 1e-4
"""Of the mean squared gradient: rows and columns with less count as having that, so that no step is without bound."""


def geometric_mean_curvature(curvatures: Mapping[str, Curvature], weights: Mapping[str, Tensor]) -> float:
    """The geometric mean, over all weights of which something is known, of their tensors' mean squared gradients."""
    means = {name: one.mean for name, one in curvatures.items()}
    counts = {name: weights[name].numel() for name, mean in means.items() if mean > 0}
    total = sum(counts.values())
    return math.exp(sum(count * math.log(means[name]) for name, count in counts.items()) / total) if total else 0.0


def step_scale(
    name: str, weight: Tensor, curvature: Curvature, reference_curvature: float, layer_types: Mapping[str, str]
) -> float:
    """Steps of a weight beside those of others, by what is not known of it.

    Args:
        reference_curvature: see `lattice_of`; 0: nothing is known of any weight.
        layer_types: of layers, by name of a weight, where there is more to go by than the name.
    """
    if weight.dim() < 2:
        return SENSITIVE_STEP
    if reference_curvature > 0:
        return 1.0 if curvature.mean > 0 else SENSITIVE_STEP
    return (
        SENSITIVE_STEP if layer_types.get(name, layer_type_from_name(name, weight.dim())) in (EMBEDDING, HEAD) else 1.0
    )


def make_lattice(
    weight: Tensor,
    curvature: Curvature,
    reference_curvature: float,
    seed: int,
    scale: float = 1.0,
    std: float | None = None,
) -> Lattice | None:
    """Steps for a weight: one standard deviation, but smaller where the loss is more sensitive, and larger where less.

    Args:
        reference_curvature: squared gradients of a tensor that gets one standard deviation.
        scale: see `step_scale`.
        std: the weight's standard deviation, where that is known; then only the shape of `weight` counts.

    Returns:
        None where the weight does not vary.
    """
    std = (weight_std(weight) if std is None else std) * scale
    if not 0 < std < math.inf:
        return None
    rows, columns = scale_counts("linear", tuple(weight.shape))
    power = PROBED_EXPONENT if curvature.probed else TENSOR_EXPONENT
    level = math.log2(std) - (
        power * math.log2(curvature.mean / reference_curvature)
        if curvature.mean > 0 and reference_curvature > 0
        else 0.0
    )
    by_row, by_column = torch.zeros(rows), torch.zeros(columns)
    if rows > 1:
        by_row, by_column = (
            _log_step_profile(curvature.mean_along(axis), count) for axis, count in ((1, rows), (0, columns))
        )
    exponents = (by_row + level) * STEPS_PER_OCTAVE, by_column * STEPS_PER_OCTAVE
    low, high = -MAX_SCALE_EXPONENT // 2, MAX_SCALE_EXPONENT // 2
    made = [one.round().clamp(low, high).to(torch.int16).cpu() for one in exponents]
    return Lattice("linear", made[0], made[1], seed=seed)


def _log_step_profile(means: Tensor | None, count: int) -> Tensor:
    """log2 of how steps vary along an axis of so many squares' means; 0 on average."""
    if means is None:
        return torch.zeros(count)
    means = means.clamp(min=float(means.mean()) * MIN_RELATIVE_CURVATURE)
    if not bool((means > 0).all()):
        return torch.zeros_like(means)
    logs = means.log2() * -ROW_COL_EXPONENT
    return logs - logs.mean()


@dataclass(frozen=True)
class PreviousPoints:
    """What a weight's points can be compared with.

    Attributes:
        codes: of the checkpoint before, on the same lattice.
        values: its values.
        original: the weight as it was in training then; None: nobody knows.
    """

    codes: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    original: Tensor | None = field(repr=False)

    @classmethod
    def from_reference(
        cls, name: str, weight: Tensor, lattice: Lattice, reference: Reference | None
    ) -> PreviousPoints | None:
        held = None if reference is None else reference.quantized.get(name)
        if (
            reference is None
            or not isinstance(held, LatticeTensor)
            or held.lattice != lattice
            or held.codes.shape != weight.shape
        ):
            return None
        original = reference.originals.get(name)
        kept = reference.tensors[name]
        return cls(held.codes, kept, original if original is not None and original.shape == weight.shape else None)


def quantize_weight(
    weight: Tensor, lattice: Lattice, previous: PreviousPoints | None, hysteresis: float
) -> LatticeTensor | None:
    """The nearest point; the one before where the weight is not further than `hysteresis` steps from it.

    Args:
        hysteresis: from 1/2, to the nearest, on. Weights that only shake then stay where they are, and a checkpoint
            is more
            of an average over time.

    Returns:
        None where points do not reach as far as the weight, or its dtype as far as the points.
    """
    return points_in_range(
        quantize_to_lattice(
            weight, lattice, previous_codes=None if previous is None else previous.codes, hysteresis=hysteresis
        ),
        weight.dtype,
    )


def points_in_range(points: LatticeTensor | None, dtype: torch.dtype) -> LatticeTensor | None:
    """None where a dtype does not reach as far as these points."""
    if points is not None and dtype == torch.float16 and not bool(points.dequantize(dtype).isfinite().all()):
        return None
    return points


def weight_dither_seed(name: str, lossy_restores: int, seed: int) -> int:
    """Of a weight's dither: none before the first restore, and another one after each."""
    if lossy_restores == 0:
        return 0
    return zlib.crc32(f"{seed}/{lossy_restores}/{name}".encode()) or 1


def rescale(lattice: Lattice, log_step: int, max_step: float = math.inf) -> Lattice:
    """Steps larger by so many eighths of an octave, but in no row's mean above `max_step`."""
    rows = lattice.rows + log_step
    if 0 < max_step < math.inf:
        rows = rows.clamp(max=math.floor(math.log2(max_step) * STEPS_PER_OCTAVE))
    return replace(lattice, rows=rows)
