"""Ratios of `fisher` on the GPT of 31.7 M parameters, by what is kept of first moments.

    python -m lab.studies.fisher.large                    # writes benchmarks/results/large.json: an hour a seed
    python -m lab.studies.fisher.large --report

The training is that of `workloads/wikitext.py`. Its whole state is saved at steps 300, 350, 400, 450 and 500, as a
chain for each of the `courses`, at a budget of 1%. Every checkpoint is loaded again, and its loss is measured on the
windows that `evaluate` has and on others.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import torch
from torch import Tensor, nn

import shrinkpoint as sp
from lab.studies.fisher.kinds import save_row
from lab.studies.fisher.lost_steps import COURSES
from lab.studies.harness import default_data
from lab.studies.harness.seeded import run_seeds
from lab.studies.workloads.text import windows
from lab.studies.workloads.wikitext import SHAPE, texts, wikitext
from shrinkpoint.storage import MemoryStorage

FIRST, EVERY, SAVES = 300, 50, 5
GROUP = 4
"""Windows of which the model gives one loss."""


@torch.no_grad()
def measured(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of each group of windows."""
    parts = zip(*(side.split(GROUP) for side in batch), strict=True)
    return torch.stack([model.eval()(*part) for part in parts]).double()


def run(seed: int, courses: list[str]) -> dict[str, list[dict[str, Any]]]:
    """A row for each save, by course."""
    workload, (_, _, held) = wikitext(default_data()), texts(default_data())
    half = len(held) // 2
    seen, unseen = windows(held[:half], SHAPE.context, 64), windows(held[half:], SHAPE.context, 192)
    training = workload.build(seed)
    storages = {course: MemoryStorage() for course in courses}
    managers = {
        course: sp.CheckpointManager(
            storage,
            scheme=sp.Fisher(budget="1%", evaluate=lambda model: measured(model, seen), moments=course),
            threads=1,
        )
        for course, storage in storages.items()
    }
    rows: dict[str, list[dict[str, Any]]] = {course: [] for course in courses}
    for step in range(1, FIRST + EVERY * (SAVES - 1) + 1):
        workload.advance(training)
        training.model.train()
        if step < FIRST or (step - FIRST) % EVERY:
            continue
        live = [measured(training.model, batch) for batch in (seen, unseen)]
        for course, manager in managers.items():
            report = manager.save(step, model=training.model, optimizer=training.optimizer)
            other = copy.deepcopy(training.model)
            other.load_state_dict(sp.Store(storages[course]).load(step)["model"])
            stored = [measured(other, batch) for batch in (seen, unseen)]
            row = save_row(report, live, stored, 32)
            rows[course].append({"step": step} | row | {"loss": float(live[1].mean())})
            print(course, rows[course][-1], flush=True)
    return rows


def report(document: dict[str, Any]) -> None:
    print("| first moments | first save x | delta x, median | bits W, m, v | rise %: seen, unseen, worst | kept |")
    print("|---" * 6 + "|")
    runs = document["trainings"]["wikitext"].values()
    for course in next(iter(runs)):
        deltas = [row for one in runs for row in one[course][1:]]
        every = [row for one in runs for row in one[course]]
        roles = ("parameter", "moment1", "moment2")
        bits = ", ".join(f"{statistics.median(row['bits'].get(role, 0.0) for row in deltas):.3f}" for role in roles)
        seen, unseen = (statistics.mean(row["rises"][i] for row in every) for i in (0, 1))
        first = statistics.median(one[course][0]["ratio"] for one in runs)
        kept = sum(row["rises"][1] - 2 * row["unseen error"] <= 1 for row in every)
        cells = (
            course, f"{first:.1f}", f"{statistics.median(row['ratio'] for row in deltas):.1f}", bits,
            f"{seen:+.3f}, {unseen:+.3f}, {max(row['rises'][1] for row in every):+.3f}", f"{kept} of {len(every)}",
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    def fill(section: dict[str, Any], name: str, seed: int, arguments: argparse.Namespace) -> None:
        section.setdefault(name, {})[str(seed)] = run(seed, arguments.courses)

    run_seeds(__doc__, fill, report, section="trainings", out="large.json", trainings=["wikitext"], courses=COURSES)


if __name__ == "__main__":
    main()
