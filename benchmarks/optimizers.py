"""Every optimizer: does a lossless resume continue bit for bit, and what do ten lossy restores cost with Fisher?

    python benchmarks/optimizers.py                    # all of them: half an hour
    python benchmarks/optimizers.py --only Muon SOAP   # those whose names contain a word; others' results stay
    python benchmarks/optimizers.py --grids            # the steps of a momentum, by optimizer
    python benchmarks/optimizers.py --quick            # a toy

A small GPT learns bytes. Lossless: a run that is saved, thrown away, made anew and loaded ends with the same bits as
one that was never interrupted. Fisher: the run is thrown away and restored after every save, ten times; the final loss
on text that it has not seen stands beside that of the same run without interruption, for each of three seeds, and
beside the deviation of the uninterrupted runs. Writes results/optimizers.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import workload_text
import workloads
from lossless_report import table
from lossless_speed import machine
from optimizer_cases import CASES, Case, Optimizers
from torch import Tensor, nn
from workloads import Stream

import shrinkpoint as sp
from shrinkpoint.schemes.fisher import moment_lattices
from shrinkpoint.schemes.fisher import scheme as fisher
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

HERE = Path(__file__).resolve().parent
RELATIVE_ERROR = 0.3
WARM_UP = 20
PACKAGES = ("torch", "lion-pytorch", "pytorch-optimizer", "schedulefree", "bitsandbytes", "transformers")


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        steps: of a run.
        first: the step of the first save.
        interval: steps between two saves, each followed by a restore.
        batch: sequences of a batch.
        windows: sequences that the final loss is measured on.
        resumed: step of the save, and of the end, of the lossless runs.
    """

    shape: GPTConfig
    steps: int = 160
    first: int = 30
    interval: int = 12
    batch: int = 8
    windows: int = 256
    resumed: tuple[int, int] = (12, 18)


FULL = Size(GPTConfig(layers=2, width=64, heads=4, context=32, dropout=0.0))
QUICK = Size(GPTConfig(layers=1, width=32, heads=2, context=16, dropout=0.0), 44, 12, 3, 4, 32, (4, 6))


class Training:
    """One run: a model, its optimizers and its data, made anew from the seed."""

    def __init__(self, case: Case, seed: int, size: Size, data: Path) -> None:
        self.case, self.size = case, size
        workloads.seed_everything(seed, 1)
        self.model: nn.Module = GPT(size.shape)
        if case.sparse:
            self.model.token = nn.Embedding(*self.model.token.weight.shape, sparse=True)
            nn.init.normal_(self.model.token.weight, std=0.02)
            self.model.head.weight = nn.Parameter(self.model.head.weight.detach().clone())
        self.optimizers: Optimizers = case.build(self.model, case.rate)
        self._peaks = {name: [group["lr"] for group in o.param_groups] for name, o in self.optimizers.items()}
        text = workload_text.text(data)[1]
        self._held_out = text[int(0.9 * len(text)) :]
        training = text[: int(0.9 * len(text))]
        self.stream = Stream(lambda g, _: workload_text.drawn(training, size.batch, size.shape.context, g), seed)
        self._set_mode("train")

    @property
    def steps(self) -> int:
        return max(1, round(self.size.steps * self.case.share))

    def advance(self, step: int) -> None:
        """Take the step of this number, counted from 1."""
        inputs, targets = self.stream.draw()
        if self.case.is_scheduled:
            factor = min(step / WARM_UP, max(0.1, 1 - step / self.steps))
            for name, optimizer in self.optimizers.items():
                for group, peak in zip(optimizer.param_groups, self._peaks[name], strict=True):
                    group["lr"] = factor * peak

        def closure() -> Tensor:
            self.model.zero_grad()
            loss: Tensor = self.model(inputs, targets)
            loss.backward()
            if not self.case.sparse:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            return loss

        if self.case.needs_closure:
            for optimizer in self.optimizers.values():
                optimizer.step(closure)
            return
        closure()
        for optimizer in self.optimizers.values():
            optimizer.step()

    def loss(self) -> float:
        """The mean loss on the held-out text."""
        self._set_mode("eval")
        windows = workload_text.windows(self._held_out, self.size.shape.context, self.size.windows)
        value = workload_text.loss_of(self.model, windows, 128)
        self._set_mode("train")
        return value

    def state(self) -> dict[str, Any]:
        """What is saved besides the place in the data."""
        return {"model": self.model.state_dict(), "optimizer": {n: o.state_dict() for n, o in self.optimizers.items()}}

    def _set_mode(self, mode: str) -> None:
        """Schedule-free optimizers hold other weights for training than for evaluation."""
        for optimizer in self.optimizers.values():
            if hasattr(optimizer, mode):
                getattr(optimizer, mode)()


