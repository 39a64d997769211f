"""Sizes of all settings, predicted from samples: what a search orders its trials by.

The size that counts is that of the delta: the entropy of a code given the code that stood in its place before (D21).
All tensors are worked on at once, a row each, because a search asks for hundreds of settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import RESERVED_CODES
from shrinkpoint.schemes.inshrinkerator.partition import PrunePartition
from shrinkpoint.schemes.inshrinkerator.scores import ScoredWeight
from shrinkpoint.schemes.search.candidates import SIZE_SAMPLE, PreviousCodes, subsample

_QUANTIZED = RESERVED_CODES
_ITERATIONS = 8
_RECORD_OVERHEAD = 300
"""Bytes of a tensor whatever its codes are: its place in the header, its tables, its centers."""


@dataclass
class SizeModel:
    """Predicted bytes, a row for each tensor.

    Attributes:
        values: float32 [rows, samples], ascending in each row.
        present: which of them are samples; short rows are filled up.
        contexts: int64 [rows, samples], the codes in their places before; -1 in rows that have none.
        scale: values of the tensor for each sample, [rows].
        noise: by name, what values are rounded by instead of to the nearest, 1-d; empty: by nothing.
    """

    weights: Mapping[str, ScoredWeight]
    partition: PrunePartition
    previous_codes: PreviousCodes
    sigma: float
    noise: Mapping[str, Tensor] = field(default_factory=dict)
    _masks: dict[tuple[str, float, float], Tensor] = field(default_factory=dict)
    _predictions: dict[tuple[int, str, float, float], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = [subsample(one.values).float().cpu() for one in self.weights.values()]
        order = [row.argsort() for row in rows]
        self.values = _pad_rows([row[at] for row, at in zip(rows, order, strict=True)], math.inf)
        self.present = self.values.isfinite()
        self.sensitivity = [
            None if one.sensitivity is None else subsample(one.sensitivity).cpu()[at]
            for one, at in zip(self.weights.values(), order, strict=True)
        ]
        codes = [
            self.previous_codes.codes[name][at].long()
            if name in self.previous_codes.codes
            else torch.full((row.numel(),), -1)
            for name, row, at in zip(self.weights, rows, order, strict=True)
        ]
        self.contexts = _pad_rows(codes, -1)
        drawn = [
            subsample(self.noise[name]).cpu()[at] for name, at in zip(self.weights, order, strict=True) if self.noise
        ]
        self._noise_rows = _pad_rows(drawn, 0.0) if drawn else None
        self.scale = torch.tensor(
            [one.values.numel() / row.numel() for one, row in zip(self.weights.values(), rows, strict=True)]
        )

    def predict(self, bins: int, metric: str, prune: float, protect: float) -> Tensor:
        """Predicted bytes of each tensor, [rows]."""
        key = (bins, metric, prune, protect)
        if key not in self._predictions:
            self._predictions[key] = self._predict_rows(bins, self._mask(metric, prune, protect))
        return self._predictions[key]

    def _mask(self, metric: str, prune: float, protect: float) -> Tensor:
        """Codes of what is pruned or protected; `_QUANTIZED` where a value gets a center."""
        key = (metric, prune, protect)
        if key not in self._masks:
            out = torch.full(self.values.shape, _QUANTIZED)
            for row, (weight, sensitive) in enumerate(zip(self.weights.values(), self.sensitivity, strict=True)):
                here = self.present[row]
                sizes = self.values[row][here].abs()
                pruned, protected = self.partition.masks_of_sample(weight, sizes, sensitive, metric, prune, protect)
                out[row, : sizes.numel()].masked_fill_(pruned, 0).masked_fill_(protected, 1)
            self._masks[key] = out
        return self._masks[key]

    def _predict_rows(self, bins: int, mask: Tensor) -> Tensor:
        codes = self._codes(bins, mask)
        used = bins + RESERVED_CODES
        bits = _conditional_entropy(self.contexts + 1, codes, self.present, used)
        protected = ((mask == 1) & self.present).sum(1)
        return self.scale * (bits / 8 + 2 * protected) + _RECORD_OVERHEAD

    def _codes(self, bins: int, mask: Tensor) -> Tensor:
        free = (mask == _QUANTIZED) & self.present
        x = torch.where(free, self.values, 0.0).double()
        weight = self.sigma * _normalize_rows(free.double()) + (1 - self.sigma) * _normalize_rows(x.abs())
        weight = torch.where(free, weight, 0.0)
        mass, moment = _running_sums(weight), _running_sums(weight * x)
        centers, warm = self._initial_centers(bins, mass)
        for _ in range(_ITERATIONS):
            ends = torch.searchsorted(self.values, _row_midpoints(centers).float())
            cells = _sums_between(mass, ends)
            found = _sums_between(moment, ends) / cells
            centers = torch.where((cells > 0) & ~warm, found, centers)
        if self._noise_rows is not None:
            return self._dither_codes(centers.float(), mask, self._noise_rows)
        cells = torch.searchsorted(_row_midpoints(centers).float(), self.values)
        return torch.where(free, cells + RESERVED_CODES, mask)

    def _dither_codes(self, centers: Tensor, mask: Tensor, noise: Tensor) -> Tensor:
        """As `codec.quantize.clusters.dithered`, a row for each tensor."""
        codes = torch.arange(RESERVED_CODES, RESERVED_CODES + centers.shape[1]).expand_as(centers)
        if bool((mask == 0).any()):
            centers, order = torch.nn.functional.pad(centers, (0, 1)).sort(dim=1, stable=True)
            codes = torch.nn.functional.pad(codes, (0, 1)).gather(1, order)
        values = torch.where(self.present, self.values, 0.0)
        below = torch.searchsorted(centers, values, right=True).sub_(1).clamp_(0, max(centers.shape[1] - 2, 0))
        above = (below + 1).clamp_(max=centers.shape[1] - 1)
        low, high = centers.gather(1, below), centers.gather(1, above)
        found = codes.gather(1, torch.where(noise * (high - low) < values - low, above, below))
        return torch.where(mask == 1, mask, found)

    def _initial_centers(self, bins: int, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Centers to begin with, and the rows in which they stay: those of the previous checkpoint hardly move."""
        wanted = (torch.arange(bins) + 0.5) / bins * mass[:, -1:]
        at = torch.searchsorted(mass[:, 1:].contiguous(), wanted).clamp_(max=self.values.shape[1] - 1)
        centers = torch.where(self.present, self.values, 0.0).double().gather(1, at)
        warm = torch.zeros(len(self.weights), 1, dtype=torch.bool)
        for row, name in enumerate(self.weights):
            before = self.previous_codes.centers.get(name)
            if before is not None and before.numel() == bins:
                centers[row], warm[row] = before.double(), True
        return centers.sort(dim=1).values, warm


