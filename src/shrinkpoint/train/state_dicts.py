"""The state dicts of a training loop: collected for a save, checked against the objects that load them, and loaded.

Also marks which tensors of a state are parameters, and converts metrics to plain floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role
from shrinkpoint.train import state_dicts

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
        "alpha",
        "beta2_decay",
        "betas",
        "d",
        "dampening",
        "eps",
        "etas",
        "lambd",
        "lr_decay",
        "momentum",
        "momentum_decay",
        "rho",
        "step_sizes",
        "t0",
    }
)
"""Of torch's own optimizers, those by which they differ; a scheduler adds none of these to a group."""
_STRUCTURE_KEYS = frozenset({"_schedulers", "lr_lambdas"})
"""Of a scheduler that is made of others, or of functions."""
_LEGACY_KEYS = frozenset({"verbose"})
"""What schedulers of older releases of torch saved besides."""


def check_optimizer_kind(optimizer: Optimizer, saved: Mapping[str, Any], where: str, alternative: str) -> None:
    """Refuse the state of another kind of optimizer, or one that loading would round.

    What torch releases and schedulers add to a group, and settings without which a slot is not there (momentum,
    amsgrad), make no other kind; Adam and AdamW are one.

    Args:
        saved: its groups have been compared with the optimizer's.
        alternative: what else a caller may do.

    Raises:
        MismatchError: it is one.
    """
    optimizer = _unwrap(optimizer)
    found = {
        str(slot)
        for _, state in iter_slot_states(optimizer, saved)
        for slot, value in state.items()
        if isinstance(value, Tensor)
    }
    ours, theirs = _missing_hyperparameters(optimizer, saved)
    strange = sorted((found - _allowed_slots(optimizer, found)) | theirs)
    if strange or ours:
        parts = [f"the state of another kind of optimizer, with {', '.join(strange)}"] if strange else []
        parts += [f"no {', '.join(sorted(ours))}"] if ours else []
        do = f"build the optimizer that was saved, {alternative}"
        raise MismatchError(where, found="; ".join(parts), expected=_describe_optimizer(optimizer), do=do)
    if _is_torch_optimizer(optimizer):
        _check_slot_dtypes(optimizer, saved, where, alternative)


def check_scheduler_kind(scheduler: Any, saved: Any, where: str, alternative: str) -> None:
    """Refuse the state of another kind of scheduler, told by the names of its settings.

    Raises:
        MismatchError: it is one.
    """
    names = [
        {key for key in state if isinstance(key, str) and (not key.startswith("_") or key in _STRUCTURE_KEYS)}
        - _LEGACY_KEYS
        for state in (scheduler.state_dict(), saved if isinstance(saved, Mapping) else {})
    ]
    settings = names[0] & (_init_parameters(scheduler) | _STRUCTURE_KEYS)
    missing, extra = sorted(settings - names[1]), sorted(names[1] - names[0])
    if missing or extra or not isinstance(saved, Mapping):
        parts = [f"{', '.join(extra)}"] if extra else []
        parts += [f"no {', '.join(missing)}"] if missing else []
        do = f"build the scheduler that was saved, {alternative}"
        expected = (
            f"that of a {type(scheduler).__name__}, with {', '.join(sorted(settings or names[0])) or 'no settings'}"
        )
        found = f"the state of another kind of scheduler, with {' and '.join(parts) or 'nothing'}"
        raise MismatchError(where, found=found, expected=expected, do=do)


def check_scaler_is_enabled(scaler: Any, saved: Any, where: str) -> None:
    """Refuse what a scaler that is on cannot go on from.

    Raises:
        MismatchError: it was saved while it was off, or is none.
    """
    needed = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    if scaler.is_enabled() and (not isinstance(saved, Mapping) or not needed <= saved.keys()):
        found, do = "the state of one that was off", "leave it out, or turn it off"
        raise MismatchError(where, found=found, expected="that of a gradient scaler which is on", do=do)


def check_dtype_fits(saved: torch.dtype, dtype: torch.dtype, where: str, alternative: str) -> None:
    """Refuse values that loading would round or turn into others.

    Raises:
        MismatchError: not every value of the one dtype is one of the other.
    """
    if not can_represent(dtype, saved):
        do = f"build it in the dtype that was saved, {alternative}"
        raise MismatchError(where, found=f"{saved} in the checkpoint", expected=f"{dtype}", do=do)


