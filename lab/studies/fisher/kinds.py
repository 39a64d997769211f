"""Ratios of `fisher` on kinds of training that nothing was tuned for, and how budgets are kept there.

    python -m lab.studies.fisher.kinds                    # writes benchmarks/results/kinds.json: 25 minutes a seed
    python -m lab.studies.fisher.kinds --kinds Muon --budgets 1% --seeds 0 --out a.json
    python -m lab.studies.fisher.kinds --budgets "1% recent" "0.1% recent" --seeds 0 1 --out kinds_recent.json
    python -m lab.studies.fisher.kinds --report

Each kind is a small training that this file defines. A run saves its whole state as a chain of checkpoints by each
budget. Every checkpoint is loaded again, and its loss is measured on the examples that `evaluate` has and on others.
`evaluate` has 96 held-out examples; of a budget that ends in "recent", the last eight batches of training.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shrinkpoint as sp
from lab.studies.fisher.evaluations import Batch, gpt, images, losses, text
from lab.studies.fisher.first_moments import muon
from lab.studies.harness.seeded import run_seeds
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import SaveReport

SAVES, EXAMPLES, RECENT = 8, 96, 8
BUDGETS = ("1%", "0.1%")


class Kind(ABC):
    """One training: what is saved of it, its steps, and the loss of each example.

    Attributes:
        model: that is saved and measured.
        optimizers: that are saved.
        first, every: steps before the first save, and between two.
        width: bits of a value that is saved.
        batch: examples of a step.
        recent: the last batches of training.
    """

    first, every, width, batch = 150, 40, 32, 64

    def __init__(self) -> None:
        self.model: nn.Module = self.build()
        self.optimizers: list[torch.optim.Optimizer] = self.make_optimizers()
        self.recent: deque[Batch] = deque(maxlen=RECENT)

    @abstractmethod
    def build(self) -> nn.Module: ...

    @abstractmethod
    def make_optimizers(self) -> list[torch.optim.Optimizer]: ...

    @abstractmethod
    def data(self) -> tuple[Batch, Batch]:
        """Training examples and held-out ones."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each example."""
        return losses(model, batch)

    def step(self, batch: Batch) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.loss(self.model.train(), batch).mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self, examples: Batch, steps: int, generator: torch.Generator | None = None) -> None:
        """Make steps on examples that are chosen by chance, by the global generator if none is given."""
        for _ in range(steps):
            chosen = torch.randint(len(examples[0]), (self.batch,), generator=generator)
            self.recent.append((examples[0][chosen], examples[1][chosen]))
            self.step(self.recent[-1])

    def parts(self) -> dict[str, Any]:
        """What a manager saves."""
        return {"model": self.model, **{f"optimizer{i}": x for i, x in enumerate(self.optimizers)}}


class Text(Kind):
    batch = 16

    def data(self) -> tuple[Batch, Batch]:
        return text()

    def build(self) -> nn.Module:
        return gpt()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), 2e-3, (0.9, 0.95))]


class Pictures(Kind):
    def data(self) -> tuple[Batch, Batch]:
        return images("fashion_mnist")

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), 1e-3)]


class Muon(Text):
    """A GPT by Muon, with AdamW for what is no matrix."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return muon(self.model)


class HalfPrecision(Text):
    """A GPT of which weights, gradients and moments are bfloat16."""

    width = 16

    def build(self) -> nn.Module:
        return gpt().bfloat16()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch[0]).float()
        each = F.cross_entropy(scores.flatten(0, -2), batch[1].flatten(), reduction="none")
        return each.unflatten(0, batch[1].shape).mean(1)


class Experts(nn.Module):
    """A layer of experts, stacked, of which each token takes the best."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, hidden, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(count, width, hidden) * hidden**-0.5)
        self.gate = nn.Linear(width, count, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        best, out = shares.argmax(-1), torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            chosen = best == i
            out[chosen] = (F.gelu(x[chosen] @ up.T) @ down.T) * shares[chosen][:, i : i + 1]
        return out


class MixtureOfExperts(Text):
    """The GPT with eight experts in place of each perceptron."""

    def build(self) -> nn.Module:
        model = gpt()
        for block in model.blocks:  # type: ignore[union-attr]
            block.up, block.down = nn.Identity(), Experts(8, 96, 192)
        return model

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), 2e-3, (0.9, 0.98))]


