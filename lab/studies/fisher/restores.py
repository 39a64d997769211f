"""What ten restores cost, one after every save, on kinds of training that nothing was tuned for.

    python -m lab.studies.fisher.restores                 # benchmarks/results/kind_restores.json: half an hour a seed
    python -m lab.studies.fisher.restores --kinds Muon --seeds 0 --out a.json
    python -m lab.studies.fisher.restores --report

Each run trains on the same batches. "exact" is never restored. "counted" is restored from every checkpoint, and its
budget counts what earlier restores have left; "not counted" gives each checkpoint the whole budget. "weights" and
"moments" restore these alone, and leave the others as training has them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shrinkpoint as sp
from lab.studies.fisher.kinds import EXAMPLES, KINDS, Kind, mean_loss
from lab.studies.harness.seeded import run_seeds
from shrinkpoint.schemes.fisher.objective import LossBudget
from shrinkpoint.storage import MemoryStorage

RESTORES = 10
COURSES = ("exact", "counted", "not counted", "weights", "moments")
CHOSEN = ("hashed embeddings", "mixture of experts", "Muon", "bf16 decoder", "LoRA")
BUDGET = "1%"


def run(name: str, seed: int, course: str) -> dict[str, Any]:
    """The loss of unseen examples before each save and at the end; and what each checkpoint costs and gains."""
    torch.manual_seed(seed)
    kind = KINDS[name]()
    train, held = kind.data()
    seen, unseen = ((held[0][part], held[1][part]) for part in (slice(EXAMPLES), slice(EXAMPLES, 11 * EXAMPLES)))
    batches = torch.Generator().manual_seed(1000 + seed)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> Tensor:
        return kind.loss(model.eval(), seen).double()

    manager = sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(budget=BUDGET, evaluate=evaluate), threads=1)
    losses: list[float] = []
    checkpoints: list[dict[str, float]] = []
    for number in range(RESTORES + 1):
        kind.train(train, kind.every if number else kind.first, batches)
        losses.append(mean_loss(kind, unseen))
        if number < RESTORES and course != "exact":
            ratio = save_and_restore(manager, kind, number, course)
            checkpoints.append({"ratio": ratio, "rise": 100 * (mean_loss(kind, unseen) / losses[-1] - 1)})
    return {"losses": losses, "checkpoints": checkpoints}


def save_and_restore(manager: sp.CheckpointManager[Any], kind: Kind, number: int, course: str) -> float:
    """Restore from a checkpoint that has just been saved, but for what the course leaves as it is."""
    live = {name: copy.deepcopy(part.state_dict()) for name, part in kind.parts().items()}
    ratio = manager.save(number, **kind.parts()).ratio
    manager.restore(**kind.parts())
    for name, part in kind.parts().items():
        if (course == "weights" and name != "model") or (course == "moments" and name == "model"):
            part.load_state_dict(live[name])
    return ratio


def report(document: dict[str, Any]) -> None:
    print("| training | course | delta x, median | loss at the end, % beside none: mean, each seed | at once, % |")
    print("|---" * 5 + "|")
    for name, seeds in document["kinds"].items():
        for course in [x for x in COURSES if x != "exact" and x in next(iter(seeds.values()))]:
            runs = [(courses["exact"]["losses"], courses[course]) for courses in seeds.values()]
            # the mean of the last three intervals: trainings diverge a little by chance
            ends = [
                statistics.mean(100 * (x / y - 1) for x, y in zip(one["losses"][-3:], exact[-3:], strict=True))
                for exact, one in runs
            ]
            saves = [save for _, one in runs for save in one["checkpoints"]]
            deltas = [save for _, one in runs for save in one["checkpoints"][1:]]
            ratio = statistics.median(save["ratio"] for save in deltas)
            rise = statistics.mean(save["rise"] for save in saves)
            each = ", ".join(f"{end:+.2f}" for end in ends)
            print(f"| {name} | {course} | {ratio:.0f} | {statistics.mean(ends):+.2f} ({each}) | {rise:+.2f} |")


def main() -> None:
    def fill(section: dict[str, Any], name: str, seed: int, arguments: argparse.Namespace) -> None:
        courses = section.setdefault(name, {}).setdefault(str(seed), {})
        for course in arguments.courses:
            uncounted = mock.patch.object(LossBudget, "after_restores", lambda budget, _: budget)
            with uncounted if course == "not counted" else nullcontext():
                courses[course] = run(name, seed, course)

    run_seeds(__doc__, fill, report, section="kinds", out="kind_restores.json", kinds=CHOSEN, courses=COURSES)


if __name__ == "__main__":
    main()
