"""How many iterations a failure costs when a run goes on from each system's checkpoints (arXiv 2009.13003, 1810.07354).

    python -m lab.studies.rework.run                    # the whole grid; stop and start it as you like
    python -m lab.studies.rework.run --only lenet sgd   # a part of it
    python -m lab.studies.rework.run --quick            # short runs, a minute

A course is one training, undisturbed, whose states are saved by every system every few iterations. At each of four
failures per course the run is set to what the last checkpoint holds, and goes on with the batches as if nothing had
happened. *Rework* is the number of iterations until the level, the training loss on a fixed sample, is as low as the
lowest that the undisturbed run had seen by the failure. *Extra* is rework less that from a lossless checkpoint of the
same iteration. A finished course is a line of results/rework.jsonl; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lab.studies.harness import default_data
from lab.studies.harness.ledger import Ledger, version
from lab.studies.rework import course, summary, table, trainings

FILES = ("workloads/__init__.py", "rework/trainings.py", "rework/course.py", "rework/bound.py")


@dataclass(frozen=True)
class Job:
    """One course."""

    workload: str
    optimizer: str
    seed: int
    quick: bool = False

    @property
    def words(self) -> list[str]:
        return [*self.workload.split(), self.optimizer, f"seed={self.seed}"]

    def __str__(self) -> str:
        return " ".join(self.words)


def grid(quick: bool) -> list[Job]:
    """All courses: two seeds of those that say most, then the rest."""
    names = ("mlr mnist", "lenet fashion", "mf") if quick else trainings.NAMES
    seeds = (0,) if quick else (0, 1, 2)
    jobs = [Job(name, kind, seed, quick) for seed in seeds for name in names for kind in trainings.OPTIMIZERS]
    return sorted(jobs, key=lambda job: (job.seed == 2, job.workload == "alexnet mnist"))


def chosen(jobs: list[Job], only: list[str]) -> Iterator[Job]:
    for job in jobs:
        if all(word in job.words for word in only):
            yield job


def work(job: Job, ledger: Ledger, args: argparse.Namespace) -> None:
    done = ledger.find(asdict(job), version(*FILES)) is not None
    missing = not trainings.available(job.workload)
    print(f"{'done' if done else 'no data' if missing else 'to do':8}  {job}", flush=True)
    if done or missing or args.list:
        return
    found = course.play(trainings.named(job.workload, args.data, quick=job.quick), job.optimizer, job.seed)
    ledger.add(asdict(job), version(*FILES), found)
    print(f"          level {found['target']['level']:.4f}, {found['seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--out", type=Path, help="ledger; default results/rework.jsonl")
    parser.add_argument("--only", nargs="*", default=[], help='all must fit: "lenet", "mnist", "sgd", "seed=0", ...')
    parser.add_argument("--quick", action="store_true", help="short runs: does it all work?")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--any-version", action="store_true", help="courses of older code count as done")
    parser.add_argument("--list", action="store_true", help="name the courses and what is done, run nothing")
    parser.add_argument("--report", action="store_true", help="only the tables")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    out = args.out or Path(f"results/rework{'-quick' if args.quick else ''}.jsonl")
    version(*FILES)  # before anybody edits
    ledger, everything = Ledger(out, args.any_version), grid(args.quick)
    for job in [] if args.report else chosen(everything, args.only):
        work(job, ledger, args)
    found = [ledger.find(asdict(job), version(*FILES)) for job in everything]
    if records := [record for record in found if record]:
        result = summary.summary(records)
        out.with_suffix(".json").write_text(json.dumps(result, indent=1))
        if not args.quick and len(records) == len(found):
            print("\n" + table.tables(result))


if __name__ == "__main__":
    main()
