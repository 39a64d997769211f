"""Differences of several tensors with the buckets of all of them, as a state has them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize.exponent_buckets import ExponentBuckets, Representative, promote


def quantize_exponents(
    differences: Sequence[Tensor], bits: int, *, shared: bool = True, representative: Representative = "middle"
) -> list[CodebookTensor]:
    """The residual codes of differences to a parent.

    Args:
        shared: whether the buckets are chosen for all tensors together (the paper) or for each one.
    """
    buckets = [ExponentBuckets.from_tensor(difference.detach()) for difference in differences]
    if shared and buckets:
        buckets = [sum(buckets[1:], buckets[0])] * len(buckets)
    return [promote(x, own, bits, representative) for x, own in zip(differences, buckets, strict=True)]
