"""Estimates the slope and the curvature of the loss at the weights from what an optimizer keeps.

Where a batch of N terms (tokens, images) is averaged, the gradient g of a batch varies around its mean with a variance
of F / N, F being the diagonal of the empirical Fisher information, which near a minimum of a log-likelihood is that of
the Hessian. So the mean of g^2 that Adam keeps (v, without its bias towards zero) is about H / N, and

    rise(d) = sum(m d) + 1/2 N sum(v d^2)

predicts by how much an error d of the weights raises the loss; m, Adam's first moment, is the mean gradient.

`remaining_share` estimates what is left of the rise that earlier restores have caused.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import LatticeTensor, as_matrix, matrix_shape
from shrinkpoint.codec.parallel import map_tensors
from shrinkpoint.codec.reference import MAX_SAMPLED_VALUES, Reference, tensor_rows
from shrinkpoint.quantize.lattice import ErrorSums, ErrorWeights, quantization_error_sums
from shrinkpoint.quantize.statistics import (
    MatrixSums,
    ValueSums,
    count_codes,
    entropy_bits,
    second_moment_sums,
    value_sums,
)
from shrinkpoint.schemes.fisher.moment_statistics import BITS_PER_EXPONENT, MomentStatistics
from shrinkpoint.schemes.select import max_abs
from shrinkpoint.sharding.global_stats import HistogramSum
from shrinkpoint.sharding.global_tensors import GlobalTensors, Marginals, TensorShard, count_mean_m2, merge_mean_std
from shrinkpoint.tensors.dtypes import as_native_float
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import OptimizerInfo, Role
from shrinkpoint.tensors.optimizers import SECOND_MOMENTS


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


def total_entropy_bits(tensors: GlobalTensors, codes: Mapping[str, Tensor], *, are_sampled: bool = False) -> float:
    """The entropy of the codes of global tensors, in bits, summed over tensors; a collective.

    Args:
        codes: codes of local shards, integers of any dtype.
        are_sampled: `codes` are those of some rows only; the result is extrapolated to whole tensors.
    """
    split = {name: count_codes(values) for name, values in codes.items() if name not in tensors.whole}
    histograms = tensors.reduce_arrays(split, HistogramSum())
    own = {
        name: None if name in split else (values.numel(), entropy_bits(count_codes(values)))
        for name, values in codes.items()
    }
    reports = tensors.reduce_primary(own, lambda ranks: ranks[0])
    total = 0.0
    for name, report in reports.items():
        count, bits = report or (int(histograms[name].sum()), entropy_bits(histograms[name]))
        total += bits * math.prod(tensors.shapes[name]) / max(1, count) if are_sampled else bits
    return total


def exponent_bits(tensors: GlobalTensors, fresh: Iterable[str], *, by_column: bool = True) -> float:
    """The bits of the exponents of lattices that are not the parent's, about, summed over global tensors; a collective.

    Args:
        fresh: names of the local shards that have such lattices.
        by_column: columns have exponents, too.
    """
    shapes = [matrix_shape(tensors.shapes[name]) for name in sorted(tensors.union(fresh))]
    return BITS_PER_EXPONENT * sum(rows + (columns if by_column and rows > 1 else 0) for rows, columns in shapes)


class SquaredGradientSource(Protocol):
    """A recorder of squared gradients for optimizers that keep none, such as `train.GradientRecorder`."""

    @property
    def ready(self) -> bool:
        """True if anything was recorded."""
        ...

    @property
    def square(self) -> Mapping[str, Tensor]:
        """Averages of squares by name of a parameter in the model."""
        ...


@dataclass(frozen=True)
class Curvature:
    """Slope and curvature of the loss at one weight, or at this rank's shard of it, seen as a matrix.

    Moments are held as the optimizer has them, and multiplied by a factor where they are used: no copy is made.

    Attributes:
        second: float32 or bfloat16 [rows, columns]; times `second_factor`, mean squared gradients; None if unknown.
        first: the same of mean gradients, times `first_factor`.
        relative_only: the squares are those of momentum, so only ratios between them mean anything.
        probed: the squares are the curvature itself, from measured rises: of a single loss term, N is 1.
        marginals: sums of the squares of the global tensor, if this rank has a shard of it; None if it has all of it.
        second_sums: sums of `second` by row and by column, if they have been computed already.
    """

    second: Tensor | None = field(default=None, repr=False)
    first: Tensor | None = field(default=None, repr=False)
    relative_only: bool = False
    probed: bool = False
    marginals: Marginals | None = field(default=None, repr=False)
    second_factor: float = 1.0
    first_factor: float = 1.0
    second_sums: MatrixSums | None = field(default=None, repr=False)

    def num_rows(self, shape: tuple[int, ...]) -> int | None:
        """Number of rows of the matrix of a whole tensor of this shape; None if nothing is known of all of it."""
        is_whole = self.second is not None and self.marginals is None and self.second.numel() == math.prod(shape)
        return self.second.shape[0] if is_whole and self.second is not None else None

    @property
    def squares(self) -> Tensor | None:
        """Mean squared gradients, float32 [rows, columns]; a new tensor."""
        return None if self.second is None else self.second.to(torch.float32) * self.second_factor

    @property
    def slope(self) -> Tensor | None:
        """Mean gradients, float32 [rows, columns]; a new tensor."""
        return None if self.first is None else self.first.to(torch.float32) * self.first_factor

    @cached_property
    def _sums(self) -> MatrixSums | None:
        """Sums of `second`, by row and by column; None if unknown."""
        return None if self.second is None else self.second_sums or second_moment_sums(self.second).values

    @property
    def local_sums(self) -> MatrixSums | None:
        """Sums of the squares of this rank's shard by row and by column; None if unknown."""
        return None if self._sums is None else self._sums.scaled(self.second_factor)

    @cached_property
    def mean(self) -> float:
        """The mean of the squares of the global tensor; 0 if unknown, infinite if their sum is no float32."""
        if self.marginals is not None:
            return self.marginals.mean
        if self.second is None or self.second.numel() == 0 or self._sums is None:
            return 0.0
        return float((self._sums.rows * self.second_factor).sum().to(torch.float32)) / self.second.numel()

    def mean_along(self, axis: int) -> Tensor | None:
        """Means of the squares of the global tensor along an axis (1: one mean per row), float32; None if unknown."""
        if self.marginals is not None:
            return self.marginals.mean_along(axis).to(torch.float32)
        if self.second is None or self._sums is None:
            return None
        sums = (self._sums.rows if axis == 1 else self._sums.columns) * self.second_factor
        return (sums / max(1, self.second.shape[axis])).to(torch.float32)

    @classmethod
    def from_optimizer(
        cls,
        weight: Tensor,
        state: FlatState,
        optimizer_info: OptimizerInfo | None,
        recorded: Tensor | None,
        statistics: MomentStatistics,
    ) -> Curvature:
        """Read the curvature of a local tensor from its optimizer state, whether it is finite or not.

        Taken is the second moment, its factors, or its 8 bits; else what was recorded; else the square of momentum,
        which has the same shape but is too small by a factor that all weights have in common. The number of terms
        makes up for that factor.

        Args:
            statistics: of the moments of `state`.
        """
        info = optimizer_info
        first = None if info is None else statistics.moment_matrix(info.moment1, weight)
        second = None if info is None else statistics.moment_matrix(info.squares, weight)
        if info is not None and info.squares is not None and second is not None:
            factors = bias_factor(info.beta2, info.step), bias_factor(info.beta1, info.step)
            return cls(
                second,
                first,
                second_factor=factors[0],
                first_factor=factors[1],
                second_sums=statistics.sums(info.squares).values,
            )
        factor = 1 - (0.0 if info is None else info.beta1 or 0.0)
        squares = None
        if info is not None and info.factors is not None:
            squares = adafactor_moment(state, info.factors, weight)
        elif info is not None and info.blocks is not None:
            squares = bnb_moment(state, info.blocks, weight)
        if squares is None and recorded is not None and recorded.shape == weight.shape:
            squares = as_matrix(recorded).to(weight.device, torch.float32)
        if squares is not None or first is None:
            return cls(squares, first, first_factor=factor)
        return cls((first.to(torch.float32) * factor).square(), first, relative_only=True, first_factor=factor)

    def rise_terms(
        self, weight: Tensor, quantized: LatticeTensor, threads: int | None = None, *, with_curvature: bool = True
    ) -> tuple[float, float]:
        """(slope term, curvature term of one loss term) of the rise that quantizing a weight causes.

        Both are 0 if unknown.

        Args:
            threads: native threads; None: as many as torch uses.
            with_curvature: False: the second moments are not read, and the curvature term is 0.
        """
        weights = self.error_weights(with_curvature=with_curvature)
        sums = quantization_error_sums(weight, quantized, weights, threads)
        return self.rise_of_errors(sums, with_curvature=with_curvature)

    def error_weights(self, *, with_curvature: bool) -> ErrorWeights:
        """Weights of errors for `rise_of_errors`."""
        return ErrorWeights(self.first, self.second if with_curvature and not self._is_constant else None)

    def rise_of_errors(self, sums: ErrorSums, *, with_curvature: bool) -> tuple[float, float]:
        """The two terms of `rise_terms`, from the sums over all errors, weighted by `error_weights`."""
        curvature = sums.curvature
        if with_curvature and self._is_constant and self.second is not None:
            curvature = sums.squares * float(self.second[0, 0])
        return self.first_factor * sums.slope, self.second_factor * curvature / 2

    @property
    def _is_constant(self) -> bool:
        """True if the squares are a single number for all weights."""
        return self.second is not None and self.second.numel() > 0 and self.second.stride() == (0, 0)

    def weighted_sum(self, rows: Tensor, columns: Tensor) -> Tensor | None:
        """The sum of the squares times a factor for each row and each column, on its device; None if unknown.

        Args:
            rows, columns: float64 on the device of the squares; `columns` has one value for all or one for each.
        """
        if self.second is None:
            return None
        second = self.second if len(self.second) == len(rows) else self.second.reshape(len(rows), -1)
        if self._is_constant:
            count = second.shape[1] if columns.numel() == 1 else 1
            row_sums = second[:, 0].to(torch.float64) * columns.sum(dtype=torch.float64) * count
        elif columns.numel() == 1:
            row_sums = second.sum(1, dtype=torch.float64) * columns.double()
        else:
            row_sums = torch.mv(second.to(torch.float32), columns.to(torch.float32)).to(torch.float64)
        return (row_sums * rows.to(torch.float64)).sum() * self.second_factor


