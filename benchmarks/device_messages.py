"""Part of `device_all.py`: GB/s at which messages are encoded and decoded where the tensor is.

GB/s are raw bytes of the tensor, the median of all repeats, by CUDA events on a GPU and by the clock on a CPU. On a GPU
compressors are Triton kernels, or torch operations where there is no kernel; on a CPU native code. Beside them stand
torch's casts to bfloat16 and float8 and a copy. "encode, host ms" is the time that the host needs to enqueue one
encoding. "kernels" are launches and copies that torch's profiler sees on a GPU; on a CPU torch's operations. "as by
torch operations" is True if these give the same message. "8 ranks" is what one rank encodes and decodes of a segment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from device_job import Job
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shrinkpoint.device
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce
from shrinkpoint.comm.compressors.base import Compressor, CompressorContext
from shrinkpoint.comm.spec import parse

SPECS = ("q4:64", "q8:64", "n4:64", "h64(q4:64)", "top10")
Ways = tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], object]]


def subjects() -> dict[str, Ways]:
    """By name: what encodes a tensor, and what decodes that into another one."""
    found = {spec: _ours(spec) for spec in SPECS}
    found["copy"] = (Tensor.clone, lambda message, out: out.copy_(message))
    for name, dtype in (("cast to bfloat16", torch.bfloat16), ("cast to float8_e4m3fn", torch.float8_e4m3fn)):
        found[name] = (lambda x, dtype=dtype: x.to(dtype), lambda message, out: out.copy_(message))
    return found


def _ours(spec: str) -> Ways:
    compressor, context = parse(spec), CompressorContext(key=1)
    assert isinstance(compressor, Compressor)
    return (lambda x: compressor.encode(x, context), lambda wire, out: compressor.decode(wire, out, context))


def messages(job: Job) -> None:
    """All subjects at three sizes in float32, then in bfloat16; on a GPU, then once as a CUDA graph."""
    sizes = (1 << 12, 1 << 16) if job.is_quick else (1 << 24, 1 << 26, 1 << 20)
    repeats = 2 if job.is_quick else 20
    for dtype in (torch.float32, torch.bfloat16):
        for numel in sizes:
            x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(job.device, dtype)
            for name, ways in subjects().items():
                names = {"message": name, "dtype": str(dtype).removeprefix("torch."), "M values": numel / (1 << 20)}
                with job.attempt(**names):
                    figures = _measure(ways, x, repeats)
                    if dtype == torch.float32 and numel == sizes[0]:
                        figures |= _count_kernels(ways, x)
                        figures |= _compare(name, x) if name in SPECS else {}
                    job.add(**names, **figures)
    for spec in SPECS[:-1]:
        with job.attempt(message=f"{spec}, 8 ranks"):
            job.add(message=f"{spec}, 8 ranks", **_average(spec, job, 1 << 10 if job.is_quick else 1 << 17))
    x = torch.randn(sizes[0], device=job.device)
    for spec in SPECS if job.is_cuda else ():
        with job.attempt(message=f"{spec}, CUDA graph"):
            job.add(message=f"{spec}, CUDA graph", **_replay(subjects()[spec], x, repeats))
    if not job.is_cuda:
        job.add(message="CUDA graphs", note="not run: on a CPU")


def _measure(ways: Ways, x: Tensor, repeats: int) -> dict[str, float]:
    encode, decode = ways
    out, message = torch.empty_like(x), encode(x)
    decode(message, out)
    error = float((x.float() - out.float()).norm() / x.float().norm())
    turns = [
        (_seconds(lambda: encode(x), x.device), _seconds(lambda: decode(message, out), x.device))
        for _ in range(repeats)
    ]
    taken, host = ([median(turn[way][clock] for turn in turns) for way in (0, 1)] for clock in (0, 1))
    return {
        "encode, GB/s": x.nbytes / taken[0] / 1e9,
        "decode, GB/s": x.nbytes / taken[1] / 1e9,
        "encode, host ms": 1e3 * host[0],
        "decode, host ms": 1e3 * host[1],
        "bits a value": 8 * message.nbytes / x.numel(),
        "relative error": error,
    }


def _seconds(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds of a call until it is done, and until the host goes on."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began,) * 2
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    start.record()
    work()
    end.record()
    launched = time.perf_counter() - began
    end.synchronize()
    return start.elapsed_time(end) / 1e3, launched


def _count_kernels(ways: Ways, x: Tensor) -> dict[str, int]:
    encode, decode = ways
    message, out = encode(x), torch.empty_like(x)
    count = _kernels if x.is_cuda else _operations
    return {"encode, kernels": count(lambda: encode(x)), "decode, kernels": count(lambda: decode(message, out))}


def _compare(spec: str, x: Tensor) -> dict[str, bool]:
    """Compare a message with that of torch operations."""
    compressor: Any = parse(spec)
    wire, types = compressor.encode(x, CompressorContext(key=1)), shrinkpoint.device.DEVICE_TYPES
    try:
        shrinkpoint.device.DEVICE_TYPES = ()
        return {"as by torch operations": torch.equal(wire, compressor._encode_torch(x, CompressorContext(key=1)))}
    finally:
        shrinkpoint.device.DEVICE_TYPES = types


def _average(spec: str, job: Job, share: int, ranks: int = 8) -> dict[str, float]:
    """Launches and host time of rank 0 in an average of 8 ranks, after the first one; messages of its own come back."""
    hops = CompressedAllReduce(spec, name="benchmark")
    rows = torch.randn(ranks, share, generator=torch.Generator().manual_seed(0)).to(job.device)
    row = rows[0].clone()

    def encode() -> tuple[Any, Any]:
        return hops.reduce_scatter.encode(rows, 0), hops.all_gather.encode(row, 0, ranks)

    def decode(first: Any, second: Any) -> None:
        own = rows.new_empty(0, dtype=torch.uint8)
        hops.reduce_scatter.decode(first, [own, *first.messages[1:]], 0)
        hops.all_gather.decode(second, second.message.expand(ranks, -1).contiguous().unbind(), rows)

    sent = [encode() for _ in range(2)][-1]
    decode(*sent)
    count = _kernels if job.is_cuda else _operations
    host = [median(_seconds(work, rows.device)[1] for _ in range(5)) for work in (encode, lambda: decode(*sent))]
    return {
        "encode, kernels": min(count(encode) for _ in range(3)),  # the error of some messages is measured
        "decode, kernels": count(lambda: decode(*sent)),
        "encode, host ms": 1e3 * host[0],
        "decode, host ms": 1e3 * host[1],
        "M values": ranks * share / (1 << 20),
    }


def _kernels(work: Callable[[], object]) -> int:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


class _Counter(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operations(work: Callable[[], object]) -> int:
    with _Counter() as counter:
        work()
    return counter.count


def _replay(ways: Ways, x: Tensor, repeats: int) -> dict[str, Any]:
    """Encoding and decoding captured in one CUDA graph: whether it gives the same bits, and how long a replay takes."""
    encode, decode = ways
    out, expected = torch.empty_like(x), torch.empty_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a first call may allocate and initialize, which a capture forbids
        decode(encode(x), expected)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(encode(x), out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    is_equal = torch.equal(out, expected)
    times = [_seconds(graph.replay, x.device) for _ in range(repeats)]
    return {
        "encode and decode, GB/s": x.nbytes / median(time for time, _ in times) / 1e9,
        "host ms": 1e3 * median(host for _, host in times),
        "same bits": is_equal,
        "M values": x.numel() / (1 << 20),
    }
