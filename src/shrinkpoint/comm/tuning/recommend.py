"""Recommendation of a compressor, measured on this machine on tensors like the user's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.base import Compressor
from shrinkpoint.comm.feedback import AQSGD, ErrorFeedback
from shrinkpoint.comm.link import Link, MessageContext
from shrinkpoint.comm.spec import as_compressor
from shrinkpoint.comm.tuning.cost_model import (
    CandidateCost,
    MessageCost,
    Parallelism,
    Recommendation,
    Schedule,
    Workload,
    rank_candidates,
)
from shrinkpoint.errors import PolicyError

CompressorOrSpec: TypeAlias = Compressor | ErrorFeedback | str
CandidateLike: TypeAlias = CompressorOrSpec | tuple[CompressorOrSpec, CompressorOrSpec]
"""A compressor for both directions, or one for each: activations, then gradients."""

DEFAULT_CANDIDATES: tuple[CandidateLike, ...] = ("bf16", "q8:64", "q4:64")
"""The most accurate first; none of them changed what models learned in our measurements."""
DTYPE_BY_NAME = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WARMUP_MESSAGES = 3


def recommend(
    shape: Sequence[int] | None = None,
    *,
    mbps: float,
    dtype: str | torch.dtype = "fp32",
    like: Tensor | tuple[Tensor, Tensor] | None = None,
    step_seconds: float | None = None,
    candidates: Sequence[CandidateLike] = DEFAULT_CANDIDATES,
    parallelism: Parallelism = "pipeline",
    world_size: int = 2,
    micro_batches: int = 1,
    overlap: bool = False,
    schedule: Schedule = "1F1B",
    duplex: bool = False,
    max_error: float | None = None,
    repeats: int = 7,
    device: torch.device | str = "cpu",
) -> Recommendation:
    """Measure candidates on this machine and recommend the one, if any, that makes a step on a link faster.

    One process measures, on one tensor: run it where the training runs, with the threads of a rank, on an idle machine.
    "off" is a common answer ("On the Utility of Gradient Compression in Distributed Training Systems", MLSys 2022).

    Args:
        shape: of the activation of one micro-batch; for ddp, of all gradients together: `(n,)`.
        dtype: "fp32", "fp16", "bf16", "fp64", or a torch dtype.
        mbps: rate of a rank's link, in Mbit/s.
        like: real values, instead of normal noise of `shape`, `dtype` and `device`: an activation, or a pair of an
            activation and its gradient. Only with them the errors are meaningful for the model.
        step_seconds: seconds of a step without communication, such as on one machine. Without it the estimates are for
            a step without computation: the largest possible gain.
        candidates: compressors, feedbacks or their specs, or pairs of one for each direction; the most accurate first.
            A later one is recommended instead of an earlier one only if it makes the step 5 % faster.
        parallelism: "pipeline" or "ddp".
        world_size: the number of stages, or of ranks.
        micro_batches: of a step, in a pipeline.
        overlap: whether a rank computes while it sends. Otherwise computing, encoding and sending are added up, as
            measured with torch's pipelines.
        schedule: of the pipeline, the closer one of "1F1B" and "GPipe".
        duplex: whether the activation and the gradient that neighbours exchange cross at the same time if they are
            uncompressed. On gloo they do not; compressed ones do.
        max_error: the largest relative error of a recommended candidate.
        repeats: timed messages of each candidate and direction.
        device: of the noise.

    Raises:
        PolicyError: neither `shape` nor `like` is given, or another argument is out of range.
    """
    compute = 0.0 if step_seconds is None else step_seconds
    workload = Workload(parallelism, mbps, compute, world_size, micro_batches, overlap, schedule, duplex)
    _check_measuring(candidates, max_error, repeats)
    tensors = like if isinstance(like, tuple) else (_noise_tensor(shape, dtype, device) if like is None else like,) * 2
    costs = [_measure_candidate(candidate, tensors, parallelism, repeats) for candidate in candidates]
    description = " and ".join(dict.fromkeys(_describe_tensor(x) for x in tensors))
    sizes = tensors[0].nbytes, tensors[1].nbytes
    return rank_candidates(workload, costs, uncompressed=sizes, max_error=max_error, description=description)


def _check_measuring(candidates: Sequence[CandidateLike], max_error: float | None, repeats: int) -> None:
    """Raise a PolicyError if an argument of `recommend` about measuring is out of range."""
    validate.check_int("recommend(repeats=...)", repeats)
    if max_error is not None:
        validate.check_float("recommend(max_error=...)", max_error, exclusive=False, do="leave it out")
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        raise validate.argument_error(
            "recommend(candidates=...)", candidates, "a list of compressors", f"write [{candidates!r}]"
        )


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
        times = [_synchronized_time(tensor)]
        wire = sender.pack(tensor, context)
        times.append(_synchronized_time(tensor))
        receiver.unpack(wire, out, context)
        times.append(_synchronized_time(tensor))
        seconds.append((times[1] - times[0], times[2] - times[1]))
        error = _norm_error(tensor, out) if index == 0 else error
    encode, decode = (median(column) for column in zip(*seconds[_WARMUP_MESSAGES:], strict=True))
    return MessageCost(tensor.nbytes, wire.numel(), encode, decode, error), receiver


def _measure_candidate(
    candidate: CandidateLike, tensors: tuple[Tensor, Tensor], parallelism: Parallelism, repeats: int
) -> CandidateCost:
    forward_compressor, backward_compressor = candidate if isinstance(candidate, tuple) else (candidate, candidate)
    context = MessageContext(ids=_row_ids(tensors[0]))
    forward, link = _measure_link(forward_compressor, tensors[0], context, repeats)
    if parallelism == "ddp" or (str(forward_compressor) == str(backward_compressor) and tensors[0] is tensors[1]):
        return CandidateCost(str(forward_compressor), forward, forward)
    backward = measure_cost(
        backward_compressor,
        tensors[1],
        context=MessageContext(ids=_row_ids(tensors[1]), indices=link.indices(context)),
        repeats=repeats,
    )
    return CandidateCost(
        str(forward_compressor)
        if str(forward_compressor) == str(backward_compressor)
        else f"{forward_compressor} / {backward_compressor}",
        forward,
        backward,
    )


def _row_ids(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.shape[0] if tensor.dim() else 1)


def _norm_error(tensor: Tensor, out: Tensor) -> float:
    norm = tensor.double().norm()
    error_norm = (tensor.double() - out.double()).norm()
    return float(error_norm / norm) if norm > 0 or error_norm > 0 else 0.0


def _noise_tensor(shape: Sequence[int] | None, dtype: str | torch.dtype, device: torch.device | str) -> Tensor:
    resolved = DTYPE_BY_NAME.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise PolicyError("recommend(dtype=...)", found=str(dtype), expected=", ".join(DTYPE_BY_NAME))
    if shape is None:
        raise PolicyError("recommend()", found="no shape", do="give the shape of what is sent, or tensors as like=...")
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tuple(shape), generator=generator).to(device, resolved)


def _describe_tensor(tensor: Tensor) -> str:
    names = {dtype: name for name, dtype in DTYPE_BY_NAME.items()}
    return f"{' x '.join(map(str, tensor.shape)) or 'one number'} {names.get(tensor.dtype, tensor.dtype)}"


def _synchronized_time(tensor: Tensor) -> float:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
