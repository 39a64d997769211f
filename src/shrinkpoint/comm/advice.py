"""What to send, found by running the operators here, on tensors like the user's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor

from shrinkpoint import arguments
from shrinkpoint.comm.feedback import AQSGD, Feedback
from shrinkpoint.comm.forecast import Advice, Candidate, Cost, Kind, Load, Schedule, judge
from shrinkpoint.comm.link import At, Link
from shrinkpoint.comm.operators.base import Operator
from shrinkpoint.comm.spec import made
from shrinkpoint.errors import PolicyError

How: TypeAlias = Operator | Feedback | str
Tried: TypeAlias = How | tuple[How, How]
"""One way for both directions, or one for each: activations, then gradients."""

CANDIDATES: tuple[Tried, ...] = ("bf16", "q8:64", "q4:64")
"""From the most careful on; none of them was seen to change what a model learns."""
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WARM = 3


def advise(
    shape: Sequence[int] | None = None,
    *,
    mbps: float,
    dtype: str | torch.dtype = "fp32",
    like: Tensor | tuple[Tensor, Tensor] | None = None,
    step_seconds: float | None = None,
    candidates: Sequence[Tried] = CANDIDATES,
    kind: Kind = "pipeline",
    world: int = 2,
    micro_batches: int = 1,
    overlap: bool = False,
    schedule: Schedule = "1F1B",
    duplex: bool = False,
    most_error: float | None = None,
    repeats: int = 7,
    device: torch.device | str = "cpu",
) -> Advice:
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
        world: stages, or ranks.
        micro_batches: of a step, in a pipeline.
        overlap: whether a rank computes while it sends. Otherwise computing, encoding and sending are added up, as
            torch's pipelines were seen to do.
        schedule: of the pipeline, "1F1B" or "GPipe", whichever is nearer.
        duplex: whether the activation and the gradient that neighbours exchange cross at the same time where they are
            not encoded. On gloo they do not; encoded ones do.
        most_error: what loses more of a tensor's norm than that is not chosen.

    Raises:
        PolicyError: there is neither shape nor `like`, or another argument makes no sense.
    """
    compute = 0.0 if step_seconds is None else step_seconds
    load = Load(kind, mbps, compute, world, micro_batches, overlap, schedule, duplex)
    arguments.whole("advise(repeats=...)", repeats)
    if most_error is not None:
        arguments.number("advise(most_error=...)", most_error, above=False, do="leave it out")
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        raise arguments.wrong("advise(candidates=...)", candidates, "a list of operators", f"write [{candidates!r}]")
    pair = like if isinstance(like, tuple) else (_noise(shape, dtype, device) if like is None else like,) * 2
    measured = [_candidate(one, pair, kind, repeats) for one in candidates]
    about = " and ".join(dict.fromkeys(_about(x) for x in pair))
    return judge(load, measured, plain=(pair[0].nbytes, pair[1].nbytes), most_error=most_error, about=about)


def cost(how: How, x: Tensor, *, at: At | None = None, repeats: int = 7) -> Cost:
    """What it takes to send x: medians of `repeats` messages through both ends of a link, after three that warm up.

    The error is that of the first message: a feedback remembers nothing by then, and x would come ever closer. Of
    AQ-SGD, whose first message may be exact, it is that of its operator alone, and the bytes are those of samples that
    are known.

    Args:
        at: given to both ends; without it, the rows of x are the samples 0, 1, 2, ...
    """
    return _sent(how, x, at or At(ids=_rows(x)), repeats)[0]


def _sent(how: How, x: Tensor, at: At, repeats: int) -> tuple[Cost, Link]:
    given = made(how)
    if isinstance(given, AQSGD):  # whose first visits may be exact, and tell nothing of those after them
        found, link = _timed(replace(given, warmup=min(given.warmup, 1)), x, at, repeats)
        return replace(found, error=_timed(given.operator, x, at, 1)[0].error), link
    return _timed(given, x, at, repeats)


def _timed(given: Operator | Feedback, x: Tensor, at: At, repeats: int) -> tuple[Cost, Link]:
    sender, receiver = (Link(given, name="advise", sample_every=0) for _ in range(2))
    x, out, error, seconds = x.detach(), torch.empty_like(x, requires_grad=False), 0.0, []
    for turn in range(_WARM + repeats):
        marks = [_now(x)]
        wire = sender.pack(x, at)
        marks.append(_now(x))
        receiver.unpack(wire, out, at)
        marks.append(_now(x))
        seconds.append((marks[1] - marks[0], marks[2] - marks[1]))
        error = _error(x, out) if turn == 0 else error
    encode, decode = (median(column) for column in zip(*seconds[_WARM:], strict=True))
    return Cost(x.nbytes, wire.numel(), encode, decode, error), receiver


def _candidate(one: Tried, pair: tuple[Tensor, Tensor], kind: Kind, repeats: int) -> Candidate:
    there, back = one if isinstance(one, tuple) else (one, one)
    at = At(ids=_rows(pair[0]))
    forward, link = _sent(there, pair[0], at, repeats)
    if kind == "ddp" or (str(there) == str(back) and pair[0] is pair[1]):
        return Candidate(str(there), forward, forward)
    backward = cost(back, pair[1], at=At(ids=_rows(pair[1]), places=link.places(at)), repeats=repeats)
    return Candidate(str(there) if str(there) == str(back) else f"{there} / {back}", forward, backward)


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0] if x.dim() else 1)


def _error(x: Tensor, out: Tensor) -> float:
    whole = x.double().norm()
    lost = (x.double() - out.double()).norm()
    return float(lost / whole) if whole > 0 or lost > 0 else 0.0


def _noise(shape: Sequence[int] | None, dtype: str | torch.dtype, device: torch.device | str) -> Tensor:
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PolicyError("advise(dtype=...)", found=str(dtype), expected=", ".join(DTYPES))
    if shape is None:
        raise PolicyError("advise()", found="no shape", do="give the shape of what is sent, or tensors as like=...")
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tuple(shape), generator=generator).to(device, found)


def _about(x: Tensor) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return f"{' x '.join(map(str, x.shape)) or 'one number'} {names.get(x.dtype, x.dtype)}"


def _now(x: Tensor) -> float:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
