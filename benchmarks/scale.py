"""What a save and a load cost as the state grows: seconds, processor time, memory and bytes, beside others.

    python benchmarks/scale.py                    # 30, 124 and 350 M parameters, 1 and 2 threads: 1 hour, 20 GiB
    python benchmarks/scale.py --models 30M --repeats 5

States are those of GPTs with AdamW's moments, some simulated training steps apart (`scale_states.py`), read from files
so that each method sees the same. Every method runs in a process of its own (`scale_methods.py`), methods in turn and
rounds after each other, so that a change of the machine's speed meets them all. Files are written to `--folder`, on
the disk that is to be measured. Ours brings its files to the disk (fsync); `torch.save` is measured with and without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from plot import Line, Panel, write
from scale_methods import METHODS
from scale_states import MODELS, make_states

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
RATIOS = (
    ("fisher", "keyframe", "torch.save", "keyframe"),
    ("fisher", "keyframe", "torch.save", "keyframe, synced"),
    ("fisher", "delta, warm", "torch.save", "keyframe"),
    ("fisher", "load keyframe", "torch.save", "load keyframe"),
    ("fisher", "load delta", "torch.save", "load keyframe"),
    ("lossless", "keyframe", "torch.save", "keyframe"),
    ("lossless", "keyframe", "zipnn", "keyframe"),
    ("lossless", "delta, warm", "torch.save", "keyframe"),
    ("lossless", "load keyframe", "torch.save", "load keyframe"),
    ("lossless", "load keyframe", "zipnn", "load keyframe"),
)


def measure(arguments: argparse.Namespace, model: str, method: str, threads: int) -> list[Row]:
    """One round of a method, in a process of its own; one row with an error if it fails or has no memory left."""
    settings = {
        "states": str(arguments.folder / model),
        "model": model,
        "method": method,
        "threads": threads,
    }
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": "65536",  # freed memory goes back to the system, so that what is resident is in use
    }
    command = [sys.executable, str(HERE / "scale_methods.py"), json.dumps(settings)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    common = {"model": model, "method": method, "threads": threads}
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        return [common | {"operation": "", "error": lines[-1]}]
    result = json.loads(run.stdout.splitlines()[-1])
    return [common | {"state_bytes": result["state_bytes"]} | row for row in result["rows"]]


def medians(rows: list[Row]) -> list[Row]:
    """One row of each operation with the medians of all rounds."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["threads"], row["method"], row["operation"]), []).append(row)
    summary = []
    for group in groups.values():
        row = dict(group[0])
        for key in ("seconds", "processor_seconds", "peak_states", "beyond_live_states", "bytes", "stall_seconds"):
            if key in row:
                row[key] = median(one[key] for one in group)
        if "seconds" in row:
            row["spread"] = [min(one["seconds"] for one in group), max(one["seconds"] for one in group)]
            row["rounds"] = len(group)
        summary.append(row)
    return summary


def table(rows: list[Row]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield (
        "| model | threads | method | operation | s | GB/s | GB/s a core | peak, states | beyond live | ratio |"
        " stall, s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        head = f"| {row['model']} | {row['threads']} | {row['method']} | {row['operation']} |"
        if "error" in row:
            yield f"{head} {row['error']} |"
            continue
        gigabytes = row["state_bytes"] / 1e9
        ratio = f"{row['state_bytes'] / row['bytes']:.2f}" if "bytes" in row else ""
        stall = f"{row['stall_seconds']:.3f}" if "stall_seconds" in row else ""
        core = gigabytes / max(row["processor_seconds"], 1e-9)
        yield (
            f"{head} {row['seconds']:.3f} | {gigabytes / row['seconds']:.2f} | {core:.2f} |"
            f" {row['peak_states']:.2f} | {row['beyond_live_states']:.2f} | {ratio} | {stall} |"
        )


def ratios(rows: list[Row]) -> Iterator[tuple[str, float]]:
    """Times of ours over those of what people use, the gain of two threads, and the cost of a parameter by size."""
    seconds = {
        (row["model"], row["threads"], row["method"], row["operation"]): row["seconds"]
        for row in rows
        if "seconds" in row
    }
    sizes = {row["model"]: row["state_bytes"] for row in rows if "state_bytes" in row}
    for (model, threads), _ in dict.fromkeys(((key[0], key[1]), None) for key in seconds).items():
        for ours, operation, rival, other in RATIOS:
            a, b = seconds.get((model, threads, ours, operation)), seconds.get((model, threads, rival, other))
            if a and b:
                yield f"{model}, {threads} threads: {ours} {operation} / {rival} {other}", a / b
        for operation in ("copy", "copy again"):
            copy = seconds.get((model, threads, "copy", operation))
            for row in rows:
                if copy and (row["model"], row["threads"]) == (model, threads) and "stall_seconds" in row:
                    name = f"{model}, {threads} threads: stall of {row['operation']} / {operation}"
                    yield name, row["stall_seconds"] / copy
    for model, threads, method, operation in seconds:
        if threads == 2 and (one_thread := seconds.get((model, 1, method, operation))):
            yield f"{model}: {method} {operation}, 1 thread / 2", one_thread / seconds[model, 2, method, operation]
        if model == "350M" and (small := seconds.get(("30M", threads, method, operation))):
            cost = seconds[model, threads, method, operation] / sizes[model] / (small / sizes["30M"])
            yield f"{threads} threads: {method} {operation}, cost a parameter at 350M / 30M", cost


def draw(rows: list[Row], path: Path) -> None:
    """GB/s of raw state by method, a panel for each operation; at the largest number of threads."""
    threads = max(row["threads"] for row in rows)
    panels = []
    for operation in ("keyframe", "delta, warm", "load keyframe", "load delta"):
        lines = []
        for model in MODELS:
            chosen = [
                row
                for row in rows
                if (row["model"], row["operation"], row["threads"]) == (model, operation, threads) and "seconds" in row
            ]
            if chosen:
                speeds = [row["state_bytes"] / 1e9 / row["seconds"] for row in chosen]
                lines.append(Line(model, [row["method"] for row in chosen], speeds, kind="bars"))
        panels.append(Panel(operation, "", "GB/s of raw state", lines))
    write(panels, path, f"Saves and loads, {threads} threads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["30M", "124M", "350M"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--steps", type=int, default=10, help="simulated training steps between saves")
    parser.add_argument("--folder", type=Path, help="for states and checkpoints; a temporary one if left out")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scale.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        arguments.folder = arguments.folder or Path(temporary)
        rows = list(_measure_all(arguments))
    summary = medians(rows)
    print("\n".join(table(summary)))
    comparisons = dict(ratios(summary))
    print("\n" + "\n".join(f"{value:6.2f}  {name}" for name, value in comparisons.items()))
    system = {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}
    document = {"date": date.today().isoformat(), "system": system, "rows": summary, "ratios": comparisons}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    draw(summary, arguments.out.with_suffix(""))


def _measure_all(arguments: argparse.Namespace) -> Iterator[Row]:
    for model in arguments.models:
        make_states(arguments.folder / model, model, 3, arguments.steps)
        for number in range(arguments.repeats):
            for threads in arguments.threads:
                for method in arguments.methods:
                    print(f"{model}, round {number + 1}, {threads} threads: {method}", file=sys.stderr, flush=True)
                    yield from measure(arguments, model, method, threads)


if __name__ == "__main__":
    main()
