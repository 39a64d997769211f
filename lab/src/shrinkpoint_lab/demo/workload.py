"""Data and model of the demo: a byte-level GPT, and batches of Python's standard library in a restorable order."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shrinkpoint.errors import NotFoundError


def stdlib_text(directory: Path | None = None) -> bytes:
    """Reads the top-level modules, sorted by name and joined with NUL bytes: a few megabytes of English and Python.

    Args:
        directory: the directory of the `*.py` files; None: that of `sysconfig`.

    Raises:
        NotFoundError: there is no module (some distributions ship only byte code).
    """
    directory = directory or Path(sysconfig.get_path("stdlib"))
    files = sorted(directory.glob("*.py"), key=lambda path: path.name)
    text = b"\0".join(path.read_bytes() for path in files)
    if not text:
        raise NotFoundError(
            str(directory),
            found="no Python source",
            expected="the standard library's modules",
            do="run this with a Python that ships its source",
        )
    return text


NOISE_SHARE = 0.01
"""Share of the input bytes that are replaced, so that the model cannot only copy."""


class Batches:
    """Draws random batches of bytes, and hashes every draw into one digest.

    Three random sources take part, as in many real loops: a generator of its own draws the positions, Python's `random`
    the length and `numpy.random` the noise. A run resumes bit-exactly only if all three are restored.

    Attributes:
        text: the bytes, uint8 of shape (length of the text,).
        size: sequences in a batch.
        context: greatest length of a sequence.
        generator: draws the positions.
        order: SHA-256 of the previous `order` and of the batch's positions, noise and bytes; equal in two runs only if
            every batch since the start was equal.
    """

    def __init__(self, text: bytes, *, size: int, context: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.size, self.context = size, context
        self.generator = torch.Generator().manual_seed(seed)
        self.order = ""

    def draw(self) -> tuple[Tensor, Tensor]:
        """Draws the next batch.

        Returns:
            inputs and targets, both int64 of shape (size, length), with context/2 <= length <= context.
        """
        length = random.randrange(self.context // 2, self.context + 1, max(1, self.context // 8))
        starts = torch.randint(len(self.text) - length - 1, (self.size,), generator=self.generator)
        windows = self.text[starts[:, None] + torch.arange(length + 1)].long()
        noise = torch.from_numpy(np.random.random((self.size, length)) < NOISE_SHARE)
        inputs = windows[:, :-1].masked_fill(noise, 0)
        self._update_hash(starts, noise, windows)
        return inputs, windows[:, 1:].contiguous()

    def _update_hash(self, starts: Tensor, noise: Tensor, windows: Tensor) -> None:
        drawn = repr(starts.tolist()).encode() + noise.numpy().tobytes() + windows.numpy().tobytes()
        self.order = hashlib.sha256(self.order.encode() + drawn).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.order = state["order"]


VOCAB_SIZE = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; the default has 4.8 M parameters."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 128
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and a perceptron of four times the width, each with a layer norm and a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention; maps (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GPT(nn.Module):
    """A byte-level GPT that returns the loss of the next byte; the weights of the head are those of the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB_SIZE, config.width), nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCAB_SIZE, bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats, a scalar; both arguments are int64 of shape (batch, length <= context)."""
        x = self.dropout(self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def param_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Parameter groups for an optimizer: matrices decay, vectors do not."""
        matrices = [p for p in self.parameters() if p.ndim == 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
