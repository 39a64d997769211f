"""What an optimizer's first moments still do to the weights, from which follows how coarse they may be.

A first moment m moves its weight by `lr m beta1 / (1 - beta1)` in all, in roots of the second moment. An error of m
moves it as far. So m need not be known better than the weight itself is: by a small learning rate, as in a fine-tuning,
what m moves is far less than what the weight is rounded by.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from shrinkpoint.codec.lattice import STEPS_PER_OCTAVE, Lattice, LatticeTensor
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes.fisher.curvature import bias_factor
from shrinkpoint.schemes.planner import PlannedSave
from shrinkpoint.tensors.info import OptimizerInfo
from shrinkpoint.tensors.optimizers import MomentKind

LONG_MEMORY = 9.0
"""The updates that a first moment of beta1 = 0.9 still moves its weight by: beta1 / (1 - beta1)."""
_MAX_SHORT = 64.0  # how many times larger a step may be because the moment moves its weight less
SHARE_OF_WEIGHTS = 1 / 3
"""How far a step of a first moment may move its weight, in steps of the weight; the rise grows by its square."""
_MAX_COARSER = 256.0


@lru_cache(maxsize=256)
def first_step_factor(beta1: float | None, beta2: float | None, step: int | None) -> float:
    """The largest step of a first moment, in square roots of its second moment and in `MomentPrecision.first_step`.

    What an error e of the moment moves its weight by is `lr e beta1 / (1 - beta1)` in roots of the second moment
    without its bias. This is what is bounded, for every age and every decay.
    """
    moves = min(_updates_moved(beta1), LONG_MEMORY)
    unbiased = math.sqrt(bias_factor(beta2, step))
    return unbiased * LONG_MEMORY / max(moves, LONG_MEMORY / _MAX_SHORT)


def coarser_steps(save: PlannedSave, first_step: float) -> dict[str, float]:
    """How many times larger steps of first moments may be, since their weights are coarse; at least 1. A collective.

    Args:
        first_step: `MomentPrecision.first_step`.

    Returns:
        By local name, the same for all shards of a moment; those that are missing may not be larger.
    """
    tensors = save.tensors
    own = {
        info.moment1: _coarser_step(name, info, save.reference, first_step)
        for name, info in save.selection.optimizer_info_of_masters(save.state).items()
        if info.moment1 in tensors.local_shards
    }
    agreed = tensors.reduce(own, min)
    return {name: agreed[tensors.global_names[name]] for name in own}


def _coarser_step(name: str, info: OptimizerInfo, reference: Reference | None, first_step: float) -> float:
    points = None if reference is None else reference.quantized.get(name)
    if not isinstance(points, LatticeTensor) or points.lattice.spacing != "linear" or info.lr is None:
        return 1.0
    moved = first_step * info.lr * max(_updates_moved(info.beta1), LONG_MEMORY)
    step = SHARE_OF_WEIGHTS * mean_step(points.lattice)
    return min(max(step / moved, 1.0), _MAX_COARSER) if moved > 0 else _MAX_COARSER


def mean_step(lattice: Lattice) -> float:
    """The mean step of a weight for errors that count by curvature, of which its steps are the inverse roots."""
    by_side = (np.exp2(side.numpy() * (-2 / STEPS_PER_OCTAVE)).mean() for side in (lattice.rows, lattice.columns))
    mean_square = math.prod(float(side) for side in by_side)
    return float(mean_square**-0.5)  # numpy: these are short


def _updates_moved(beta1: float | None) -> float:
    return beta1 / (1 - beta1) if beta1 is not None and 0 <= beta1 < 1 else LONG_MEMORY


def steps_of_first_moments(save: PlannedSave) -> float | None:
    """The steps of training that first moments still stand for, the most of all parameters. A collective.

    Returns:
        None: some decay is not known.
    """
    state, steps = save.state, list[float | None]([0.0])
    for info in state.optimizer_info.values():
        if info.moment1 is not None:
            is_sign = state.moment_kinds.get(info.moment1) is MomentKind.SIGN
            decay = info.beta2 if is_sign and info.beta2 is not None else info.beta1  # Lion's momentum decays by beta2
            steps.append(decay / (1 - decay) if decay is not None and 0 <= decay < 1 else None)
    every = [x for own in save.tensors.collectives.all_gather(steps) for x in own]
    known = [x for x in every if x is not None]
    return round(max(known), 1) if len(known) == len(every) else None
