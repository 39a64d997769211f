"""Whether a saved state is one of the object that is to load it: of its kind, in its dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shrinkpoint.errors import MismatchError

_ADAM = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
_SLOTS: Mapping[str, frozenset[str]] = {
    "ASGD": frozenset({"step", "eta", "mu", "ax"}),
    "Adadelta": frozenset({"step", "square_avg", "acc_delta"}),
    "Adafactor": frozenset({"step", "row_var", "col_var", "variance"}),
    "Adagrad": frozenset({"step", "sum"}),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": frozenset({"step", "exp_avg", "exp_inf"}),
    "Muon": frozenset({"momentum_buffer"}),
    "NAdam": frozenset({"step", "exp_avg", "exp_avg_sq", "mu_product"}),
    "RAdam": frozenset({"step", "exp_avg", "exp_avg_sq"}),
    "RMSprop": frozenset({"step", "square_avg", "momentum_buffer", "grad_avg"}),
    "Rprop": frozenset({"step", "prev", "step_size"}),
    "SGD": frozenset({"momentum_buffer"}),
    "SparseAdam": frozenset({"step", "exp_avg", "exp_avg_sq"}),
}
"""The tensors that torch's own optimizers keep of a parameter."""
_HYPERPARAMETERS = frozenset(
    {
        "alpha", "beta2_decay", "betas", "d", "dampening", "eps", "etas", "lambd", "lr_decay", "momentum",
        "momentum_decay", "rho", "step_sizes", "t0",
    }
)  # fmt: skip
"""Of torch's own optimizers, those by which they differ; a scheduler adds none of these to a group."""
_STRUCTURE = frozenset({"_schedulers", "lr_lambdas"})
"""Of a scheduler that is made of others, or of functions."""
_FORMER = frozenset({"verbose"})
"""What schedulers of older releases of torch saved besides."""


def check_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], where: str, way: str) -> None:
    """Refuse the state of another kind of optimizer, or one that loading would round.

    What torch releases and schedulers add to a group, and settings without which a slot is not there (momentum,
    amsgrad), make no other kind; Adam and AdamW are one.

    Args:
        saved: its groups have been compared with the optimizer's.
        way: what else a caller may do.

    Raises:
        MismatchError: it is one.
    """
    optimizer = _unwrapped(optimizer)
    found = {
        str(slot) for _, state in states(optimizer, saved) for slot, value in state.items() if isinstance(value, Tensor)
    }
    ours, theirs = _hyperparameters(optimizer, saved)
    strange = sorted((found - _known(optimizer, found)) | theirs)
    if strange or ours:
        parts = [f"the state of another kind of optimizer, with {', '.join(strange)}"] if strange else []
        parts += [f"no {', '.join(sorted(ours))}"] if ours else []
        do = f"build the optimizer that was saved, {way}"
        raise MismatchError(where, found="; ".join(parts), expected=_words(optimizer), do=do)
    if _is_torchs(optimizer):
        _check_slots(optimizer, saved, where, way)


def check_scheduler(scheduler: Any, saved: Any, where: str, way: str) -> None:
    """Refuse the state of another kind of scheduler, told by the names of its settings.

    Raises:
        MismatchError: it is one.
    """
    names = [
        {key for key in state if isinstance(key, str) and (not key.startswith("_") or key in _STRUCTURE)} - _FORMER
        for state in (scheduler.state_dict(), saved if isinstance(saved, Mapping) else {})
    ]
    settings = names[0] & (_arguments(scheduler) | _STRUCTURE)
    missing, extra = sorted(settings - names[1]), sorted(names[1] - names[0])
    if missing or extra or not isinstance(saved, Mapping):
        parts = [f"{', '.join(extra)}"] if extra else []
        parts += [f"no {', '.join(missing)}"] if missing else []
        do = f"build the scheduler that was saved, {way}"
        expected = (
            f"that of a {type(scheduler).__name__}, with {', '.join(sorted(settings or names[0])) or 'no settings'}"
        )
        found = f"the state of another kind of scheduler, with {' and '.join(parts) or 'nothing'}"
        raise MismatchError(where, found=found, expected=expected, do=do)


def check_scaler(scaler: Any, saved: Any, where: str) -> None:
    """Refuse what a scaler that is on cannot go on from.

    Raises:
        MismatchError: it was saved while it was off, or is none.
    """
    needed = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    if scaler.is_enabled() and (not isinstance(saved, Mapping) or not needed <= saved.keys()):
        found, do = "the state of one that was off", "leave it out, or turn it off"
        raise MismatchError(where, found=found, expected="that of a gradient scaler which is on", do=do)


