"""A GPT that tensor parallelism can split, and its split in one process: the same bits as real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from shrinkpoint.comm.compressed_allreduce import CompressedAllGather, CompressedReduceScatter, as_feedback, share_numel
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint_lab.demo.workload import GPT, Block, GPTConfig

COLUMNS, ROWS = ("qkv", "up"), ("proj", "down")
"""Of each block: linears that are split by their outputs, and by their inputs."""


class SplitBlock(Block):
    """The demo's block with the outputs of `qkv` in the order of heads, so that a slice of its rows is whole heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.head_width = config.width // config.heads

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class ThinBlock(SplitBlock):
    """A block whose attention and perceptron have `inner` dimensions on a stream of `width` (see link_model.py)."""

    def __init__(self, width: int, inner: int, head_width: int) -> None:
        super().__init__(GPTConfig(width=width, heads=1, dropout=0.0))
        self.head_width = head_width
        self.qkv, self.proj = nn.Linear(width, 3 * inner), nn.Linear(inner, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)


def plan_of_blocks(blocks: str) -> dict[str, ParallelStyle]:
    """What parallelize_module does with the blocks of this name."""
    styles = {**dict.fromkeys(COLUMNS, ColwiseParallel), **dict.fromkeys(ROWS, RowwiseParallel)}
    return {f"{blocks}.{name}": style() for name, style in styles.items()}


def gpt(config: GPTConfig, state: dict[str, Tensor] | None = None) -> GPT:
    """The demo's GPT of such blocks; with the weights of a state of the demo's own, if one is given."""
    model = GPT(config)
    model.blocks = nn.ModuleList(SplitBlock(config) for _ in range(config.layers))
    if state is not None:
        model.load_state_dict({name: _by_heads(name, tensor, config.heads) for name, tensor in state.items()})
    return model


def shape_of(model: GPT) -> GPTConfig:
    """The sizes of a GPT without dropout."""
    context, width = model.position.weight.shape
    return GPTConfig(len(model.blocks), width, model.blocks[0].heads, context, 0.0)


def _by_heads(name: str, tensor: Tensor, heads: int) -> Tensor:
    if ".qkv." not in name:
        return tensor
    return tensor.view(3, heads, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


@dataclass
class _Place:
    """What a collective needs to know of a group."""

    number: int
    ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


@dataclass
class Messages:
    """The all-reduces of one direction, of all ranks in one process; without a spec plain sums in their order.

    Attributes:
        enabled: whether messages are compressed.
        stats: of all ranks together; the relative error of what is sent first, and of sums.
    """

    ranks: int
    spec: str
    enabled: bool = True
    stats: dict[str, LinkStats] = field(default_factory=lambda: {"first hop": LinkStats(), "second hop": LinkStats()})

    def __post_init__(self) -> None:
        feedback, hops = as_feedback(self.spec or None), self.stats
        self._scatters = [CompressedReduceScatter(feedback, hops["first hop"], name="") for _ in range(self.ranks)]
        self._gathers = [CompressedAllGather(feedback, hops["second hop"], name="") for _ in range(self.ranks)]

    def sum(self, parts: list[Tensor]) -> Tensor:
        """Sum what each rank has: every rank's share of it is encoded, sums of shares are encoded again."""
        if not self.spec or not self.enabled:
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            return total
        numel, ranks = parts[0].numel(), self.ranks
        share = share_numel(numel, ranks)
        shares = [F.pad(part.reshape(-1), (0, share * ranks - numel)).view(ranks, share) for part in parts]
        sent = [
            scatter.encode(rows, rank) for rank, (scatter, rows) in enumerate(zip(self._scatters, shares, strict=True))
        ]
        gathered = []
        for rank, scatter in enumerate(self._scatters):
            received = [one.own_row if one.messages[rank] is None else one.messages[rank] for one in sent]
            total = scatter.decode(sent[rank], received, rank).to(parts[0].dtype)
            gathered.append(self._gathers[rank].encode(total, _Place(rank, ranks)))  # type: ignore[arg-type]
        out = torch.empty(ranks, share, dtype=parts[0].dtype)
        self._gathers[0].decode(gathered[0], [one.message for one in gathered], out)
        return out.view(-1)[:numel].view(parts[0].shape)


def rank_work(rows: Tensor, spec: str) -> Callable[[], int]:
    """What the first rank computes for an all-reduce of rows, as a function; it returns the bytes that are sent."""
    ranks, out = len(rows), torch.empty_like(rows)
    scatter = CompressedReduceScatter(as_feedback(spec), LinkStats(), name="")
    gather = CompressedAllGather(as_feedback(spec), LinkStats(), name="")

    def work() -> int:
        sent = scatter.encode(rows, 0)
        received = [sent.own_row if message is None else message for message in sent.messages]
        row = gather.encode(scatter.decode(sent, received, 0).to(rows.dtype), _Place(0, ranks))  # type: ignore[arg-type]
        gather.decode(row, [row.message] * ranks, out)
        return (
            sum(message.numel() for message in sent.messages if message is not None) + (ranks - 1) * row.message.numel()
        )

    return work


class _Copies(torch.autograd.Function):
    """The input of all ranks; backward the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages) -> tuple[Tensor, ...]:
        ctx.messages = messages
        return tuple(x.view_as(x) for _ in range(messages.ranks))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.messages.sum(list(gradients)), None


class _Sum(torch.autograd.Function):
    """The sum of what all ranks have; backward its gradient, for each of them."""

    @staticmethod
    def forward(ctx: Any, messages: Messages, *parts: Tensor) -> Tensor:
        return messages.sum(list(parts))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient for _ in range(len(ctx.needs_input_grad) - 1))


class Columns(nn.Module):
    """A linear of which every rank has a slice of outputs; returns the outputs of all."""

    def __init__(self, linear: nn.Linear, messages: Messages) -> None:
        super().__init__()
        self.weight, self.bias, self.messages = linear.weight, linear.bias, messages

    def forward(self, x: Tensor) -> Tensor:
        copies, ranks = _Copies.apply(x, self.messages), self.messages.ranks
        slices = zip(copies, self.weight.chunk(ranks), self.bias.chunk(ranks), strict=True)
        return torch.cat([F.linear(*each) for each in slices], dim=-1)


class Rows(nn.Module):
    """A linear of which every rank has a slice of inputs, and with it one part of a sum."""

    def __init__(self, linear: nn.Linear, messages: Messages) -> None:
        super().__init__()
        self.weight, self.bias, self.messages = linear.weight, linear.bias, messages

    def forward(self, x: Tensor) -> Tensor:
        ranks = self.messages.ranks
        slices = zip(x.chunk(ranks, -1), self.weight.chunk(ranks, -1), strict=True)
        bias = self.bias / ranks  # as torch does
        parts = [F.linear(part.contiguous(), weight.contiguous(), bias) for part, weight in slices]
        total: Tensor = _Sum.apply(self.messages, *parts)
        return total


def split(model: GPT, forward: Messages, backward: Messages) -> GPT:
    """Split every block over ranks, in this process and in place. Names of parameters stay."""
    for block in model.blocks:
        for name in COLUMNS:
            setattr(block, name, Columns(getattr(block, name), backward))
        for name in ROWS:
            setattr(block, name, Rows(getattr(block, name), forward))
    return model
