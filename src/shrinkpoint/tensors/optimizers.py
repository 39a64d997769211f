"""The catalogue of optimizers: what each keeps for a parameter, and what that is to its step.

A new optimizer is a row of `OPTIMIZERS`. Names of slots alone do not tell optimizers apart: Muon and SGD both keep a
`momentum_buffer`, Adam, Lion, Adamax and SOAP an `exp_avg`, and each bears another error. A row therefore also says
which slots and settings the optimizer is recognized by. A slot with a name that is in no row makes everything beside it
unknown, because another optimizer may do anything with a familiar name: SOAP's second moments are those of a rotated
gradient.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from shrinkpoint.tensors.info import JSON, Role
from shrinkpoint.tensors.tree import is_optimizer_state


class MomentKind(str, Enum):
    """Function of a tensor in an optimizer's step."""

    GRADIENT_MEAN = "gradient mean"  # Adam's first moment: divided by the root of a second one
    SQUARE_MEAN = "square mean"  # A decaying mean of squares: Adam's second moment, RMSprop's, Adadelta's of gradients
    ACCUMULATOR = "accumulator"
    """Forgets slowly or never, and is never negative: a sum or a maximum of squares, Adamax's largest magnitude."""
    MOMENTUM = "momentum"  # SGD's and RMSprop's: the step is a multiple of it
    ORTHOGONALIZED = "orthogonalized momentum"
    """Muon's: all its singular values become 1 in the step, so that noise weighs as much as the least of them."""
    SIGN = "momentum of a sign"  # Lion's: the step is the sign of it, together with a gradient
    SCALED = "scaled momentum"
    """A first moment that is divided by something else than the root of a second moment: Adamax's."""
    HISTORY = "history"  # LBFGS's: differences of gradients between steps, into which no error of the weights may come
    EXACT = "exact"  # Known, and no grid is made for it
    UNKNOWN = "unknown"  # Kept by an optimizer that is not in the catalogue

    __hash__ = str.__hash__


Shape: TypeAlias = Literal["parameter", "rows", "columns", "codes", "codebook", "maxima", "other"]


class Slot(NamedTuple):
    """A tensor, or nest of tensors, that an optimizer keeps for a parameter."""

    name: str
    kind: MomentKind
    role: Role = Role.OTHER  # decides how its values are coded; one role for each name
    # "parameter" (the parameter's), "rows" and "columns" (means over the last or the last but one axis), "codes",
    # "codebook" and "maxima" (8-bit codes, their values, the maximum of each block), or "other".
    shape: Shape = "parameter"


@dataclass(frozen=True)
class Optimizer:
    """A row of the catalogue."""

    slots: tuple[Slot, ...]  # tensors with axes; some may be missing
    numbers: str = ""  # names of single numbers beside them
    torch_classes: str = ""  # classes of `torch.optim` that keep exactly these slots and numbers
    # Settings of a group that tell these classes from torch's others, and that no scheduler adds.
    hyperparameters: str = ""
    beside: str = ""  # slots that must be there
    not_beside: str = ""  # a slot that must not be there
    marks: str = ""  # settings of which a group must have one
    no_mark: str = ""  # a setting that a group must not have

    def keeps(self, names: tuple[str, ...], settings: tuple[str, ...]) -> bool:
        """True if slots of these names, in a group with settings of these names, can be this optimizer's."""
        is_marked = not self.marks or any(mark in settings for mark in self.marks.split())
        is_other = self.not_beside in names or self.no_mark in settings
        return is_marked and not is_other and all(name in names for name in self.beside.split())


def _first(name: str, kind: MomentKind) -> Slot:
    return Slot(name, kind, Role.MOMENT1)


def _second(name: str, kind: MomentKind) -> Slot:
    return Slot(name, kind, Role.MOMENT2)


def _others(names: str, kind: MomentKind = MomentKind.EXACT, shape: Shape = "other") -> tuple[Slot, ...]:
    return tuple(Slot(name, kind, shape=shape) for name in names.split())


_K = MomentKind
_MUON = "ns_coefficients ns_steps num_ns_steps"
_ADAM = (_first("exp_avg", _K.GRADIENT_MEAN), _second("exp_avg_sq", _K.SQUARE_MEAN))

