"""The cost of averaging gradients at one rank, measured in one process: both hops, factors, and torch's all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce, share_numel
from shrinkpoint.comm.gradient_layout import SEGMENT_NUMEL, GradientCollector, GradientLayout, Segment, SegmentValues
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.comm.low_rank import LowRank
from shrinkpoint.comm.low_rank_allreduce import LowRankState
from shrinkpoint.comm.matrix_layout import MatrixLayout
from shrinkpoint.comm.message_cost import relative_error, synchronized_time
from shrinkpoint.comm.step_model import CandidateCost, MessageCost

TORCH_BF16_HOOK = "torch bf16 hook"
"""Torch's own all-reduce of gradients in bfloat16 (`bf16_compress_hook`), as a candidate of `recommend`."""
_WARMUP_STEPS = 2
_MAX_SAMPLE = 1 << 24
"""Values of which torch's all-reduce is measured, at most; it takes as long for each of them."""


class _FirstOf(NamedTuple):
    """A group of so many ranks that are not there, of which this process is the first."""

    num_ranks: int

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.num_ranks


class _LoneRank:
    """The first rank of a group, which takes its own messages for those of others, and what its work takes.

    Attributes:
        encode_seconds: of reading and encoding, the computing of factors included.
        decode_seconds: of sums, decoding and writing.
        sent_bytes: to all other ranks.
    """

    def __init__(self, compressor: CompressorLike | LowRank, gradients: Sequence[Tensor], world_size: int) -> None:
        self._group, self._gradients = _FirstOf(world_size), gradients
        named = [(str(index), gradient) for index, gradient in enumerate(gradients)]
        self._state: LowRankState | None = None
        inner = compressor.compressor if isinstance(compressor, LowRank) else compressor
        self._all_reduce = self._right_all_reduce = CompressedAllReduce(inner, name="ddp")
        if isinstance(compressor, LowRank):
            layout = MatrixLayout(named, compressor, 0, SEGMENT_NUMEL)
            self._right_all_reduce = CompressedAllReduce(inner, name="ddp right")
            self._state = LowRankState(compressor, layout, self._right_all_reduce)
            self._layout: GradientLayout = layout
        else:
            self._layout = GradientLayout(named, 0, SEGMENT_NUMEL)
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}
        self.encode_seconds = self.decode_seconds = 0.0

    @property
    def sent_bytes(self) -> int:
        stats = {id(one): one for hop in (self._all_reduce, self._right_all_reduce) for one in hop.link_stats.values()}
        return sum(one.wire_bytes for one in stats.values())

    def step(self) -> None:
        """Make a step in place; what the gradients are then has no meaning, since rows of one rank stand for all."""
        self._visit(self._average)

    def send(self) -> None:
        """Replace all gradients in place by what the first message to one other rank decodes to."""
        self._visit(_send)

    def _visit(self, average: Callable[[SegmentValues, CompressedAllReduce], None]) -> None:
        collector = GradientCollector(self._layout)
        for gradient in reversed(self._gradients):
            for filled in collector.add(gradient, gradient.view(-1)):
                if self._state is None or filled.segment.index not in self._state.layout.groups:
                    average(filled, self._all_reduce)
                else:
                    average(self._state.first_factors(filled, lambda: None), self._all_reduce)
                    average(self._state.second_factors(filled), self._right_all_reduce)

    def _average(self, values: SegmentValues, all_reduce: CompressedAllReduce) -> None:
        segment, world_size = values.segment, self._group.size()
        scratch = self._scratch_for(segment, values.dtype)
        times = [synchronized_time(scratch)]
        encoded = all_reduce.reduce_scatter.encode(values.read_rows(scratch), 0, segment.name)
        times.append(synchronized_time(scratch))
        message = encoded.messages[1]
        assert message is not None
        total = all_reduce.reduce_scatter.decode(encoded, [message] * world_size, 0)
        mean = total.div_(world_size).to(values.dtype)
        times.append(synchronized_time(scratch))
        row = all_reduce.all_gather.encode(mean, self._group, segment.name)
        times.append(synchronized_time(scratch))
        values.write_rows(scratch, lambda rows: all_reduce.all_gather.decode(row, [row.message] * world_size, rows))
        times.append(synchronized_time(scratch))
        self.encode_seconds += times[1] - times[0] + times[3] - times[2]
        self.decode_seconds += times[2] - times[1] + times[4] - times[3]

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

    The decoding seconds are those of one decode of all gradients, of which a step has `2 - 1 / world_size`. The error
    is that of one message without feedback; of a low rank, of the first step's factors.

    Args:
        gradients: contiguous, of one dtype; they are not changed.
    """
    copies = [gradient.detach().clone() for gradient in gradients]
    _LoneRank(compressor, copies, world_size).send()
    error = relative_error(gradients, copies)
    rank = _LoneRank(compressor, copies, world_size)
    seconds = []
    for _ in range(_WARMUP_STEPS + repeats):
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.copy_(gradient)
        rank.encode_seconds = rank.decode_seconds = 0.0
        rank.step()
        seconds.append((rank.encode_seconds, rank.decode_seconds))
    encode, decode = (median(column) for column in zip(*seconds[_WARMUP_STEPS:], strict=True))
    sent = rank.sent_bytes / (_WARMUP_STEPS + repeats)
    wire, raw = round(sent * world_size / (2 * (world_size - 1))), sum(gradient.nbytes for gradient in gradients)
    cost = MessageCost(raw, wire, encode, decode / (2 - 1 / world_size), error)
    is_low_rank = isinstance(compressor, LowRank)
    return CandidateCost(str(compressor), cost, cost, transport="factors" if is_low_rank else "messages")


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
        start = synchronized_time(flat)
        for bucket in torch.split(flat, bucket_numel):
            bucket.copy_(bucket.to(torch.bfloat16))
        seconds.append(synchronized_time(flat) - start)
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
