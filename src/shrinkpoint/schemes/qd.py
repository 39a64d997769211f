"""QD+, a baseline of arXiv 2306.11800: uniform quantization of as many bits as the entropy asks for, Huffman deltas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from shrinkpoint.codec import Symbols
from shrinkpoint.codec.quantize.uniform import ends, entropy, grid, on_grid, uniform, variable_bins
from shrinkpoint.schemes import candidate
from shrinkpoint.schemes.candidate import Earlier, entropy_of, sample
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

    def candidates(self, weights: Mapping[str, Tensor], earlier: Earlier, target: Target) -> candidate.Candidates:
        """All points for these weights; see `Searched`."""
        return _Candidates(weights, earlier)


class _Candidates:
    def __init__(self, weights: Mapping[str, Tensor], earlier: Earlier) -> None:
        self._weights, self._earlier = weights, earlier
        self._entropies = [entropy(x) for x in weights.values()]

    def symbols(self, point: Point) -> dict[str, Symbols]:
        bins = self._bins(point)
        return {name: uniform(x, bins[name]) for name, x in self._weights.items()}

    def size(self, point: Point) -> float:
        settings = SPACE.settings(point)
        if int(settings["least"]) > int(settings["most"]):
            return math.inf  # the same as a point on the diagonal
        return sum(self._one(name, x, self._bins(point)[name]) for name, x in self._weights.items())

    def _bins(self, point: Point) -> dict[str, int]:
        settings = SPACE.settings(point)
        least = int(settings["least"])
        bins = variable_bins(self._entropies, least, max(least, int(settings["most"])))
        return dict(zip(self._weights, bins, strict=True))

    def _one(self, name: str, x: Tensor, bins: int) -> float:
        """A Huffman code has one bit at least."""
        codes = on_grid(sample(x), grid(*ends(x), bins)).codes.long().cpu()
        before = self._earlier.codes.get(name)
        if before is not None:
            modulus = max(bins, self._earlier.used[name])
            codes = torch.remainder(before.long() - codes, modulus)
        return x.numel() * max(1.0, entropy_of(codes)) / 8 + 4 * bins
