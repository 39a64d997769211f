"""Trains a small GPT for a minute and records its checkpoints, for users who have none at hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.bench.measure import QualityFunction
from shrinkpoint.bench.series import StoreSeries
from shrinkpoint.demo.workload import GPT, Batches, GPTConfig, stdlib_text
from shrinkpoint.store import Store
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state

MODEL_CONFIG = GPTConfig(layers=4, width=192, heads=6, context=64, dropout=0.0)


@dataclass(frozen=True)
class SampleRunOptions:
    """Options of the sample run, by default 1.8 M parameters trained with AdamW (betas .9 and .95).

    Attributes:
        steps: steps of the training.
        save_every: steps between two checkpoints.
        first_save: step of the first checkpoint.
        batch: sequences in a batch.
        held_out: sequences in the evaluation.
        config: sizes of the model.
        seed: seed of every random generator.
    """

    steps: int = 200
    save_every: int = 25
    first_save: int = 100
    batch: int = 8
    held_out: int = 64
    config: GPTConfig = MODEL_CONFIG
    seed: int = 1


def record_sample_run(
    directory: Path, options: SampleRunOptions, on_step: Callable[[int, float], None] | None = None
) -> tuple[StoreSeries, QualityFunction]:
    """Trains a model, saves its checkpoints losslessly, and returns them with the loss on held-out text.

    The state of the random generators is restored afterwards.

    Args:
        directory: the store of the checkpoints.
        options: how to train.
        on_step: called with each step and its loss.
    """
    rng_state = get_rng_state()
    try:
        return _train_and_save(directory, options, on_step)
    finally:
        set_rng_state(rng_state)


def _train_and_save(
    directory: Path, options: SampleRunOptions, on_step: Callable[[int, float], None] | None
) -> tuple[StoreSeries, QualityFunction]:
    torch.manual_seed(options.seed), random.seed(options.seed), np.random.seed(options.seed)
    text = stdlib_text()
    border = len(text) * 9 // 10
    model = GPT(options.config)
    optimizer = torch.optim.AdamW(model.param_groups(weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95))
    batches = Batches(text[:border], size=options.batch, context=options.config.context, seed=options.seed)
    store = Store(directory, keyframe_every=None)
    with store:
        for step in range(1, options.steps + 1):
            loss = model(*batches.draw())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step >= options.first_save and (step - options.first_save) % options.save_every == 0:
                store.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            if on_step is not None:
                on_step(step, loss.item())
    return StoreSeries(store, "a small GPT"), QualityFunction(_HeldOutLoss(options, text[border:]))


class _HeldOutLoss:
    """Computes the mean cross-entropy of a state on fixed sequences of held-out text."""

    def __init__(self, options: SampleRunOptions, text: bytes) -> None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        length = options.config.context
        generator = torch.Generator().manual_seed(options.seed + 1)
        starts = torch.randint(len(data) - length - 1, (options.held_out,), generator=generator)
        windows = data[starts[:, None] + torch.arange(length + 1)]
        self._inputs, self._targets = windows[:, :-1], windows[:, 1:].contiguous()
        self._model = GPT(options.config).eval()

    def __call__(self, state: Any) -> Tensor:
        self._model.load_state_dict(state["model"])
        with torch.no_grad():
            loss: Tensor = self._model(self._inputs, self._targets)
        return loss
