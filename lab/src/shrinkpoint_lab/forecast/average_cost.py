"""The cost of averaging gradients at one rank, measured in one process: both hops, factors, and torch's all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.background_allreduce import BackgroundAllReduce
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce, share_numel
from shrinkpoint.comm.gradient_layout import (
    SEGMENT_NUMEL,
    FilledSegment,
    GradientCollector,
    GradientLayout,
    Segment,
    SegmentValues,
)
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.comm.low_rank import LowRank
from shrinkpoint.comm.low_rank_allreduce import LowRankAllReduce, LowRankState, MatrixLayout
from shrinkpoint.comm.recommendation import TORCH_BF16_HOOK, relative_error, synchronized_time
from shrinkpoint_lab.forecast.loopback_group import LoopbackGroup
from shrinkpoint_lab.forecast.step_model import CandidateCost, MessageCost

_WARMUP_STEPS = 2
_MAX_SAMPLE = 1 << 24
"""Values of which torch's all-reduce is measured, at most; it takes as long for each of them."""

_SEND_BUFFERS = Path("/proc/sys/net/ipv4/tcp_wmem")
"""Linux's least, usual and largest size of a TCP connection's send buffer, in bytes."""
_PAYLOAD_OF_BUFFER = 0.7
"""Of a send buffer the rest is the kernel's bookkeeping. Fitted to the steps that link_latency.py measured."""


