"""What a name does not tell, a module does: which tensors of a state are parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from shrinkpoint.record import Role
from shrinkpoint.state import FlatState


def with_parameters(flat: FlatState, parts: Mapping[str, Any]) -> FlatState:
    """The state, with that role for every parameter of a module that nothing else is known of.

    Args:
        parts: what was passed to be saved, by name: modules, nests of them, and other things.
    """
    names = {name for part, thing in parts.items() for name in _parameters(thing, f"{part}/")}
    unknown = {name: flat.infos[name] for name in names if name in flat.infos and flat.infos[name].role is Role.OTHER}
    roles = {name: replace(info, role=Role.PARAMETER) for name, info in unknown.items()}
    return replace(flat, infos={name: roles.get(name, info) for name, info in flat.infos.items()}) if roles else flat


def _parameters(thing: Any, prefix: str) -> Iterator[str]:
    """Their names in the state, where the module's `state_dict` is an ordinary one."""
    if isinstance(thing, nn.Module):
        yield from (prefix + name for name, _ in thing.named_parameters(remove_duplicate=False))
    elif isinstance(thing, Mapping):
        for key, one in thing.items():
            yield from _parameters(one, f"{prefix}{key}/")
    elif isinstance(thing, list | tuple):
        for index, one in enumerate(thing):
            yield from _parameters(one, f"{prefix}{index}/")
