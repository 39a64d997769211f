"""Importance scores of weights, computed once for all trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint.quantize.importance import sensitivity
from shrinkpoint.quantize.layer_types import layer_type_from_name
from shrinkpoint.quantize.sketch import LogHistogram

SKETCH_ALPHA = 0.01
"""The relative error of quantiles; "a strict 1 %" in the paper."""
MAGNITUDE, SENSITIVITY = "magnitude", "sensitivity"


@dataclass(frozen=True)
class ScoredWeight:
    """One weight with the scores by which its values are ranked.

    Attributes:
        values: 1-d, of the weight's dtype.
        layer_type: the type of its layer.
        bucket_ids: the histogram bucket of every value, 1-d, so that many masks can be counted without logarithms.
        scores: sketches of the scores by metric; of sensitivity only if a gradient was recorded.
        sensitivity: |g w| of every value, float32, 1-d; None without a gradient.
    """

    values: Tensor = field(repr=False)
    layer_type: str
    bucket_ids: Tensor = field(repr=False)
    scores: dict[str, LogHistogram] = field(repr=False)
    sensitivity: Tensor | None = field(default=None, repr=False)

    @classmethod
    def from_tensor(cls, name: str, tensor: Tensor, layer_type: str | None, gradient: Tensor | None) -> ScoredWeight:
        """Score one weight; `layer_type` None is guessed from the name, and a gradient of another shape is ignored."""
        flat = tensor.detach().reshape(-1)
        ids = LogHistogram.bucket_ids(flat, SKETCH_ALPHA, where=name)
        scores = {MAGNITUDE: LogHistogram.from_bucket_ids(ids, SKETCH_ALPHA).magnitudes()}
        sensitivities = None
        if gradient is not None and gradient.shape == tensor.shape:
            sensitivities = sensitivity(flat, gradient.reshape(-1))
            scores[SENSITIVITY] = LogHistogram.from_tensor(sensitivities, SKETCH_ALPHA, where=f"gradient of {name}")
        return cls(flat, layer_type or layer_type_from_name(name, tensor.dim()), ids, scores, sensitivities)

    def usable_metric(self, requested: str) -> str:
        """The requested metric, or magnitude if there is no gradient."""
        return requested if requested in self.scores else MAGNITUDE


def score_weights(
    tensors: Mapping[str, Tensor], layer_types: Mapping[str, str], gradients: Mapping[str, Tensor]
) -> dict[str, ScoredWeight]:
    """Score weights, by name. A weight whose gradient is missing or of another shape is ranked by magnitude."""
    with torch.no_grad():
        return {
            name: ScoredWeight.from_tensor(name, x, layer_types.get(name), gradients.get(name))
            for name, x in tensors.items()
        }
