"""Evaluations that a budget of `fisher` costs, and how the budget is kept, on five small trainings.

    python -m lab.studies.fisher.evaluations                # writes benchmarks/results/evaluations.json: 8 minutes
    python -m lab.studies.fisher.evaluations --seeds 0 --trainings mlp --out a.json
    python -m lab.studies.fisher.evaluations --report

Each training is recorded without loss. Then its checkpoints are written as a chain for each budget and each form of
`evaluate`: "mean" returns one number, "examples" the loss of each example, "terms" also says how many terms a batch
has, and "metric" is "examples" where the loop has measured the loss of the live weights and passes it to `save` as a
metric. What is loaded is measured again, on the same examples and on others.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shrinkpoint as sp
from lab.studies.harness import default_data
from lab.studies.harness.seeded import run_seeds
from shrinkpoint.storage import MemoryStorage
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

Batch = tuple[Tensor, Tensor]
BUDGETS, FORMS, SAVES = ("0.1%", "1%", "5%"), ("mean", "examples", "terms", "metric"), 12


class ByteGPT(GPT):
    """The demo's GPT, returning scores, so that every window has a loss."""

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of each example; of a text, the mean over its tokens."""
    scores = model(batch[0])
    each = F.cross_entropy(scores.flatten(0, -2), batch[1].flatten().long(), reduction="none")
    return each.unflatten(0, batch[1].shape).flatten(1).mean(1) if batch[1].dim() > 1 else each


@torch.no_grad()
def mean_loss(model: nn.Module, batch: Batch) -> float:
    return float(losses(model, batch).double().mean())


@lru_cache
def images(name: str) -> tuple[Batch, Batch]:
    """Training and test images, 28 x 28 in 0 to 1, and their classes."""
    found = np.load(default_data() / name / f"{name}.npz")
    parts = []
    for part in ("train", "test"):
        pixels = torch.from_numpy(found[f"x_{part}"]).reshape(-1, 1, 28, 28).float() / 255
        parts.append((pixels, torch.from_numpy(found[f"y_{part}"]).long()))
    return parts[0], parts[1]


@lru_cache
def text() -> tuple[Batch, Batch]:
    """Windows of 64 bytes of tiny-shakespeare and the bytes after each: the first nine tenths, and the rest."""
    content = gzip.decompress((default_data() / "tinyshakespeare" / "input.txt.gz").read_bytes())
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8)[: len(content) // 65 * 65].reshape(-1, 65).long()
    rows = torch.cat([rows, rows.roll(32, 1)])[:, :65]
    cut = len(rows) // 2 * 9 // 10
    held = rows[cut : len(rows) // 2]
    return (rows[:cut, :-1], rows[:cut, 1:]), (held[:, :-1], held[:, 1:])


def cnn(*, norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for narrow, wide in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(narrow, wide, 3, 2, 1), *([nn.BatchNorm2d(wide)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def gpt() -> nn.Module:
    return ByteGPT(GPTConfig(layers=2, width=96, heads=4, context=64, dropout=0.0))


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        data: training and held-out examples.
        size: of a batch.
        terms: loss terms of a batch.
        first, every: steps before the first checkpoint, and between two.
        examples: that `evaluate` measures.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    data: Callable[[], tuple[Batch, Batch]]
    size: int
    terms: int
    first: int
    every: int
    examples: int = 250


def fine_tuned() -> nn.Module:
    """The CNN after 200 steps on digits."""
    before = Training(cnn, lambda m: torch.optim.AdamW(m.parameters(), 1e-3), lambda: images("mnist"), 64, 64, 200, 1)
    model, _ = next(recorded(before, 17))
    return model


TRAININGS = {
    "gpt": Training(
        gpt, lambda m: torch.optim.AdamW(m.parameters(), 2e-3, (0.9, 0.95)), text, 16, 1024, 200, 25, 100
    ),
    "cnn": Training(
        cnn, lambda m: torch.optim.AdamW(m.parameters(), 1e-3), lambda: images("fashion_mnist"), 64, 64, 150, 40
    ),
    "cnn, batch norm": Training(
        lambda: cnn(norm=True),
        lambda m: torch.optim.Adam(m.parameters(), 2e-3),
        lambda: images("fashion_mnist"), 64, 64, 150, 40,
    ),
    "mlp": Training(
        mlp, lambda m: torch.optim.RMSprop(m.parameters(), 5e-4), lambda: images("mnist"), 64, 64, 100, 60
    ),
    "fine-tuned": Training(
        fine_tuned, lambda m: torch.optim.AdamW(m.parameters(), 3e-4), lambda: images("fashion_mnist"), 64, 64, 40, 20
    ),
}  # fmt: skip


def recorded(training: Training, seed: int) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """The model and the optimizer at each checkpoint, which are the same objects as training goes on."""
    torch.manual_seed(seed)
    model = training.model()
    torch.manual_seed(seed)
    optimizer, (train, _) = training.optimizer(model), training.data()
    for save in range(SAVES):
        for _ in range(training.every if save else training.first):
            chosen = torch.randint(len(train[0]), (training.size,))
            optimizer.zero_grad()
            losses(model.train(), (train[0][chosen], train[1][chosen])).mean().backward()
            optimizer.step()
        yield model.eval(), optimizer


class Evaluate:
    """`evaluate` as a scheme calls it, with a count of its calls."""

    def __init__(self, batch: Batch, form: str, terms: int) -> None:
        self._batch, self.form, self.calls = batch, form, 0
        if form == "terms":
            self.terms = terms

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Any:
        self.calls += 1
        each = losses(model.eval(), self._batch).double()
        return float(each.mean()) if self.form == "mean" else each


class Chain:
    """One chain of checkpoints by a budget.

    Attributes:
        saves: a row each.
    """

    def __init__(self, budget: str, evaluate: Evaluate, **options: Any) -> None:
        self.saves: list[dict[str, Any]] = []
        self._budget, self._evaluate = float(budget.rstrip("%")) / 100, evaluate
        scheme = sp.Fisher(budget=budget, evaluate=evaluate, **options)
        self._manager = sp.CheckpointManager(MemoryStorage(), scheme=scheme)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch], before: list[float]) -> None:
        """Save, and measure what is loaded and what was tried first: rises as shares of the budget.

        Args:
            data: the evaluated and the unseen examples.
            before: losses of the model on both.
        """
        calls, step = self._evaluate.calls, len(self.saves)
        metrics = {"loss": before[0]} if self._evaluate.form == "metric" else {}
        report = self._manager.save(step, model=model, optimizer=optimizer, metrics=metrics)
        other = copy.deepcopy(model)
        reference = self._manager.store.reference  # a load would make the store forget what the weights were before
        assert reference is not None
        held = {n.removeprefix("model/"): x for n, x in reference.tensors.items() if n.startswith("model/")}
        other.load_state_dict(held, strict=False)
        loss = report.loss_report or {}
        rises = [mean_loss(other, batch) - loss for batch, loss in zip(data, before, strict=True)]
        rises.append(loss["tried"][0]["rise"] if loss.get("tried") else 0.0)
        names = ("rise", "unseen", "first trial")
        shares = {
            name: round(rise / (self._budget * (before[1] if name == "unseen" else before[0])), 4)
            for name, rise in zip(names, rises, strict=True)
        }
        row = {"evaluations": self._evaluate.calls - calls, "bytes": report.stored_bytes, "loss": round(before[0], 5)}
        self.saves.append(row | shares)


def chains(training: Training, seed: int, budgets: list[str], forms: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The saves of all chains of one training."""
    held, count = training.data()[1], training.examples
    data = [(held[0][a:b], held[1][a:b]) for a, b in ((0, count), (count, 4 * count))]
    found = {
        f"{budget}, {form}": Chain(budget, Evaluate(data[0], form, training.terms))
        for budget in budgets
        for form in forms
    }
    for model, optimizer in recorded(training, seed):
        before = [mean_loss(model, batch) for batch in data]
        for chain in found.values():
            chain.save(model, optimizer, data, before)
    return {name: chain.saves for name, chain in found.items()}


