"""FSDP2 with compressed checkpoints that load on any number of ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 3 examples/fsdp2.py      # goes on from what the two have saved

Each run takes 20 more steps. The ranks share every batch, so that it does not matter how many they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shrinkpoint.train.dcp import Reader, Writer, latest_valid

FOLDER, STEPS, BATCH, WIDTH = "runs/fsdp2", 20, 48, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Training:
    """The state that is saved: `dcp` calls both methods."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": moments, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]


def draw(step: int) -> Tensor:
    """This rank's part of a batch, which depends on the step alone."""
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return batch.chunk(dist.get_world_size())[dist.get_rank()].to(DEVICE)


def main() -> None:
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    if newest := latest_valid(FOLDER):  # the same on all ranks; None at first
        dcp.load({"training": training}, storage_reader=Reader(newest))
    for step in range(training.step + 1, training.step + STEPS + 1):
        x = draw(step)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.step = step
        if step % 10 == 0:
            dcp.save({"training": training}, storage_writer=Writer(f"{FOLDER}/step-{step}"))
            dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                ranks, start = dist.get_world_size(), "nothing" if newest is None else newest.name
                print(f"step {step}: loss {loss:.4f}, {ranks} ranks, from {start}")
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
