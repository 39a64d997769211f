"""How long quantizers take on one core, and what they lose: ours beside scikit-learn's k-means on the raw values.

    python benchmarks/quantizer_speed.py [--values 10000000] [--bins 16] [--repeats 5] [--out results/quantizers.json]

The values are half Laplace, half Gaussian, both with a deviation of 0.02, in random order; float32, seed fixed.
Subjects run in turns, after a warm-up on a few values, and medians of wall time count; a slow one (scikit-learn's
k-means) runs once. All of them get the raw values and end with a code for each. Ours is the whole way: sketch, k-means
on its histogram, codes. By the paper's sigma of 0.2 it weighs magnitudes, too, which costs squared error and saves in
the largest one; at sigma 1 it minimizes what scikit-learn minimizes. "Protected" is how the paper uses it: the largest
half per cent is kept in bfloat16 and has no say in the centers. "GOBO, plain" is the iteration as published, every one
a pass over all values; "GOBO+" is ours, on sorted values.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lossless_speed
import numpy as np
import torch
from lossless_report import table
from sklearn.cluster import KMeans, MiniBatchKMeans
from threadpoolctl import threadpool_limits
from torch import Tensor

from shrinkpoint.quantize.codebook import kmeans_codebook, quantize_to_codebook
from shrinkpoint.quantize.levels import quantize_log, quantize_uniform
from shrinkpoint.quantize.statistics import LogHistogram
from shrinkpoint_lab.baselines.gobo import is_outlier, quantize_with_outliers
from shrinkpoint_lab.baselines.uniform import quantize_adaptive

REACH = 1.5  # seconds for 10 million values in 16 bins
ALPHA = 0.01
Decoded = tuple[Tensor, dict[str, float]]
"""Values as a reader gets them, and the seconds of each stage."""


@dataclass(frozen=True)
class Subject:
    """A quantizer from raw values to decoded ones; `slow` ones run once."""

    name: str
    run: Callable[[Tensor, int], Decoded]
    slow: bool = False
    seconds: list[float] = field(default_factory=list)


class Clock:
    """Seconds of stages, one after the other."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages[stage], self.last = now - self.last, now


def values(count: int) -> Tensor:
    """Half Laplace, half Gaussian."""
    generator = torch.Generator().manual_seed(20231)
    gauss = torch.randn(count, generator=generator) * 0.02
    u = torch.rand(count, generator=generator) - 0.5
    laplace = -u.sign() * torch.log1p(-2 * u.abs() * (1 - 2**-23)) * 0.02 / 2**0.5
    return torch.where(torch.rand(count, generator=generator) < 0.5, gauss, laplace)


def sketched(x: Tensor, clock: Clock) -> tuple[Tensor, LogHistogram]:
    """The values' ids, and the sketch of all."""
    ids = LogHistogram.bucket_ids(x, ALPHA)
    clock.lap("ids")
    sketch = LogHistogram.from_bucket_ids(ids, ALPHA)
    clock.lap("histogram")
    return ids, sketch


def ours(sigma: float, protect: float = 0.0) -> Callable[[Tensor, int], Decoded]:
    def run(x: Tensor, bins: int) -> Decoded:
        clock, protected = Clock(), None
        ids, sketch = sketched(x, clock)
        if protect:
            protected = x.abs() > sketch.magnitudes().quantile(1 - protect)
            sketch = LogHistogram.from_bucket_ids(ids, ALPHA, ~protected)
            clock.lap("protection")
        centers = kmeans_codebook(*sketch.buckets(), bins, sigma=sigma)
        clock.lap("k-means")
        symbols = quantize_to_codebook(x, centers, protected=protected)
        clock.lap("codes")
        return symbols.dequantize(x.dtype), clock.stages

    return run


def adapted(x: Tensor, bins: int) -> Decoded:
    clock = Clock()
    _, sketch = sketched(x, clock)
    symbols = quantize_adaptive(x, bins, *sketch.buckets())
    clock.lap("range and codes")
    return symbols.dequantize(x.dtype), clock.stages


def plainly(call: Callable[[Tensor, int], Any]) -> Callable[[Tensor, int], Decoded]:
    """A quantizer that is one stage."""

    def run(x: Tensor, bins: int) -> Decoded:
        clock = Clock()
        symbols = call(x, bins)
        clock.lap("all")
        return symbols.dequantize(x.dtype), clock.stages

    return run


