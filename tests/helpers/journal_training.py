"""A training with a journal, which tests and benchmarks stop, kill and resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.replica_search import digest
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import shrinkpoint as sp
from shrinkpoint.comm import compress_ddp, compress_fsdp
from shrinkpoint.comm.gradient_record import local_tensor
from shrinkpoint.train import Journal, JournalRestore
from shrinkpoint.train.dcp import Manager


class Noisy(nn.Module):
    """A convolution in channels_last, buffers that the forward pass changes, dropout, and gradients of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.hidden = nn.Linear(8 * 16, 32)
        self.last = nn.Linear(32, 4, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.drop(self.hidden(self.norm(self.conv(x)).relu().flatten(1))).double())


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, running averages, dropout, a frozen layer, and one that is seldom used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(13, 47), nn.BatchNorm1d(47), nn.Dropout(0.3)
        self.frozen, self.seldom = nn.Linear(47, 47).requires_grad_(False), nn.Linear(47, 47)
        self.last = nn.Linear(47, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.frozen(self.drop(self.norm(self.first(x)).relu()))
        return self.last(self.seldom(x) if self.calls % 3 else x)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@dataclass
class Run:
    """What a process has while it trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.StepLR
    manager: sp.CheckpointManager | Manager
    journal: Journal
    rank: int
    shape: tuple[int, ...] = (6, 3, 4, 4)
    restored: JournalRestore | None = None

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def bits(self) -> str:
        """Of weights, buffers and the optimizer's state."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
        slots = [state[name] for state in states for name in sorted(state) if state[name] is not None]
        return digest(*map(local_tensor, [*self.model.parameters(), *self.model.buffers(), *slots]))

    def random(self) -> list[float]:
        """What each generator would give next."""
        import random

        import numpy as np

        from shrinkpoint.tensors.rng import get_rng_state, set_rng_state

        state = get_rng_state()
        drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
        set_rng_state(state)
        return drawn

    def train(self, last: int, save_every: int = 5) -> Run:
        """Resume, or begin; then train up to a step."""
        self.restored = self.journal.restore(**self.objects)
        if self.restored is None:
            torch.manual_seed(100 + self.rank)
            self.journal.save(0, **self.objects)
        begin = 0 if self.restored is None else self.restored.step
        for step in range(begin + 1, last + 1):
            self.backward()
            self.journal.step(step)
            if step % save_every == 0:
                self.journal.save(step, **self.objects)
        return self

    def backward(self) -> None:
        x = torch.randn(self.shape)
        self.model(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x).square().mean().backward()

    def close(self) -> Run:
        self.journal.close()
        if isinstance(self.manager, sp.CheckpointManager):
            self.manager.close()
        return self


def files(where: Path) -> list[str]:
    return sorted(path.name for path in (where / "journal").glob("*.journal"))


def make(
    where: Path | str,
    compressor: str = "q4:64",
    optimizer: str = "adamw",
    *,
    rank: int = 0,
    background: bool = False,
    wire: dict[str, Any] | None = None,
    update: Callable[[Run], None] | None = None,
    **options: Any,
) -> Run:
    """A run that has not begun.

    Args:
        wire: options of `compress_ddp`.
        update: in place of clipping, both steps and zeroing.
        options: of the journal.
    """
    model = DDP(Noisy(), bucket_cap_mb=0.005)
    stepped = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(stepped, 3, 0.8)

    def step() -> None:
        if update is not None:
            return update(run)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        stepped.step()
        scheduler.step()
        stepped.zero_grad()
        return None

    replicas = compress_ddp(model, compressor, **{"segment_numel": 700, **(wire or {})})
    manager = sp.CheckpointManager(where, background=background)
    run = Run(model, stepped, scheduler, manager, Journal(manager, replicas, step, **options), rank)
    return run


def make_sharded(
    where: Path | str,
    optimizer: str = "adamw",
    *,
    rank: int,
    width: int,
    wire: dict[str, Any] | None = None,
    update: Callable[[Run], None] | None = None,
    replicas: int = 1,
    **options: Any,
) -> Run:
    """A run of FSDP2 that has not begun.

    Args:
        wire: options of `compress_fsdp`.
        update: called after clipping.
        replicas: of each shard.
        options: of the journal.
    """
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", (width,) if replicas == 1 else (replicas, width // replicas), mesh_dim_names=names)
    model = Uneven()
    for layer in (model.first, model.seldom, model):
        fully_shard(layer, mesh=mesh)
    stepped = OPTIMIZERS[optimizer]([one for one in model.parameters() if one.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(stepped, 3, 0.8)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # ranks exchange norms here
        if update is not None:
            update(run)
        stepped.step()
        scheduler.step()
        stepped.zero_grad()

    manager = Manager(where)
    journal = Journal(manager, compress_fsdp(model, **(wire or {})), step, **options)
    run = Run(model, stepped, scheduler, manager, journal, rank, shape=(6, 13))
    return run
