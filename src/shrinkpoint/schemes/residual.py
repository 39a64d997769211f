"""Schemes that quantize the difference to the decoded parent checkpoint, without measuring the loss.

A residual is coded relative to its own size. After weights were saved and then rolled back (a spike of the loss), or
after others were loaded, it can be larger than the weights, and so can its error: then a keyframe is written
instead."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shrinkpoint import humanize
from shrinkpoint.codec.codebook_record import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import warn_user
from shrinkpoint.schemes.base import QuantizedState, SpecMixin, finite_or_text
from shrinkpoint.schemes.calibration import UnmeasuredLossNotice
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.schemes.plan import OptimizerMode, QuantizationPlan, check_optimizer_mode, quantize_moments
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL, max_abs, select_tensors
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.memory import host_by_default

MAX_RESIDUAL_ERROR = 0.01
"""Largest relative error of weights whose residual is larger than they are; beyond it, a keyframe is written."""


def diverged_errors(
    quantized: Mapping[str, CodebookTensor],
    weights: Mapping[str, Tensor],
    differences: Mapping[str, Tensor],
    reference: Reference | None,
    stats: GlobalStats,
) -> dict[str, float]:
    """Return the relative errors of diverged weights, which a keyframe codes without error; a collective.

    A weight has diverged if the norm of its difference is larger than its own, and its decoded error is above
    `MAX_RESIDUAL_ERROR` of its norm.

    Returns:
        Global name -> relative error.
    """
    norms = stats.sum_over_shards(
        {name: (_squared_norm(differences[name]), _squared_norm(weights[name])) for name in quantized}
    )
    diverged = {name for name, (difference, weight) in norms.items() if difference > weight}
    if not diverged or reference is None:
        return {}
    squared_errors = dict[str, tuple[float, ...]]()
    for name, codes in quantized.items():
        if stats.global_name(name) in diverged:
            weight = weights[name]
            decoded = codes.dequantize(weight.dtype, reference.tensors[name]).to(weight.device, torch.float32)
            squared_errors[name] = (_squared_norm(decoded - weight.to(torch.float32)),)
    errors = stats.sum_over_shards(squared_errors)
    relative = {name: _relative_error(error, norms[name][1]) for name, (error,) in errors.items()}
    return {name: error for name, error in relative.items() if not error <= MAX_RESIDUAL_ERROR}


def _squared_norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 if x.numel() else 0.0


def _relative_error(squared_error: float, squared_norm: float) -> float:
    return math.sqrt(squared_error / squared_norm) if squared_norm > 0 else math.inf if squared_error > 0 else 0.0


class ResidualScheme(SpecMixin, RecordEncodingMixin):
    """Base class of schemes that quantize the difference between weights and the decoded parent checkpoint.

    The first checkpoint, and every later keyframe, holds the weights exactly. Differences are taken to the
    *reconstructed* parent, so that the next save corrects an error, and errors do not grow with the chain
    (arXiv 2009.13003, algorithm 1).

    Weights with at least two axes and 4096 values are quantized. All other tensors stay exact, and so do weights that
    are new, have another shape, are equal to the parent's or not finite, or are so large that a sum might overflow.

    Args:
        optimizer: "exact" keeps the optimizer's moments bit-exact; "reset" stores zeros, "lossy" logarithmic levels.

    Raises:
        PolicyError: an argument is out of range.
    """

    id: ClassVar[str]
    coders: Sequence[str] = CODERS

    def __init__(self, *, optimizer: OptimizerMode = "exact") -> None:
        self._optimizer = check_optimizer_mode(optimizer)
        self._unmeasured_notice = UnmeasuredLossNotice()

    # implemented by subclasses

    @abstractmethod
    def quantize_weights(
        self, weights: Mapping[str, Tensor], differences: Mapping[str, Tensor], state: FlatState, stats: GlobalStats
    ) -> dict[str, CodebookTensor]:
        """Return the residual codes of weights, by name; a collective.

        Args:
            weights: name -> weight; finite, float32 or narrower, of any strides. Empty for a keyframe.
            differences: name -> weight minus its decoded parent, of equal shape and device; float32, finite.
            state: the state that the weights belong to.
            stats: statistics of the weights of all ranks.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def settings(self) -> dict[str, JSON]:
        raise NotImplementedError

    def quantize_optimizer(
        self, state: FlatState, quantized: Mapping[str, CodebookTensor], stats: GlobalStats
    ) -> dict[str, CodebookTensor]:
        """Return codes of tensors of the optimizer, by name; `quantized` holds those of the weights."""
        return {}

    def manifest_extra(self) -> dict[str, JSON]:
        """Return further entries of the manifest's `loss`."""
        return {}

    # called by a store

    @torch.no_grad()
    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Return the state with quantized residuals, as `plan` decides."""
        return self.plan(state, reference).quantize(state, reference)

    @torch.no_grad()
    @host_by_default()
    def plan(
        self,
        state: FlatState,
        reference: Reference | None,
        evaluator: Any = None,
        global_tensors: GlobalTensors | None = None,
    ) -> QuantizationPlan:
        """Quantize the residuals of a state; a collective of all ranks that have shards of it.

        Args:
            reference: the decoded parent checkpoint; None makes a keyframe.
            evaluator: unused: nothing is measured.
            global_tensors: the tensors of all ranks; None: this process has all of every tensor.
        """
        tensors = GlobalTensors.from_state(state) if global_tensors is None else global_tensors
        selection = select_tensors(state, tensors)
        stats = GlobalStats(tensors, selection.global_names)
        owned = replace(state, optimizer_info=selection.optimizer_info_of_masters(state))
        residuals, diverged = self._usable_residuals(selection.tensors, owned, reference, stats)
        if diverged:
            residuals, _ = self._usable_residuals(selection.tensors, owned, None, stats)
            warn_user(
                f"{humanize.names([*diverged])}: a delta would leave an error of {max(diverged.values()):.2g} times "
                "the weights, which are nearer to zero than to the last checkpoint. This checkpoint is a keyframe"
            )
        moments = {name: codes.cpu() for name, codes in self.quantize_optimizer(owned, residuals, stats).items()}
        selection.warn_exact(state, reference, () if evaluator is None else evaluator.frozen, tensors)
        num_residuals, num_moments = tensors.collectives.sum_over_ranks(len(residuals), len(moments))
        optimizer = self._optimizer
        if optimizer == "lossy" and global_tensors is not None:  # levels are of all ranks: now, while these take part
            moments |= quantize_moments(state, stats)
            optimizer = "exact"
        loss: JSON = None
        if num_residuals or num_moments or self._optimizer != "exact":
            mode = "lossy" if num_moments else self._optimizer
            loss = {"scheme": self.id, "chosen": self.settings, "optimizer": mode, **self.manifest_extra()}
            loss |= {"measured": False, "left_out": [*selection.nonfinite]}
            self._unmeasured_notice.warn_once(self, quiet=tensors.collectives.rank > 0)
        if diverged:
            far = {name: finite_or_text(float(f"{x:.4g}")) for name, x in diverged.items()}
            loss = (loss or {"scheme": self.id, "left_out": [*selection.nonfinite]}) | {"far": far}
        return QuantizationPlan(
            self.id,
            {**residuals, **moments},
            selection.cast_sources,
            optimizer,
            self.coders,
            loss,
            keyframe=bool(diverged),
            # a single rank cannot tell why a shard stays exact
            min_size=(MIN_WEIGHT_NUMEL, 2) if tensors.is_complete else None,
        )

    @property
    def arguments(self) -> dict[str, object]:
        return {**self.settings, "optimizer": self._optimizer}

    def _usable_residuals(
        self, selected: Mapping[str, Tensor], state: FlatState, reference: Reference | None, stats: GlobalStats
    ) -> tuple[dict[str, CodebookTensor], dict[str, float]]:
        """Residual codes by local name, on the CPU, and errors of diverged weights by global name; a collective."""
        differences = _differences(selected, reference)
        complete = stats.global_tensors.tensors_where_all({name: name in differences for name in selected})
        differences = {name: diff for name, diff in differences.items() if stats.global_name(name) in complete}
        weights = {name: selected[name] for name in differences}
        quantized = self.quantize_weights(weights, differences, state, stats)
        moves = {name: max_abs(diff) for name, diff in differences.items()}
        # the largest difference, and an upper bound of the parent's values
        bounds = stats.max_over_shards({name: (move, max_abs(weights[name]) + move) for name, move in moves.items()})
        usable = stats.global_tensors.tensors_where_all(
            {
                name: _fits_dtype(codes, bounds[stats.global_name(name)], weights[name].dtype)
                for name, codes in quantized.items()
            }
        )
        quantized = {name: codes for name, codes in quantized.items() if stats.global_name(name) in usable}
        diverged = diverged_errors(quantized, weights, differences, reference, stats)
        return {name: codes.cpu() for name, codes in quantized.items()}, diverged


def _differences(weights: Mapping[str, Tensor], reference: Reference | None) -> dict[str, Tensor]:
    """Differences between weights and the decoded parent, of those that have one and a finite difference."""
    differences: dict[str, Tensor] = {}
    for name, weight in weights.items():
        parent = None if reference is None else reference.get_like(name, tuple(weight.shape), weight.dtype)
        if parent is not None:
            difference = weight.to(torch.float32) - parent.to(weight.device, torch.float32)
            if math.isfinite(max_abs(difference)):
                differences[name] = difference
    return differences


def _fits_dtype(quantized_tensor: CodebookTensor, bounds: tuple[float, ...], dtype: torch.dtype) -> bool:
    """True if there is a difference, and no sum of parent and center can overflow the dtype."""
    moved, base = bounds
    return moved > 0 and base + max_abs(quantized_tensor.centers) <= torch.finfo(dtype).max
