"""One rank of a split model on a link; run by tensor_parallel.py, with a job as JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import link_worker
import torch
import torch.distributed as dist
from link_worker import NO_SYNC, Job
from tensor_parallel_model import ThinBlock, plan_of_blocks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from shrinkpoint.comm.tensor_parallel import compress_tensor_parallel


@contextlib.contextmanager
def split_blocks(job: dict[str, Any], case: dict[str, Any]) -> Iterator[Job]:
    """Blocks that all ranks share, forward + backward + update; "compute alone": the part of one rank, by itself."""
    torch.manual_seed(0)
    spec, world = case["forward"], dist.get_world_size()
    inner = job["inner"] // (world if spec == NO_SYNC else 1)
    model = nn.Sequential(*(ThinBlock(job["width"], inner, job["head_width"]) for _ in range(job["blocks"])))
    handle = None
    if spec != NO_SYNC:
        plan = plan_of_blocks("*")
        if spec:
            handle = compress_tensor_parallel(plan, spec, spec)
            plan = handle.plan
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    rows = torch.randn(job["batch"], job["length"], job["width"])  # the same on every rank
    rows.requires_grad_()  # as of a layer before

    def step() -> float:
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    yield step, lambda: {} if handle is None else link_worker.account(handle.link_stats, list(handle.link_stats))


link_worker.KINDS["tensor"] = split_blocks

if __name__ == "__main__":
    link_worker.main()
