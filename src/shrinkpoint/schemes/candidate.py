"""What a searched scheme must be able to do: every point of its space, as symbols and as a size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shrinkpoint.codec import Symbols
from shrinkpoint.schemes.search import Point

SAMPLE = 2048
"""Values of a tensor from which sizes are predicted."""


@dataclass(frozen=True)
class Earlier:
    """What is known of the previous checkpoint: as little as all ranks of a group can be told.

    Attributes:
        centers: by name of a tensor.
        codes: the previous codes at the places of `sample`, by name.
        used: how many codes there were, by name.
        generation: lossy restores behind the weights; 0: they have never been on a quantizer's levels.
    """

    centers: dict[str, Tensor] = field(default_factory=dict, repr=False)
    codes: dict[str, Tensor] = field(default_factory=dict, repr=False)
    used: dict[str, int] = field(default_factory=dict, repr=False)
    generation: int = 0

    @classmethod
    def of(cls, symbols: Mapping[str, Symbols], tensors: Mapping[str, Tensor], generation: int = 0) -> Earlier:
        """Of those tensors that had the same shape before."""
        same = {name: symbols[name] for name, x in tensors.items() if name in symbols}
        same = {name: one for name, one in same.items() if one.codes.shape == tensors[name].shape}
        return cls(
            {name: one.centers.cpu() for name, one in same.items()},
            {name: sample(one.codes).cpu() for name, one in same.items()},
            {name: one.used for name, one in same.items()},
            generation,
        )


def sample(x: Tensor) -> Tensor:
    """At most `SAMPLE` values of a tensor, spread over it; the same places for every tensor of its size."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE))].contiguous()


def entropy_of(codes: Tensor) -> float:
    """Bits a code, of codes from zero on that are coded one by one."""
    counts = torch.bincount(codes.reshape(-1)).double()
    shares = counts[counts > 0] / max(1.0, float(counts.sum()))
    return float(-(shares * shares.log2()).sum())


class Candidates(Protocol):
    """The points of a search space for the weights of one state."""

    def symbols(self, point: Point) -> dict[str, Symbols]:
        """What the weights become at a point, by name; on the devices of the weights."""
        ...

    def size(self, point: Point) -> float:
        """Predicted bytes of those symbols, the delta to the previous checkpoint taken into account."""
        ...


class Latest:
    """The same points; the symbols of the latest one are kept, since the last that is tried is often the one chosen."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._latest: tuple[Point | None, dict[str, Symbols]] = (None, {})

    def symbols(self, point: Point) -> dict[str, Symbols]:
        if self._latest[0] != point:
            self._latest = (point, self._candidates.symbols(point))
        return self._latest[1]

    def size(self, point: Point) -> float:
        return self._candidates.size(point)
