"""What each shard is for, from its fully qualified name, and which moments belong to which parameter.

A state dict comes flat: `optim.state.layers.0.weight.exp_avg`. The planner knows the nest it came from; what
`get_state_dict` flattened before is taken apart here. Nothing but the size of the file depends on any of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner

from shrinkpoint.record import Role
from shrinkpoint.state import AdamFacts
from shrinkpoint.state.path import Path
from shrinkpoint.state.roles import infer
from shrinkpoint.state.ties import Leaf

_FLAT = re.compile(r"(?:(?P<head>.+)\.)?(?P<kind>state|param_groups)\.(?P<name>.+)\.(?P<slot>[^.]+)")


def roles_of(
    tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]], planner: SavePlanner
) -> tuple[dict[str, Role], dict[str, AdamFacts]]:
    """Roles by stored name, and the optimizer's facts by stored name of a parameter.

    Args:
        tensors: by fully qualified name, the stored name and the values of each of its boxes on this rank.
        planner: of this save; one that keeps no paths and no state dict is asked for less.
    """
    paths = getattr(planner, "mappings", None)
    paths = paths if isinstance(paths, Mapping) else {}
    places = {fqn: place_of(fqn, paths) for fqn in tensors}
    leaves = [Leaf(places[fqn], boxes[0][1], name=boxes[0][0]) for fqn, boxes in tensors.items()]
    roles, facts = infer(leaves, _optimizers(places, tensors, planner, paths))
    for boxes in tensors.values():  # several boxes of one tensor on one rank are rare; moments stay with the first
        for name, _ in boxes[1:]:
            roles[name] = roles.get(boxes[0][0], Role.OTHER)
    return roles, facts


def place_of(fqn: str, paths: Mapping[str, Any]) -> Path:
    """Where an entry stands in the nest, with the slots of an optimizer as levels of their own."""
    path = tuple(paths.get(fqn, (fqn,)))
    match = _FLAT.fullmatch(str(path[-1])) if path else None
    if match is None:
        return path
    head = (match["head"],) if match["head"] else ()
    return (*path[:-1], *head, match["kind"], match["name"], match["slot"])


class _Optimizer:
    """The `state_dict` of one optimizer, as far as this rank knows it."""

    def __init__(self) -> None:
        self.state: dict[str, dict[str, Any]] = {}
        self.groups: dict[int, dict[str, Any]] = {}  # as the optimizer has them
        self.own: dict[str, dict[str, Any]] = {}  # one for each parameter, as `get_state_dict` flattens them

    def state_dict(self) -> dict[str, Any]:
        groups = [self.groups[index] for index in sorted(self.groups)]
        listed = [{**group, "params": [str(key) for key in group.get("params", ())]} for group in groups]
        if not any(group["params"] for group in listed):
            settings = listed[0] if len(listed) == 1 else {}
            listed = [{**settings, **self.own.get(name, {}), "params": [name]} for name in self.state]
        return {"state": self.state, "param_groups": listed}


def _optimizers(
    places: Mapping[str, Path],
    tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]],
    planner: SavePlanner,
    paths: Mapping[str, Any],
) -> list[tuple[Path, dict[Any, Any]]]:
    found: dict[Path, _Optimizer] = {}
    for fqn, place in places.items():
        if len(place) >= 3 and place[-3] == "state":
            slots = found.setdefault(place[:-3], _Optimizer()).state.setdefault(str(place[-2]), {})
            slots[str(place[-1])] = tensors[fqn][0][1]
    known = getattr(planner, "state_dict", None)
    for fqn, value in known.items() if isinstance(known, Mapping) else ():
        _settings(found, place_of(fqn, paths), value)
    return [(path, one.state_dict()) for path, one in found.items()]


def _settings(found: Mapping[Path, _Optimizer], place: Path, value: Any) -> None:
    """Note a hyperparameter, or how far an optimizer has come with a parameter, whichever rank it is that stores it."""
    if len(place) < 3 or (isinstance(value, torch.Tensor) and (value.numel() != 1 or type(value) is not torch.Tensor)):
        return
    head, kind, key, slot = place[:-3], place[-3], place[-2], str(place[-1])
    one = found.get(head)
    if one is None:
        return
    if kind == "state" and str(key) in one.state:
        one.state[str(key)].setdefault(slot, value)
    elif kind == "param_groups" and isinstance(key, int):
        one.groups.setdefault(key, {})[slot] = value
    elif kind == "param_groups":
        one.own.setdefault(str(key), {})[slot] = value
