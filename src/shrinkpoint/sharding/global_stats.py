"""Statistics of global tensors for codebooks and thresholds, the same on every rank.

Shards report counts, sums and extremes, never values; a statistic of a tensor that a rank has all of is final, and is
computed as one process would. Reports are merged in rank order, in float64 or in integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.quantize.exponent_buckets import NUM_BUCKETS, ExponentBuckets
from shrinkpoint.quantize.layer_types import layer_type_from_name
from shrinkpoint.quantize.levels import min_max
from shrinkpoint.quantize.statistics import LogHistogram
from shrinkpoint.sharding.collectives import Array
from shrinkpoint.sharding.global_tensors import GlobalTensors

_RADIX_DIGITS = ((21, 10), (10, 11), (0, 10))
"""(lowest bit, number of bits) of the digits of a magnitude's bit pattern, the most significant digit first."""


class GlobalStats:
    """Statistics of global tensors, by their names. Every method that takes tensors or reports is a collective.

    Args:
        global_tensors: the tensors of all ranks.
        global_names: names of the weights of all ranks that statistics are about, in the same order on every rank.
    """

    def __init__(self, global_tensors: GlobalTensors, global_names: Iterable[str] = ()) -> None:
        self.global_tensors = global_tensors
        self.global_names = tuple(global_names)

    # no collectives

    def global_name(self, name: str) -> str:
        """The name of the global tensor that a local tensor is a shard of."""
        return self.global_tensors.global_names[name]

    def local_seed(self, name: str, global_seed: int) -> int:
        """The seed of random numbers that differ between the shards of a tensor."""
        shard = self.global_tensors.local_shards[name]
        return global_seed if name in self.global_tensors.whole else shard.spec.dither_seed(global_seed, shard.sizes)

    # collectives

    def layer_types(self, names: Iterable[str], module_layer_types: Mapping[str, str]) -> dict[str, str]:
        """The type of layer of each weight of all ranks, by global name.

        Args:
            names: of local weights.
            module_layer_types: by local name, where a module tells more than a name.
        """
        types = self.global_tensors.reduce(
            {name: module_layer_types.get(name) for name in names}, lambda shards: next(filter(None, shards), None)
        )
        return {
            name: types.get(name) or layer_type_from_name(name, len(self.global_tensors.shapes[name]))
            for name in self.global_names
        }

    def sum_histograms(self, histograms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums of the histograms of shards, by global name; int64 [cells], on the CPU if ranks were added up."""
        return self.global_tensors.reduce_arrays(histograms, HistogramSum())

    def merge_sketches(self, sketches: Mapping[str, LogHistogram], alpha: float = 0.01) -> dict[str, LogHistogram]:
        """The sketches of global tensors from those of shards, all of one `alpha`."""
        sums = self.sum_histograms({name: sketch.counts for name, sketch in sketches.items()})
        return {name: LogHistogram(alpha, counts) for name, counts in sums.items()}

    def exponent_buckets(self, tensors: Mapping[str, Tensor], *, shared: bool) -> dict[str, ExponentBuckets]:
        """The exponent buckets of global tensors; `shared`: those of all tensors together, for each of them."""
        local = {name: ExponentBuckets.from_tensor(tensor) for name, tensor in tensors.items()}
        merged = self.global_tensors.reduce_arrays(local, _ExponentBucketsMerge())
        if not shared or not merged:
            return merged
        in_order = [merged[name] for name in self.global_tensors.shapes if name in merged]
        return dict.fromkeys(merged, _merge_buckets(in_order))

    def max_over_shards(self, numbers: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        """The largest of each number that shards report, by global name."""
        return self.global_tensors.reduce(numbers, lambda shards: tuple(map(max, zip(*shards, strict=True))))

    def sum_over_shards(self, numbers: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        """The sum of each number that shards report, by global name."""
        return self.global_tensors.reduce_primary(
            numbers, lambda shards: tuple(map(math.fsum, zip(*shards, strict=True)))
        )

    def min_max(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """The smallest and the largest value of each global tensor that has values."""
        limits = {name: min_max(tensor) for name, tensor in tensors.items() if tensor.numel()}
        return self.global_tensors.reduce(
            limits, lambda shards: (min(low for low, _ in shards), max(high for _, high in shards))
        )

    def mean(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """The mean of each global tensor: `Tensor.mean` if one rank has all of it, else from float64 sums."""
        return self.global_tensors.reduce_statistic(
            tensors,
            lambda x: float(x.mean()),
            lambda x: (float(x.sum(dtype=torch.float64)), x.numel()),
            lambda parts: math.fsum(total for total, _ in parts) / max(1, sum(count for _, count in parts)),
        )

    def median_magnitudes(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """The median magnitude of each global tensor, exactly that of `Tensor.median`.

        Args:
            tensors: float32, finite.
        """
        whole = {name: float(x.abs().median()) for name, x in tensors.items() if name in self.global_tensors.whole}
        split = {name: x for name, x in tensors.items() if name not in whole}
        medians = _kth_smallest(split, self.global_name, self.sum_histograms, lambda count: (count - 1) // 2)
        return medians | self.global_tensors.reduce(whole, lambda ranks: ranks[0])

    def count_among_largest(self, magnitudes: Tensor, k: int, counts: Sequence[int]) -> int:
        """Number of this rank's values among the k largest magnitudes of all ranks; lower ranks take ties first.

        Args:
            magnitudes: this rank's, float [n].
            counts: how many magnitudes each rank has.
        """
        rank = self.global_tensors.collectives.rank
        if sum(counts) in (k, max(counts)):  # all of them, or all on one rank
            return min(k, counts[rank])

        def add_up(histograms: Mapping[str, Tensor]) -> dict[str, Tensor]:
            summed = self.global_tensors.collectives.reduce_arrays({0: [*histograms.values()]}, HistogramSum())
            return dict.fromkeys(histograms, summed[0])

        limit = _kth_smallest({"": magnitudes.float().cpu()}, str, add_up, lambda count: count - k)[""]
        local = int((magnitudes > limit).sum()), int((magnitudes == limit).sum())
        reports = self.global_tensors.collectives.all_gather(local)
        remaining = k - sum(above for above, _ in reports) - sum(ties for _, ties in reports[:rank])
        return local[0] + min(max(remaining, 0), local[1])


def _kth_smallest(
    tensors: Mapping[str, Tensor],
    global_name: Callable[[str], str],
    sum_histograms: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    rank: Callable[[int], int],
) -> dict[str, float]:
    """The magnitude of a given rank in ascending order: radix selection, digit by digit from histograms.

    Args:
        tensors: float32, finite.
        global_name: maps names of `tensors` to those of the result.
        sum_histograms: sums histograms over shards, by global name.
        rank: maps a tensor's number of values to the rank, from 0.
    """
    bits = {name: tensor.detach().reshape(-1).abs().view(torch.int32) for name, tensor in tensors.items()}
    prefixes, ranks = dict[str, int](), dict[str, int]()
    for start, width in _RADIX_DIGITS:
        histograms = sum_histograms(
            {name: _digit_histogram(b, prefixes.get(global_name(name), 0), start, width) for name, b in bits.items()}
        )
        for name, counts in histograms.items():
            cumulative = counts.cumsum(0)
            remaining = ranks.setdefault(name, rank(int(cumulative[-1])))
            digit = int(torch.searchsorted(cumulative, remaining, right=True))
            ranks[name] = remaining - (int(cumulative[digit - 1]) if digit else 0)
            prefixes[name] = prefixes.get(name, 0) | digit << start
    return {name: float(torch.tensor(b, dtype=torch.int32).view(torch.float32)) for name, b in prefixes.items()}


def _digit_histogram(bits: Tensor, prefix: int, start: int, width: int) -> Tensor:
    """Count of each digit after a prefix of higher digits; int64 [2**width]."""
    matching = bits[bits >> (start + width) == prefix >> (start + width)]
    return torch.bincount((matching >> start) & ((1 << width) - 1), minlength=1 << width)


class HistogramSum:
    """Adds up histograms: int64 [cells], of as many cells on every rank."""

    reductions: ClassVar = (np.add,)

    def merge(self, arrays: list[Tensor]) -> Tensor:
        first, *rest = arrays
        return sum(rest, first)

    def to_cells(self, array: Tensor) -> tuple[Array, list[Array]]:
        dense = array.reshape(-1).cpu().numpy()
        indices = np.flatnonzero(dense[:-1])
        indices = np.append(indices, dense.size - 1)  # the last cell tells how many there are
        return indices, [dense[indices]]

    def from_cells(self, indices: Array, columns: list[Array]) -> Tensor:
        return _to_dense(int(indices[-1]) + 1, indices, columns[0])


class _ExponentBucketsMerge:
    """Merges the exponent buckets of shards; those without values are not sent."""

    reductions: ClassVar = (np.add, np.add, np.minimum, np.maximum)

    def merge(self, arrays: list[ExponentBuckets]) -> ExponentBuckets:
        return _merge_buckets(arrays)

    def to_cells(self, array: ExponentBuckets) -> tuple[Array, list[Array]]:
        indices = array.counts.nonzero().reshape(-1)
        columns = (array.counts, array.sums, array.minimum, array.maximum)
        return indices.numpy(), [column[indices].numpy() for column in columns]

    def from_cells(self, indices: Array, columns: list[Array]) -> ExponentBuckets:
        counts, sums, minimum, maximum = (_to_dense(NUM_BUCKETS, indices, column) for column in columns)
        return ExponentBuckets(counts, sums, minimum.float(), maximum.float())


def _to_dense(size: int, indices: Array, values: Array) -> Tensor:
    dense = torch.zeros(size, dtype=torch.from_numpy(values).dtype)
    dense[torch.from_numpy(indices)] = torch.from_numpy(values)
    return dense


def _merge_buckets(buckets: Iterable[ExponentBuckets]) -> ExponentBuckets:
    first, *rest = buckets
    return sum(rest, first)