def is_lossless(case: Case, size: Size, data: Path) -> bool:
    """Whether a run that is saved, thrown away, made anew and loaded ends with the bits of an uninterrupted one."""
    middle, end = size.resumed
    whole = Training(case, 0, size, data)
    for step in range(1, end + 1):
        whole.advance(step)
    with tempfile.TemporaryDirectory() as folder:
        first = Training(case, 0, size, data)
        for step in range(1, middle + 1):
            first.advance(step)
        with sp.CheckpointManager(folder) as manager:
            manager.save(
                middle, model=first.model, optimizer=dict(first.optimizers), extra={"stream": first.stream.state_dict()}
            )
        second = Training(case, 7, size, data)
        with sp.CheckpointManager(folder) as manager:
            restored = manager.restore(model=second.model, optimizer=dict(second.optimizers))
        assert restored is not None
        second.stream.load_state_dict(restored.extra["stream"])
        for step in range(middle + 1, end + 1):
            second.advance(step)
    return _are_equal(whole.state(), second.state())


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two states have the same bits."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and bytes(a.contiguous().view(-1).numpy()) == bytes(b.contiguous().view(-1).numpy())
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_are_equal, a, b))
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


class Restarts:
    """A store of one run, whose process ends after every save and is started again."""

    def __init__(self, folder: str, scheme: Mapping[str, Any]) -> None:
        self._folder, self._scheme = folder, dict(scheme)
        self._manager = self._open()
        self.reports: list[sp.SaveReport] = []

    def _open(self) -> sp.CheckpointManager:
        return sp.CheckpointManager(self._folder, scheme=sp.Fisher(**self._scheme), threads=1)

    def save(self, step: int, training: Training) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = self._manager.save(step, model=training.model, optimizer=dict(training.optimizers))
        assert report is not None
        self.reports.append(report)
        self._manager.close()

    def restore(self, training: Training) -> None:
        self._manager = self._open()
        self._manager.restore(model=training.model, optimizer=dict(training.optimizers))

    def close(self) -> None:
        self._manager.close()


def run(case: Case, seed: int, size: Size, data: Path, scheme: Mapping[str, Any] | None) -> dict[str, Any]:
    """A whole run; with a scheme's arguments, thrown away and restored right after each of ten saves."""
    began = time.perf_counter()
    training = Training(case, seed, size, data)
    first, interval = (max(1, round(n * case.share)) for n in (size.first, size.interval))
    points = range(first, training.steps, interval)[:10] if scheme is not None else ()
    with tempfile.TemporaryDirectory() as folder:
        restarts = None if scheme is None else Restarts(folder, scheme)
        for step in range(1, training.steps + 1):
            training.advance(step)
            if restarts is not None and step in points:
                restarts.save(step, training)
                drawn = training.stream.drawn
                training = Training(case, seed, size, data)
                restarts.restore(training)
                training.stream.drawn = drawn
        if restarts is not None:
            restarts.close()
    reports = [] if restarts is None else restarts.reports
    return {"loss": training.loss(), "seconds": time.perf_counter() - began, **summary(reports, training)}


def summary(reports: Sequence[sp.SaveReport], training: Training) -> dict[str, Any]:
    """Ratios of the run and of its deltas, bits of each role in the deltas, and which slots are coded."""
    if not reports:
        return {}
    deltas = [report for report in reports if not report.keyframe] or reports
    bits = {}
    for role in ("parameter", "moment1", "moment2", "other"):
        raw, stored = (sum(getattr(r.roles[role], key) for r in deltas if role in r.roles) for key in ("raw", "stored"))
        if raw > 4096:
            bits[role] = 32 * stored / raw
    return {
        "run": sum(r.raw_bytes for r in reports) / sum(r.stored_bytes for r in reports),
        "delta": sum(r.raw_bytes for r in deltas) / sum(r.stored_bytes for r in deltas),
        "bits": bits,
        "slots": slots(reports[-1], training),
        "reasons": sorted({*reports[-1].exact.values()}),
    }


def slots(report: sp.SaveReport, training: Training) -> dict[str, list[int]]:
    """By the name of a slot of an optimizer: how many bytes of its floats are coded, and how many are exact."""
    out: dict[str, list[int]] = {}
    infos = flatten(training.state()).infos
    for name, info in infos.items():
        if not name.startswith("optimizer/") or "/state/" not in name or info.dtype not in ("F32", "BF16", "U8"):
            continue
        key = name.split("/state/")[1].split("/")[1]
        coded, exact = out.setdefault(key, [0, 0])
        is_exact = name in report.exact or info.dtype == "U8"
        out[key] = [coded, exact + info.nbytes] if is_exact else [coded + info.nbytes, exact]
    return out


