"""Whether a budget of the loss holds beyond one GPT: predictions, rises on evaluated and on unseen examples, retention.

    python benchmarks/budgets.py                          # six trainings, two budgets: 20 minutes
    python benchmarks/budgets.py --only "vae rmsprop"     # one of workload_held_out.py
    python benchmarks/budgets.py --quick                  # a toy

Each training is recorded without loss; then eight checkpoints of its second half are written as a chain, once for each
budget. A *trial* is a set of weights that `fisher` measured. "covered" counts all trials whose rise is in the interval
that was predicted; "within 2x" those whose rise is clearly positive, above three standard errors of the mean over the
evaluated examples. Writes results/budgets.json, beside what is there of other trainings.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import fisher
import workload_held_out
import workloads
from lossless_report import table
from lossless_speed import machine
from torch import Tensor, nn
from workload_held_out import ExampleLosses
from workloads import Workload

import shrinkpoint as sp

BUDGETS = ("0.1%", "1%")
MIN_CLEAR = 3.0
"""Standard errors above which a rise is clearly positive."""


class CountedLosses:
    """`evaluate` as a scheme calls it; holds what it answered."""

    def __init__(self, losses: ExampleLosses) -> None:
        self._losses, self.readings = losses, list[Tensor]()

    def reading(self, model: nn.Module) -> Tensor:
        self.readings.append(self._losses.reading(model).double())
        return self.readings[-1]

    def __call__(self, model: nn.Module) -> float:
        return float(self.reading(model).mean())


def chain(workload: Workload, budget: str, seed: int, series: list[tuple[int, Any, Any]], test: list[Tensor]) -> Any:
    """The saves of a series within a budget.

    Args:
        test: losses of the unseen examples at each checkpoint of the series.
    """
    course, out = workload.build(seed), []
    evaluate = CountedLosses(workload.evaluate)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheme = sp.Fisher(budget=budget, evaluate=evaluate)
        manager = sp.CheckpointManager(folder, scheme=scheme, keyframe_every=None)
        for (step, model, optimizer), unseen in zip(series, test, strict=True):
            course.model.load_state_dict(model)
            course.optimizer.load_state_dict(copy.deepcopy(optimizer))
            evaluate.readings.clear()
            report = manager.save(step, model=course.model, optimizer=course.optimizer)
            out.append(_saved(workload, course.model, manager, report, [*evaluate.readings], unseen, budget))
            out[-1]["step"] = step
        manager.close()
    return {"saves": out, "warnings": sorted({str(w.message)[:200] for w in caught})}


def _saved(
    workload: Workload, model: nn.Module, manager: Any, report: Any, readings: list[Tensor], unseen: Tensor, budget: str
) -> dict[str, Any]:
    held = manager.store.reference  # a load would make the store forget what the weights were before
    values = {name: held.tensors.get(f"model/{name}") for name in model.state_dict()}
    model.load_state_dict({name: x for name, x in values.items() if x is not None}, strict=False)
    base, allowed = readings[0], float(budget.rstrip("%")) / 100 * abs(float(readings[0].mean()))
    outside = workload.test.reading(model).double() - unseen  # type: ignore[attr-defined]
    trials = []
    for line in (report.loss_report or {}).get("tried", []):
        reading = min(readings[1:], key=lambda x: abs(float(x.mean() - base.mean()) - _number(line["rise"])))
        error = float((reading - base).std()) / math.sqrt(len(base))
        trials.append({**line, "error": error})
    saved = fisher.Saved.of(report, float(readings[0].mean()), 0.0)
    return {
        "keyframe": report.keyframe,
        "ratio": round(report.ratio, 2),
        "weights_ratio": round(report.weights_ratio, 2),
        "bits": {role: round(bits, 3) for role, bits in saved.bits.items()},
        "allowed": allowed,
        "rise": float((report.loss_report or {}).get("rise") or 0.0),
        "unseen": float(outside.mean()),
        "unseen_error": float(outside.std()) / math.sqrt(len(outside)),
        "evaluations": len(readings),
        "retention": report.retention,
        "trials": trials,
    }


def _number(rise: Any) -> float:
    return float(rise) if rise is not None else math.nan


def clear_trials(saves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trials with a prediction whose rise is clearly positive."""
    trials = [trial for save in saves for trial in save["trials"]]
    return [t for t in trials if t["curvature"] and _number(t["rise"]) > MIN_CLEAR * t["error"]]


