"""A training loop on Accelerate, whose every random number is seeded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration, set_seed
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset


def forget() -> None:
    """Accelerators of one process share their state; the next one shall begin anew."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Counter:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"count": 0, "best": (float("inf"), None), "names": ["a"]}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


class Loop:
    """Epochs of 8 batches a process, two of which make a step.

    Args:
        folder: where checkpoints are numbered; None: they are not.
        sharded: with FSDP2.
    """

    def __init__(
        self, folder: Path | None = None, *, limit: int | None = None, seed: int = 0, sharded: bool = False
    ) -> None:
        naming = ProjectConfiguration(
            project_dir=None if folder is None else str(folder),
            automatic_checkpoint_naming=folder is not None,
            total_limit=limit,
        )
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            project_config=naming,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7),
        )
        if sharded:
            spread(self.accelerator)
        set_seed(seed)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        rows = torch.Generator().manual_seed(3)
        count = 32 * self.accelerator.num_processes
        data = TensorDataset(torch.randn(count, 16, generator=rows), torch.randint(0, 4, (count,), generator=rows))
        loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        set_seed(100 + seed + self.accelerator.process_index)  # processes draw different numbers from here on

    def epoch(self, *, skip: int = 0, stop: int | None = None) -> Loop:
        """One epoch, without its first `skip` batches, up to and without number `stop`."""
        loader = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for number, (inputs, labels) in enumerate(loader, skip):
            if number == stop:
                break
            self.batch(inputs, labels)
        return self

    def batch(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
            loss = nn.functional.cross_entropy(self.model(inputs), labels) * (1 + 0.1 * noise)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.counter.seen["count"] += 1

    def steps(self, count: int) -> Loop:
        """So many steps on numbers that are drawn."""
        for _ in range(2 * count):
            self.batch(torch.randn(4, 16), torch.randint(0, 4, (4,)))
        return self

    def state(self) -> list[Any]:
        """All that must come back, as bytes and plain values."""
        weights = [_mine(x) for x in self.model.state_dict().values()]
        moments = [
            _mine(x) for moment_state in self.optimizer.state_dict()["state"].values() for x in moment_state.values()
        ]
        words = [tensor.numpy().tobytes() for tensor in [*weights, *moments, torch.get_rng_state()]]
        rng = [random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tobytes()]
        plain = [self.scheduler.state_dict(), self.counter.seen, self.accelerator.step, self.loader.iteration]
        return [*words, *rng, repr(plain)]


def _mine(x: torch.Tensor) -> torch.Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach().clone()


def spread(accelerator: Accelerator) -> None:
    """FSDP2 on the CPU: torch can, Accelerate can, but it does not offer it."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        reshard_after_forward=True,
        auto_wrap_policy="size_based_wrap",
        min_num_params=1,
    )
    accelerator.state.fsdp_plugin = plugin
    for state in (accelerator.state._shared_state, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
