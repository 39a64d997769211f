"""What the tests of replicas run on each rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shrinkpoint.errors import ShrinkpointError


def join(rank: int, width: int, folder: str) -> dict[str, Any]:
    """A gloo group of all ranks, and what this one will say."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=width)
    return {}


def leave(said: dict[str, Any], rank: int, folder: str) -> None:
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()


def digest(*tensors: Tensor) -> str:
    """Of the bits of all of them."""
    # copied, for torch does not free what numpy has seen
    raw = [
        x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
        for x in tensors
    ]
    return hashlib.sha256(b"".join(raw)).hexdigest()


def bits(model: Any) -> str:
    """Digest of the weights of a replica."""
    return digest(*model.module.parameters())


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def caught(work: Callable[[], object]) -> list[str]:
    """The error of this library that it raises: its class and text."""
    try:
        work()
    except ShrinkpointError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


class Net(nn.Module):
    """A small classifier; one of its branches is used in every third step only, and one never."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.hidden = nn.Linear(8 * 36, 64)
        self.seldom = nn.Linear(64, 64)
        self.never = nn.Linear(5, 5)
        self.narrow = nn.Linear(64, 32, dtype=torch.bfloat16)
        self.wide = nn.Linear(32, 32, dtype=torch.float64)
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.hidden(self.conv(x).relu().flatten(1)).relu()
        if step % 3 == 0:
            x = x + self.seldom(x)
        x = self.narrow(x.bfloat16()).relu()
        return self.last(self.wide(x.double()).relu().float())


def plain_net(seed: int = 0, width: int = 48) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def batch(step: int, rank: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Of rank and step: inputs, and what a fixed linear map makes of them."""
    x = drawn(size, 24, seed=1000 * step + rank)
    return x, (x @ drawn(24, 4, seed=7)).tanh()


def images(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = drawn(8, 36, seed=1000 * step + rank)
    return x.view(8, 1, 6, 6), (x @ drawn(36, 4, seed=7)).argmax(1)
