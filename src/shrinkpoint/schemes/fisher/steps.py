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
from shrinkpoint.quantize.lattice import quantize_to_lattice
from shrinkpoint.quantize.layer_types import EMBEDDING, HEAD, layer_type_from_name
from shrinkpoint.schemes.fisher.curvature import Curvature

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
SENSITIVE_STEP = 0.25
"""The relative step of tensors whose values matter more, or likely do: vectors (biases, gains), which are few;
embeddings and heads if nothing is known of any weight; a weight if nothing is known of it alone."""
MIN_RELATIVE_CURVATURE = 1e-4
"""The least mean square of a row or column, relative to that of its tensor, so that every step is bounded."""


def geometric_mean_curvature(means: Mapping[str, float], numels: Mapping[str, int]) -> float:
    """The geometric mean of mean squared gradients over all values of the tensors for which they are known.

    Args:
        means: mean squared gradients by tensor; 0 if unknown.
        numels: numbers of values.

    Returns:
        0 if nothing is known of any tensor.
    """
    known = {name: mean for name, mean in means.items() if mean > 0}
    total = sum(numels[name] for name in known)
    return math.exp(sum(numels[name] * math.log(mean) for name, mean in known.items()) / total) if total else 0.0


def step_scale(
    name: str, weight: Tensor, curvature: Curvature, reference_curvature: float, layer_types: Mapping[str, str]
) -> float:
    """The step of a weight relative to that of others, by its kind and by how little is known of it.

    Args:
        name: of the global tensor.
        reference_curvature: see `make_lattice`; 0 if nothing is known of any weight.
        layer_types: by name of a weight; missing ones are guessed from the name.
    """
    if weight.dim() < 2:
        return SENSITIVE_STEP
    if reference_curvature > 0:
        return 1.0 if curvature.mean > 0 else SENSITIVE_STEP
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
    rows, columns = scale_counts("linear", shape)
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
    low, high = -MAX_SCALE_EXPONENT // 2, MAX_SCALE_EXPONENT // 2
    row_exponents, column_exponents = (
        exponents.round().clamp(low, high).to(torch.int16).cpu()
        for exponents in ((by_row + level) * STEPS_PER_OCTAVE, by_column * STEPS_PER_OCTAVE)
    )
    return Lattice("linear", row_exponents, column_exponents, seed=seed)


def _log_step_profile(means: Tensor | None, count: int) -> Tensor:
    """log2 of the steps along an axis, given the means of squares along it (None: constant); 0 on average."""
    if means is None:
        return torch.zeros(count)
    means = means.clamp(min=float(means.mean()) * MIN_RELATIVE_CURVATURE)
    if not bool((means > 0).all()):
        return torch.zeros_like(means)
    logs = means.log2() * -ROW_COL_EXPONENT
    return logs - logs.mean()


@dataclass(frozen=True)
class PreviousPoints:
    """The points of a weight in the parent checkpoint, on the lattice that it has now.

    Attributes:
        codes: integers, of the weight's shape.
        values: what a reader decoded, of the weight's shape and dtype.
        original: the weight in training at that save, before it was quantized; None if unknown.
    """

    codes: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    original: Tensor | None = field(repr=False)

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
        original = reference.originals.get(name)
        if original is not None and original.shape != weight.shape:
            original = None
        return cls(points.codes, reference.tensors[name], original)


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


def weight_dither_seed(global_name: str, lossy_restores: int, seed: int) -> int:
    """The dither seed of a weight: 0 (no dither) before the first restore, and another one after each."""
    if lossy_restores == 0:
        return 0
    return zlib.crc32(f"{seed}/{lossy_restores}/{global_name}".encode()) or 1


def rescale(lattice: Lattice, log_step: int, max_step: float = math.inf) -> Lattice:
    """The lattice with its steps multiplied by 2 ** (log_step / 8), but no row's mean step above `max_step`."""
    rows = lattice.rows + log_step
    if 0 < max_step < math.inf:
        rows = rows.clamp(max=math.floor(math.log2(max_step) * STEPS_PER_OCTAVE))
    return replace(lattice, rows=rows)
