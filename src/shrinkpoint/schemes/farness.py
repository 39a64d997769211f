"""Where a difference to the checkpoint before is worth less than the weights by themselves.

A residual is coded to so many per cent of itself. After weights were saved that were rolled back later (a spike of the
loss), or after others were loaded, it is larger than the weights, and so may be its error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shrinkpoint.codec import Reference, Symbols
from shrinkpoint.schemes.pooled import Pooled

MAX_ERROR = 0.01
"""Of the weights, where a reader's values are farther from them than zero is; nearer ones are what a scheme tracks."""


def far_from(
    symbols: Mapping[str, Symbols], weights: Mapping[str, Tensor], differences: Mapping[str, Tensor],
    reference: Reference | None, pool: Pooled | None = None,
) -> dict[str, float]:  # fmt: skip
    """The relative errors that a reader would get of the weights for which a difference is worth nothing, by title.

    Those are the ones whose difference is larger than they are, and whose error, as it would be decoded, is above
    `MAX_ERROR` of them; in a keyframe they have none. With a `pool`, of whole weights, and a collective.
    """
    sizes = {name: (_square(differences[name]), _square(weights[name])) for name in symbols}
    totals = _totals(sizes, pool)
    far = {title for title, (moved, now) in totals.items() if moved > now}
    if not far or reference is None:
        return {}
    ours = {name: one for name, one in symbols.items() if _title(name, pool) in far}
    errors = {name: (_error(one, weights[name], reference.tensors[name]),) for name, one in ours.items()}
    relative = {title: _root(error, totals[title][1]) for title, (error,) in _totals(errors, pool).items()}
    return {title: error for title, error in relative.items() if not error <= MAX_ERROR}


def _error(symbols: Symbols, x: Tensor, held: Tensor) -> float:
    """The sum of squares of what a reader's values differ by."""
    return _square(symbols.values(x.dtype, held).to(x.device, torch.float32) - x.to(torch.float32))


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 if x.numel() else 0.0


def _root(error: float, now: float) -> float:
    return math.sqrt(error / now) if now > 0 else math.inf if error > 0 else 0.0


def _title(name: str, pool: Pooled | None) -> str:
    return name if pool is None else pool.title(name)


def _totals(parts: Mapping[str, tuple[float, ...]], pool: Pooled | None) -> dict[str, tuple[float, ...]]:
    if pool is None:
        return dict(parts)
    told = pool.wholes.told({name: one for name, one in parts.items() if pool.wholes.counts(name)})
    return {title: tuple(map(math.fsum, zip(*found, strict=True))) for title, found in told.items()}
