"""Decides by scores which values are pruned, protected or quantized, and predicts the bytes of all settings.

Scores and decisions are the parameter ranking of arXiv 2306.11800."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint.codec.reference import RESERVED_CODES
from shrinkpoint.quantize.layer_types import layer_type_from_name
from shrinkpoint.quantize.statistics import LogHistogram
from shrinkpoint.schemes.search.candidates import SIZE_SAMPLE, PreviousCodes, subsample


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


SKETCH_ALPHA = 0.01  # The relative error of quantiles; "a strict 1 %" in the paper
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


_QUANTIZED = RESERVED_CODES
_ITERATIONS = 8
_RECORD_OVERHEAD = 300  # Bytes of a tensor apart from its codes: its entry in the header, its tables, its centers


@dataclass
class SizeModel:
    """Predicts the bytes of all settings from samples; a search orders its trials by them.

    The size is that of a delta: the entropy of a code given the parent's code of the same value. All tensors are worked
    on at once, one row each, because a search asks for hundreds of settings.

    Attributes:
        weights: the scored weights by name; row i is the i-th of them.
        partition: decides which values are pruned and protected.
        previous_codes: codes and centers of the parent checkpoint.
        sigma: weight of density against magnitude in the clustering.
        noise: uniform noise for each value by name, 1-d, by which values are rounded; empty: to the nearest.
        values: float32 [rows, samples], ascending in each row.
        present: bool [rows, samples]: which entries are samples; short rows are padded.
        sensitivity: of the samples, for each row; None without a gradient.
        contexts: int64 [rows, samples], the parent's codes of the same values; -1 in rows that have none.
        scale: values of the tensor for each sample, [rows].
    """

    weights: Mapping[str, ScoredWeight]
    partition: PrunePartition
    previous_codes: PreviousCodes
    sigma: float
    noise: Mapping[str, Tensor] = field(default_factory=dict)
    _masks: dict[tuple[str, float, float], Tensor] = field(default_factory=dict)
    _predictions: dict[tuple[int, str, float, float], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = [subsample(weight.values).float().cpu() for weight in self.weights.values()]
        orders = [row.argsort() for row in rows]
        self.values = _pad_rows([row[order] for row, order in zip(rows, orders, strict=True)], math.inf)
        self.present = self.values.isfinite()
        self.sensitivity = [
            None if weight.sensitivity is None else subsample(weight.sensitivity).cpu()[order]
            for weight, order in zip(self.weights.values(), orders, strict=True)
        ]
        codes = [
            self.previous_codes.codes[name][order].long()
            if name in self.previous_codes.codes
            else torch.full((row.numel(),), -1)
            for name, row, order in zip(self.weights, rows, orders, strict=True)
        ]
        self.contexts = _pad_rows(codes, -1)
        noise_rows = [
            subsample(self.noise[name]).cpu()[order]
            for name, order in zip(self.weights, orders, strict=True)
            if self.noise
        ]
        self._noise_rows = _pad_rows(noise_rows, 0.0) if noise_rows else None
        self.scale = torch.tensor(
            [weight.values.numel() / row.numel() for weight, row in zip(self.weights.values(), rows, strict=True)]
        )

    def predict(self, bins: int, metric: str, prune: float, protect: float) -> Tensor:
        """Predicted bytes of each tensor, [rows]."""
        key = (bins, metric, prune, protect)
        if key not in self._predictions:
            mask = self._mask(metric, prune, protect)
            codes = self._codes(bins, mask)
            bits = _conditional_entropy(self.contexts + 1, codes, self.present, bins + RESERVED_CODES)
            protected = ((mask == 1) & self.present).sum(1)
            self._predictions[key] = self.scale * (bits / 8 + 2 * protected) + _RECORD_OVERHEAD
        return self._predictions[key]

    def _mask(self, metric: str, prune: float, protect: float) -> Tensor:
        """Codes of pruned and protected values, int64 [rows, samples]; `_QUANTIZED` where a value gets a center."""
        key = (metric, prune, protect)
        if key not in self._masks:
            mask = torch.full(self.values.shape, _QUANTIZED)
            for row, (weight, sensitivity) in enumerate(zip(self.weights.values(), self.sensitivity, strict=True)):
                magnitudes = self.values[row][self.present[row]].abs()
                pruned, protected = self.partition.masks_of_sample(
                    weight, magnitudes, sensitivity, metric, prune, protect
                )
                mask[row, : magnitudes.numel()].masked_fill_(pruned, 0).masked_fill_(protected, 1)
            self._masks[key] = mask
        return self._masks[key]

    def _codes(self, bins: int, mask: Tensor) -> Tensor:
        """Codes of all samples, by weighted k-means in each row, int64 [rows, samples]."""
        free = (mask == _QUANTIZED) & self.present
        x = torch.where(free, self.values, 0.0).double()
        weight = self.sigma * _normalize_rows(free.double()) + (1 - self.sigma) * _normalize_rows(x.abs())
        weight = torch.where(free, weight, 0.0)
        mass, moment = _running_sums(weight), _running_sums(weight * x)
        # Initial centers, and the rows in which they stay: those of the parent checkpoint hardly move.
        targets = (torch.arange(bins) + 0.5) / bins * mass[:, -1:]
        indices = torch.searchsorted(mass[:, 1:].contiguous(), targets).clamp_(max=self.values.shape[1] - 1)
        centers = torch.where(self.present, self.values, 0.0).double().gather(1, indices)
        warm = torch.zeros(len(self.weights), 1, dtype=torch.bool)
        for row, name in enumerate(self.weights):
            previous = self.previous_codes.centers.get(name)
            if previous is not None and previous.numel() == bins:
                centers[row], warm[row] = previous.double(), True
        centers = centers.sort(dim=1).values
        for _ in range(_ITERATIONS):
            ends = torch.searchsorted(self.values, _row_midpoints(centers).float())
            cells = _sums_between(mass, ends)
            means = _sums_between(moment, ends) / cells
            centers = torch.where((cells > 0) & ~warm, means, centers)
        if self._noise_rows is not None:
            return self._dither_codes(centers.float(), mask, self._noise_rows)
        cells = torch.searchsorted(_row_midpoints(centers).float(), self.values)
        return torch.where(free, cells + RESERVED_CODES, mask)

    def _dither_codes(self, centers: Tensor, mask: Tensor, noise: Tensor) -> Tensor:
        """Codes of values that are rounded by noise to one of the two nearest centers, with one row per tensor."""
        codes = torch.arange(RESERVED_CODES, RESERVED_CODES + centers.shape[1]).expand_as(centers)
        if bool((mask == 0).any()):
            centers, order = torch.nn.functional.pad(centers, (0, 1)).sort(dim=1, stable=True)
            codes = torch.nn.functional.pad(codes, (0, 1)).gather(1, order)
        values = torch.where(self.present, self.values, 0.0)
        below = torch.searchsorted(centers, values, right=True).sub_(1).clamp_(0, max(centers.shape[1] - 2, 0))
        above = (below + 1).clamp_(max=centers.shape[1] - 1)
        low, high = centers.gather(1, below), centers.gather(1, above)
        rounded = codes.gather(1, torch.where(noise * (high - low) < values - low, above, below))
        return torch.where(mask == 1, mask, rounded)


def _pad_rows(rows: list[Tensor], fill: float) -> Tensor:
    padded = torch.full((len(rows), min(SIZE_SAMPLE, max(row.numel() for row in rows))), fill, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        padded[i, : row.numel()] = row
    return padded


def _normalize_rows(x: Tensor) -> Tensor:
    return x / x.sum(1, keepdim=True).clamp(min=1e-300)


def _running_sums(x: Tensor) -> Tensor:
    """Running sums with a zero in front, [rows, samples + 1]."""
    return torch.nn.functional.pad(x.cumsum(1), (1, 0))


def _sums_between(sums: Tensor, ends: Tensor) -> Tensor:
    """Sums between neighbouring ends, before the first one and after the last one, from running sums."""
    inner = sums.gather(1, ends)
    return torch.cat([inner, sums[:, -1:]], 1) - torch.cat([torch.zeros_like(sums[:, :1]), inner], 1)


def _row_midpoints(centers: Tensor) -> Tensor:
    return ((centers[:, 1:] + centers[:, :-1]) / 2).contiguous()


def _conditional_entropy(contexts: Tensor, codes: Tensor, present: Tensor, num_codes: int) -> Tensor:
    """Bits of all codes of each row given their contexts, with the bias of small samples corrected (Miller, Madow)."""
    rows, num_contexts = codes.shape[0], int(contexts.max()) + 1
    keys = (torch.arange(rows)[:, None] * num_contexts + contexts) * num_codes + codes
    counts = torch.bincount(keys[present], minlength=rows * num_contexts * num_codes)
    counts = counts.reshape(rows, num_contexts, num_codes).double()
    totals = counts.sum(2, keepdim=True)
    bits = -(torch.special.xlogy(counts, counts) - torch.special.xlogy(counts, totals)).sum((1, 2)) / math.log(2)
    cells = ((counts > 0).sum(2) - 1).clamp(min=0).sum(1)
    return torch.add(bits, cells, alpha=1 / (2 * math.log(2)))
