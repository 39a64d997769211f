"""The parts of `fisher`, one by one: what each is worth, whether budgets are kept, and what is left after restores.

    python -m lab.studies.fisher.run                       # gpt: 50 minutes
    python -m lab.studies.fisher.run --only alone parts    # a part: parts, sizes, budgets, alone, restores, moments
    python -m lab.studies.fisher.run --workload resnet     # or "gpt .999", "resnet adamw"
    python -m lab.studies.fisher.run --quick               # a toy

A training is recorded without loss; every variant then writes the same checkpoints as a chain. For the second table,
training goes on from the middle and everything is made anew and restored after *every* save. Writes
results/fisher-<workload>.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import shrinkpoint as sp
from lab.studies import workloads
from lab.studies.harness import columns, default_data, machine
from lab.studies.harness.results import commit
from lab.studies.workloads import Course, Workload
from shrinkpoint.schemes.fisher import moment_lattices as coded
from shrinkpoint.schemes.fisher import rounding, scheme, steps

ROLES = ("parameter", "moment1", "moment2")


@dataclass(frozen=True)
class Variant:
    """A way to write checkpoints.

    Attributes:
        asked: arguments of `sp.Fisher`; "evaluate": True stands for the workload's.
        without: constants of the scheme that have another value: what is taken away.
    """

    name: str
    asked: Mapping[str, Any]
    without: tuple[tuple[Any, str, Any], ...] = ()

    def scheme(self, workload: Workload) -> sp.Fisher:
        asked = dict(self.asked)
        if asked.pop("evaluate", False):
            asked["evaluate"] = workload.evaluate
            asked["higher_is_better"] = workload.higher_is_better
        return sp.Fisher(**asked)

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, name, value in self.without:
                stack.enter_context(patch.object(module, name, value))
            yield


def _undithered(*_: object) -> int:
    return 0


class _Nearest:
    """In the place of `zlib` in `moments`: no first moment has a seed, so that all are rounded to the nearest."""

    @staticmethod
    def crc32(_: bytes) -> int:
        return 0


PLAIN = {"relative_error": 0.58}
PARTS = (
    Variant("all of it", PLAIN),
    Variant("steps alike in all rows and columns", PLAIN, ((steps, "ROW_COL_EXPONENT", 0.0),)),
    Variant("steps alike in all tensors", PLAIN, ((steps, "TENSOR_EXPONENT", 0.0),)),
    Variant("neither", PLAIN, ((steps, "ROW_COL_EXPONENT", 0.0), (steps, "TENSOR_EXPONENT", 0.0))),
    Variant("steps without a cap", PLAIN, ((steps, "MAX_STEP_STD", 1e9),)),
    Variant("to the nearest, nothing held", PLAIN, ((steps, "MAX_HYSTERESIS", 0.5),)),
    Variant("held to a retention of .8", PLAIN, ((rounding, "MIN_RETAINED", 0.8),)),
    Variant("held to a retention of .97", PLAIN, ((rounding, "MIN_RETAINED", 0.97),)),
    Variant("held without gains", PLAIN, ((rounding, "_MAX_GAIN", 1.0),)),
)
ERRORS = (0.1, 0.15, 0.3, 0.34, 0.45, 0.6, 0.8)
RESTORED = (
    Variant("error .3", {"relative_error": 0.3}),
    Variant("error .58", PLAIN),
    Variant(
        "error .3, weights to the nearest",
        {"relative_error": 0.3},
        ((steps, "weight_dither_seed", _undithered),),
    ),
    Variant("error .3, first moments to the nearest", {"relative_error": 0.3}, ((coded, "zlib", _Nearest),)),
    Variant("error .3, moments exact", {"relative_error": 0.3, "moments": "exact"}),
    Variant("error .3, moments dropped", {"relative_error": 0.3, "moments": "drop"}),
)


def _steps(**other: float) -> tuple[tuple[Any, str, Any], ...]:
    return ((scheme, "MomentPrecision", lambda: coded.MomentPrecision(**other)),)


MOMENTS = tuple(
    Variant(
        f"error .3, first moments by {first:g} units",
        {"relative_error": 0.3},
        _steps(first_step=first, first_max=4 * first),
    )
    for first in (1.0, 2.0, 3.0, 6.0)
) + tuple(
    Variant(f"error .3, second moments by {second / 8:g} octaves", {"relative_error": 0.3}, _steps(second_step=second))
    for second in (8, 16, 32)
)


def budgets(workload: Workload) -> tuple[Variant, ...]:
    unit = 1.0 if workload.higher_is_better else 1e-3  # a per cent of images, or nats
    return tuple(Variant(f"budget {k * unit:g}", {"nats": k * unit, "evaluate": True}) for k in (0.5, 1.0, 2.5, 10.0))


@dataclass(frozen=True)
class Saved:
    """One checkpoint of a variant: bits a value by role, the live weights' quality, and by how much it is worse."""

    keyframe: bool
    bits: Mapping[str, float]
    ratio: float
    weights_ratio: float
    quality: float
    rise: float
    retention: float | None
    tried: list[Any] = field(repr=False)

    @classmethod
    def of(cls, report: Any, quality: float, rise: float) -> Saved:
        bits = {name: 32 * one.stored / one.raw for name, one in report.roles.items() if name in ROLES and one.raw}
        search = report.loss_report or {}
        tried = search.get("tried", [])
        return cls(report.keyframe, bits, report.ratio, report.weights_ratio, quality, rise, report.retention, tried)


