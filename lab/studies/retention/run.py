"""What retention holds on the disk: bytes, each inode once, beside the same retention of plain checkpoints.

    python -m lab.studies.retention.run            # ten minutes on two cores
    python -m lab.studies.retention.run --quick    # a toy of it

Two trainings (`trainings.py`) are run once. At every save point each scheme saves the same state through a
`CheckpointManager` of its own, for each number of checkpoints to keep, beside `torch.save` with the same retention.
Then Hugging Face's Trainer and Lightning train with their own retention, stock and through shrinkpoint
(`frameworks.py`). Means are of the second half of the saves, when as many checkpoints are there as are kept. A peak is
the most bytes at any time of a save, found right before files are deleted or renamed (`meter.py`). The rise of the loss
is measured on held-out data, four times in the second half (frameworks: at the end): the newest checkpoint is read
back, and its loss is compared with that of the model that trains. Writes results/retention.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import shrinkpoint as sp
from lab.studies import systems, workloads
from lab.studies.harness import default_data, machine
from lab.studies.retention import frameworks, table
from lab.studies.retention.frameworks import PLAIN, note_rise, parameters
from lab.studies.retention.meter import Meter
from lab.studies.retention.trainings import Training, training
from lab.studies.workloads import Course

SCHEMES = (
    "lossless",
    "fisher(relative_error=.3)",
    "inshrinkerator finest",
    "qd finest",
    "lc-checkpoint(bits=3)",
    "topn",
)
"""Names of `systems.scheme`; "finest" is the finest setting of a scheme whose settings would be searched."""
IN_FRAMEWORKS = (PLAIN, *SCHEMES[:2])
RISES = 4
"""How often the rise of the loss is measured in the second half of a run."""


@dataclass(frozen=True)
class Plan:
    """How much is run.

    Attributes:
        saves: number of saves, by number of checkpoints to keep.
        interval: steps between two saves, in our loop and in Lightning.
        trainer_interval: the same in the Trainer.
    """

    saves: Mapping[int, int] = field(default_factory=lambda: {1: 24, 2: 24, 3: 24, 10: 40})
    interval: int = 8
    trainer_interval: int = 3


QUICK = Plan({2: 4}, 2, 2)


class Plain:
    """`torch.save` into a new file, and then the oldest is deleted."""

    def __init__(self, root: Path, last: int) -> None:
        self.meter, self._last = Meter(root), last

    def save(self, step: int, course: Course) -> None:
        with self.meter.saving():
            place = self.meter.root / f"{step:06}.pt"
            torch.save(_state_dicts(course), place)
            for old in sorted(self.meter.root.iterdir())[: -self._last]:
                old.unlink()


class Managed:
    """A `CheckpointManager` with a scheme."""

    def __init__(self, root: Path, last: int, scheme: str) -> None:
        self.meter, self.scheme = Meter(root), scheme
        self.manager = sp.CheckpointManager(root, scheme=systems.scheme(scheme), keep=sp.Keep(last=last))

    def save(self, step: int, course: Course) -> None:
        parts: dict[str, Any] = {"model": course.model, "optimizer": course.optimizer, "scheduler": course.scheduler}
        with self.meter.saving():
            report = self.manager.save(step, rng=False, **parts)
        assert report is not None and report.depth is not None
        self.meter.files.append(report.depth + 1)

    def note_rise(self, step: int, of: Training, live: float) -> None:
        """Read the newest checkpoint back, and compare the loss of its model with that of the live one."""
        if self.scheme != "lossless":
            trial = of.workload.build(0).model
            trial.load_state_dict(self.manager.store.load(step, keep=False)["model"])
            note_rise(self.meter, self.scheme, live, of.held_out(trial))


def _state_dicts(course: Course) -> dict[str, Any]:
    return {name: getattr(course, name).state_dict() for name in ("model", "optimizer", "scheduler")}


def loop_rows(root: Path, of: Training, plan: Plan) -> Iterator[dict[str, Any]]:
    """A row for each scheme and number of checkpoints to keep, of one training in a plain loop."""
    course = of.workload.build(0)
    plain = {last: Plain(root / f"plain-{last}", last) for last in plan.saves}
    ours = {(n, last): Managed(root / f"{n}-{last}", last, SCHEMES[n]) for n in range(len(SCHEMES)) for last in plain}
    for number in range(1, max(plan.saves.values()) + 1):
        for _ in range(plan.interval):
            of.workload.advance(course)
        if number % 8 == 0:
            print(f"  {of.workload.name}: {number} saves", flush=True)
        live = cache(lambda: of.held_out(course.model))
        for last, beside in plain.items():
            if number <= plan.saves[last]:
                beside.save(number, course)
        for (_, last), managed in ours.items():
            if number <= (end := plan.saves[last]):
                managed.save(number, course)
                if (end - number) % max(1, end // 2 // RISES) == 0 and number > end // 2:
                    managed.note_rise(number, of, live())
    about = {"training": of.workload.name, "writer": "CheckpointManager"}
    for last, beside in plain.items():
        yield row(about, PLAIN, last, beside.meter, beside.meter)
    for (n, last), managed in ours.items():
        managed.manager.close()
        yield row(about, SCHEMES[n], last, managed.meter, plain[last].meter)


def framework_rows(root: Path, of: Training, plan: Plan, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of Hugging Face's Trainer and of Lightning."""
    for writer in ("Trainer", "Lightning"):
        about = {"training": "gpt-2" if writer == "Trainer" else of.workload.name, "writer": writer}
        for last, saves in plan.saves.items():
            plain: Meter | None = None
            for number, scheme in enumerate(IN_FRAMEWORKS):
                place, size = root / f"{writer}-{last}-{number}", {"last": last, "saves": saves}
                if writer == "Trainer":
                    size["interval"] = plan.trainer_interval
                    meter = frameworks.transformers_run(place, scheme, options.data, quick=options.quick, **size)
                else:
                    meter = frameworks.lightning_run(place, scheme, of, interval=plan.interval, **size)
                plain = plain or meter
                yield row(about, scheme, last, meter, plain)


