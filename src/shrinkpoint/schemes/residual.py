"""Schemes that quantize the difference to the decoded parent checkpoint, without measuring the loss.

A residual is coded relative to its own size. After weights were saved and then rolled back (a spike of the loss), or
after others were loaded, it can be larger than the weights, and so can its error: then a keyframe is written
instead."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from shrinkpoint.codec.code_streams import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import LossWarning
from shrinkpoint.schemes import optimizer_state
from shrinkpoint.schemes.base import QuantizedState, SpecMixin
from shrinkpoint.schemes.calibration import UnmeasuredLossNotice
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.schemes.global_stats import GlobalStats
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL, max_abs, select_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON

MAX_RESIDUAL_ERROR = 0.01
"""Of the weights, where a reader's values are farther from them than zero is; nearer ones are what a scheme tracks."""


def diverged_errors(
    quantized: Mapping[str, CodebookTensor],
    weights: Mapping[str, Tensor],
    differences: Mapping[str, Tensor],
    reference: Reference | None,
    pool: GlobalStats | None = None,
) -> dict[str, float]:
    """The relative errors that a reader would get of the weights for which a difference is worth nothing, by title.

    Those are the ones whose difference is larger than they are, and whose error, as it would be decoded, is above
    `MAX_ERROR` of them; in a keyframe they have none. With a `pool`, of whole weights, and a collective.
    """
    sizes = {name: (_squared_norm(differences[name]), _squared_norm(weights[name])) for name in quantized}
    totals = _totals(sizes, pool)
    far = {title for title, (moved, now) in totals.items() if moved > now}
    if not far or reference is None:
        return {}
    ours = {name: one for name, one in quantized.items() if _global_name(name, pool) in far}
    errors = {name: (_squared_error(one, weights[name], reference.tensors[name]),) for name, one in ours.items()}
    relative = {title: _relative_error(error, totals[title][1]) for title, (error,) in _totals(errors, pool).items()}
    return {title: error for title, error in relative.items() if not error <= MAX_RESIDUAL_ERROR}


def _squared_error(quantized_tensor: CodebookTensor, x: Tensor, parent: Tensor) -> float:
    """The sum of squares of what a reader's values differ by."""
    return _squared_norm(quantized_tensor.dequantize(x.dtype, parent).to(x.device, torch.float32) - x.to(torch.float32))


def _squared_norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 if x.numel() else 0.0


def _relative_error(squared_error: float, squared_norm: float) -> float:
    return math.sqrt(squared_error / squared_norm) if squared_norm > 0 else math.inf if squared_error > 0 else 0.0


def _global_name(name: str, pool: GlobalStats | None) -> str:
    return name if pool is None else pool.global_name(name)


def _totals(parts: Mapping[str, tuple[float, ...]], pool: GlobalStats | None) -> dict[str, tuple[float, ...]]:
    if pool is None:
        return dict(parts)
    told = pool.global_tensors.gather_by_tensor(
        {name: one for name, one in parts.items() if pool.global_tensors.is_primary(name)}
    )
    return {title: tuple(map(math.fsum, zip(*found, strict=True))) for title, found in told.items()}


