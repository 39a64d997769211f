"""What compressing the wire costs in quality: all grids of arXiv 2401.07788, and beyond.

    python -m lab.studies.wire.run                     # the whole grid; stop and start it as you like
    python -m lab.studies.wire.run --only key          # what decides most, three seeds
    python -m lab.studies.wire.run --only text topk    # a part of a task
    python -m lab.studies.wire.run --quick             # toys, seconds

Each run is a real training of a model in four stages, in one process, with `shrinkpoint.comm.insert_compression`: the
same bits as a pipeline. Messages are really made; their bytes are counted. A finished run is a line of
results/wire.jsonl; what is there is not run again.
"""

from __future__ import annotations

import argparse
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lab.studies import workloads
from lab.studies.harness import REPO, default_data, results
from lab.studies.harness.ledger import Ledger, version
from lab.studies.wire import grid, table, task
from lab.studies.wire.grid import Job
from lab.studies.wire.task import Task
from shrinkpoint import comm
from shrinkpoint.errors import LossWarning

TASK_FILES = ("wire/run.py", "wire/task.py", "wire/image.py", "wire/text.py", "workloads/image.py", "workloads/text.py")
CODE = ("compressors/*.py", "error_feedback.py", "aqsgd.py", "link.py", "simulate.py")
"""What decides the values that cross, under src/shrinkpoint/comm; native/wire_* and hadamard.hpp as well."""
WAYS = ("forward", "backward")


class Play:
    """One run, and what was seen of it."""

    def __init__(self, job: Job, task: Task) -> None:
        self.job, self.task = job, task
        workloads.seed_everything(job.seed, torch.get_num_threads())
        torch.utils.deterministic.fill_uninitialized_memory = False  # a fifth of the time, for nothing
        self.course = task.build(job.seed)
        self.start = task.test(self.course.model)
        forward, backward = (spec or None for spec in job.pair)
        self.points = comm.insert_compression(self.course.model, list(task.after), forward=forward, backward=backward)
        self.losses: list[float] = []
        self.begins = round(job.warmup * task.steps)
        """The step with which compression begins."""
        if self.begins:
            with unwarned():
                self.points.enabled = False

    def run(self) -> dict[str, Any]:
        began, busy = time.perf_counter(), time.process_time()
        before_last: dict[str, Any] = {}
        for step in range(self.task.steps):
            if step == self.task.steps - self.task.steps // self.task.epochs:
                before_last = self.seen()
            if step == self.begins:
                self.points.enabled = True
            drawn = self.course.stream.draw()
            self.points.set_sample_ids(drawn[2])
            self.losses.append(self.task.advance(self.course, drawn))
            if not math.isfinite(self.losses[-1]):
                break
        seconds, busy, links = time.perf_counter() - began, time.process_time() - busy, self.seen()
        return {
            **self.judged(self.course.model),
            "bits": {way: self.mean_bits(links, way) for way in WAYS},
            "bits of the last epoch": {way: bits(links, way, before_last) for way in WAYS},
            "links": links,
            "train loss": self.losses[:: max(1, len(self.losses) // 100)],
            "steps": len(self.losses),
            "train seconds": seconds,
            "train CPU seconds": busy,
            "facts": {**self.task.facts, "steps": self.task.steps, "epochs": self.task.epochs},
            "fingerprint": workloads.fingerprint(self.course.model),
        }

    def judged(self, model: nn.Module) -> dict[str, Any]:
        """Quality with compression on and off; None where the training was lost to values that are not finite."""
        finite = math.isfinite(self.losses[-1]) and all(bool(p.isfinite().all()) for p in model.parameters())
        found: dict[str, float | None] = {"on": None, "off": None}
        for way in found if finite else ():
            with unwarned():
                self.points.inference = way == "on"
            found[way] = self.task.test(model)
        return {**found, "start": self.start, "finite": finite}

    def mean_bits(self, links: dict[str, dict[str, Any]], way: str) -> float:
        """Bits a value of the whole run; messages of the warm-up, which no link sees, have 32."""
        share = self.begins / self.task.steps
        return 32 * share + (1 - share) * bits(links, way)

    def seen(self) -> dict[str, dict[str, Any]]:
        return {name: ledger.as_dict() for name, ledger in self.points.link_stats().items()}


@contextmanager
def unwarned() -> Iterator[None]:
    """Without the warning that a model was trained with sparse messages and is used without them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        yield


def bits(links: dict[str, dict[str, Any]], way: str, before: dict[str, dict[str, Any]] | None = None) -> float:
    """Sent for each value, ids and all, since `before`; 32 where nothing is compressed."""
    sums = {"wire_bytes": 0, "raw_bytes": 0}
    for name, one in links.items():
        if name.endswith(way):
            for key in sums:
                sums[key] += one[key] - (before[name][key] if before else 0)
    return 32 * sums["wire_bytes"] / sums["raw_bytes"] if sums["raw_bytes"] else 32.0


def play(job: Job, data: Path, cache: Path) -> dict[str, Any]:
    began = time.perf_counter()
    result = Play(job, task.named(job.task, data, cache, quick=job.quick)).run()
    return {**result, "seconds": time.perf_counter() - began}


def code() -> str:
    roots = REPO / "src" / "shrinkpoint" / "comm", REPO / "native"
    paths = [path for pattern in CODE for path in roots[0].glob(pattern)] + [
        path for pattern in ("wire_*.[ch]pp", "hadamard.hpp") for path in roots[1].glob(pattern)
    ]
    return version(*TASK_FILES, *(os.path.relpath(path, REPO / "lab" / "studies") for path in paths), core=False)


def work(job: Job, ledger: Ledger, args: argparse.Namespace) -> None:
    done = ledger.find(asdict(job), code()) is not None
    print(f"{'done' if done else 'to do':5}  {job}", flush=True)
    if done or args.list:
        return
    record = ledger.add(asdict(job), code(), play(job, args.data, args.cache))
    qualities = ", ".join(f"{way} {record[way]:.4f}" for way in ("on", "off")) if record["finite"] else "not finite"
    sizes = " / ".join(f"{record['bits'][way]:.2f}" for way in WAYS)
    print(f"       {qualities}, {sizes} bits, {record['seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--out", type=Path, help="ledger; default results/wire.jsonl")
    parser.add_argument(
        "--cache", type=Path, help="of the pre-trained model; default: the folder wire beside the ledger"
    )
    parser.add_argument("--only", nargs="*", default=[], help='all must fit: "image", "key", "topk", "q4:64", "seed=0"')
    parser.add_argument("--seeds", nargs="*", type=int, help="only these")
    parser.add_argument("--quick", action="store_true", help="toys: does it all run?")
    parser.add_argument("--threads", type=int, default=1, help="of torch and of the native core")
    parser.add_argument("--any-version", action="store_true", help="runs of older code count as done")
    parser.add_argument("--list", action="store_true", help="name the runs and what is done, run nothing")
    parser.add_argument("--report", action="store_true", help="only the tables")
    args = parser.parse_args()
    out = args.out or Path(f"results/wire{'-quick' if args.quick else ''}.jsonl")
    args.cache = args.cache or out.with_name("wire")
    torch.set_num_threads(args.threads)
    ledger, everything = Ledger(out, args.any_version), grid.grid(args.quick)
    code()  # before anybody edits
    for job in () if args.report else grid.chosen(everything, args.only, args.seeds):
        work(job, ledger, args)
    if not args.list:
        found = [ledger.find(asdict(job), code()) for job in everything]
        print("\n" + table.tables([results.row(record) for record in found if record]))


if __name__ == "__main__":
    main()
