"""The points of a search space as quantized tensors and predicted sizes; those of uniform grids."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize.levels import grid_histogram, quantize_to_grid, uniform_grid, variable_bins
from shrinkpoint.quantize.statistics import code_entropy, entropy_per_value
from shrinkpoint.schemes.search.space import Axis, Point, Space
from shrinkpoint.sharding.global_stats import GlobalStats

SIZE_SAMPLE = 2048  # Values of a tensor from which sizes are predicted


@dataclass(frozen=True)
class PreviousCodes:
    """Summary of the previous checkpoint, small enough to be sent to all ranks of a group."""

    centers: dict[str, Tensor] = field(default_factory=dict, repr=False)  # by name of a tensor
    # The previous codes at the places of `sample`, by name.
    codes: dict[str, Tensor] = field(default_factory=dict, repr=False)
    num_codes: dict[str, int] = field(default_factory=dict, repr=False)  # how many codes there were, by name
    lossy_restores: int = 0  # lossy restores behind the weights; 0: they have never been on a quantizer's levels

    @classmethod
    def from_codebooks(
        cls, codebooks: Mapping[str, CodebookTensor], tensors: Mapping[str, Tensor], lossy_restores: int = 0
    ) -> PreviousCodes:
        """Codes of the tensors that had the same shape before."""
        same = {name: codebooks[name] for name, x in tensors.items() if name in codebooks}
        same = {name: codebook for name, codebook in same.items() if codebook.codes.shape == tensors[name].shape}
        return cls(
            {name: codebook.centers.cpu() for name, codebook in same.items()},
            {name: subsample(codebook.codes).cpu() for name, codebook in same.items()},
            {name: codebook.num_codes for name, codebook in same.items()},
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
    is_common = stats.global_tensors.reduce(digests, lambda shards: len({*shards}) == 1 and shards[0] is not None)
    common = [name for name in previous.centers if is_common[stats.global_name(name)]]
    return PreviousCodes(
        {name: previous.centers[name] for name in common},
        {name: previous.codes[name] for name in common},
        {name: previous.num_codes[name] for name in common},
        previous.lossy_restores,
    )


def subsample(tensor: Tensor) -> Tensor:
    """At most `SIZE_SAMPLE` values of a tensor, spread over it; the same places for every tensor of its size."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SIZE_SAMPLE))].contiguous()


class CandidateSet(Protocol):
    """The points of a search space for the weights of one state."""

    def quantize(self, point: Point) -> dict[str, CodebookTensor]:
        """Weights at a point of the search, by name; on the devices of the weights."""
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


_BINS = (8, 16, 32, 64, 128, 256)
UNIFORM_SPACE = Space((Axis("least", _BINS), Axis("most", _BINS)))
"""The smallest and the largest number of bins a tensor may get."""


class UniformCandidates:
    """The points of the space for the weights of one state."""

    def __init__(self, weights: Mapping[str, Tensor], previous: PreviousCodes, stats: GlobalStats) -> None:
        self._weights, self._previous = weights, previous
        self._global_names = {name: stats.global_name(name) for name in weights}
        self._min_max = stats.min_max(weights)
        histograms = stats.sum_histograms(
            {name: grid_histogram(weight, self._min_max[self._global_names[name]]) for name, weight in weights.items()}
        )
        self._entropies = {name: entropy_per_value(histograms[name]) for name in stats.global_names}

    def quantize(self, point: Point) -> dict[str, CodebookTensor]:
        bins = self._bins(point)
        return {
            name: quantize_to_grid(x, uniform_grid(*self._min_max[self._global_names[name]], bins[name]))
            for name, x in self._weights.items()
        }

    def size(self, point: Point) -> float:
        settings = UNIFORM_SPACE.settings(point)
        if int(settings["least"]) > int(settings["most"]):
            return math.inf  # the same as a point on the diagonal
        return sum(self._predicted_size(name, x, self._bins(point)[name]) for name, x in self._weights.items())

    def _bins(self, point: Point) -> dict[str, int]:
        settings = UNIFORM_SPACE.settings(point)
        least = int(settings["least"])
        bins = variable_bins([*self._entropies.values()], least, max(least, int(settings["most"])))
        found = dict(zip(self._entropies, bins, strict=True))
        return {name: found[title] for name, title in self._global_names.items()}

    def _predicted_size(self, name: str, x: Tensor, bins: int) -> float:
        """A Huffman code has one bit at least."""
        codes = (
            quantize_to_grid(subsample(x), uniform_grid(*self._min_max[self._global_names[name]], bins))
            .codes.long()
            .cpu()
        )
        before = self._previous.codes.get(name)
        if before is not None:
            modulus = max(bins, self._previous.num_codes[name])
            codes = torch.remainder(before.long() - codes, modulus)
        return x.numel() * max(1.0, code_entropy(codes)) / 8 + 4 * bins
