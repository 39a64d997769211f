"""The weights of one state as global tensors: their shapes and statistics, the same on every rank.

A rank that has all of a tensor computes a statistic as one process would, and what it reports is final. Of a tensor
that is split over ranks, the reports are partial sums, which every rank merges in rank order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.quantize.statistics import CODE_LIMIT, count_codes, entropy_bits, entropy_bits_of_counts, weight_std
from shrinkpoint.sharding.global_tensors import GlobalTensors, count_mean_m2, merge_mean_std


class GlobalWeights:
    """Weights that are quantized, and what every rank knows of all of them. Making one is a collective.

    Args:
        tensors: all tensors of the state, on all ranks.
        local: this rank's shards of the weights, by name; none of them empty, all finite.
        global_names: names of the weights of all ranks, in the same order on every rank.

    Attributes:
        tensors, local: as given.
        templates: each global weight without values (on the "meta" device), by global name.
        std: the standard deviation of each global weight, by global name.
    """

    def __init__(self, tensors: GlobalTensors, local: Mapping[str, Tensor], global_names: Iterable[str]) -> None:
        self.tensors, self.local = tensors, dict(local)
        self.templates = {name: torch.empty(tensors.shapes[name], device="meta") for name in global_names}
        reports = tensors.gather_by_tensor(
            {
                name: weight_std(weight) if self.is_whole(name) else count_mean_m2(weight)
                for name, weight in self.local.items()
                if tensors.is_primary(name)
            }
        )
        self.std = {name: _merge_std(parts) for name, parts in reports.items()}

    def global_name(self, name: str) -> str:
        """The name of the global tensor that a local tensor is a shard of."""
        return self.tensors.global_name(name)

    def is_whole(self, name: str) -> bool:
        """Whether this rank has all of a tensor."""
        return is_whole(self.tensors, name)

    def is_primary(self, name: str) -> bool:
        """Whether this rank's shard counts in sums over ranks: no rank before has the same one."""
        return self.tensors.is_primary(name)

    def global_numel(self, name: str) -> int:
        """The number of values of the global tensor."""
        return self.tensors.local_shards[name].spec.global_numel

    def sampled_rows(self, name: str, max_numel: int) -> slice:
        """Rows of a local shard that are every n-th of the global matrix: about `max_numel` values of all of it."""
        spec = self.tensors.local_shards[name].spec
        stride = max(1, spec.global_numel // max_numel)
        return slice(-spec.first_row % stride, None, stride)

    def local_seed(self, name: str, global_seed: int) -> int:
        """The dither seed of a local shard, given that of the global tensor."""
        shard = self.tensors.local_shards[name]
        return shard.spec.dither_seed(global_seed, shard.sizes)

    def share_by_tensor(self, counts: Mapping[str, tuple[int, int]]) -> dict[str, float]:
        """The share of values that are counted, by global name; a collective.

        Args:
            counts: by local name, how many values are counted, and how many there are.
        """
        reports = self.tensors.gather_by_tensor({n: pair for n, pair in counts.items() if self.is_primary(n)})
        return {
            name: sum(counted for counted, _ in pairs) / max(1, sum(numel for _, numel in pairs))
            for name, pairs in reports.items()
        }


def is_whole(tensors: GlobalTensors, name: str) -> bool:
    """Whether this rank has all of the global tensor that a local one is a shard of."""
    shard = tensors.local_shards[name]
    return shard.sizes == shard.spec.global_shape


def total_entropy_bits(tensors: GlobalTensors, codes: Mapping[str, Tensor], *, are_sampled: bool = False) -> float:
    """The entropy of the codes of global tensors, in bits, summed over tensors; a collective.

    Args:
        codes: codes of local shards, integers of any dtype.
        are_sampled: `codes` are those of some rows only; the result is extrapolated to whole tensors.
    """
    reports = tensors.gather_by_tensor(
        {
            name: (values.numel(), entropy_bits(values)) if is_whole(tensors, name) else _trim(count_codes(values))
            for name, values in codes.items()
            if tensors.is_primary(name)
        }
    )
    total = 0.0
    for name, parts in reports.items():
        count, bits = _merge_entropy(parts)
        total += bits * math.prod(tensors.shapes[name]) / max(1, count) if are_sampled else bits
    return total


def _merge_std(reports: Sequence[Any]) -> float:
    """The standard deviation of a tensor: that of the rank which has all of it, or merged from those of its shards."""
    return reports[0] if isinstance(reports[0], float) else merge_mean_std(reports)[1]


def _merge_entropy(reports: Sequence[tuple[int, Any]]) -> tuple[int, float]:
    """How many codes a tensor has, and their entropy in bits."""
    if isinstance(reports[0][1], float):
        return reports[0]
    counts = np.zeros(2 * CODE_LIMIT, np.int64)
    for start, part in reports:
        counts[start : start + part.size] += part
    return int(counts.sum()), entropy_bits_of_counts(torch.from_numpy(counts))


def _trim(counts: Tensor) -> tuple[int, Any]:
    """The index of the first count that is not zero, and the counts from there to the last such one; uint32."""
    indices = counts.nonzero().reshape(-1)
    if not indices.numel():
        return 0, np.empty(0, np.uint32)
    first, last = int(indices[0]), int(indices[-1])
    return first, counts[first : last + 1].cpu().numpy().astype(np.uint32)