def send_window(device: torch.device) -> float | None:
    """The bytes that one connection of this machine may have on their way; None where that is not known, as of nccl."""
    try:
        largest = int(_SEND_BUFFERS.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return None
    return _PAYLOAD_OF_BUFFER * largest if device.type == "cpu" and largest > 0 else None


class _LoneRank:
    """The first rank of a group, which takes its own messages for those of others.

    On a CPU it averages in threads, as `compress_ddp` does on gloo: they take more processor time than the same work in
    one thread.
    """

    def __init__(self, compressor: CompressorLike | LowRank, gradients: Sequence[Tensor], world_size: int) -> None:
        self._gradients, self._group = gradients, LoopbackGroup(world_size)
        named = [(str(index), gradient) for index, gradient in enumerate(gradients)]
        self._low_rank: LowRankState | None = None
        inner = compressor.compressor if isinstance(compressor, LowRank) else compressor
        self._all_reduce = self._right_all_reduce = CompressedAllReduce(inner, name="ddp")
        if isinstance(compressor, LowRank):
            layout = MatrixLayout(named, compressor, 0, SEGMENT_NUMEL)
            self._right_all_reduce = CompressedAllReduce(inner, name="ddp right")
            self._low_rank = LowRankState(compressor, layout, self._right_all_reduce)
            self._layout: GradientLayout = layout
        else:
            self._layout = GradientLayout(named, 0, SEGMENT_NUMEL)
        self._background = self._make_background() if gradients[0].device.type == "cpu" else None
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def sent_bytes(self) -> int:
        """Bytes of messages to all other ranks."""
        stats = {id(one): one for hop in (self._all_reduce, self._right_all_reduce) for one in hop.link_stats.values()}
        return sum(one.wire_bytes for one in stats.values())

    def step(self) -> None:
        """Make a step in place; what the gradients are then has no meaning, since rows of one rank stand for all."""
        if self._background is None:
            self._visit(lambda filled: self._exchange(filled, self._average))
            return
        self._background.begin(self._layout.segments)
        self._visit(self._background.submit)
        self._background.wait()

    def close(self) -> None:
        """Wait until the threads have ended: torch aborts a process that ends before."""
        if self._background is not None:
            self._background.close()

    def send(self) -> None:
        """Replace all gradients in place by what the first message to one other rank decodes to."""
        self._visit(lambda filled: self._exchange(filled, _send))

    def _make_background(self) -> BackgroundAllReduce:
        group, device = cast(dist.ProcessGroup, self._group), torch.device("cpu")
        if self._low_rank is None:
            return BackgroundAllReduce.create(group, device, lambda segment: self._all_reduce)
        return LowRankAllReduce(group, device, lambda segment: self._all_reduce, self._low_rank)

    def _visit(self, use: Callable[[FilledSegment], None]) -> None:
        collector = GradientCollector(self._layout)
        for gradient in reversed(self._gradients):
            for filled in collector.add(gradient, gradient.view(-1)):
                use(filled)

    def _exchange(self, filled: FilledSegment, use: Callable[[SegmentValues, CompressedAllReduce], None]) -> None:
        if self._low_rank is None or filled.segment.index not in self._low_rank.layout.groups:
            use(filled, self._all_reduce)
        else:
            use(self._low_rank.first_factors(filled, lambda: None), self._all_reduce)
            use(self._low_rank.second_factors(filled), self._right_all_reduce)

    def _average(self, values: SegmentValues, all_reduce: CompressedAllReduce) -> None:
        """Both hops of a segment, one after the other: on a GPU, where they are enqueued on one stream."""
        segment, world_size = values.segment, self._group.size()
        scratch = self._scratch_for(segment, values.dtype)
        encoded = all_reduce.reduce_scatter.encode(values.read_rows(scratch), 0, segment.name)
        received = [encoded.own_row if message is None else message for message in encoded.messages]
        total = all_reduce.reduce_scatter.decode(encoded, received, 0)
        row = all_reduce.all_gather.encode(total.div_(world_size).to(values.dtype), 0, world_size, segment.name)
        messages = [row.message] * world_size
        values.write_rows(scratch, lambda rows: all_reduce.all_gather.decode(row, messages, rows))

    def _scratch_for(self, segment: Segment, dtype: torch.dtype) -> Tensor:
        world_size = self._group.size()
        key = share_numel(segment.numel, world_size), dtype
        if key not in self._scratch:
            self._scratch[key] = torch.empty(world_size, key[0], dtype=dtype, device=segment.device)
        return self._scratch[key]


def _send(values: SegmentValues, all_reduce: CompressedAllReduce) -> None:
    flat = torch.empty(values.segment.numel, dtype=values.dtype, device=values.segment.device)
    values.copy_to(flat)
    compressor = all_reduce.all_gather.feedback.compressor
    values.copy_from(compressor.decode(compressor.encode(flat), torch.empty_like(flat)))


def measure_average(
    compressor: CompressorLike | LowRank, gradients: Sequence[Tensor], world_size: int, *, repeats: int
) -> CandidateCost:
    """Measure what a rank computes to average gradients as `compress_ddp` does, and how much it sends.

    The encoding seconds are those of all of it, decoding included. The error is that of one message without feedback;
    of a low rank, of the first step's factors.

    Args:
        gradients: contiguous, of one dtype; they are not changed.
    """
    copies = [gradient.detach().clone() for gradient in gradients]
    _LoneRank(compressor, copies, world_size).send()
    error = relative_error(gradients, copies)
    rank = _LoneRank(compressor, copies, world_size)
    seconds = []
    with closing(rank):
        for _ in range(_WARMUP_STEPS + repeats):
            for copy, gradient in zip(copies, gradients, strict=True):
                copy.copy_(gradient)
            seconds.append(_busy_seconds(rank.step, copies[0]))
    sent = rank.sent_bytes / (_WARMUP_STEPS + repeats)
    wire, raw = round(sent * world_size / (2 * (world_size - 1))), sum(gradient.nbytes for gradient in gradients)
    cost = MessageCost(raw, wire, encode=median(seconds[_WARMUP_STEPS:]), error=error)
    is_low_rank = isinstance(compressor, LowRank)
    return CandidateCost(str(compressor), cost, cost, transport="factors" if is_low_rank else "messages")


def _busy_seconds(work: Callable[[], None], tensor: Tensor) -> float:
    """Seconds that work takes of a rank: by the clock, or of its cores, which are as many as torch has threads.

    A rank computes beside its gradients, so that threads which wait for a core count whether or not one is free here.
    """
    start, busy = synchronized_time(tensor.device), time.process_time()
    work()
    seconds = synchronized_time(tensor.device) - start
    return max(seconds, (time.process_time() - busy) / torch.get_num_threads())


def measure_torch_hook(gradients: Sequence[Tensor], bucket_numel: int, *, repeats: int) -> tuple[float, CandidateCost]:
    """Measure torch's all-reduce of gradients on gloo, as they are and by its bf16 hook.

    Two ranks are threads of this process on the loopback, and processor time is what counts: casts, sums and sockets.
    Elsewhere than on a CPU, or without gloo, only the casts are measured, and the all-reduce takes 0 seconds.

    Returns:
        The processor seconds of a rank's all-reduce for a byte that it sends, with the one that it receives, and the
        cost of the hook, without those of its bytes. The error is that of one cast.
    """
    tensors = [gradient.detach() for gradient in gradients]
    raw, numel = sum(tensor.nbytes for tensor in tensors), sum(tensor.numel() for tensor in tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])[:_MAX_SAMPLE].clone()
    error = relative_error([flat], [flat.to(torch.bfloat16)])
    seconds, all_reduce_seconds = _cast_seconds(flat, bucket_numel, repeats), 0.0
    if flat.device.type == "cpu" and raw and (pair := _connect_pair()):
        plain, hook = _all_reduce_seconds(pair, flat, bucket_numel, repeats)
        all_reduce_seconds, seconds = plain / flat.nbytes, max(0.0, hook - plain * 2 / flat.itemsize)
    cost = MessageCost(raw, 2 * numel, encode=seconds * numel / max(1, flat.numel()), error=error)
    return all_reduce_seconds, CandidateCost(TORCH_BF16_HOOK, cost, cost, transport="all-reduce")


