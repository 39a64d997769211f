"""Estimates the slope and the curvature of the loss at the weights from what an optimizer keeps.

Where a batch of N terms (tokens, images) is averaged, the gradient g of a batch varies around its mean with a variance
of F / N, F being the diagonal of the empirical Fisher information, which near a minimum of a log-likelihood is that of
the Hessian. So the mean of g^2 that Adam keeps (v, without its bias towards zero) is about H / N, and

    rise(d) = sum(m d) + 1/2 N sum(v d^2)

predicts by how much an error d of the weights raises the loss; m, Adam's first moment, is the mean gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import as_matrix
from shrinkpoint.schemes.fisher import optimizer_moments
from shrinkpoint.schemes.fisher.global_weights import GlobalWeights
from shrinkpoint.schemes.fisher.optimizer_moments import adafactor_moment, bnb_moment, correct_bias, moment_matrix
from shrinkpoint.sharding.global_tensors import Marginals
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import OptimizerInfo


class SquaredGradientSource(Protocol):
    """A recorder of squared gradients for optimizers that keep none, such as `train.GradientRecorder`."""

    @property
    def ready(self) -> bool:
        """Whether anything was recorded."""
        ...

    @property
    def square(self) -> Mapping[str, Tensor]:
        """Averages of squares by name of a parameter in the model."""
        ...


@dataclass(frozen=True)
class Curvature:
    """Slope and curvature of the loss at one weight, or at this rank's shard of it, seen as a matrix.

    Attributes:
        squares: mean squared gradients, float32 [rows, columns]; None if unknown.
        slope: mean gradients, float32 [rows, columns]; None if unknown.
        relative_only: the squares are those of momentum, so only ratios between them mean anything.
        probed: the squares are the curvature itself, from measured rises: of a single loss term, N is 1.
        marginals: sums of the squares of the global tensor, if this rank has a shard of it; None if it has all of it.
    """

    squares: Tensor | None = field(default=None, repr=False)
    slope: Tensor | None = field(default=None, repr=False)
    relative_only: bool = False
    probed: bool = False
    marginals: Marginals | None = field(default=None, repr=False)

    @cached_property
    def mean(self) -> float:
        """The mean of the squares of the global tensor; 0 if unknown."""
        if self.marginals is not None:
            return self.marginals.mean
        if self.squares is None or self.squares.numel() == 0:
            return 0.0
        return float(self.squares.sum(dtype=torch.float32)) / self.squares.numel()

    def mean_along(self, axis: int) -> Tensor | None:
        """Means of the squares of the global tensor along an axis (1: one mean per row), float32; None if unknown."""
        if self.marginals is not None:
            return self.marginals.mean_along(axis).to(torch.float32)
        return None if self.squares is None else self.squares.mean(axis)

    @classmethod
    def from_optimizer(
        cls, weight: Tensor, state: FlatState, optimizer_info: OptimizerInfo | None, recorded: Tensor | None
    ) -> Curvature:
        """Read the curvature of a local tensor from its optimizer state, whether it is finite or not.

        Taken is the second moment, its factors, or its 8 bits; else what was recorded; else the square of momentum,
        which has the same shape but is too small by a factor that all weights have in common. The number of terms
        makes up for that factor.
        """
        first = None if optimizer_info is None else moment_matrix(state, optimizer_info.moment1, weight)
        second = None if optimizer_info is None else moment_matrix(state, optimizer_info.moment2, weight)
        slope = None
        if first is not None and optimizer_info is not None:
            slope = (
                correct_bias(first, optimizer_info.beta1, optimizer_info.step)
                if second is not None
                else first * (1 - (optimizer_info.beta1 or 0.0))
            )
        if second is not None and optimizer_info is not None:
            return cls(correct_bias(second, optimizer_info.beta2, optimizer_info.step), slope)
        squares = None
        if optimizer_info is not None and optimizer_info.factors is not None:
            squares = adafactor_moment(state, optimizer_info.factors, weight)
        elif optimizer_info is not None and optimizer_info.blocks is not None:
            squares = bnb_moment(state, optimizer_info.blocks, weight)
        if squares is not None:
            return cls(squares, slope)
        if recorded is not None and recorded.shape == weight.shape:
            return cls(as_matrix(recorded).to(weight.device, torch.float32), slope)
        return cls(None if slope is None else slope.square(), slope, relative_only=True)

    def rise_terms(self, error: Tensor) -> tuple[float, float]:
        """(slope term, curvature term of one loss term) of the rise that an error causes; zeros if unknown.

        Args:
            error: float32 [rows, columns].
        """
        flat = error.reshape(-1)
        first = 0.0 if self.slope is None else float(torch.dot(self.slope.reshape(-1), flat))
        second = 0.0 if self.squares is None else float(torch.dot(self.squares.reshape(-1), flat.square())) / 2
        return first, second


@dataclass(frozen=True)
class _Summary:
    """What every rank knows of the curvature of one global tensor.

    Attributes:
        mean: of the squares; 0 if unknown, and nan or infinite in a run that diverges.
        is_known: all shards have squares of the same kind.
        relative_only: see `Curvature`.
        marginals: sums of the squares; None where a rank has all of the tensor.
        is_remote: the squares are on another rank than the weight.
    """

    mean: float = 0.0
    is_known: bool = False
    relative_only: bool = False
    marginals: Marginals | None = None
    is_remote: bool = False


def estimate_curvatures(
    weights: GlobalWeights, state: FlatState, recorded: Mapping[str, Tensor]
) -> dict[str, Curvature]:
    """Estimate the curvature of this rank's shard of every weight, by name; a collective.

    Squares of momentum mean nothing next to mean squares (of another optimizer, for other weights): then only the
    latter count. What is not finite, in a run that diverges, counts as unknown.

    Args:
        recorded: mean squared gradients by name in the state.
    """
    local = {name: _read_local(name, weights, state, recorded.get(name)) for name in weights.local}
    whole = {name for name in local if weights.is_whole(name)}
    kinds = weights.tensors.reduce(
        {name: (_kind(curvature), curvature.mean if name in whole else 0.0) for name, curvature in local.items()},
        _merge_kinds,
    )
    split = {
        name: curvature.squares
        for name, curvature in local.items()
        if curvature.squares is not None and name not in whole
    }
    marginals = weights.tensors.marginals(split, split.__getitem__)
    summaries = {name: _summarize(*kinds.get(name, (0, 0.0)), marginals.get(name)) for name in weights.templates}
    weak = [
        name
        for name, summary in summaries.items()
        if not summary.is_known or summary.relative_only or not math.isfinite(summary.mean)
    ]
    remote = optimizer_moments.remote_marginals(weights.tensors, state, weak) if weak else {}
    for name, sums in remote.items():
        if math.isfinite(sums.mean):
            summaries[name] = _Summary(sums.mean, True, marginals=sums, is_remote=True)
    has_absolute = any(0 < summary.mean < math.inf and not summary.relative_only for summary in summaries.values())
    return {
        name: _combine(name, curvature, summaries[weights.global_name(name)], weights, has_absolute)
        for name, curvature in local.items()
    }


def _read_local(name: str, weights: GlobalWeights, state: FlatState, recorded: Tensor | None) -> Curvature:
    info = state.optimizer_info.get(name)
    if info is not None and not weights.is_whole(name):
        info = replace(info, factors=None, blocks=None)  # these are of whole tensors
    return Curvature.from_optimizer(weights.local[name], state, info, recorded)


def _kind(curvature: Curvature) -> int:
    """0: no squares; 1: mean squared gradients; 2: squares of momentum."""
    return 0 if curvature.squares is None else 1 + curvature.relative_only


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
        return Curvature(slope=local.slope)
    if summary.is_remote and summary.marginals is not None:
        shard = weights.tensors.local_shards[name]
        squares = optimizer_moments.rank_one_squares(summary.marginals, shard, weights.local[name].device)
        return Curvature(squares, local.slope, marginals=summary.marginals)
    return replace(local, marginals=summary.marginals)
