"""Weights in the middle of a loss that is known to all digits, and chains of checkpoints of them."""

from __future__ import annotations

import math
from typing import Any

from helpers.adam_states import adam, normal, squares
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.storage import MemoryStorage

TERMS = 500.0
SHAPES = {"a.weight": (64, 48), "b.weight": (96, 64), "b.bias": (96,)}


class Bowl:
    """Weights in the middle of a quadratic loss, whose curvature is `scale` times that which the optimizer knows."""

    def __init__(self, scale: float = 1.0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        self.scale, self.calls, self.moves = scale, 0, 0
        self.center = {name: normal(*shape, seed=i, scale=0.1) for i, (name, shape) in enumerate(shapes.items())}
        self.v = {name: squares(*shape, seed=i, octaves=1) for i, (name, shape) in enumerate(shapes.items())}

    def move(self, by: float = 0.01) -> Bowl:
        """What training does: the middle lies elsewhere, and the weights with it."""
        self.moves += 1
        self.center = {name: x + by * normal(*x.shape, seed=1000 + self.moves) for name, x in self.center.items()}
        return self

    @property
    def state(self) -> dict[str, Any]:
        """First moments are noise: the slope is zero, and they cost what they cost."""
        noise = {name: 0.1 * normal(*x.shape, seed=self.moves) * self.v[name].sqrt() for name, x in self.center.items()}
        return adam(self.center, self.v, noise)

    def rise(self, model: dict[str, Tensor]) -> float:
        parts = [float((self.v[name] * (model[name] - x).square()).sum()) for name, x in self.center.items()]
        return self.scale * TERMS * sum(parts) / 2

    def evaluate(self, state: dict[str, Any]) -> float:
        self.calls += 1
        return 3.0 + self.rise(state["model"])

    def errors(self, model: dict[str, Tensor]) -> float:
        """The root mean square, in standard deviations: the geometric mean over all weights."""
        logs = counts = 0.0
        for name, x in self.center.items():
            logs += x.numel() * float(((model[name] - x).square().mean().sqrt() / x.std()).log())
            counts += x.numel()
        return math.exp(logs / counts)


class Chain:
    """Saves, and what each of them says."""

    def __init__(self, bowl: Bowl, keyframe_every: int | None = None, **options: Any) -> None:
        self.bowl, self.scheme = bowl, sp.Fisher(**options)
        self.store, self.step, self.calls = sp.Store(MemoryStorage(), keyframe_every=keyframe_every), 0, 0

    def save(self) -> dict[str, Any]:
        self.step += 1
        calls = self.bowl.calls
        self.report = self.store.save(self.step, self.bowl.state, scheme=self.scheme)
        self.calls = self.bowl.calls - calls
        self.said: dict[str, Any] = self.report.loss_report
        return self.said

    @property
    def model(self) -> dict[str, Tensor]:
        return self.store.load(self.step)["model"]

    @property
    def rise(self) -> float:
        return self.bowl.rise(self.model)