class ResidualScheme(SpecMixin, RecordEncodingMixin):
    """What these schemes have in common.

    The first checkpoint, and every later keyframe, holds the weights exactly. A delta moves what a reader has towards
    the weights: the difference is taken to the *reconstructed* checkpoint before, so that an error is seen, and can be
    made good, by the next save, and does not grow with the chain (arXiv 2009.13003, algorithm 1).

    What is quantized are the weights with two axes and 4096 values at least. The rest stays exact, and so does, for as
    long as it lasts, a weight that is new, has another shape, has not moved, is not finite, or is so large that a sum
    might not be.

    Args:
        optimizer: "exact" keeps the optimizer's moments bit for bit; "reset" and "lossy" do not (see `moments`).

    Raises:
        PolicyError: an argument that makes no sense.
    """

    id: ClassVar[str]
    coders: Sequence[str] = CODERS

    def __init__(self, *, optimizer: optimizer_state.Mode = "exact") -> None:
        self._optimizer = optimizer_state.check_mode(optimizer)
        self._unmeasured_notice = UnmeasuredLossNotice()

    # what a scheme of this kind says of itself

    @abstractmethod
    def quantize_weights(
        self,
        weights: Mapping[str, Tensor],
        differences: Mapping[str, Tensor],
        state: FlatState,
        pool: GlobalStats | None = None,
    ) -> dict[str, CodebookTensor]:
        """Residual symbols by name of a weight.

        Args:
            weights: finite, float32 or narrower, of any strides; none where the checkpoint is a keyframe.
            differences: of the same names and shapes, on the same devices: the weights less what a reader has of them
                at the checkpoint before; float32, finite.
            state: the state of which the weights are.
            pool: these are boxes of weights of several ranks; all of them are here.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def settings(self) -> dict[str, JSON]:
        """What was asked for, for the manifest."""
        raise NotImplementedError

    def quantize_optimizer(
        self, state: FlatState, quantized: Mapping[str, CodebookTensor], pool: GlobalStats | None = None
    ) -> dict[str, CodebookTensor]:
        """Symbols of tensors that are no weights, but of the optimizer; `quantized` are those of the weights."""
        return {}

    def manifest_extra(self) -> dict[str, JSON]:
        """What else a manifest should say, of this checkpoint and for the next one."""
        return {}

    # what a store calls

    @torch.no_grad()
    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Lose what the scheme loses; see `schemes.Scheme`."""
        return self.plan(state, reference).quantize(state, reference)

    @torch.no_grad()
    def plan(self, state: FlatState, reference: Reference | None, pool: GlobalStats | None = None) -> QuantizationPlan:
        """What is lost of a state.

        Args:
            pool: what there is of these tensors on other ranks, all of which decide at the same time.
        """
        pools = () if pool is None else (pool,)
        global_tensors = GlobalTensors.from_state(state) if pool is None else pool.global_tensors
        picks = select_tensors(state, global_tensors)
        owned = replace(state, optimizer_info=picks.optimizer_info_of_masters(state))
        symbols, far = self._usable_residuals(picks.tensors, owned, reference, *pools)
        if far:
            symbols, _ = self._usable_residuals(picks.tensors, owned, None, *pools)
            _warn_diverged(far)
        further = {name: one.cpu() for name, one in self.quantize_optimizer(owned, symbols, *pools).items()}
        picks.warn_nonfinite()
        lossy, optimizer = (bool(symbols), bool(further)), self._optimizer
        if pool is not None:
            weights, others = pool.global_tensors.sum_over_ranks(*map(len, (symbols, further)))
            lossy = weights > 0, others > 0
            if optimizer == "lossy":
                further |= {name: one.cpu() for name, one in pool.quantize_moments(state)}
                optimizer = "exact"  # what else is to be done with it
        loss: JSON = None
        if any(lossy) or self._optimizer != "exact":
            said = "lossy" if lossy[1] else self._optimizer
            loss = {"scheme": self.id, "chosen": self.settings, "optimizer": said, **self.manifest_extra()}
            loss |= {"measured": False, "left_out": [*picks.nonfinite]}
            self._unmeasured_notice.warn_once(self, quiet=pool is not None and pool.global_tensors.rank > 0)
        if far:
            loss = (loss or {"scheme": self.id, "left_out": [*picks.nonfinite]}) | {"far": _json_errors(far)}
        least = (MIN_WEIGHT_NUMEL, 2) if pool is None else None
        made = {**symbols, **further}
        return QuantizationPlan(
            self.id, made, picks.cast_sources, optimizer, self.coders, loss, keyframe=bool(far), min_size=least
        )

    @property
    def arguments(self) -> dict[str, object]:
        """See `SpecMixin`."""
        return {**self.settings, "optimizer": self._optimizer}

    def _usable_residuals(
        self,
        selected: Mapping[str, Tensor],
        state: FlatState,
        reference: Reference | None,
        pool: GlobalStats | None = None,
    ) -> tuple[dict[str, CodebookTensor], dict[str, float]]:
        """Symbols, on the CPU; and the errors of the weights for which a difference is worth nothing, by title."""
        differences = _differences(selected, reference)
        if pool is None:
            weights = {name: selected[name] for name in differences}
            made = self.quantize_weights(weights, differences, state)
            made = {n: one for n, one in made.items() if _is_usable(one, weights[n], differences[n])}
            far = diverged_errors(made, weights, differences, reference)
            return {name: one.cpu() for name, one in made.items()}, far
        titles = pool.tensors_where_all({name: name in differences for name in selected})
        differences = {name: x for name, x in differences.items() if pool.global_name(name) in titles}
        weights = {name: selected[name] for name in differences}
        made = self.quantize_weights(weights, differences, state, pool)
        ends = pool.max_over_ranks({name: _magnitude_bounds(weights[name], x) for name, x in differences.items()})
        serves = pool.tensors_where_all(
            {n: _fits_dtype(one, ends[pool.global_name(n)], weights[n].dtype) for n, one in made.items()}
        )
        made = {name: one for name, one in made.items() if pool.global_name(name) in serves}
        far = diverged_errors(made, weights, differences, reference, pool)
        return {name: one.cpu() for name, one in made.items()}, far


def _differences(weights: Mapping[str, Tensor], reference: Reference | None) -> dict[str, Tensor]:
    """To what a reader has of each, where that can be a base."""
    out: dict[str, Tensor] = {}
    for name, x in weights.items():
        held = None if reference is None else reference.get_like(name, tuple(x.shape), x.dtype)
        if held is not None:
            difference = x.to(torch.float32) - held.to(x.device, torch.float32)
            if math.isfinite(max_abs(difference)):  # else the base is not finite, or too far away
                out[name] = difference
    return out


def _warn_diverged(errors: Mapping[str, float]) -> None:
    worst = max(errors.values())
    text = (
        f"{', '.join(errors)}: what was saved last is farther away than zero, and "
        f"a difference to it would leave an error "
        f"of {worst:.2g} times the weights: this checkpoint is a keyframe"
    )
    warnings.warn(text, LossWarning, stacklevel=5)


def _json_errors(errors: Mapping[str, float]) -> dict[str, JSON]:
    """As a manifest can say it."""
    return {name: float(f"{error:.4g}") if math.isfinite(error) else str(error) for name, error in errors.items()}


def _is_usable(quantized_tensor: CodebookTensor, x: Tensor, difference: Tensor) -> bool:
    """Whether something has moved, and no sum of base and center can be too large for the dtype."""
    return _fits_dtype(quantized_tensor, _magnitude_bounds(x, difference), x.dtype)


def _magnitude_bounds(x: Tensor, difference: Tensor) -> tuple[float, float]:
    """How far a weight has moved at most, and how large a base of it may be."""
    moved = max_abs(difference)
    return moved, max_abs(x) + moved


def _fits_dtype(quantized_tensor: CodebookTensor, bounds: tuple[float, ...], dtype: torch.dtype) -> bool:
    moved, base = bounds
    return moved > 0 and base + max_abs(quantized_tensor.centers) <= torch.finfo(dtype).max
