"""What failures cost when every restart continues from a lossy checkpoint.

    python -m lab.studies.recovery.run                    # the whole grid; stop and start it as you like
    python -m lab.studies.recovery.run --only gpt         # in one terminal, and `--only resnet` in another
    python -m lab.studies.recovery.run --quick            # toys, seconds

Each run is a real training through `sp.Manager` in a temporary store. At a restore point, evenly spaced, the manager,
the scheme, the model and the optimizer are thrown away right after a save and made anew, and `restore` brings the run
back from its files. A finished run is a line of results/recovery.jsonl; what is there is not run again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import shrinkpoint as sp
from lab.studies import systems, workloads
from lab.studies.harness import default_data, results
from lab.studies.harness.ledger import Ledger, version
from lab.studies.recovery import table
from lab.studies.workloads import Course, Workload
from lab.studies.workloads.variants import VARIANTS
from shrinkpoint_lab.bench.systems import CallTimer


@dataclass(frozen=True)
class Job:
    """One run: what is trained, and what happens to it.

    Attributes:
        system: "none" saves nothing: an uninterrupted run.
        restores: how many times the run is thrown away and restored.
        paper: the paper's coder and search in place of ours.
    """

    workload: str
    seed: int = 0
    system: str = "none"
    threshold: float = 0.0
    restores: int = 0
    paper: bool = False
    optimizer: str = "exact"
    keyframe_every: int | None = 20
    quick: bool = False

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in asdict(self).items())

    def __str__(self) -> str:
        unusual = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        return " ".join([self.workload, f"seed={self.seed}", *(unusual or ["uninterrupted"])])


UNMEASURED = (
    "lc-checkpoint(bits=2)",
    "lc-checkpoint(bits=3)",
    "lc-checkpoint(bits=3, paper=True)",
    "scar",
    "topn",
    "excp",
    "excp(paper=True, paper_fp16=True)",
)
"""Schemes without a threshold, by their names in the harness."""
OURS = ("fisher(relative_error=.3)", "fisher(relative_error=.4)", "fisher(relative_error=.6)")
"""The same, of ours."""
EVERY = (
    *((system, 0.0) for system in ("lossless", *UNMEASURED, OURS[0])),
    *((system, 0.01) for system in ("fisher", "inshrinkerator", "qd", "cnr", "gobo")),
)
"""One setting of every scheme, and its threshold: ten restores on three workloads."""
BASE_FILES = ("workloads/__init__.py", "workloads/text.py", "workloads/image.py")


def grid(quick: bool) -> list[Job]:
    """All runs, what the others are compared with first."""
    ours = "inshrinkerator"
    if quick:
        sweep = [Job("gpt", 0, ours, 0.05, 2, False), Job("resnet", 0, ours, 0.05, 1, False)]
        plain = [Job(name, seed) for name in ("gpt", "resnet") for seed in (0, 1)]
        jobs = [*plain, Job("gpt", 0, "lossless", restores=2), *sweep, Job("gpt", 0, "qd", 0.05, 2)]
        return [Job(**{**asdict(job), "quick": True}) for job in jobs]
    jobs = [Job(name, seed) for name in ("gpt", "resnet") for seed in (0, 1, 2)]
    jobs += [Job("gpt", 0, "lossless")]
    for name, thresholds in (("gpt", (0.05, 0.01)), ("resnet", (0.05, 0.01))):
        jobs += [Job(name, 0, ours, threshold, 10) for threshold in thresholds]
        jobs += [Job(name, 0, system, 0.05, 10) for system in ("qd", "cnr")]
    jobs += [Job("gpt", 0, ours, 0.05, 10, paper=True, keyframe_every=None)]
    jobs += [Job("gpt", seed, ours, 0.01, 10) for seed in (1, 2)]
    jobs += [Job("gpt", 0, ours, threshold, n) for threshold in (0.05, 0.01, 0.001) for n in (0, 5, 10, 20)]
    jobs += [Job("gpt", seed, system, 0.0, 10) for system in UNMEASURED for seed in (0, 1, 2)]
    jobs += [Job(name, seed) for name in VARIANTS for seed in (0, 1, 2)]
    every = ("gpt", "resnet", *VARIANTS)
    jobs += [Job(name, seed, system, 0.0, 10) for name in every for system in OURS for seed in (0, 1, 2)]
    jobs += [
        Job(name, seed, "fisher", threshold, 10) for name in every for threshold in (0.001, 0.01) for seed in (0, 1, 2)
    ]
    jobs += [Job(name, seed, *kind, 10) for seed in (0, 1, 2) for kind in EVERY for name in table.WORKLOADS]
    return list(dict.fromkeys(jobs))


def restore_points(workload: Workload, restores: int) -> set[int]:
    """Steps, each a checkpoint's, that cut the run into `restores` + 1 parts as equal as can be."""
    every = workload.checkpoints / (restores + 1)
    return {max(1, round(every * k)) * workload.interval for k in range(1, restores + 1)}