def can_represent(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of a dtype is one of another; of those that torch does not compare only where they are one.

    >>> pairs = [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float32, torch.int32)]
    >>> tuple(can_represent(wide, narrow) for wide, narrow in pairs)
    (True, False, False)
    """
    if wide == narrow:
        return True
    kinds = [(one.is_complex, one.is_floating_point) for one in (wide, narrow)]
    try:
        return kinds[0] == kinds[1] and torch.promote_types(wide, narrow) == wide
    except (RuntimeError, TypeError):  # an 8-bit float, a quantized one
        return False


def has_parameter_shape(optimizer: Optimizer, parameter: Tensor, slot: str) -> bool:
    """Whether a slot is known to have the shape of its parameter; others keep projections under torch's names."""
    optimizer = _unwrap(optimizer)
    own = optimizer.state.get(parameter, {}).get(slot)
    return _is_torch_optimizer(optimizer) or (isinstance(own, Tensor) and own.shape == parameter.shape)


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """What a framework's wrapper stands for."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrap(inner) if isinstance(inner, Optimizer) and inner is not optimizer else optimizer


def _is_torch_optimizer(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in _SLOTS


def _allowed_slots(optimizer: Optimizer, saved_slots: set[str]) -> set[str] | frozenset[str]:
    """The slots that an optimizer may have; of one that is not torch's and has none yet, nobody knows."""
    if _is_torch_optimizer(optimizer):
        return _SLOTS[type(optimizer).__name__]
    ours = {str(slot) for state in optimizer.state.values() if isinstance(state, dict) for slot in state}
    return ours if ours - saved_slots else saved_slots