def sizes(errors: Sequence[float]) -> tuple[Variant, ...]:
    return tuple(Variant(f"error {error}", {"relative_error": error}) for error in errors)


def new_course(workload: Workload, seed: int) -> Course:
    """A training at its start: the same, whatever ran before in this process."""
    workloads.seed_everything(seed, torch.get_num_threads())
    return workload.build(seed)


def recorded(
    workload: Workload, seed: int, start: int, every: int, count: int, folder: Path | None
) -> list[tuple[int, Any, Any]]:
    """(step, model, optimizer) of `count` checkpoints of one training; kept in `folder`, and read if it is there."""
    name = f"{workload.name.replace(' ', '_')}-{workload.steps}-{seed}-{start}-{every}-{count}.pt"
    path = None if folder is None else folder / name
    if path is not None and path.exists():
        return torch.load(path, weights_only=True)  # type: ignore[no-any-return]
    course, out = new_course(workload, seed), []
    for step in range(1, start + every * (count - 1) + 1):
        workload.advance(course)
        if step >= start and (step - start) % every == 0:
            out.append((step, copy.deepcopy(course.model.state_dict()), copy.deepcopy(course.optimizer.state_dict())))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(out, path)
    return out


def worse(workload: Workload, after: float, before: float) -> float:
    return before - after if workload.higher_is_better else after - before


def chain(variant: Variant, workload: Workload, seed: int, series: list[tuple[int, Any, Any]]) -> list[Saved]:
    """The series as a variant writes it, each checkpoint as the one after the one before it."""
    course, out = workload.build(seed), []
    with variant.applied(), tempfile.TemporaryDirectory() as folder, quiet():
        manager = sp.CheckpointManager(folder, scheme=variant.scheme(workload), keyframe_every=None)
        for step, model, optimizer in series:
            course.model.load_state_dict(model)
            course.optimizer.load_state_dict(copy.deepcopy(optimizer))
            report = manager.save(step, model=course.model, optimizer=course.optimizer)
            before, held = workload.evaluate(course.model), manager.store.reference
            assert held is not None  # a load would make the store forget what the weights were before
            values = {name: held.tensors.get(f"model/{name}") for name in model}  # tied ones are there once
            course.model.load_state_dict({name: x for name, x in values.items() if x is not None}, strict=False)
            out.append(Saved.of(report, before, worse(workload, workload.evaluate(course.model), before)))
        manager.close()
    return out


def restored(
    variant: Variant | None, workload: Workload, seed: int, middle: Mapping[str, Any], every: int, steps: int
) -> tuple[float, list[Saved]]:
    """The quality after so many steps from the middle, restored after every save; None: never."""
    course, saves = begin(workload, seed, middle), []
    if variant is None:
        for _ in range(steps):
            workload.advance(course)
        return workload.test(course.model), []
    with variant.applied(), tempfile.TemporaryDirectory() as folder, quiet():
        manager = sp.CheckpointManager(folder, scheme=variant.scheme(workload), keyframe_every=None)
        for step in range(1, steps + 1):
            workload.advance(course)
            if step % every:
                continue
            before, stream = workload.evaluate(course.model), {"stream": course.stream.state_dict()}
            report = manager.save(
                step, model=course.model, optimizer=course.optimizer, scheduler=course.scheduler, extra=stream
            )
            manager.close()
            manager, course = sp.CheckpointManager(folder, scheme=variant.scheme(workload)), workload.build(seed)
            at = manager.restore(model=course.model, optimizer=course.optimizer, scheduler=course.scheduler)
            assert at is not None
            course.stream.load_state_dict(at.extra["stream"])
            saves.append(Saved.of(report, before, worse(workload, workload.evaluate(course.model), before)))
        manager.close()
    return workload.test(course.model), saves