def measure(case: Case, size: Size, seeds: Sequence[int], data: Path, scheme: Mapping[str, Any]) -> dict[str, Any]:
    """All runs of one case."""
    if case.problem:
        return {"problem": case.problem}
    began = time.perf_counter()
    plain = [run(case, seed, size, data, None) for seed in seeds]
    lossy = [run(case, seed, size, data, scheme) for seed in seeds]
    losses, restored = ([one["loss"] for one in runs] for runs in (plain, lossy))
    return {
        "lossless": is_lossless(case, size, data),
        "uninterrupted": losses,
        "restored": restored,
        "rise": statistics.fmean(b / a - 1 for a, b in zip(losses, restored, strict=True)),
        "noise": statistics.stdev(losses) / statistics.fmean(losses) if len(losses) > 1 else None,
        **{key: statistics.fmean(one[key] for one in lossy) for key in ("run", "delta")},
        **{key: lossy[0][key] for key in ("bits", "slots", "reasons")},
        "seconds": time.perf_counter() - began,
    }


GRIDS: dict[str, tuple[float, ...]] = {
    "Muon and AdamW": (4.0, 1.0, 0.5, 0.25, 0.03),  # of 8 bits, a step is about .03 root mean squares
    "Lion": (4.0, 1.0),
    "Adamax": (4.0, 1.0),
}
"""Steps of a first moment that is not relative to a second one, in root mean squares."""


def measure_grids(case: Case, size: Size, seeds: Sequence[int], data: Path) -> dict[str, Any]:
    """The rise, and bits of first moments, by the step of the momentum; and where moments are exact, or dropped."""
    plain = [run(case, seed, size, data, None)["loss"] for seed in seeds]
    out = {}
    for step in ("exact", "drop", *GRIDS[case.name]):
        scheme: dict[str, Any] = {"relative_error": RELATIVE_ERROR}
        steps = moment_lattices.MOMENTUM_STEPS
        if isinstance(step, str):
            scheme["moments"] = step
        else:
            steps = dict.fromkeys(steps, step)
        with patch.object(fisher, "MomentPrecision", partial(moment_lattices.MomentPrecision, momentum_steps=steps)):
            runs = [run(case, seed, size, data, scheme) for seed in seeds]
        rises = [one["loss"] / loss - 1 for one, loss in zip(runs, plain, strict=True)]
        bits = statistics.fmean(one["bits"].get("moment1", 0.0) for one in runs)
        delta = statistics.fmean(one["delta"] for one in runs)
        out[str(step)] = {"rises": rises, "rise": statistics.fmean(rises), "bits": bits, "delta": delta}
        print(f"{case.name}  {step}: {100 * statistics.fmean(rises):+.2f} %, {bits:.2f} bits, {delta:.1f}x", flush=True)
    return out


def row(name: str, result: Mapping[str, Any]) -> list[str]:
    if "problem" in result:
        return [name, result["problem"], *["-"] * 7]
    coded = ", ".join(key for key, (count, exact) in result["slots"].items() if count > exact)
    exact = ", ".join(key for key, (count, exact) in result["slots"].items() if exact > max(count, 4096))
    noise = "-" if result["noise"] is None else f"{100 * result['noise']:.2f}"
    return [
        name,
        "yes" if result["lossless"] else "NO",
        f"{statistics.fmean(result['uninterrupted']):.3f}",
        f"{100 * result['rise']:+.2f}",
        noise,
        f"{result['delta']:.1f}",
        f"{result['run']:.1f}",
        coded or "-",
        exact or "-",
    ]


HEAD = ("optimizer", "lossless", "loss", "rise, %", "seeds, %", "delta, x", "run, x", "coded", "exact")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words of names")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--error", type=float, default=RELATIVE_ERROR, help="relative_error of Fisher")
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    parser.add_argument("--grids", action="store_true", help="only the steps of a momentum")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or HERE / "results" / f"optimizers{'-quick' if args.quick else ''}.json"
    size, seeds = (QUICK, args.seeds[:1]) if args.quick else (FULL, args.seeds)
    stored = json.loads(out.read_text()) if out.exists() else {}
    results, grids = stored.get("result", {}), stored.get("grids", {})
    for case in CASES:
        if (args.only and not any(word in case.name for word in args.only)) or (args.grids and case.name not in GRIDS):
            continue
        if args.grids:
            grids[case.name] = measure_grids(case, size, seeds, args.data)
        else:
            results[case.name] = measure(case, size, seeds, args.data, {"relative_error": args.error})
            print(table(HEAD, [row(case.name, results[case.name])]), flush=True)
        facts = {"text": workload_text.text(args.data)[0], "relative_error": args.error, "versions": versions()}
        whole = {"command": "python benchmarks/optimizers.py", "date": time.strftime("%Y-%m-%d"), "machine": machine()}
        order = {case.name: results[case.name] for case in CASES if case.name in results}
        out.write_text(json.dumps(whole | facts | {"result": order, "grids": grids}, indent=1) + "\n")
    print(table(HEAD, [row(case.name, results[case.name]) for case in CASES if case.name in results]))


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