HEAD = (
    "| | first: median, most | later: median, mean, most | kept | kept, unseen | rise: mean, most "
    "| unseen: mean, most | bytes: first, later |"
)


def row(name: str, runs: list[list[dict[str, Any]]]) -> str:
    """One line of the table."""
    first, later = [run[0] for run in runs], [save for run in runs for save in run[1:]]
    both = first + later

    def kept(key: str) -> str:
        return f"{sum(save[key] <= 1 + 1e-4 for save in both)} of {len(both)}"

    def spread(key: str) -> str:
        values = [100 * save[key] for save in both]
        return f"{statistics.mean(values):+.0f}%, {max(values):+.0f}%"

    calls, more = [save["evaluations"] for save in first], [save["evaluations"] for save in later]
    sizes = [statistics.mean(save["bytes"] for save in part) for part in (first, later)]
    return (
        f"| {name} | {statistics.median(calls):g}, {max(calls)} "
        f"| {statistics.median(more):g}, {statistics.mean(more):.2f}, {max(more)} | {kept('rise')} | {kept('unseen')} "
        f"| {spread('rise')} | {spread('unseen')} | {sizes[0]:,.0f}, {sizes[1]:,.0f} |"
    )


def falling(runs: list[tuple[float, list[dict[str, Any]]]]) -> str:
    """How first trials keep the budget where the live loss has fallen by more than it since the last save.

    Args:
        runs: budgets, and the saves of a chain.
    """
    shares = [
        save["first trial"]
        for budget, run in runs
        for last, save in pairwise(run)
        if last["loss"] - save["loss"] > budget * last["loss"]
    ]
    above = [share for share in shares if not share <= 1]
    return (
        f"of {len(shares)} saves after a fall of the loss by more than the budget, {len(above)} first trials are above"
    )


def report(document: dict[str, Any]) -> None:
    print(HEAD + "\n" + "|---" * 8 + "|")
    groups: dict[str, list[Any]] = {}
    chains = {
        key: [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        for key, columns in document["chains"].items()
    }
    budgets = [float(key.rsplit(", ", 2)[1].rstrip("%")) / 100 for key in chains]
    for key, saves in chains.items():
        name, _, budget, form = key.rsplit(", ", 3)
        for group in (f"{name}, {budget}", f"all, {budget}", f"all, {form}", "all"):
            groups.setdefault(group, []).append(saves)
    for name, runs in groups.items():
        print(row(name, runs))
    print(falling([*zip(budgets, chains.values(), strict=True)]))


def main() -> None:
    def fill(section: dict[str, Any], name: str, seed: int, arguments: argparse.Namespace) -> None:
        for key, saves in chains(TRAININGS[name], seed, arguments.budgets, arguments.forms).items():
            columns = {column: [save[column] for save in saves] for column in saves[0]}
            section[f"{name}, seed {seed}, {key}"] = columns

    names = {"trainings": [*TRAININGS], "budgets": BUDGETS, "forms": FORMS}
    run_seeds(__doc__, fill, report, section="chains", out="evaluations.json", **names)


if __name__ == "__main__":
    main()
