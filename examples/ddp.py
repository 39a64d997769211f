"""Replicas under DistributedDataParallel: rank 0 saves, every rank restores.

    torchrun --nproc-per-node 2 examples/ddp.py     # kill it at any moment, and run it again

The ranks see one file system, or a bucket. Data and dropout follow from the step and the rank, so a run that was killed
ends with the bits of one that was not.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shrinkpoint as sp

FOLDER, STEPS, SAVE_EVERY, BATCH, WIDTH = "runs/ddp", 300, 20, 32, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with sp.CheckpointManager(FOLDER, keep=sp.Keep(last=2)) as manager:
        # Before the model is wrapped: then no rank can have saved again while another one still reads. With rng=True
        # all ranks would get the random generators of rank 0, and drop out the same values.
        restored = manager.restore(model=model, optimizer=optimizer, rng=False)
        first = restored.step + 1 if restored else 1
        replicas = DistributedDataParallel(model)
        for step in range(first, STEPS + 1):
            torch.manual_seed(step * ranks + rank)
            x = torch.randn(BATCH, WIDTH, device=DEVICE)
            loss = (replicas(x) - x.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % SAVE_EVERY == 0 and rank == 0:  # the others wait in the next backward pass
                report = manager.save(step, model=model, optimizer=optimizer, rng=False)  # the model, not its wrapper
                assert report is not None  # as it is in processes that do not write
                start = restored.step if restored else 0
                print(f"step {step}: loss {loss:.6f}, {report.ratio:.1f}x smaller, from step {start}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # once the model is freed: a DDP model that outlives its gloo group can hang
