"""What one operation of a store costs as checkpoints gather in it: seconds, processor time and file operations.

    python benchmarks/store_size.py                       # 10, 110, 510 and 2,010 checkpoints: 10 minutes
    python benchmarks/store_size.py --counts 10 2010 --rounds 9

A small state (eight tensors of 16 x 16), chains of 20, on the disk of `--folder`. Operations in turn, round after
round, in one process that has the store open; in a store that is opened for the first time; and on the command line.
Each store ends ten checkpoints after a keyframe, and is brought back there after each round: `save` writes a delta,
`prune` deletes that checkpoint, its file and its ten links. Medians with the smallest and the largest. File operations
(opening, listing, linking, renaming, removing) are those that Python reports to `sys.addaudithook`.

The last column is what each further checkpoint adds. A list that was read before asks the file system for three times
an entry (those of the directory, of its links, of its manifest), without which a change by another process would stay
unseen; a prune also looks at the bases of each. `verify` reads every byte.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shrinkpoint as sp

HERE = Path(__file__).resolve().parent
CHAIN = 20
Row = dict[str, Any]
file_operations = 0


def count_file_operations(event: str, arguments: tuple[object, ...]) -> None:
    global file_operations
    file_operations += event == "open" or event.startswith("os.")


class Run:
    """A store of some checkpoints, and what is timed on it."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count
        self.generator = torch.Generator().manual_seed(0)
        self.state = {f"layers.{i}.weight": torch.randn(16, 16, generator=self.generator) for i in range(8)}
        self.open()
        for step in range(1, count + 1):
            self.train()
            self.store.save(step, self.state)

    def open(self) -> None:
        self.store = sp.Store(self.path, keyframe_every=CHAIN, threads=1)

    def train(self) -> None:
        for tensor in self.state.values():
            tensor.add_(1e-3 * torch.randn(tensor.shape, generator=self.generator))

    def operations(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What is timed, in this order; what comes between two of them is not timed."""
        self.store.list()
        yield "list", lambda: self.store.list()
        yield "manifest of the newest", lambda: self.store.manifest()
        yield "load of a step", lambda: self.store.load(5, keep=False)
        yield "restore", lambda: self.store.restore()
        self.train()
        yield "save", lambda: self.store.save(self.count + 1, self.state)
        self.store.forget(self.count + 1)
        yield "prune", lambda: self.store.prune(dry_run=False)
        yield "verify", lambda: self.store.verify()
        self.store.close()
        self.open()
        yield "list, first", lambda: self.store.list()
        self.open()
        yield "restore, first", lambda: self.store.restore()
        yield "save, first", lambda: self.store.save(self.count + 1, self.state)
        self.store.forget(self.count + 1)
        self.store.prune(dry_run=False)
        command = [sys.executable, "-m", "shrinkpoint", "list", str(self.path)]
        yield "shrinkpoint list", lambda: subprocess.run(command, check=True, capture_output=True)


def processor_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(run: Run) -> Iterator[Row]:
    """One round."""
    for name, operation in run.operations():
        before = file_operations
        began, used = time.perf_counter(), processor_seconds()
        operation()
        seconds, processor = time.perf_counter() - began, processor_seconds() - used
        row = {"operation": name, "checkpoints": run.count, "seconds": seconds, "processor_seconds": processor}
        yield row | {"file_operations": file_operations - before}


def medians(rows: list[Row]) -> list[Row]:
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["operation"], row["checkpoints"]), []).append(row)
    summary = []
    for group in groups.values():
        row = dict(group[0])
        for key in ("seconds", "processor_seconds", "file_operations"):
            row[key] = median(one[key] for one in group)
        row["spread"] = [min(one["seconds"] for one in group), max(one["seconds"] for one in group)]
        row["rounds"] = len(group)
        summary.append(row)
    return summary


def table(rows: list[Row]) -> Iterator[str]:
    """Lines of a Markdown table: milliseconds of processor time and of the clock, and file operations."""
    counts = sorted({row["checkpoints"] for row in rows})
    cells = {(row["operation"], row["checkpoints"]): row for row in rows}
    yield (
        "| processor ms (clock ms, file operations) | "
        + " | ".join(f"{count:,}" for count in counts)
        + " | ratio | µs an entry |"
    )
    yield "|---" * (len(counts) + 3) + "|"
    for name in dict.fromkeys(row["operation"] for row in rows):
        found = [cells[name, count] for count in counts]
        texts = [
            f"{1e3 * row['processor_seconds']:.1f} ({1e3 * row['seconds']:.1f}, {row['file_operations']:.0f})"
            for row in found
        ]
        first, last = found[0]["processor_seconds"], found[-1]["processor_seconds"]
        growth = 1e6 * (last - first) / max(counts[-1] - counts[0], 1)
        yield f"| {name} | " + " | ".join(texts) + f" | {last / max(first, 1e-9):.2f} | {growth:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 110, 510, 2010])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="for the stores; a temporary one if left out")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "store_size.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sys.addaudithook(count_file_operations)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        runs = []
        for count in arguments.counts:
            print(f"{count:,} checkpoints are written", file=sys.stderr, flush=True)
            runs.append(Run(Path(folder) / str(count), count))
        time.sleep(3)  # what is younger than two seconds is read again by any process
        rows = [row for _ in range(arguments.rounds) for run in runs for row in measure(run)]
    summary = medians(rows)
    print("\n".join(table(summary)))
    system = {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}
    document = {"date": date.today().isoformat(), "system": system, "chain": CHAIN, "rows": summary}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
