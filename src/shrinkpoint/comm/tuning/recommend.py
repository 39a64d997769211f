"""What to send, found by running the operators here, on tensors like the user's."""

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
"""One way for both directions, or one for each: activations, then gradients."""

DEFAULT_CANDIDATES: tuple[CandidateLike, ...] = ("bf16", "q8:64", "q4:64")
"""From the most careful on; none of them was seen to change what a model learns."""
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
    """Run the candidates here and say which of them, if any, makes a step on such a link faster.

    It is one process that measures, on one tensor: run it where the training runs, with as many threads as a rank has,
    and while nothing else does. That compression does not pay is a common answer ("On the Utility of Gradient
    Compression in Distributed Training Systems", MLSys 2022).

    Args:
        shape: of the activation of one micro-batch; of ddp, of all gradients together: `(n,)`.
        dtype: "fp32", "fp16", "bf16", "fp64", or torch's own.
        mbps: millions of bits a second that a rank's link carries.
        like: real values, instead of normal noise of `shape`, `dtype` and `device`: an activation, or a pair of one and
            its gradient. Only with them do the errors say something about the model.
        step_seconds: what a step takes where nothing need be sent, say in one machine. Without it the answer is for
            a step that computes nothing: the most that there is to gain.
        candidates: operators, feedback or their specs, or pairs of one for each direction; the most careful first. A
            later one is chosen over an earlier one only where it makes the step 5 % faster.
        world_size: stages, or ranks.
        micro_batches: of a step, in a pipeline.
        overlap: whether a rank computes while it sends. Otherwise computing, encoding and sending are added up, as
            torch's pipelines were seen to do.
        schedule: of the pipeline, "1F1B" or "GPipe", whichever is nearer.
        duplex: whether the activation and the gradient that neighbours exchange cross at the same time where they are
            not encoded. On gloo they do not; encoded ones do.
        max_error: what loses more of a tensor's norm than that is not chosen.

    Raises:
        PolicyError: there is neither shape nor `like`, or another argument makes no sense.
    """
    compute = 0.0 if step_seconds is None else step_seconds
    load = Workload(parallelism, mbps, compute, world_size, micro_batches, overlap, schedule, duplex)
    validate.check_int("advise(repeats=...)", repeats)
    if max_error is not None:
        validate.check_float("advise(most_error=...)", max_error, exclusive=False, do="leave it out")
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        raise validate.argument_error(
            "advise(candidates=...)", candidates, "a list of operators", f"write [{candidates!r}]"
        )
    pair = like if isinstance(like, tuple) else (_noise_tensor(shape, dtype, device) if like is None else like,) * 2
    measured = [_measure_candidate(one, pair, parallelism, repeats) for one in candidates]
    about = " and ".join(dict.fromkeys(_describe_tensor(x) for x in pair))
    return rank_candidates(
        load, measured, uncompressed=(pair[0].nbytes, pair[1].nbytes), max_error=max_error, description=about
    )


def measure_cost(
    compressor: CompressorOrSpec, x: Tensor, *, context: MessageContext | None = None, repeats: int = 7
) -> MessageCost:
    """What it takes to send x: medians of `repeats` messages through both ends of a link, after three that warm up.

    The error is that of the first message: a feedback remembers nothing by then, and x would come ever closer. Of
    AQ-SGD, whose first message may be exact, it is that of its operator alone, and the bytes are those of samples that
    are known.

    Args:
        context: given to both ends; without it, the rows of x are the samples 0, 1, 2, ...
    """
    return _measure_link(compressor, x, context or MessageContext(ids=_row_ids(x)), repeats)[0]


def _measure_link(
    compressor: CompressorOrSpec, x: Tensor, context: MessageContext, repeats: int
) -> tuple[MessageCost, Link]:
    given = as_compressor(compressor)
    if isinstance(given, AQSGD):  # whose first visits may be exact, and tell nothing of those after them
        found, link = _time_messages(replace(given, warmup=min(given.warmup, 1)), x, context, repeats)
        return replace(found, error=_time_messages(given.compressor, x, context, 1)[0].error), link
    return _time_messages(given, x, context, repeats)


def _time_messages(
    compressor: Compressor | ErrorFeedback, x: Tensor, context: MessageContext, repeats: int
) -> tuple[MessageCost, Link]:
    sender, receiver = (Link(compressor, name="advise", sample_every=0) for _ in range(2))
    x, out, error, seconds = x.detach(), torch.empty_like(x, requires_grad=False), 0.0, []
    for turn in range(_WARMUP_MESSAGES + repeats):
        marks = [_synchronized_time(x)]
        wire = sender.pack(x, context)
        marks.append(_synchronized_time(x))
        receiver.unpack(wire, out, context)
        marks.append(_synchronized_time(x))
        seconds.append((marks[1] - marks[0], marks[2] - marks[1]))
        error = _norm_error(x, out) if turn == 0 else error
    encode, decode = (median(column) for column in zip(*seconds[_WARMUP_MESSAGES:], strict=True))
    return MessageCost(x.nbytes, wire.numel(), encode, decode, error), receiver


def _measure_candidate(
    candidate: CandidateLike, tensors: tuple[Tensor, Tensor], parallelism: Parallelism, repeats: int
) -> CandidateCost:
    there, back = candidate if isinstance(candidate, tuple) else (candidate, candidate)
    at = MessageContext(ids=_row_ids(tensors[0]))
    forward, link = _measure_link(there, tensors[0], at, repeats)
    if parallelism == "ddp" or (str(there) == str(back) and tensors[0] is tensors[1]):
        return CandidateCost(str(there), forward, forward)
    backward = measure_cost(
        back, tensors[1], context=MessageContext(ids=_row_ids(tensors[1]), indices=link.indices(at)), repeats=repeats
    )
    return CandidateCost(str(there) if str(there) == str(back) else f"{there} / {back}", forward, backward)


def _row_ids(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0] if x.dim() else 1)


def _norm_error(x: Tensor, out: Tensor) -> float:
    whole = x.double().norm()
    lost = (x.double() - out.double()).norm()
    return float(lost / whole) if whole > 0 or lost > 0 else 0.0


def _noise_tensor(shape: Sequence[int] | None, dtype: str | torch.dtype, device: torch.device | str) -> Tensor:
    found = DTYPE_BY_NAME.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PolicyError("advise(dtype=...)", found=str(dtype), expected=", ".join(DTYPE_BY_NAME))
    if shape is None:
        raise PolicyError("advise()", found="no shape", do="give the shape of what is sent, or tensors as like=...")
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tuple(shape), generator=generator).to(device, found)


def _describe_tensor(x: Tensor) -> str:
    names = {dtype: name for name, dtype in DTYPE_BY_NAME.items()}
    return f"{' x '.join(map(str, x.shape)) or 'one number'} {names.get(x.dtype, x.dtype)}"


def _synchronized_time(x: Tensor) -> float:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