@dataclass(frozen=True)
class _Summary:
    """Curvature of one global tensor, known on every rank."""

    mean: float = 0.0  # Of the squares; 0 if unknown, and nan or infinite in a run that diverges
    is_known: bool = False  # All shards have squares of the same kind
    relative_only: bool = False  # See `Curvature`
    marginals: Marginals | None = None  # Sums of the squares; None where a rank has all of the tensor
    is_remote: bool = False  # The squares are on another rank than the weight


def estimate_curvatures(
    weights: GlobalWeights,
    state: FlatState,
    recorded: Mapping[str, Tensor],
    statistics: MomentStatistics,
) -> dict[str, Curvature]:
    """Estimate the curvature of this rank's shard of every weight, by name; a collective.

    Squares of momentum mean nothing next to mean squares (of another optimizer, for other weights): then only the
    latter count. What is not finite, in a run that diverges, counts as unknown.

    Args:
        recorded: mean squared gradients by name in the state.
        statistics: of the moments of `state`.
    """
    local = {}
    for name, weight in weights.local.items():
        info = state.optimizer_info.get(name)
        if info is not None and name not in weights.tensors.whole:
            info = replace(info, factors=None, blocks=None)  # these are of whole tensors
        local[name] = Curvature.from_optimizer(weight, state, info, recorded.get(name), statistics)
    seconds = {n: c.second for n, c in local.items() if c.second is not None and c.second_sums is None}
    found = map_tensors(lambda name, threads: second_moment_sums.together(seconds[name], threads=threads), seconds)
    local |= {name: replace(local[name], second_sums=sums.values) for name, sums in found.items()}
    whole = weights.tensors.whole
    kinds = weights.tensors.reduce(
        {
            # 0: no squares; 1: mean squared gradients; 2: squares of momentum
            name: (0 if c.second is None else 1 + c.relative_only, c.mean if name in whole else 0.0)
            for name, c in local.items()
        },
        _merge_kinds,
    )
    split = {
        name: (own.rows, own.columns)
        for name, curvature in local.items()
        if name not in whole and (own := curvature.local_sums) is not None
    }
    marginals = weights.tensors.marginals(split, split.__getitem__)
    summaries = {name: _summarize(*kinds.get(name, (0, 0.0)), marginals.get(name)) for name in weights.templates}
    weak = [
        name
        for name, summary in summaries.items()
        if not summary.is_known or summary.relative_only or not math.isfinite(summary.mean)
    ]
    remote = remote_marginals(weights.tensors, state, weak) if weak else {}
    for name, sums in remote.items():
        if math.isfinite(sums.mean):
            summaries[name] = _Summary(sums.mean, True, marginals=sums, is_remote=True)
    has_absolute = any(0 < summary.mean < math.inf and not summary.relative_only for summary in summaries.values())
    return {
        name: _combine(name, curvature, summaries[weights.tensors.global_names[name]], weights, has_absolute)
        for name, curvature in local.items()
    }


