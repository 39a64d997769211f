"""What else saves checkpoints, beside this library, on the same run: bytes, bits, rise of the loss, seconds.

    python -m benchmarks.comparison.run                                   # some minutes on two cores
    python -m benchmarks.comparison.run --only moonclip --rounds 1 --add  # one more beside the results there are

A GPT of 1.8 M parameters is trained with AdamW, and its states are kept (`--folder` keeps them for the next time).
Every method then gets each state in turn, in a process of its own, methods after each other and rounds after each
other; those that are not installed are named and left out (`pip install -e '.[bench]'`). A save ends when all that it
wrote is on the disk: what a program leaves to the system is flushed within the clock. Loads read what is in the
system's cache. The rise is that of the loss on held-out text that no method has seen, of the weights as they come back.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

import shrinkpoint as sp
from benchmarks.comparison.methods import METHODS, Method
from lab.studies import workloads
from lab.studies.harness import columns, default_data, environment, machine, program
from lab.studies.workloads import text as workload_text
from shrinkpoint.tensors.compare import same_bits
from shrinkpoint.tensors.flat_state import flatten, unflatten
from shrinkpoint_lab.bench.systems import CallTimer

Row = dict[str, Any]


def workload(options: argparse.Namespace) -> workloads.Workload:
    """The training whose states are saved."""
    return workload_text.gpt(options.data, quick=options.quick)


def make_series(options: argparse.Namespace) -> None:
    """Train, and keep the states of some steps, unless they are there."""
    work = workload(options)
    with sp.Store(options.folder / "series", keyframe_every=None) as store:
        if len(store.steps()) == options.checkpoints:
            return
        course = work.build(options.seed)
        for step in range(1, options.first + options.interval * (options.checkpoints - 1) + 1):
            work.advance(course)
            if step >= options.first and (step - options.first) % options.interval == 0:
                store.save(
                    step,
                    {"model": course.model.state_dict(), "optimizer": course.optimizer.state_dict()},
                    metrics={"loss": work.test(course.model)},
                )


class Run:
    """One method on all states of the series."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.work = workload(options)
        self.model = self.work.build(options.seed).model
        self.timer = CallTimer(lambda state: self.loss(state, self.work.evaluate))
        self.series = sp.Store(options.folder / "series", threads=options.threads)
        self.folder = Path(tempfile.mkdtemp(dir=options.folder))
        kind = METHODS[options.method]
        self.method: Method = kind(self.folder, options.threads, self.timer)
        self.measures_loss = kind.lossy and options.round == 0

    def loss(self, state: Any, evaluate: Any) -> float:
        self.model.load_state_dict(state["model"])
        return float(evaluate(self.model))

    def measure(self) -> Iterator[Row]:
        """A row for each checkpoint: all are saved, and then each is loaded."""
        steps = self.series.steps()
        try:
            saves = {step: self.save(step) for step in steps}
            for step in steps:
                row = {"step": step, **saves[step], **self.load(step)}
                yield {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}
        finally:
            shutil.rmtree(self.folder)

    def save(self, step: int) -> Row:
        state = self.series.load(step, keep=False)
        given, before = self.method.input(state, flatten(state)), _files(self.folder)
        self.timer.lap()
        began = time.perf_counter()
        self.method.save(step, given)
        seconds, evaluation = time.perf_counter() - began, self.timer.lap()["seconds"]
        after = _files(self.folder)
        began = time.perf_counter()
        for number in after.keys() - before.keys():
            _sync(after[number].path)
        flush = time.perf_counter() - began
        written = sum(file.size for file in after.values()) - sum(file.size for file in before.values())
        return {"bytes": written, "save": seconds + flush, "flush": flush, "evaluate": evaluation}

    def load(self, step: int) -> Row:
        state = self.series.load(step, keep=False)
        flat = flatten(state)
        like = {name: torch.empty_like(tensor) for name, tensor in flat.tensors.items()}
        began = time.perf_counter()
        loaded = self.method.load(step, like)
        seconds = time.perf_counter() - began
        tensors = self.method.tensors(loaded)
        exact = all(same_bits(tensor, tensors[name]) for name, tensor in flat.tensors.items())
        row = {"load": seconds, "exact": exact}
        if self.measures_loss:
            before = self.series.manifest(step).metrics["loss"]
            after = self.loss(unflatten(flat.tree, dict(tensors)), self.work.test)
            row |= {"loss": after, "rise": after / before - 1}
        return row


class File(NamedTuple):
    path: Path
    size: int


