"""Seconds of a load by the number of deltas behind it, and what shorter chains cost in bytes: where a chain should end.

    python benchmarks/restore_depth.py               # twenty minutes of a core, 2 GB of memory
    python benchmarks/restore_depth.py --quick       # a toy: does it all run?

A GPT of 13 M parameters with AdamW (`scale_states.py`, `--steps` simulated steps between saves) is saved 41 times by
each scheme in one chain that nothing ends. Then checkpoints with 0 to 40 deltas behind them are loaded in turns,
from a store that was just opened, with files in the page cache; the figure is the median of processor seconds, with one
thread. From the bytes of every file follows what one checkpoint takes on average if every n-th is a keyframe, and from
the seconds how long a load takes, in the mean over a chain and at its end. Results: results/restore_depth.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from lossless_report import table
from lossless_speed import machine
from scale_states import GPTShapes, Weight, state_dicts
from torch import Tensor

import shrinkpoint as sp

GPT, TOY = GPTShapes(6, 320, vocabulary=16000), GPTShapes(2, 64, vocabulary=1000)
DEPTHS = (0, 1, 2, 5, 10, 20, 30, 40)
CHAINS = (1, 2, 5, 10, 20, 40)
"""Checkpoints of a chain, its keyframe included, that the table weighs."""
CONFIG = {"bins": 8, "embedding_bins": 16, "metric": "magnitude", "prune": 0.1, "protect": 0.005}
SCHEMES = {
    "lossless": lambda: "lossless",
    "fisher, .3": lambda: sp.Fisher(relative_error=0.3),
    "inshrinkerator": lambda: sp.Inshrinkerator(config=CONFIG),
    "inshrinkerator, lossy optimizer": lambda: sp.Inshrinkerator(config=CONFIG, optimizer="lossy"),
    "lc-checkpoint, 3 bits": lambda: sp.LCCheckpoint(bits=3),
}


def states(shapes: GPTShapes, saves: int, steps: int) -> Iterator[dict[str, Any]]:
    """The same states for every scheme, one after the other, in tensors that change in place."""
    weights = {
        name: Weight(shape, torch.Generator().manual_seed(number))
        for number, (name, shape) in enumerate(shapes.shapes())
    }
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        tensors |= weight.tensors(name)
    for number in range(saves):
        for weight in weights.values() if number else ():
            weight.advance(steps)
        yield state_dicts(shapes, tensors)


def write_chain(where: Path, scheme: str, shapes: GPTShapes, saves: int, steps: int) -> list[dict[str, Any]]:
    """Save all states in one chain: bytes of each file, and seconds of each save."""
    rows = []
    with sp.Store(where, keyframe_every=None, threads=1) as store:
        maker = SCHEMES[scheme]()
        for step, state in enumerate(states(shapes, saves, steps)):
            began = time.process_time()
            report = store.save(step, state, scheme=maker)
            rows.append({"bytes": report.stored_bytes, "raw": report.raw_bytes, "save": time.process_time() - began})
    return rows


def load_times(folders: dict[str, Path], depths: Sequence[int], rounds: int) -> dict[str, dict[int, float]]:
    """Median processor seconds of a load by scheme and depth; schemes and depths take turns."""
    seconds: dict[tuple[str, int], list[float]] = {(name, depth): [] for name in folders for depth in depths}
    for _ in range(rounds):
        for name, depth in seconds:
            with sp.Store(folders[name], threads=1) as store:
                began = time.process_time()
                store.load(depth, keep=False)
                seconds[name, depth].append(time.process_time() - began)
    return {name: {depth: median(seconds[name, depth]) for depth in depths} for name in folders}


def interpolated(times: dict[int, float], depth: int) -> float:
    """Seconds at a depth between two that were timed, on a line between them."""
    after = min(other for other in times if other >= depth)
    before = max(other for other in times if other <= depth)
    share = (depth - before) / (after - before) if after > before else 0.0
    return times[before] + share * (times[after] - times[before])


def weigh(files: list[dict[str, Any]], times: dict[int, float]) -> list[dict[str, Any]]:
    """By the length of a chain: bytes of a checkpoint, seconds of a load on average and at the end."""
    out = []
    for length in (length for length in CHAINS if length <= len(files)):
        loads = [interpolated(times, depth) for depth in range(length)]
        size = fmean(one["bytes"] for one in files[:length])
        out.append({"chain": length, "bytes": size, "mean seconds": fmean(loads), "last seconds": loads[-1]})
    return out


def show(result: dict[str, Any]) -> None:
    head = ["seconds of a load", *(f"{depth} deltas" for depth in result["depths"])]
    print(table(head, [[n, *(f"{t:.3f}" for t in row["load"].values())] for n, row in result["schemes"].items()]))
    head = ["scheme", "a chain of", "MB a checkpoint", "of raw", "mean load, s", "last load, s", "of a keyframe's"]
    cells = []
    for name, row in result["schemes"].items():
        first = row["chains"][0]["last seconds"]
        for one in row["chains"]:
            figures = [f"{one['bytes'] / 1e6:.3f}", f"1/{row['raw'] / one['bytes']:.1f}"]
            figures += [f"{one[key]:.3f}" for key in ("mean seconds", "last seconds")]
            cells.append([name, str(one["chain"]), *figures, f"{one['last seconds'] / first:.1f}"])
    print("\n" + table(head, cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="simulated training steps between saves")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=tuple(SCHEMES), default=tuple(SCHEMES))
    parser.add_argument("--folder", type=Path, help="for the stores, on the disk that is measured")
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    shapes, saves, rounds = (TOY, 6, 1) if args.quick else (GPT, DEPTHS[-1] + 1, args.rounds)
    depths = [depth for depth in DEPTHS if depth < saves]
    result: dict[str, Any] = {"machine": machine(), "date": date.today().isoformat(), "depths": depths}
    result |= {"parameters": shapes.parameters, "steps": args.steps, "rounds": rounds, "schemes": {}}
    with tempfile.TemporaryDirectory(prefix="shrinkpoint-depth-", dir=args.folder) as folder:
        folders = {name: Path(folder, str(number)) for number, name in enumerate(args.only)}
        files = {}
        for name, where in folders.items():
            files[name] = write_chain(where, name, shapes, saves, args.steps)
            print(f"  saved by {name}", file=sys.stderr, flush=True)
        times = load_times(folders, depths, rounds)
    for name in args.only:
        row = {"raw": files[name][0]["raw"], "files": files[name], "load": times[name]}
        result["schemes"][name] = row | {"chains": weigh(files[name], times[name])}
    out = args.out or Path(f"results/restore_depth{'-quick' if args.quick else ''}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1))
    show(result)


if __name__ == "__main__":
    main()