def row(about: Mapping[str, Any], scheme: str, last: int, meter: Meter, plain: Meter) -> dict[str, Any]:
    """The figures of one writer, beside those of the plain one with the same retention."""
    found, other = meter.figures(), plain.figures()
    one = plain.held[0]
    ratio = other["held"] / found["held"]
    beside = {"plain checkpoint": one, "ratio": ratio, "plain seconds": other["seconds"]}
    print(f"  {about['training']}, {about['writer']}, {scheme}, last {last}: {ratio:.2f}x", flush=True)
    return {**about, "scheme": scheme, "last": last, **found, **beside}


def write(out: Path, document: dict[str, Any], rows: Sequence[Mapping[str, Any]], began: float) -> None:
    """Write what has been measured so far."""
    document |= {"minutes": (time.perf_counter() - began) / 60, "rows": [*rows]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--out", type=Path, help="default results/retention.json")
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    options = parser.parse_args()
    out = options.out or Path(f"results/retention{'-quick' if options.quick else ''}.json")
    plan, began = QUICK if options.quick else Plan(), time.perf_counter()
    document: dict[str, Any] = {"machine": machine(), "date": date.today().isoformat()}
    document["machine"] |= {name: version(name) for name in ("transformers", "lightning")}
    document["parameters"] = {}
    rows: list[dict[str, Any]] = []
    workloads.seed_everything(0, torch.get_num_threads())
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="shrinkpoint-retention-") as folder:
        warnings.simplefilter("ignore")  # what schemes say of single checkpoints is in the rows
        for name in ("gpt", "perceptron"):
            of = training(name, options.data, quick=options.quick)
            document["parameters"][name] = parameters(of.workload.build(0).model)
            rows += loop_rows(Path(folder) / name, of, plan)
            write(out, document, rows, began)
        rows += framework_rows(Path(folder), of, plan, options)
    write(out, document, rows, began)
    print(f"\n{table.tables(document)}\n\nwritten: {out}")


if __name__ == "__main__":
    main()
