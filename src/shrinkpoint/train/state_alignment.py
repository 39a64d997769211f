"""Aligns a saved state with the live objects that load it: by names of parameters, which are stored with the state.

The `state_dict` of an optimizer numbers parameters in the order of its groups. The numbers of another run may mean
other parameters: layers declared in another order, groups swapped, another layer trainable.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shrinkpoint.errors import MismatchError, warn_user
from shrinkpoint.tensors.names import StatePath
from shrinkpoint.tensors.wrappers import match_names, match_state_keys, unwrapped

_log = logging.getLogger("shrinkpoint")
NAMES_KEY = "parameter_names"  # Key of the names in a state, beside its objects
_OPTIMIZERS, _SCHEDULERS = "optimizers", "schedulers"
_GROUP_LISTS = ("lrs", "_lr", "_lambdas", "_momentums")
"""Ends of the names of lists in a scheduler that have a value for each group."""
_ORDERED_SLOTS = frozenset(("prev_flat_grad", "old_dirs"))
"""Entries that LBFGS keeps for all parameters together, in their order."""
_Keys: TypeAlias = list[list[Hashable]]
"""A key for each parameter of each group: equal for a saved parameter and the live one that it is of."""


@dataclass(frozen=True)
class Arrangement:
    """A saved state of an optimizer in the order of the live one."""

    state: Any  # the state, numbered as the live optimizer numbers its parameters
    groups: list[int | None]  # the saved group of each live one; None for a group that was not saved
    missing: tuple[Hashable, ...] = ()  # keys of live parameters that were not saved
    unexpected: tuple[Hashable, ...] = ()  # keys of saved parameters that the optimizer lacks


@dataclass(frozen=True)
class AlignedState:
    """A state whose optimizers and schedulers are in the order of the live ones."""

    state: Any
    # The dtype that was saved of each live parameter, by its `id`; of those that are known.
    saved_dtypes: Mapping[int, torch.dtype]
    # Keys of models that were not saved, and parameters of optimizers. Keys of `model` are as torch names them; others
    # follow the name of their object.
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()  # what was saved in addition
    unmatched: tuple[str, ...] = ()  # names of models of which no key was saved

    def report(self, where: str) -> None:
        """Log what is missing and unexpected; warn of a model that nothing was saved of."""
        for keys, what in (
            (self.missing_keys, "are not in the checkpoint and keep their values"),
            (self.unexpected_keys, "of the checkpoint are not restored"),
        ):
            if keys:
                _log.warning("%s: %d keys %s: %s", where, len(keys), what, _preview(keys))
        for name in self.unmatched:
            text = f"{where}, {name}: no key of the model is in the checkpoint, so that none of its weights is restored"
            warn_user(f"{text}: pass the model that was saved", UserWarning)


def is_optimizer(obj: Any) -> bool:
    """True if an object has the groups of an optimizer."""
    return isinstance(getattr(obj, "param_groups", None), list)


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a framework's wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrap_optimizer(inner) if isinstance(inner, Optimizer) and inner is not optimizer else optimizer


def iter_leaves(obj: Any, path: StatePath = ()) -> Iterator[tuple[StatePath, Any]]:
    """Every object of a nest of dicts, lists and tuples, with its path."""
    if isinstance(obj, Mapping | list | tuple):
        for key, member in obj.items() if isinstance(obj, Mapping) else enumerate(obj):
            yield from iter_leaves(member, (*path, key))
    else:
        yield path, obj


def collect_names(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Value under `NAMES_KEY`: names of the parameters of optimizers, and the optimizer of each scheduler.

    Args:
        objects: the objects that are saved, by the names of their states.

    Returns:
        Empty if no parameter of an optimizer has a name, as without its model.
    """
    names: dict[int, str] = {}
    for path, name, parameter in _iter_parameters(objects):
        names.setdefault(id(parameter), f"{label_of(path)}/{name}")
    leaves = list(iter_leaves(objects))
    optimizers = {
        label_of(path): [[names.get(id(parameter)) for parameter in group["params"]] for group in obj.param_groups]
        for path, obj in leaves
        if is_optimizer(obj)
    }
    if not any(name for groups in optimizers.values() for group in groups for name in group):
        return {}
    labels = {id(unwrap_optimizer(obj)): label_of(path) for path, obj in leaves if is_optimizer(obj)}
    schedulers = {label_of(path): labels.get(_optimizer_id(obj)) for path, obj in leaves if not is_optimizer(obj)}
    return {_OPTIMIZERS: optimizers, _SCHEDULERS: {label: name for label, name in schedulers.items() if name}}


