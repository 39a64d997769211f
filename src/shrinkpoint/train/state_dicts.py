"""The state dicts of a training loop: collected for a save, checked against the objects that load them, and loaded.

Also marks which tensors of a state are parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, PolicyError, error_text
from shrinkpoint.tensors.compare import same_bits
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import Role
from shrinkpoint.tensors.optimizers import HYPERPARAMETERS, PARAMETER_SHAPED, TORCH_SLOTS
from shrinkpoint.tensors.wrappers import match_state_keys
from shrinkpoint.train.state_alignment import align_state, is_optimizer, iter_leaves, unwrap_optimizer

NO_DTYPES: Mapping[int, torch.dtype] = MappingProxyType({})
STRICT_HINT = "or pass strict=False"
_STRUCTURE_KEYS = frozenset({"_schedulers", "lr_lambdas"})
"""Keys of schedulers that are composed of other schedulers or of functions."""
_LEGACY_KEYS = frozenset({"verbose"})  # Keys that schedulers of older releases of torch saved in addition


# Saving: state dicts, roles


def check_storable(objects: Mapping[str, Any]) -> None:
    """Say when training starts, and not at its first save, that the state of an object cannot be stored.

    Raises:
        StateError: it holds something that no file can hold.
    """
    flatten({name: obj.state_dict() for name, obj in objects.items()})


def collect_state_dicts(obj: Any, name: str, do: str = "pass plain values and tensors as extra=") -> Any:
    """The `state_dict` of an object, or of each object in a dict, list or tuple.

    Raises:
        PolicyError: an object has no `state_dict`.
    """
    if isinstance(obj, Mapping):
        return {key: collect_state_dicts(member, f"{name}[{key!r}]", do) for key, member in obj.items()}
    if isinstance(obj, list | tuple):
        return [collect_state_dicts(member, f"{name}[{index}]", do) for index, member in enumerate(obj)]
    if isinstance(obj, type) or not callable(getattr(obj, "state_dict", None)):
        found = f"the class {obj.__name__}" if isinstance(obj, type) else validate.type_name(obj)
        do = f"pass the module or optimizer itself, not its state_dict(), or {do}" if isinstance(obj, Tensor) else do
        raise PolicyError(name, found=found, expected="an object with state_dict() and load_state_dict()", do=do)
    return obj.state_dict()


def mark_parameters(state: FlatState, objects: Mapping[str, Any]) -> FlatState:
    """The state with the role "parameter" for every parameter of a module whose role is not known otherwise.

    Args:
        objects: the objects that are saved, by name: modules, nests of them, and others.
    """
    names = {
        "/".join(map(str, (*path, name)))  # the names in the state, if `state_dict` has the default ones
        for path, obj in iter_leaves(objects)
        if isinstance(obj, nn.Module)
        for name, _ in obj.named_parameters(remove_duplicate=False)
    }
    unknown = {
        name: state.infos[name] for name in names if name in state.infos and state.infos[name].role is Role.OTHER
    }
    marked = {name: replace(info, role=Role.PARAMETER) for name, info in unknown.items()}
    return (
        replace(state, infos={name: marked.get(name, info) for name, info in state.infos.items()}) if marked else state
    )


# Restoring: check that everything fits, then load it


def has_optimizer(obj: Any) -> bool:
    """True if an object is an optimizer, or a dict, list or tuple with one in it."""
    return any(is_optimizer(leaf) for _, leaf in iter_leaves(obj))


def check_state_dicts(
    obj: Any,
    saved: Any,
    name: str,
    *,
    strict: bool,
    alternative: str = STRICT_HINT,
    saved_dtypes: Mapping[int, torch.dtype] = NO_DTYPES,
) -> None:
    """Raise if `saved` cannot be loaded into `obj`; changes nothing.

    Args:
        obj: an object with `load_state_dict`, or a nest of such.
        saved: what `collect_state_dicts` returned for it.
        strict: every key of a model must be there, and no other; no value may be rounded; optimizers and schedulers
            must be of the kind that was saved.
        alternative: what a caller may do instead of building everything as it was saved.
        saved_dtypes: of `AlignedState`.

    Raises:
        MismatchError: it does not fit.
        PolicyError: `obj` cannot load anything.
    """
    for target, state, where in _pair_with_saved(obj, saved, name):
        if not callable(getattr(target, "load_state_dict", None)):
            found, do = validate.type_name(target), "pass the model, optimizer or scheduler itself"
            raise PolicyError(where, found=found, expected="an object with load_state_dict()", do=do)
        if not isinstance(state, dict) and isinstance(target, nn.Module | Optimizer):
            do = "pass the objects under the names under which they were saved"
            found = f"{validate.type_name(state)} in the checkpoint"
            raise MismatchError(where, found=found, expected="a state_dict", do=do)
        if isinstance(target, nn.Module):
            _check_module_state(target, state, where, strict=strict, alternative=alternative)
        elif isinstance(target, Optimizer):
            _check_optimizer_layout(target, state, where)
            if strict:
                check_optimizer_kind(target, state, where, alternative)
                # A slot that gets the dtype of its parameter must not be rounded
                for index, (parameter, slots) in enumerate(iter_slot_states(target, state)):
                    for slot, value in slots.items():
                        is_cast = isinstance(value, Tensor) and parameter.is_floating_point()
                        if is_cast and _follows_parameter(value, parameter, target, saved_dtypes):
                            _check_dtype_fits(
                                value.dtype, parameter.dtype, f"{where}, parameter {index}, {slot}", alternative
                            )
        elif isinstance(target, torch.optim.lr_scheduler.LRScheduler) and strict:
            check_scheduler_kind(target, state, where, alternative)
        elif isinstance(target, torch.amp.GradScaler):
            _check_scaler_is_enabled(target, state, where)


def is_checked(obj: Any) -> bool:
    """True if `check_state_dicts` can tell what an object, or each object of a nest, will load."""
    if isinstance(obj, Mapping | list | tuple):
        return all(map(is_checked, obj.values() if isinstance(obj, Mapping) else obj))
    return isinstance(obj, nn.Module | Optimizer | torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler)


def load_state_dicts(
    obj: Any, saved: Any, name: str, *, strict: bool, saved_dtypes: Mapping[int, torch.dtype] = NO_DTYPES
) -> None:
    """Load what `check_state_dicts` has accepted, with the same arguments.

    Raises:
        MismatchError: an object itself refuses its state; it, and what was loaded before it, may have changed.
    """
    for target, state, where in _pair_with_saved(obj, saved, name):
        try:
            if isinstance(target, Optimizer):
                _load_optimizer(target, state, saved_dtypes)
            else:
                target.load_state_dict(state, **({"strict": strict} if isinstance(target, nn.Module) else {}))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            found, expected = error_text(error), f"a state that this {type(target).__name__} loads"
            raise MismatchError(where, found=found, expected=expected, do="build it as it was saved") from error


def load_aligned(
    objects: Mapping[str, Any], state: Mapping[str, Any], where: str, *, model: Any, alternative: str
) -> None:
    """Align a state with objects by the names of a model's parameters, check that it fits, and load it.

    Args:
        objects: an optimizer, its scheduler and others, by the names of their states; they are as they were saved.
        state: their states, and their names.
        model: their model, which is not loaded.
        alternative: what a caller may do instead of building everything as it was saved.

    Raises:
        MismatchError: the state does not fit.
    """
    aligned = align_state({"model": model, **objects}, state, where, strict=True, alternative=alternative)
    options: dict[str, Any] = {"strict": True, "saved_dtypes": aligned.saved_dtypes}
    for name, obj in objects.items():
        check_state_dicts(obj, aligned.state[name], f"{where}, {name}", alternative=alternative, **options)
    for name, obj in objects.items():
        load_state_dicts(obj, aligned.state[name], f"{where}, {name}", **options)


def _pair_with_saved(obj: Any, saved: Any, name: str) -> Iterator[tuple[Any, Any, str]]:
    """Each object of a nest, its saved state, and its name in messages.

    The keys of a model are named as the live one's are, and the parameters of an optimizer too.
    """
    if not isinstance(obj, Mapping | list | tuple):
        if isinstance(obj, nn.Module) and isinstance(saved, Mapping):
            saved = match_state_keys(saved, obj.state_dict())
        elif is_optimizer(obj) and isinstance(saved, Mapping):
            saved = _with_own_names(obj, saved)
        yield obj, saved, name
        return
    members = dict(obj) if isinstance(obj, Mapping) else dict(enumerate(obj))
    states = dict(enumerate(saved)) if isinstance(saved, list) else saved
    if not isinstance(states, dict) or members.keys() != states.keys():
        found = f"{_preview(states)} in the checkpoint" if isinstance(states, dict) else validate.type_name(saved)
        raise MismatchError(name, found=found, expected=_preview(members), do="pass the same objects as to save")
    for key, member in members.items():
        yield from _pair_with_saved(member, states[key], f"{name}[{key!r}]")


def _preview(keys: Mapping[Any, Any]) -> str:
    shown = [repr(key) for key in list(keys)[:6]]
    return ", ".join([*shown, "..."] if len(keys) > 6 else shown) or "nothing"


# Modules


def _check_module_state(
    module: nn.Module, saved: dict[str, Any], where: str, *, strict: bool, alternative: str
) -> None:
    live = module.state_dict()
    for key, value in live.items():
        saved_value = saved.get(key)
        if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
            continue
        if value.is_meta:
            found, expected = "a tensor on the meta device, which holds no values", "one on a device with memory"
            do = 'give it memory first: model.to_empty(device="cpu")'
            raise MismatchError(f"{where}, {key}", found=found, expected=expected, do=do)
        if value.layout is torch.strided and any(
            size > 1 and not step for size, step in zip(value.shape, value.stride(), strict=True)
        ):
            found, expected = "a tensor whose elements share memory, as expand() makes it", "memory for each element"
            raise MismatchError(f"{where}, {key}", found=found, expected=expected, do="give it memory: tensor.clone()")
        if saved_value is not None:
            check_tensor_fits(value, saved_value, f"{where}, {key}", strict=strict, alternative=alternative)
    missing = [key for key in live if key not in saved]
    extra = [key for key in saved if key not in live]
    if strict and (missing or extra):
        found = "; ".join(
            f"{len(keys)} keys {what}, such as {keys[0]!r}"
            for keys, what in ((missing, "missing from the checkpoint"), (extra, "that the model lacks"))
            if keys
        )
        do = "build the model as it was saved, or pass strict=False"
        raise MismatchError(where, found=found, expected="the same keys", do=do)
    if strict:
        _check_tied_tensors(live, saved, where)


def _check_tied_tensors(live: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Raise if names that share one tensor in the model were saved with different values: one of them would be lost."""
    first_names: dict[tuple[Any, ...], str] = {}
    for name, tensor in live.items():
        if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel() or not isinstance(saved.get(name), Tensor):
            continue
        first = first_names.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
        if first == name:
            continue
        addresses = {saved[key].data_ptr() for key in (first, name)}
        is_partial = tensor.data_ptr() in addresses  # one of them is the live value, which a partial restore keeps
        if len(addresses) > 1 and not is_partial and not same_bits(saved[first], saved[name]):
            found, expected = f"another value than {first} has", f"the same, as the model ties {name} to {first}"
            do = "build the model untied, as it was saved, or pass strict=False to keep the last of them"
            raise MismatchError(f"{where}, {name}", found=found, expected=expected, do=do)


