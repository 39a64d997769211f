"""Entropy of codes, from their histograms, and the standard deviation of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix

CODE_LIMIT = 4096
"""Codes from -4096 to 4095 are counted separately; codes beyond are counted as the nearest of these."""


def weight_std(weight: Tensor) -> float:
    """Return the population standard deviation of a weight, computed in float32."""
    return float(as_matrix(weight).to(torch.float32).std(correction=0))


def count_codes(codes: Tensor) -> Tensor:
    """Return how often each code from `-CODE_LIMIT` to `CODE_LIMIT - 1` occurs: int64, 1-d."""
    indices = codes.reshape(-1).to(torch.int64).clamp(-CODE_LIMIT, CODE_LIMIT - 1) + CODE_LIMIT
    return torch.bincount(indices, minlength=2 * CODE_LIMIT)


def entropy_bits(codes: Tensor) -> float:
    """Return the bits of all codes, integers of either sign, each coded by how often it occurs."""
    return entropy_bits_of_counts(count_codes(codes))


def entropy_bits_of_counts(counts: Tensor) -> float:
    """Return the bits of all values of a histogram, each coded by how often it occurs."""
    counts = counts.double()
    counts = counts[counts > 0]
    return float((counts * (counts.sum() / counts).log2()).sum())


def code_entropy(codes: Tensor) -> float:
    """Return the bits per code of codes from zero on, each coded by how often it occurs; 0 without codes."""
    return entropy_per_value(torch.bincount(codes.reshape(-1)))


def entropy_per_value(counts: Tensor) -> float:
    """Return the bits per value of a histogram; 0 for an empty one."""
    counts = counts.double()
    shares = counts[counts > 0] / counts.sum()
    return max(0.0, -float((shares * shares.log2()).sum()))