def align_state(
    objects: Mapping[str, Any], state: Any, where: str, *, strict: bool, alternative: str = "or pass strict=False"
) -> AlignedState:
    """Put the states of optimizers, and of their schedulers, into the order of the live ones, by parameters' names.

    States without names keep their order. Where all of an optimizer's parameters have the names of another saved
    optimizer, that one's state is taken.

    Args:
        objects: the live objects, by the names of their states.
        strict: False: parameters that were not saved begin afresh, and others that were saved are left out.
        alternative: what a caller may do instead of building the optimizer as it was.

    Raises:
        MismatchError: names of an optimizer's parameters do not match, or its groups have other members.
    """
    live = {path: obj for path, obj in iter_leaves(objects) if is_optimizer(obj)}
    if not isinstance(state, Mapping):
        return AlignedState(state, {})
    record = state.get(NAMES_KEY)
    record = record if isinstance(record, Mapping) else {}
    keys = _match_keys(objects, live, state, record)
    sources = _pair_optimizers(keys)
    aligned: Any = dict(state)
    arrangements: dict[StatePath, Arrangement] = {}
    for path, (_, live_keys) in keys.items():
        saved, saved_keys = _value_at(state, sources[path]), keys[sources[path]][0]
        place = f"{where}, {label_of(path)}"
        arrangements[path] = arrange(
            saved, saved_keys, live[path], live_keys, place, strict=strict, alternative=alternative
        )
        aligned = _replace(aligned, path, arrangements[path].state)
    scheduler_states = _align_schedulers(objects, state, live, sources, arrangements, record.get(_SCHEDULERS))
    for path, scheduler_state in scheduler_states:
        aligned = _replace(aligned, path, scheduler_state)
    return _compare_modules(objects, aligned, arrangements)


def _compare_modules(
    objects: Mapping[str, Any], state: Any, arrangements: Mapping[StatePath, Arrangement]
) -> AlignedState:
    """The state with the dtypes that were saved, and all keys that only one side has."""
    dtypes: dict[int, torch.dtype] = {}
    missing, unexpected, unmatched = list[str](), list[str](), list[str]()
    for path, obj in iter_leaves(objects):
        saved = _value_at(state, path)
        if not isinstance(obj, nn.Module) or not isinstance(saved, Mapping):
            continue
        live, prefix = obj.state_dict(), "" if path == ("model",) else f"{label_of(path)}/"
        saved = match_state_keys(saved, live)
        missing += [f"{prefix}{key}" for key in live if key not in saved]
        unexpected += [f"{prefix}{key}" for key in saved if key not in live]
        if live and not live.keys() & saved.keys():
            unmatched.append(label_of(path))
        for name, parameter in obj.named_parameters(remove_duplicate=False):
            if isinstance(value := saved.get(name), Tensor):
                dtypes[id(parameter)] = value.dtype
    missing += [name for name in objects if name not in state]
    for path, found in arrangements.items():
        missing += [f"{label_of(path)}/{key}" for key in found.missing]
        unexpected += [f"{label_of(path)}/{key}" for key in found.unexpected]
    return AlignedState(state, dtypes, tuple(missing), tuple(unexpected), tuple(unmatched))


