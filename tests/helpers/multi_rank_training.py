"""A small training run on several ranks, for the programs that tests start with `helpers.processes.ranks`."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shrinkpoint.errors import UnmeasuredLossWarning
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.train.dcp import Writer


def start(rank: int, width: int, folder: str) -> None:
    """Join a gloo group; `done` must be called at the end."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(width), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    warnings.simplefilter("ignore", UnmeasuredLossWarning)  # as everywhere in the tests
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=width)


def done(rank: int, folder: str, results: Any) -> None:
    """Writes the results of this rank for the test and waits for the others."""
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()


class Net(nn.Module):
    """A network with sizes that no number of ranks divides, one of them smaller than the number of ranks."""

    def __init__(self, seed: int = 0, inner: int = 131) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.last = nn.Linear(48, inner), nn.Linear(inner, 50), nn.Linear(50, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class Run:
    """A model with AdamW, sharded on a mesh or by a function of the model; None: not sharded."""

    def __init__(self, mesh: DeviceMesh | Callable[[nn.Module], None] | None, seed: int = 0, inner: int = 131) -> None:
        self.model = Net(seed, inner)
        if callable(mesh):
            mesh(self.model)
        elif mesh is not None:
            for layer in (self.model.first, self.model.second, self.model.last):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        self.generator = torch.Generator().manual_seed(seed)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            x = torch.randn(16, 48, generator=self.generator)
            (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            self.optimizer.step()
            self.model.count += 1

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "note": {"steps": int(self.model.count), "name": "run"}}

    def restore(self, **options: Any) -> dict[str, Any]:
        """Load in place, with these options of `dcp.load`."""
        state = self.state()
        dcp.load(state, **options)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(strict=True),
        )
        return state


def digest(state: Any) -> str:
    """A digest of all values, with global tensors; a collective call if there are shards."""
    parts: list[str] = []

    def visit(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                visit(f"{path}/{key}", value[key])
        elif isinstance(value, list | tuple):
            for index, member in enumerate(value):
                visit(f"{path}/{index}", member)
        elif isinstance(value, torch.Tensor):
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            parts.append(f"{path} {tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}")
        else:
            parts.append(f"{path} {value!r}")

    visit("", state)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def save(state: Any, folder: Path | str, **settings: Any) -> DirectoryManifest:
    """Save with a writer of these settings; the manifest."""
    dcp.save(state, storage_writer=Writer(folder, **settings))
    return read_directory_manifest(folder)


def trained(root: Path | str, saves: int, **settings: Any) -> list[str]:
    """The digests of what was saved at step-0, step-1, ..."""
    run, digests = Run(None), []
    for step in range(saves):
        run.train()
        save(run.state(), f"{root}/step-{step}", **settings)
        digests.append(digest(run.state()))
    return digests


def mesh_of(ranks: Sequence[int]) -> DeviceMesh:
    """A mesh of these ranks; all ranks must call this."""
    return DeviceMesh("cpu", list(ranks))