def row(name: str, budget: str, saves: list[dict[str, Any]]) -> list[str]:
    """One line of the table."""
    deltas = [save for save in saves if not save["keyframe"]]
    clear = clear_trials(saves)
    ratios = sorted(trial["rise"] / trial.get("predicted", trial["curvature"]) for trial in clear)
    trials = [trial for save in saves for trial in save["trials"] if trial.get("interval")]
    covered = [t["interval"][0] <= _number(t["rise"]) <= t["interval"][1] for t in trials]
    kept = [save["retention"] for save in deltas if save["retention"] is not None]

    def share(values: list[bool]) -> str:
        return f"{sum(values)}/{len(values)}" if values else "-"

    return [
        f"{name}, {budget}",
        f"{statistics.median(save['ratio'] for save in deltas):.1f}",
        f"{statistics.median(save['bits']['parameter'] for save in deltas):.3f}",
        share([save["rise"] <= save["allowed"] for save in saves]),
        share([save["unseen"] <= save["allowed"] for save in saves]),
        f"{100 * statistics.mean(save['rise'] / save['allowed'] for save in saves):+.0f}",
        f"{100 * statistics.mean(save['unseen'] / save['allowed'] for save in saves):+.0f}",
        f"{100 * max(save['unseen'] / save['allowed'] for save in saves):+.0f}",
        f"{statistics.median(save['evaluations'] for save in saves):g}, {max(save['evaluations'] for save in saves)}",
        share([0.5 <= ratio <= 2 for ratio in ratios]),
        f"{statistics.median(ratios):.2g}" if ratios else "-",
        share(covered),
        f"{min(kept, default=math.nan):.2f}-{max(kept, default=math.nan):.2f}",
    ]


HEAD = [
    "", "state x", "W bits", "kept", "unseen", "rise, % of budget", "unseen, %", "worst, %", "evaluations, most",
    "within 2x", "rise / prediction", "covered", "retention",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--only", nargs="*", default=list(workload_held_out.NAMES))
    parser.add_argument("--budgets", nargs="*", default=list(BUDGETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    parser.add_argument("--recordings", type=Path, help="a folder of recorded trainings, which are used again")
    parser.add_argument("--out", type=Path, default=Path("results/budgets.json"))
    options = parser.parse_args()
    workloads.seed_everything(options.seed, options.threads)
    document = {"machine": machine(), "seed": options.seed, "quick": options.quick, "chains": {}}
    if options.out.exists():
        document["chains"] = json.loads(options.out.read_text())["chains"]
    found: dict[str, Any] = document["chains"]
    for name in options.only:
        workload = workloads.named(name, options.data, quick=options.quick)
        half, saves = workload.steps // 2, options.saves
        series = fisher.recorded(workload, options.seed, half, half // saves, saves, options.recordings)
        model, test = workload.build(options.seed).model, []
        for _, weights, _ in series:
            model.load_state_dict(weights)
            test.append(workload.test.reading(model).double())  # type: ignore[attr-defined]
        for budget in options.budgets:
            found[f"{name}, {budget}"] = chain(workload, budget, options.seed, series, test)
            print(table(HEAD, [row(name, budget, found[f"{name}, {budget}"]["saves"])]), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(document))
    print(table(HEAD, [row(*key.rsplit(", ", 1), one["saves"]) for key, one in found.items()]))
    print("written:", options.out)


if __name__ == "__main__":
    main()