OPTIMIZERS: tuple[Optimizer, ...] = (
    # The kind of a tensor is that in the first row which has its name and whose conditions hold. If none holds, but all
    # rows give the name one kind, it is that kind: a square is a square wherever it stands.
    Optimizer((_first("exp_avg", _K.ORTHOGONALIZED),), marks=_MUON, not_beside="exp_avg_sq"),  # Muon outside torch
    Optimizer(
        (_first("momentum_buffer", _K.ORTHOGONALIZED),),
        torch_classes="Muon",
        hyperparameters="momentum eps",
        marks=_MUON,
        not_beside="exp_avg_sq",
    ),
    Optimizer(  # of transformers: the first moment is of steps that are divided already
        (
            _first("exp_avg", _K.MOMENTUM),
            _second("exp_avg_sq", _K.SQUARE_MEAN),
            *_others("exp_avg_sq_row", shape="rows"),
            *_others("exp_avg_sq_col", shape="columns"),
        ),
        marks="clip_threshold",
    ),
    Optimizer(
        (*_ADAM, _second("max_exp_avg_sq", _K.ACCUMULATOR)),
        numbers="step",
        torch_classes="Adam AdamW",
        hyperparameters="betas eps",
        beside="exp_avg_sq",
    ),
    Optimizer(_ADAM, "step", "RAdam SparseAdam", "betas eps", beside="exp_avg_sq"),
    Optimizer(_ADAM, "step mu_product", "NAdam", "betas eps momentum_decay", beside="exp_avg_sq"),
    Optimizer(
        (_first("exp_avg", _K.SCALED), _second("exp_inf", _K.ACCUMULATOR)),
        numbers="step",
        torch_classes="Adamax",
        hyperparameters="betas eps",
        beside="exp_inf",
    ),
    Optimizer((_first("exp_avg", _K.SIGN),), marks="betas", no_mark="eps"),  # Lion
    Optimizer(
        (_first("momentum_buffer", _K.MOMENTUM),),
        torch_classes="SGD",
        hyperparameters="momentum dampening",
        marks="dampening",
    ),
    Optimizer(  # centered RMSprop: errors would make square_avg - grad_avg^2, whose root it takes, negative
        (_second("square_avg", _K.EXACT), _first("momentum_buffer", _K.MOMENTUM), _first("grad_avg", _K.EXACT)),
        beside="square_avg grad_avg",
    ),
    Optimizer(
        (_second("square_avg", _K.SQUARE_MEAN), _first("momentum_buffer", _K.MOMENTUM), _first("grad_avg", _K.EXACT)),
        numbers="step",
        torch_classes="RMSprop",
        hyperparameters="alpha eps momentum",
        beside="square_avg",
    ),
    Optimizer(
        (_second("square_avg", _K.SQUARE_MEAN), _second("acc_delta", _K.ACCUMULATOR)),
        numbers="step",
        torch_classes="Adadelta",
        hyperparameters="rho eps",
    ),
    Optimizer((_second("sum", _K.ACCUMULATOR),), "step", "Adagrad", "lr_decay eps"),
    Optimizer(
        (
            *_others("row_var", shape="rows"),
            *_others("col_var", shape="columns"),
            *_others("variance", shape="parameter"),
        ),
        numbers="step",
        torch_classes="Adafactor",
        hyperparameters="beta2_decay eps d",
    ),
    Optimizer(_others("ax", shape="parameter"), "step eta mu", "ASGD", "lambd alpha t0"),
    Optimizer(_others("prev step_size", shape="parameter"), "step", "Rprop", "etas step_sizes"),
    Optimizer(_others("z", shape="parameter")),  # schedule-free: weights beside the weights
    Optimizer(_others("d old_dirs old_stps ro al prev_flat_grad", _K.HISTORY)),  # LBFGS
    Optimizer(  # of bitsandbytes
        (
            *_others("state1 state2", shape="codes"),
            *_others("qmap1 qmap2", shape="codebook"),
            *_others("absmax1 absmax2", shape="maxima"),
            *_others("new_max1 new_max2 gnorm_vec unorm_vec __bnb_optimizer_quant_state__"),
        )
    ),
)

QUANTIZED_STATE = "__bnb_optimizer_quant_state__"  # Key of a dict with bitsandbytes' slots, in a `state_dict` of FSDP
_SLOTS = [slot for row in OPTIMIZERS for slot in row.slots]
_KINDS = {name: {slot.kind for slot in _SLOTS if slot.name == name} for name in dict.fromkeys(s.name for s in _SLOTS)}


