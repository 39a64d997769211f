"""All schemes on the same checkpoints: rate against distortion and against loss, speed, memory.

    python -m lab.studies.schemes.run    # a GPT and a ResNet-20 that are trained now, and two series that are kept
    python -m lab.studies.schemes.run --quick    # a toy of the first
    python -m lab.studies.schemes.run --subjects wikitext    # what long_run.py kept, alone

The same harness as `shrinkpoint-lab bench`, on workloads of ours and with two points of reference (`references.py`):
the checkpoints are recorded without loss from the middle of a training on, and every scheme gets the same ones, each as
the one after the one before it. What restarts from its checkpoints cost a scheme is in `recovery/run.py`, which knows
the same names. Writes results/schemes_gpt.json and so on, and a picture for each subject. `table.py` makes the
tables of the documents out of these, `plot.py` the picture.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

import shrinkpoint as sp
from lab.studies import workloads
from lab.studies.harness import columns, default_data, machine
from lab.studies.schemes import long_run
from lab.studies.schemes.references import DCP, EightBit
from lab.studies.workloads.wikitext import wikitext
from shrinkpoint.schemes.registry import needs_evaluation
from shrinkpoint_lab.bench.measure import measure
from shrinkpoint_lab.bench.result import TABLE_HEADER, BenchResult, table_rows, write_plot
from shrinkpoint_lab.bench.series import QualityFunction, Series, StoreSeries
from shrinkpoint_lab.bench.systems import SYSTEMS, make_system


@dataclass(frozen=True)
class Subject:
    """A series and what it is worth.

    Attributes:
        quality: None: nothing is known of the loss, and schemes that search are left out.
    """

    name: str
    series: Series = field(repr=False)
    quality: QualityFunction | None = None


@contextmanager
def trained(name: str, data: Path, options: argparse.Namespace) -> Iterator[Subject]:
    """A training from which checkpoints are kept from the middle on."""
    workload = workloads.named(name, data, quick=options.quick)
    course = workload.build(options.seed)
    with tempfile.TemporaryDirectory() as folder, sp.Store(folder, keyframe_every=None) as store:
        first = workload.steps // 2
        for step in range(1, first + options.interval * (options.checkpoints - 1) + 1):
            workload.advance(course)
            if step >= first and (step - first) % options.interval == 0:
                store.save(step, {"model": course.model.state_dict(), "optimizer": course.optimizer.state_dict()})
        yield Subject(name, StoreSeries(store, name), QualityFunction(_quality(workload), workload.higher_is_better))


def _quality(workload: workloads.Workload) -> Callable[[Any], float]:
    model = workload.build(0).model

    def evaluate(state: Any) -> float:
        model.load_state_dict(state["model"])
        return workload.evaluate(model)

    return evaluate


@contextmanager
def published(data: Path, options: argparse.Namespace) -> Iterator[Subject]:
    """The first epochs of a published series, if it is there."""
    paths = sorted((data / "series_ssl_adamw").glob("epoch_*.pth.xz"))[: options.checkpoints]
    with tempfile.TemporaryDirectory() as folder, sp.Store(folder, keyframe_every=None) as store:
        for epoch, path in enumerate(paths, 1):
            saved = torch.load(io.BytesIO(lzma.decompress(path.read_bytes())), map_location="cpu", weights_only=True)
            store.save(epoch, {"model": saved["model_state_dict"], "optimizer": saved["optimizer_state_dict"]})
        yield Subject("series_ssl_adamw", StoreSeries(store, "series_ssl_adamw"))


@contextmanager
def kept(data: Path, options: argparse.Namespace) -> Iterator[Subject]:
    """The middle of the long run that `long_run.py` keeps, if it was made."""
    with tempfile.TemporaryDirectory() as empty:
        folder = options.series / "middle"
        if not folder.exists():
            print(f"{folder} is not there: python -m lab.studies.schemes.long_run makes it, --series says where it is")
            folder = Path(empty)
        workload = wikitext(data)
        with sp.Store(folder) as store:
            quality = QualityFunction(_quality(workload), workload.higher_is_better)
            yield Subject("wikitext", StoreSeries(store, "wikitext"), quality)


SUBJECTS = {"ssl": published, "wikitext": kept}
"""Subjects that are not trained by this script."""


def outcomes(subject: Subject, options: argparse.Namespace) -> Iterator[BenchResult]:
    """The result of each scheme that is asked for, one after the other."""
    quality = subject.quality
    names = [name for name in SYSTEMS if quality is not None or not needs_evaluation(name)]
    systems: list[Any] = [
        make_system(
            name,
            evaluate=None if quality is None else quality.evaluate,
            threshold=options.threshold,
            higher_is_better=quality is not None and quality.higher_is_better,
            threads=options.threads,
        )
        for name in names
        if is_chosen(name, options.only)
    ]
    for one in [*systems, *(one for one in (DCP(), EightBit()) if is_chosen(one.name, options.only))]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what schemes say of single checkpoints is in the table
            try:
                result = measure(one, subject.series, quality)
            except ImportError as missing:
                result = BenchResult(one.name, failure=str(missing))
        print(f"  {one.name}" + (f": {result.failure}" if result.failure else ""), flush=True)
        yield result


def is_chosen(name: str, only: Sequence[str]) -> bool:
    """Whether a scheme is asked for: by its name, or by a part of it that is no scheme's name."""
    return not only or any(word == name or (word not in SYSTEMS and word in name) for word in only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    names = ("gpt", "resnet", "ssl", "wikitext", "wide")
    parser.add_argument("--subjects", nargs="*", choices=names, default=names[:4], metavar="NAME", help=str(names))
    parser.add_argument("--series", type=Path, default=long_run.default_folder(), help="of long_run.py")
    parser.add_argument("--only", nargs="*", default=[], help="schemes of these names, or parts of names")
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--interval", type=int, default=16, help="steps between two of them, where we train")
    parser.add_argument("--threshold", type=float, default=0.01, help="of schemes that search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="FOLDER")
    options = parser.parse_args()
    workloads.seed_everything(options.seed, options.threads)
    if options.quick:
        options.subjects, options.checkpoints, options.interval = ["gpt"], 3, 2
    for name in options.subjects:
        make = SUBJECTS[name](options.data, options) if name in SUBJECTS else trained(name, options.data, options)
        with make as subject:
            if not len(subject.series):
                print(f"{subject.name}: no data, skipped")
                continue
            print(f"{subject.name}: {len(subject.series)} checkpoints")
            report(name, subject, options)


def report(name: str, subject: Subject, options: argparse.Namespace) -> None:
    """Measure all schemes on a subject; write their results, each at once, since one may take minutes, and a plot."""
    place = options.out / f"schemes_{name}"
    place.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "date": date.today().isoformat(), "threshold": options.threshold}
    found: list[BenchResult] = []
    for result in outcomes(subject, options):
        found.append(result)
        document["subjects"] = {subject.name: [one.to_json() for one in found]}
        place.with_suffix(".json").write_text(json.dumps(document, indent=1))
    print("\n" + columns(TABLE_HEADER, table_rows(found)) + "\n")
    plots = write_plot(found, place, f"{subject.name}, {len(subject.series)} checkpoints")
    print("written:", place.with_suffix(".json"), *plots)


if __name__ == "__main__":
    main()
