"""Ranks that publish and follow sharded weights: programs of `helpers.processes.ranks` begin with `PRELUDE`."""

PRELUDE = """
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shrinkpoint.errors import *
from shrinkpoint.sync import Publisher, Subscriber, part_plan
from shrinkpoint.tensors.dtypes import as_bits

SHAPES = {
    "even": (64, 32), "uneven": (13, 7), "few_rows": (2, 9), "vector": (50,), "cube": (6, 4, 5), "scalar": (),
    "empty": (0, 4), "large": (640, 1664),
}

def full(version):
    # About one value in fifty changes with each version.
    out = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(index)).bfloat16()
        for step in range(version):
            moved = torch.rand(shape, generator=torch.Generator().manual_seed(100 * step + index)) < 0.02
            values = torch.where(moved, (values.view(torch.int16) + 1).view(torch.bfloat16), values)
        out[name] = values
    return out | {"steps": torch.tensor(version), "tied": out["even"]}

def join(rank, width, folder, name="join"):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=width)
    return dist.new_group([*range(width)])

def placed(mesh, tensor, placements):
    # Of what a tensor has no axis for it has a replica.
    fitting = [p if p.is_replicate() or p.dim < tensor.dim() else Replicate() for p in placements]
    return distribute_tensor(tensor, mesh, fitting, src_data_rank=None)

def sharded(version, mesh, placements):
    whole = full(version)
    out = {name: placed(mesh, tensor, placements) for name, tensor in whole.items() if name != "tied"}
    return out | {"tied": out["even"], "steps": whole["steps"]}

def zeroed(state):
    out = {}
    for name, tensor in state.items():
        if name != "tied":
            out[name] = torch.zeros_like(tensor)
    return out | ({"tied": out["even"]} if "tied" in state else {})

def bits(tensor):
    return as_bits((tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous())

def assert_version(live, version, mesh=None, placements=()):
    expected = full(version) if mesh is None else sharded(version, mesh, placements)
    assert live.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(bits(live[name]), bits(tensor)), (name, version)

def report(folder, rank, result):
    Path(f"{folder}/{rank}.json").write_text(json.dumps(result))
"""
