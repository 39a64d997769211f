"""Statistics of global tensors for codebooks and thresholds, the same on every rank.

Shards report counts, sums and extremes, never values. Every rank merges the reports in rank order, in float64 or in
integers, so all ranks get the same bits. A process that has all of every tensor is the case of one shard: a statistic
of its only part is returned untouched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.quantize.exponent_buckets import ExponentBuckets
from shrinkpoint.quantize.layer_types import layer_type_from_name
from shrinkpoint.quantize.levels import min_max
from shrinkpoint.quantize.statistics import LogHistogram
from shrinkpoint.sharding.global_tensors import GlobalTensors, count_mean_m2, merge_mean_std
from shrinkpoint.tensors.flat_state import FlatState

T = TypeVar("T")
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

    @classmethod
    def from_state(cls, state: FlatState, global_names: Iterable[str] = ()) -> GlobalStats:
        """Statistics of the tensors of a single process."""
        return cls(GlobalTensors.from_state(state), global_names)

    # no collectives

    def global_name(self, name: str) -> str:
        """The name of the global tensor that a local tensor is a shard of."""
        return self.global_tensors.global_name(name)

    def global_numel(self, name: str) -> int:
        """The number of values of the global tensor that a local tensor is a shard of."""
        return self.global_tensors.local_shards[name].spec.global_numel

    def is_whole(self, name: str) -> bool:
        """Whether this rank has all of a tensor."""
        shard = self.global_tensors.local_shards[name]
        return shard.sizes == shard.spec.global_shape

    def local_seed(self, name: str, global_seed: int) -> int:
        """The seed of random numbers that differ between the shards of a tensor."""
        shard = self.global_tensors.local_shards[name]
        return global_seed if self.is_whole(name) else shard.spec.dither_seed(global_seed, shard.sizes)

    # collectives

    def tensors_where_all(self, flags: Mapping[str, bool]) -> set[str]:
        """Global names of the tensors whose shards are all flagged."""
        return self.global_tensors.tensors_where_all(flags)

    def union(self, names: Iterable[str]) -> set[str]:
        """Global names of the tensors of which any rank names a shard."""
        return self.global_tensors.union(names)

    def value_if_equal(self, obj: T) -> T | None:
        """The object that all ranks have; None if they differ."""
        first, *others = self.global_tensors.all_gather(obj)
        return first if all(other == first for other in others) else None

    def layer_types(self, names: Iterable[str], module_layer_types: Mapping[str, str]) -> dict[str, str]:
        """The type of layer of each weight of all ranks, by global name.

        Args:
            names: of local weights.
            module_layer_types: by local name, where a module tells more than a name.
        """
        reports = self.global_tensors.gather_by_tensor({name: module_layer_types.get(name) for name in names})
        known = {name: next(filter(None, types), None) for name, types in reports.items()}
        return {
            name: known.get(name) or layer_type_from_name(name, len(self.global_tensors.shapes[name]))
            for name in self.global_names
        }

    def sum_histograms(self, histograms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums of the histograms of shards, by global name; int64 [cells], on the CPU if there are several shards."""
        if self.global_tensors.is_unsharded:
            return dict(histograms)
        reports = self._gather_primary({name: _sparse_counts(counts) for name, counts in histograms.items()})
        out = {}
        for name, shards in reports.items():
            sums = np.zeros(shards[0][0], np.int64)
            for _, indices, counts in shards:
                sums[indices] += counts
            out[name] = torch.from_numpy(sums)
        return out

    def merge_sketches(self, sketches: Mapping[str, LogHistogram], alpha: float = 0.01) -> dict[str, LogHistogram]:
        """The sketches of global tensors from those of shards, all of one `alpha`."""
        sums = self.sum_histograms({name: sketch.counts for name, sketch in sketches.items()})
        return {name: LogHistogram(alpha, counts) for name, counts in sums.items()}

    def exponent_buckets(self, tensors: Mapping[str, Tensor], *, shared: bool) -> dict[str, ExponentBuckets]:
        """The exponent buckets of global tensors; `shared`: those of all tensors together, for each of them."""
        local = {name: ExponentBuckets.from_tensor(tensor) for name, tensor in tensors.items()}
        if self.global_tensors.is_unsharded:
            buckets = local
        else:
            reports = self._gather_primary({name: _to_sparse(part) for name, part in local.items()})
            buckets = {name: _merge_buckets(map(_to_dense, shards)) for name, shards in reports.items()}
        return dict.fromkeys(buckets, _merge_buckets(buckets.values())) if shared and buckets else buckets

    def max_over_shards(self, numbers: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        """The largest of each number that shards report, by global name."""
        reports = self.global_tensors.gather_by_tensor(dict(numbers))
        return {name: tuple(map(max, zip(*shards, strict=True))) for name, shards in reports.items()}

    def sum_over_shards(self, numbers: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        """The sums of each number that shards report, by global name."""
        reports = self._gather_primary(numbers)
        return {name: tuple(map(math.fsum, zip(*shards, strict=True))) for name, shards in reports.items()}

    def min_max(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """The smallest and the largest value of each global tensor."""
        if self.global_tensors.is_unsharded:
            return {name: min_max(tensor) for name, tensor in tensors.items()}
        limits = {name: min_max(tensor) for name, tensor in tensors.items() if tensor.numel()}
        largest = self.max_over_shards({name: (-low, high) for name, (low, high) in limits.items()})
        return {name: (-negated, high) for name, (negated, high) in largest.items()}

    def mean(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """The mean of each global tensor: `Tensor.mean` if one rank has all of it, else from float64 sums."""
        reports = self._gather_primary(
            {
                name: float(tensor.mean()) if self.is_whole(name) else (_float64_sum(tensor), tensor.numel())
                for name, tensor in tensors.items()
            }
        )
        return {name: _merge_means(shards) for name, shards in reports.items()}

    def mean_std(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """The mean and the standard deviation of each global tensor, in float64."""
        reports = self._gather_primary(
            {
                name: _float64_mean_std(tensor) if self.is_whole(name) else count_mean_m2(tensor)
                for name, tensor in tensors.items()
            }
        )
        return {name: _merge_mean_std(shards) for name, shards in reports.items()}

    def median_magnitudes(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """The median magnitude of each global tensor, exactly that of `Tensor.median`.

        Args:
            tensors: float32, finite.
        """
        if self.global_tensors.is_unsharded:
            return {name: float(tensor.abs().median()) for name, tensor in tensors.items()}
        return _kth_smallest(tensors, self.global_name, self.sum_histograms, lambda count: (count - 1) // 2)

    def kth_largest(self, tensors: Mapping[str, Tensor], k: int) -> float:
        """The k-th largest magnitude of all tensors of all ranks together, exactly."""
        joined = torch.cat([torch.empty(0), *(tensor.float().cpu() for tensor in tensors.values())])
        return _kth_smallest({"": joined}, str, self._sum_over_ranks, lambda count: count - k)[""]

    def _gather_primary(self, reports: Mapping[str, T]) -> dict[str, list[T]]:
        """Reports of shards by global name, each shard once though several ranks may have it."""
        is_primary = self.global_tensors.is_primary
        return self.global_tensors.gather_by_tensor({n: report for n, report in reports.items() if is_primary(n)})

    def _sum_over_ranks(self, histograms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered = {name: self.global_tensors.all_gather(counts) for name, counts in histograms.items()}
        return {name: torch.stack(parts).sum(0) for name, parts in gathered.items()}


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
    """How often each digit follows a prefix of higher digits; int64 [2**width]."""
    matching = bits[bits >> (start + width) == prefix >> (start + width)]
    return torch.bincount((matching >> start) & ((1 << width) - 1), minlength=1 << width)


def _to_sparse(buckets: ExponentBuckets) -> tuple[Any, ...]:
    """The buckets that are not empty: how many buckets there are, indices, and one array for each attribute."""
    indices = buckets.counts.nonzero().reshape(-1)
    columns = (buckets.counts, buckets.sums, buckets.minimum, buckets.maximum)
    return (buckets.counts.numel(), indices.numpy(), *(column[indices].numpy() for column in columns))


def _to_dense(sparse: tuple[Any, ...]) -> ExponentBuckets:
    size, indices, *columns = sparse
    dense = [torch.zeros(size, dtype=torch.from_numpy(column).dtype) for column in columns]
    for full, column in zip(dense, columns, strict=True):
        full[torch.from_numpy(indices)] = torch.from_numpy(column)
    return ExponentBuckets(*dense)


def _merge_buckets(buckets: Iterable[ExponentBuckets]) -> ExponentBuckets:
    first, *others = buckets
    return sum(others, first)


def _sparse_counts(counts: Tensor) -> tuple[int, Any, Any]:
    """A histogram as its number of cells, and the indices and counts of cells that are not empty; small to pickle."""
    dense = counts.reshape(-1).cpu().numpy()
    indices = np.flatnonzero(dense)
    index_dtype = np.uint16 if dense.size <= 1 << 16 else np.uint32
    count_dtype = np.uint32 if dense.size == 0 or int(dense.max(initial=0)) < 1 << 32 else np.int64
    return dense.size, indices.astype(index_dtype), dense[indices].astype(count_dtype)


def _float64_sum(tensor: Tensor) -> float:
    return float(tensor.sum(dtype=torch.float64))


def _float64_mean_std(tensor: Tensor) -> tuple[float, float]:
    std, mean = torch.std_mean(tensor.detach().double(), correction=0)
    return float(mean), float(std)


def _merge_means(reports: list[Any]) -> float:
    """The mean that a rank reports of a whole tensor, or that from the (sum, count) of shards."""
    first = reports[0]
    if isinstance(first, float):
        return first
    total, count = math.fsum(part for part, _ in reports), sum(numel for _, numel in reports)
    return float(total / max(1, count))


def _merge_mean_std(reports: list[Any]) -> tuple[float, float]:
    """The (mean, std) that a rank reports of a whole tensor, or those from the (count, mean, M2) of shards."""
    if len(reports[0]) == 2:
        mean, std = reports[0]
        return mean, std
    return merge_mean_std(reports)