def _missing_hyperparameters(optimizer: Optimizer, saved: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Those of the optimizer that a saved group lacks, and those of a saved group that the optimizer lacks."""
    defaults = _defaults(optimizer)
    ours = {name for name, value in defaults.items() if _is_hyperparameter(value)}
    live = set(defaults).union(*optimizer.param_groups)
    groups = saved["param_groups"]
    lacking = {name for group in groups for name in ours - group.keys()}
    return lacking, {name for group in groups for name in (group.keys() & _HYPERPARAMETERS) - live}


def _defaults(optimizer: Optimizer) -> Mapping[str, Any]:
    """None for a class of somebody's that keeps none."""
    return getattr(optimizer, "defaults", None) or {}


def _is_hyperparameter(value: Any) -> bool:
    """Switches and what is None come and go with releases of torch."""
    return not isinstance(value, bool) and isinstance(value, int | float | tuple | Tensor)


def _describe_optimizer(optimizer: Optimizer) -> str:
    words = f"that of {type(optimizer).__module__}.{type(optimizer).__name__}"
    settings = sorted(name for name, value in _defaults(optimizer).items() if _is_hyperparameter(value))
    return f"{words}, with {', '.join(settings)}" if settings else words


def _check_slot_dtypes(optimizer: Optimizer, saved: Mapping[str, Any], where: str, alternative: str) -> None:
    """torch turns slots into the dtype of their parameter."""
    for index, (parameter, state) in enumerate(iter_slot_states(optimizer, saved)):
        for slot, value in state.items():
            if (
                isinstance(value, Tensor)
                and value.dim()
                and value.is_floating_point()
                and parameter.is_floating_point()
            ):
                check_dtype_fits(value.dtype, parameter.dtype, f"{where}, parameter {index}, {slot}", alternative)


def iter_slot_states(optimizer: Optimizer, saved: Mapping[str, Any]) -> Iterator[tuple[Tensor, Mapping[Any, Any]]]:
    """Every parameter, in the order of the groups, which are as large as those saved, with what was saved of it."""
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        state = saved["state"].get(key, {})
        yield parameter, state if isinstance(state, Mapping) else {}


def _init_parameters(obj: Any) -> frozenset[str]:
    """The names of what an object's class is made with."""
    makers = (vars(kind).get("__init__") for kind in type(obj).__mro__)
    codes = (maker.__code__ for maker in makers if isinstance(maker, FunctionType))
    return frozenset(name for code in codes for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


_PARAMETER_SHAPED_SLOTS = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "exp_inf",
    "square_avg",
    "grad_avg",
    "acc_delta",
)
_STRICT_HINT = "or pass strict=False"


def collect_state_dicts(obj: Any, name: str) -> Any:
    """The `state_dict` of an object, or of each in a dict, list or tuple of them.

    Raises:
        PolicyError: something has no `state_dict`.
    """
    if isinstance(obj, Mapping):
        return {key: collect_state_dicts(one, f"{name}[{key!r}]") for key, one in obj.items()}
    if isinstance(obj, list | tuple):
        return [collect_state_dicts(one, f"{name}[{index}]") for index, one in enumerate(obj)]
    if not callable(getattr(obj, "state_dict", None)):
        found, expected = f"a {type(obj).__name__}", "an object with state_dict() and load_state_dict()"
        raise PolicyError(name, found=found, expected=expected, do="pass plain values and tensors as extra=")
    return obj.state_dict()


def check_state_dicts(obj: Any, saved: Any, name: str, *, strict: bool, alternative: str = _STRICT_HINT) -> None:
    """Make sure that `saved` can be loaded into `obj`; changes nothing.

    Args:
        strict: every key of a model must be there, and no other; no value may be rounded; optimizers and schedulers
            must be of the kind that was saved.
        alternative: what a caller may do instead of building everything as it was saved.

    Raises:
        MismatchError: it does not fit.
        PolicyError: `obj` cannot load anything.
    """
    for one, state, where in _pair_with_saved(obj, saved, name):
        if not callable(getattr(one, "load_state_dict", None)):
            raise PolicyError(where, found=f"a {type(one).__name__}", expected="an object with load_state_dict()")
        if not isinstance(state, dict) and isinstance(one, torch.nn.Module | torch.optim.Optimizer):
            raise MismatchError(where, found=f"a {type(state).__name__} in the checkpoint", expected="a state_dict")
        if isinstance(one, torch.nn.Module):
            _check_module_state(one, state, where, strict=strict, alternative=alternative)
        elif isinstance(one, torch.optim.Optimizer):
            _check_optimizer_layout(one, state, where)
            if strict:
                state_dicts.check_optimizer_kind(one, state, where, alternative)
        elif isinstance(one, torch.optim.lr_scheduler.LRScheduler) and strict:
            state_dicts.check_scheduler_kind(one, state, where, alternative)
        elif isinstance(one, torch.amp.GradScaler):
            state_dicts.check_scaler_is_enabled(one, state, where)


def load_state_dicts(obj: Any, saved: Any, name: str, *, strict: bool) -> None:
    """Load what `check` approved of.

    Raises:
        MismatchError: the object itself refuses; it, and what was loaded before it, may have changed.
    """
    for one, state, where in _pair_with_saved(obj, saved, name):
        try:
            one.load_state_dict(state, **({"strict": strict} if isinstance(one, torch.nn.Module) else {}))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            found, expected = f"{type(error).__name__}: {error}", f"a state that this {type(one).__name__} loads"
            raise MismatchError(where, found=found, expected=expected, do="build it as it was saved") from error


def _pair_with_saved(obj: Any, saved: Any, name: str) -> Iterator[tuple[Any, Any, str]]:
    if not isinstance(obj, Mapping | list | tuple):
        yield obj, saved, name
        return
    ours = dict(obj) if isinstance(obj, Mapping) else dict(enumerate(obj))
    theirs = dict(enumerate(saved)) if isinstance(saved, list) else saved
    if not isinstance(theirs, dict) or ours.keys() != theirs.keys():
        found = f"{_preview(theirs)} in the checkpoint" if isinstance(theirs, dict) else f"a {type(saved).__name__}"
        raise MismatchError(name, found=found, expected=_preview(ours), do="pass what was passed to save")
    for key, one in ours.items():
        yield from _pair_with_saved(one, theirs[key], f"{name}[{key!r}]")


def _check_module_state(
    module: torch.nn.Module, saved: dict[str, Any], where: str, *, strict: bool, alternative: str
) -> None:
    ours = module.state_dict()
    for key, value in ours.items():
        other = saved.get(key)
        if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
            continue
        if other is not None:
            check_tensor_fits(value, other, f"{where}, {key}", strict=strict, alternative=alternative)
    missing = [key for key in ours if key not in saved]
    extra = [key for key in saved if key not in ours]
    if strict and (missing or extra):
        _raise_key_mismatch(where, missing, extra, saved)


def check_tensor_fits(
    tensor: torch.Tensor, saved: Any, where: str, *, strict: bool, alternative: str = _STRICT_HINT
) -> None:
    """Make sure that a tensor has the shape of the one that it is loaded into, which can hold its values.

    Raises:
        MismatchError: it has another, or is none; or, if `strict`, values would be rounded.
    """
    if not isinstance(saved, torch.Tensor) or saved.shape != tensor.shape:
        found = f"shape {list(getattr(saved, 'shape', ()))} in the checkpoint"
        do = "build the model with the settings of the saved run"
        raise MismatchError(where, found=found, expected=f"{list(tensor.shape)}", do=do)
    if strict:
        state_dicts.check_dtype_fits(saved.dtype, tensor.dtype, where, alternative)


def _raise_key_mismatch(where: str, missing: list[str], extra: list[str], saved: dict[str, Any]) -> None:
    found = "; ".join(
        f"{len(keys)} keys {what}, such as {keys[0]!r}"
        for keys, what in ((missing, "missing from the checkpoint"), (extra, "that the model lacks"))
        if keys
    )
    do = "build the model as it was saved, or pass strict=False"
    for prefix in ("module.", "_orig_mod."):
        if missing and extra and (prefix + missing[0] in saved or missing[0].removeprefix(prefix) in saved):
            do = f"wrap the model as it was when it was saved: the keys differ by the prefix {prefix!r}"
    raise MismatchError(where, found=found, expected="the same keys", do=do)


def _check_optimizer_layout(optimizer: torch.optim.Optimizer, saved: dict[str, Any], where: str) -> None:
    groups = saved.get("param_groups")
    sizes = [len(group["params"]) for group in groups] if isinstance(groups, list) else []
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != ours:
        do = "build the optimizer over the same parameters and groups as when it was saved"
        found = f"groups of {sizes} parameters in the checkpoint"
        raise MismatchError(where, found=found, expected=f"{ours}", do=do)
    if not isinstance(saved.get("state"), dict):
        raise MismatchError(where, found="no state in the checkpoint", expected="the state_dict of an optimizer")
    for index, (parameter, state) in enumerate(state_dicts.iter_slot_states(optimizer, saved)):
        for slot in _PARAMETER_SHAPED_SLOTS:
            value = state.get(slot)
            if not isinstance(value, torch.Tensor) or value.shape == parameter.shape:
                continue
            if state_dicts.has_parameter_shape(optimizer, parameter, slot):
                found, expected = f"shape {list(value.shape)} in the checkpoint", f"{list(parameter.shape)}"
                do = "pass the parameters in the order in which they were saved"
                raise MismatchError(f"{where}, parameter {index}, {slot}", found=found, expected=expected, do=do)


def _preview(keys: Mapping[Any, Any]) -> str:
    shown = [repr(key) for key in list(keys)[:6]]
    return ", ".join([*shown, "..."] if len(keys) > 6 else shown) or "nothing"


def as_floats(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics as floats, tensors on devices included.

    Raises:
        PolicyError: one of them is no number.
    """
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        found, expected = f"{metrics!r:.200}", "a number for each name"
        raise PolicyError("metrics", found=found, expected=expected, do="pass floats") from error


def mark_parameters(state: FlatState, objects: Mapping[str, Any]) -> FlatState:
    """The state, with that role for every parameter of a module that nothing else is known of.

    Args:
        objects: what was passed to be saved, by name: modules, nests of them, and other things.
    """
    names = {name for part, thing in objects.items() for name in _parameter_names(thing, f"{part}/")}
    unknown = {
        name: state.infos[name] for name in names if name in state.infos and state.infos[name].role is Role.OTHER
    }
    roles = {name: replace(info, role=Role.PARAMETER) for name, info in unknown.items()}
    return replace(state, infos={name: roles.get(name, info) for name, info in state.infos.items()}) if roles else state


def _parameter_names(obj: Any, prefix: str) -> Iterator[str]:
    """Their names in the state, where the module's `state_dict` is an ordinary one."""
    if isinstance(obj, nn.Module):
        yield from (prefix + name for name, _ in obj.named_parameters(remove_duplicate=False))
    elif isinstance(obj, Mapping):
        for key, one in obj.items():
            yield from _parameter_names(one, f"{prefix}{key}/")
    elif isinstance(obj, list | tuple):
        for index, one in enumerate(obj):
            yield from _parameter_names(one, f"{prefix}{index}/")
