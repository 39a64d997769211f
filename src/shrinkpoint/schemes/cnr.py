"""CNR+, a baseline of arXiv 2306.11800: uniform quantization of a searched range (Check-N-Run, NSDI 2022), no delta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from shrinkpoint.codec import Symbols
from shrinkpoint.codec.quantize import adaptive
from shrinkpoint.schemes import candidate
from shrinkpoint.schemes.candidate import Earlier
from shrinkpoint.schemes.pooled import Pooled
from shrinkpoint.schemes.search import Axis, Point, Space
from shrinkpoint.schemes.searched import Searched
from shrinkpoint.schemes.target import Target
from shrinkpoint.statistics import LogHistogram

SPACE = Space(
    (
        Axis("bins", (8, 16, 32, 64, 128, 256)),
        Axis("steps", (10, 25, 50, 100)),
        Axis("range", (0.1, 0.2, 0.3, 0.4, 0.5)),
    )
)
"""Bins; steps into which the range is divided when its ends are moved; how much of it may be given up."""


class CNR(Searched):
    """CNR+: the quantizer of Check-N-Run with a searched setting. Its own delta is for embedding tables, and left out.

    Args:
        as of `Searched`.
    """

    id: ClassVar[str] = "cnr"
    coders = ("packed",)
    space = SPACE

    def candidates(
        self, weights: Mapping[str, Tensor], earlier: Earlier, target: Target, pool: Pooled | None = None
    ) -> candidate.Candidates:
        """All points for these weights; see `Searched`."""
        return _Candidates(weights, pool)


class _Candidates:
    def __init__(self, weights: Mapping[str, Tensor], pool: Pooled | None) -> None:
        self._weights = weights
        self._ends: dict[str, tuple[float, float]] = {}
        sketches = {name: LogHistogram.of(x, where=name) for name, x in weights.items()}
        if pool is not None:
            sums, ends = pool.sketches(sketches), pool.ends(weights)
            sketches = {name: sums[pool.title(name)] for name in weights}
            self._ends = {name: ends[pool.title(name)] for name in weights}
        self._histograms = {name: _histogram(sketch) for name, sketch in sketches.items()}

    def symbols(self, point: Point) -> dict[str, Symbols]:
        at = SPACE.settings(point)
        return {
            name: adaptive(
                x,
                int(at["bins"]),
                *self._histograms[name],
                steps=int(at["steps"]),
                ratio=float(at["range"]),
                whole=self._ends.get(name),
            )
            for name, x in self._weights.items()
        }

    def size(self, point: Point) -> float:
        """Codes of a fixed width; how the range is found costs no bytes."""
        bins = int(SPACE.settings(point)["bins"])
        bits = (bins - 1).bit_length()
        return sum(x.numel() * bits / 8 + 4 * bins for x in self._weights.values())


def _histogram(sketch: LogHistogram) -> tuple[Tensor, Tensor]:
    """Values and counts, zero among them."""
    values, counts = sketch.buckets()
    at = int((values < 0).sum())
    zero = values.new_zeros(1), counts.new_tensor([sketch.zeros])
    joined = [torch.cat([part[:at], middle, part[at:]]) for part, middle in zip((values, counts), zero, strict=True)]
    return joined[0], joined[1]
