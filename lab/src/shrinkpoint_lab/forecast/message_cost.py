"""The cost of one message of a pipeline, measured in one process: bytes, seconds at both ends, and the error."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor

from shrinkpoint.comm.aqsgd import AQSGD
from shrinkpoint.comm.compressors.base import Compressor
from shrinkpoint.comm.error_feedback import ErrorFeedback
from shrinkpoint.comm.link import Link, MessageContext
from shrinkpoint.comm.low_rank import LowRank
from shrinkpoint.comm.recommendation import relative_error, synchronized_time
from shrinkpoint.comm.spec import as_compressor
from shrinkpoint_lab.forecast.step_model import CandidateCost, MessageCost

CompressorOrSpec: TypeAlias = Compressor | ErrorFeedback | LowRank | str
CandidateLike: TypeAlias = CompressorOrSpec | tuple[CompressorOrSpec, CompressorOrSpec]
"""A compressor for both directions, or one for each: activations, then gradients. Of ddp also a low rank."""
_WARMUP_MESSAGES = 3


def measure_cost(
    compressor: CompressorOrSpec, tensor: Tensor, *, context: MessageContext | None = None, repeats: int = 7
) -> MessageCost:
    """Measure the cost of sending a tensor: medians of `repeats` messages through both ends of a link, after warm-up.

    The error is that of the first message: feedback has no memory by then, and would approach the tensor later. With
    AQ-SGD, whose first message may be uncompressed, it is that of its compressor alone, and the bytes are those of
    cached samples.

    Args:
        context: given to both ends; without it, the rows of the tensor are the samples 0, 1, 2, ...
    """
    return _measure_link(compressor, tensor, context or MessageContext(ids=_row_ids(tensor)), repeats)[0]


def _measure_link(
    compressor: CompressorOrSpec, tensor: Tensor, context: MessageContext, repeats: int
) -> tuple[MessageCost, Link]:
    parsed = as_compressor(compressor)
    if isinstance(parsed, AQSGD):  # whose first visits may be uncompressed, unlike later ones
        cost, link = _time_messages(replace(parsed, warmup=min(parsed.warmup, 1)), tensor, context, repeats)
        return replace(cost, error=_time_messages(parsed.compressor, tensor, context, 1)[0].error), link
    return _time_messages(parsed, tensor, context, repeats)


def _time_messages(
    compressor: Compressor | ErrorFeedback, tensor: Tensor, context: MessageContext, repeats: int
) -> tuple[MessageCost, Link]:
    sender, receiver = (Link(compressor, name="recommend", sample_every=0) for _ in range(2))
    tensor, out, error, seconds = tensor.detach(), torch.empty_like(tensor, requires_grad=False), 0.0, []
    for index in range(_WARMUP_MESSAGES + repeats):
        times = [synchronized_time(tensor.device)]
        wire = sender.pack(tensor, context)
        times.append(synchronized_time(tensor.device))
        receiver.unpack(wire, out, context)
        times.append(synchronized_time(tensor.device))
        seconds.append((times[1] - times[0], times[2] - times[1]))
        error = relative_error([tensor], [out]) if index == 0 else error
    encode, decode = (median(column) for column in zip(*seconds[_WARMUP_MESSAGES:], strict=True))
    return MessageCost(tensor.nbytes, wire.numel(), encode, decode, error), receiver


def measure_candidate(candidate: CandidateLike, tensors: tuple[Tensor, Tensor], repeats: int) -> CandidateCost:
    """The cost of an activation and of its gradient, which may be one tensor, with a compressor or a pair of them."""
    pair = candidate if isinstance(candidate, tuple) else (candidate, candidate)
    names = [str(compressor) for compressor in pair]
    context = MessageContext(ids=_row_ids(tensors[0]))
    forward, link = _measure_link(pair[0], tensors[0], context, repeats)
    if names[0] == names[1] and tensors[0] is tensors[1]:
        return CandidateCost(names[0], forward, forward)
    context = MessageContext(ids=_row_ids(tensors[1]), indices=link.indices(context))
    backward = measure_cost(pair[1], tensors[1], context=context, repeats=repeats)
    return CandidateCost(" / ".join(dict.fromkeys(names)), forward, backward)


def _row_ids(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.shape[0] if tensor.dim() else 1)
