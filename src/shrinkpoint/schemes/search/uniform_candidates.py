"""Uniform grids with as many bits as the entropy asks for: the candidates of QD+, and inshrinkerator's alternative."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize.entropy import code_entropy, entropy_per_value
from shrinkpoint.quantize.uniform import grid_histogram, quantize_to_grid, uniform_grid, variable_bins
from shrinkpoint.schemes.search.candidates import PreviousCodes, subsample
from shrinkpoint.schemes.search.space import Axis, Point, Space
from shrinkpoint.sharding.global_stats import GlobalStats

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
