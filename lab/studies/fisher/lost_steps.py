"""Steps of training that a restore without first moments loses, on three kinds of training.

    python -m lab.studies.fisher.lost_steps               # writes benchmarks/results/lost_steps.json: 20 minutes
    python -m lab.studies.fisher.lost_steps --kinds ViT --seeds 0 --out a.json
    python -m lab.studies.fisher.lost_steps --report

From one step on, a training goes on with its moments, from a checkpoint that codes them, and from one without the
first. All see the same batches. The steps lost are the shift in time by which the loss of held-out examples follows
that of the training itself, by least squares over the steps after the restore.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import torch
from torch import Tensor

import shrinkpoint as sp
from lab.studies.fisher.kinds import KINDS, Kind, mean_loss
from lab.studies.harness.seeded import run_seeds
from shrinkpoint.schemes.fisher.scheme import MomentsMode
from shrinkpoint.storage import MemoryStorage

CHOSEN = ("mixture of experts", "ViT", "bf16 decoder")
COURSES = ("coded", "second")
AT, AFTER, EVERY = 240, 100, 10
EXAMPLES = 768


def restored(kind: Kind, moments: MomentsMode) -> Kind:
    """The training as it goes on from a checkpoint; weights are restored exactly, to see moments alone."""
    other, weights = copy.deepcopy(kind), copy.deepcopy(kind.model.state_dict())
    scheme = sp.Fisher(relative_error=0.01, moments=moments)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme, threads=1) as manager:
        manager.save(0, **kind.parts())
        manager.restore(**other.parts())
    other.model.load_state_dict(weights)
    return other


def losses_after(kind: Kind, train: tuple[Tensor, Tensor], batches: list[Tensor], held: tuple[Tensor, Tensor]) -> Any:
    found = []
    for number, chosen in enumerate(batches, 1):
        kind.step((train[0][chosen], train[1][chosen]))
        if number % EVERY == 0:
            found.append(mean_loss(kind, held))
    return found


def steps_behind(losses: list[float], own: list[float]) -> float:
    """The shift of `losses` against `own`, in steps: both at the same steps, the first of which are left out."""
    x = torch.arange(len(own), dtype=torch.float64) * EVERY
    basis = torch.stack([x**0, x, x**2], 1) / torch.tensor([1.0, AFTER, AFTER**2])
    smooth = torch.linalg.lstsq(basis, torch.tensor(own, dtype=torch.float64)[:, None]).solution[:, 0]
    slopes = (smooth[1] + 2 * smooth[2] * x / AFTER) / AFTER
    late = x >= 2 * EVERY
    rises = torch.tensor(losses, dtype=torch.float64) - torch.tensor(own, dtype=torch.float64)
    return float(-(rises * slopes)[late].sum() / slopes[late].square().sum())


def run(name: str, seed: int, courses: list[MomentsMode]) -> dict[str, Any]:
    torch.manual_seed(seed)
    kind = KINDS[name]()
    train, held = kind.data()
    unseen = held[0][:EXAMPLES], held[1][:EXAMPLES]
    draw = torch.Generator().manual_seed(1000 + seed)
    batches = [torch.randint(len(train[0]), (kind.batch,), generator=draw) for _ in range(AT + AFTER)]
    losses_after(kind, train, batches[:AT], unseen)
    followed = {course: restored(kind, course) for course in courses}
    own = losses_after(kind, train, batches[AT:], unseen)
    found: dict[str, Any] = {"none": {"losses": own}}
    for course, other in followed.items():
        losses = losses_after(other, train, batches[AT:], unseen)
        found[course] = {"losses": losses, "lost": steps_behind(losses, own)}
    return found


def report(document: dict[str, Any]) -> None:
    print("| training | first moments | steps lost: mean, each seed | rise of the loss 20, 60, 100 steps later, % |")
    print("|---" * 4 + "|")
    for name, seeds in document["kinds"].items():
        for course in COURSES:
            lost = [one[course]["lost"] for one in seeds.values()]
            pairs = [(one[course]["losses"], one["none"]["losses"]) for one in seeds.values()]
            rises = [
                statistics.mean(100 * (a[i] / b[i] - 1) for a, b in pairs)
                for i in (20 // EVERY - 1, 60 // EVERY - 1, -1)
            ]
            each = ", ".join(f"{x:.1f}" for x in lost)
            cells = name, course, f"{statistics.mean(lost):.1f} ({each})", ", ".join(f"{x:+.2f}" for x in rises)
            print("| " + " | ".join(cells) + " |")


def main() -> None:
    def fill(section: dict[str, Any], name: str, seed: int, arguments: argparse.Namespace) -> None:
        section.setdefault(name, {})[str(seed)] = run(name, seed, arguments.courses)

    run_seeds(__doc__, fill, report, section="kinds", out="lost_steps.json", kinds=CHOSEN, courses=COURSES)


if __name__ == "__main__":
    main()
