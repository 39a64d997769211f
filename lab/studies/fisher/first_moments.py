"""What first moments cost a training that goes on from a checkpoint: bits, and the loss 5, 20 and 60 steps later.

    python -m lab.studies.fisher.first_moments              # writes benchmarks/results/first_moments.json: 25 minutes
    python -m lab.studies.fisher.first_moments --seeds 0 --trainings "AdamW .9/.999" --out a.json
    python -m lab.studies.fisher.first_moments --report

A training runs to the end without a restore. From a checkpoint of it, restored under each rule, 60 steps follow on the
batches that the training itself has seen there. Rises are of the loss on held-out examples above the training's own.
Weights and second moments are restored alike under all rules, so that the rules differ by the first moments alone.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import shrinkpoint as sp
from lab.studies.fisher.evaluations import Batch, cnn, gpt, images, losses, mean_loss, text
from lab.studies.harness import document_tables
from lab.studies.harness.seeded import run_seeds
from shrinkpoint.schemes.fisher import moment_lattices as moments
from shrinkpoint.schemes.fisher import scheme
from shrinkpoint.storage import MemoryStorage

AFTER = (5, 20, 60)
STEPS = (25, 100, 300)


class Lion(torch.optim.Optimizer):
    """The sign of a momentum and a gradient (arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for x in group["params"]:
                m = self.state[x].setdefault("exp_avg", torch.zeros_like(x))
                x.sub_(group["lr"] * (m * first + x.grad * (1 - first)).sign())
                m.lerp_(x.grad, 1 - second)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    inner = [x for name, x in model.named_parameters() if x.dim() == 2 and "blocks" in name]
    ids = {*map(id, inner)}
    others = [x for x in model.parameters() if id(x) not in ids]
    return [torch.optim.Muon(inner, lr=1e-2), torch.optim.AdamW(others, 2e-3, (0.9, 0.95))]


def adamw(lr: float, *betas: float) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda model: [torch.optim.AdamW(model.parameters(), lr, betas)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), 0.02, 0.9)]


def smooth(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    return nn.Sequential(*(nn.GELU() if isinstance(layer, nn.ReLU) else layer for layer in model))


@dataclass(frozen=True)
class Training:
    """One training: its model, its optimizers and its examples."""

    model: Callable[[], nn.Module]
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]
    data: Callable[[], tuple[Batch, Batch]]
    size: int


TRAININGS = {
    "AdamW .9/.95": Training(gpt, adamw(2e-3, 0.9, 0.95), text, 16),
    "AdamW .9/.999": Training(gpt, adamw(2e-3, 0.9, 0.999), text, 16),
    "AdamW .5/.999": Training(gpt, adamw(2e-3, 0.5, 0.999), text, 16),
    "Muon": Training(gpt, muon, text, 16),
    "Lion": Training(gpt, lambda model: [Lion(model.parameters(), 3e-4)], text, 16),
    "Adamax": Training(gpt, lambda model: [torch.optim.Adamax(model.parameters(), 2e-3)], text, 16),
    "SGD .9, ReLU": Training(lambda: cnn(norm=True), sgd, lambda: images("fashion_mnist"), 64),
    "SGD .9, GELU": Training(lambda: smooth(cnn(norm=True)), sgd, lambda: images("fashion_mnist"), 64),
}
"""With their `beta1/beta2`; a ReLU leaves zeros in momentum."""


@dataclass(frozen=True)
class Rule:
    """How first moments are restored.

    Attributes:
        precision: fields of `MomentPrecision` that differ from the product's.
        keep: "coded", "exact" or "zero".
        raw: steps relative to second moments as they are, biased towards zero, whatever beta1 is.
    """

    precision: dict[str, Any]
    keep: str = "coded"
    raw: bool = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.precision:
                precision = moments.MomentPrecision(**self.precision)
                stack.enter_context(patch.object(scheme, "MomentPrecision", lambda: precision))
            if self.raw:
                stack.enter_context(patch.object(moments, "first_step_factor", lambda *_: 1.0))
                stack.enter_context(patch.object(moments, "_STOCHASTIC_KINDS", ()))
            yield


_K = moments.MomentKind
_BEFORE = {_K.MOMENTUM: 4.0, _K.GRADIENT_MEAN: 0.5, _K.SCALED: 1.0, _K.ORTHOGONALIZED: 0.5, _K.SIGN: 1.0}
RULES = {
    "exact": Rule({}, "exact"),
    "before": Rule({"first_max": 8.0, "momentum_steps": _BEFORE, "dead_zones": {}}, raw=True),
    "now": Rule({}),
    "zero": Rule({}, "zero"),
}
"""Before 2026-11-29 steps were relative to what bias leaves of second moments, and momentum with zeros was exact."""


