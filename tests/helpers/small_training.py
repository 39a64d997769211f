"""Small runs that really train, with a measure of their quality, for the lossy schemes."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from helpers.strategies import difference
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from shrinkpoint.errors import LossWarning
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state

torch.set_num_threads(1)  # these models are far too small for more

TEXT = str(copy.__doc__) + str(random.__doc__) + str(warnings.__doc__) + str(np.__doc__)


@lru_cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    return images.float() / 16, labels


class Digits(nn.Module):
    """Two weights large enough to be quantized; norms, biases and a small head that are not."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, 64), nn.Dropout(0.1), nn.GELU()
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Letters(nn.Module):
    """The next letter from the last four: an embedding, tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(128, 48)
        self.attn_out = nn.Linear(192, 64)
        self.mlp = nn.Linear(64, 48, bias=False)
        self.deep = nn.Linear(64, 64)
        self.lm_head = nn.Linear(48, 128, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.attn_out(self.wte(x).flatten(1)))
        return self.lm_head(self.mlp(F.gelu(self.deep(hidden))))


class Run:
    """A model with an optimizer, trained on digits; `evaluate` is its loss on images it is not trained on."""

    _begun: ClassVar[dict[Any, tuple[Any, dict[str, Any]]]] = {}
    """What others have trained before: by what they were made with, their parts and their random generators."""

    def __init__(self, model: Callable[[], nn.Module] = Digits, *, steps: int = 0, lr: float = 3e-3) -> None:
        self.calls, key = 0, (type(self), model, steps, lr)
        if key not in self._begun:
            torch.manual_seed(0), random.seed(0), np.random.seed(0)
            self.model = model()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
            self.steps(steps)
            self._begun[key] = copy.deepcopy((self.model, self.optimizer)), get_rng_state()
        parts, generators = self._begun[key]
        self.model, self.optimizer = copy.deepcopy(parts)
        set_rng_state(generators)

    def data(self) -> tuple[Tensor, Tensor]:
        return digits()

    def steps(self, count: int, recorder: Any = None) -> Run:
        inputs, labels = self.data()
        self.model.train()
        for _ in range(count):
            batch = torch.randint(0, 1200, (128,))
            F.cross_entropy(self.model(inputs[batch]), labels[batch]).backward()
            if recorder is not None:
                recorder.after_backward()
            self.optimizer.step()
            if recorder is not None:
                recorder.before_zero_grad()
            self.optimizer.zero_grad()
        return self

    def evaluate(self, model: Any) -> Tensor:
        self.calls += 1
        inputs, labels = self.data()
        model.eval()
        return F.cross_entropy(model(inputs[1200:1700]).float(), labels[1200:1700])

    def loss(self, model: nn.Module | None = None) -> float:
        """What `evaluate` says, without any trace of the asking."""
        with torch.no_grad():
            return float(self.evaluate(copy.deepcopy(model or self.model)))

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def photo(self) -> dict[str, Any]:
        """A copy of all that a save must not change."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "buffers": dict(self.model.named_buffers()),
                "optimizer": self.optimizer.state_dict(),
                "training": [module.training for module in self.model.modules()],
                "gradients": [one.grad for one in self.model.parameters()],
                "trains": [one.requires_grad for one in self.model.parameters()],
                "rng": get_rng_state(),
            }
        )

    def addresses(self) -> list[tuple[int, int]]:
        """Of every tensor of the model: an optimizer holds on to these."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return [(id(one), one.data_ptr()) for one in tensors]


class LettersRun(Run):
    def __init__(self, *, steps: int = 0, lr: float = 3e-3) -> None:
        super().__init__(Letters, steps=steps, lr=lr)

    def data(self) -> tuple[Tensor, Tensor]:
        return letters()


@lru_cache
def letters() -> tuple[Tensor, Tensor]:
    codes = torch.tensor([min(127, ord(letter)) for letter in TEXT * 2])
    assert len(codes) > 2000
    rows = codes.unfold(0, 5, 1)[:1800]
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows[:, :4], rows[:, 4]


def unchanged(run: Run, before: dict[str, Any]) -> bool:
    found = difference(before, run.photo())
    assert found is None, found
    return True


class Silent(warnings.catch_warnings):
    """Lossy warnings are passed over where they are not what a test is about."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore", LossWarning)
