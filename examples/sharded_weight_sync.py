"""Weights of an FSDP2 trainer, followed by a tensor-parallel model: no rank ever has a whole tensor.

    torchrun --nproc-per-node 4 examples/sharded_weight_sync.py

Two ranks train, and two serve. Any number of each, on any number of machines, works in the same way.
"""

from __future__ import annotations

import shutil
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shrinkpoint.sync import Publisher, Subscriber

WHERE, STEPS, WIDTH = "runs/sharded_weight_sync", 10, 256  # "s3://bucket/weights": for machines anywhere
DEVICE = "cuda" if torch.cuda.device_count() >= 4 else "cpu"


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(DEVICE)


def train(mesh: DeviceMesh) -> nn.Module:
    """Train shards of rows, and publish them in bf16 after each step."""
    model = build()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with Publisher(WHERE, ranks=mesh.get_group(), dtype=torch.bfloat16) as publisher:
        for _ in range(STEPS):
            x = torch.randn(64, WIDTH, device=DEVICE)
            (model(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = publisher.publish(model)
            if mesh.get_local_rank() == 0:
                print(f"published {report}", flush=True)
            time.sleep(0.2)
    return model


def serve(mesh: DeviceMesh) -> nn.Module:
    """Follow in shards of columns and rows, as tensor parallelism has them."""
    model = build().bfloat16()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    subscriber = Subscriber(WHERE, ranks=mesh.get_group())
    for update in subscriber.follow(model, wait=60):
        model(torch.randn(1, WIDTH, device=DEVICE).bfloat16())
        if mesh.get_local_rank() == 0:
            print(f"serves {update}", flush=True)
        if update.version == STEPS - 1:
            break
    return model


def main() -> None:
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank())
    shutil.rmtree(WHERE, ignore_errors=True)
    mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("role", "shard"))
    is_trainer = mesh.get_local_rank("role") == 0
    model = (train if is_trainer else serve)(mesh["shard"])
    whole = [w.full_tensor() for w in model.parameters() if isinstance(w, DTensor)]  # to show that all bits agree
    sums = [int(w.bfloat16().view(torch.int16).sum()) for w in whole]
    if mesh["shard"].get_local_rank() == 0:
        print(f"the {'trainer' if is_trainer else 'server'} has {sums}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