def _files(folder: Path) -> dict[int, File]:
    """The files by their inodes, so that one with several links is there once."""
    statuses = ((path, path.stat()) for path in folder.rglob("*") if path.is_file())
    return {status.st_ino: File(path, status.st_size) for path, status in statuses}


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def measure_all(options: argparse.Namespace) -> Iterator[Row]:
    """All rounds of all methods that are installed, each in a process of its own."""
    for number in range(options.rounds):
        for name, kind in METHODS.items():
            if options.only and not any(part in name for part in options.only):
                continue
            try:
                version = kind.version()
            except importlib.metadata.PackageNotFoundError as missing:
                print(f"{name}: not installed ({missing})", file=sys.stderr)
                continue
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
            settings = {"method": name, "round": number}
            settings |= {key: getattr(options, key) for key in ("folder", "data", "threads", "seed")}
            command = program("benchmarks.comparison.run", *(f"--{key}={value}" for key, value in settings.items()))
            command += ["--quick"] * options.quick
            run = subprocess.run(
                command, capture_output=True, text=True, env=environment(OMP_NUM_THREADS=str(options.threads))
            )
            result: Row = {"method": name, "version": version, "round": number, "load average": os.getloadavg()[0]}
            if run.returncode:
                yield result | {"error": (run.stderr.strip().splitlines() or ["?"])[-1]}
            else:
                yield result | {"checkpoints": json.loads(run.stdout.splitlines()[-1])}


def summarize(rows: list[Row]) -> list[Row]:
    """One row a method: sums of bytes, medians of seconds over checkpoints and rounds, mean and worst rise."""
    found = []
    for name in METHODS:
        rounds = [row for row in rows if row["method"] == name]
        points = [point for row in rounds for point in row.get("checkpoints", ())]
        if not points:
            continue
        steps = {point["step"] for point in points}
        rises = [point["rise"] for point in points if "rise" in point]
        found.append(
            {
                "method": name,
                "version": rounds[0]["version"],
                "bytes": sum(point["bytes"] for point in rounds[0]["checkpoints"]),
                "exact": all(point["exact"] for point in points),
                "save": median(point["save"] for point in points if point["step"] != min(steps)),
                "evaluate": median(point["evaluate"] for point in points if point["step"] != min(steps)),
                "load": median(point["load"] for point in points),
                "rise": [mean(rises), max(rises)] if rises else None,
            }
        )
    return found


def report(summary: list[Row]) -> str:
    """The summary as a table; bytes beside those of torch.save."""
    base = next((row["bytes"] for row in summary if row["method"] == "torch.save"), None)
    cells = []
    for row in summary:
        rise = "0" if row["exact"] else "not measured"
        if row["rise"]:
            rise = " ".join(f"{100 * value:+.2f}%" for value in row["rise"])
        ratio = f"{base / row['bytes']:.2f}x" if base else ""
        times = [f"{row[name]:.2f}" for name in ("save", "evaluate", "load")]
        cells.append(
            [
                row["method"],
                row["version"],
                f"{row['bytes'] / 1e6:.1f}",
                ratio,
                "yes" if row["exact"] else "no",
                rise,
                *times,
            ]
        )
    return columns(
        ["", "version", "MB", "smaller", "bits", "rise: mean, worst", "save, s", "of it evaluate", "load, s"], cells
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="methods whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--first", type=int, default=200, help="step of the first checkpoint")
    parser.add_argument("--interval", type=int, default=10, help="steps between two")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    parser.add_argument("--add", action="store_true", help="keep the rows of other methods in --out")
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--folder", type=Path, help="for states and checkpoints; a temporary one if left out")
    parser.add_argument("--out", type=Path, default=Path("results/comparison.json"))
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    workloads.seed_everything(options.seed, options.threads)
    if options.method:
        warnings.simplefilter("ignore")
        print(json.dumps(list(Run(options).measure())))
        return
    if options.quick:
        options.first, options.interval, options.checkpoints = 10, 2, 3
    earlier = json.loads(options.out.read_text())["rows"] if options.add and options.out.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        options.folder.mkdir(parents=True, exist_ok=True)
        make_series(options)
        new = list(measure_all(options))
    fresh = {row["method"] for row in new}
    rows = [row for row in earlier if row["method"] not in fresh] + new
    for row in rows:
        if "error" in row:
            print(f"{row['method']}: {row['error']}")
    summary = summarize(rows)
    print(report(summary))
    head = {"date": date.today().isoformat(), "machine": machine(), "torch": torch.__version__}
    settings = {
        name: getattr(options, name) for name in ("threads", "checkpoints", "first", "interval", "seed", "quick")
    }
    document = {**head, "settings": settings, "state": workload(options).facts, "summary": summary, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(_json_lines(document))


def _json_lines(document: Row) -> str:
    """JSON with one entry of each list a line."""
    parts = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join("  " + json.dumps(entry) for entry in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
