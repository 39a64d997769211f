"""Bytes, rises and seconds of eight kinds of training under `Keep(last=3)`, beside `torch.save`.

    python -m lab.studies.retention.kinds --seeds 0        # writes benchmarks/results/retention_kinds.json: 20 minutes
    python -m lab.studies.retention.kinds --kinds Muon --seeds 0 --out a.json
    python -m lab.studies.retention.kinds --report

The trainings are those of `lab.studies.fisher.kinds`. Every save goes through `torch.save`, which is made durable, and
through a `CheckpointManager` of each scheme; each keeps the newest three. "fisher" is what a trainer makes of the name:
a budget of 0.1%, measured on the last 8 training batches. `Fisher(budget="1%")` is measured on 96 held-out examples.
The newest checkpoint is loaded after every save. The rise of its loss is measured on what `evaluate` has seen, and on
768 other held-out examples.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import shrinkpoint as sp
from lab.studies.fisher.kinds import EXAMPLES, KINDS, Batch, Kind, mean_loss, measured
from lab.studies.harness.seeded import run_seeds
from lab.studies.retention.meter import Meter

LAST, SAVES = 3, 12
SCHEMES = ("lossless", "fisher", "1%")
HEADS = {"lossless": "lossless", "fisher": '`"fisher"`', "1%": '`Fisher(budget="1%")`'}


class Plain:
    """`torch.save` of a state dict, made durable; then the oldest file is deleted."""

    def __init__(self, root: Path) -> None:
        self.meter = Meter(root)
        self.loads: list[float] = []

    def save(self, step: int, parts: dict[str, Any]) -> None:
        place = self.meter.root / f"{step:06}.pt"
        with self.meter.saving():
            with place.open("wb") as file:
                torch.save({name: part.state_dict() for name, part in parts.items()}, file)
                file.flush()
                os.fsync(file.fileno())
            for old in sorted(self.meter.root.iterdir())[:-LAST]:
                old.unlink()
        began = time.perf_counter()
        torch.load(place, weights_only=True)
        self.loads.append(time.perf_counter() - began)


class Managed:
    """A `CheckpointManager` with a scheme, and the rises of what it saves."""

    def __init__(self, root: Path, scheme: str | sp.Fisher) -> None:
        self.meter = Meter(root)
        self.loads: list[float] = []
        self.rises: list[list[float]] = []
        self.manager = sp.CheckpointManager(root, scheme=scheme, keep=sp.Keep(last=LAST), threads=1)

    def save(self, step: int, kind: Kind, seen: list[Batch], unseen: list[Batch]) -> None:
        with self.meter.saving():
            self.manager.save(step, rng=False, **kind.parts())
        began = time.perf_counter()
        state = self.manager.store.load(step, keep=False)
        self.loads.append(time.perf_counter() - began)
        stored = copy.deepcopy(kind.model)
        stored.load_state_dict(state["model"])
        self.rises.append([rise(kind, stored, batches) for batches in (seen, unseen)])


def rise(kind: Kind, stored: torch.nn.Module, batches: list[Batch]) -> float:
    """The rise of the mean loss of a stored model against the one that trains, in per cent."""
    after, before = (
        statistics.fmean(mean_loss(kind, batch, model) for batch in batches) for model in (stored, kind.model)
    )
    return 100 * (after / before - 1)


def run(name: str, seed: int, schemes: list[str], root: Path) -> dict[str, dict[str, Any]]:
    """The figures of each scheme: means and medians of the second half of the saves."""
    torch.manual_seed(seed)
    kind = KINDS[name]()
    train, held = kind.data()
    seen, unseen = ((held[0][part], held[1][part]) for part in (slice(EXAMPLES), slice(EXAMPLES, 9 * EXAMPLES)))
    recent = sp.RecentBatches(kind.loss)

    made = {
        "lossless": "lossless",
        "fisher": sp.Fisher(evaluate=recent),
        "1%": sp.Fisher(budget="1%", evaluate=lambda model: measured(kind, model, [seen])),
    }
    plain, ours = Plain(root / "plain"), {scheme: Managed(root / scheme, made[scheme]) for scheme in schemes}
    for number in range(SAVES):
        kind.train(train, kind.every if number else kind.first)
        for batch in kind.recent:
            recent.add(batch)
        plain.save(number, kind.parts())
        for scheme, managed in ours.items():
            managed.save(number, kind, [*kind.recent] if scheme == "fisher" else [seen], [unseen])
    for managed in ours.values():
        managed.manager.close()
    figures = plain.meter.figures()
    return {scheme: row(managed, plain, figures["held"]) for scheme, managed in ours.items()}


def row(managed: Managed, plain: Plain, held: float) -> dict[str, Any]:
    half = SAVES // 2
    seconds = {
        "save": [statistics.median(x.meter.seconds[half:]) for x in (plain, managed)],
        "load": [statistics.median(x.loads[half:]) for x in (plain, managed)],
    }
    return {"plain": held / LAST, "ratio": held / managed.meter.figures()["held"], **seconds, "rises": managed.rises}


def report(document: dict[str, Any]) -> None:
    print(
        "| training | scheme | plain / held | rise %, evaluated: mean, worst | unseen: mean, worst | save x | load x |"
    )
    print("|---" * 7 + "|")
    for name, seeds in document["kinds"].items():
        for scheme in next(iter(seeds.values())):
            rows = [found[scheme] for found in seeds.values()]
            rises = [[pair[i] for found in rows for pair in found["rises"]] for i in (0, 1)]
            times = [statistics.median(found[key][1] / found[key][0] for found in rows) for key in ("save", "load")]
            ratio = statistics.median(found["ratio"] for found in rows)
            ends = [f"{statistics.fmean(part):+.2f}, {max(part):+.2f}" for part in rises]
            cells = (name, HEADS[scheme], f"{ratio:.2f}", *ends, *(f"{x:.1f}" for x in times))
            print("| " + " | ".join(cells) + " |")


def main() -> None:
    def fill(section: dict[str, Any], name: str, seed: int, arguments: argparse.Namespace) -> None:
        with tempfile.TemporaryDirectory(prefix="shrinkpoint-kinds-") as folder:
            section.setdefault(name, {})[str(seed)] = run(name, seed, arguments.schemes, Path(folder))
        print(f"  {name}, seed {seed}", flush=True)

    run_seeds(__doc__, fill, report, section="kinds", out="retention_kinds.json", kinds=[*KINDS], schemes=SCHEMES)


if __name__ == "__main__":
    main()