def alone(workload: Workload, seed: int, step: int) -> dict[str, tuple[float, float]]:
    """(ratio of the weights, rise) of one checkpoint, a state in a file of its own, beside inshrinkerator."""
    course = new_course(workload, seed)
    for _ in range(step):
        workload.advance(course)
    base, fresh = workload.evaluate(course.model), workload.build(seed).model

    def evaluate(state: Any) -> float:
        fresh.load_state_dict(state["model"])
        return workload.evaluate(fresh)

    weights = {"model": copy.deepcopy(course.model.state_dict())}
    whole = {**weights, "optimizer": copy.deepcopy(course.optimizer.state_dict())}
    asked: list[tuple[str, Any, Any]] = []
    for error in (0.15, 0.3, 0.6, 1.1):
        asked.append((f"error {error}, with the optimizer", whole, sp.Fisher(relative_error=error)))
    for error in (0.15, 0.23, 0.3, 0.4):
        asked.append((f"error {error}, weights alone", weights, sp.Fisher(relative_error=error)))
    known = {"evaluate": evaluate, "higher_is_better": workload.higher_is_better}
    for error in (0.15, 0.23, 0.3, 0.4):
        asked.append((f"error {error}, weights alone, probed", weights, sp.Fisher(relative_error=error, **known)))
    asked += [
        (f"inshrinkerator {t:.1%}", weights, sp.Inshrinkerator(threshold=t, **known))
        for t in (0.001, 0.003, 0.01, 0.05)
    ]
    out = {}
    with tempfile.TemporaryDirectory() as folder, quiet():
        for name, state, how in asked:
            report = sp.save(state, f"{folder}/a.safetensors", scheme=how)
            out[name] = report.weights_ratio, worse(workload, evaluate(sp.load(f"{folder}/a.safetensors")), base)
    return out


def halfway(workload: Workload, seed: int, step: int) -> dict[str, Any]:
    course = new_course(workload, seed)
    for _ in range(step):
        workload.advance(course)
    parts = ("model", "optimizer", "scheduler", "stream")
    return {name: copy.deepcopy(getattr(course, name).state_dict()) for name in parts}


def begin(workload: Workload, seed: int, middle: Mapping[str, Any]) -> Course:
    course = workload.build(seed)
    for name, state in middle.items():
        getattr(course, name).load_state_dict(copy.deepcopy(state))
    return course


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is what is measured
        yield


def summary(name: str, saves: list[Saved]) -> list[str]:
    """A row: of deltas, but for the keyframe's bits."""
    deltas = [one for one in saves if not one.keyframe]
    key = next((f"{one.bits['parameter']:.2f}" for one in saves if one.keyframe), "-")

    def mean(role: str) -> str:
        return f"{statistics.mean(one.bits[role] for one in deltas):.3f}" if role in deltas[0].bits else "-"

    kept = [one.retention for one in deltas if one.retention is not None]
    chain_ratio = 32 * 20 / (float(key) + 19 * float(mean("parameter"))) if key != "-" else float("nan")
    return [
        name,
        key,
        *map(mean, ROLES),
        f"{statistics.mean(one.ratio for one in deltas):.1f}",
        f"{chain_ratio:.1f}",
        f"{statistics.mean(one.rise for one in deltas):+.4f}",
        f"{max(one.rise for one in saves):+.4f}",
        f"{min(kept):.2f}",
        f"{max(kept):.2f}",
    ]


STUDIES = ("parts", "sizes", "budgets", "alone", "restores", "moments")
HEAD = ["", "key W bits", "W bits", "m bits", "v bits", "state x", "W x, 20", "rise", "worst", "retention", "to"]


