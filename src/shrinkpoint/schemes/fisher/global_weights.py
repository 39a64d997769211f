"""The weights of one state as global tensors: their shapes and statistics, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shrinkpoint.quantize.statistics import ValueSums, count_codes, entropy_bits, entropy_bits_of_counts, value_sums
from shrinkpoint.sharding.global_stats import HistogramSum
from shrinkpoint.sharding.global_tensors import GlobalTensors, count_mean_m2, merge_mean_std


class GlobalWeights:
    """Weights that are quantized, and what every rank knows of all of them. Making one is a collective.

    Args:
        tensors: all tensors of the state, on all ranks.
        local: this rank's shards of the weights, by name; none of them empty, all finite.
        global_names: names of the weights of all ranks, in the same order on every rank.
        sums: of the values of local shards, by name, as far as they have been computed.

    Attributes:
        tensors, local: as given.
        templates: each global weight without values (on the "meta" device), by global name.
        std: the standard deviation of each global weight, by global name.
    """

    def __init__(
        self,
        tensors: GlobalTensors,
        local: Mapping[str, Tensor],
        global_names: Iterable[str],
        sums: Mapping[str, ValueSums] | None = None,
    ) -> None:
        self.tensors, self.local = tensors, dict(local)
        self.templates = {name: torch.empty(tensors.shapes[name], device="meta") for name in global_names}
        sums = sums or {}
        self.std = tensors.reduce_statistic(
            {name: (shard, sums.get(name)) for name, shard in self.local.items()},
            lambda pair: (pair[1] or value_sums(pair[0])).std,
            lambda pair: count_mean_m2(pair[0]),
            lambda parts: merge_mean_std(parts)[1],
        )

    def global_name(self, name: str) -> str:
        """The name of the global tensor that a local tensor is a shard of."""
        return self.tensors.global_name(name)

    def is_whole(self, name: str) -> bool:
        """Whether this rank has all of the global tensor that a local tensor is a shard of."""
        return self.tensors.is_whole(name)

    def is_primary(self, name: str) -> bool:
        """Whether a local shard counts in sums over ranks: no rank before has the same one."""
        return self.tensors.is_primary(name)

    def global_numel(self, name: str) -> int:
        """The number of values of the global tensor that a local tensor is a shard of."""
        return self.tensors.global_numel(name)

    def sampled_rows(self, name: str, max_numel: int) -> slice:
        """Rows of a local shard that are every n-th of the global matrix: about `max_numel` values of all of it."""
        return self.tensors.sampled_rows(name, max_numel)

    def local_seed(self, name: str, global_seed: int) -> int:
        """The dither seed of a local shard, given that of the global tensor."""
        shard = self.tensors.local_shards[name]
        return shard.spec.dither_seed(global_seed, shard.sizes)

    def share_by_tensor(self, counts: Mapping[str, tuple[int, int]]) -> dict[str, float]:
        """The share of values that are counted, by global name; a collective.

        Args:
            counts: by local name, how many values are counted, and how many there are.
        """
        return self.tensors.reduce_primary(
            counts,
            lambda pairs: sum(counted for counted, _ in pairs) / max(1, sum(numel for _, numel in pairs)),
        )


def total_entropy_bits(tensors: GlobalTensors, codes: Mapping[str, Tensor], *, are_sampled: bool = False) -> float:
    """The entropy of the codes of global tensors, in bits, summed over tensors; a collective.

    Args:
        codes: codes of local shards, integers of any dtype.
        are_sampled: `codes` are those of some rows only; the result is extrapolated to whole tensors.
    """
    split = {name: count_codes(values) for name, values in codes.items() if not tensors.is_whole(name)}
    histograms = tensors.reduce_arrays(split, HistogramSum())
    reports = tensors.reduce_primary(
        {name: None if name in split else (values.numel(), entropy_bits(values)) for name, values in codes.items()},
        lambda ranks: ranks[0],
    )
    total = 0.0
    for name, report in reports.items():
        count, bits = report or (int(histograms[name].sum()), entropy_bits_of_counts(histograms[name]))
        total += bits * math.prod(tensors.shapes[name]) / max(1, count) if are_sampled else bits
    return total
