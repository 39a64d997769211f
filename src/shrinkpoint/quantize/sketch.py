"""Quantiles with a bounded relative error, from counts that shards merge by adding; float64 arrays of any histogram.

The simplified parallel DDSketch of arXiv 2306.11800: value x falls into bucket `ceil(log_gamma |x|)`, and buckets never
collapse. Here the range of buckets is fixed, from 1e-30 to the largest float32, so a sketch is one dense vector of
counts, the same for every tensor: no keys to agree on between shards, one all-reduce between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor, distributed

from shrinkpoint.errors import PolicyError, StateError

HistogramArray: TypeAlias = Tensor | npt.NDArray[Any]
"""The values of a histogram's cells, or their counts: 1-d, on any device."""


def to_float64(values: HistogramArray) -> Tensor:
    """float64, on the CPU."""
    return torch.as_tensor(values).detach().to("cpu", torch.float64)


MIN_MAGNITUDE = 1e-30
"""Smaller magnitudes, zero apart, are counted as this one."""
_MAX_FLOAT32 = float(torch.finfo(torch.float32).max)
_MIN_ALPHA, _MAX_ALPHA = 1e-4, 0.5
# By how much log |x| may be off in float32, where it is at most 88.8 in size: one unit in the last place of the
# logarithm (7.7e-6), half a unit in that of 1 / log(gamma) and again in that of the product (5.3e-6 each).
_LOG_ERROR = 2e-5
_BLOCK_VALUES = {"cpu": 1 << 16}  # values: what stays in a core's cache was measured twice as fast as one large piece
_MAX_BLOCK_VALUES = 1 << 24


