"""ExCP (arXiv 2406.11257): residuals, joint pruning of weights and moments, and k-means, for a whole Adam state."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.codebook_record import CODERS
from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES, CodebookTensor
from shrinkpoint.quantize.codebook import assign, kmeans_codebook
from shrinkpoint.quantize.statistics import LogHistogram
from shrinkpoint.schemes.base import check_seed
from shrinkpoint.schemes.residual import ResidualScheme
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL, max_abs
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON

Rule = Literal["paper", "released"]
MAX_RELEASED_FACTOR = 2.5
"""The largest factor by which the released code multiplies the median."""


class ExCP(ResidualScheme):
    """Quantizes residuals and both of Adam's moments to 2^n - 1 centers and zero, pruned by the moments.

    A residual is kept if it is larger than a threshold that falls with the second moment; moments are kept if the
    first one is large and the residual is kept. Moments are not deltas: they are written anew with every checkpoint.

    A weight without Adam's moments, or with moments that are not finite, is not pruned; moments that are not finite
    stay exact. Of an exact weight (in a keyframe, or unchanged), nothing is pruned, and its moments are kept wherever
    the first one is large.

    Args:
        alpha: residuals are kept above `alpha / sqrt(v) * median|residual|`.
        beta: moments are kept above `beta * mean|m|`.
        bits: n; 2 to 8. With 8 there are 254 centers, not 255.
        rule: with a threshold for each value, as the "paper" has it, or one for each tensor from the mean of v and
            capped at 2.5 medians, as the "released" code has it.
        paper: codes packed and then LZMA, as released, in place of the context coder.
        paper_fp16: centers are rounded to float16, as released: small second moments become zero (docs/schemes.md).
        seed: of the random starts, from 0.

    Raises:
        PolicyError: an invalid argument.
    """

    id: ClassVar[str] = "excp"

    def __init__(
        self,
        *,
        alpha: float = 5e-5,
        beta: float = 2.0,
        bits: int = 4,
        rule: Rule = "paper",
        paper: bool = False,
        paper_fp16: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._alpha = validate.check_float("alpha", alpha, exclusive=False)
        self._beta = validate.check_float("beta", beta, exclusive=False)
        self._bits = validate.check_int("bits", bits, minimum=2, maximum=8, do="take 4, as the paper does")
        self._rule: Rule = validate.check_choice("rule", rule, get_args(Rule))
        self._paper = validate.check_bool("paper", paper)
        self._float16_centers = validate.check_bool("paper_fp16", paper_fp16)
        self._seed = check_seed(seed)
        self.coders: Sequence[str] = ("lzma",) if paper else CODERS

    @property
    def arguments(self) -> dict[str, object]:
        return dict(self.settings)

    @property
    def settings(self) -> dict[str, JSON]:
        return {
            "alpha": self._alpha,
            "beta": self._beta,
            "bits": self._bits,
            "rule": self._rule,
            "paper": self._paper,
            "paper_fp16": self._float16_centers,
            "seed": self._seed,
        }

    def quantize_weights(
        self,
        weights: Mapping[str, Tensor],
        differences: Mapping[str, Tensor],
        state: FlatState,
        stats: GlobalStats,
    ) -> dict[str, CodebookTensor]:
        moments = _adam_moments(state, stats)
        medians = stats.median_magnitudes(differences)
        means = stats.mean({name: adam.v for name, adam in moments.items() if name in differences})
        keeps = {}
        for name, residual in differences.items():
            keeps[name], global_name = residual != 0, stats.global_name(name)
            if name in moments:
                v = moments[name].v.to(residual.device)
                median, mean = (v.new_tensor(values[global_name], dtype=torch.float32) for values in (medians, means))
                keeps[name] &= residual.abs() > self.threshold(median, v, mean)
        centers = self._centers(differences, keeps, stats)
        return {
            name: self.quantize_tensor(residual, keeps[name], centers[stats.global_name(name)], residual=True)
            for name, residual in differences.items()
        }

    def quantize_optimizer(
        self, state: FlatState, quantized: Mapping[str, CodebookTensor], stats: GlobalStats
    ) -> dict[str, CodebookTensor]:
        """Quantize both moments of every weight that has them, if they are large enough."""
        moments = _adam_moments(state, stats)
        codable = stats.global_tensors.tensors_where_all(
            {name: adam.is_codable_at(stats.global_tensors.global_numel(name)) for name, adam in moments.items()}
        )
        moments = {name: adam for name, adam in moments.items() if stats.global_name(name) in codable}
        means = stats.mean({name: adam.m.abs() for name, adam in moments.items()})
        values, keeps, contexts = dict[str, Tensor](), dict[str, Tensor](), dict[str, str]()
        for name, adam in moments.items():
            mean = torch.tensor(means[stats.global_name(name)], dtype=torch.float32, device=adam.m.device)
            keep = self.keep_mask(adam.m, mean, quantized.get(name))
            values |= {adam.first_name: adam.m, adam.second_name: adam.v}
            keeps |= {adam.first_name: keep, adam.second_name: keep}
            contexts |= {adam.first_name: name if name in quantized else "", adam.second_name: adam.first_name}
        centers = self._centers(values, keeps, stats)
        return {
            name: self.quantize_tensor(
                moment, keeps[name], centers[stats.global_name(name)], context_name=contexts[name]
            )
            for name, moment in values.items()
        }

    def threshold(self, median: Tensor, v: Tensor, mean: Tensor) -> Tensor:
        """The threshold of residuals: of the shape of `v`, or a scalar for the "released" rule.

        It is infinite where `v` is zero, unless `alpha` is zero.

        Args:
            median: of the magnitudes of all residuals of the tensor, a scalar.
            v: second moments.
            mean: of all second moments of the tensor, a scalar.
        """
        if self._alpha == 0:
            return torch.zeros_like(median)
        factor = self._alpha / (mean if self._rule == "released" else v).sqrt()
        return median * (factor.clamp(max=MAX_RELEASED_FACTOR) if self._rule == "released" else factor)

    def keep_mask(self, m: Tensor, mean: Tensor, residual: CodebookTensor | None) -> Tensor:
        """Which moments are kept; bool, of the shape of `m`.

        Args:
            mean: of the magnitudes of all first moments of the tensor, a scalar.
            residual: of the weight; None if that is exact.
        """
        keep = m.abs() > self._beta * mean
        return keep if residual is None else keep & (residual.codes.to(keep.device) != 0)

    def _centers(
        self, tensors: Mapping[str, Tensor], keeps: Mapping[str, Tensor], stats: GlobalStats
    ) -> dict[str, Tensor]:
        """Centers by global name, of the tensors that this rank has shards of; a collective.

        They are found on the values that are kept, without zeros, which have a code of their own.
        """
        sketches = stats.merge_sketches(
            {name: LogHistogram.from_tensor(x, mask=keeps[name] & (x != 0)) for name, x in tensors.items()}
        )
        local = {stats.global_name(name) for name in tensors}
        bins = min(2**self._bits - 1, MAX_CODES - RESERVED_CODES)
        return {
            name: kmeans_codebook(*sketch.buckets(), bins, sigma=1.0, seed=self._seed ^ zlib.crc32(name.encode()))
            for name, sketch in sketches.items()
            if name in local
        }

    def quantize_tensor(
        self, x: Tensor, keep: Tensor, centers: Tensor, *, residual: bool = False, context_name: str = ""
    ) -> CodebookTensor:
        """Quantize a tensor to the nearest centers, and to zero where it is not kept."""
        keep = keep & (x != 0)
        codes = assign(x, centers, RESERVED_CODES).masked_fill_(~keep, 0)
        if self._float16_centers:
            limit = torch.finfo(torch.float16).max
            centers = centers.clamp(-limit, limit).half().float()
        exact = torch.empty(0, dtype=torch.bfloat16, device=x.device)
        return CodebookTensor(codes, centers.to(x.device), exact, RESERVED_CODES, residual, context_name)


@dataclass(frozen=True)
class AdamMoments:
    """Adam's moments of one weight: finite, of its shape.

    Attributes:
        first_name, second_name: their names in the state.
        m, v: their values, float32.
        is_supported: they have at least two axes, and dtypes that can be quantized.
    """

    first_name: str
    second_name: str
    m: Tensor = field(repr=False)
    v: Tensor = field(repr=False)
    is_supported: bool

    def is_codable_at(self, numel: int) -> bool:
        """True if they are large enough for codes, given the number of values of the global tensor."""
        return self.is_supported and numel >= MIN_WEIGHT_NUMEL

    @classmethod
    def from_state(cls, name: str, state: FlatState) -> AdamMoments | None:
        """The moments of a weight; None if it has none of its shape, or they are not finite."""
        info = state.optimizer_info.get(name)
        if info is None or info.moment1 is None or info.moment2 is None:
            return None
        if info.moment1 not in state.tensors or info.moment2 not in state.tensors:
            return None
        moments = [state.tensors[info.moment1], state.tensors[info.moment2]]
        shape = state.tensors[name].shape
        if any(moment.shape != shape or not math.isfinite(max_abs(moment)) for moment in moments):
            return None
        m, v = (moment.to(torch.float32) for moment in moments)
        return cls(info.moment1, info.moment2, m, v, all(map(_is_supported, moments)))


def _adam_moments(state: FlatState, stats: GlobalStats) -> dict[str, AdamMoments]:
    """Adam's moments by name of a weight, of weights that have them with all their shards; a collective."""
    moments = {name: AdamMoments.from_state(name, state) for name in state.optimizer_info}
    complete = stats.global_tensors.tensors_where_all({name: adam is not None for name, adam in moments.items()})
    return {name: adam for name, adam in moments.items() if adam is not None and stats.global_name(name) in complete}


def _is_supported(x: Tensor) -> bool:
    return x.dim() >= 2 and x.dtype in (torch.float32, torch.bfloat16)
