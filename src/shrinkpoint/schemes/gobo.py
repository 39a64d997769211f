"""GOBO+, a baseline of arXiv 2306.11800: outliers as they are, k-means for the rest (GOBO, MICRO 2020), no delta."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from shrinkpoint.codec import Symbols
from shrinkpoint.codec.quantize import outliers
from shrinkpoint.codec.quantize.outliers import around, centroids, is_far
from shrinkpoint.codec.symbols import MOST_CODES
from shrinkpoint.schemes import candidate
from shrinkpoint.schemes.candidate import Earlier, entropy_of, sample
from shrinkpoint.schemes.layers import EMBEDDING, kind_by_name
from shrinkpoint.schemes.pooled import Pooled
from shrinkpoint.schemes.search import Axis, Point, Space
from shrinkpoint.schemes.searched import Searched
from shrinkpoint.schemes.target import Target
from shrinkpoint.statistics import LogHistogram

SPACE = Space((Axis("bins", (8, 16, 32, 64, 128, 256)), Axis("embedding_bins", (16, 32))))
"""256 bins are 255, for one code is that of the outliers."""


class GOBO(Searched):
    """GOBO+: GOBO's quantizer with a searched setting and its soft termination. Codes are entropy-coded where it gains.

    Args:
        as of `Searched`.
    """

    id: ClassVar[str] = "gobo"
    coders = ("packed", "alone")
    space = SPACE

    def candidates(
        self, weights: Mapping[str, Tensor], earlier: Earlier, target: Target, pool: Pooled | None = None
    ) -> candidate.Candidates:
        """All points for these weights; see `Searched`. Centroids of weights of several ranks are those of a sketch."""
        return _Candidates(weights, target.kinds) if pool is None else _Boxes(weights, target.kinds, pool)


class _Candidates:
    def __init__(self, weights: Mapping[str, Tensor], kinds: Mapping[str, str]) -> None:
        self._weights = weights
        self._kinds = {name: kinds.get(name) or kind_by_name(name, x.dim()) for name, x in weights.items()}
        self._embeddings = EMBEDDING in self._kinds.values()
        self._made: dict[tuple[str, int], Symbols] = {}

    def symbols(self, point: Point) -> dict[str, Symbols]:
        """Kept once made: the iteration over all values is long, and points share most of them."""
        return {name: self._one(name, self._bins(name, point)) for name in self._weights}

    def size(self, point: Point) -> float:
        """From a sample, quantized by itself; infinite for a point that only says again what another one says."""
        at = SPACE.settings(point)
        if not self._embeddings and at["embedding_bins"] != SPACE.axes[1].values[-1]:
            return math.inf
        return sum(self._size(name, x, self._bins(name, point)) for name, x in self._weights.items())

    def _bins(self, name: str, point: Point) -> int:
        at = SPACE.settings(point)
        wanted = at["embedding_bins" if self._kinds[name] == EMBEDDING else "bins"]
        return min(int(wanted), MOST_CODES - 1)

    def _one(self, name: str, bins: int) -> Symbols:
        if (name, bins) not in self._made:
            self._made[name, bins] = outliers(self._weights[name], bins)
        return self._made[name, bins]

    def _size(self, name: str, x: Tensor, bins: int) -> float:
        found = outliers(sample(x), bins, iterations=10)
        scale = x.numel() / max(1, found.codes.numel())
        return x.numel() * entropy_of(found.codes.long().cpu()) / 8 + 4 * scale * found.exact.numel() + 4 * bins


_FINE = 0.002
"""Relative error of the sketch that stands for a weight's values."""
_ENOUGH = 1 << 18
"""Values that stand for all of a weight, in which each bucket has its share."""


class _Boxes(_Candidates):
    """The same for boxes: the outliers are those of the whole weight, and centroids are found on its sketch."""

    def __init__(self, weights: Mapping[str, Tensor], kinds: Mapping[str, str], pool: Pooled) -> None:
        super().__init__(weights, kinds)
        self._kinds = pool.kinds(weights, kinds)
        self._embeddings = EMBEDDING in pool.all_kinds.values()
        self._pool, spread = pool, pool.deviations(weights)
        self._apart = {name: is_far(x, *spread[pool.title(name)]) for name, x in weights.items()}
        parts = {name: LogHistogram.of(x, _FINE, ~self._apart[name], where=name) for name, x in weights.items()}
        self._values = {title: _representatives(one) for title, one in pool.sketches(parts, _FINE).items()}
        self._centers: dict[tuple[str, int], Tensor] = {}

    def _one(self, name: str, bins: int) -> Symbols:
        key = self._pool.title(name), bins
        if key not in self._centers:
            self._centers[key] = centroids(self._values[key[0]], bins)
        return around(self._weights[name], self._apart[name], self._centers[key])


def _representatives(sketch: LogHistogram) -> Tensor:
    """So many values as a sketch counts, or a part of them with the same shares; float32."""
    values, counts = sketch.buckets()
    values, counts = torch.cat([values, values.new_zeros(1)]), torch.cat([counts, counts.new_tensor([sketch.zeros])])
    scale = min(1.0, _ENOUGH / max(1, int(counts.sum())))
    return values.repeat_interleave((counts * scale).ceil().long()).float()
