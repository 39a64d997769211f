"""What `rate_distortion.py` computes from chains: the movement that was written, a bound, and bits at an equal rise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


class Point(NamedTuple):
    """Of one method with one setting: bits a weight, the mean rise in per cent, and its name."""

    bits: float
    rise: float
    name: str = ""


class AtRise(NamedTuple):
    """Bits a weight at a rise; `how`: "measured" at or below it, or "between" two settings."""

    bits: float
    how: str
    name: str


def monotone(points: Iterable[Point]) -> list[Point]:
    """The points by their bits, with the rises nearest to theirs that do not grow with the bits.

    Neighbours that are in the wrong order get their mean (pool adjacent violators): single rises are noise, and the
    cheapest of many settings must not be chosen by it.
    """
    points = sorted(points)
    pools: list[tuple[float, int]] = []
    for point in points:
        pools.append((point.rise, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (before, many), (after, more) = pools[-2:]
            pools[-2:] = [((before * many + after * more) / (many + more), many + more)]
    rises = [rise for rise, many in pools for _ in range(many)]
    return [point._replace(rise=rise) for point, rise in zip(points, rises, strict=True)]


def bits_at(points: Iterable[Point], rise: float) -> AtRise | None:
    """The bits that a method needs for a rise of at most `rise`, on its `monotone` curve; None: it never got there.

    That is its cheapest setting at or below the rise. Where a cheaper one lies above, the straight line to the
    nearest of these, in the logarithm of the bits, is followed to `rise`.
    """
    curve = monotone(point for point in points if math.isfinite(point.rise))
    below = [point for point in curve if point.rise <= rise]
    if not below:
        return None
    best = min(below)
    if best == curve[0] or best.rise == rise:
        return AtRise(best.bits, "measured", best.name)
    other = curve[curve.index(best) - 1]
    share = (rise - best.rise) / (other.rise - best.rise)
    bits = math.exp(math.log(best.bits) + share * (math.log(other.bits) - math.log(best.bits)))
    return AtRise(bits, "between", f"{best.name} and {other.name}")


def retained(first: Weights, last: Weights, decoded_first: Weights, decoded_last: Weights) -> float:
    """The share of the movement from `first` to `last` that lies in what was decoded: 1 is all of it."""
    moved = {name: (last[name] - x).double() for name, x in first.items()}
    total = sum(float(x.square().sum()) for x in moved.values())
    written = sum(float((x * (decoded_last[n] - decoded_first[n]).double()).sum()) for n, x in moved.items())
    return written / total if total else 1.0


def gaussian_bound(before: Weights, after: Weights, decoded_before: Weights, decoded_after: Weights) -> float:
    """Bits a weight below which no coder gets these errors, if movements are Gaussian and weights are coded each by
    itself.

    A row whose weights were known with a variance of D0 and have moved by one of M costs `1/2 log2((M + D0) / D1)`
    for a variance of D1; where D0 is D1 that is "The bound" of docs/fisher_studies.md. Rows without an error are left
    out: no number of bits is enough for them.
    """
    bits = weights = 0.0
    for name, value in after.items():
        if value.ndim < 2:
            continue
        moved, known, left = (
            (x - y).double().flatten(1).square().mean(1)
            for x, y in ((value, before[name]), (before[name], decoded_before[name]), (value, decoded_after[name]))
        )
        rows = left > 0
        each = value[0].numel()
        bits += each * float((0.5 * ((moved + known)[rows] / left[rows]).log2()).clamp(min=0).sum())
        weights += each * int(rows.sum())
    return bits / weights if weights else math.nan


def relative_error(values: Weights, decoded: Weights) -> float:
    """Root of the squared errors of all tensors over the root of their squares."""
    wrong = sum(float((decoded[name] - x).double().square().sum()) for name, x in values.items())
    return math.sqrt(wrong / sum(float(torch.square(x.double()).sum()) for x in values.values()))
