"""A quantile of 10 million scores on one core: from the sketch, and from exact rivals.

python benchmarks/quantile_speed.py [--values 10000000] [--repeats 5] [--out results/quantile.json]

The scores are `|w|` of weights whose scale differs from row to row, float32, seed fixed. Every way finds the same
three quantiles, in turns, so that a busy moment of the machine meets all; medians count. A way that looks at all values
once a quantile is timed so. Error: the largest relative one of the three against the value of that rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lossless_report
import lossless_speed
import numpy as np
import torch
from torch import Tensor

from shrinkpoint.quantize.statistics import LogHistogram

AT = (0.1, 0.3, 0.995)
"""Two pruning thresholds and one of protection."""
BEST_OF_ALL, ENOUGH = 1.0, 0.5  # faster than every exact way; seconds for 10 million ids and their counts


@dataclasses.dataclass(frozen=True)
class Way:
    """Something that finds the quantiles.

    Attributes:
        find: all of `AT`, of one tensor.
        exact: whether it may be off.
    """

    name: str
    find: Callable[[Tensor], list[float]]
    exact: bool = True


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds: CPU time of the process and wall time, medians, and the best wall time seen."""

    cpu: float
    wall: float
    best: float


def scores(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = count // 1000
    scales = torch.logspace(-3, 0, rows)[torch.randperm(rows, generator=generator)]
    return (torch.randn(rows, 1000, generator=generator) * 0.05 * scales[:, None]).abs_().view(-1)


def rank(q: float, count: int) -> int:
    return math.floor(q * (count - 1))


def by_sketch(alpha: float) -> Callable[[Tensor], list[float]]:
    def find(x: Tensor) -> list[float]:
        sketch = LogHistogram.from_tensor(x, alpha)
        return [sketch.quantile(q) for q in AT]

    return find


def by_ids(x: Tensor, ids: Tensor) -> list[float]:
    """What a second mask over the same values costs."""
    sketch = LogHistogram.from_bucket_ids(ids, 0.01, mask=x > 1e-4)
    return [sketch.quantile(q) for q in AT]


def by_torch(x: Tensor) -> list[float]:
    return torch.quantile(x, torch.tensor(AT), interpolation="lower").tolist()


def by_sort(x: Tensor) -> list[float]:
    ordered = np.sort(x.numpy())
    return [float(ordered[rank(q, len(ordered))]) for q in AT]


def by_partition(x: Tensor) -> list[float]:
    ranks = [rank(q, len(x)) for q in AT]
    return np.partition(x.numpy(), ranks)[ranks].tolist()


def by_kth(x: Tensor) -> list[float]:
    return [x.kthvalue(rank(q, len(x)) + 1).values.item() for q in AT]


def ways(x: Tensor) -> list[Way]:
    ids = LogHistogram.bucket_ids(x, 0.01)
    return [
        *(Way(f"sketch, {alpha:.1%}", by_sketch(alpha), exact=False) for alpha in (0.1, 0.01, 0.001)),
        Way("sketch, 1.0%, ids known, masked", lambda x: by_ids(x, ids), exact=False),
        Way("torch.quantile", by_torch),
        Way("torch.kthvalue", by_kth),
        Way("np.partition", by_partition),
        Way("np.sort", by_sort),
    ]


def measure(found: list[Way], x: Tensor, repeats: int) -> dict[str, Time]:
    """The first round is a warm-up that does not count."""
    seen: dict[str, list[tuple[float, float]]] = {way.name: [] for way in found}
    for turn in range(repeats + 1):
        for way in found:
            cpu, wall = time.process_time(), time.perf_counter()
            way.find(x)
            if turn:
                seen[way.name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {name: _time(times) for name, times in seen.items()}


def _time(times: list[tuple[float, float]]) -> Time:
    cpu, wall = zip(*times, strict=True)
    return Time(statistics.median(cpu), statistics.median(wall), min(wall))


def error(way: Way, x: Tensor, exact: list[float]) -> float | None:
    """None where the quantiles are of other values."""
    if "masked" in way.name:
        return None
    return max(abs(a - b) / b for a, b in zip(way.find(x), exact, strict=True))


def table(ways: dict[str, dict[str, Any]]) -> str:
    head = ["three quantiles", "cpu s", "wall s", "best s", "ns/value", "largest error"]
    rows = [
        [name, *(f"{way[key]:.3f}" for key in ("cpu", "wall", "best")), f"{way['ns']:.2f}", _percent(way["error"])]
        for name, way in ways.items()
    ]
    return lossless_report.table(head, rows)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.4%}"


def verdicts(ways: dict[str, dict[str, Any]]) -> list[str]:
    mine, rivals = ways["sketch, 1.0%"], {name: way for name, way in ways.items() if way["exact"]}
    best = min(rivals, key=lambda name: rivals[name]["cpu"])
    gain = rivals[best]["cpu"] / mine["cpu"]
    lines = [
        (gain > BEST_OF_ALL, f"faster than every exact way: {gain:.1f}x {best}"),
        (mine["ns"] / 100 < ENOUGH, f"10 million values: {mine['ns'] / 100:.3f} s of one core, at most {ENOUGH} s"),
        (mine["error"] <= 0.01, f"largest error at 1 %: {mine['error']:.4%}"),
    ]
    return [f"{'PASS' if reached else 'miss'}  {text}" for reached, text in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5, help="of each timing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "quantile.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = scores(args.values)
    exact, found = by_sort(x), ways(x)
    times = measure(found, x, args.repeats)
    result = {
        way.name: dataclasses.asdict(times[way.name])
        | {"ns": times[way.name].cpu / len(x) * 1e9, "error": error(way, x, exact), "exact": way.exact}
        for way in found
    }
    print(
        f"{len(x)} values, {len(LogHistogram.from_tensor(x).buckets()[0])} buckets at 1 %, one core\n\n"
        f"{table(result)}\n"
    )
    said = verdicts(result)
    print("\n".join(said))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    whole = {"machine": lossless_speed.machine(), "values": len(x), "at": AT, "ways": result, "verdicts": said}
    args.out.write_text(json.dumps(whole, indent=1))
    print(f"\nwritten to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