def check_tensor_fits(tensor: Tensor, saved: Any, where: str, *, strict: bool, alternative: str = STRICT_HINT) -> None:
    """Raise if a saved value cannot be loaded into a tensor.

    Raises:
        MismatchError: it is not a tensor of this shape; or, if `strict`, values would be rounded to the dtype.
    """
    if not isinstance(saved, Tensor) or saved.shape != tensor.shape:
        found = f"shape {list(getattr(saved, 'shape', ()))} in the checkpoint"
        do = "build the model with the settings of the saved run"
        raise MismatchError(where, found=found, expected=f"{list(tensor.shape)}", do=do)
    if strict:
        _check_dtype_fits(saved.dtype, tensor.dtype, where, alternative)


def _check_dtype_fits(saved: torch.dtype, dtype: torch.dtype, where: str, alternative: str) -> None:
    """Raise if loading would round values, or change their kind."""
    if not can_represent(dtype, saved):
        do = f"build it in the dtype that was saved, {alternative}"
        raise MismatchError(where, found=f"{saved} in the checkpoint", expected=f"{dtype}", do=do)


def can_represent(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """True if every value of `narrow` is a value of `wide`; of dtypes that torch does not compare, only if they match.

    >>> can_represent(torch.float32, torch.bfloat16), can_represent(torch.float16, torch.bfloat16)
    (True, False)
    >>> can_represent(torch.float32, torch.int32)
    False
    """
    if wide == narrow:
        return True
    if (wide.is_complex, wide.is_floating_point) != (narrow.is_complex, narrow.is_floating_point):
        return False
    try:
        return torch.promote_types(wide, narrow) == wide
    except (RuntimeError, TypeError):  # an 8-bit float, a quantized dtype
        return False


# Optimizers


def _with_own_names(optimizer: Any, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved state, whose groups have the live `param_names`, or none: torch takes those that were saved."""
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return saved
    names = [group.get("param_names") for group in optimizer.param_groups]
    names += [None] * (len(groups) - len(names))
    plain = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    own = [group if own is None else {**group, "param_names": own} for group, own in zip(plain, names, strict=False)]
    return {**saved, "param_groups": own}


def iter_slot_states(optimizer: Optimizer, saved: Mapping[str, Any]) -> Iterator[tuple[Tensor, Mapping[Any, Any]]]:
    """Every parameter of an optimizer, in the order of its groups, with the slots that were saved for it.

    Args:
        saved: its groups must be as large as the optimizer's.
    """
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        slots = saved["state"].get(key, {})
        yield parameter, slots if isinstance(slots, Mapping) else {}


def _check_optimizer_layout(optimizer: Optimizer, saved: dict[str, Any], where: str) -> None:
    """Raise if the groups, or slots that have the shape of their parameter, are not as the optimizer's."""
    groups = saved.get("param_groups")
    saved_sizes = [len(group["params"]) for group in groups] if isinstance(groups, list) else []
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes != sizes:
        do = "build the optimizer over the same parameters and groups as when it was saved"
        found = f"groups of {saved_sizes} parameters in the checkpoint"
        raise MismatchError(where, found=found, expected=f"{sizes}", do=do)
    if not isinstance(saved.get("state"), dict):
        do = "leave the optimizer out, so that it starts anew"
        raise MismatchError(where, found="no state in the checkpoint", expected="the state_dict of an optimizer", do=do)
    for index, (parameter, slots) in enumerate(iter_slot_states(optimizer, saved)):
        for slot in PARAMETER_SHAPED:
            value = slots.get(slot)
            if not isinstance(value, Tensor) or value.shape == parameter.shape:
                continue
            # Optimizers other than torch's may keep projections there
            inner = unwrap_optimizer(optimizer)
            live = inner.state.get(parameter, {}).get(slot)
            if _is_torch_optimizer(inner) or (isinstance(live, Tensor) and live.shape == parameter.shape):
                found, expected = f"shape {list(value.shape)} in the checkpoint", f"{list(parameter.shape)}"
                do = "pass the parameters in the order in which they were saved"
                raise MismatchError(f"{where}, parameter {index}, {slot}", found=found, expected=expected, do=do)


def check_optimizer_kind(optimizer: Optimizer, saved: Mapping[str, Any], where: str, alternative: str) -> None:
    """Raise for the state of another kind of optimizer, and for one that loading would round."""
    optimizer = unwrap_optimizer(optimizer)
    saved_slots = {
        str(slot)
        for _, slots in iter_slot_states(optimizer, saved)
        for slot, value in slots.items()
        if isinstance(value, Tensor)
    }
    # Of one kind are optimizers that keep the same slots, as Adam and AdamW do. What releases of torch and schedulers
    # add to a group does not matter, nor do settings without which a slot is not there (momentum, amsgrad).
    defaults: Mapping[str, Any] = getattr(optimizer, "defaults", None) or {}
    settings = {  # defaults that are numbers: switches and None differ between releases of torch
        name
        for name, value in defaults.items()
        if not isinstance(value, bool) and isinstance(value, int | float | tuple | Tensor)
    }
    accepted = set(defaults).union(*optimizer.param_groups)
    not_saved = {name for group in saved["param_groups"] for name in settings - group.keys()}
    not_ours = {name for group in saved["param_groups"] for name in (group.keys() & HYPERPARAMETERS) - accepted}
    unknown = sorted((saved_slots - _allowed_slots(optimizer, saved_slots)) | not_ours)
    if unknown or not_saved:
        parts = [f"the state of another kind of optimizer, with {', '.join(unknown)}"] if unknown else []
        parts += [f"no {', '.join(sorted(not_saved))}"] if not_saved else []
        do = f"build the optimizer that was saved, {alternative}"
        expected = f"that of {type(optimizer).__module__}.{type(optimizer).__name__}"
        expected += f", with {', '.join(sorted(settings))}" if settings else ""
        raise MismatchError(where, found="; ".join(parts), expected=expected, do=do)


def _follows_parameter(
    value: Tensor, parameter: Tensor, optimizer: Optimizer, saved_dtypes: Mapping[int, torch.dtype]
) -> bool:
    """True if a tensor of a slot gets the dtype of the live parameter: it had that of the saved one.

    Without the saved parameter's dtype, torch's own optimizers are taken at their habit.
    """
    if not value.dim() or not value.is_floating_point():
        return False
    saved_dtype = saved_dtypes.get(id(parameter))
    return _is_torch_optimizer(unwrap_optimizer(optimizer)) if saved_dtype is None else value.dtype == saved_dtype


def restore_slots(
    optimizer: Any, slots: Iterable[tuple[Tensor, Any]], saved_dtypes: Mapping[int, torch.dtype] = NO_DTYPES
) -> None:
    """Replace what torch has cast in the slots of an optimizer by the values that were saved.

    Slots with the shape of their parameter get its strides, which no file has: so optimizers make them.

    Args:
        slots: parameters, each with what was saved for it.
        saved_dtypes: of `AlignedState`.
    """
    inner = unwrap_optimizer(optimizer)
    for parameter, saved in slots:
        live = inner.state.get(parameter)
        if isinstance(live, dict):
            follows = partial(_follows_parameter, parameter=parameter, optimizer=inner, saved_dtypes=saved_dtypes)
            _as_saved(live, saved, follows)
            live.update({name: strided_as(parameter, value) for name, value in live.items()})


def stride_slots(optimizer: Any) -> None:
    """Give slots with the shape of their parameter its strides, as `restore_slots` does, where others have loaded."""
    for parameter, live in unwrap_optimizer(optimizer).state.items():
        if isinstance(live, dict):
            live.update({name: strided_as(parameter, value) for name, value in live.items()})


def strided_as(parameter: Any, value: Any) -> Any:
    """A slot of an optimizer with the strides of its parameter, if it has the shape; others as they are."""
    if not isinstance(value, Tensor) or not isinstance(parameter, Tensor):
        return value
    is_plain = type(value) is Tensor and type(parameter) in (Tensor, nn.Parameter) and value.shape == parameter.shape
    if not is_plain or value.layout != torch.strided or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _load_optimizer(optimizer: Any, saved: Mapping[str, Any], saved_dtypes: Mapping[int, torch.dtype]) -> None:
    """Load the state of an optimizer, whose slots keep the dtypes that they were saved in.

    torch casts all slots but "step" to the dtype of their parameter. What an optimizer does after torch's part, in
    hooks or in a method of its own, sees the values as they were saved.
    """
    inner = unwrap_optimizer(optimizer)
    calls: list[None] = []

    def after_load(*_: Any) -> None:
        calls.append(None)
        restore_slots(inner, iter_slot_states(inner, saved), saved_dtypes)

    handle = None
    if hasattr(inner, "_optimizer_load_state_dict_post_hooks"):
        handle = inner.register_load_state_dict_post_hook(after_load, prepend=True)
    try:
        optimizer.load_state_dict(saved)
    finally:
        if handle is not None:
            handle.remove()
    if not calls:  # a method of its own that does not call torch's
        after_load()


def _as_saved(live: Any, saved: Any, follows: Callable[[Tensor], bool]) -> Any:
    """The live value, in which tensors of another dtype than the saved ones are replaced by these, on their devices.

    So are texts and bounded deques, which torch makes anew of their items: "fp8" becomes "<generator object ...>".
    """
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        is_cast = live.dtype != saved.dtype and live.shape == saved.shape and not follows(saved)
        return saved.to(live.device) if is_cast else live
    if isinstance(live, str) and isinstance(saved, str):
        return saved if live.startswith("<generator object ") else live
    if isinstance(live, deque) and isinstance(saved, deque):
        return deque(live, saved.maxlen)
    if isinstance(live, dict) and isinstance(saved, Mapping):
        live.update({key: _as_saved(live[key], saved[key], follows) for key in live.keys() & saved.keys()})
    elif isinstance(live, list | tuple) and isinstance(saved, list | tuple) and len(live) == len(saved):
        members = [_as_saved(*pair, follows) for pair in zip(live, saved, strict=True)]
        if isinstance(live, list):
            live[:] = members
        else:
            return live._make(members) if hasattr(live, "_make") else type(live)(members)
    return live


def _allowed_slots(optimizer: Optimizer, saved_slots: set[str]) -> set[str] | frozenset[str]:
    """The slots that an optimizer may have; any, if it is not torch's and has none yet."""
    if _is_torch_optimizer(optimizer):
        return TORCH_SLOTS[type(optimizer).__name__]
    states = [state for key, state in optimizer.state.items() if isinstance(key, Tensor) and isinstance(state, dict)]
    slots = {str(slot) for state in states for slot, value in state.items() if isinstance(value, Tensor)}
    return slots if slots - saved_slots else saved_slots


def _is_torch_optimizer(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in TORCH_SLOTS


# Schedulers and gradient scalers


def check_scheduler_kind(scheduler: Any, saved: Any, where: str, alternative: str) -> None:
    """Raise for the state of another kind of scheduler, recognized by the names of its settings."""
    live_names, saved_names = (
        {key for key in state if isinstance(key, str) and (not key.startswith("_") or key in _STRUCTURE_KEYS)}
        - _LEGACY_KEYS
        for state in (scheduler.state_dict(), saved if isinstance(saved, Mapping) else {})
    )
    constructors = (vars(kind).get("__init__") for kind in type(scheduler).__mro__)
    codes = (function.__code__ for function in constructors if isinstance(function, FunctionType))
    init_names = {name for code in codes for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    settings = live_names & (init_names | _STRUCTURE_KEYS)
    missing, extra = sorted(settings - saved_names), sorted(saved_names - live_names)
    if missing or extra or not isinstance(saved, Mapping):
        parts = [f"{', '.join(extra)}"] if extra else []
        parts += [f"no {', '.join(missing)}"] if missing else []
        names = ", ".join(sorted(settings or live_names)) or "no settings"
        expected = f"that of {validate.type_name(scheduler)}, with {names}"
        found = f"the state of another kind of scheduler, with {' and '.join(parts) or 'nothing'}"
        do = f"build the scheduler that was saved, {alternative}"
        raise MismatchError(where, found=found, expected=expected, do=do)


def _check_scaler_is_enabled(scaler: Any, saved: Any, where: str) -> None:
    required = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    if scaler.is_enabled() and (not isinstance(saved, Mapping) or not required <= saved.keys()):
        found, do = "the state of one that was off", "leave it out, or turn it off"
        raise MismatchError(where, found=found, expected="that of a gradient scaler that is on", do=do)
