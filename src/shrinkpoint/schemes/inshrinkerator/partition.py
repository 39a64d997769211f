"""Which values are pruned, which are protected, and which are quantized (arXiv 2306.11800, parameter ranking)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shrinkpoint.quantize.importance import magnitude
from shrinkpoint.quantize.sketch import LogHistogram
from shrinkpoint.schemes.inshrinkerator.scores import MAGNITUDE, SENSITIVITY, ScoredWeight


@dataclass
class PrunePartition:
    """Thresholds from sketches, no sorting.

    * Protected are the values above the quantile `1 - share` of all weights together, by size or by sensitivity: the
      union of both, so up to twice the share.
    * Pruned are the values below the quantile `share` of the weights of the same kind of layer, by one metric: the same
      share for every kind. Zeros always are. What is both is protected.

    A quantile is known up to its bucket; values in that bucket are neither, so no share is exceeded. Right after a
    restore weights lie on few values, of which a whole one could else be pruned for lying in the lower half of it.

    A weight without a recorded gradient (frozen, or not reached) is ranked by size whatever the metric.

    Attributes:
        paper: as the paper, which stops at the quantile: values in its bucket are pruned, or protected, too, so that
            no share falls short of what was asked, and one may be exceeded.
    """

    weights: Mapping[str, ScoredWeight]
    paper: bool = False
    _prune_thresholds: dict[tuple[str, float], dict[tuple[str, str], float]] = field(default_factory=dict)
    _protect_thresholds: dict[float, dict[str, float]] = field(default_factory=dict)

    def prune_threshold(self, weight: ScoredWeight, metric: str, share: float) -> float:
        """Below this score, a value of `weight` is pruned."""
        key = (metric, share)
        if key not in self._prune_thresholds:
            pools: dict[tuple[str, str], LogHistogram] = {}
            for one in self.weights.values():
                used = one.usable_metric(metric)
                pool = (one.layer_type, used)
                pools[pool] = pools[pool] + one.scores[used] if pool in pools else one.scores[used]
            self._prune_thresholds[key] = {
                pool: self._bucket_edge(sketch, share, above=self.paper) if share else 0.0
                for pool, sketch in pools.items()
            }
        return self._prune_thresholds[key][weight.layer_type, weight.usable_metric(metric)]

    def protect_thresholds(self, share: float) -> dict[str, float]:
        """By metric: above this score, a value is protected."""
        if share not in self._protect_thresholds:
            sketches: dict[str, LogHistogram] = {}
            for one in self.weights.values():
                for metric, sketch in one.scores.items():
                    sketches[metric] = sketches[metric] + sketch if metric in sketches else sketch
            self._protect_thresholds[share] = {
                metric: self._bucket_edge(sketch, 1 - share, above=not self.paper)
                for metric, sketch in sketches.items()
            }
        return self._protect_thresholds[share]

    @staticmethod
    def _bucket_edge(sketch: LogHistogram, share: float, *, above: bool) -> float:
        """Where the bucket of a quantile ends, or begins."""
        return sketch.quantile(share) / (1 - sketch.alpha if above else 1 + sketch.alpha)

    def masks(self, weight: ScoredWeight, metric: str, prune: float, protect: float) -> tuple[Tensor, Tensor]:
        """(pruned, protected) of every value; bool, without overlap."""
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
        """As `masks`, of some of the values of `weight`, of which sizes and sensitivity are given."""
        limits = self.protect_thresholds(protect)
        protected = magnitudes > limits[MAGNITUDE]
        if sensitivity is not None:
            protected |= sensitivity > limits[SENSITIVITY]
        scores = sensitivity if metric == SENSITIVITY and sensitivity is not None else magnitudes
        pruned = (scores < self.prune_threshold(weight, metric, prune)) | (magnitudes == 0)
        return pruned & ~protected, protected