def learned(kind: type[KMeans] | type[MiniBatchKMeans]) -> Callable[[Tensor, int], Decoded]:
    """scikit-learn's own, on the raw values; its labels are the codes."""

    def run(x: Tensor, bins: int) -> Decoded:
        clock = Clock()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it did not converge, or found fewer clusters
            found = kind(bins, n_init=1, random_state=0).fit(x.numpy()[:, None])
        clock.lap(f"{found.n_iter_} iterations")
        centers = torch.from_numpy(np.asarray(found.cluster_centers_, np.float32)[:, 0])
        return centers[torch.from_numpy(found.labels_).long()], clock.stages

    return run


def gobo(x: Tensor, bins: int) -> Decoded:
    """GOBO's k-means with every iteration a pass over all values but the outliers."""
    clock = Clock()
    apart = is_outlier(x)
    rest = x[~apart].numpy()
    ordered = np.sort(rest)
    edges = np.linspace(0, rest.size, bins + 1).astype(np.int64)
    centers = np.array([ordered[a:b].mean(dtype=np.float64) for a, b in pairwise(edges)])
    clock.lap("outliers and start")
    best, least, iterations, codes = centers, np.inf, 0, None
    while iterations < 1000:
        iterations += 1
        cells = np.searchsorted(((centers[1:] + centers[:-1]) / 2).astype(np.float32), rest)
        error = float(np.abs(rest - centers.astype(np.float32)[cells]).sum(dtype=np.float64))
        enough = error >= least * (1 - 1e-4)
        if error < least:
            best, least, codes = centers, error, cells
        if enough:
            break
        counts = np.bincount(cells, minlength=bins)
        means = np.bincount(cells, weights=rest, minlength=bins) / np.maximum(counts, 1)
        centers = np.where(counts > 0, means, centers)
    clock.lap(f"{iterations} iterations")
    out = x.clone()
    out[~apart] = torch.from_numpy(best.astype(np.float32)[codes])
    return out, clock.stages


def subjects() -> list[Subject]:
    return [
        Subject("ours, sigma 0.2", ours(0.2)),
        Subject("ours, sigma 1", ours(1.0)),
        Subject("ours, sigma 0.2, protected", ours(0.2, 0.005)),
        Subject("ours, sigma 1, protected", ours(1.0, 0.005)),
        Subject("uniform (QD+)", plainly(quantize_uniform)),
        Subject("adaptive uniform (CNR+)", adapted),
        Subject("outliers and k-means (GOBO+)", plainly(quantize_with_outliers)),
        Subject("GOBO, plain", gobo),
        Subject("logarithmic, signed", plainly(lambda x, bins: quantize_log(x, bins, signed=True))),
        Subject("scikit-learn MiniBatchKMeans", learned(MiniBatchKMeans)),
        Subject("scikit-learn KMeans", learned(KMeans), slow=True),
    ]


def measure(found: list[Subject], x: Tensor, bins: int, repeats: int) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for subject in found:
        subject.run(x[:10_000], bins)
    for turn in range(repeats):
        for subject in found:
            if turn and subject.slow:
                continue
            decoded, stages = subject.run(x, bins)
            subject.seconds.append(sum(stages.values()))
            rows[subject.name] = {"stages": stages, **lost(x, decoded)}
    for subject in found:
        rows[subject.name] |= {"seconds": median(subject.seconds), "runs": len(subject.seconds)}
    return rows


def lost(x: Tensor, decoded: Tensor) -> dict[str, float]:
    errors = x - decoded
    return {"mse": float(errors.double().square().mean()), "largest": float(errors.abs().max())}


def printed(rows: dict[str, dict[str, Any]]) -> str:
    base = rows["ours, sigma 0.2"]["seconds"]
    head = ["quantizer", "seconds", "ours is faster by", "rms error", "largest error", "stages of the last run"]
    cells = []
    for name, row in rows.items():
        stages = ", ".join(f"{stage} {seconds:.3g}" for stage, seconds in row["stages"].items())
        figures = [f"{row['seconds']:.3f}", f"{row['seconds'] / base:.1f}", f"{row['mse'] ** 0.5:.3e}"]
        cells.append([name, *figures, f"{row['largest']:.3e}", stages])
    return table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--bins", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/quantizers.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        rows = measure(subjects(), values(args.values), args.bins, args.repeats)
    result = {"machine": lossless_speed.machine(), "values": args.values, "bins": args.bins, "quantizers": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))
    print(printed(rows))
    seconds = max(row["seconds"] for name, row in rows.items() if name.startswith("ours")) * 1e7 / args.values
    verdict = "PASS" if seconds <= REACH else "miss"
    print(f"{verdict}  ours, per 10 million values, {args.bins} bins, one core: {seconds:.2f} s, at most {REACH} s")


if __name__ == "__main__":
    main()
