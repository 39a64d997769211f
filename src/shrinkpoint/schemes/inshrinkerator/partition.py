"""Decides which values are pruned, protected or quantized (arXiv 2306.11800, parameter ranking)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shrinkpoint.quantize.importance import magnitude
from shrinkpoint.quantize.sketch import LogHistogram
from shrinkpoint.schemes.inshrinkerator.scores import MAGNITUDE, SENSITIVITY, ScoredWeight


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

    Attributes:
        weights: the scores of all global weights, by name.
        paper: as the paper, which includes the quantile's bucket: its values are pruned, or protected, too, so that
            no share falls short of what was asked, and one may be exceeded.
    """

    weights: Mapping[str, ScoredWeight]
    paper: bool = False
    _prune_thresholds: dict[tuple[str, float], dict[tuple[str, str], float]] = field(default_factory=dict)
    _protect_thresholds: dict[float, dict[str, float]] = field(default_factory=dict)

    def prune_threshold(self, weight: ScoredWeight, metric: str, share: float) -> float:
        """The score below which a value of `weight` is pruned."""
        key = (metric, share)
        if key not in self._prune_thresholds:
            sketches: dict[tuple[str, str], LogHistogram] = {}
            for scored in self.weights.values():
                used = scored.usable_metric(metric)
                group = (scored.layer_type, used)
                sketches[group] = sketches[group] + scored.scores[used] if group in sketches else scored.scores[used]
            self._prune_thresholds[key] = {
                group: self._bucket_edge(sketch, share, above=self.paper) if share else 0.0
                for group, sketch in sketches.items()
            }
        return self._prune_thresholds[key][weight.layer_type, weight.usable_metric(metric)]

    def protect_thresholds(self, share: float) -> dict[str, float]:
        """The scores above which a value is protected, by metric."""
        if share not in self._protect_thresholds:
            sketches: dict[str, LogHistogram] = {}
            for scored in self.weights.values():
                for metric, sketch in scored.scores.items():
                    sketches[metric] = sketches[metric] + sketch if metric in sketches else sketch
            self._protect_thresholds[share] = {
                metric: self._bucket_edge(sketch, 1 - share, above=not self.paper)
                for metric, sketch in sketches.items()
            }
        return self._protect_thresholds[share]

    @staticmethod
    def _bucket_edge(sketch: LogHistogram, share: float, *, above: bool) -> float:
        """The upper (`above`) or lower end of the bucket of a quantile."""
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