class Run:
    """A model and its optimizers, which are trained, saved and restored."""

    def __init__(self, training: Training, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = training.model()
        self.optimizers = training.optimizers(self.model)

    def train(self, train: Batch, batches: Tensor) -> None:
        for chosen in batches:
            self.model.train()
            self.model.zero_grad()
            losses(self.model, (train[0][chosen], train[1][chosen])).mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, **{f"optimizer{i}": x for i, x in enumerate(self.optimizers)}}

    def restored(self, step: int, rule: Rule) -> tuple[Run, dict[str, Any]]:
        """The run as it goes on from a checkpoint at this step, with its bits a value of moments."""
        run, storage = copy.deepcopy(self), MemoryStorage()
        with rule.applied(), sp.CheckpointManager(storage, scheme=sp.Fisher(relative_error=0.3), threads=1) as manager:
            report = manager.save(step, **self.parts())
            manager.restore(step, **run.parts())
        for own, restored in zip(self.optimizers, run.optimizers, strict=True):
            for x, y in zip(own.param_groups, restored.param_groups, strict=True):
                for before, after in zip(x["params"], y["params"], strict=True):
                    for key in ("exp_avg", "momentum_buffer"):
                        if key in own.state[before] and rule.keep != "coded":
                            value = own.state[before][key]
                            restored.state[after][key].copy_(value if rule.keep == "exact" else torch.zeros_like(value))
        role = report.roles.get("moment1")
        return run, {"bits": 0.0 if role is None else 32 * role.stored / role.raw, "ratio": report.ratio}


def study(training: Training, seed: int, rules: dict[str, Rule]) -> dict[str, list[dict[str, Any]]]:
    """Rises after each restore by each rule, at each of `STEPS`."""
    run, (train, held) = Run(training, seed), training.data()
    held = held[0][:384], held[1][:384]
    batches = torch.randint(
        len(train[0]), (max(STEPS) + max(AFTER), training.size), generator=torch.Generator().manual_seed(seed)
    )
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in rules}
    at = 0
    for step in STEPS:
        run.train(train, batches[at:step])
        at = step
        restored = {name: run.restored(step, rule) for name, rule in rules.items()}
        followed = {"": (copy.deepcopy(run), {}), **restored}
        found: dict[str, list[float]] = {name: [] for name in followed}
        for name, (other, _) in followed.items():
            done = step
            for count in AFTER:
                other.train(train, batches[done : step + count])
                done = step + count
                found[name].append(mean_loss(other.model.eval(), held))
        for name, (_, facts) in restored.items():
            rises = [round(x - y, 5) for x, y in zip(found[name], found[""], strict=True)]
            rows[name].append({"step": step, "rises": rises, **{k: round(v, 3) for k, v in facts.items()}})
    return rows


def report(document: dict[str, Any]) -> None:
    """Print a table. Rises are those of later restores: so early in a training two runs soon differ by 0.05 anyway."""
    steps = " and ".join(map(str, STEPS[1:]))
    print(f"| training | restored | bits at {', '.join(map(str, STEPS))} | ", end="")
    print(" | ".join(f"rise {n} steps later" for n in AFTER) + f" (of {steps}) |")
    print("|---" * (3 + len(AFTER)) + "|")
    for name, seeds in document["trainings"].items():
        for rule in next(iter(seeds.values())):
            label, rows = document_tables.label(name), [row for rules in seeds.values() for row in rules[rule]]
            bits = [statistics.mean(row["bits"] for row in rows if row["step"] == step) for step in STEPS]
            late = [row["rises"] for row in rows if row["step"] > STEPS[0]]
            rises = [statistics.mean(one[i] for one in late) for i in range(len(AFTER))]
            sizes = ", ".join(f"{x:.2f}" for x in bits) if rule in ("before", "now") else ""
            print(f"| {label} | {rule} | {sizes} | " + " | ".join(f"{x:+.4f}" for x in rises) + " |")


def main() -> None:
    def fill(section: dict[str, Any], name: str, seed: int, arguments: argparse.Namespace) -> None:
        rules = {rule: RULES[rule] for rule in arguments.rules}
        section.setdefault(name, {})[str(seed)] = study(TRAININGS[name], seed, rules)

    names = {"trainings": [*TRAININGS], "rules": [*RULES]}
    run_seeds(__doc__, fill, report, section="trainings", out="first_moments.json", **names)


if __name__ == "__main__":
    main()
