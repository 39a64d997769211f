"""The protocol of a searched scheme: every point of its space, as quantized tensors and as a predicted size."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.schemes.search.space import Point
from shrinkpoint.sharding.global_stats import GlobalStats

SIZE_SAMPLE = 2048
"""Values of a tensor from which sizes are predicted."""


@dataclass(frozen=True)
class PreviousCodes:
    """What is known of the previous checkpoint: as little as all ranks of a group can be told.

    Attributes:
        centers: by name of a tensor.
        codes: the previous codes at the places of `sample`, by name.
        num_codes: how many codes there were, by name.
        lossy_restores: lossy restores behind the weights; 0: they have never been on a quantizer's levels.
    """

    centers: dict[str, Tensor] = field(default_factory=dict, repr=False)
    codes: dict[str, Tensor] = field(default_factory=dict, repr=False)
    num_codes: dict[str, int] = field(default_factory=dict, repr=False)
    lossy_restores: int = 0

    @classmethod
    def from_codebooks(
        cls, codebooks: Mapping[str, CodebookTensor], tensors: Mapping[str, Tensor], lossy_restores: int = 0
    ) -> PreviousCodes:
        """Of those tensors that had the same shape before."""
        same = {name: codebooks[name] for name, x in tensors.items() if name in codebooks}
        same = {name: one for name, one in same.items() if one.codes.shape == tensors[name].shape}
        return cls(
            {name: one.centers.cpu() for name, one in same.items()},
            {name: subsample(one.codes).cpu() for name, one in same.items()},
            {name: one.num_codes for name, one in same.items()},
            lossy_restores,
        )


def common_previous_codes(previous: PreviousCodes, names: Iterable[str], stats: GlobalStats) -> PreviousCodes:
    """The codes of those tensors whose shards all have the same previous centers; a collective.

    Args:
        names: of all local weights.
    """
    digests = {
        name: zlib.crc32(previous.centers[name].numpy().tobytes()) if name in previous.centers else None
        for name in names
    }
    reports = stats.global_tensors.gather_by_tensor(digests)
    common = {name for name, shards in reports.items() if len({*shards}) == 1 and shards[0] is not None}
    kept = [name for name in previous.centers if stats.global_name(name) in common]
    return PreviousCodes(
        {name: previous.centers[name] for name in kept},
        {name: previous.codes[name] for name in kept},
        {name: previous.num_codes[name] for name in kept},
        previous.lossy_restores,
    )


def subsample(tensor: Tensor) -> Tensor:
    """At most `SIZE_SAMPLE` values of a tensor, spread over it; the same places for every tensor of its size."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SIZE_SAMPLE))].contiguous()


class CandidateSet(Protocol):
    """The points of a search space for the weights of one state."""

    def quantize(self, point: Point) -> dict[str, CodebookTensor]:
        """What the weights become at a point, by name; on the devices of the weights."""
        ...

    def size(self, point: Point) -> float:
        """Predicted bytes of those symbols, the delta to the previous checkpoint taken into account."""
        ...


class CachedCandidates:
    """The same points; the symbols of the latest one are kept, since the last that is tried is often the one chosen."""

    def __init__(self, candidates: CandidateSet) -> None:
        self._candidates = candidates
        self._latest: tuple[Point | None, dict[str, CodebookTensor]] = (None, {})

    def quantize(self, point: Point) -> dict[str, CodebookTensor]:
        if self._latest[0] != point:
            self._latest = (point, self._candidates.quantize(point))
        return self._latest[1]

    def size(self, point: Point) -> float:
        return self._candidates.size(point)
