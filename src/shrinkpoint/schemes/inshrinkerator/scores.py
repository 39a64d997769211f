"""Importance scores of weights, and what all trials on them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint.quantize.importance import sensitivity
from shrinkpoint.quantize.layer_types import layer_type_from_name
from shrinkpoint.quantize.sketch import LogHistogram

SKETCH_ALPHA = 0.01
"""Relative error of the quantiles; "a strict 1 %" in the paper."""
MAGNITUDE, SENSITIVITY = "magnitude", "sensitivity"


@dataclass(frozen=True)
class ScoredWeight:
    """One tensor.

    Attributes:
        values: its values, 1-d.
        layer_type: of its layer.
        bucket_ids: buckets of its values, so that many masks can be counted without another logarithm.
        scores: sketches of what it ranks by, by metric; sensitivity only where a gradient was recorded.
        sensitivity: |g w| of every value, float32; None without a gradient.
    """

    values: Tensor = field(repr=False)
    layer_type: str
    bucket_ids: Tensor = field(repr=False)
    scores: dict[str, LogHistogram] = field(repr=False)
    sensitivity: Tensor | None = field(default=None, repr=False)

    @classmethod
    def from_tensor(cls, name: str, tensor: Tensor, layer_type: str | None, gradient: Tensor | None) -> ScoredWeight:
        flat = tensor.detach().reshape(-1)
        ids = LogHistogram.bucket_ids(flat, SKETCH_ALPHA, where=name)
        scores = {MAGNITUDE: LogHistogram.from_bucket_ids(ids, SKETCH_ALPHA).magnitudes()}
        sensitive = None
        if gradient is not None and gradient.shape == tensor.shape:
            sensitive = sensitivity(flat, gradient.reshape(-1))
            scores[SENSITIVITY] = LogHistogram.from_tensor(sensitive, SKETCH_ALPHA, where=f"gradient of {name}")
        return cls(flat, layer_type or layer_type_from_name(name, tensor.dim()), ids, scores, sensitive)

    def score(self, metric: str) -> Tensor:
        """What it is ranked by: its size where there is no sensitivity."""
        if metric == SENSITIVITY and self.sensitivity is not None:
            return self.sensitivity
        return self.values.abs()

    def usable_metric(self, requested: str) -> str:
        """The metric that it can be ranked by."""
        return requested if requested in self.scores else MAGNITUDE


def score_weights(
    tensors: Mapping[str, Tensor], layer_types: Mapping[str, str], gradients: Mapping[str, Tensor]
) -> dict[str, ScoredWeight]:
    """By name. A gradient that is missing, or has another shape, leaves a weight to be ranked by its size."""
    with torch.no_grad():
        return {
            name: ScoredWeight.from_tensor(name, x, layer_types.get(name), gradients.get(name))
            for name, x in tensors.items()
        }
