"""Decides by scores which values are pruned, protected or quantized: the parameter ranking of arXiv 2306.11800."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint.quantize.layer_types import layer_type_from_name
from shrinkpoint.quantize.statistics import LogHistogram


def magnitude(weights: Tensor) -> Tensor:
    """Return `|w|`, float32. Needs no gradients, and ranks weights well near convergence."""
    return weights.detach().to(torch.float32).abs()


def sensitivity(weights: Tensor, gradients: Tensor) -> Tensor:
    """Return `|g * w|`: the first-order change of the loss if a weight is set to zero.

    Ranks weights well early in training; where gradients vanish it says little. A common factor of all gradients (a
    loss scale) changes no rank.

    Args:
        weights: floats of any dtype and shape.
        gradients: signed mean gradients, of the shape of `weights`, on any device.

    Returns:
        float32, on the device of `weights`.
    """
    signed = gradients.detach().to(device=weights.device, dtype=torch.float32)
    return signed.mul(weights.detach().to(torch.float32)).abs_()


SKETCH_ALPHA = 0.01  # The relative error of quantiles; "a strict 1%" in the paper
MAGNITUDE, SENSITIVITY = "magnitude", "sensitivity"


@dataclass(frozen=True)
class ScoredWeight:
    """One weight with the scores by which its values are ranked."""

    values: Tensor = field(repr=False)  # 1-d, of the weight's dtype
    layer_type: str  # the type of its layer
    # The histogram bucket of every value, 1-d, so that many masks can be counted without logarithms.
    bucket_ids: Tensor = field(repr=False)
    # Sketches of the scores by metric; of sensitivity only if a gradient was recorded.
    scores: dict[str, LogHistogram] = field(repr=False)
    # |g w| of every value, float32, 1-d; None without a gradient.
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


@dataclass
class PrunePartition:
    """Thresholds of pruning and protection, taken from sketches of the scores without sorting.

    * Protected are the values above the quantile `1 - share` of all weights together, by magnitude or by sensitivity:
      the union of both, so up to twice the share.
    * Pruned are the values below the quantile `share` of the weights of the same layer type, by one metric: the same
      share for every type. Zeros always are. Values that are both are protected.

    A quantile is known up to its bucket; values in that bucket are neither, so no share is exceeded. Right after a
    restore, weights have few different values; all that share one could otherwise be pruned because it lies in the
    lower half of the bucket.

    A weight without a recorded gradient (frozen, or not reached) is ranked by magnitude whatever the metric.
    """

    weights: Mapping[str, ScoredWeight]  # the scores of all global weights, by name
    # As the paper, which includes the quantile's bucket: its values are pruned, or protected, too, so that no share
    # falls short of what was asked, and one may be exceeded.
    paper: bool = False
    _prune_thresholds: dict[tuple[str, float], dict[tuple[str, str], float]] = field(default_factory=dict)
    _protect_thresholds: dict[float, dict[str, float]] = field(default_factory=dict)

    def prune_threshold(self, weight: ScoredWeight, metric: str, share: float) -> float:
        """The score below which a value of `weight` is pruned."""
        key = (metric, share)
        if key not in self._prune_thresholds:
            groups: dict[tuple[str, str], list[LogHistogram]] = {}
            for scored in self.weights.values():
                used = scored.usable_metric(metric)
                groups.setdefault((scored.layer_type, used), []).append(scored.scores[used])
            self._prune_thresholds[key] = {
                group: self._bucket_edge(sketches, share, above=self.paper) if share else 0.0
                for group, sketches in groups.items()
            }
        return self._prune_thresholds[key][weight.layer_type, weight.usable_metric(metric)]

    def protect_thresholds(self, share: float) -> dict[str, float]:
        """The scores above which a value is protected, by metric."""
        if share not in self._protect_thresholds:
            groups: dict[str, list[LogHistogram]] = {}
            for scored in self.weights.values():
                for metric, sketch in scored.scores.items():
                    groups.setdefault(metric, []).append(sketch)
            self._protect_thresholds[share] = {
                metric: self._bucket_edge(sketches, 1 - share, above=not self.paper)
                for metric, sketches in groups.items()
            }
        return self._protect_thresholds[share]

    @staticmethod
    def _bucket_edge(sketches: Sequence[LogHistogram], share: float, *, above: bool) -> float:
        """The upper (`above`) or lower end of the bucket of a quantile of all sketched values."""
        sketch = sum(sketches[1:], sketches[0])
        return sketch.quantile(share) / (1 - sketch.alpha if above else 1 + sketch.alpha)

    def masks(self, weight: ScoredWeight, metric: str, prune: float, protect: float) -> tuple[Tensor, Tensor]:
        """(pruned, protected): bool, 1-d, one for every value of `weight`; none is both."""
        return self.masks_of_sample(weight, magnitude(weight.values), weight.sensitivity, metric, prune, protect)

    def masks_of_sample(
        self,
        weight: ScoredWeight,
        magnitudes: Tensor,
        sensitivity: Tensor | None,
        metric: str,
        prune: float,
        protect: float,
    ) -> tuple[Tensor, Tensor]:
        """(pruned, protected) of some values of `weight`, given their magnitudes and sensitivities (None: unknown)."""
        limits = self.protect_thresholds(protect)
        protected = magnitudes > limits[MAGNITUDE]
        if sensitivity is not None:
            protected |= sensitivity > limits[SENSITIVITY]
        scores = sensitivity if metric == SENSITIVITY and sensitivity is not None else magnitudes
        pruned = (scores < self.prune_threshold(weight, metric, prune)) | (magnitudes == 0)
        return pruned & ~protected, protected
