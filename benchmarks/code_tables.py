"""What caching would be worth to LC-Checkpoint (arXiv 2009.13003): of the table of Huffman codes, and of the buckets.

    python benchmarks/code_tables.py             # the gpt workload, 40 checkpoints: two minutes
    python benchmarks/code_tables.py --quick     # a toy

The paper keeps its code table while the distribution of the codes is stable. shrinkpoint writes a table with each
record, so that a file can be read without others. One training is tracked, delta by delta, at x = 2, 3 and 4:

* table: its share of the bytes of a delta (what caching could save), and how many bytes the codes take with the table
  of 1, 5 and 20 deltas ago, every unused symbol having a code of its own there; over those with tables of their own.
* buckets: instead, the choice of buckets and their values is kept while the largest difference of a tensor is in one of
  them. How often it had to be renewed, and the error of the weights beside that with a choice for each delta.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import workloads
from lossless_report import table
from lossless_speed import machine
from torch import Tensor

from shrinkpoint.quantize.exponent_buckets import ExponentBuckets, bucket_ids, promote
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL

BITS = (2, 3, 4)
AGES = (1, 5, 20)
TABLE_BITS = 5
"""Bits of a symbol in a table where no symbol before it is unused: one for the gap, four for the length."""
Counts = Any


def huffman_bits(counts: Counts) -> dict[int, int]:
    """The length of the code of every symbol that occurs."""
    used = [int(symbol) for symbol in np.flatnonzero(counts)]
    if len(used) == 1:
        return {used[0]: 1}
    lengths = dict.fromkeys(used, 0)
    heap = [(int(counts[symbol]), symbol, [symbol]) for symbol in used]
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, order, left), (b, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        for symbol in (*left, *right):
            lengths[symbol] += 1
        heapq.heappush(heap, (a + b, order, [*left, *right]))
    return lengths


def coded_bits(counts: Counts, lengths: Mapping[int, int]) -> int:
    """Of all codes, by a table that has all of them."""
    return sum(int(counts[symbol]) * lengths[int(symbol)] for symbol in np.flatnonzero(counts))


@dataclass
class Tracked:
    """One training as a reader of its deltas has it.

    Attributes:
        tables: bits of the tables of each delta.
        codes: bits of its codes by its own tables.
        aged: the same by the tables of an earlier delta, by age; shorter by as many deltas.
        errors: norm of what the reader's weights are off, by a choice for each delta.
        cached: the same with a choice of buckets that is kept.
        renewed: shares of the tensors whose choice was renewed.
    """

    bits: int
    tables: list[float] = field(default_factory=list)
    codes: list[float] = field(default_factory=list)
    aged: dict[int, list[float]] = field(default_factory=lambda: {age: [] for age in AGES})
    errors: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    renewed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._own: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._choice: dict[str, ExponentBuckets] = {}
        self._counts: list[dict[str, Counts]] = []

    def observe(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of the next checkpoint; the first is a keyframe."""
        if not self._own:
            self._own = {name: x.clone() for name, x in weights.items()}
            self._kept = {name: x.clone() for name, x in weights.items()}
            return
        counts = {}
        for name, x in weights.items():
            difference = x - self._own[name]
            quantized = promote(difference, ExponentBuckets.from_tensor(difference), self.bits, "middle")
            self._own[name] = quantized.dequantize(torch.float32, self._own[name])
            counts[name] = np.bincount(quantized.codes.reshape(-1).numpy(), minlength=256)
        self._measure(counts)
        self.errors.append(self._far(weights, self._own))
        self._observe_cached(weights)

    def _measure(self, counts: dict[str, Counts]) -> None:
        self._counts.append(counts)
        self.tables.append(float(sum(TABLE_BITS * np.count_nonzero(one) for one in counts.values())))
        self.codes.append(sum(coded_bits(one, huffman_bits(one)) for one in counts.values()))
        symbols = range(2**self.bits + 2)
        for age in AGES:
            if len(self._counts) > age:
                before = self._counts[-1 - age]
                total = 0
                for name, one in counts.items():
                    known = before[name].copy()
                    known[[*symbols, *np.flatnonzero(one)]] += 1
                    total += coded_bits(one, huffman_bits(known))
                self.aged[age].append(total)

    def _observe_cached(self, weights: Mapping[str, Tensor]) -> None:
        renewed = 0
        for name, x in weights.items():
            difference = x - self._kept[name]
            if name not in self._choice or not self._fits(self._choice[name], difference):
                self._choice[name] = ExponentBuckets.from_tensor(difference)
                renewed += 1
            quantized = promote(difference, self._choice[name], self.bits, "middle")
            self._kept[name] = quantized.dequantize(torch.float32, self._kept[name])
        self.renewed.append(renewed / len(weights))
        self.cached.append(self._far(weights, self._kept))

    def _fits(self, choice: ExponentBuckets, difference: Tensor) -> bool:
        """Whether the largest difference of each sign is in a bucket of the choice."""
        promoted, _ = choice.promoted(self.bits, "middle")
        ends = torch.stack([difference.max(), difference.min()])
        return bool(torch.isin(bucket_ids(ends), promoted).all())

    @staticmethod
    def _far(weights: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> float:
        return float(sum((x - read[name]).double().square().sum() for name, x in weights.items()) ** 0.5)

    def figures(self) -> dict[str, float]:
        """Means over all deltas but the first, with which every choice is new."""
        own = self.codes
        more = {
            f"codes by a table {age} back": fmean(a / b for a, b in zip(x, own[age:], strict=True))
            for age, x in self.aged.items()
            if x
        }
        return {
            "table, of a delta": sum(self.tables) / (sum(self.tables) + sum(own)),
            **more,
            "choices renewed": fmean(self.renewed[1:]),
            "error with kept choices": fmean(a / b for a, b in zip(self.cached[1:], self.errors[1:], strict=True)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--workload", default="gpt", help="gpt, resnet or wide")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a toy: does it run?")
    parser.add_argument("--out", type=Path, default=Path("results/code_tables.json"))
    args = parser.parse_args()
    workloads.seed_everything(args.seed, 1)
    work = workloads.named(args.workload, args.data, quick=args.quick)
    course, found = work.build(args.seed), [Tracked(bits) for bits in BITS]
    for step in range(1, work.steps + 1):
        work.advance(course)
        if step % work.interval == 0:
            named = course.model.named_parameters()
            weights = {name: p.detach() for name, p in named if p.dim() >= 2 and p.numel() >= MIN_WEIGHT_NUMEL}
            for one in found:
                one.observe(weights)
    figures = {f"x = {one.bits}": one.figures() for one in found}
    head = [f"{args.workload}, seed {args.seed}", *next(iter(figures.values()))]
    print(table(head, [[name, *(f"{value:.4f}" for value in row.values())] for name, row in figures.items()]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"workload": args.workload, "seed": args.seed, "quick": args.quick, **work.facts}
    written = {"machine": machine(), **settings, "figures": figures, "deltas": [asdict(one) for one in found]}
    args.out.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
