"""What is left of training that is restored after every save.

    python benchmarks/repeated_restores.py            # the gpt workload from half way on: 25 minutes
    python benchmarks/repeated_restores.py --quick    # a toy

From the middle of a run, training goes on for some steps, saves, and everything is made anew and restored, again and
again. A scheme that rounds to the nearest center writes down that nothing has happened; every single checkpoint is then
within its threshold, and training stands still. Progress is the fall of the test loss from the middle on, as a share of
that of a run that is never interrupted; retention is what `SaveReport.retention` said of each save.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import workloads
from lossless_report import table
from lossless_speed import machine
from workloads import Course, Workload

import shrinkpoint as sp

FIXED = {
    "4 bins": {"bins": 4, "embedding_bins": 16, "prune": 0.0, "protect": 0.0005},
    "16 bins": {"bins": 16, "embedding_bins": 32, "prune": 0.0, "protect": 0.01},
}
SEARCHED = "searched, 1 %"


@dataclass(frozen=True)
class Case:
    """One run: how it rounds, how it is quantized, how often it is saved and restored."""

    dither: bool
    setting: str
    every: int

    def scheme(self, workload: Workload) -> sp.Inshrinkerator:
        if self.setting == SEARCHED:
            return sp.Inshrinkerator(threshold=0.01, evaluate=workload.evaluate, dither=self.dither)
        return sp.Inshrinkerator(config=FIXED[self.setting], dither=self.dither)


@dataclass(frozen=True)
class Ran:
    """What came of a case."""

    case: Case
    quality: float
    retention: list[float]
    ratios: list[float]


def middle(workload: Workload, seed: int) -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """A lossless checkpoint of the middle of a run."""
    folder = tempfile.TemporaryDirectory()
    course = workload.build(seed)
    for _ in range(workload.steps // 2):
        workload.advance(course)
    with sp.CheckpointManager(folder.name) as manager:
        _save(manager, course, workload.steps // 2)
    return Path(folder.name), folder


def begin(workload: Workload, seed: int, start: Path) -> Course:
    course = workload.build(seed)
    with sp.CheckpointManager(start) as manager:
        _restore(manager, course)
    return course


def run(workload: Workload, seed: int, start: Path, case: Case, steps: int) -> Ran:
    course, first = begin(workload, seed, start), workload.steps // 2
    retention, ratios = [], []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that little is retained is what is measured
        manager = sp.CheckpointManager(folder, scheme=case.scheme(workload))
        for step in range(first + 1, first + steps + 1):
            workload.advance(course)
            if (step - first) % case.every == 0:
                report = _save(manager, course, step)
                retention += [] if report.retention is None else [report.retention]
                ratios += [] if report.keyframe else [report.weights_ratio]
                course = workload.build(seed)
                _restore(manager, course)
        manager.close()
    return Ran(case, workload.test(course.model), retention, ratios)


def _save(manager: sp.CheckpointManager, course: Course, step: int) -> Any:
    stream = {"stream": course.stream.state_dict()}
    return manager.save(step, model=course.model, optimizer=course.optimizer, scheduler=course.scheduler, extra=stream)


def _restore(manager: sp.CheckpointManager, course: Course) -> None:
    at = manager.restore(model=course.model, optimizer=course.optimizer, scheduler=course.scheduler)
    assert at is not None
    course.stream.load_state_dict(at.extra["stream"])


def rows(found: list[Ran], before: float, undisturbed: float) -> list[list[str]]:
    return [
        [
            f"{one.case.setting}, {'dithered' if one.case.dither else 'to the nearest'}",
            f"{one.case.every}",
            f"{one.quality:.4f}",
            f"{100 * (before - one.quality) / (before - undisturbed):.0f}",
            f"{statistics.median(one.retention):.2f}",
            f"{min(one.retention):.2f}",
            f"{statistics.median(one.ratios):.1f}",
        ]
        for one in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--workload", default="gpt", help="gpt, resnet or wide")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=160, help="after the middle")
    parser.add_argument("--every", nargs="*", type=int, default=[10, 40], help="steps between two restores")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a toy: does it run?")
    parser.add_argument("--out", type=Path, default=Path("results/restores.json"))
    options = parser.parse_args()
    workloads.seed_everything(options.seed, options.threads)
    workload = workloads.named(options.workload, options.data, quick=options.quick)
    steps, every = (8, [2]) if options.quick else (options.steps, options.every)
    start, folder = middle(workload, options.seed)
    with folder:
        course = begin(workload, options.seed, start)
        before = workload.test(course.model)
        for _ in range(steps):
            workload.advance(course)
        undisturbed = workload.test(course.model)
        print(f"middle {before:.4f}, {steps} steps later, undisturbed {undisturbed:.4f}")
        cases = [Case(dither, name, n) for n in every for name in (*FIXED, SEARCHED) for dither in (False, True)]
        found = []
        for case in cases:
            found.append(run(workload, options.seed, start, case, steps))
            print(f"  {case}: {found[-1].quality:.4f}", flush=True)
    head = ["", "steps between", "test loss", "progress %", "retention", "least", "weights x"]
    print(table(head, rows(found, before, undisturbed)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"workload": options.workload, "seed": options.seed, "steps": steps, "quick": options.quick}
    document = {"machine": machine(), **facts, "middle": before, "undisturbed": undisturbed}
    options.out.write_text(json.dumps({**document, "runs": [asdict(one) for one in found]}, indent=1))
    print("written:", options.out)


if __name__ == "__main__":
    main()