class Play:
    """One run, and what was seen of it."""

    def __init__(self, job: Job, workload: Workload, folder: Path) -> None:
        self.job, self.workload, self.folder = job, workload, folder
        self.watch = CallTimer(workload.evaluate)
        self.saves: list[dict[str, Any]] = []
        self.restores: list[dict[str, Any]] = []
        self.curve: list[tuple[int, float]] = []
        self.losses: list[float] = []
        self.train_seconds = 0.0
        self.manager: sp.CheckpointManager | None = None
        self.open()

    def open(self) -> None:
        """Everything as a process that just started makes it."""
        job = self.job
        workloads.seed_everything(job.seed, torch.get_num_threads())
        self.course: Course = self.workload.build(job.seed)
        self.recorder = systems.recorder(job.system, self.course.model, self.workload.interval)
        if job.system == "none":
            return
        scheme = systems.scheme(
            job.system,
            threshold=job.threshold,
            evaluate=self.watch,
            higher_is_better=self.workload.higher_is_better,
            optimizer=job.optimizer,
            gradients=self.recorder,
            paper=job.paper,
        )
        self.manager = sp.CheckpointManager(
            self.folder, scheme=scheme, keyframe_every=job.keyframe_every, threads=torch.get_num_threads()
        )

    def run(self) -> dict[str, Any]:
        work, points = self.workload, restore_points(self.workload, self.job.restores)
        for step in range(1, work.steps + 1):
            began = time.perf_counter()
            self.losses.append(work.advance(self.course, self.recorder))
            self.train_seconds += time.perf_counter() - began
            if step % work.interval == 0:
                self.curve.append((step, work.evaluate(self.course.model)))
                if self.manager is not None:
                    self.save(step)
                if step in points:
                    self.fail(step)
        result = self.result()
        if self.manager is not None:
            self.manager.close()
        return result

    def save(self, step: int) -> None:
        assert self.manager is not None
        self.watch.lap()
        began = time.perf_counter()
        course = self.course
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            report = self.manager.save(
                step,
                model=course.model,
                optimizer=course.optimizer,
                scheduler=course.scheduler,
                extra={"stream": course.stream.state_dict()},
            )
        seconds = time.perf_counter() - began
        assert report is not None
        weights = report.roles["parameter"]
        self.saves.append(
            {
                "step": step,
                "keyframe": report.keyframe,
                "raw": report.raw_bytes,
                "stored": report.stored_bytes,
                "weights raw": weights.raw,
                "weights stored": weights.stored,
                "retention": report.retention,
                "seconds": seconds,
                "evaluations": self.watch.lap(),
                "search": report.loss_report,
                "warnings": [str(one.message) for one in heard],
            }
        )

    def fail(self, step: int) -> None:
        """Lose everything but the files, and come back from them."""
        assert self.manager is not None
        before = self.curve[-1][1]
        self.manager.close()
        self.open()
        course = self.course
        at = self.manager.restore(model=course.model, optimizer=course.optimizer, scheduler=course.scheduler)
        assert at is not None and at.step == step, at
        course.stream.load_state_dict(at.extra["stream"])
        if self.recorder is not None:
            self.recorder.at(step)
        after = self.workload.evaluate(course.model)
        facts = {"seconds": at.report.seconds, "depth": at.report.depth, "before": before, "after": after}
        self.restores.append({"step": step, **facts})

    def result(self) -> dict[str, Any]:
        weights = [sum(save[key] for save in self.saves) for key in ("weights raw", "weights stored")]
        whole = [sum(save[key] for save in self.saves) for key in ("raw", "stored")]
        saving = sum(save["seconds"] for save in self.saves)
        return {
            "quality": self.workload.test(self.course.model),
            "fingerprint": workloads.fingerprint(self.course.model),
            "curve": self.curve,
            "train loss": self.losses[:: max(1, len(self.losses) // 100)],
            "facts": {
                **self.workload.facts,
                "steps": self.workload.steps,
                "interval": self.workload.interval,
                "higher_is_better": self.workload.higher_is_better,
            },
            "saves": self.saves,
            "restores": self.restores,
            "ratio weights": weights[0] / weights[1] if self.saves else None,
            "ratio full": whole[0] / whole[1] if self.saves else None,
            "train seconds": self.train_seconds,
            "save seconds": saving,
            "overhead": saving / self.train_seconds,
        }


def play(job: Job, data: Path) -> dict[str, Any]:
    workload = workloads.named(job.workload, data, quick=job.quick)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shrinkpoint-recovery-") as folder:
        result = Play(job, workload, Path(folder)).run()
    return {**result, "seconds": time.perf_counter() - began}


def code(job: Job) -> str:
    """The version that a run of this job belongs to: an uninterrupted one does not depend on how saves are coded."""
    return version(*BASE_FILES, core=False) if job.system == "none" else version(*BASE_FILES, "recovery/run.py")


def chosen(jobs: list[Job], only: list[str]) -> Iterator[Job]:
    for job in jobs:
        if all(word in job.name.split() or word in (job.workload, job.system) for word in only):
            yield job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--out", type=Path, help="ledger; default results/recovery.jsonl")
    parser.add_argument("--only", nargs="*", default=[], help='all must fit: "gpt", "qd", "restores=10", "seed=0", ...')
    parser.add_argument("--quick", action="store_true", help="toys: does it all run?")
    parser.add_argument("--threads", type=int, default=1, help="of torch and of the native core")
    parser.add_argument("--any-version", action="store_true", help="runs of older code count as done")
    parser.add_argument("--list", action="store_true", help="name the runs and what is done, run nothing")
    parser.add_argument("--report", action="store_true", help="only the tables")
    args = parser.parse_args()
    out = args.out or Path(f"results/recovery{'-quick' if args.quick else ''}.jsonl")
    torch.set_num_threads(args.threads)
    ledger, everything = Ledger(out, args.any_version), grid(args.quick)
    for job in everything:
        code(job)  # before anybody edits
    for job in [] if args.report else chosen(everything, args.only):
        work(job, ledger, args)
    found = [ledger.find(asdict(job), code(job)) for job in everything]
    show([record for record in found if record])


def work(job: Job, ledger: Ledger, args: argparse.Namespace) -> None:
    done = ledger.find(asdict(job), code(job)) is not None
    state = "done" if done else "to do" if systems.available(job.system) else "no such scheme yet"
    print(f"{state:8}  {job}", flush=True)
    if done or args.list or not systems.available(job.system):
        return
    record = ledger.add(asdict(job), code(job), play(job, args.data))
    ratio = f", weights {record['ratio weights']:.1f}x, full {record['ratio full']:.2f}x" if record["saves"] else ""
    print(f"          quality {record['quality']:.4f}{ratio}, {record['seconds']:.0f} s", flush=True)


def show(records: list[dict[str, Any]]) -> None:
    """Print the tables of docs/scheme_studies.md out of these runs."""
    if not records:
        return
    runs = [results.row(record, records) for record in records]
    document = {"machine": records[-1]["machine"], "runs": runs}
    print(f"\n{table.tables(document)}\n\n{table.thresholds(document)}")


if __name__ == "__main__":
    main()
