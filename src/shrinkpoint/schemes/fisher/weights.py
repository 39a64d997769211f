"""Weights on lattices: how large the steps are, and which point a weight gets."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec import Lattice, Points, Reference
from shrinkpoint.codec.lattice import FINE, MOST_EXPONENT, spans
from shrinkpoint.codec.quantize.points import nearest
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.schemes.fisher.spread import deviation
from shrinkpoint.schemes.layers import EMBEDDING, HEAD, kind_by_name

GAMMA = 0.25
"""By which power of the squared gradients steps fall: 1/2 would be right where a step costs bits by its logarithm.
Where what is coded is whether a weight has left its cell, it costs by its inverse: 1/3; and 1/4 measured best."""
ALLOTTED = 1 / 3
"""The same between tensors."""
PROBED = 1 / 2
"""The same where the curvature was probed: such checkpoints mostly stand alone, and a step costs by its logarithm."""
WIDEST = 2.0
"""Standard deviations of its tensor that a row's steps have at most: above, hardly anything is left of it but signs."""
CAREFUL = 0.25
"""Steps beside others, where it is known or likely that each value matters more: vectors (biases, gains), of which
there are few; embeddings and heads, where nothing is known of any weight; weights of which alone nothing is known."""
FLATTEST = 1e-4
"""Of the mean squared gradient: rows and columns with less count as having that, so that no step is without bound."""


def usual_squares(known: Mapping[str, Curvature], weights: Mapping[str, Tensor]) -> float:
    """The geometric mean, over all weights of which something is known, of their tensors' mean squared gradients."""
    means = {name: one.mean for name, one in known.items()}
    counts = {name: weights[name].numel() for name, mean in means.items() if mean > 0}
    total = sum(counts.values())
    return math.exp(sum(count * math.log(means[name]) for name, count in counts.items()) / total) if total else 0.0


def care(name: str, x: Tensor, known: Curvature, usual: float, kinds: Mapping[str, str]) -> float:
    """Steps of a weight beside those of others, by what is not known of it.

    Args:
        usual: see `lattice_of`; 0: nothing is known of any weight.
        kinds: of layers, by name of a weight, where there is more to go by than the name.
    """
    if x.dim() < 2:
        return CAREFUL
    if usual > 0:
        return 1.0 if known.mean > 0 else CAREFUL
    return CAREFUL if kinds.get(name, kind_by_name(name, x.dim())) in (EMBEDDING, HEAD) else 1.0


def lattice_of(
    x: Tensor, known: Curvature, usual: float, seed: int, careful: float = 1.0, spread: float | None = None
) -> Lattice | None:
    """Steps for a weight: one standard deviation, but smaller where the loss is more sensitive, and larger where less.

    Args:
        usual: squared gradients of a tensor that gets one standard deviation.
        careful: see `care`.
        spread: the weight's standard deviation, where that is known; then only the shape of `x` counts.

    Returns:
        None where the weight does not vary.
    """
    spread = (deviation(x) if spread is None else spread) * careful
    if not 0 < spread < math.inf:
        return None
    rows, columns = spans("linear", tuple(x.shape))
    power = PROBED if known.probed else ALLOTTED
    level = math.log2(spread) - (power * math.log2(known.mean / usual) if known.mean > 0 and usual > 0 else 0.0)
    by_row, by_column = torch.zeros(rows), torch.zeros(columns)
    if rows > 1:
        by_row, by_column = (_fall(known.means(axis), count) for axis, count in ((1, rows), (0, columns)))
    exponents = (by_row + level) * FINE, by_column * FINE
    low, high = -MOST_EXPONENT // 2, MOST_EXPONENT // 2
    made = [one.round().clamp(low, high).to(torch.int16).cpu() for one in exponents]
    return Lattice("linear", made[0], made[1], seed=seed)


def _fall(means: Tensor | None, count: int) -> Tensor:
    """log2 of how steps vary along an axis of so many squares' means; 0 on average."""
    if means is None:
        return torch.zeros(count)
    means = means.clamp(min=float(means.mean()) * FLATTEST)
    if not bool((means > 0).all()):
        return torch.zeros_like(means)
    logs = means.log2() * -GAMMA
    return logs - logs.mean()


@dataclass(frozen=True)
class Before:
    """What a weight's points can be compared with.

    Attributes:
        codes: of the checkpoint before, on the same lattice.
        kept: its values.
        original: the weight as it was in training then; None: nobody knows.
    """

    codes: Tensor = field(repr=False)
    kept: Tensor = field(repr=False)
    original: Tensor | None = field(repr=False)

    @classmethod
    def of(cls, name: str, x: Tensor, lattice: Lattice, reference: Reference | None) -> Before | None:
        held = None if reference is None else reference.symbols.get(name)
        if reference is None or not isinstance(held, Points) or held.lattice != lattice or held.codes.shape != x.shape:
            return None
        original = reference.originals.get(name)
        kept = reference.tensors[name]
        return cls(held.codes, kept, original if original is not None and original.shape == x.shape else None)


def points_of(x: Tensor, lattice: Lattice, before: Before | None, hold: float) -> Points | None:
    """The nearest point; the one before where the weight is not further than `hold` steps from it.

    Args:
        hold: from 1/2, to the nearest, on. Weights that only shake then stay where they are, and a checkpoint is more
            of an average over time.

    Returns:
        None where points do not reach as far as the weight, or its dtype as far as the points.
    """
    return reached(nearest(x, lattice, before=None if before is None else before.codes, hold=hold), x.dtype)


def reached(points: Points | None, dtype: torch.dtype) -> Points | None:
    """None where a dtype does not reach as far as these points."""
    if points is not None and dtype == torch.float16 and not bool(points.values(dtype).isfinite().all()):
        return None
    return points


def seed_of(name: str, generation: int, seed: int) -> int:
    """Of a weight's dither: none before the first restore, and another one after each."""
    if generation == 0:
        return 0
    return zlib.crc32(f"{seed}/{generation}/{name}".encode()) or 1


def scaled(lattice: Lattice, octaves: int, most: float = math.inf) -> Lattice:
    """Steps larger by so many eighths of an octave, but in no row's mean above `most`."""
    rows = lattice.rows + octaves
    if 0 < most < math.inf:
        rows = rows.clamp(max=math.floor(math.log2(most) * FINE))
    return replace(lattice, rows=rows)
