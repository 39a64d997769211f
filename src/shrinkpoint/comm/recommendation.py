"""Recommends a compressor for the gradients of replicas: measures each candidate on the process group of the model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint import validate
from shrinkpoint.comm.compressed_allreduce import reduce_numbers
from shrinkpoint.comm.compressors.base import Compressor
from shrinkpoint.comm.ddp import DDPCompression, reduced_parameters
from shrinkpoint.comm.error_feedback import ErrorFeedback
from shrinkpoint.comm.low_rank import LowRank
from shrinkpoint.errors import PolicyError

NO_COMPRESSION = "off"
TORCH_BF16_HOOK = "torch bf16 hook"  # torch's own all-reduce of gradients in bfloat16 (`bf16_compress_hook`)
MIN_GAIN = 0.05
"""A less accurate candidate is preferred only if it is faster by this share, by which measurements differ, too."""
_MIN_ROUNDS = 3

Candidate: TypeAlias = Compressor | ErrorFeedback | LowRank | str
DEFAULT_CANDIDATES: tuple[Candidate, ...] = (TORCH_BF16_HOOK, "bf16", "q8:64", "q4:64")
"""The most accurate first. None of them changed what models learned in our measurements."""


@dataclass(frozen=True)
class Measurement:
    """The average of all gradients with one candidate.

    Attributes:
        name: spec of the candidate, "torch bf16 hook", or "off" for torch's all-reduce.
        seconds: median time of the slowest rank to encode, exchange and decode, without a backward pass beside it.
        nbytes: bytes that a rank sends.
        error: norm of the difference to the exact average, relative to the norm of the exact average.
    """

    name: str
    seconds: float
    nbytes: int
    error: float


@dataclass(frozen=True)
class Recommendation:
    """The result of `recommend`, which prints as a table.

    Attributes:
        best: spec for `compress_ddp`, "torch bf16 hook", or "off".
        measurements: of all candidates and of "off", the fastest first.
    """

    best: str
    measurements: tuple[Measurement, ...]

    @property
    def pays(self) -> bool:
        return self.best != NO_COMPRESSION

    def __str__(self) -> str:
        seconds = {row.name: row.seconds for row in self.measurements}
        cells = [("compressor", "MB sent", "error", "ms", "gain")]
        for row in self.measurements:
            gain = seconds[NO_COMPRESSION] / row.seconds if row.seconds else 1.0
            figures = f"{row.nbytes / 1e6:.3f}", f"{row.error:.4f}", f"{1000 * row.seconds:.2f}", f"{gain:.2f}"
            cells.append((row.name, *figures))
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
        return "\n".join([*lines, f"best: {self.best}"])


def recommend(
    model: DistributedDataParallel,
    candidates: Sequence[Candidate] = DEFAULT_CANDIDATES,
    *,
    max_error: float | None = None,
    seconds: float = 5.0,
) -> Recommendation:
    """Average the gradients of a model with each candidate, and name the fastest that is accurate enough.

    All ranks of the model call it, where the training will run and beside what will run there. It uses the `grad` of
    each parameter, and normal noise where there is none; only real gradients give meaningful errors:

        with model.no_sync():
            loss_of(model, batch).backward()
        advice = recommend(model, max_error=0.1)
        if advice.pays:
            compress_ddp(model, advice.best)

    Gradients, model and feedback stay as they are. The call takes three times the memory of the gradients. Every rank
    gets the same result. A backward pass hides a part of each exchange, so "off" is right wherever its exchange is
    already hidden.

    Args:
        model: without a communication hook.
        candidates: compressors, feedbacks, low ranks or their specs, and "torch bf16 hook"; the most accurate first.
            A later one is named instead of an earlier one, and the first instead of "off", only if it is 5% faster.
        max_error: largest relative error of the candidate that is named. The error of feedback and low ranks is that
            of their first step, before they have sent what it lost.
        seconds: time for all measurements together; each candidate is measured three times at least.

    Raises:
        PolicyError: another kind of model, a wrong argument, or a candidate that `compress_ddp` refuses.
    """
    validate.check_float("recommend, seconds", seconds, do="pass the seconds that it may take")
    if max_error is not None:
        validate.check_float("recommend, max_error", max_error, exclusive=False, do="leave it out for any error")
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        advice = "pass a list of them, the most accurate first"
        raise validate.argument_error("recommend, candidates", candidates, "a list of compressors", advice)
    expected, advice = "a DistributedDataParallel model", "wrap the model first"
    validate.check_instance("recommend, model", model, DistributedDataParallel, expected=expected, do=advice)
    group: dist.ProcessGroup = model.process_group
    buckets = _make_buckets(model, group.rank())
    device = buckets[0].values.device
    maxima = partial(reduce_numbers, group=group, device=device, op=dist.ReduceOp.MAX)
    exchanges: dict[str, _Exchange] = {NO_COMPRESSION: _TorchExchange(group, None)}
    for candidate in candidates:
        is_hook = candidate == TORCH_BF16_HOOK
        exchange = _TorchExchange(group, torch.bfloat16) if is_hook else _CompressedExchange(model, candidate)
        exchanges[str(candidate)] = exchange

    errors = _measure_errors(exchanges.values(), buckets)  # the first exchange of each also warms up
    times: dict[str, list[float]] = {name: [] for name in exchanges}
    end = time.monotonic() + seconds
    for rounds in range(1, 1 << 30):
        for name, exchange in exchanges.items():
            _fill(buckets)
            maxima([0.0])  # ranks start together
            start = synchronized_time(device)
            exchange.run(buckets)
            times[name].append(synchronized_time(device) - start)
        is_over = rounds >= _MIN_ROUNDS and time.monotonic() > end
        if maxima([float(is_over)])[0]:  # all ranks end in the same round
            break

    # A round takes as long as its slowest rank. Ranks may see different errors only of values that are not finite.
    slowest = maxima([second for row in times.values() for second in row])
    worst = maxima(errors)
    rows = []
    for index, (name, exchange) in enumerate(exchanges.items()):
        typical = median(slowest[index * rounds : (index + 1) * rounds])
        rows.append(Measurement(name, typical, exchange.sent_bytes(buckets), worst[index]))
    return Recommendation(choose(rows, max_error), tuple(sorted(rows, key=lambda row: row.seconds)))


def choose(rows: Sequence[Measurement], max_error: float | None) -> str:
    """Name of the fastest of those that are accurate enough.

    Args:
        rows: "off", and then the most accurate first.
    """
    best = rows[0]
    for row in rows[1:]:
        is_accurate = max_error is None or row.error <= max_error
        if is_accurate and row.seconds < best.seconds * (1 - MIN_GAIN):
            best = row
    return best.name


class _Bucket:
    """A bucket of gradients as DDP gives it to a communication hook."""

    def __init__(self, parameters: list[nn.Parameter], gradients: list[Tensor], is_last: bool) -> None:
        self._parameters, self._is_last = parameters, is_last
        self.original = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.values = torch.empty_like(self.original)

    def buffer(self) -> Tensor:
        return self.values

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def is_last(self) -> bool:
        return self._is_last


def _fill(buckets: Sequence[_Bucket]) -> None:
    for bucket in buckets:
        bucket.values.copy_(bucket.original)


class _TorchExchange:
    """torch's all-reduce of buckets, as they are or in another dtype."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype | None) -> None:
        self._group, self._dtype = group, dtype

    def run(self, buckets: Sequence[_Bucket]) -> None:
        pending = []
        for bucket in buckets:
            sent = bucket.values.to(self._dtype or bucket.values.dtype).div_(self._group.size())
            pending.append((bucket, sent, dist.all_reduce(sent, group=self._group, async_op=True)))
        for bucket, sent, work in pending:
            assert work is not None
            work.wait()
            bucket.values.copy_(sent)

    def sent_bytes(self, buckets: Sequence[_Bucket]) -> int:
        """Bytes that a rank of a ring sends."""
        nbytes = sum(x.values.numel() * (self._dtype or x.values.dtype).itemsize for x in buckets)
        return round(2 * nbytes * (self._group.size() - 1) / self._group.size())


