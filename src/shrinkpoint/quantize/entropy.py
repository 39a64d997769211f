"""Standard deviation of a weight, and entropy of codes."""

from __future__ import annotations

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix

CODE_LIMIT = 4096
"""Codes beyond are counted as this one."""


def weight_std(weight: Tensor) -> float:
    """The standard deviation of a weight."""
    return float(as_matrix(weight).to(torch.float32).std(correction=0))


def entropy_bits(codes: Tensor) -> float:
    """Bits of all of them, each coded by how often it occurs."""
    return entropy_bits_of_counts(count_codes(codes))


def count_codes(codes: Tensor) -> Tensor:
    """How often each code occurs, from `-FAR` to `FAR - 1`; int64."""
    places = codes.reshape(-1).to(torch.int64).clamp(-CODE_LIMIT, CODE_LIMIT - 1) + CODE_LIMIT
    return torch.bincount(places, minlength=2 * CODE_LIMIT)


def entropy_bits_of_counts(counts: Tensor) -> float:
    """As `entropy`, of what was counted."""
    counts = counts.double()
    counts = counts[counts > 0]
    return float((counts * (counts.sum() / counts).log2()).sum())
