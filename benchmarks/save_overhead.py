"""What checkpoints would cost at the spacing of the paper's runs: arithmetic on measured seconds, every input shown.

    python benchmarks/save_overhead.py --millions 25

saves a GPT of about that size a few times, some steps of training apart, on one core: with its optimizer and without.
The small models of `lossy_recovery.py` have fixed costs (files, headers, searches of many small tensors) that a large
one hardly has. The quality here is made up, so that it costs next to nothing: it falls with the weights' squared error.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import systems
import torch
import workloads
from lossless_speed import machine
from torch import nn

import shrinkpoint as sp
from shrinkpoint_lab.bench.systems import CallTimer
from shrinkpoint_lab.demo.workload import GPT, GPTConfig


@dataclass(frozen=True)
class Spacing:
    """A run like one of the paper's; what it does not print is assumed, and `source` says from what.

    Attributes:
        parameters: in millions.
        step: seconds.
        steps_between: optimizer steps from one checkpoint to the next.
        ranks: replicas that share the trials.
        evaluation: seconds of one evaluation: the forward half of a step, a third of its time.
    """

    name: str
    parameters: float
    step: float
    steps_between: int
    ranks: int
    source: str

    @property
    def evaluation(self) -> float:
        return self.step / 3

    @property
    def seconds(self) -> float:
        return self.step * self.steps_between


PAPER = (
    Spacing(
        "GPT-2 M",
        335.0,
        4.8,
        1000,
        8,
        "650 GPU-hours on 8 GPUs for 30 B tokens, 0.49 M tokens a step (nanoGPT): 61,000 steps in 81 h; "
        "a checkpoint every 1000 steps is assumed",
    ),
    Spacing(
        "ResNet-152",
        60.2,
        0.5,
        2500,
        8,
        "ten failures 3 h apart at least, nine epochs apart: 20 min an epoch, 2500 steps of 512 images; "
        "a checkpoint every epoch is assumed",
    ),
)
CORES = (1, 16)


@dataclass(frozen=True)
class Cost:
    """Seconds of one core per million parameters, and how often a save looks at the quality.

    Attributes:
        coding: all of a save but trials and evaluations: sketches, clustering, codes, coding, writing.
        trial: of a trial, its evaluation left out.
        trials: of a save.
        others: evaluations of a save that belong to no trial: of the state as it is, say.
    """

    coding: float
    trial: float
    trials: float
    others: float


def measured(records: Iterable[Mapping[str, Any]]) -> Cost | None:
    """Means over all searched saves of these runs; None where there is none."""
    saves = [(save, record["facts"]["parameters"] / 1e6) for record in records for save in record["saves"]]
    seen = [(save, _trials(save), millions) for save, millions in saves if save["search"]]
    count = sum(len(trials) for _, trials, _ in seen)
    if not seen:
        return None
    coding, trial, calls = 0.0, 0.0, 0
    for save, trials, millions in seen:
        evaluations = save["evaluations"]
        one = evaluations["seconds"] / evaluations["calls"] if evaluations["calls"] else 0.0
        spent = sum(trials)
        trial += (spent - one * len(trials)) / millions
        coding += (save["seconds"] - spent - one * (evaluations["calls"] - len(trials))) / millions
        calls += evaluations["calls"]
    saved = len(seen)
    return Cost(coding / saved, trial / count if count else 0.0, count / saved, max(0.0, (calls - count) / saved))


def _trials(save: Mapping[str, Any]) -> list[float]:
    """Seconds of each trial of a save, its evaluation included."""
    searches = save["search"].get("searches", [])
    return [float(trial["seconds"]) for search in searches for trial in search["trials"]]


def computed(cost: Cost, spacing: Spacing, cores: int) -> dict[str, Any]:
    """Overhead in per cent of the training time, and how it comes about."""
    rounds = math.ceil(cost.trials / spacing.ranks)
    looks = rounds + math.ceil(cost.others)
    coding = cost.coding * spacing.parameters / cores
    trials = rounds * cost.trial * spacing.parameters / cores
    evaluations = looks * spacing.evaluation
    percent = 100 * (coding + trials + evaluations) / spacing.seconds
    return {
        "spacing": asdict(spacing),
        "cost": asdict(cost),
        "cores": cores,
        "perfect scaling over cores": cores > 1,
        "rounds": rounds,
        "evaluations": looks,
        "coding seconds": coding,
        "trial seconds": trials,
        "evaluation seconds": evaluations,
        "seconds between": spacing.seconds,
        "percent": percent,
    }


def sentence(found: Mapping[str, Any]) -> str:
    """The arithmetic as a line."""
    spacing, cost, cores = found["spacing"], found["cost"], found["cores"]
    millions, ranks = f"{spacing['parameters']:.0f} M", spacing["ranks"]
    coding = f"{millions} x {cost['coding']:.4f} s of coding"
    trials = f"{found['rounds']} x {millions} x {cost['trial']:.4f} s of trials ({cost['trials']:.1f} on {ranks} ranks)"
    return (
        f"{spacing['name']}, cores a rank: {cores}. ({coding} + {trials}) / {cores}"
        f" + {found['evaluations']} evaluations of {spacing['step'] / 3:.1f} s,"
        f" every {spacing['steps_between']} steps of {spacing['step']} s: {found['percent']:.2f} %"
    )


def table_of(cost: Cost) -> list[dict[str, Any]]:
    """For each of the paper's runs and each number of cores."""
    return [computed(cost, spacing, cores) for spacing in PAPER for cores in CORES]


