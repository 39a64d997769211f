"""Quantiles with a bounded relative error, from counts that shards merge by adding.

The simplified parallel DDSketch of arXiv 2306.11800: value x falls into bucket `ceil(log_gamma |x|)`, and buckets never
collapse. Here the range of buckets is fixed, from 1e-30 to the largest float32, so a sketch is one dense vector of
counts, the same for every tensor: no keys to agree on between shards, one all-reduce between ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

from shrinkpoint.errors import PolicyError, StateError

FLOOR = 1e-30
"""Smaller magnitudes, zero apart, are counted as this one."""
_MOST = float(torch.finfo(torch.float32).max)
_FINEST, _COARSEST = 1e-4, 0.5
# By how much log |x| may be off in float32, where it is at most 88.8 in size: one unit in the last place of the
# logarithm (7.7e-6), half a unit in that of 1 / log(gamma) and again in that of the product (5.3e-6 each).
_SLACK = 2e-5
_PIECE = {"cpu": 1 << 16}  # values: what stays in a core's cache was measured twice as fast as one large piece
_LARGE_PIECE = 1 << 24


@dataclass(frozen=True)
class LogHistogram:
    """How many values fell into each bucket.

    Values must be finite. Sketches of the same `alpha` add up, and the sum is the sketch of all values.

    Attributes:
        alpha: the largest relative error of a quantile whose magnitude is at least `FLOOR`.
        counts: int64, of shape (2 * reach + 1,), in the order of the values: negative buckets from the largest
            magnitude down, zeros, positive buckets from the smallest magnitude up. A value's place is its id + reach.
    """

    alpha: float
    counts: Tensor = field(repr=False)

    @staticmethod
    def of(x: Tensor, alpha: float = 0.01, mask: Tensor | None = None, *, where: str = "values") -> LogHistogram:
        """The sketch of a tensor, on its device.

        Args:
            x: of any floating dtype and shape; float64 values must be finite in float32.
            mask: bool, of the same shape: count only where it is true. All of `x` must be finite nevertheless.
            where: what an error calls the tensor.

        Raises:
            PolicyError: `alpha` is not between 1e-4 and 0.5.
            StateError: a value is not finite, or `x` holds no floats.
        """
        return LogHistogram.of_ids(LogHistogram.ids(x, alpha, where=where), alpha, mask)

    @staticmethod
    def empty(alpha: float = 0.01, device: torch.device | str = "cpu") -> LogHistogram:
        """The sketch of no values."""
        return LogHistogram(alpha, torch.zeros(2 * reach(alpha) + 1, dtype=torch.int64, device=device))

    @staticmethod
    def ids(x: Tensor, alpha: float = 0.01, *, where: str = "values") -> Tensor:
        """The bucket of each value: what many sketches under different masks can share.

        Returns:
            Of the shape of `x`, contiguous, int16, or int32 where `alpha` is below about 0.005. Zero for zero, else
            between 1 and `reach(alpha)` with the sign of the value: ids are in the order of the values.

        Raises:
            PolicyError, StateError: as `of`.
        """
        if not x.is_floating_point():
            raise StateError(where, found=f"a tensor of {x.dtype}", expected="real floating-point values")
        low, most = _lowest(alpha), reach(alpha)
        kind = torch.int16 if 2 * most + 1 <= torch.iinfo(torch.int16).max else torch.int32
        ids, flat = torch.empty(x.shape, dtype=kind, device=x.device), x.detach().reshape(-1)
        step = _PIECE.get(x.device.type, _LARGE_PIECE)
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            if x.dtype != torch.float64:  # which may be too small for float32
                piece = piece.to(torch.float32)
            _check(piece, where)
            ids.view(-1)[start : start + step] = _ids(piece, 1 / _log_gamma(alpha), low)
        return ids

    @staticmethod
    def of_ids(ids: Tensor, alpha: float = 0.01, mask: Tensor | None = None) -> LogHistogram:
        """The sketch of values whose `ids` were computed with the same `alpha`.

        Args:
            mask: bool, of the same shape: count only where it is true.
        """
        if mask is not None and ids.is_cuda:  # where many counts of one place would wait for each other
            ids, mask = ids[mask], None
        places = ids.reshape(-1) + (reach(alpha) + 1)
        if mask is not None:  # what is masked out goes to place 0: a third of the time of gathering the rest
            places.mul_(mask.reshape(-1))
        return LogHistogram(alpha, torch.bincount(places, minlength=2 * reach(alpha) + 2)[1:].clone())

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
        return int(self.counts[self._reach])

    def magnitudes(self) -> LogHistogram:
        """The sketch of the absolute values."""
        counts = self.counts.clone()
        counts[self._reach + 1 :] += counts[: self._reach].flip(0)
        counts[: self._reach] = 0
        return LogHistogram(self.alpha, counts)

    def quantile(self, q: float) -> float:
        """The value of rank `floor(q * (count - 1))`, ranks from 0, in the order of the values, signs included.

        That is the lower quantile of the DDSketch paper, and numpy's `method="lower"`.

        Raises:
            PolicyError: `q` is not between 0 and 1, or nothing was counted.
        """
        if not 0 <= q <= 1:
            raise PolicyError("quantile", found=f"q = {q}", expected="a number from 0 to 1")
        return self.ranked(math.floor(q * (self.count - 1)))

    def ranked(self, rank: int) -> float:
        """The value of a rank, from 0 to `count - 1`, off by at most `alpha` times its magnitude; zero is exact.

        A magnitude below `FLOOR` is off by at most `alpha` times `FLOOR` from `FLOOR`.

        Raises:
            PolicyError: there is no such rank.
        """
        upto = self.counts.cumsum(0)
        if not 0 <= rank < int(upto[-1]):
            raise PolicyError(
                "rank", found=f"{rank}", expected=f"one of {int(upto[-1])} values", do="count values first"
            )
        place = torch.searchsorted(upto, rank, right=True)
        return float(self._values(place.cpu()))

    def buckets(self) -> tuple[Tensor, Tensor]:
        """What stands for each bucket that holds values, and how many it holds; zeros are left out.

        Returns:
            values: float64, on the host, ascending: `2 * gamma**i / (gamma + 1)` with the sign of the bucket.
            counts: int64, on the host, of the same shape.
        """
        counts = self.counts.cpu()
        places = counts.nonzero().view(-1)
        places = places[places != self._reach]
        return self._values(places), counts[places]

    @property
    def _reach(self) -> int:
        return self.counts.numel() // 2

    def _values(self, places: Tensor) -> Tensor:
        """What stands for the buckets at some places, which are int64; float64."""
        ids, step = places - self._reach, _log_gamma(self.alpha)
        sizes = torch.exp((ids.abs() + _lowest(self.alpha)) * torch.tensor(step, dtype=torch.float64))
        return sizes * (2 / (math.exp(step) + 1)) * ids.sign()


def reach(alpha: float) -> int:
    """The largest id: buckets of either sign.

    Raises:
        PolicyError: `alpha` is not between 1e-4 and 0.5.
    """
    return math.ceil(math.log(_MOST) / _log_gamma(alpha)) + 1 - _lowest(alpha)


def _log_gamma(alpha: float) -> float:
    """log((1 + a) / (1 - a)) of an `a` that leaves room for what float32 logarithms are off by.

    A value that lands in the bucket beside its own is still within `alpha` of what stands for that bucket, if
    `(1 + a) * exp(slack) <= 1 + alpha`.
    """
    if not _FINEST <= alpha <= _COARSEST:
        raise PolicyError("alpha", found=f"{alpha}", expected=f"a relative error from {_FINEST} to {_COARSEST}")
    return 2 * math.atanh((1 + alpha) * math.exp(-_SLACK) - 1)


def _lowest(alpha: float) -> int:
    """What is taken from `ceil(log_gamma |x|)` so that the smallest id is 1, with a bucket to spare for rounding."""
    return math.ceil(math.log(FLOOR) / _log_gamma(alpha)) - 2


def _ids(x: Tensor, scale: float, low: int) -> Tensor:
    return x.abs().clamp_(min=FLOOR).log_().mul_(scale).ceil_().sub_(low).mul_(x.sign())


def _check(piece: Tensor, where: str) -> None:
    """Smallest and largest value tell all, as nan is both where there is one; a tenth of the time of `isfinite`."""
    low, high = (float(x) for x in torch.aminmax(piece))
    if not -_MOST <= low <= high <= _MOST:
        found = "nan" if math.isnan(low) else f"{low if low < -_MOST else high}"
        raise StateError(where, found=f"the value {found}", expected="values that are finite in float32")
