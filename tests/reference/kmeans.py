"""Weighted k-means in one dimension, value by value."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import fsum

MASK = (1 << 64) - 1


def kmeans(values: list[float], weights: list[float], centers: list[float], iterations: int) -> list[float]:
    for _ in range(iterations):
        cells = assign(values, centers)
        centers = [mean(values, weights, cell, center) for cell, center in zip(cells, centers, strict=True)]
    return centers


def assign(values: list[float], centers: list[float]) -> list[list[int]]:
    """The values of each center; one in the middle of two belongs to the lower."""
    cells: list[list[int]] = [[] for _ in centers]
    borders = [0.5 * a + 0.5 * b for a, b in pairwise(centers)]
    for i, value in enumerate(values):
        cells[sum(value > border for border in borders)].append(i)
    return cells


def mean(values: list[float], weights: list[float], cell: list[int], center: float) -> float:
    weight = fsum(weights[i] for i in cell)
    return fsum(weights[i] * values[i] for i in cell) / weight if weight > 0 else center


def cost(values: list[float], weights: list[float], centers: list[float]) -> float:
    return fsum(w * min((x - c) ** 2 for c in centers) for x, w in zip(values, weights, strict=True))


def start(values: list[float], weights: list[float], k: int, seed: int, squared: bool) -> list[float]:
    numbers, centers = uniforms(seed), []
    masses = list(weights)
    while len(centers) < k and any(masses):
        total = 0.0
        for mass in masses:
            total += mass
        at, seen = next(numbers) * total, 0.0
        for value, mass in zip(values, masses, strict=True):
            seen += mass
            if mass > 0:
                chosen = value
                if seen > at:
                    break
        centers.append(chosen)
        nearest = [min(abs(value - center) for center in centers) for value in values]
        masses = [w * (d * d if squared else d) for w, d in zip(weights, nearest, strict=True)]
    return sorted(centers) + [max(centers)] * (k - len(centers))


def uniforms(state: int) -> Iterator[float]:
    """splitmix64."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        yield ((z ^ (z >> 31)) >> 11) * 2.0**-53