def saves(system: str, millions: float, count: int, folder: Path, *, whole: bool) -> dict[str, Any]:
    """Saves of one model as `measured` takes them; the first, a keyframe with a whole search, is left out.

    Args:
        whole: with the optimizer.
    """
    workloads.seed_everything(0, 1)
    model = GPT(
        GPTConfig(layers=8, width=16 * round(math.sqrt(millions * 1e6 / 96) / 16), heads=8, context=64, dropout=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = CallTimer(lambda candidate: 1 + 20 * _error(candidate, kept))
    recorder = systems.recorder(system, model, 2)
    scheme = systems.scheme(system, threshold=0.05, evaluate=watch, gradients=recorder)
    out = []
    with sp.CheckpointManager(folder, scheme=scheme, threads=1) as manager:
        for step in range(count + 1):
            _train(model, optimizer, recorder)
            kept = [p.detach().clone() for p in model.parameters()]
            watch.lap()
            began = time.perf_counter()
            report = manager.save(step, model=model, **({"optimizer": optimizer} if whole else {}))
            seconds = time.perf_counter() - began
            assert report is not None
            one = {"seconds": seconds, "evaluations": watch.lap(), "search": report.loss_report}
            out.append({**one, "weights ratio": report.weights_ratio, "ratio": report.ratio})
    return {"facts": {"parameters": sum(p.numel() for p in model.parameters())}, "saves": out[1:], "first": out[0]}


def _train(model: GPT, optimizer: torch.optim.Optimizer, recorder: Any, steps: int = 2) -> None:
    for _ in range(steps):
        words = torch.randint(256, (2, 65))
        model(words[:, :-1], words[:, 1:]).backward()
        if recorder is not None:
            recorder.after_backward()
        optimizer.step()
        if recorder is not None:
            recorder.before_zero_grad()
        optimizer.zero_grad()


@torch.no_grad()
def _error(model: nn.Module, kept: Iterable[torch.Tensor]) -> float:
    """Squared error of all weights, relative to their squares."""
    sums = [((p - x).square().sum(), x.square().sum()) for p, x in zip(model.parameters(), kept, strict=True)]
    return float(sum(error for error, _ in sums) / sum(square for _, square in sums))


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader needs of the saves of a system: their seconds, what these come to, and the overhead."""
    cost = measured([found])
    assert cost is not None
    kept = ("seconds", "evaluations", "weights ratio", "ratio")
    return {
        **found["facts"],
        "saves": [{name: save[name] for name in kept} for save in found["saves"]],
        "cost": asdict(cost),
        "computed": table_of(cost),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=25, help="of parameters")
    parser.add_argument("--saves", type=int, default=3, help="measured, after the first")
    parser.add_argument("--systems", nargs="*", default=[*systems.SYSTEMS])
    parser.add_argument("--out", type=Path, default=Path("results/overhead.json"))
    args = parser.parse_args()
    results = {}
    for system in args.systems:
        for whole in (False, True):
            with tempfile.TemporaryDirectory(prefix="shrinkpoint-overhead-") as folder:
                found = saves(system, args.millions, args.saves, Path(folder), whole=whole)
            name = f"{system}, {'with the optimizer' if whole else 'weights alone'}"
            results[name] = summary(found)
            print(f"{name}:", *(f"    {sentence(one)}" for one in results[name]["computed"]), sep="\n", flush=True)
    document = {"date": date.today().isoformat(), "machine": machine(), "systems": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