def _cast_seconds(flat: Tensor, bucket_numel: int, repeats: int) -> float:
    """Seconds of the casts of all values and back."""
    seconds = []
    for _ in range(_WARMUP_STEPS + repeats):
        start = synchronized_time(flat.device)
        for bucket in torch.split(flat, bucket_numel):
            bucket.copy_(bucket.to(torch.bfloat16))
        seconds.append(synchronized_time(flat.device) - start)
    return median(seconds[_WARMUP_STEPS:])


def _connect_pair() -> list[dist.ProcessGroup]:
    """Two ranks of a group on gloo in this process, over the loopback; none where that is not possible."""
    distributed: Any = dist  # whose types do not know these names
    try:
        store, gloo = distributed.HashStore(), distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._devices = timedelta(seconds=60), [gloo.create_device(hostname="127.0.0.1")]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda rank: gloo(store, rank, 2, options), range(2)))
    except (AttributeError, RuntimeError):
        return []


def _all_reduce_seconds(
    pair: Sequence[dist.ProcessGroup], flat: Tensor, bucket_numel: int, repeats: int
) -> tuple[float, float]:
    """Processor seconds of one rank for all buckets: without a hook, and with it."""
    ranks = [(group, flat.clone()) for group in pair]

    def reduce_plain(rank: tuple[dist.ProcessGroup, Tensor]) -> None:
        for bucket in torch.split(rank[1], bucket_numel):
            rank[0].allreduce([bucket.div_(2)]).wait()

    def reduce_cast(rank: tuple[dist.ProcessGroup, Tensor]) -> None:
        for bucket in torch.split(rank[1], bucket_numel):
            narrow = bucket.to(torch.bfloat16).div_(2)
            rank[0].allreduce([narrow]).wait()
            bucket.copy_(narrow)

    seconds: dict[Callable[[tuple[dist.ProcessGroup, Tensor]], None], list[float]] = {reduce_plain: [], reduce_cast: []}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(1 + repeats):
            for work, times in seconds.items():
                start = time.process_time()
                list(pool.map(work, ranks))
                times.append((time.process_time() - start) / 2)
    plain, cast = (median(times[1:]) for times in seconds.values())
    return plain, cast
