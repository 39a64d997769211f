"""How widely numbers are spread: a weight's deviation, the entropy of codes."""

from __future__ import annotations

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import matrix

FAR = 4096
"""Codes beyond are counted as this one."""


def deviation(x: Tensor) -> float:
    """The standard deviation of a weight."""
    return float(matrix(x).to(torch.float32).std(correction=0))


def entropy(codes: Tensor) -> float:
    """Bits of all of them, each coded by how often it occurs."""
    return entropy_of(counted(codes))


def counted(codes: Tensor) -> Tensor:
    """How often each code occurs, from `-FAR` to `FAR - 1`; int64."""
    places = codes.reshape(-1).to(torch.int64).clamp(-FAR, FAR - 1) + FAR
    return torch.bincount(places, minlength=2 * FAR)


def entropy_of(counts: Tensor) -> float:
    """As `entropy`, of what was counted."""
    counts = counts.double()
    counts = counts[counts > 0]
    return float((counts * (counts.sum() / counts).log2()).sum())
