"""What coded moments cost a training that goes on from a delta: bits, and the loss 5, 20 and 60 steps later.

    python -m lab.studies.fisher.moments                  # writes benchmarks/results/moments.json: 15 minutes a seed
    python -m lab.studies.fisher.moments --kinds LoRA --seeds 0 --out a.json
    python -m lab.studies.fisher.moments --report

The kinds of training are those of `kinds.py`. A training is saved as a chain under each rule. After every delta it goes
on from the moments of that checkpoint, with the weights that it has, on the batches that the training itself sees next.
Rises are those of the loss on unseen examples above the training's own, so the rules differ by the moments alone.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import shrinkpoint as sp
from lab.studies.fisher.kinds import EXAMPLES, KINDS, Kind, mean_loss
from lab.studies.harness.seeded import run_seeds
from shrinkpoint.quantize.lattice import PowerZones
from shrinkpoint.schemes.fisher import scheme
from shrinkpoint.schemes.fisher.moment_lattices import MomentPrecision
from shrinkpoint.storage import MemoryStorage

SAVES, AFTER = 4, (5, 20, 60)
RULES: dict[str, dict[str, Any]] = {
    "now": {},
    "v by 3 octaves": {"second_step": 24, "second_zones": PowerZones(0.6)},
}
"""Fields of `MomentPrecision` that differ from the product's; 3 octaves were its steps until 2026-11-30."""


@contextmanager
def applied(rule: str) -> Iterator[None]:
    precision = MomentPrecision(**RULES[rule])
    with patch.object(scheme, "MomentPrecision", lambda: precision):
        yield


def follow(kind: Kind, parts: dict[str, Any], batches: torch.Tensor) -> list[float]:
    """The losses of unseen examples as a training goes on from these parts, at each count of `AFTER`."""
    for name, part in kind.parts().items():
        part.load_state_dict(copy.deepcopy(parts[name]))
    train, held = kind.data()
    unseen = held[0][EXAMPLES : 11 * EXAMPLES], held[1][EXAMPLES : 11 * EXAMPLES]
    found, done = [], 0
    for count in AFTER:
        for chosen in batches[done:count]:
            kind.step((train[0][chosen], train[1][chosen]))
        done = count
        found.append(mean_loss(kind, unseen))
    return found


def study(name: str, seed: int, rules: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Bits and rises in percent after each delta, by rule."""
    torch.manual_seed(seed)
    kind = KINDS[name]()
    train, _ = kind.data()
    generator = torch.Generator().manual_seed(1000 + seed)
    storages = {rule: MemoryStorage() for rule in rules}
    managers = {
        rule: sp.CheckpointManager(storage, scheme=sp.Fisher(relative_error=0.3), threads=1)
        for rule, storage in storages.items()
    }
    rows: dict[str, list[dict[str, Any]]] = {rule: [] for rule in rules}
    for number in range(SAVES):
        kind.train(train, kind.every if number else kind.first, generator)
        live = copy.deepcopy({part: x.state_dict() for part, x in kind.parts().items()})
        reports = {}
        for rule, manager in managers.items():
            with applied(rule):
                reports[rule] = manager.save(number, **kind.parts())
        if not number:
            continue
        state = generator.get_state()
        batches = torch.randint(len(train[0]), (max(AFTER), kind.batch), generator=generator)
        generator.set_state(state)
        own = follow(kind, live, batches)
        for rule, storage in storages.items():
            coded = sp.Store(storage).load(number)
            losses = follow(
                kind, {part: coded[part] if part.startswith("optimizer") else live[part] for part in live}, batches
            )
            roles = reports[rule].roles
            rows[rule].append(
                {
                    "bits": [
                        round(kind.width * roles[role].stored / roles[role].raw, 3) for role in ("moment1", "moment2")
                    ],
                    "rises": [round(100 * (x / y - 1), 4) for x, y in zip(losses, own, strict=True)],
                }
            )
        follow(kind, live, batches[:0])
    return rows


def report(document: dict[str, Any]) -> None:
    after = " | ".join(f"rise %, {n} steps later" for n in AFTER)
    print(f"| training | rule | bits m, v | {after} |")
    print("|---" * (3 + len(AFTER)) + "|")
    for name, seeds in document["kinds"].items():
        for rule in next(iter(seeds.values())):
            rows = [row for rules in seeds.values() for row in rules[rule]]
            bits = ", ".join(f"{statistics.median(row['bits'][i] for row in rows):.2f}" for i in (0, 1))
            cells = []
            for i in range(len(AFTER)):
                rises = [row["rises"][i] for row in rows]
                cells.append(f"{statistics.mean(rises):+.3f} ± {statistics.stdev(rises) / len(rises) ** 0.5:.3f}")
            print(f"| {name} | {rule} | {bits} | " + " | ".join(cells) + " |")


def main() -> None:
    def fill(section: dict[str, Any], name: str, seed: int, arguments: argparse.Namespace) -> None:
        section.setdefault(name, {})[str(seed)] = study(name, seed, arguments.rules)

    run_seeds(__doc__, fill, report, section="kinds", out="moments.json", kinds=[*KINDS], rules=[*RULES])


if __name__ == "__main__":
    main()
