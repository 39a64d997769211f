"""What optimizers keep for each parameter: whether a state holds any of it, and its removal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.roles import is_master_key
from shrinkpoint.tensors.tree import is_optimizer_state


def has_optimizer_state(tree: JSON) -> bool:
    """Whether the tree of a state has an optimizer that keeps something for a parameter."""
    if isinstance(tree, dict):
        if is_optimizer_state(tree) and tree["state"]:
            return True
        return any(map(has_optimizer_state, tree.values()))
    return isinstance(tree, list) and any(map(has_optimizer_state, tree))


def without_optimizer_state(state: Any) -> FlatState:
    """Flatten a state without what its optimizers keep for each parameter.

    Moments, counts of steps and whatever else is under "state" of an optimizer's `state_dict` go; weights in full
    precision, under a key such as "master_param", stay, and so do its `param_groups` and all outside of it.

    Args:
        state: dicts in it are changed.
    """
    roles = {name: info.role for name, info in flatten(state).infos.items()}  # moments tell parameters from others
    _remove(state)
    flat = flatten(state)
    infos = {name: replace(info, role=roles.get(name, info.role)) for name, info in flat.infos.items()}
    return replace(flat, infos=infos)


def _remove(value: Any) -> None:
    if isinstance(value, dict):
        if is_optimizer_state(value):
            masters = {key: _master_weights(slot) for key, slot in value["state"].items()}
            value["state"] = {key: slot for key, slot in masters.items() if slot}
        for member in value.values():
            _remove(member)
    elif isinstance(value, list | tuple):
        for member in value:
            _remove(member)


def _master_weights(slot: Any) -> dict[Any, Any]:
    """What an optimizer keeps for one parameter under keys of weights in full precision."""
    items = slot.items() if isinstance(slot, dict) else ()
    return {key: value for key, value in items if isinstance(key, str) and is_master_key(key)}