def arrange(
    saved: Any, saved_keys: _Keys, optimizer: Any, live_keys: _Keys, where: str, *, strict: bool, alternative: str
) -> Arrangement:
    """The state of one optimizer in the order of the live one.

    Args:
        saved_keys, live_keys: of the saved parameters, and of the optimizer's.

    Raises:
        MismatchError: keys do not match, or groups have other members.
    """
    positions = {key: (number, index) for number, group in enumerate(saved_keys) for index, key in enumerate(group)}
    live = dict.fromkeys(key for group in live_keys for key in group)
    missing = tuple(key for key in live if key not in positions)
    unexpected = tuple(key for key in positions if key not in live)
    if strict and (missing or unexpected):
        raise _names_error(missing, unexpected, where, alternative)
    groups = _match_groups(saved_keys, live_keys, where, strict=strict)
    if saved_keys == live_keys:
        return Arrangement(saved, groups)
    old_ids = [group["params"] for group in saved["param_groups"]]
    slots = saved["state"] if isinstance(saved.get("state"), Mapping) else {}
    if any(_ORDERED_SLOTS & slot.keys() for slot in slots.values() if isinstance(slot, Mapping)):
        found, expected = "parameters in another order", "the order in which they were saved"
        do = "build the model as it was saved: this optimizer keeps one history of all parameters"
        raise MismatchError(where, found=found, expected=expected, do=do)
    known = {old for group in old_ids for old in group}
    state = {old: slot for old, slot in slots.items() if old not in known}
    new_groups, number = [], 0
    for live_group, live_group_keys, source in zip(optimizer.param_groups, live_keys, groups, strict=True):
        settings = live_group if source is None else saved["param_groups"][source]
        new_groups.append({**settings, "params": list(range(number, number + len(live_group_keys)))})
        for key in live_group_keys:
            group, index = positions.get(key, (-1, -1))
            if group >= 0 and old_ids[group][index] in slots:
                state[number] = slots[old_ids[group][index]]
            number += 1
    return Arrangement({**saved, "state": state, "param_groups": new_groups}, groups, missing, unexpected)


def _match_groups(saved_keys: _Keys, live_keys: _Keys, where: str, *, strict: bool) -> list[int | None]:
    """The saved group of each live one: the one with the same members, or all that were saved."""
    numbers = {key: number for number, group in enumerate(saved_keys) for key in group}
    empty = [number for number, group in enumerate(saved_keys) if not group]
    matches: list[int | None] = []
    for keys in live_keys:
        found = {numbers[key] for key in keys if key in numbers}
        source = next(iter(found), None) if keys or not empty else empty.pop(0)
        is_same = source is None or set(saved_keys[source]) == set(keys)
        if len(found) > 1 or (strict and not (is_same and source is not None)):
            sizes = [[len(group) for group in groups] for groups in (saved_keys, live_keys)]
            text, do = f"groups of {sizes[0]} parameters in the checkpoint", "build the groups with the same members"
            raise MismatchError(where, found=text, expected=f"the same members as in {sizes[1]}", do=do)
        matches.append(source)
    return matches


def _names_error(
    missing: Sequence[Hashable], unexpected: Sequence[Hashable], where: str, alternative: str
) -> MismatchError:
    parts = [
        f"{what} {_preview(keys)}" for what, keys in (("nothing of", missing), ("the state of", unexpected)) if keys
    ]
    expected = "the parameters that the optimizer has"
    do = f"build the optimizer over the parameters that were saved, {alternative}"
    return MismatchError(where, found=" and ".join(parts) + " in the checkpoint", expected=expected, do=do)


def _preview(keys: Sequence[Hashable]) -> str:
    names = [repr(key) for key in keys if isinstance(key, str)]
    shown = names[:3] if len(names) > 4 else names
    counts = ((len(names) - len(shown), "more"), (len(keys) - len(names), "parameters without a name"))
    return ", ".join([*shown, *(f"{count} {what}" for count, what in counts if count)])


# Keys: the same for a saved parameter and its live one


