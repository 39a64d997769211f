"""QD+, a baseline of arXiv 2306.11800: uniform quantization of as many bits as the entropy asks for, Huffman deltas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from shrinkpoint.codec import Symbols
from shrinkpoint.codec.quantize.uniform import ends, entropy, entropy_of, grid, histogram, on_grid, variable_bins
from shrinkpoint.schemes import candidate
from shrinkpoint.schemes.candidate import Earlier, sample
from shrinkpoint.schemes.pooled import Pooled
from shrinkpoint.schemes.search import Axis, Point, Space
from shrinkpoint.schemes.searched import Searched
from shrinkpoint.schemes.target import Target

_BINS = (8, 16, 32, 64, 128, 256)
SPACE = Space((Axis("least", _BINS), Axis("most", _BINS)))
"""The least and the largest number of bins a tensor may get."""


class QD(Searched):
    """QD+: QD-Compressor (ICCD 2021) with a searched setting, and bins that may change between checkpoints.

    Args:
        as of `Searched`.
    """

    id: ClassVar[str] = "qd"
    coders = ("huffman",)
    space = SPACE

    def candidates(
        self, weights: Mapping[str, Tensor], earlier: Earlier, target: Target, pool: Pooled | None = None
    ) -> candidate.Candidates:
        """All points for these weights; see `Searched`."""
        return Uniform(weights, earlier, pool)


class Uniform:
    """The points of the space for the weights of one state."""

    def __init__(self, weights: Mapping[str, Tensor], earlier: Earlier, pool: Pooled | None) -> None:
        self._weights, self._earlier = weights, earlier
        self._titles = {name: name if pool is None else pool.title(name) for name in weights}
        if pool is None:
            self._ends = {name: ends(x) for name, x in weights.items()}
            self._entropies = {name: entropy(x) for name, x in weights.items()}
        else:
            self._ends = pool.ends(weights)
            counts = pool.counts({name: histogram(x, self._ends[pool.title(name)]) for name, x in weights.items()})
            self._entropies = {title: entropy_of(counts[title]) for title in pool.titles}

    def symbols(self, point: Point) -> dict[str, Symbols]:
        bins = self._bins(point)
        return {
            name: on_grid(x, grid(*self._ends[self._titles[name]], bins[name])) for name, x in self._weights.items()
        }

    def size(self, point: Point) -> float:
        settings = SPACE.settings(point)
        if int(settings["least"]) > int(settings["most"]):
            return math.inf  # the same as a point on the diagonal
        return sum(self._one(name, x, self._bins(point)[name]) for name, x in self._weights.items())

    def _bins(self, point: Point) -> dict[str, int]:
        settings = SPACE.settings(point)
        least = int(settings["least"])
        bins = variable_bins([*self._entropies.values()], least, max(least, int(settings["most"])))
        found = dict(zip(self._entropies, bins, strict=True))
        return {name: found[title] for name, title in self._titles.items()}

    def _one(self, name: str, x: Tensor, bins: int) -> float:
        """A Huffman code has one bit at least."""
        codes = on_grid(sample(x), grid(*self._ends[self._titles[name]], bins)).codes.long().cpu()
        before = self._earlier.codes.get(name)
        if before is not None:
            modulus = max(bins, self._earlier.used[name])
            codes = torch.remainder(before.long() - codes, modulus)
        return x.numel() * max(1.0, candidate.entropy_of(codes)) / 8 + 4 * bins
