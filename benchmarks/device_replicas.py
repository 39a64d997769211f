"""Parts of `device_all.py`: steps of DDP, FSDP2 and LocalSteps in a group of one rank, and weight sync.

nccl refuses two ranks on one device. So a group has one rank, where all must cost what it costs without compression;
what two ranks would send each other is encoded, handed over and decoded on the device, segment by segment.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from device_job import Job
from scale_states import MODELS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint.comm import LocalSteps, compress_ddp, compress_fsdp
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce
from shrinkpoint.comm.gradient_layout import SEGMENT_NUMEL
from shrinkpoint.sync import Publisher, Subscriber
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

MEDIUM = GPTConfig(layers=12, width=768, heads=12, context=512, dropout=0.0)
TOY = GPTConfig(layers=2, width=64, heads=2, context=32, dropout=0.0)
CHANGED = 0.02
"""Share of the weights whose lowest bit changes from one version to the next."""
Setup = Callable[[nn.Module, torch.optim.Optimizer], "tuple[nn.Module, Callable[[], object], Any]"]


def replicas(job: Job) -> None:
    """Median step of each wrapper, with and without compression, and the host's time in a hook."""
    warnings.simplefilter("ignore")
    backend = "nccl" if job.is_cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{job.folder}/rendezvous", rank=0, world_size=1)
    for spec in ("q4:64", "h64(q4:64)", "top10"):
        with job.attempt(step="two hops of two ranks", compression=spec):
            _hops(job, spec)
    for name, compression in (
        *(("DDP", None), ("DDP", "q4:64")),
        *(("FSDP2", None), ("FSDP2", "q8:64, q4:64")),
        *(("LocalSteps(every=4)", None), ("LocalSteps(every=4)", "q4:64")),
    ):
        with job.attempt(step=name, compression=compression or "none"):
            _steps(job, name, compression)
    dist.destroy_process_group()