def _names(role: Role | None = None, kind: MomentKind | None = None, shape: str | None = None) -> tuple[str, ...]:
    fits = (s for s in _SLOTS if role in (None, s.role) and kind in (None, s.kind) and shape in (None, s.shape))
    return tuple(dict.fromkeys(slot.name for slot in fits))


SLOT_ROLES = {name: role for role in (Role.MOMENT1, Role.MOMENT2) for name in _names(role)}
FIRST_MOMENTS = tuple(name for name in _names(Role.MOMENT1) if _KINDS[name] != {MomentKind.EXACT})
SECOND_MOMENTS = tuple(
    dict.fromkeys(
        slot.name
        for row in OPTIMIZERS
        if any(slot.kind is MomentKind.GRADIENT_MEAN for slot in row.slots)
        for slot in row.slots
        if slot.kind is MomentKind.SQUARE_MEAN
    )
)
"""Slots whose root divides a first moment."""
SQUARE_MEANS = _names(kind=MomentKind.SQUARE_MEAN)
PARAMETER_SHAPED = _names(shape="parameter")
CODES = _names(shape="codes")
SECOND_MOMENT_BLOCKS = (CODES[1], _names(shape="codebook")[1], _names(shape="maxima")[1])
"""Codes, codebook and maxima of bitsandbytes' second moment."""
FACTORS = tuple(zip(_names(shape="rows"), _names(shape="columns"), strict=True))
"""Names of row and column means that replace a second moment (Adafactor)."""
TORCH_SLOTS: Mapping[str, frozenset[str]] = {
    name: frozenset([*row.numbers.split(), *(slot.name for slot in row.slots)])
    for row in OPTIMIZERS
    for name in row.torch_classes.split()
}
"""Names of all that torch's own optimizers keep for each parameter, by class."""
HYPERPARAMETERS = frozenset(name for row in OPTIMIZERS for name in row.hyperparameters.split())
"""Hyperparameters that tell torch's own optimizers apart; no scheduler adds one of these to a group."""


def moment_kinds(slot: Mapping[Any, Any], settings: Mapping[str, Any]) -> dict[str, MomentKind]:
    """Recognize the optimizer that keeps these tensors for one parameter, and return the kind of each, by name.

    Args:
        slot: what an optimizer keeps for the parameter, by name; without master weights.
        settings: of the parameter's group.

    Returns:
        The kind of each tensor with axes, and of each nest of tensors.
    """
    names = tuple(name for name, value in slot.items() if isinstance(name, str) and _has_values(value))
    is_other = settings.get("use_muon", True) is False  # a group that a hybrid of Muon updates in another way
    return dict(_kinds(names, tuple(key for key in settings if not (is_other and key in _MUON.split()))))


@lru_cache(maxsize=256)
def _kinds(names: tuple[str, ...], settings: tuple[str, ...]) -> dict[str, MomentKind]:
    if not _KINDS.keys() >= set(names):
        return dict.fromkeys(names, MomentKind.UNKNOWN)
    kinds = {name: next(iter(_KINDS[name])) if len(_KINDS[name]) == 1 else MomentKind.UNKNOWN for name in names}
    for row in reversed(OPTIMIZERS):
        if row.keeps(names, settings):
            kinds |= {slot.name: slot.kind for slot in row.slots if slot.name in kinds}
    return kinds


def _has_values(value: Any) -> bool:
    """True for a tensor that has axes, and for a nest with a tensor in it."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    nested = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(member, torch.Tensor) or _has_values(member) for member in nested)


_MASTER = re.compile("master|fp32")


@lru_cache(maxsize=1024)
def is_master_key(key: str) -> bool:
    return _MASTER.search(key) is not None


def has_optimizer_state(tree: JSON) -> bool:
    """True if the tree of a state has an optimizer that keeps something for a parameter."""
    if isinstance(tree, dict):
        if is_optimizer_state(tree) and tree["state"]:
            return True
        return any(map(has_optimizer_state, tree.values()))
    return isinstance(tree, list) and any(map(has_optimizer_state, tree))


def drop_optimizer_state(value: Any) -> None:
    """Removes, in place, what optimizers keep for each parameter, except master weights, from a nested state."""
    if isinstance(value, dict) and is_optimizer_state(value):
        masters = {
            key: {name: x for name, x in slot.items() if isinstance(name, str) and is_master_key(name)}
            for key, slot in value["state"].items()
            if isinstance(slot, dict)
        }
        value["state"] = {key: slot for key, slot in masters.items() if slot}
    for member in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        drop_optimizer_state(member)