def _pad_rows(rows: list[Tensor], fill: float) -> Tensor:
    out = torch.full((len(rows), min(SIZE_SAMPLE, max(row.numel() for row in rows))), fill, dtype=rows[0].dtype)
    for row, one in enumerate(rows):
        out[row, : one.numel()] = one
    return out


def _normalize_rows(x: Tensor) -> Tensor:
    return x / x.sum(1, keepdim=True).clamp(min=1e-300)


def _running_sums(x: Tensor) -> Tensor:
    """Running sums with a zero in front, [rows, samples + 1]."""
    return torch.nn.functional.pad(x.cumsum(1), (1, 0))


def _sums_between(sums: Tensor, ends: Tensor) -> Tensor:
    """What lies between neighbouring ends, the first and last of all included."""
    inner = sums.gather(1, ends)
    return torch.cat([inner, sums[:, -1:]], 1) - torch.cat([torch.zeros_like(sums[:, :1]), inner], 1)


def _row_midpoints(centers: Tensor) -> Tensor:
    return ((centers[:, 1:] + centers[:, :-1]) / 2).contiguous()


def _conditional_entropy(contexts: Tensor, codes: Tensor, present: Tensor, num_codes: int) -> Tensor:
    """Bits of all codes of each row under their contexts; with what so few samples underestimate (Miller, Madow)."""
    rows = codes.shape[0]
    kinds = int(contexts.max()) + 1
    keys = (torch.arange(rows)[:, None] * kinds + contexts) * num_codes + codes
    counts = torch.bincount(keys[present], minlength=rows * kinds * num_codes).reshape(rows, kinds, num_codes).double()
    totals = counts.sum(2, keepdim=True)
    bits = -(torch.special.xlogy(counts, counts) - torch.special.xlogy(counts, totals)).sum((1, 2)) / math.log(2)
    cells = ((counts > 0).sum(2) - 1).clamp(min=0).sum(1)
    return torch.add(bits, cells, alpha=1 / (2 * math.log(2)))
