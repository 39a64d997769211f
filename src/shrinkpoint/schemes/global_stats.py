"""Collective statistics of sharded tensors, for codebooks and thresholds."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize.exponent_buckets import ExponentBuckets
from shrinkpoint.quantize.layer_types import layer_type_from_name
from shrinkpoint.quantize.log_levels import (
    CELL_SHIFT,
    MAX_SHARE_BELOW,
    log_range_from_counts,
    magnitude_cells,
    quantize_log,
)
from shrinkpoint.quantize.sketch import LogHistogram
from shrinkpoint.schemes.optimizer_state import is_quantizable_moment
from shrinkpoint.schemes.search.candidates import PreviousCodes
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL
from shrinkpoint.sharding.global_tensors import GlobalTensors, count_mean_m2, merge_mean_std
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

T = TypeVar("T")
_RADIX_DIGITS = ((21, 10), (10, 11), (0, 10))
"""Where the digits of a magnitude's bits begin, and how many bits they have: the largest first."""


class GlobalStats:
    """Statistics of whole tensors, by their names; each method is a collective.

    Args:
        global_tensors: what all ranks have.
    """

    def __init__(self, global_tensors: GlobalTensors) -> None:
        self.global_tensors = global_tensors
        self.all_layer_types: dict[str, str] = {}
        self.global_names: tuple[str, ...] = ()
        """Of all weights that were picked."""

    @classmethod
    def from_state(cls, state: FlatState) -> GlobalStats:
        """Of the tensors of a single process: a reduction of its only part is that part."""
        return cls(GlobalTensors.from_state(state))

    def global_name(self, name: str) -> str:
        """The name of the whole tensor that a tensor of this rank is of; no collective."""
        return self.global_tensors.global_name(name)

    def global_numel(self, name: str) -> int:
        """Of the whole tensor; no collective."""
        return self.global_tensors.local_shards[name].spec.global_numel

    def local_seed(self, name: str, global_seed: int) -> int:
        """Of chance that differs between the boxes of a tensor; no collective."""
        piece = self.global_tensors.local_shards[name]
        return piece.spec.dither_seed(global_seed, piece.sizes)

    def sum_histograms(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums of histograms, of boxes to those of whole tensors; int64, on the CPU."""
        told = self.global_tensors.gather_by_tensor(
            {name: _sparse_counts(x) for name, x in parts.items() if self.global_tensors.is_primary(name)}
        )
        out = {}
        for title, found in told.items():
            sums = np.zeros(found[0][0], np.int64)
            for _, places, counts in found:
                sums[places] += counts
            out[title] = torch.from_numpy(sums)
        return out

    def layer_types(self, tensors: Mapping[str, Tensor], module_layer_types: Mapping[str, str]) -> dict[str, str]:
        """Kinds of layers, of boxes as of whole tensors; `all_layer_types` has those of all."""
        told = self.global_tensors.gather_by_tensor({name: module_layer_types.get(name) for name in tensors})
        said = {title: next((one for one in ones if one is not None), None) for title, ones in told.items()}
        self.all_layer_types = {
            title: said.get(title) or layer_type_from_name(title, len(self.global_tensors.shapes[title]))
            for title in self.global_names
        }
        return {name: self.all_layer_types[self.global_name(name)] for name in tensors}

    def merge_sketches(self, parts: Mapping[str, LogHistogram], alpha: float = 0.01) -> dict[str, LogHistogram]:
        """The sketches of whole tensors, all of one `alpha`."""
        sums = self.sum_histograms({name: one.counts for name, one in parts.items()})
        return {title: LogHistogram(alpha, counts) for title, counts in sums.items()}

    def mean_std(self, parts: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation."""
        told = self.global_tensors.gather_by_tensor(
            {name: count_mean_m2(x) for name, x in parts.items() if self.global_tensors.is_primary(name)}
        )
        return {title: merge_mean_std(found) for title, found in told.items()}

    def max_over_ranks(self, parts: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        """The largest of each number that ranks say of boxes."""
        told = self.global_tensors.gather_by_tensor(dict(parts))
        return {title: tuple(map(max, zip(*found, strict=True))) for title, found in told.items()}

    def min_max(self, parts: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """The least and the largest value."""
        pairs = {name: [float(end) for end in torch.aminmax(x.detach())] for name, x in parts.items() if x.numel()}
        return {
            title: (-low, high)
            for title, (low, high) in self.max_over_ranks({n: (-a, b) for n, (a, b) in pairs.items()}).items()
        }

    def tensors_where_all(self, flags: Mapping[str, bool]) -> set[str]:
        """Tensors of which all boxes are flagged."""
        return self.global_tensors.tensors_where_all(flags)

    def value_if_equal(self, obj: T) -> T | None:
        """What all ranks have; None where they differ."""
        first, *others = self.global_tensors.all_gather(obj)
        return first if all(other == first for other in others) else None

    def common_previous_codes(self, previous: PreviousCodes, tensors: Collection[str]) -> PreviousCodes:
        """Centers of the checkpoint before, where all boxes of a tensor have the same ones."""
        marks = {
            name: previous.centers[name].numpy().tobytes() if name in previous.centers else b"" for name in tensors
        }
        told = self.global_tensors.gather_by_tensor(
            {name: zlib.crc32(mark) if mark else None for name, mark in marks.items()}
        )
        alike = {title for title, ones in told.items() if len({*ones}) == 1 and ones[0] is not None}
        kept = [name for name in previous.centers if self.global_name(name) in alike]
        return PreviousCodes(
            {name: previous.centers[name] for name in kept},
            {name: previous.codes[name] for name in kept},
            {name: previous.num_codes[name] for name in kept},
            previous.lossy_restores,
        )

    def quantize_moments(self, state: FlatState) -> Iterator[tuple[str, CodebookTensor]]:
        """As `moments.lossy`: levels of whole moments."""
        fit = {
            name: state.tensors[name]
            for name, info in state.infos.items()
            if is_quantizable_moment(info.role, state.tensors[name])
            and self.global_tensors.local_shards[name].spec.global_numel >= MIN_WEIGHT_NUMEL
        }
        usable = self.tensors_where_all({name: bool(x.isfinite().all()) for name, x in fit.items()})
        sizes = {
            name: fit[name].detach().float().abs()
            for name in fit
            if self.global_name(name) in usable and fit[name].numel()
        }
        counts = self.sum_histograms({name: _pad_counts(magnitude_cells(x)) for name, x in sizes.items()})
        ends = self.min_max({name: x[x > 0] for name, x in sizes.items()})
        for name in sizes:
            least, largest = ends.get(self.global_name(name), (0.0, 0.0))
            whole = (
                log_range_from_counts(least, largest, counts[self.global_name(name)], MAX_SHARE_BELOW)
                if largest
                else (0.0, 0.0)
            )
            yield name, quantize_log(fit[name], signed=state.infos[name].role is Role.MOMENT1, limits=whole)

    def means(self, parts: Mapping[str, Tensor]) -> dict[str, float]:
        """Mean values, from sums in float64."""
        sums = self.global_tensors.gather_by_tensor(
            {name: _sum_and_count(x) for name, x in parts.items() if self.global_tensors.is_primary(name)}
        )
        return {
            title: math.fsum(one for one, _ in found) / max(1, sum(count for _, count in found))
            for title, found in sums.items()
        }

    def buckets(self, parts: Mapping[str, Tensor], *, shared: bool) -> dict[str, ExponentBuckets]:
        """Of differences, by tensor; `shared`: the same of all."""
        told = self.global_tensors.gather_by_tensor(
            {
                name: _to_sparse(ExponentBuckets.from_tensor(x))
                for name, x in parts.items()
                if self.global_tensors.is_primary(name)
            }
        )
        found = {title: _merge_buckets(map(_to_dense, ones)) for title, ones in told.items()}
        if shared and found:
            every = _merge_buckets(found.values())
            return dict.fromkeys(found, every)
        return found

    def median_magnitudes(self, parts: Mapping[str, Tensor]) -> dict[str, float]:
        """The medians of magnitudes, as torch has them, exactly.

        Args:
            parts: float32, finite.
        """
        return _magnitudes_at_rank(parts, self.global_name, self.sum_histograms, lambda count: (count - 1) // 2)

    def kth_largest(self, parts: Mapping[str, Tensor], count: int) -> float:
        """The least of the `count` largest magnitudes of all tensors together, exactly."""
        one = torch.cat([torch.empty(0), *(x.float().cpu() for x in parts.values())])
        found = _magnitudes_at_rank({"": one}, str, self._sum_over_ranks, lambda total: total - count)
        return found[""]

    def _sum_over_ranks(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `counts`, of what is of no tensor."""
        return {name: torch.stack(self.global_tensors.all_gather(counts)).sum(0) for name, counts in parts.items()}


def _magnitudes_at_rank(
    parts: Mapping[str, Tensor],
    global_name: Callable[[str], str],
    sum_histograms: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    rank: Callable[[int], int],
) -> dict[str, float]:
    """The magnitude of a rank, from 0: digit by digit, from counts of the values that begin alike.

    Args:
        global_name: of the whole tensor.
        sum_histograms: sums of counts, by title.
        rank: of how many values, which one.
    """
    bits = {name: x.detach().reshape(-1).abs().view(torch.int32) for name, x in parts.items()}
    found, left = dict[str, int](), dict[str, int]()
    for start, width in _RADIX_DIGITS:
        every = sum_histograms(
            {name: _digit_histogram(x, found.get(global_name(name), 0), start, width) for name, x in bits.items()}
        )
        for name, count in every.items():
            upto = count.cumsum(0)
            here = left.setdefault(name, rank(int(upto[-1])))
            digit = int(torch.searchsorted(upto, here, right=True))
            left[name] = here - (int(upto[digit - 1]) if digit else 0)
            found[name] = found.get(name, 0) | digit << start
    return {name: float(torch.tensor(one, dtype=torch.int32).view(torch.float32)) for name, one in found.items()}


def _to_sparse(buckets: ExponentBuckets) -> tuple[Any, ...]:
    """Only those that hold something."""
    at = buckets.counts.nonzero().reshape(-1)
    every = (buckets.counts, buckets.sums, buckets.minimum, buckets.maximum)
    return (buckets.counts.numel(), at.numpy(), *(one[at].numpy() for one in every))


def _to_dense(sparse: tuple[Any, ...]) -> ExponentBuckets:
    size, at, *parts = sparse
    wide = [torch.zeros(size, dtype=torch.from_numpy(part).dtype) for part in parts]
    for one, part in zip(wide, parts, strict=True):
        one[torch.from_numpy(at)] = torch.from_numpy(part)
    return ExponentBuckets(*wide)


def _merge_buckets(buckets: Iterable[ExponentBuckets]) -> ExponentBuckets:
    first, *others = buckets
    return sum(others, first)


def _pad_counts(counts: Tensor) -> Tensor:
    """To all cells that there are."""
    return torch.nn.functional.pad(counts, (0, (1 << 31 >> CELL_SHIFT) - counts.numel()))


def _sparse_counts(counts: Tensor) -> tuple[int, Any, Any]:
    """Small to pickle: how many cells there are, which of them are not empty, and what they count."""
    flat = counts.reshape(-1).cpu().numpy()
    places = np.flatnonzero(flat)
    kind = np.uint16 if flat.size <= 1 << 16 else np.uint32
    wide = np.uint32 if flat.size == 0 or int(flat.max(initial=0)) < 1 << 32 else np.int64
    return flat.size, places.astype(kind), flat[places].astype(wide)


def _sum_and_count(x: Tensor) -> tuple[float, int]:
    return float(x.sum(dtype=torch.float64)), x.numel()


def _digit_histogram(bits: Tensor, prefix: int, start: int, width: int) -> Tensor:
    """How often each digit follows those that are known."""
    same = bits[bits >> (start + width) == prefix >> (start + width)]
    return torch.bincount((same >> start) & ((1 << width) - 1), minlength=1 << width)
