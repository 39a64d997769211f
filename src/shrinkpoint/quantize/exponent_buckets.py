"""Exponent-based quantization of differences between checkpoints (LC-Checkpoint, arXiv 2009.13003).

Values of one sign and one power of two form a bucket. Priority promotion with "x bits" keeps the `2^x - 1` buckets with
the largest exponents; differences in all other buckets become zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES, CodebookTensor

Representative = Literal["middle", "mean"]
"""The value of a bucket: the middle of its minimum and maximum (the paper), or the mean (the least squared error)."""

_MIN_EXPONENT = -150  # An exponent below that of the smallest float32, as `frexp` counts
NUM_BUCKETS = 2 * 280
"""Number of buckets: two signs for each exponent from `_MIN_EXPONENT` on; bucket 0 is that of zero."""


@dataclass(frozen=True)
class ExponentBuckets:
    """Statistics of the buckets of one or several tensors, each of shape (num_buckets,) on the CPU."""

    counts: Tensor = field(repr=False)  # int64, the number of values
    sums: Tensor = field(repr=False)  # float64, the sum of the values
    # `minimum`, `maximum`: float32, the smallest and largest value; undefined where a count is zero.
    minimum: Tensor = field(repr=False)
    maximum: Tensor = field(repr=False)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> ExponentBuckets:
        """Return the statistics of one tensor: float32, finite, any shape."""
        flat, ids = tensor.reshape(-1), bucket_ids(tensor)
        counts = torch.bincount(ids, minlength=NUM_BUCKETS)
        sums = torch.zeros(NUM_BUCKETS, dtype=torch.float64, device=tensor.device).index_add_(0, ids, flat.double())
        zeros = torch.zeros(NUM_BUCKETS, dtype=torch.float32, device=tensor.device)
        minimum = zeros.scatter_reduce(0, ids, flat, "amin", include_self=False)
        maximum = zeros.scatter_reduce(0, ids, flat, "amax", include_self=False)
        return cls(counts.cpu(), sums.cpu(), minimum.cpu(), maximum.cpu())

    def __add__(self, other: ExponentBuckets) -> ExponentBuckets:
        """Return the statistics of the values of both."""
        minimum = torch.where(self.counts > 0, self.minimum, other.minimum)
        maximum = torch.where(self.counts > 0, self.maximum, other.maximum)
        in_both = (self.counts > 0) & (other.counts > 0)
        return ExponentBuckets(
            self.counts + other.counts,
            self.sums + other.sums,
            torch.where(in_both, torch.minimum(self.minimum, other.minimum), minimum),
            torch.where(in_both, torch.maximum(self.maximum, other.maximum), maximum),
        )

    def promoted(self, bits: int, representative: Representative) -> tuple[Tensor, Tensor]:
        """Return the promoted buckets: ids (int64) and values (float32), in ascending order of the values.

        Of two buckets with the same exponent the fuller one is promoted first.
        """
        present = (torch.nonzero(self.counts[1:]).reshape(-1) + 1).tolist()
        order = sorted(present, key=lambda bucket: (-(bucket // 2), -int(self.counts[bucket]), bucket))
        ids = torch.tensor(sorted(order[: 2**bits - 1], key=lambda i: float(self.minimum[i])), dtype=torch.int64)
        minimum, maximum = self.minimum[ids], self.maximum[ids]
        if representative == "mean":  # clamped, because a rounded sum may give another mean of equal values
            return ids, (self.sums[ids] / self.counts[ids]).float().clamp(minimum, maximum)
        return ids, ((minimum.double() + maximum.double()) / 2).float()


def bucket_ids(tensor: Tensor) -> Tensor:
    """Return the bucket of every value: int64, 1-d; 0 for zero, then two per exponent, odd for negative values."""
    flat = tensor.detach().reshape(-1)
    heads = (flat.view(torch.int32) >> 23) & 511  # sign and exponent bits of float32; four times as fast as frexp
    num_small = int(torch.bincount(heads, minlength=512)[[0, 256]].sum())
    if num_small > flat.numel() - int(torch.count_nonzero(flat)):  # there are denormal values
        exponents = torch.frexp(flat).exponent.to(torch.int64) - _MIN_EXPONENT
        return torch.where(flat == 0, 0, 2 * exponents + (flat < 0))
    bits = torch.arange(512)
    table = torch.where(bits & 255 == 0, 0, 2 * ((bits & 255) - 126 - _MIN_EXPONENT) + (bits >> 8))
    return table.to(flat.device).index_select(0, heads)


def promote(tensor: Tensor, buckets: ExponentBuckets, bits: int, representative: Representative) -> CodebookTensor:
    """Quantize a difference, or a shard of one, with the buckets promoted by the statistics of all."""
    promoted, values = buckets.promoted(bits, representative)
    first_code, zero_code = RESERVED_CODES, 0
    if promoted.numel() > MAX_CODES - RESERVED_CODES:  # every code of a byte is needed: zero becomes a center
        first_code, zero_code = 0, int((values < 0).sum())
        promoted, values = (
            torch.cat([column[:zero_code], column.new_zeros(1), column[zero_code:]]) for column in (promoted, values)
        )
    table = torch.full((NUM_BUCKETS,), zero_code, dtype=torch.uint8)
    table[promoted] = torch.arange(first_code, first_code + promoted.numel(), dtype=torch.uint8)
    codes = table.to(tensor.device).index_select(0, bucket_ids(tensor)).reshape(tensor.shape)
    centers = values if values.numel() else torch.zeros(1, dtype=torch.float32)
    no_exact = torch.empty(0, dtype=torch.bfloat16, device=tensor.device)
    return CodebookTensor(codes, centers.to(tensor.device), no_exact, first_code, residual=True)
