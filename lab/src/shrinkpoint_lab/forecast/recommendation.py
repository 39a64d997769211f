"""Recommendation of a compressor: costs of messages, measured on this machine, and a model of a step on a link."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.layout import DTYPE_BY_NAME
from shrinkpoint.comm.gradient_layout import SEGMENT_NUMEL
from shrinkpoint.comm.low_rank import LowRank
from shrinkpoint.comm.moment_steps import MomentSteps
from shrinkpoint.comm.recommendation import DEFAULT_CANDIDATES, MIN_GAIN, NO_COMPRESSION, TORCH_BF16_HOOK
from shrinkpoint.comm.spec import parse
from shrinkpoint.errors import PolicyError
from shrinkpoint_lab.forecast.average_cost import measure_average, measure_torch_hook, send_window
from shrinkpoint_lab.forecast.message_cost import CandidateLike, measure_candidate
from shrinkpoint_lab.forecast.step_model import CandidateCost, Parallelism, Schedule, Workload


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
        rate += f" and {1000 * workload.latency:g} ms" if workload.latency else ""
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
    step 5% faster: fewer bytes alone do not count.

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


Shape: TypeAlias = Sequence[int]

PIPELINE_CANDIDATES: tuple[CandidateLike, ...] = tuple(x for x in DEFAULT_CANDIDATES if x != TORCH_BF16_HOOK)


def recommend(
    shape: Shape | Sequence[Shape] | None = None,
    *,
    mbps: float,
    dtype: str | torch.dtype = "fp32",
    like: Tensor | Sequence[Tensor] | None = None,
    step_seconds: float | None = None,
    candidates: Sequence[CandidateLike] | None = None,
    parallelism: Parallelism = "pipeline",
    world_size: int = 2,
    micro_batches: int = 1,
    overlap: bool = False,
    schedule: Schedule = "1F1B",
    duplex: bool = False,
    latency_ms: float = 0.0,
    bucket_mb: float = 25,
    max_error: float | None = None,
    repeats: int = 7,
    device: torch.device | str = "cpu",
) -> Recommendation:
    """Measure candidates on this machine and recommend the one, if any, that makes a step on a link faster.

    One process measures, on one tensor: run it where the training runs, with the threads of a rank, on an idle machine.
    "off" is a common answer ("On the Utility of Gradient Compression in Distributed Training Systems", MLSys 2022).

    Args:
        shape: of the activation of one micro-batch; for ddp, of all gradients together, `(n,)`, or a list of the shapes
            of all parameters, which a low rank needs.
        dtype: "fp32", "fp16", "bf16", "fp64", or a torch dtype.
        mbps: rate of a rank's link, in Mbit/s.
        like: real values, instead of normal noise of `shape`, `dtype` and `device`: an activation, or a pair of an
            activation and its gradient; for ddp gradients of one dtype. Only with them the errors are meaningful for
            the model.
        step_seconds: seconds of a step of all ranks on links that cost nothing, such as inside one machine. Without it
            the estimates are for a step without computation: the largest possible gain.
        candidates: compressors, feedbacks or their specs, or pairs of one for each direction; the most accurate first.
            A later one is recommended instead of an earlier one only if it makes the step 5% faster. For ddp also a
            low rank, "lowrank16(q8:64)", and "torch bf16 hook": torch's all-reduce in bfloat16. None: "bf16", "q8:64"
            and "q4:64", for ddp torch's hook before them.
        parallelism: "pipeline" or "ddp".
        world_size: the number of stages, or of ranks.
        micro_batches: of a step, in a pipeline.
        overlap: True if a stage computes while it sends. Otherwise computing, encoding and sending are added up, as
            measured with torch's pipelines. In ddp gradients are always sent beside the backward pass.
        schedule: of the pipeline, the closer one of "1F1B" and "GPipe".
        duplex: True if the activation and the gradient that neighbours exchange cross at the same time if they are
            uncompressed. On gloo they do not; compressed ones do.
        latency_ms: milliseconds that a packet takes from one rank to another: half of what `ping` says.
        bucket_mb: mebibytes of a bucket of DDP, as its `bucket_cap_mb`.
        max_error: the largest relative error of a recommended candidate.
        repeats: timed messages of each candidate and direction.
        device: of the noise.

    Raises:
        PolicyError: neither `shape` nor `like` is given, or another argument is out of range.
    """
    _check_numbers(repeats, latency_ms, bucket_mb, step_seconds=step_seconds, max_error=max_error)
    workload = Workload(
        parallelism,
        mbps,
        compute=0.0 if step_seconds is None else step_seconds,
        world_size=world_size,
        micro_batches=micro_batches,
        overlap=overlap,
        schedule=schedule,
        duplex=duplex,
        latency=latency_ms / 1000,
    )
    if candidates is None:
        candidates = DEFAULT_CANDIDATES if parallelism == "ddp" else PIPELINE_CANDIDATES
    _check_candidates(candidates, parallelism)
    tensors = [_noise_tensor(one, dtype, device) for one in _shapes(shape)] if like is None else _tensors(like)
    _check_tensors(tensors, parallelism)
    description = " and ".join(dict.fromkeys(_describe_tensor(x) for x in tensors))
    if parallelism == "ddp":
        workload, costs = measure_ddp(workload, candidates, tensors, bucket_mb * 2**20, repeats)
        numel, nbytes = sum(x.numel() for x in tensors), sum(x.nbytes for x in tensors)
        sizes = nbytes, nbytes
        description = description if len(tensors) == 1 else f"{numel} values of {len(tensors)} gradients"
    else:
        pair = tensors[0], tensors[-1]
        costs = [measure_candidate(candidate, pair, repeats) for candidate in candidates]
        sizes = pair[0].nbytes, pair[1].nbytes
    return rank_candidates(workload, costs, uncompressed=sizes, max_error=max_error, description=description)


def _check_numbers(repeats: int, latency_ms: float, bucket_mb: float, **optional: float | None) -> None:
    validate.check_int("recommend(repeats=...)", repeats)
    validate.check_float("recommend(latency_ms=...)", latency_ms, exclusive=False, do="give half of what ping says")
    validate.check_float("recommend(bucket_mb=...)", bucket_mb, do="give the bucket_cap_mb of DDP")
    for name, value in optional.items():
        if value is not None:
            validate.check_float(f"recommend({name}=...)", value, exclusive=False, do="leave it out")


def _check_candidates(candidates: Sequence[CandidateLike], parallelism: Parallelism) -> None:
    where = "recommend(candidates=...)"
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        is_one = isinstance(candidates, str) or not isinstance(candidates, Iterable)
        do = f"write [{candidates!r}]" if is_one else "pass a list of them, the most accurate first"
        raise validate.argument_error(where, candidates, "a list of compressors", do)
    for candidate in candidates:
        if isinstance(candidate, tuple) and len(candidate) != 2:
            found, do = f"a tuple of {len(candidate)}", "give one for the activation and one for its gradient"
            raise PolicyError(where, found=found, expected="compressors, or pairs of them", do=do)
    if parallelism != "ddp" and TORCH_BF16_HOOK in candidates:
        raise PolicyError(where, found=TORCH_BF16_HOOK, expected="compressors of a pipeline", do='use "bf16"')


def _shapes(shape: Shape | Sequence[Shape] | None) -> list[Shape]:
    """One shape, or those of several gradients."""
    if shape is None:
        raise PolicyError("recommend()", found="no shape", do="give the shape of what is sent, or tensors as like=...")
    where, expected, do = "recommend(shape=...)", "the sizes of a tensor, or a list of such", "give (n,) for n values"
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise validate.argument_error(where, shape, expected, do)
    several = [one for one in shape if isinstance(one, Sequence)]
    if several and len(several) < len(shape):
        raise PolicyError(where, found="sizes beside lists of sizes", expected=expected, do=do)
    shapes = several if several else [cast(Shape, shape)]
    return [[validate.check_int(where, size, minimum=0, do=do) for size in one] for one in shapes]


def _tensors(like: Tensor | Sequence[Tensor]) -> list[Tensor]:
    tensors = list(like) if isinstance(like, Sequence) else [like]
    for tensor in tensors:
        where, do = "recommend(like=...)", "give an activation, a gradient, or a list of them"
        validate.check_instance(where, tensor, Tensor, expected="tensors", do=do)
        if tensor.layout != torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
            found = f"{tensor.layout} of {tensor.dtype}".replace("torch.", "")
            raise PolicyError(where, found=found, expected="dense values of a floating-point dtype", do=do)
    return tensors


def _check_tensors(tensors: list[Tensor], parallelism: Parallelism) -> None:
    if any(x.is_meta for x in tensors):
        do = "name the device that the training has, or leave it out"
        raise PolicyError("recommend()", found="tensors on the meta device", expected="tensors with values", do=do)
    if parallelism != "ddp" and any(x.is_complex() for x in tensors):
        found, do = "complex values, which pipelines send uncompressed", "give what has a real dtype"
        raise PolicyError("recommend()", found=found, expected="values of a floating-point dtype", do=do)
    if parallelism == "ddp":
        kinds = {(x.dtype, x.device) for x in tensors}
        problem, expected = f"{len(kinds)} dtypes and devices", "gradients of one dtype and device"
        is_wrong = len(kinds) != 1
    else:
        problem, expected = f"{len(tensors)} tensors", "an activation, or a pair of one and its gradient"
        is_wrong = not 1 <= len(tensors) <= 2
    if is_wrong:
        raise PolicyError("recommend()", found=problem, expected=expected, do="ask for each of them")


def measure_ddp(
    workload: Workload, candidates: Sequence[CandidateLike], gradients: list[Tensor], bucket_bytes: float, repeats: int
) -> tuple[Workload, list[CandidateCost]]:
    """Measure the costs of candidates that average gradients, and complete the workload by what they share.

    Args:
        workload: of ddp, without `buckets`, `segments`, `all_reduce_seconds` and `window`.
        gradients: of one dtype and device; they are not changed.
        bucket_bytes: bytes of a bucket of DDP.
        repeats: timed steps of each candidate.
    """
    numel, nbytes, world_size = sum(x.numel() for x in gradients), sum(x.nbytes for x in gradients), workload.world_size
    gradients = [x.detach().contiguous() for x in gradients]
    bucket_numel = max(1, int(bucket_bytes / gradients[0].itemsize))
    all_reduce_seconds, hook_cost = measure_torch_hook(gradients, bucket_numel, repeats=repeats)
    workload = replace(
        workload,
        buckets=max(1, math.ceil(nbytes / bucket_bytes)),
        segments=max(1, math.ceil(numel / SEGMENT_NUMEL)),
        all_reduce_seconds=all_reduce_seconds,
        window=send_window(gradients[0].device),
    )
    costs = []
    for candidate in candidates:
        compressor = candidate[0] if isinstance(candidate, tuple) else candidate
        if compressor == TORCH_BF16_HOOK:
            costs.append(hook_cost)
            continue
        parsed = parse(compressor) if isinstance(compressor, str) else compressor
        if isinstance(parsed, MomentSteps):
            advice = "leave it out, and time a training with it"
            found = f"{parsed}, which needs the second moments of a training"
            raise PolicyError("recommend(candidates=...)", found=found, expected="a compressor", do=advice)
        if isinstance(parsed, LowRank):
            _check_matrices(parsed, gradients)
        costs.append(measure_average(parsed, gradients, world_size, repeats=repeats))
    return workload, costs


def _check_matrices(low_rank: LowRank, gradients: Sequence[Tensor]) -> None:
    if not any(x.dim() > 1 and low_rank.fits(x.shape[0], x.numel() // max(1, x.shape[0])) for x in gradients):
        problem, advice = f"{low_rank} and no matrix that it fits", "give the shapes of all parameters as shape=[...]"
        raise PolicyError("recommend(candidates=...)", found=problem, expected="shapes of gradients", do=advice)


def _noise_tensor(shape: Shape, dtype: str | torch.dtype, device: torch.device | str) -> Tensor:
    resolved = DTYPE_BY_NAME.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        do = "name the dtype of what is sent"
        raise PolicyError("recommend(dtype=...)", found=str(dtype), expected=", ".join(DTYPE_BY_NAME), do=do)
    generator = torch.Generator().manual_seed(0)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # no such device, or not in this build of torch
        found, do = f"{device!r:.60} ({str(error).splitlines()[0]:.80})", "leave it out: the CPU is the default"
        raise PolicyError("recommend(device=...)", found=found, expected="a device of this machine", do=do) from error
    return torch.randn(tuple(shape), generator=generator).to(device, resolved)


def _describe_tensor(tensor: Tensor) -> str:
    names = {dtype: name for name, dtype in DTYPE_BY_NAME.items()}
    return f"{' x '.join(map(str, tensor.shape)) or 'one number'} {names.get(tensor.dtype, tensor.dtype)}"