def _merge_kinds(reports: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """The kind of all shards of a tensor, 0 if they differ, and the mean that the first one reports."""
    kinds = {kind for kind, _ in reports}
    return (kinds.pop() if len(kinds) == 1 else 0), reports[0][1]


def _summarize(kind: int, mean: float, marginals: Marginals | None) -> _Summary:
    if not kind:
        return _Summary()
    return _Summary(mean if marginals is None else marginals.mean, True, kind == 2, marginals)


def _combine(name: str, local: Curvature, summary: _Summary, weights: GlobalWeights, has_absolute: bool) -> Curvature:
    """The curvature of a shard, with what is known of its global tensor."""
    if not math.isfinite(summary.mean):
        return Curvature()
    if not summary.is_known or (summary.relative_only and has_absolute):
        return Curvature(first=local.first, first_factor=local.first_factor)
    if summary.is_remote and summary.marginals is not None:
        shard = weights.tensors.local_shards[name]
        squares = rank_one_squares(summary.marginals, shard, weights.local[name].device)
        return Curvature(squares, local.first, marginals=summary.marginals, first_factor=local.first_factor)
    return local if summary.marginals is None else replace(local, marginals=summary.marginals)


def adafactor_moment(state: FlatState, names: tuple[str, str], like: Tensor) -> Tensor | None:
    """Second moments from their means by row and by column, over the last two axes, as a float32 matrix.

    Those of Adafactor (arXiv 1804.04235, algorithm 4), whose averages need no correction: their decay begins at 0.
    """
    rows, columns = (state.tensors.get(name) for name in names)
    if rows is None or columns is None or like.dim() < 2:
        return None
    rows = rows.to(like.device, torch.float32).reshape(*like.shape[:-1], 1)
    columns = columns.to(like.device, torch.float32).reshape(*like.shape[:-2], 1, like.shape[-1])
    mean = rows.mean(-2, keepdim=True)
    moment = as_matrix(torch.where(mean > 0, rows * columns / mean, 0.0))
    return moment if math.isfinite(max_abs(moment)) else None


def bnb_moment(state: FlatState, names: tuple[str, str, str], like: Tensor) -> Tensor | None:
    """Second moments from their 8-bit codes (bitsandbytes, arXiv 2110.02861), as a float32 matrix.

    Adam's bias is left in them.
    """
    codes, values, block_max = (state.tensors.get(name) for name in names)
    if codes is None or values is None or block_max is None or codes.shape != like.shape:
        return None
    blocks, count = block_max.numel(), codes.numel()
    if values.numel() != 256 or not blocks or not count:
        return None
    size = 1 << (-(-count // blocks) - 1).bit_length()
    if -(-count // size) != blocks:
        return None
    scales = block_max.reshape(-1).to(torch.float32).repeat_interleave(size)[:count]
    moment = values.reshape(-1).to(torch.float32)[codes.reshape(-1).to(values.device).long()] * scales.to(values.device)
    moment = as_matrix(moment.reshape(like.shape)).to(like.device)
    return moment if math.isfinite(max_abs(moment)) else None


def bias_factor(beta: float | None, step: int | None) -> float:
    """Factor that removes Adam's bias towards zero from an average of this decay after `step` updates."""
    if beta is None or step is None or not 0 <= beta < 1 or step < 1:
        return 1.0
    weight = 1 - beta**step
    return 1.0 if weight > 1 - 1e-6 else 1 / weight


def remote_owners(global_tensors: GlobalTensors, weights: Collection[str]) -> dict[str, str]:
    """Global names of second moments, and of the weights of the same shape that they are named after.

    `optim.state.layers.0.weight.exp_avg_sq` is named after `model.layers.0.weight`: all but the first part of the
    weight's name, at least, precedes the slot. A moment that could be that of two weights is left out.
    """
    owners = {}
    for moment, shape in global_tensors.shapes.items():
        *parts, slot = _name_parts(moment)
        if global_tensors.roles[moment] is Role.MOMENT2 and slot in SECOND_MOMENTS:
            matches = [
                weight
                for weight in weights
                if global_tensors.shapes[weight] == shape and _is_named_after(parts, _name_parts(weight))
            ]
            if len(matches) == 1:
                owners[moment] = matches[0]
    return owners


def remote_marginals(global_tensors: GlobalTensors, state: FlatState, weights: Collection[str]) -> dict[str, Marginals]:
    """Sums by row and by column of second moments on other ranks than their weight, by global name of the weight.

    Adam's bias towards zero is corrected if other weights tell its decay and step. A collective.

    Args:
        state: of this rank.
        weights: global names.
    """
    owners = remote_owners(global_tensors, weights)
    moments = {weight: moment for moment, weight in owners.items()}
    remote = global_tensors.union(
        name
        for name, tensor in state.tensors.items()
        if (moment := moments.get(global_tensors.global_names[name])) is not None
        and tensor.numel()
        and global_tensors.colocated_name(name, moment) is None
    )
    owners = {moment: weight for moment, weight in owners.items() if weight in remote}
    if not owners:
        return {}
    decays = Counter((info.beta2, info.step) for info in state.optimizer_info.values() if info.moment2 is not None)
    reports = [report for report in global_tensors.collectives.all_gather(decays.most_common(1)) if report]
    beta, step = max(reports, key=lambda report: report[0][1])[0][0] if reports else (None, None)
    local = [
        name for name in state.tensors if global_tensors.global_names[name] in owners and state.tensors[name].numel()
    ]
    factor = bias_factor(beta, step)

    def sums(name: str) -> tuple[Tensor, Tensor]:
        scaled = second_moment_sums(as_native_float(state.tensors[name])).values.scaled(factor)
        return scaled.rows, scaled.columns

    return {owners[moment]: marginals for moment, marginals in global_tensors.marginals(local, sums).items()}


def rank_one_squares(marginals: Marginals, shard: TensorShard, device: torch.device) -> Tensor:
    """A shard's squares as the product of the means of its rows and columns, a float32 matrix."""
    rows, columns = matrix_shape(shard.sizes)
    if matrix_shape(marginals.shape)[0] == 1 or marginals.mean == 0:
        return torch.full((1, 1), marginals.mean, dtype=torch.float32, device=device).expand(rows, columns)
    by_row = marginals.mean_along(1)[shard.spec.first_row : shard.spec.first_row + rows]
    by_column = marginals.mean_along(0)[shard.spec.columns(shard.sizes)]
    return (by_row[:, None] * (by_column / marginals.mean)).to(device, torch.float32)


def _name_parts(global_name: str) -> list[str]:
    return re.split("[/.]", global_name)


def _is_named_after(moment: list[str], weight: list[str]) -> bool:
    """True if a moment's name ends as a weight's does behind the key of the model; both in parts."""
    suffix = weight[1:] or weight
    return moment[-len(suffix) :] == suffix


_HEALING = 0.5
"""The rate at which movement makes errors good: measured on trainings that were restored eight times."""


def remaining_share(weights: GlobalWeights, curvatures: Mapping[str, Curvature], reference: Reference | None) -> float:
    """The share, from 0 to 1, that is left of the rise that a save before the parent checkpoint had; a collective.

    A budget is promised beside a run that was never restored. So the checkpoints after a restore may add only what it
    has left of the budget. Training makes an error good by moving the weight: once a weight has moved x standard
    errors, a share of 1 / (1 + x^2 / 2) is taken to be left. The errors of weights that hardly move, such as rarely
    used rows of an embedding, add up from restore to restore; those of other weights are gone after a few saves.

    Args:
        curvatures: of local weights, by name: by them errors count.
        reference: the parent checkpoint, beside which movement is measured. What is unknown has not moved.
    """
    left = total = 0.0
    for name, weight in weights.local.items():
        if name in weights.tensors.primary and reference is not None:
            rows = weights.tensors.local_shards[name].spec.sampled_rows(MAX_SAMPLED_VALUES)
            part = _sampled_errors(name, weight, rows, curvatures.get(name, Curvature()), reference)
            left, total = left + part[0], total + part[1]
    left, total = weights.tensors.collectives.sum_over_ranks(left, total)
    return min(1.0, left / total) if 0 < total < math.inf and left >= 0 else 1.0


def _sampled_errors(
    name: str, weight: Tensor, rows: slice, curvature: Curvature, reference: Reference
) -> tuple[float, float]:
    """The rise, up to a factor that all weights share, by what is left of a weight's errors, and by all of them."""
    points, shape, matrix = reference.quantized.get(name), tuple(weight.shape), as_matrix(weight.detach())
    sampled = matrix[rows].cpu().double()
    if not isinstance(points, LatticeTensor) or not reference.has_like(name, shape, weight.dtype) or not len(sampled):
        return 0.0, 0.0
    before = reference.original_rows(name, shape, rows)
    before = tensor_rows(reference.tensors, name, rows) if before is None else before
    squares = points.lattice.row_steps(shape, rows).double().square() / 12
    moved = (sampled - before.cpu().double()).square()
    remaining = squares / (squares + _HEALING * moved)
    rises = squares.expand_as(sampled)
    if curvature.second is not None:
        second = as_matrix(curvature.second.reshape(shape))[rows]
        rises = rises * second.cpu().double() * curvature.second_factor
    extent = weight.numel() / sampled.numel()
    return extent * float((rises * remaining).sum()), extent * float(rises.sum())