def _match_keys(
    objects: Mapping[str, Any], live: Mapping[StatePath, Any], state: Mapping[str, Any], record: Mapping[str, Any]
) -> dict[StatePath, tuple[_Keys, _Keys]]:
    """Keys of the saved and of the live parameters of every optimizer whose saved parameters have names."""
    recorded = record.get(_OPTIMIZERS)
    saved: dict[StatePath, list[list[Any]]] = {}
    for path in live:
        names: Any = recorded.get(label_of(path)) if isinstance(recorded, Mapping) else None
        if _are_names(names, _value_at(state, path)):
            saved[path] = names
    owners = _live_names(objects, {name for groups in saved.values() for group in groups for name in group if name})
    keys: dict[StatePath, tuple[_Keys, _Keys]] = {}
    for path, optimizer in live.items():
        groups = saved.get(path)
        live_names = [[owners.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
        if groups is not None and any(name for group in live_names for name in group):
            labels = {label_of(target) for target, obj in iter_leaves(objects) if isinstance(obj, nn.Module)}
            known = [
                [name if name and name.rpartition("/")[0] in labels else None for name in group] for group in groups
            ]
            keys[path] = (_with_numbers(known), _with_numbers(live_names))
        elif (own := _own_names(_value_at(state, path), optimizer)) is not None:
            keys[path] = own
    return keys


def _live_names(objects: Mapping[str, Any], saved: set[str]) -> dict[int, str]:
    """The name of every live parameter, as it was saved if it was; of tied names, the one that was saved."""
    by_label: dict[str, dict[str, Any]] = {}
    for path, name, parameter in _iter_parameters(objects):
        by_label.setdefault(label_of(path), {})[name] = parameter
    names: dict[int, str] = {}
    saved_labels = {name.rpartition("/")[0] for name in saved}
    for label, parameters in by_label.items():
        if label not in saved_labels:
            continue
        relative = [name.rpartition("/")[2] for name in saved if name.rpartition("/")[0] == label]
        matches = match_names(relative, parameters)
        for name in sorted(parameters, key=lambda name: name not in matches):  # saved names first
            names.setdefault(id(parameters[name]), f"{label}/{matches.get(name, name)}")
    return names


def _own_names(saved: Any, optimizer: Any) -> tuple[_Keys, _Keys] | None:
    """Keys of what optimizers over `named_parameters()` name themselves; None unless both sides do."""
    sides: list[list[list[Any]]] = []
    for side in (saved, {"param_groups": optimizer.param_groups}):
        groups = side.get("param_groups") if isinstance(side, Mapping) else None
        names: list[Any] = [group.get("param_names") for group in groups or () if isinstance(group, Mapping)]
        if not names or not _are_names(names, side):
            return None
        sides.append(names)
    flat = [[name for group in side for name in group] for side in sides]
    if any(len(set(names)) < len(names) or None in names for names in flat):
        return None
    matches = match_names(*flat)
    return sides[0], [[matches.get(name, name) for name in group] for group in sides[1]]


def _with_numbers(names: Sequence[Sequence[str | None]]) -> _Keys:
    """The names, and a number for each parameter that has none."""
    number = 0
    keys: _Keys = []
    for group in names:
        keys.append([name or (number := number + 1) for name in group])
    return keys


def _pair_optimizers(keys: Mapping[StatePath, tuple[_Keys, _Keys]]) -> dict[StatePath, StatePath]:
    """The path of the saved optimizer that each live one is: of equal members its own, else another one's."""
    saved = {path: {key for group in groups for key in group} for path, (groups, _) in keys.items()}
    live = {path: {key for group in groups for key in group} for path, (_, groups) in keys.items()}
    free = [path for path in saved if saved[path] != live[path]]
    sources = {path: path for path in live}
    for path in list(free):
        source = next((source for source in free if saved[source] == live[path]), path)
        sources[path] = source
        free = [other for other in free if other != source]
    return sources


# Schedulers


def _align_schedulers(
    objects: Mapping[str, Any],
    state: Mapping[str, Any],
    live: Mapping[StatePath, Any],
    sources: Mapping[StatePath, StatePath],
    arrangements: Mapping[StatePath, Arrangement],
    recorded: Any,
) -> Iterator[tuple[StatePath, Any]]:
    """The states of the schedulers whose optimizers, or the groups of these, have another place."""
    paths = {id(unwrap_optimizer(optimizer)): path for path, optimizer in live.items() if path in arrangements}
    schedulers = {path: obj for path, obj in iter_leaves(objects) if _optimizer_id(obj) in paths and path not in live}
    saved = recorded if isinstance(recorded, Mapping) else {}
    for path, scheduler in schedulers.items():
        optimizer_path = paths[_optimizer_id(scheduler)]
        label = label_of(sources[optimizer_path])
        candidates = [path, *schedulers]
        source = next((other for other in candidates if saved.get(label_of(other)) == label), path)
        groups = arrangements[optimizer_path].groups
        scheduler_state = _value_at(state, source)
        if groups != list(range(len(groups))) and isinstance(scheduler_state, Mapping):
            num_saved = len(_value_at(state, sources[optimizer_path])["param_groups"])
            scheduler_state = _permute(scheduler_state, scheduler.state_dict(), groups, num_saved)
        if scheduler_state is not None and _value_at(state, path) is not None:
            yield path, scheduler_state


def _permute(saved: Mapping[str, Any], live: Mapping[str, Any], groups: Sequence[int | None], num_saved: int) -> Any:
    """The state of a scheduler with the values of each group, such as `base_lrs`, where the group is now."""
    permuted = dict(saved)
    for key, values in saved.items():
        current = live.get(key) if isinstance(live, Mapping) else None
        if key == "_schedulers" and isinstance(values, list) and isinstance(current, list):
            pairs = zip(values, current, strict=False)
            permuted[key] = [
                _permute(one, other, groups, num_saved) for one, other in pairs if isinstance(one, Mapping)
            ]
        elif isinstance(values, list) and len(values) == num_saved and str(key).endswith(_GROUP_LISTS):
            old = current if isinstance(current, list) and len(current) == len(groups) else [None] * len(groups)
            permuted[key] = [old[at] if source is None else values[source] for at, source in enumerate(groups)]
    return permuted


def _optimizer_id(obj: Any) -> int:
    """The id of the optimizer that a scheduler, perhaps in a framework's wrapper, is of; 0 for another object."""
    inner = getattr(obj, "scheduler", obj)
    optimizer = getattr(inner, "optimizer", None)
    return 0 if optimizer is None or isinstance(obj, nn.Module) else id(unwrap_optimizer(optimizer))


# Nests


def _iter_parameters(objects: Mapping[str, Any]) -> Iterator[tuple[StatePath, str, Any]]:
    """Path of the module, name and value of every parameter; a tied one under each of its names.

    One that `torch.nn.utils.prune` has renamed has its own name: checkpoints of `ModelPruning` have that.
    """
    for path, obj in iter_leaves(objects):
        if isinstance(obj, nn.Module):
            buffers = dict(unwrapped(obj).named_buffers())
            for name, parameter in unwrapped(obj).named_parameters(remove_duplicate=False):
                own_name = name.removesuffix("_orig")
                yield path, own_name if f"{own_name}_mask" in buffers else name, parameter


def label_of(path: StatePath) -> str:
    """Label of an object at a path of a nest, in names and messages."""
    return "/".join(map(str, path))


def _value_at(state: Any, path: StatePath) -> Any:
    for key in path:
        if isinstance(state, Mapping):
            state = state.get(key)
        else:
            state = state[key] if isinstance(state, list | tuple) and key in range(len(state)) else None
    return state


def _replace(state: Any, path: StatePath, value: Any) -> Any:
    """The nest with another value at a path; what it does not change is shared."""
    if not path:
        return value
    copy = dict(state) if isinstance(state, Mapping) else list(state)
    copy[path[0]] = _replace(copy[path[0]], path[1:], value)
    return copy


def _are_names(names: Any, saved: Any) -> bool:
    """True if these are names, or None, of all parameters in the saved state of an optimizer."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or not isinstance(names, list) or len(groups) != len(names):
        return False
    pairs = [
        (own, group.get("params") if isinstance(group, Mapping) else None)
        for own, group in zip(names, groups, strict=True)
    ]
    return all(
        isinstance(own, list)
        and isinstance(ids, list)
        and len(own) == len(ids)
        and all(name is None or isinstance(name, str) for name in own)
        for own, ids in pairs
    )