def kept(name: str, budget: float, saves: list[Saved]) -> list[str]:
    """How a budget was kept: by the draft that was taken, and by the prediction made before it was measured."""
    rises = [one.rise for one in saves]
    lines = [line for one in saves for line in one.tried if line["curvature"] and isinstance(line["rise"], float)]
    ratios = sorted(line["curvature"] / line["rise"] for line in lines if line["rise"] > 0 and line["hold"] == 0.5)
    within = sum(rise <= budget for rise in rises) / len(rises)
    spent = sum(rise >= budget / 10 for rise in rises) / len(rises)
    return [
        name,
        f"{100 * within:.0f}",
        f"{100 * spent:.0f}",
        f"{statistics.mean(len(one.tried) for one in saves):.2f}",
        " ".join(f"{ratio:.1f}" for ratio in ratios) or "-",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--workload", default="gpt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interval", type=int, default=50, help="steps between checkpoints of the chain")
    parser.add_argument("--every", nargs="*", type=int, default=[5, 20, 50], help="steps between restores")
    parser.add_argument("--errors", nargs="*", type=float, default=ERRORS, help="of the part sizes")
    parser.add_argument("--share", type=float, default=rounding.MIN_RETAINED, help="that values follow")
    parser.add_argument("--recordings", type=Path, help="a folder that keeps recorded trainings")
    parser.add_argument("--only", nargs="*", default=list(STUDIES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    workloads.seed_everything(options.seed, options.threads)
    rounding.MIN_RETAINED = options.share
    workload = workloads.named(options.workload, options.data, quick=options.quick)
    document = {"machine": machine(), "commit": commit(), "date": date.today().isoformat()}
    document |= {"workload": options.workload, "seed": options.seed, "quick": options.quick}
    document |= {"quality": workload.quality, "higher_is_better": workload.higher_is_better}
    document |= {"interval": options.interval, "share": options.share}
    document |= study(workload, options)
    out = options.out or Path(f"results/fisher-{options.workload.replace(' ', '-')}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1, default=vars))
    print("written:", out)


def study(workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    half = workload.steps // 2
    found: dict[str, Any] = {}
    chains = {"parts": PARTS, "sizes": sizes(options.errors), "budgets": budgets(workload)}
    if chains.keys() & {*options.only}:
        interval = 4 if options.quick else options.interval
        count = min(8, (workload.steps - half) // interval + 1)
        series = recorded(workload, options.seed, half, interval, count, options.recordings)
        for part in [name for name in chains if name in options.only]:
            found[part] = {one.name: chain(one, workload, options.seed, series) for one in chains[part]}
            print(columns(HEAD, [summary(name, saves) for name, saves in found[part].items()]), "\n", flush=True)
        if "budgets" in found:
            asked = {one.name: one.asked["nats"] for one in chains["budgets"]}
            rows = [kept(name, asked[name], saves) for name, saves in found["budgets"].items()]
            print(columns(["", "within %", "above a tenth %", "evaluations", "predicted / measured"], rows), "\n")
    if "alone" in options.only:
        found["alone"] = alone(workload, options.seed, workload.steps * 3 // 4)
        rows = [[name, f"{ratio:.1f}", f"{rise:+.4f}"] for name, (ratio, rise) in found["alone"].items()]
        print(columns(["one checkpoint alone", "weights x", "rise"], rows), "\n")
    for part, variants in (("restores", RESTORED), ("moments", MOMENTS)):
        if part in options.only:
            found[part] = restores(workload, options, half, variants)
    return found


def restores(workload: Workload, options: argparse.Namespace, half: int, variants: Sequence[Variant]) -> dict[str, Any]:
    steps = 12 if options.quick else min(200, half)
    middle = halfway(workload, options.seed, half)
    plain, _ = restored(None, workload, options.seed, middle, 0, steps)
    start = workload.test(begin(workload, options.seed, middle).model)
    print(f"{workload.quality}: {start:.4f} in the middle, {plain:.4f} after {steps} steps, never restored", flush=True)
    out: dict[str, Any] = {"middle": start, "uninterrupted": plain}
    rows = []
    for every in [4] if options.quick else options.every:
        for variant in variants:
            quality, saves = restored(variant, workload, options.seed, middle, every, steps)
            out[f"{variant.name}, every {every}"] = {"quality": quality, "saves": saves}
            rows.append([*summary(f"{variant.name}, every {every}", saves), f"{quality:.4f}"])
            print(rows[-1], flush=True)
    print(columns([*HEAD, workload.quality], rows))
    return out


if __name__ == "__main__":
    main()
