"""What a single GPU can show of the communication on nccl; the same on a CPU and gloo, so that the tests are tested.

nccl refuses two ranks on one device. So a group has one rank here, and what two ranks would send each other is encoded,
handed over and decoded on the device.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.parameters import each_value
from helpers.replica_search import batch, drawn, plain_net
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

from shrinkpoint.comm import LinkStats, LocalSteps, compress_ddp, compress_fsdp
from shrinkpoint.comm.background_allreduce import StreamAllReduce
from shrinkpoint.comm.compressed_allreduce import CompressedAllGather, CompressedAllReduce, as_feedback
from shrinkpoint.comm.gradient_layout import FilledSegment, Piece, Segment

SPECS = (
    "exact",
    "bf16",
    "q4:64",
    "q2:32:dither",
    "n3:64",
    "block4:32",
    "h64(q4:64)",
    "top10",
    "ef(q3:32)",
    "ef21(top10)",
)
DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
)


@pytest.fixture(params=DEVICES)
def device(request, tmp_path):
    """A device, in a process group of one rank that suits it."""
    backend = {"cpu": "gloo", "cuda": "nccl"}[request.param]
    place = f"file://{tmp_path}/rendezvous"
    dist.init_process_group(backend, init_method=place, rank=0, world_size=1, timeout=timedelta(seconds=120))
    yield torch.device(request.param)
    dist.destroy_process_group()


def averages(spec: str, tensors: list[Tensor], steps: int = 3) -> list[Tensor]:
    """The averages of each step at each rank; what ranks send is handed over in this process."""
    world_size = len(tensors)
    sides = [CompressedAllReduce(spec, name="loopback") for _ in tensors]
    found = []
    for step in range(steps):
        rows = [(tensor * (step + 1)).view(world_size, -1) for tensor in tensors]
        sent = [side.reduce_scatter.encode(row, rank) for rank, (side, row) in enumerate(zip(sides, rows, strict=True))]
        averaged = []
        for rank, (side, encoded) in enumerate(zip(sides, sent, strict=True)):
            total = side.reduce_scatter.decode(encoded, [one.messages[rank] for one in sent], rank)
            averaged.append(side.all_gather.encode(total.div_(world_size), rank, world_size))
        for side, encoded, row in zip(sides, averaged, rows, strict=True):
            side.all_gather.decode(encoded, [one.message for one in averaged], row)
        found += rows
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_two_ranks_in_one_process_average_to_the_bits_of_a_cpu(device, spec):
    tensors = [drawn(4096, seed=seed) for seed in (1, 2)]
    expected, found = averages(spec, tensors), averages(spec, [one.to(device) for one in tensors])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.device.type == device.type
        assert torch.equal(ours.cpu(), theirs)
    assert all(torch.equal(one, other) for one, other in zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize(("async_op", "spec"), each_value([False, True], ["q4:64", "h64(q4:64)", "top10"]))
def test_a_gathered_row_is_what_its_message_says(device, spec, async_op):
    row = drawn(2048, seed=3).to(device)
    rows = torch.zeros(1, 2048, device=device)
    gather = CompressedAllGather(as_feedback(spec), LinkStats(), name="one")
    work = gather(row, rows, dist.group.WORLD, async_op=async_op)
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
    expected = torch.zeros(1, 2048)
    again = CompressedAllGather(as_feedback(spec), LinkStats(), name="one")
    encoded = again.encode(row.cpu(), dist.get_rank(), dist.get_world_size())
    again.decode(encoded, [encoded.message], expected)
    assert torch.equal(rows.cpu(), expected)
    assert not torch.equal(rows, row.view(1, -1))


class Doubling:
    """An all-reduce whose result shows that it ran after what made the gradient."""

    def average_(self, tensor: Tensor, group: object, layout: str) -> Tensor:
        return tensor.mul_(2)


def test_segments_are_averaged_between_what_made_them_and_what_uses_them(device):
    """On a GPU a stream of its own averages them, beside the current one."""
    square = drawn(1024, 1024, seed=4).to(device) / 32
    background = StreamAllReduce(dist.group.WORLD, device, lambda segment: Doubling())
    for _ in range(3):
        gradient = square
        for _ in range(8):
            gradient = gradient @ square
        expected = gradient.clone() * 2
        parts = gradient.view(-1).split(1 << 18)
        segments = [Segment(index, 1 << 18, 1, False, device) for index in range(len(parts))]
        background.begin(segments)
        for segment, part in zip(segments, parts, strict=True):
            background.submit(FilledSegment(segment, [(part, Piece(0, 0, 1 << 18))]))
        background.wait()
        assert torch.equal(gradient, expected)


def trained(device: torch.device, prepare) -> Tensor:
    """All weights after some steps; `prepare` returns what to call and what to step with."""
    model = plain_net().to(device)
    called, optimizer, step_with = prepare(model)
    for step in range(8):
        x, y = (one.to(device) for one in batch(step, 0))
        optimizer.zero_grad()
        mse_loss(called(x), y).backward()
        step_with()
    weights = (getattr(one, "full_tensor", lambda one=one: one)() for one in called.parameters())
    return torch.cat([one.detach().flatten() for one in weights])


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def alone(model):
    optimizer = adam(model)
    return model, optimizer, optimizer.step


def replicated(spec):
    def prepare(model):
        replicas = DDP(model, device_ids=[0] if next(model.parameters()).is_cuda else None, bucket_cap_mb=0.005)
        compress_ddp(replicas, spec)
        optimizer = adam(replicas)
        return replicas, optimizer, optimizer.step

    return prepare


def sharded(model):
    mesh = init_device_mesh(next(model.parameters()).device.type, (1,))
    for one in (model[0], model[2], model):
        fully_shard(one, mesh=mesh)
    compress_fsdp(model, "q8:64", "q4:64")
    optimizer = adam(model)
    return model, optimizer, optimizer.step


def with_local_steps(model):
    optimizer = adam(model)
    local = LocalSteps(model, optimizer, every=4, outer=lambda weights: torch.optim.SGD(weights, lr=1.0))
    return model, optimizer, local.step


@pytest.mark.parametrize(
    "prepare",
    [replicated("q4:64"), replicated("ef(q3:32:dither)"), replicated("ef21(top10)"), sharded],
    ids=["ddp", "ddp with feedback", "ddp with EF21", "fsdp"],
)
def test_one_rank_trains_as_if_it_were_alone(device, prepare):
    assert torch.equal(trained(device, prepare), trained(device, alone))


def test_one_rank_with_local_steps_takes_the_weights_it_has(device):
    """Its average is what it has, up to the rounding of global weights minus how far they moved."""
    torch.testing.assert_close(trained(device, with_local_steps), trained(device, alone), rtol=1e-5, atol=1e-6)
