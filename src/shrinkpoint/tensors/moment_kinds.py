"""Recognizes what an optimizer keeps for a parameter: which kind each tensor of a slot is of.

Names alone do not tell: Muon and SGD both keep a `momentum_buffer`, Adam, Lion, Adamax and SOAP an `exp_avg`, and each
bears another error. Kinds follow from the names of all tensors of a slot and from the settings of its group. Where a
slot has a tensor that no optimizer known here keeps, nothing in it is known: what another optimizer does with a tensor
of a familiar name (SOAP's second moments are those of a rotated gradient) is not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch


class MomentKind(str, Enum):
    """What a tensor of an optimizer is to the optimizer's step."""

    GRADIENT_MEAN = "gradient mean"
    """Adam's first moment: divided by the root of a second one."""
    SQUARE_MEAN = "square mean"
    """A decaying mean of squares: Adam's second moment, RMSprop's, Adadelta's of gradients."""
    ACCUMULATOR = "accumulator"
    """What forgets slowly or never, none below zero: a sum or a maximum of squares, Adamax's largest magnitude."""
    MOMENTUM = "momentum"
    """SGD's and RMSprop's: the step is a multiple of it."""
    ORTHOGONALIZED = "orthogonalized momentum"
    """Muon's: all its singular values become 1 in the step, so that noise weighs as much as the least of them."""
    SIGN = "momentum of a sign"
    """Lion's: the sign of it, together with a gradient, is the step."""
    SCALED = "scaled momentum"
    """A first moment that is divided by something else than the root of a second moment: Adamax's."""
    HISTORY = "history"
    """LBFGS's: differences of gradients between steps, into which no error of the weights may come."""
    EXACT = "exact"
    """Known, and no grid is made for it."""
    UNKNOWN = "unknown"
    """Of an optimizer that is not known."""

    __hash__ = str.__hash__


_SQUARES = {
    "exp_avg_sq": MomentKind.SQUARE_MEAN,
    "square_avg": MomentKind.SQUARE_MEAN,
    "acc_delta": MomentKind.ACCUMULATOR,
    "exp_inf": MomentKind.ACCUMULATOR,
    "max_exp_avg_sq": MomentKind.ACCUMULATOR,
    "sum": MomentKind.ACCUMULATOR,
}
_FIRSTS = ("exp_avg", "momentum_buffer")
_EXACT = frozenset(
    (
        "grad_avg",  # centered RMSprop: the root of square_avg - grad_avg^2, which errors of either make negative
        *("row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col"),  # Adafactor
        *("z", "ax"),  # weights beside the weights: schedule-free, ASGD
        *("prev", "step_size"),  # Rprop
        *("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2", "new_max1", "new_max2"),  # bitsandbytes
        *("gnorm_vec", "unorm_vec", "__bnb_optimizer_quant_state__"),
    )
)
_HISTORY = frozenset(("d", "old_dirs", "old_stps", "ro", "al", "prev_flat_grad"))
_MUON_SETTINGS = ("ns_coefficients", "ns_steps", "num_ns_steps")
"""Settings of a group that Muon alone has: torch's, and those of others."""


def moment_kinds(slot: Mapping[Any, Any], settings: Mapping[str, Any]) -> dict[str, MomentKind]:
    """Return the kind of each tensor, and nest of tensors, that an optimizer keeps for one parameter.

    Args:
        slot: what it keeps, by name; without weights in full precision.
        settings: of the parameter's group.

    Returns:
        By name, without single numbers.
    """
    names = [name for name, value in slot.items() if isinstance(name, str) and _has_values(value)]
    if not _EXACT.union(_HISTORY, _SQUARES, _FIRSTS).issuperset(names):
        return dict.fromkeys(names, MomentKind.UNKNOWN)
    return {name: _kind(name, names, settings) for name in names}


def _kind(name: str, names: list[str], settings: Mapping[str, Any]) -> MomentKind:
    if name in _EXACT or (name == "square_avg" and "grad_avg" in names):
        return MomentKind.EXACT
    if name in _HISTORY:
        return MomentKind.HISTORY
    if name in _SQUARES:
        return _SQUARES[name]
    if _is_muon(settings) and "exp_avg_sq" not in names:
        return MomentKind.ORTHOGONALIZED
    return _momentum_buffer_kind(names, settings) if name == "momentum_buffer" else _average_kind(names, settings)


def _is_muon(settings: Mapping[str, Any]) -> bool:
    """Whether a group's settings are Muon's. A hybrid optimizer marks its other groups."""
    return any(key in settings for key in _MUON_SETTINGS) and settings.get("use_muon", True) is not False


def _momentum_buffer_kind(names: list[str], settings: Mapping[str, Any]) -> MomentKind:
    is_like_sgd = "dampening" in settings or "square_avg" in names
    return MomentKind.MOMENTUM if is_like_sgd else MomentKind.UNKNOWN


def _average_kind(names: list[str], settings: Mapping[str, Any]) -> MomentKind:
    """The kind of `exp_avg`."""
    if "clip_threshold" in settings:  # transformers' Adafactor: of steps that are divided already
        return MomentKind.MOMENTUM
    if "exp_avg_sq" in names:
        return MomentKind.GRADIENT_MEAN
    if "exp_inf" in names:
        return MomentKind.SCALED
    is_lion = "betas" in settings and "eps" not in settings
    return MomentKind.SIGN if is_lion else MomentKind.UNKNOWN


def _has_values(value: Any) -> bool:
    """Whether a value is a tensor that has axes, or a nest with a tensor in it."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    nested = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(member, torch.Tensor) or _has_values(member) for member in nested)
