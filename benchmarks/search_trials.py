"""How many trials the searches need on random landscapes, and how often they miss the smallest configuration.

    python benchmarks/search_trials.py --landscapes 200

The space is the paper's (bins x pruning x protection, under one metric or two). The degradation is random and never
rises towards the safe end of an axis; the threshold is a random quantile of it. Sizes are of three kinds:

* `entropy`: bits of a normal distribution's weights under these settings, metrics apart by a few percent. Light pruning
  costs bits here;
* `monotone`: random, rising towards the safe end, which is what the paper's search assumes;
* `any`: random, in no order.

A scan measures in order of size and stops at the first that holds. Nothing is timed: trials and rounds are counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lossless_report
import numpy as np

from shrinkpoint.schemes.search.space import Axis, Point, Space
from shrinkpoint.schemes.search.strategies import branch_and_bound, diagonal
from shrinkpoint.schemes.search.trials import SearchResult, Trial, Trials

Array = np.ndarray[Any, np.dtype[Any]]

AXES = (
    Axis("bins", (4, 6, 8, 12, 16, 32)),
    Axis("prune", (0.5, 0.4, 0.3, 0.2, 0.1, 0.0)),
    Axis("protect", (0.0005, 0.005, 0.01)),
)
METRICS = ("magnitude", "sensitivity")
SIDES = tuple(len(axis.values) for axis in AXES)


@dataclass(frozen=True)
class Landscape:
    """A space with a degradation and a size at every point."""

    space: Space
    degradation: Mapping[Point, float]
    size: Mapping[Point, float]
    threshold: float

    @property
    def smallest(self) -> float | None:
        """By brute force."""
        return min((self.size[p] for p, found in self.degradation.items() if found <= self.threshold), default=None)


class Simulated(Trials):
    """A group of `width` ranks in one process."""

    def __init__(self, measure: Callable[[Point], float], width: int) -> None:
        super().__init__(measure)
        self.width = width

    def run(self, points: Sequence[Point]) -> list[float]:
        self.seconds |= dict.fromkeys(points, 0.0)
        return [self._measure(point) for point in points]

    def predict_sizes(self, predict: Callable[[Point], float], points: Sequence[Point]) -> dict[Point, float]:
        return {point: predict(point) for point in points}


def bits(bins: int, prune: float, protect: float) -> float:
    """Bits a weight of a normal distribution: the entropy of pruned, protected and bins, 16 more where protected."""
    normal = statistics.NormalDist()
    zero = normal.inv_cdf(0.5 + prune / 2)  # below it a weight is pruned
    edges = np.linspace(-3, 3, bins + 1)[1:-1]
    cuts = sorted({*edges, -zero, zero}) if prune else list(edges)
    shares = np.diff([0.0, *map(normal.cdf, cuts), 1.0]) * (1 - 2 * protect)  # top of either score
    middle = np.array([cuts[0] - 1, *((a + b) / 2 for a, b in itertools.pairwise(cuts)), cuts[-1] + 1])
    symbols = np.where(np.abs(middle) < zero, 0, 1 + np.searchsorted(edges, middle))
    mass = np.array([*np.bincount(symbols, shares), 2 * protect])
    return float(-(mass[mass > 0] * np.log2(mass[mass > 0])).sum() + 16 * 2 * protect)


ENTROPY = np.array([bits(*values) for values in itertools.product(*(axis.values for axis in AXES))]).reshape(SIDES)


def rising(values: Array) -> Array:
    """Sums over everything at least as aggressive."""
    for axis in range(values.ndim):
        values = np.cumsum(values, axis)
    return values


SIZES: dict[str, Callable[[np.random.Generator], Array]] = {
    "entropy": lambda random: ENTROPY * random.uniform(0.95, 1.05),
    "monotone": lambda random: rising(random.exponential(size=SIDES)),
    "any": lambda random: random.random(SIDES),
}


def landscape(seed: int, kind: str, metrics: Sequence[str]) -> Landscape:
    random = np.random.default_rng(seed)
    space = Space(AXES, tuple(metrics))
    degradation: dict[Point, float] = {}
    size: dict[Point, float] = {}
    for metric in metrics:
        quality = rising(random.exponential(size=SIDES) ** 2)  # the safest has the most of it
        sizes = SIZES[kind](random)
        degradation |= {point: 1 - float(quality[point.index] / quality.max()) for point in space.points(metric)}
        size |= {point: float(sizes[point.index]) for point in space.points(metric)}
    threshold = float(np.quantile(list(degradation.values()), random.random()))
    return Landscape(space, degradation, size, threshold)


def scan(land: Landscape, trials: Simulated, stop: bool) -> SearchResult:
    """In order of size, `width` at a time; to the first round with one that holds, or to the end."""
    ordered = sorted(land.degradation, key=lambda point: (land.size[point], point))
    tried: list[Trial] = []
    held: list[Trial] = []
    rounds = 0
    while ordered and not (stop and held):
        batch, ordered = ordered[: trials.width], ordered[trials.width :]
        found = trials.run(batch)
        tried += [Trial(point, land.size[point], one, 0.0) for point, one in zip(batch, found, strict=True)]
        held = [trial for trial in tried if trial.meets(land.threshold)]
        rounds += 1
    return SearchResult(min(held, key=lambda trial: trial.size, default=None), tuple(tried), "scan", rounds)


SEARCHES: dict[str, Callable[[Landscape, Simulated], SearchResult]] = {
    "branch and bound": lambda land, t: branch_and_bound(land.space, land.size.__getitem__, t, land.threshold),
    "diagonal (paper)": lambda land, t: diagonal(land.space, land.size.__getitem__, t, land.threshold),
    "scan by size": lambda land, t: scan(land, t, stop=True),
    "exhaustive": lambda land, t: scan(land, t, stop=False),
}


def study(lands: Sequence[Landscape], width: int) -> dict[str, dict[str, float]]:
    """By search: trials and rounds, and how much larger than the smallest its results are."""
    out = {}
    for name, search in SEARCHES.items():
        outcomes = [search(land, Simulated(land.degradation.__getitem__, width)) for land in lands]
        pairs = [(o.chosen.size, land.smallest) for o, land in zip(outcomes, lands, strict=True) if o.chosen]
        excess = [size / best - 1 for size, best in pairs if best is not None]
        trials, rounds = [len(o.trials) for o in outcomes], [o.rounds for o in outcomes]
        out[name] = {
            "trials": statistics.mean(trials),
            "most trials": max(trials),
            "rounds": statistics.mean(rounds),
            "most rounds": max(rounds),
            "missed": sum(x > 0 for x in excess),
            "excess": statistics.mean(excess),
            "most excess": max(excess),
        }
    return out


def lines(studies: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    head = ["sizes, metrics, width", "search", "trials", "most", "rounds", "most", "missed", "larger by", "most"]
    rows = []
    for where, found in studies.items():
        for name, one in found.items():
            counts = [f"{one['trials']:.1f}", f"{one['most trials']}", f"{one['rounds']:.1f}", f"{one['most rounds']}"]
            excess = [f"{one['missed']}", f"{one['excess']:.1%}", f"{one['most excess']:.1%}"]
            rows.append([where, name, *counts, *excess])
    return lossless_report.table(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--landscapes", type=int, default=200)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8], help="trials at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "search.json")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.landscapes)
    studies = {}
    for kind, metrics in itertools.product(SIZES, (METRICS[:1], METRICS)):
        lands = [landscape(seed, kind, metrics) for seed in seeds]
        for width in args.widths:
            studies[f"{kind}, {len(metrics)}, {width}"] = study(lands, width)
    print(f"{args.landscapes} landscapes each\n{lines(studies)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"landscapes": args.landscapes, "seed": args.seed, "studies": studies}, indent=1))
    print(f"\nwritten to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
