"""The weights of one state, and what every trial on them shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint.schemes.layers import kind_by_name
from shrinkpoint.statistics import LogHistogram, sensitivity

ALPHA = 0.01
"""Relative error of the quantiles; "a strict 1 %" in the paper."""
MAGNITUDE, SENSITIVITY = "magnitude", "sensitivity"


@dataclass(frozen=True)
class Weight:
    """One tensor.

    Attributes:
        x: its values, 1-d.
        kind: of its layer.
        ids: buckets of its values, so that many masks can be counted without another logarithm.
        scores: sketches of what it ranks by, by metric; sensitivity only where a gradient was recorded.
        sensitivity: |g w| of every value, float32; None without a gradient.
    """

    x: Tensor = field(repr=False)
    kind: str
    ids: Tensor = field(repr=False)
    scores: dict[str, LogHistogram] = field(repr=False)
    sensitivity: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, name: str, x: Tensor, kind: str | None, gradient: Tensor | None) -> Weight:
        flat = x.detach().reshape(-1)
        ids = LogHistogram.ids(flat, ALPHA, where=name)
        scores = {MAGNITUDE: LogHistogram.of_ids(ids, ALPHA).magnitudes()}
        sensitive = None
        if gradient is not None and gradient.shape == x.shape:
            sensitive = sensitivity(flat, gradient.reshape(-1))
            scores[SENSITIVITY] = LogHistogram.of(sensitive, ALPHA, where=f"gradient of {name}")
        return cls(flat, kind or kind_by_name(name, x.dim()), ids, scores, sensitive)

    def score(self, metric: str) -> Tensor:
        """What it is ranked by: its size where there is no sensitivity."""
        if metric == SENSITIVITY and self.sensitivity is not None:
            return self.sensitivity
        return self.x.abs()

    def metric(self, wanted: str) -> str:
        """The metric that it can be ranked by."""
        return wanted if wanted in self.scores else MAGNITUDE


def weights_of(
    tensors: Mapping[str, Tensor], kinds: Mapping[str, str], gradients: Mapping[str, Tensor]
) -> dict[str, Weight]:
    """By name. A gradient that is missing, or has another shape, leaves a weight to be ranked by its size."""
    with torch.no_grad():
        return {name: Weight.of(name, x, kinds.get(name), gradients.get(name)) for name, x in tensors.items()}
