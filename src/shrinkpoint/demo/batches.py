"""Batches: windows of a text in an order that can be saved, restored and compared."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

NOISE = 0.01
"""Share of the input bytes that are replaced, so that the model cannot only copy."""


class Batches:
    """Draws batches of bytes and remembers, in one hash, every draw it ever made.

    Three random sources take part, as in many real loops: a generator of its own picks the positions, Python's
    `random` the length and `numpy.random` the noise. A run goes on bit-exactly only if all three are restored.

    Attributes:
        order: sha-256 over the previous `order` and the batch: its positions, its noise, its bytes; equal only if every
            batch since the start was equal.
    """

    def __init__(self, text: bytes, *, size: int, context: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.size, self.context = size, context
        self.generator = torch.Generator().manual_seed(seed)
        self.order = ""

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next batch.

        Returns:
            inputs and targets, both int64 of shape (size, length) with context/2 <= length <= context.
        """
        length = random.randrange(self.context // 2, self.context + 1, max(1, self.context // 8))
        starts = torch.randint(len(self.text) - length - 1, (self.size,), generator=self.generator)
        windows = self.text[starts[:, None] + torch.arange(length + 1)].long()
        noise = torch.from_numpy(np.random.random((self.size, length)) < NOISE)
        inputs = windows[:, :-1].masked_fill(noise, 0)
        self._remember(starts, noise, windows)
        return inputs, windows[:, 1:].contiguous()

    def _remember(self, starts: Tensor, noise: Tensor, windows: Tensor) -> None:
        drawn = repr(starts.tolist()).encode() + noise.numpy().tobytes() + windows.numpy().tobytes()
        self.order = hashlib.sha256(self.order.encode() + drawn).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.order = state["order"]
