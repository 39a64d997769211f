"""Recommendation of a compressor: costs of messages, measured on this machine, and a model of a step on a link."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.aqsgd import AQSGD
from shrinkpoint.comm.compressors.base import Compressor
from shrinkpoint.comm.compressors.layout import DTYPE_BY_NAME
from shrinkpoint.comm.error_feedback import ErrorFeedback
from shrinkpoint.comm.link import Link, MessageContext
from shrinkpoint.comm.spec import as_compressor
from shrinkpoint.errors import PolicyError

Parallelism = Literal["pipeline", "ddp"]
"""What is sent: activations and their gradients between stages, or gradients that are averaged over ranks."""
Schedule = Literal["1F1B", "GPipe"]
NO_COMPRESSION = "off"
MIN_GAIN = 0.05
"""The relative gain from which a candidate is preferred: measured errors of the model were of this size."""


@dataclass(frozen=True)
class MessageCost:
    """The cost of one message: bytes of the tensor and of the message, seconds of encoding and decoding.

    The error is relative: the Euclidean norm of the difference over that of the tensor.
    """

    raw: int
    wire: int
    encode: float = 0.0
    decode: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class CandidateCost:
    """The cost of a candidate: in a pipeline of an activation and its gradient, in ddp of all gradients, twice."""

    name: str
    forward: MessageCost
    backward: MessageCost

    @property
    def pair(self) -> tuple[MessageCost, MessageCost]:
        return self.forward, self.backward


@dataclass(frozen=True)
class Workload:
    """A training step without its compressors.

    Attributes:
        mbps: rate of a rank's link in each direction, in Mbit/s.
        compute: seconds of a step without communication, waiting for other stages included.
        world_size: the number of stages of a pipeline, or of ranks.
        micro_batches: of a step; each crosses every boundary once in each direction.
        overlap: whether a rank sends while it computes and encodes. Schedules of torch's pipelines mostly wait for
            their messages, and compressed gradients are sent when they are complete. torch's own averaging is
            overlapped in any case.
        schedule: "1F1B": neighbours exchange an activation and a gradient, and then compute; "GPipe": all activations
            are sent first. Others are between the two.
        duplex: whether both messages of an exchange cross at the same time if they are uncompressed. On gloo one waits
            for the other: the notice that a rank is ready to receive is queued behind its sends. Compressed messages
            always cross at the same time.
    """

    parallelism: Parallelism
    mbps: float
    compute: float = 0.0
    world_size: int = 2
    micro_batches: int = 1
    overlap: bool = False
    schedule: Schedule = "1F1B"
    duplex: bool = False

    def __post_init__(self) -> None:
        validate.check_choice("recommend, parallelism", self.parallelism, get_args(Parallelism))
        advice = "give the rate of a rank's link, in millions of bits a second"
        validate.check_float("recommend, mbps", self.mbps, do=advice)
        validate.check_float("recommend, compute", self.compute, exclusive=False, do="give the seconds of a step")
        validate.check_int("recommend, world_size", self.world_size, minimum=2, do="give two ranks or more")
        validate.check_int("recommend, micro_batches", self.micro_batches)
        validate.check_choice("recommend, schedule", self.schedule, get_args(Schedule))
        for name in ("overlap", "duplex"):
            validate.check_bool(f"recommend, {name}", getattr(self, name))

    def nbytes(self, forward: float, backward: float) -> float:
        """Bytes of a step, from those of one message of each direction: in a pipeline over one boundary, in ddp from
        each rank, which sends twice a fraction (world_size - 1) / world_size."""
        if self.parallelism == "pipeline":
            return self.micro_batches * (forward + backward)
        return 2 * forward * (self.world_size - 1) / self.world_size

    def transfer_seconds(self, forward: float, backward: float, *, is_encoded: bool = False) -> float:
        """Seconds of a step spent on transfers, from the bytes of one message of each direction.

        In a pipeline the first micro-batch crosses all boundaries in both directions, and each further one follows at
        the interval of a middle stage, if there is one, which exchanges with one neighbour after the other.
        """
        if self.parallelism == "ddp":
            return 8 * self.nbytes(forward, backward) / (self.mbps * 1e6)
        round_trip, interval = forward + backward, forward + backward
        if self.schedule == "1F1B":
            is_duplex = is_encoded or self.duplex
            interval = (max(forward, backward) if is_duplex else round_trip) * min(self.world_size - 1, 2)
        return 8 * ((self.world_size - 1) * round_trip + (self.micro_batches - 1) * interval) / (self.mbps * 1e6)

    def codec_seconds(self, candidate: CandidateCost) -> float:
        """Seconds of a step spent on encoding and decoding while others wait."""
        forward, backward = candidate.pair
        if self.parallelism == "ddp":  # one encode of each hop; decodes of others' shards, then of all sums
            return forward.encode + forward.decode * (2 - 1 / self.world_size)
        first_stage, last_stage = forward.encode + backward.decode, forward.decode + backward.encode
        interval = max(first_stage, last_stage) if self.world_size == 2 else first_stage + last_stage
        return (self.world_size - 1) * (first_stage + last_stage) + (self.micro_batches - 1) * interval

    def uncompressed_seconds(self, forward: int, backward: int) -> float:
        """Seconds of a step without compression, from the bytes of one message of each direction."""
        wire, is_hidden = self.transfer_seconds(forward, backward), self.overlap or self.parallelism == "ddp"
        return max(self.compute, wire) if is_hidden else self.compute + wire

    def step_seconds(self, candidate: CandidateCost) -> float:
        """Seconds of a step with compression."""
        wire = self.transfer_seconds(candidate.forward.wire, candidate.backward.wire, is_encoded=True)
        work = self.compute + self.codec_seconds(candidate)
        return max(work, wire) if self.overlap else work + wire

    def break_even(self, candidate: CandidateCost) -> float:
        """The rate in Mbit/s below which compressed messages arrive sooner than uncompressed ones.

        For one direction with speeds `enc` and `dec` of raw bytes and the ratio r, (1 - 1/r) / (1/enc + 1/dec).
        """
        saved_bytes = self.nbytes(*(cost.raw - cost.wire for cost in candidate.pair))
        pipeline_seconds = self.micro_batches * sum(cost.encode + cost.decode for cost in candidate.pair)
        seconds = self.codec_seconds(candidate) if self.parallelism == "ddp" else pipeline_seconds
        if saved_bytes <= 0:
            return 0.0
        return 8 * saved_bytes / seconds / 1e6 if seconds else math.inf


@dataclass(frozen=True)
class Estimate:
    """The predicted step of one candidate.

    Attributes:
        name: the spec of the candidate.
        nbytes: bytes of a step; in a pipeline over one boundary, in ddp from each rank.
        ratio: bytes without compression over `nbytes`.
        error: the larger relative error of both directions.
        codec: seconds of a step spent on encoding and decoding.
        seconds: of a step.
        gain: seconds without compression over `seconds`.
        break_even: rate in Mbit/s below which it pays without overlap.
    """

    name: str
    nbytes: float
    ratio: float
    error: float
    codec: float
    seconds: float
    gain: float
    break_even: float


@dataclass(frozen=True)
class Recommendation:
    """The result of `recommend`, which prints as a table.

    Attributes:
        best: the spec of a compressor, of a pair of them ("forward / backward"), or "off".
        estimates: of all candidates and of "off", the fastest first.
        workload: that the estimates are for.
        description: of the tensors.
    """

    best: str
    estimates: tuple[Estimate, ...]
    workload: Workload
    description: str = ""

    def estimate(self, name: str) -> Estimate:
        """Return the estimate of a candidate; KeyError if there is none of this name."""
        return {row.name: row for row in self.estimates}[name]

    @property
    def pays(self) -> bool:
        return self.best != NO_COMPRESSION

    def table(self) -> str:
        """The estimates as an aligned text table with a header."""
        head = ("compressor", "MB a step", "ratio", "error", "codec s", "step s", "gain", "pays below Mbit/s")
        cells = [head, *(_format_cells(row) for row in self.estimates)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
        return "\n".join("  ".join(line) for line in lines)

    def __str__(self) -> str:
        return "\n".join((self._headline(), self.table(), self._verdict()))

    def _headline(self) -> str:
        workload, is_pipeline = self.workload, self.workload.parallelism == "pipeline"
        size = f"{workload.world_size} {'stages' if is_pipeline else 'ranks'}"
        batches = f"{workload.micro_batches} micro-batches" if is_pipeline else ""
        rate, compute = f"{workload.mbps:g} Mbit/s", f"{workload.compute:.4g} s of computing"
        return ", ".join(filter(None, (self.description, workload.parallelism, size, batches, rate, compute)))

    def _verdict(self) -> str:
        if not self.pays:
            seconds = self.estimate(NO_COMPRESSION).seconds
            return f"best: off. Nothing is {MIN_GAIN:.0%} faster than a step of {seconds:.4g} s without"
        row = self.estimate(self.best)
        return f"best: {row.name}, {row.gain:.2f} times as fast as without"


def rank_candidates(
    workload: Workload,
    candidates: Sequence[CandidateCost],
    *,
    uncompressed: tuple[int, int],
    max_error: float | None = None,
    description: str = "",
) -> Recommendation:
    """Predict the step of each candidate, and recommend one of them or "off".

    A later candidate is recommended instead of an earlier one, and the first instead of "off", only if it makes the
    step 5 % faster: fewer bytes alone do not count.

    Args:
        candidates: the most accurate first.
        uncompressed: bytes of one uncompressed message of each direction.
        max_error: a candidate with a larger error, or nan, is listed and never recommended.
        description: of the tensors.
    """
    nbytes, seconds = workload.nbytes(*uncompressed), workload.uncompressed_seconds(*uncompressed)
    off = Estimate(NO_COMPRESSION, nbytes, 1.0, 0.0, 0.0, seconds, 1.0, math.inf)
    rows = [_make_estimate(workload, candidate, off) for candidate in candidates]
    best = off
    for row in rows:
        is_allowed = max_error is None or row.error <= max_error
        if is_allowed and row.seconds < best.seconds * (1 - MIN_GAIN):
            best = row
    return Recommendation(best.name, tuple(sorted([off, *rows], key=lambda row: row.seconds)), workload, description)


def _make_estimate(workload: Workload, candidate: CandidateCost, off: Estimate) -> Estimate:
    nbytes = workload.nbytes(candidate.forward.wire, candidate.backward.wire)
    codec, seconds = workload.codec_seconds(candidate), workload.step_seconds(candidate)
    errors = [side.error for side in candidate.pair]
    error = math.nan if any(map(math.isnan, errors)) else max(errors)
    ratio = off.nbytes / nbytes if nbytes else 1.0
    gain = off.seconds / seconds if seconds else 1.0
    return Estimate(candidate.name, nbytes, ratio, error, codec, seconds, gain, workload.break_even(candidate))


def _format_cells(row: Estimate) -> tuple[str, ...]:
    limit = "" if row.name == NO_COMPRESSION else f"{row.break_even:.0f}"
    figures = (f"{row.nbytes / 1e6:.3f}", f"{row.ratio:.2f}", f"{row.error:.4f}", f"{row.codec:.4f}")
    return (row.name, *figures, f"{row.seconds:.4f}", f"{row.gain:.2f}", limit)


CompressorOrSpec: TypeAlias = Compressor | ErrorFeedback | str
CandidateLike: TypeAlias = CompressorOrSpec | tuple[CompressorOrSpec, CompressorOrSpec]
"""A compressor for both directions, or one for each: activations, then gradients."""

DEFAULT_CANDIDATES: tuple[CandidateLike, ...] = ("bf16", "q8:64", "q4:64")
"""The most accurate first; none of them changed what models learned in our measurements."""
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
    validate.check_int("recommend(repeats=...)", repeats)
    if max_error is not None:
        validate.check_float("recommend(max_error=...)", max_error, exclusive=False, do="leave it out")
    _check_candidates(candidates)
    example = _noise_tensor(shape, dtype, device) if like is None else like
    tensors = example if isinstance(example, tuple) else (example, example)
    costs = [_measure_candidate(candidate, tensors, parallelism, repeats) for candidate in candidates]
    description = " and ".join(dict.fromkeys(_describe_tensor(x) for x in tensors))
    sizes = tensors[0].nbytes, tensors[1].nbytes
    return rank_candidates(workload, costs, uncompressed=sizes, max_error=max_error, description=description)


def _check_candidates(candidates: Sequence[CandidateLike]) -> None:
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        where, advice = "recommend(candidates=...)", f"write [{candidates!r}]"
        raise validate.argument_error(where, candidates, "a list of compressors", advice)


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
    pair = candidate if isinstance(candidate, tuple) else (candidate, candidate)
    names = [str(compressor) for compressor in pair]
    context = MessageContext(ids=_row_ids(tensors[0]))
    forward, link = _measure_link(pair[0], tensors[0], context, repeats)
    if parallelism == "ddp" or (names[0] == names[1] and tensors[0] is tensors[1]):
        return CandidateCost(names[0], forward, forward)
    context = MessageContext(ids=_row_ids(tensors[1]), indices=link.indices(context))
    backward = measure_cost(pair[1], tensors[1], context=context, repeats=repeats)
    return CandidateCost(" / ".join(dict.fromkeys(names)), forward, backward)


def _row_ids(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.shape[0] if tensor.dim() else 1)


def _norm_error(tensor: Tensor, out: Tensor) -> float:
    norm = tensor.double().norm()
    error_norm = (tensor.double() - out.double()).norm()
    return float(error_norm / norm) if norm > 0 or error_norm > 0 else 0.0


def _noise_tensor(shape: Sequence[int] | None, dtype: str | torch.dtype, device: torch.device | str) -> Tensor:
    resolved = DTYPE_BY_NAME.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        do = "name the dtype of what is sent"
        raise PolicyError("recommend(dtype=...)", found=str(dtype), expected=", ".join(DTYPE_BY_NAME), do=do)
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
