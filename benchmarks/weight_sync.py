"""Weight sync: bytes of a version, seconds of both ends and the pause of a model, beside index + value and XOR.

    python benchmarks/weight_sync.py --quick          # a toy policy; a minute, nothing is written
    python benchmarks/weight_sync.py --start DIR/gpt_10M-640-0-320-50-7.pt    # a quarter of an hour, resumable

The series is that of `weight_sync_series.py`: a version after every step, or every 4th or 16th. Ours goes through a
directory in /dev/shm, as `Publisher` and `Subscriber` do; each version is compared bit for bit. Rivals code the same
bits:

    index + value            int32 positions and new bf16 values
    index + value, zstd      distances of positions as varints, then the new values, together; zstd 3
    index, value, zstd       the same with the two bytes of the values apart, each of the three by itself; zstd 3
    XOR + zstd               the exclusive or of all bits; zstd 3, and 9

The pause is beside what torch takes to copy the changed weights, `tensor.view(-1)[index] = values`, with index and
values at hand; both are medians of nine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from lossless_speed import machine
from run_log import version as code_version
from torch import Tensor
from weight_sync_series import Weights, default_start, published
from workloads import REPO, default_data

from shrinkpoint.sync import Publisher, Subscriber

RESULTS = REPO / "benchmarks" / "results" / "weight_sync.json"
RATES = (1e-6, 1e-5, 1e-4)
INTERVALS = (1, 4, 16)
WARMUP, VERSIONS, MAX_PAIRS = 16, 49, 12
Bits = np.ndarray[tuple[int], np.dtype[np.uint16]]


def rivals(before: Bits, after: Bits) -> dict[str, int]:
    """Bytes of the change from one version to the next, by method."""
    index = np.flatnonzero(before != after)
    values = after[index]
    positions, low, high = varints(np.diff(index, prepend=-1) - 1), *values.view(np.uint8).reshape(-1, 2).T
    difference = (before ^ after).tobytes()
    return {
        "index + value": 6 * len(index),
        "index + value, zstd": zstd(positions + values.tobytes()),
        "index, value, zstd": zstd(positions) + zstd(low.tobytes()) + zstd(high.tobytes()),
        "XOR + zstd": zstd(difference),
        "XOR + zstd 9": zstd(difference, 9),
    }


def varints(numbers: np.ndarray[Any, Any]) -> bytes:
    """Numbers as little-endian groups of seven bits, the highest bit of all but the last set."""
    groups = np.stack([(numbers >> shift) & 127 for shift in range(0, 35, 7)], 1).astype(np.uint8)
    is_used = np.stack([np.ones_like(numbers, bool), *[(numbers >> shift) > 0 for shift in range(7, 35, 7)]], 1)
    groups[:, :-1] |= is_used[:, 1:].astype(np.uint8) << 7
    return bytes(groups[is_used])


def zstd(data: bytes, level: int = 3) -> int:
    return len(zstandard.ZstdCompressor(level=level).compress(data))


def bits(weights: Weights) -> Bits:
    joined = torch.cat([tensor.reshape(-1).view(torch.int16) for tensor in weights.values()])
    return joined.numpy().view(np.uint16)


def copy_seconds(live: Weights, before: Weights, after: Weights) -> float:
    """What torch takes to copy the values that change, where it knows which they are; the median of nine."""
    changes: list[tuple[Tensor, Tensor, Tensor]] = []
    for name, tensor in live.items():
        old, new = (weights[name].reshape(-1) for weights in (before, after))
        index = (old.view(torch.int16) != new.view(torch.int16)).nonzero().view(-1)
        if len(index):
            changes.append((tensor.view(-1), index, new[index]))
    rounds = []
    for _ in range(9):
        began = time.perf_counter()
        for flat, index, values in changes:
            flat[index] = values
        rounds.append(time.perf_counter() - began)
    return statistics.median(rounds)


def pause_seconds(live: Weights, before: Weights, after: Weights) -> float:
    """Our pause for the same change; the median of nine."""
    from shrinkpoint.sync.in_place import plan_writes, write_all

    rounds = []
    for _ in range(9):
        for name, tensor in live.items():
            tensor.copy_(before[name])
        rounds.append(write_all(live, plan_writes(live, after, "benchmark")))
    return statistics.median(rounds)


def measure(versions: list[Weights]) -> dict[str, Any]:
    """Means over the versions after the first."""
    rows: list[dict[str, float]] = []
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    live = {name: torch.zeros_like(tensor) for name, tensor in versions[0].items()}
    try:
        with Publisher(folder, threads=1) as publisher:
            subscriber = Subscriber(folder, threads=1)
            keyframe = publisher.publish(versions[0])
            subscriber.update(live)
            for before, after in pairwise(versions):
                report = publisher.publish(after)
                update = subscriber.update(live)
                assert update is not None and (bits(live) == bits(after)).all()
                old, new = bits(before), bits(after)
                size = report.delta_bytes or report.keyframe_bytes
                row = {"changed": float((old != new).mean()), "shrinkpoint": size, **rivals(old, new)}
                row |= {"publish_seconds": report.seconds, "with_keyframe": float(report.keyframe_bytes is not None)}
                row |= {"update_seconds": update.seconds, "pause_seconds": pause_seconds(live, before, after)}
                row |= {"copy_seconds": copy_seconds(live, before, after)}
                rows.append(row)
    finally:
        shutil.rmtree(folder)
    out = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
    plain = [row["publish_seconds"] for row in rows if not row["with_keyframe"]]
    out["delta_publish_seconds"] = statistics.mean(plain) if plain else None
    return {"versions": len(rows), "raw_bytes": keyframe.raw_bytes, "keyframe_bytes": keyframe.keyframe_bytes, **out}


def cells(options: argparse.Namespace) -> Iterator[tuple[float, int, list[Weights]]]:
    for rate in RATES:
        count = 9 if options.quick else VERSIONS
        series: list[Weights] | None = None
        for interval in INTERVALS[: 2 if options.quick else None]:
            if options.is_done(rate, interval):
                continue
            series = series or [
                *published(rate, WARMUP, count, options.data, options.series, options.start, quick=options.quick)
            ]
            yield rate, interval, series[::interval][-MAX_PAIRS - 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--series", type=Path, default=REPO / "benchmarks" / "results" / "weight_sync_series")
    parser.add_argument("--start", type=Path, default=default_start(), help="a recorded training to begin with")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    code = code_version("weight_sync.py", "weight_sync_series.py")
    document: dict[str, Any] = {"code": code, "date": date.today().isoformat(), "machine": machine(), "cells": []}
    if RESULTS.exists() and not options.quick and (held := json.loads(RESULTS.read_text()))["code"] == code:
        document = held
    done = {(cell["lr"], cell["every"]) for cell in document["cells"]}
    options.is_done = lambda rate, interval: (rate, interval) in done
    for rate, interval, versions in cells(options):
        cell = {"lr": rate, "every": interval, **measure(versions)}
        document["cells"].append(cell)
        if not options.quick:
            RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(cell), flush=True)
    show(document["cells"])


def show(rows: list[dict[str, Any]]) -> None:
    methods = ["index + value", "index + value, zstd", "index, value, zstd", "XOR + zstd", "XOR + zstd 9"]
    print("| lr, every | changed | ours | " + " | ".join(methods) + " | publish | update | pause | copy |")
    for row in rows:
        sizes = " | ".join(f"{row[name] / row['shrinkpoint']:.2f}x" for name in methods)
        times = " | ".join(
            f"{1000 * (row[name] or 0):.1f}"
            for name in ("delta_publish_seconds", "update_seconds", "pause_seconds", "copy_seconds")
        )
        size = f"{row['shrinkpoint'] / 1000:.0f} kB"
        print(f"| {row['lr']:g}, {row['every']} | {row['changed']:.1%} | {size} | {sizes} | {times} |")


if __name__ == "__main__":
    main()