def check_dtype(found: torch.dtype, expected: torch.dtype, where: str, way: str) -> None:
    """Refuse values that loading would round or turn into others.

    Raises:
        MismatchError: not every value of the one dtype is one of the other.
    """
    if not holds(expected, found):
        do = f"build it in the dtype that was saved, {way}"
        raise MismatchError(where, found=f"{found} in the checkpoint", expected=f"{expected}", do=do)


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of a dtype is one of another; of those that torch does not compare only where they are one.

    >>> holds(torch.float32, torch.bfloat16), holds(torch.float16, torch.bfloat16), holds(torch.float32, torch.int32)
    (True, False, False)
    """
    if wide == narrow:
        return True
    kinds = [(one.is_complex, one.is_floating_point) for one in (wide, narrow)]
    try:
        return kinds[0] == kinds[1] and torch.promote_types(wide, narrow) == wide
    except (RuntimeError, TypeError):  # an 8-bit float, a quantized one
        return False


def is_like_the_parameter(optimizer: Optimizer, parameter: Tensor, slot: str) -> bool:
    """Whether a slot is known to have the shape of its parameter; others keep projections under torch's names."""
    optimizer = _unwrapped(optimizer)
    own = optimizer.state.get(parameter, {}).get(slot)
    return _is_torchs(optimizer) or (isinstance(own, Tensor) and own.shape == parameter.shape)


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """What a framework's wrapper stands for."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, Optimizer) and inner is not optimizer else optimizer


def _is_torchs(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in _SLOTS


def _known(optimizer: Optimizer, found: set[str]) -> set[str] | frozenset[str]:
    """The slots that an optimizer may have; of one that is not torch's and has none yet, nobody knows."""
    if _is_torchs(optimizer):
        return _SLOTS[type(optimizer).__name__]
    ours = {str(slot) for state in optimizer.state.values() if isinstance(state, dict) for slot in state}
    return ours if ours - found else found


def _hyperparameters(optimizer: Optimizer, saved: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Those of the optimizer that a saved group lacks, and those of a saved group that the optimizer lacks."""
    defaults = _defaults(optimizer)
    ours = {name for name, value in defaults.items() if _is_setting(value)}
    live = set(defaults).union(*optimizer.param_groups)
    groups = saved["param_groups"]
    lacking = {name for group in groups for name in ours - group.keys()}
    return lacking, {name for group in groups for name in (group.keys() & _HYPERPARAMETERS) - live}


def _defaults(optimizer: Optimizer) -> Mapping[str, Any]:
    """None for a class of somebody's that keeps none."""
    return getattr(optimizer, "defaults", None) or {}


def _is_setting(value: Any) -> bool:
    """Switches and what is None come and go with releases of torch."""
    return not isinstance(value, bool) and isinstance(value, int | float | tuple | Tensor)


def _words(optimizer: Optimizer) -> str:
    words = f"that of {type(optimizer).__module__}.{type(optimizer).__name__}"
    settings = sorted(name for name, value in _defaults(optimizer).items() if _is_setting(value))
    return f"{words}, with {', '.join(settings)}" if settings else words


def _check_slots(optimizer: Optimizer, saved: Mapping[str, Any], where: str, way: str) -> None:
    """torch turns slots into the dtype of their parameter."""
    for index, (parameter, state) in enumerate(states(optimizer, saved)):
        for slot, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.dim()
                and value.is_floating_point()
                and parameter.is_floating_point()
            ):
                check_dtype(value.dtype, parameter.dtype, f"{where}, parameter {index}, {slot}", way)


def states(optimizer: Optimizer, saved: Mapping[str, Any]) -> Iterator[tuple[Tensor, Mapping[Any, Any]]]:
    """Every parameter, in the order of the groups, which are as large as those saved, with what was saved of it."""
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        state = saved["state"].get(key, {})
        yield parameter, state if isinstance(state, Mapping) else {}


def _arguments(thing: Any) -> frozenset[str]:
    """The names of what an object's class is made with."""
    makers = (vars(kind).get("__init__") for kind in type(thing).__mro__)
    codes = (maker.__code__ for maker in makers if isinstance(maker, FunctionType))
    return frozenset(name for code in codes for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