class _CompressedExchange:
    """The two hops of `compress_ddp`."""

    def __init__(self, model: DistributedDataParallel, candidate: Candidate) -> None:
        self._replicas, self._count = DDPCompression(model, candidate), 0

    def run(self, buckets: Sequence[_Bucket]) -> None:
        self._count += 1
        for bucket in buckets:
            self._replicas.reduce(bucket)  # the last one waits for all

    def sent_bytes(self, buckets: Sequence[_Bucket]) -> int:
        return sum(stats.wire_bytes for stats in self._replicas.link_stats.values()) // self._count


_Exchange: TypeAlias = _TorchExchange | _CompressedExchange


def _make_buckets(model: DistributedDataParallel, rank: int) -> list[_Bucket]:
    """The gradients from the last parameter to the first, in buckets of one dtype and device up to DDP's size."""
    generator = torch.Generator().manual_seed(rank)
    runs: list[list[tuple[nn.Parameter, Tensor]]] = []
    nbytes = 0
    for name, parameter in reversed(reduced_parameters(model)):
        gradient = parameter.grad
        if gradient is None:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            gradient = noise.to(parameter.device, parameter.dtype)
        if gradient.is_sparse:
            advice = "pass sparse=False to the embedding"
            raise PolicyError(f"recommend, gradient of {name}", found="a sparse one", expected="a dense one", do=advice)
        last = runs[-1][-1][1] if runs else None
        is_like = last is not None and (last.dtype, last.device) == (gradient.dtype, gradient.device)
        if not is_like or nbytes + gradient.nbytes > model.bucket_bytes_cap:
            runs.append([])
            nbytes = 0
        runs[-1].append((parameter, gradient))
        nbytes += gradient.nbytes
    if not runs:
        advice = "pass a model that trains"
        raise PolicyError("recommend, model", found="no parameter that requires a gradient", do=advice)
    return [_Bucket([p for p, _ in run], [x.detach() for _, x in run], run is runs[-1]) for run in runs]


def _measure_errors(exchanges: Iterable[_Exchange], buckets: Sequence[_Bucket]) -> list[float]:
    """The error of each exchange beside the first one, which is exact."""
    exact: list[Tensor] = []
    errors = []
    for exchange in exchanges:
        _fill(buckets)
        exchange.run(buckets)
        exact = exact or [bucket.values.clone() for bucket in buckets]
        error = relative_error(exact, [bucket.values for bucket in buckets])
        errors.append(error if math.isfinite(error) else math.inf)
    return errors


def synchronized_time(device: torch.device) -> float:
    """Seconds of a clock, after all that the device has been asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def relative_error(exact: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm of the exact values; nan or infinite where a value is not finite."""

    def norm(tensors: Iterable[Tensor]) -> float:
        wide = ((x, torch.complex128 if x.is_complex() else torch.float64) for x in tensors)
        return math.hypot(*(float(torch.linalg.vector_norm(x, dtype=dtype)) for x, dtype in wide))

    size, distance = norm(exact), norm(other - x for x, other in zip(exact, others, strict=True))
    return distance / size if size else (math.inf if distance else 0.0)
