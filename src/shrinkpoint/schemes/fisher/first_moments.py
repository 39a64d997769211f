"""The movement that first moments still cause in the weights; it decides how coarse these moments may be.

A first moment m moves its weight by `lr m beta1 / (1 - beta1)` in all, in roots of the second moment. An error of m
moves it as far. So m need not be known better than the weight itself is: by a small learning rate, as in a fine-tuning,
what m moves is far less than what the weight is rounded by.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from shrinkpoint.codec.lattice import STEPS_PER_OCTAVE, LatticeTensor
from shrinkpoint.schemes.fisher.curvature import bias_factor
from shrinkpoint.schemes.fisher.run_memory import RunMemory
from shrinkpoint.schemes.planner import PlannedSave
from shrinkpoint.tensors.optimizers import MomentKind

LONG_MEMORY = 9.0
"""The updates that a first moment of beta1 = 0.9 still moves its weight by: beta1 / (1 - beta1)."""
_MAX_SHORT = 64.0  # how many times larger a step may be because the moment moves its weight less
SHARE_OF_WEIGHTS = 1 / 3
"""Distance that a step of a first moment may move its weight, in steps of the weight; the rise grows by its square."""
_MAX_COARSER = 16.0
"""The largest factor by which steps may be larger: training may go on with another learning rate than was seen."""


@lru_cache(maxsize=256)
def first_step_factor(beta1: float | None, beta2: float | None, step: int | None) -> float:
    """The largest step of a first moment, in square roots of its second moment and in `MomentPrecision.first_step`.

    What an error e of the moment moves its weight by is `lr e beta1 / (1 - beta1)` in roots of the second moment
    without its bias. This is what is bounded, for every age and every decay.
    """
    moves = min(_updates_moved(beta1), LONG_MEMORY)
    unbiased = math.sqrt(bias_factor(beta2, step))
    return unbiased * LONG_MEMORY / max(moves, LONG_MEMORY / _MAX_SHORT)


def coarser_steps(save: PlannedSave, first_step: float, memory: RunMemory, restores: int) -> dict[str, float]:
    """Factor by which steps of first moments may be larger, since their weights are coarse; at least 1. A collective.

    What counts is the largest learning rate of the run so far: a run that has ended at a rate of 0 may go on. The share
    of the weights' steps falls with every restore, so that all of them together add less than twice what the first one
    adds: what errors of first moments do to rarely trained rows, training does not make good.

    Args:
        first_step: `MomentPrecision.first_step`.
        memory: remembers that rate.
        restores: from lossy checkpoints, so far.

    Returns:
        By local name, the same for all shards of a moment; those that are missing may not be larger.
    """
    tensors, infos = save.tensors, save.selection.optimizer_info_of_masters(save.state)
    held = {} if save.reference is None else save.reference.quantized
    rates = [info.peak_lr for info in infos.values() if info.peak_lr is not None]
    peak = max(tensors.collectives.all_gather(max(rates, default=0.0)))
    memory.peak_lr = max(memory.peak_lr, peak)
    decline = memory.peak_lr / peak if peak > 0 else 1.0
    squares = {name: _inverse_squares(held.get(name)) for name in infos if name in tensors.local_shards}
    steps = tensors.reduce_primary(squares, _mean_step)
    larger: dict[str, float] = {}
    for name, info in infos.items():
        step = steps.get(tensors.global_names.get(name, ""))
        moves = first_step * (info.peak_lr or 0.0) * decline * max(_updates_moved(info.beta1), LONG_MEMORY)
        if info.moment1 is not None and step is not None and moves > 0:
            larger[info.moment1] = min(max(SHARE_OF_WEIGHTS / (restores + 1) * step / moves, 1.0), _MAX_COARSER)
    return larger


def _inverse_squares(points: object) -> tuple[float, int] | None:
    """The sum of the inverse squares of the steps of a shard of a weight, and their number; None if it has no grid."""
    if not isinstance(points, LatticeTensor) or points.lattice.spacing != "linear":
        return None
    sides = points.lattice.rows.numpy(), points.lattice.columns.numpy()  # numpy: these are short
    sums = (float(np.exp2(side * (-2 / STEPS_PER_OCTAVE)).sum()) for side in sides)
    return math.prod(sums), math.prod(len(side) for side in sides)


def _mean_step(shards: list[tuple[float, int] | None]) -> float | None:
    """The mean step of a weight for errors that count by curvature, of which its steps are the inverse roots."""
    known = [shard for shard in shards if shard is not None]
    total, count = math.fsum(part for part, _ in known), sum(number for _, number in known)
    return math.sqrt(count / total) if len(known) == len(shards) and total > 0 else None


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
