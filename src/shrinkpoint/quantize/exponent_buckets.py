"""Buckets of one sign and one power of two, of which the largest few are told apart (arXiv 2009.13003).

Its two stages, exponent-based quantization and priority promotion, for differences between checkpoints: "x bits" keep
the `2^x - 1` buckets with the largest exponents, and whatever is in a smaller one does not move at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES, CodebookTensor
from shrinkpoint.errors import PolicyError

Representative = Literal["middle", "mean"]
"""What a bucket's values become: half of its least plus its largest (the paper), or their mean (the least square)."""

_MIN_EXPONENT = -150
"""Below the exponent of the smallest float32, as `frexp` counts."""
_NUM_BUCKETS = 2 * 280
"""Exponents from `_MIN_EXPONENT`, and for each both signs; bucket 0 is that of zero."""


@dataclass(frozen=True)
class ExponentBuckets:
    """What there is in all buckets of some tensors.

    Attributes:
        counts: int64 [_BUCKETS].
        sums: float64 [_BUCKETS].
        least, largest: float32 [_BUCKETS]; meaningless where a count is zero.
    """

    counts: Tensor = field(repr=False)
    sums: Tensor = field(repr=False)
    minimum: Tensor = field(repr=False)
    maximum: Tensor = field(repr=False)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> ExponentBuckets:
        """Of one tensor: float32, finite."""
        flat, ids = tensor.reshape(-1), bucket_ids(tensor)
        counts = torch.bincount(ids, minlength=_NUM_BUCKETS)
        sums = torch.zeros(_NUM_BUCKETS, dtype=torch.float64, device=tensor.device).index_add_(0, ids, flat.double())
        ends = torch.zeros(_NUM_BUCKETS, dtype=torch.float32, device=tensor.device)
        least = ends.scatter_reduce(0, ids, flat, "amin", include_self=False)
        largest = ends.scatter_reduce(0, ids, flat, "amax", include_self=False)
        return cls(counts.cpu(), sums.cpu(), least.cpu(), largest.cpu())

    def __add__(self, other: ExponentBuckets) -> ExponentBuckets:
        """Of both; as if they had been one tensor."""
        least = torch.where(self.counts > 0, self.minimum, other.minimum)
        largest = torch.where(self.counts > 0, self.maximum, other.maximum)
        both = (self.counts > 0) & (other.counts > 0)
        return ExponentBuckets(
            self.counts + other.counts,
            self.sums + other.sums,
            torch.where(both, torch.minimum(self.minimum, other.minimum), least),
            torch.where(both, torch.maximum(self.maximum, other.maximum), largest),
        )

    def promoted(self, bits: int, representative: Representative) -> tuple[Tensor, Tensor]:
        """The buckets that are kept and what their values become: ids and float32 values, values ascending.

        Of two buckets with the same exponent the fuller one comes first.
        """
        present = (torch.nonzero(self.counts[1:]).reshape(-1) + 1).tolist()
        order = sorted(present, key=lambda one: (-(one // 2), -int(self.counts[one]), one))
        kept = torch.tensor(sorted(order[: 2**bits - 1], key=self._minimum_of), dtype=torch.int64)
        least, largest = self.minimum[kept], self.maximum[kept]
        if representative == "mean":  # a sum is rounded, so that the mean of equal values may be another one
            return kept, (self.sums[kept] / self.counts[kept]).float().clamp(least, largest)
        return kept, ((least.double() + largest.double()) / 2).float()

    def _minimum_of(self, bucket: int) -> float:
        return float(self.minimum[bucket])


def bucket_ids(tensor: Tensor) -> Tensor:
    """The bucket of every value: int64, 1-d. 0 for zero, then 2 for each exponent, the odd one for negative values."""
    flat = tensor.detach().reshape(-1)
    heads = (flat.view(torch.int32) >> 23) & 511  # sign and exponent, as float32 has them: a quarter of frexp's time
    low = int(torch.bincount(heads, minlength=512)[[0, 256]].sum())
    if low > flat.numel() - int(torch.count_nonzero(flat)):  # denormal values, whose exponents are not in their heads
        exponents = torch.frexp(flat).exponent.to(torch.int64) - _MIN_EXPONENT
        return torch.where(flat == 0, 0, 2 * exponents + (flat < 0))
    bits = torch.arange(512)
    table = torch.where(bits & 255 == 0, 0, 2 * ((bits & 255) - 126 - _MIN_EXPONENT) + (bits >> 8))
    return table.to(flat.device).index_select(0, heads)


@torch.no_grad()
def quantize_exponents(
    differences: Sequence[Tensor], bits: int, *, shared: bool = True, representative: Representative = "middle"
) -> list[CodebookTensor]:
    """Residual symbols of every difference.

    Args:
        differences: to the values that the parent checkpoint has; float32, finite, any shape, on one device.
        bits: x; 1 to 8.
        shared: one choice of buckets for all (the paper); else each tensor has its own.
        representative: see `Representative`.

    Raises:
        PolicyError: `bits` or `representative` is none of those.
    """
    check_bits(bits, representative)
    found = [ExponentBuckets.from_tensor(x) for x in differences]
    if shared and found:
        found = [sum(found[1:], found[0])] * len(found)
    return [promote(x, one, bits, representative) for x, one in zip(differences, found, strict=True)]


def check_bits(bits: int, representative: Representative) -> None:
    """Raises `PolicyError` where one of them is none of those."""
    if type(bits) is not int or not 1 <= bits <= 8:
        raise PolicyError("bits", found=f"{bits!r}", expected="1 to 8", do="take 2 or 3, as the paper does")
    if representative not in get_args(Representative):
        expected = " or ".join(map(repr, get_args(Representative)))
        raise PolicyError("representative", found=repr(representative), expected=expected, do="choose one of them")


def promote(tensor: Tensor, buckets: ExponentBuckets, bits: int, representative: Representative) -> CodebookTensor:
    """Residual symbols of a difference, or of a part of it, with what is in the buckets of all."""
    return _promoted_codes(tensor, *buckets.promoted(bits, representative))


def _promoted_codes(tensor: Tensor, promoted: Tensor, values: Tensor) -> CodebookTensor:
    first, rest = RESERVED_CODES, 0
    if promoted.numel() > MAX_CODES - RESERVED_CODES:  # as many as a byte tells apart: bucket 0 is one of them
        first, rest = 0, int((values < 0).sum())
        promoted, values = (torch.cat([a[:rest], a.new_zeros(1), a[rest:]]) for a in (promoted, values))
    table = torch.full((_NUM_BUCKETS,), rest, dtype=torch.uint8)
    table[promoted] = torch.arange(first, first + promoted.numel(), dtype=torch.uint8)
    codes = table.to(tensor.device).index_select(0, bucket_ids(tensor)).reshape(tensor.shape)
    centers = values if values.numel() else torch.zeros(1)
    nothing = torch.empty(0, dtype=torch.bfloat16, device=tensor.device)
    return CodebookTensor(codes, centers.to(tensor.device), nothing, first, residual=True)