class HashedEmbeddings(Text):
    """The next byte from hashes of the bytes before it: a sparse table by SparseAdam, a perceptron by AdamW."""

    def build(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.EmbeddingBag(20000, 24, mode="sum", sparse=True)
                self.body = nn.Sequential(nn.Linear(24, 128), nn.GELU(), nn.Linear(128, 256))

            def forward(self, x: Tensor) -> Tensor:
                hashes, keys = torch.zeros_like(x), []
                for n in range(4):
                    hashes = hashes * 257 + F.pad(x, (n, 0))[:, : x.shape[1]] + 1
                    keys.append((hashes * 2654435761 + n * 40503) % 2**31 % 20000)
                places = torch.stack(keys, -1).flatten(0, 1)
                scores: Tensor = self.body(self.table(places)).unflatten(0, x.shape)
                return scores

        return Net()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        assert isinstance(self.model.body, nn.Module) and isinstance(self.model.table, nn.Module)
        return [
            torch.optim.SparseAdam([*self.model.table.parameters()], 5e-3),
            torch.optim.AdamW(self.model.body.parameters(), 1e-3),
        ]


class Adapters(Text):
    """Adapters of rank 8 (LoRA) beside a frozen GPT that has been trained on the first half of the text."""

    first, every = 60, 25

    def build(self) -> nn.Module:
        base = Text()
        train, _ = base.data()
        for _ in range(200):
            chosen = torch.randint(len(train[0]) // 2, (16,))
            base.step((train[0][chosen], train[1][chosen]))
        model = base.model.requires_grad_(requires_grad=False)
        for parent in [module for module in model.modules() if not isinstance(module, nn.Linear)]:
            for name, child in [*parent.named_children()]:
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapter(child))
        return model

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW([x for x in self.model.parameters() if x.requires_grad], 1e-3)]


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + (x @ self.down.T) @ self.up.T
        return out