def _steps(job: Job, name: str, compression: str | None) -> None:
    config, size, count = (TOY, 2, 4) if job.is_quick else (MEDIUM, 16, 16)
    torch.manual_seed(0)
    model: nn.Module = GPT(config).to(job.device)
    hooks: list[float] = []
    called, make_step = _wrap(job, name, model, compression, hooks)
    optimizer = torch.optim.AdamW(called.parameters(), lr=1e-4, foreach=True)
    step_with = make_step(optimizer)
    x = torch.randint(256, (size, config.context), device=job.device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(job.device.type, torch.bfloat16, enabled=job.is_cuda):
            loss = called(x, x)
        loss.backward()
        step_with()

    for _ in range(4):
        step()
    hooks.clear()
    times = [job.seconds_of(step) for _ in range(count)]
    figures: dict[str, Any] = {"step, ms": 1e3 * median(times), "slowest, ms": 1e3 * max(times)}
    if hooks:
        figures |= {"hook, host ms": 1e3 * median(hooks), "hook calls a step": len(hooks) / count}
    job.add(step=name, compression=compression or "none", **figures)


def _wrap(
    job: Job, name: str, model: nn.Module, compression: str | None, hooks: list[float]
) -> tuple[nn.Module, Callable[[torch.optim.Optimizer], Callable[[], object]]]:
    """The model to call, and what makes the function that ends a step; seconds of hook calls go to `hooks`."""
    if name == "DDP":
        replica = DistributedDataParallel(model, device_ids=[job.device.index or 0] if job.is_cuda else None)
        if compression is not None:
            handle = compress_ddp(replica, compression)
            handle.reduce = _timed(handle.reduce, hooks)  # type: ignore[method-assign]
        return replica, lambda optimizer: optimizer.step
    if name == "FSDP2":
        mesh = init_device_mesh(job.device.type, (1,))
        for part in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(part, mesh=mesh)
        if compression is not None:
            compress_fsdp(model, *compression.split(", "))
        return model, lambda optimizer: optimizer.step
    return model, lambda optimizer: LocalSteps(model, optimizer, every=4, compressor=compression).step


def _timed(function: Callable[[Any], Any], seconds: list[float]) -> Callable[[Any], Any]:
    def call(argument: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(argument)
        finally:
            seconds.append(time.perf_counter() - began)

    return call


def _hops(job: Job, spec: str) -> None:
    """What one of two ranks computes for a segment: both hops, without the messages' way."""
    numel = 1 << 12 if job.is_quick else SEGMENT_NUMEL
    side = CompressedAllReduce(spec, name="loopback")
    rows = torch.randn(2, numel // 2, device=job.device)
    host: list[float] = []

    def average() -> None:
        began = time.perf_counter()
        sent = side.reduce_scatter.encode(rows, 0)
        total = side.reduce_scatter.decode(sent, [None, sent.messages[1]], 0)
        encoded = side.all_gather.encode(total.div_(2), 0, 2)
        side.all_gather.decode(encoded, [encoded.message, encoded.message], torch.empty_like(rows))
        host.append(time.perf_counter() - began)

    average()
    host.clear()
    seconds = job.seconds_of(average, 2 if job.is_quick else 20)
    figures = {
        "step, ms": 1e3 * seconds,
        "hook, host ms": 1e3 * median(host),
        "GB/s of gradients": rows.nbytes / 1e9 / seconds,
    }
    job.add(step="two hops of two ranks", compression=spec, values=numel, **figures)


def sync(job: Job) -> None:
    """Versions of bf16 weights from a model on the device into another one there."""
    shapes = MODELS["tiny" if job.is_quick else "1.5B"]
    generator = torch.Generator(job.device).manual_seed(0)
    trained = {
        name: torch.randn(shape, generator=generator, device=job.device).mul_(0.02).bfloat16()
        for name, shape in shapes.shapes()
    }
    live = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    nbytes = sum(tensor.nbytes for tensor in trained.values())
    with job.attempt(version="copy on the device"):
        pairs = [(live[name], trained[name]) for name in live]
        seconds = job.seconds_of(lambda: [a.copy_(b) for a, b in pairs], 3)
        job.add(version="copy on the device", **{"update, s": seconds, "raw GB": nbytes / 1e9})
    for tensor in live.values():
        tensor.zero_()
    memory = Path("/dev/shm")
    is_in_memory = memory.is_dir() and shutil.disk_usage(memory).free > 2 * nbytes
    folder = (memory if is_in_memory else job.folder) / f"{job.folder.name}-sync"
    try:
        with job.attempt(version="published"):
            _versions(job, folder, trained, live, nbytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _versions(job: Job, folder: Path, trained: dict[str, Tensor], live: dict[str, Tensor], nbytes: int) -> None:
    generator = torch.Generator(job.device).manual_seed(1)
    with Publisher(folder) as publisher:
        subscriber = Subscriber(folder)
        for number in range(4):
            if number:
                for tensor in trained.values():
                    flips = torch.rand(tensor.shape, generator=generator, device=job.device) < CHANGED
                    tensor.view(torch.int16).bitwise_xor_(flips.to(torch.int16))
            job.synchronize()
            report = publisher.publish(trained)
            update = subscriber.update(live)
            assert update is not None
            size = report.delta_bytes or report.keyframe_bytes or 0
            is_equal = all(torch.equal(live[name].view(torch.int16), trained[name].view(torch.int16)) for name in live)
            figures = {
                "raw GB": nbytes / 1e9,
                "ratio": nbytes / size,
                "changed, %": 100 * update.changed / (nbytes / 2),
            }
            figures |= {"publish, s": report.seconds, "update, s": update.seconds, "pause, ms": 1e3 * update.pause}
            where = str(folder.parent)
            job.add(version="delta" if report.delta_bytes else "keyframe", place=where, **figures, equal=is_equal)
