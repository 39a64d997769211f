"""A small GPT in stages: wide between the blocks, thin within them.

Of a large model on an accelerator the wire takes more of a step than computing does; on two cores that is so only
where a block computes little for each value it sends. Width and depth of the stream are a GPT's, the
inside of a block is not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 64


class Block(nn.Module):
    """Attention and a perceptron, both of `inner` dimensions, on a stream of `width`."""

    def __init__(self, width: int, inner: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * inner), nn.Linear(inner, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Stage(nn.Module):
    """Blocks; before the first one the embedding, after the last one the head."""

    def __init__(self, index: int, world: int, width: int, inner: int, blocks: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width) if index == 0 else nn.Identity()
        self.blocks = nn.Sequential(*(Block(width, inner) for _ in range(blocks)))
        last = index == world - 1
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY)) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)))  # type: ignore[no-any-return]


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(shape: tuple[int, ...], seed: int) -> Tensor:
    """A walk that can be learned: every token is near the one before."""
    steps = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))
    return steps.cumsum(1) % VOCABULARY