class VisionTransformer(Pictures):
    """A ViT on patches of 4 x 4."""

    def build(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.patch, self.place = nn.Conv2d(1, 64, 4, 4), nn.Parameter(torch.randn(49, 64) * 0.02)
                layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
                self.body, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(64, 10)

            def forward(self, x: Tensor) -> Tensor:
                tokens = self.patch(x).flatten(2).transpose(1, 2) + self.place
                scores: Tensor = self.head(self.body(tokens).mean(1))
                return scores

        return Net()


class Adversaries(Pictures):
    """A generator and a discriminator (GAN), Adam with a beta1 of 0.5."""

    def build(self) -> nn.Module:
        def net(*sizes: int) -> nn.Sequential:
            layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.LeakyReLU(0.2))]
            return nn.Sequential(*layers[:-1])

        return nn.ModuleDict({"generator": net(32, 256, 512, 784), "discriminator": net(784, 256, 1)})

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        assert isinstance(self.model, nn.ModuleDict)
        return [torch.optim.Adam(part.parameters(), 2e-4, (0.5, 0.999)) for part in self.model.values()]

    def scores(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of real pictures, and of made ones from noise that each picture's bytes say."""
        assert isinstance(model, nn.ModuleDict)
        real = batch[0].flatten(1) * 2 - 1
        noise = torch.sin(real[:, 300:332] * 1000 + torch.arange(32))
        return model["discriminator"](real), model["discriminator"](model["generator"](noise).tanh())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        real, made = self.scores(model, batch)
        return (F.softplus(-real) + F.softplus(made)).squeeze(1)

    def step(self, batch: Batch) -> None:
        for turn, optimizer in enumerate(self.optimizers):
            real, made = self.scores(self.model.train(), batch)
            self.model.zero_grad()
            (F.softplus(-made) if turn == 0 else F.softplus(-real) + F.softplus(made)).mean().backward()
            optimizer.step()


class Diffusion(Pictures):
    """A denoising U-Net with an average of its weights (EMA) beside it."""

    def build(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                conv = nn.Conv2d
                self.first, self.down = conv(2, 32, 3, 1, 1), conv(32, 64, 3, 2, 1)
                self.middle, self.deep = conv(64, 128, 3, 2, 1), conv(128, 128, 3, 1, 1)
                self.up1, self.up2 = nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(128, 32, 2, 2)
                self.last = conv(64, 1, 3, 1, 1)

            def forward(self, x: Tensor, level: Tensor) -> Tensor:
                a = F.silu(self.first(torch.cat([x, level.expand_as(x)], 1)))
                b = F.silu(self.down(a))
                c = F.silu(self.deep(F.silu(self.middle(b))))
                d = torch.cat([F.silu(self.up1(c)), b], 1)
                noise: Tensor = self.last(torch.cat([F.silu(self.up2(d)), a], 1))
                return noise

        return Net()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        return super().make_optimizers()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, random = batch[0] * 2 - 1, torch.Generator().manual_seed(int(batch[1].sum()) if len(batch[1]) < 64 else 1)
        noise, level = torch.randn(x.shape, generator=random), torch.rand(len(x), 1, 1, 1, generator=random)
        mixed = x * (1 - level).sqrt() + noise * level.sqrt()
        return (model(mixed, level) - noise).square().flatten(1).mean(1)

    def step(self, batch: Batch) -> None:
        super().step(batch)
        self.average.update_parameters(self.model)

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "ema": self.average}


KINDS: dict[str, Callable[[], Kind]] = {
    "diffusion with EMA": Diffusion,
    "Muon": Muon,
    "hashed embeddings": HashedEmbeddings,
    "GAN": Adversaries,
    "mixture of experts": MixtureOfExperts,
    "bf16 decoder": HalfPrecision,
    "LoRA": Adapters,
    "ViT": VisionTransformer,
}


@torch.no_grad()
def measured(kind: Kind, model: nn.Module, batches: Iterable[Batch]) -> Tensor:
    """The loss of each example."""
    return torch.cat([kind.loss(model.eval(), batch).double() for batch in batches])


def mean_loss(kind: Kind, batch: Batch, model: nn.Module | None = None) -> float:
    """The mean loss of a model, by default of the one that trains."""
    return float(measured(kind, kind.model if model is None else model, [batch]).mean())


def save_row(report: SaveReport, live: list[Tensor], stored: list[Tensor], width: int) -> dict[str, Any]:
    """What a save took, and the rises of the loss on the examples that `evaluate` has and on others, in percent.

    Args:
        live, stored: losses of both, of the weights as they are and as the checkpoint has them.
        width: bits of a value that is saved.
    """
    rises = [100 * float(after.mean() / before.mean() - 1) for after, before in zip(stored, live, strict=True)]
    error = 100 * float((stored[1] - live[1]).std() / len(live[1]) ** 0.5 / live[1].mean())
    roles = {role: part for role, part in report.roles.items() if part.raw}
    bits = {role: round(width * part.stored / part.raw, 3) for role, part in roles.items()}
    return {"ratio": report.ratio, "rises": rises, "unseen error": error, "bits": bits}


def run(name: str, seed: int, budgets: list[str]) -> dict[str, list[dict[str, Any]]]:
    """A row for each save, by budget."""
    torch.manual_seed(seed)
    kind = KINDS[name]()
    train, held = kind.data()
    seen, unseen = ((held[0][part], held[1][part]) for part in (slice(EXAMPLES), slice(EXAMPLES, 9 * EXAMPLES)))

    def evaluate(model: nn.Module) -> Tensor:
        return measured(kind, model, [seen])

    def evaluate_recent(model: nn.Module) -> Tensor:
        return measured(kind, model, kind.recent).unflatten(0, (RECENT, -1)).mean(1)

    storages = {budget: MemoryStorage() for budget in budgets}
    managers: dict[str, sp.CheckpointManager] = {}
    for budget, storage in storages.items():
        share, *is_recent = budget.split()
        scheme = sp.Fisher(budget=share, evaluate=evaluate_recent if is_recent else evaluate)
        managers[budget] = sp.CheckpointManager(storage, scheme=scheme, threads=1)
    rows: dict[str, list[dict[str, Any]]] = {budget: [] for budget in budgets}
    for number in range(SAVES):
        kind.train(train, kind.every if number else kind.first)
        for budget, manager in managers.items():
            own = kind.recent if "recent" in budget else [seen]
            live = [measured(kind, kind.model, batches) for batches in (own, [unseen])]
            report = manager.save(number, **kind.parts())
            other = copy.deepcopy(kind.model)
            other.load_state_dict(sp.Store(storages[budget]).load(number)["model"])
            stored = [measured(kind, other, batches) for batches in (own, [unseen])]
            row = save_row(report, live, stored, kind.width)
            rows[budget].append(row | {"exact": report.keyframe})
    return rows


def report(document: dict[str, Any]) -> None:
    kept_titles = "kept: seen, unseen, unseen beyond two standard errors"
    print(
        "| training | budget | first save x | delta x, median | bits W, m, v | rise %: seen, unseen, worst", end=" | "
    )
    print(f"{kept_titles} |")
    print("|---" * 7 + "|")
    for name, seeds in document["kinds"].items():
        for budget in next(iter(seeds.values())):
            runs = [rows[budget] for rows in seeds.values()]
            deltas = [row for rows in runs for row in rows[1:]]
            first, ratio = (
                statistics.median(r["ratio"] for r in part) for part in ([rows[0] for rows in runs], deltas)
            )
            bits = [
                statistics.median(row["bits"].get(role, 0.0) for row in deltas)
                for role in ("parameter", "moment1", "moment2")
            ]
            every = [row["rises"] for rows in runs for row in rows]
            seen, unseen = (statistics.mean(rises[i] for rises in every) for i in (0, 1))
            allowed = float(budget.split("%")[0])
            kept = [sum(rises[i] <= allowed for rises in every) for i in (0, 1)]
            errors = [row["unseen error"] for rows in runs for row in rows]
            kept.append(sum(rises[1] - 2 * error <= allowed for rises, error in zip(every, errors, strict=True)))
            cells = (
                name, budget, f"{first:.1f}", f"{ratio:.1f}", ", ".join(f"{x:.2f}" for x in bits),
                f"{seen:+.3f}, {unseen:+.3f}, {max(rises[1] for rises in every):+.3f}",
                f"{kept[0]}, {kept[1]}, {kept[2]} of {len(every)}",
            )  # fmt: skip
            print("| " + " | ".join(cells) + " |")


def main() -> None:
    def fill(section: dict[str, Any], name: str, seed: int, arguments: argparse.Namespace) -> None:
        section.setdefault(name, {})[str(seed)] = run(name, seed, arguments.budgets)

    run_seeds(__doc__, fill, report, section="kinds", out="kinds.json", kinds=[*KINDS], budgets=BUDGETS)


if __name__ == "__main__":
    main()
