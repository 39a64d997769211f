"""Models, optimizers and whatever else has a `state_dict`: collected for a save, checked and loaded for a restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.train import kinds

_LIKE_THE_PARAMETER = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "grad_avg", "acc_delta",
)  # fmt: skip
_LENIENT = "or pass strict=False"


def collect(thing: Any, name: str) -> Any:
    """The `state_dict` of an object, or of each in a dict, list or tuple of them.

    Raises:
        PolicyError: something has no `state_dict`.
    """
    if isinstance(thing, Mapping):
        return {key: collect(one, f"{name}[{key!r}]") for key, one in thing.items()}
    if isinstance(thing, list | tuple):
        return [collect(one, f"{name}[{index}]") for index, one in enumerate(thing)]
    if not callable(getattr(thing, "state_dict", None)):
        found, expected = f"a {type(thing).__name__}", "an object with state_dict() and load_state_dict()"
        raise PolicyError(name, found=found, expected=expected, do="pass plain values and tensors as extra=")
    return thing.state_dict()


def check(thing: Any, saved: Any, name: str, *, strict: bool, way: str = _LENIENT) -> None:
    """Make sure that `saved` can be loaded into `thing`; changes nothing.

    Args:
        strict: every key of a model must be there, and no other; no value may be rounded; optimizers and schedulers
            must be of the kind that was saved.
        way: what a caller may do instead of building everything as it was saved.

    Raises:
        MismatchError: it does not fit.
        PolicyError: `thing` cannot load anything.
    """
    for one, state, where in _pairs(thing, saved, name):
        if not callable(getattr(one, "load_state_dict", None)):
            raise PolicyError(where, found=f"a {type(one).__name__}", expected="an object with load_state_dict()")
        if not isinstance(state, dict) and isinstance(one, torch.nn.Module | torch.optim.Optimizer):
            raise MismatchError(where, found=f"a {type(state).__name__} in the checkpoint", expected="a state_dict")
        if isinstance(one, torch.nn.Module):
            _check_module(one, state, where, strict=strict, way=way)
        elif isinstance(one, torch.optim.Optimizer):
            _check_optimizer(one, state, where)
            if strict:
                kinds.check_optimizer(one, state, where, way)
        elif isinstance(one, torch.optim.lr_scheduler.LRScheduler) and strict:
            kinds.check_scheduler(one, state, where, way)
        elif isinstance(one, torch.amp.GradScaler):
            kinds.check_scaler(one, state, where)


def load(thing: Any, saved: Any, name: str, *, strict: bool) -> None:
    """Load what `check` approved of.

    Raises:
        MismatchError: the object itself refuses; it, and what was loaded before it, may have changed.
    """
    for one, state, where in _pairs(thing, saved, name):
        try:
            one.load_state_dict(state, **({"strict": strict} if isinstance(one, torch.nn.Module) else {}))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            found, expected = f"{type(error).__name__}: {error}", f"a state that this {type(one).__name__} loads"
            raise MismatchError(where, found=found, expected=expected, do="build it as it was saved") from error


def _pairs(thing: Any, saved: Any, name: str) -> Iterator[tuple[Any, Any, str]]:
    if not isinstance(thing, Mapping | list | tuple):
        yield thing, saved, name
        return
    ours = dict(thing) if isinstance(thing, Mapping) else dict(enumerate(thing))
    theirs = dict(enumerate(saved)) if isinstance(saved, list) else saved
    if not isinstance(theirs, dict) or ours.keys() != theirs.keys():
        found = f"{_some(theirs)} in the checkpoint" if isinstance(theirs, dict) else f"a {type(saved).__name__}"
        raise MismatchError(name, found=found, expected=_some(ours), do="pass what was passed to save")
    for key, one in ours.items():
        yield from _pairs(one, theirs[key], f"{name}[{key!r}]")


def _check_module(module: torch.nn.Module, saved: dict[str, Any], where: str, *, strict: bool, way: str) -> None:
    ours = module.state_dict()
    for key, value in ours.items():
        other = saved.get(key)
        if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
            continue
        if other is not None:
            check_tensor(value, other, f"{where}, {key}", strict=strict, way=way)
    missing = [key for key in ours if key not in saved]
    extra = [key for key in saved if key not in ours]
    if strict and (missing or extra):
        _refuse_keys(where, missing, extra, saved)


def check_tensor(ours: torch.Tensor, saved: Any, where: str, *, strict: bool, way: str = _LENIENT) -> None:
    """Make sure that a tensor has the shape of the one that it is loaded into, which can hold its values.

    Raises:
        MismatchError: it has another, or is none; or, if `strict`, values would be rounded.
    """
    if not isinstance(saved, torch.Tensor) or saved.shape != ours.shape:
        found = f"shape {list(getattr(saved, 'shape', ()))} in the checkpoint"
        do = "build the model with the settings of the saved run"
        raise MismatchError(where, found=found, expected=f"{list(ours.shape)}", do=do)
    if strict:
        kinds.check_dtype(saved.dtype, ours.dtype, where, way)


def _refuse_keys(where: str, missing: list[str], extra: list[str], saved: dict[str, Any]) -> None:
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


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], where: str) -> None:
    groups = saved.get("param_groups")
    sizes = [len(group["params"]) for group in groups] if isinstance(groups, list) else []
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != ours:
        do = "build the optimizer over the same parameters and groups as when it was saved"
        found = f"groups of {sizes} parameters in the checkpoint"
        raise MismatchError(where, found=found, expected=f"{ours}", do=do)
    if not isinstance(saved.get("state"), dict):
        raise MismatchError(where, found="no state in the checkpoint", expected="the state_dict of an optimizer")
    for index, (parameter, state) in enumerate(kinds.states(optimizer, saved)):
        for slot in _LIKE_THE_PARAMETER:
            value = state.get(slot)
            if not isinstance(value, torch.Tensor) or value.shape == parameter.shape:
                continue
            if kinds.is_like_the_parameter(optimizer, parameter, slot):
                found, expected = f"shape {list(value.shape)} in the checkpoint", f"{list(parameter.shape)}"
                do = "pass the parameters in the order in which they were saved"
                raise MismatchError(f"{where}, parameter {index}, {slot}", found=found, expected=expected, do=do)


def _some(keys: Mapping[Any, Any]) -> str:
    shown = [repr(key) for key in list(keys)[:6]]
    return ", ".join([*shown, "..."] if len(keys) > 6 else shown) or "nothing"
