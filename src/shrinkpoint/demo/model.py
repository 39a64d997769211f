"""A byte-level GPT, small enough for two cores and large enough to have a checkpoint worth shrinking."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """How large a GPT is; the default has 4.8 M parameters."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 128
    dropout: float = 0.1


class Block(nn.Module):
    """Attention, then a perceptron of four times the width, each behind its norm and beside a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention; (batch, length, width) to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GPT(nn.Module):
    """Bytes in, the loss of guessing the next byte out. The head is tied to the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, shape.width), nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; both int64 of shape (batch, length), length at most the context."""
        x = self.dropout(self.token(inputs) + self.position(torch.arange(inputs.shape[1])))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Parameter groups as usual: matrices decay, vectors do not."""
        matrices = [p for p in self.parameters() if p.ndim == 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
