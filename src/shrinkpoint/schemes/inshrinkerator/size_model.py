"""Predicts the bytes of all settings from samples; a search orders its trials by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import RESERVED_CODES
from shrinkpoint.schemes.inshrinkerator.partition import PrunePartition, ScoredWeight
from shrinkpoint.schemes.search.candidates import SIZE_SAMPLE, PreviousCodes, subsample

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
            [weight.values.numel() / row.numel() for weight, row in zip(self.weights.values(), rows, strict=True)],
            dtype=torch.float32,
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
        targets = (torch.arange(bins, dtype=torch.float32) + 0.5) / bins * mass[:, -1:]
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