@dataclass(frozen=True)
class LogHistogram:
    """How many values fell into each bucket.

    Values must be finite. Sketches of the same `alpha` add up, and the sum is the sketch of all values.

    Attributes:
        alpha: the largest relative error of a quantile whose magnitude is at least `MIN_MAGNITUDE`.
        counts: int64, of shape (2 * reach + 1,), in the order of the values: negative buckets from the largest
            magnitude down, zeros, positive buckets from the smallest magnitude up. A value's place is its id + reach.
    """

    alpha: float
    counts: Tensor = field(repr=False)

    @staticmethod
    def from_tensor(
        tensor: Tensor, alpha: float = 0.01, mask: Tensor | None = None, *, where: str = "values"
    ) -> LogHistogram:
        """The sketch of a tensor, on its device.

        Args:
            tensor: of any floating dtype and shape; float64 values must be finite in float32.
            mask: bool, of the same shape: count only where it is true. All of `tensor` must be finite nevertheless.
            where: what an error calls the tensor.

        Raises:
            PolicyError: `alpha` is not between 1e-4 and 0.5.
            StateError: a value is not finite, or `tensor` holds no floats.
        """
        return LogHistogram.from_bucket_ids(LogHistogram.bucket_ids(tensor, alpha, where=where), alpha, mask)

    @staticmethod
    def empty(alpha: float = 0.01, device: torch.device | str = "cpu") -> LogHistogram:
        """The sketch of no values."""
        return LogHistogram(alpha, torch.zeros(2 * max_bucket(alpha) + 1, dtype=torch.int64, device=device))

    @staticmethod
    def bucket_ids(tensor: Tensor, alpha: float = 0.01, *, where: str = "values") -> Tensor:
        """The bucket of each value: what many sketches under different masks can share.

        Returns:
            Of the shape of `tensor`, contiguous, int16, or int32 where `alpha` is below about 0.005. Zero for zero,
            else
            between 1 and `reach(alpha)` with the sign of the value: ids are in the order of the values.

        Raises:
            PolicyError, StateError: as `of`.
        """
        if not tensor.is_floating_point():
            raise StateError(where, found=f"a tensor of {tensor.dtype}", expected="real floating-point values")
        low, most = _bucket_offset(alpha), max_bucket(alpha)
        kind = torch.int16 if 2 * most + 1 <= torch.iinfo(torch.int16).max else torch.int32
        ids, flat = torch.empty(tensor.shape, dtype=kind, device=tensor.device), tensor.detach().reshape(-1)
        step = _BLOCK_VALUES.get(tensor.device.type, _MAX_BLOCK_VALUES)
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            if tensor.dtype != torch.float64:  # which may be too small for float32
                piece = piece.to(torch.float32)
            _check_finite(piece, where)
            ids.view(-1)[start : start + step] = _compute_bucket_ids(piece, 1 / _log_gamma(alpha), low)
        return ids

    @staticmethod
    def from_bucket_ids(ids: Tensor, alpha: float = 0.01, mask: Tensor | None = None) -> LogHistogram:
        """The sketch of values whose `ids` were computed with the same `alpha`.

        Args:
            mask: bool, of the same shape: count only where it is true.
        """
        if mask is not None and ids.is_cuda:  # where many counts of one place would wait for each other
            ids, mask = ids[mask], None
        places = ids.reshape(-1) + (max_bucket(alpha) + 1)
        if mask is not None:  # what is masked out goes to place 0: a third of the time of gathering the rest
            places.mul_(mask.reshape(-1))
        return LogHistogram(alpha, torch.bincount(places, minlength=2 * max_bucket(alpha) + 2)[1:].clone())

    def __add__(self, other: LogHistogram) -> LogHistogram:
        """The sketch of the values of both, on the device of the first.

        Raises:
            PolicyError: they differ in `alpha`.
        """
        if self.alpha != other.alpha:
            found, expected = f"sketches of alpha {self.alpha} and {other.alpha}", "the same alpha"
            raise PolicyError("sketch", found=found, expected=expected)
        return LogHistogram(self.alpha, self.counts + other.counts.to(self.counts.device))

    def all_reduce(self, group: distributed.ProcessGroup | None = None) -> LogHistogram:
        """The sketch of the values of all ranks, on every rank; without a process group, of this process alone.

        Every rank of the group must call this, with the same `alpha`.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            return self
        device = self.counts.device
        if device.type == "cpu" and distributed.get_backend(group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        counts = self.counts.to(device, copy=True)
        distributed.all_reduce(counts, group=group)
        return LogHistogram(self.alpha, counts.to(self.counts.device))

    @property
    def count(self) -> int:
        """How many values were counted, zeros among them."""
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        return int(self.counts[self._max_bucket])

    def magnitudes(self) -> LogHistogram:
        """The sketch of the absolute values."""
        counts = self.counts.clone()
        counts[self._max_bucket + 1 :] += counts[: self._max_bucket].flip(0)
        counts[: self._max_bucket] = 0
        return LogHistogram(self.alpha, counts)

    def quantile(self, q: float) -> float:
        """The value of rank `floor(q * (count - 1))`, ranks from 0, in the order of the values, signs included.

        That is the lower quantile of the DDSketch paper, and numpy's `method="lower"`.

        Raises:
            PolicyError: `q` is not between 0 and 1, or nothing was counted.
        """
        if not 0 <= q <= 1:
            raise PolicyError("quantile", found=f"q = {q}", expected="a number from 0 to 1")
        return self.value_at_rank(math.floor(q * (self.count - 1)))

    def value_at_rank(self, rank: int) -> float:
        """The value of a rank, from 0 to `count - 1`, off by at most `alpha` times its magnitude; zero is exact.

        A magnitude below `MIN_MAGNITUDE` is off by at most `alpha` times `MIN_MAGNITUDE` from `MIN_MAGNITUDE`.

        Raises:
            PolicyError: there is no such rank.
        """
        upto = self.counts.cumsum(0)
        if not 0 <= rank < int(upto[-1]):
            raise PolicyError(
                "rank", found=f"{rank}", expected=f"one of {int(upto[-1])} values", do="count values first"
            )
        place = torch.searchsorted(upto, rank, right=True)
        return float(self._bucket_values(place.cpu()))

    def buckets(self) -> tuple[Tensor, Tensor]:
        """What stands for each bucket that holds values, and how many it holds; zeros are left out.

        Returns:
            values: float64, on the host, ascending: `2 * gamma**i / (gamma + 1)` with the sign of the bucket.
            counts: int64, on the host, of the same shape.
        """
        counts = self.counts.cpu()
        places = counts.nonzero().view(-1)
        places = places[places != self._max_bucket]
        return self._bucket_values(places), counts[places]

    @property
    def _max_bucket(self) -> int:
        return self.counts.numel() // 2

    def _bucket_values(self, positions: Tensor) -> Tensor:
        """What stands for the buckets at some places, which are int64; float64."""
        ids, step = positions - self._max_bucket, _log_gamma(self.alpha)
        sizes = torch.exp((ids.abs() + _bucket_offset(self.alpha)) * torch.tensor(step, dtype=torch.float64))
        return sizes * (2 / (math.exp(step) + 1)) * ids.sign()


def max_bucket(alpha: float) -> int:
    """The largest id: buckets of either sign.

    Raises:
        PolicyError: `alpha` is not between 1e-4 and 0.5.
    """
    return math.ceil(math.log(_MAX_FLOAT32) / _log_gamma(alpha)) + 1 - _bucket_offset(alpha)


def _log_gamma(alpha: float) -> float:
    """log((1 + a) / (1 - a)) of an `a` that leaves room for what float32 logarithms are off by.

    A value that lands in the bucket beside its own is still within `alpha` of what stands for that bucket, if
    `(1 + a) * exp(slack) <= 1 + alpha`.
    """
    if not _MIN_ALPHA <= alpha <= _MAX_ALPHA:
        raise PolicyError("alpha", found=f"{alpha}", expected=f"a relative error from {_MIN_ALPHA} to {_MAX_ALPHA}")
    return 2 * math.atanh((1 + alpha) * math.exp(-_LOG_ERROR) - 1)


def _bucket_offset(alpha: float) -> int:
    """What is taken from `ceil(log_gamma |x|)` so that the smallest id is 1, with a bucket to spare for rounding."""
    return math.ceil(math.log(MIN_MAGNITUDE) / _log_gamma(alpha)) - 2


def _compute_bucket_ids(values: Tensor, scale: float, offset: int) -> Tensor:
    return values.abs().clamp_(min=MIN_MAGNITUDE).log_().mul_(scale).ceil_().sub_(offset).mul_(values.sign())


def _check_finite(values: Tensor, where: str) -> None:
    """Smallest and largest value tell all, as nan is both where there is one; a tenth of the time of `isfinite`."""
    low, high = (float(x) for x in torch.aminmax(values))
    if not -_MAX_FLOAT32 <= low <= high <= _MAX_FLOAT32:
        found = "nan" if math.isnan(low) else f"{low if low < -_MAX_FLOAT32 else high}"
        raise StateError(where, found=f"the value {found}", expected="values that are finite in float32")
