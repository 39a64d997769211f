"""A training of a minute, recorded, for whoever has no checkpoints at hand: a small GPT on the standard library."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.demo.batches import Batches
from shrinkpoint.demo.model import GPT, Shape
from shrinkpoint.demo.text import stdlib_text
from shrinkpoint.harness.measure import Quality
from shrinkpoint.harness.series import Recorded
from shrinkpoint.state.rng import capture, reinstate
from shrinkpoint.store import Store

SHAPE = Shape(layers=4, width=192, heads=6, context=64, dropout=0.0)


@dataclass(frozen=True)
class Plan:
    """How long to train, and what to keep: 1.8 M parameters, AdamW, betas .9 and .95.

    Attributes:
        steps: in all.
        every: steps between two checkpoints.
        first: before the first checkpoint.
        batch: windows in a step.
        held_out: windows in the evaluation.
    """

    steps: int = 200
    every: int = 25
    first: int = 100
    batch: int = 8
    held_out: int = 64
    shape: Shape = SHAPE
    seed: int = 1


def record(folder: Path, plan: Plan, tell: Callable[[int, float], None] | None = None) -> tuple[Recorded, Quality]:
    """Train, save without loss, and return the series and the loss on text that was not trained on.

    The random generators are as they were, afterwards.

    Args:
        tell: called with the step and its loss.
    """
    before = capture()
    try:
        return _record(folder, plan, tell)
    finally:
        reinstate(before)


def _record(folder: Path, plan: Plan, tell: Callable[[int, float], None] | None) -> tuple[Recorded, Quality]:
    torch.manual_seed(plan.seed), random.seed(plan.seed), np.random.seed(plan.seed)
    text = stdlib_text()
    border = len(text) * 9 // 10
    model = GPT(plan.shape)
    optimizer = torch.optim.AdamW(model.groups(weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95))
    batches = Batches(text[:border], size=plan.batch, context=plan.shape.context, seed=plan.seed)
    store = Store(folder, keyframe_every=None)
    with store:
        for step in range(1, plan.steps + 1):
            loss = model(*batches.draw())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step >= plan.first and (step - plan.first) % plan.every == 0:
                store.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            if tell is not None:
                tell(step, loss.item())
    return Recorded(store, "a small GPT"), Quality(_Loss(plan, text[border:]))


class _Loss:
    """Mean cross-entropy of a state on fixed windows."""

    def __init__(self, plan: Plan, text: bytes) -> None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        length = plan.shape.context
        generator = torch.Generator().manual_seed(plan.seed + 1)
        starts = torch.randint(len(data) - length - 1, (plan.held_out,), generator=generator)
        windows = data[starts[:, None] + torch.arange(length + 1)]
        self._inputs, self._targets = windows[:, :-1], windows[:, 1:].contiguous()
        self._model = GPT(plan.shape).eval()

    def __call__(self, state: Any) -> Tensor:
        self._model.load_state_dict(state["model"])
        with torch.no_grad():
            loss: Tensor = self._model(self._inputs, self._targets)
        return loss
