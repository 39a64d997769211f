"""Collects the items of a rank's save plan as one flat state, and infers what each shard is for from its qualified
name.

Nothing but the size of the file depends on the inferred roles."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from shrinkpoint.errors import StateError
from shrinkpoint.tensors.dtypes import DTYPE_NAMES, dtype_name
from shrinkpoint.tensors.flat_state import FlatState, OptimizerInfo
from shrinkpoint.tensors.info import Role, TensorInfo
from shrinkpoint.tensors.names import StatePath, tensor_name
from shrinkpoint.tensors.roles import infer_roles
from shrinkpoint.tensors.shared_storage import Leaf, UniqueNames
from shrinkpoint.tensors.tree_encode import TreeEncoder
from shrinkpoint.train.dcp.checkpoint_metadata import Offsets, chunk_name, offsets_key
from shrinkpoint.train.dcp.objects import unpickle_plain

_FLAT_NAME = re.compile(r"(?:(?P<head>.+)\.)?(?P<kind>state|param_groups)\.(?P<name>.+)\.(?P<slot>[^.]+)")


def infer_shard_roles(
    tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]], planner: SavePlanner
) -> tuple[dict[str, Role], dict[str, OptimizerInfo]]:
    """Roles by stored name, and the optimizer's facts by stored name of a parameter.

    Args:
        tensors: by fully qualified name, the stored name and the values of each of its boxes on this rank.
        planner: of this save; one that keeps no paths and no state dict is asked for less.
    """
    paths = getattr(planner, "mappings", None)
    paths = paths if isinstance(paths, Mapping) else {}
    places = {fqn: nest_path(fqn, paths) for fqn in tensors}
    leaves = [Leaf(places[fqn], boxes[0][1], name=boxes[0][0]) for fqn, boxes in tensors.items()]
    roles, facts = infer_roles(leaves, _collect_optimizers(places, tensors, planner, paths))
    for boxes in tensors.values():  # several boxes of one tensor on one rank are rare; moments stay with the first
        for name, _ in boxes[1:]:
            roles[name] = roles.get(boxes[0][0], Role.OTHER)
    return roles, facts


def nest_path(fqn: str, paths: Mapping[str, Any]) -> StatePath:
    """Where an entry stands in the nest, with the slots of an optimizer as levels of their own."""
    path = tuple(paths.get(fqn, (fqn,)))
    match = _FLAT_NAME.fullmatch(str(path[-1])) if path else None
    if match is None:
        return path
    head = (match["head"],) if match["head"] else ()
    return (*path[:-1], *head, match["kind"], match["name"], match["slot"])


class _OptimizerState:
    """The `state_dict` of one optimizer, as far as this rank knows it."""

    def __init__(self) -> None:
        self.state: dict[str, dict[str, Any]] = {}
        self.groups: dict[int, dict[str, Any]] = {}  # as the optimizer has them
        self.parameter_settings: dict[
            str, dict[str, Any]
        ] = {}  # one for each parameter, as `get_state_dict` flattens them

    def state_dict(self) -> dict[str, Any]:
        groups = [self.groups[index] for index in sorted(self.groups)]
        listed = [{**group, "params": [str(key) for key in group.get("params", ())]} for group in groups]
        if not any(group["params"] for group in listed):
            settings = listed[0] if len(listed) == 1 else {}
            listed = [{**settings, **self.parameter_settings.get(name, {}), "params": [name]} for name in self.state]
        return {"state": self.state, "param_groups": listed}


def _collect_optimizers(
    nest_paths: Mapping[str, StatePath],
    tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]],
    planner: SavePlanner,
    paths: Mapping[str, Any],
) -> list[tuple[StatePath, dict[Any, Any]]]:
    found: dict[StatePath, _OptimizerState] = {}
    for fqn, place in nest_paths.items():
        if len(place) >= 3 and place[-3] == "state":
            slots = found.setdefault(place[:-3], _OptimizerState()).state.setdefault(str(place[-2]), {})
            slots[str(place[-1])] = tensors[fqn][0][1]
    known = getattr(planner, "state_dict", None)
    for fqn, value in known.items() if isinstance(known, Mapping) else ():
        _add_hyperparameter(found, nest_path(fqn, paths), value)
    return [(path, one.state_dict()) for path, one in found.items()]


def _add_hyperparameter(optimizers: Mapping[StatePath, _OptimizerState], path: StatePath, value: Any) -> None:
    """Note a hyperparameter, or how far an optimizer has come with a parameter, whichever rank it is that stores it."""
    if len(path) < 3 or (isinstance(value, torch.Tensor) and (value.numel() != 1 or type(value) is not torch.Tensor)):
        return
    head, kind, key, slot = path[:-3], path[-3], path[-2], str(path[-1])
    one = optimizers.get(head)
    if one is None:
        return
    if kind == "state" and str(key) in one.state:
        one.state[str(key)].setdefault(slot, value)
    elif kind == "param_groups" and isinstance(key, int):
        one.groups.setdefault(key, {})[slot] = value
    elif kind == "param_groups":
        one.parameter_settings.setdefault(str(key), {})[slot] = value


@dataclass(frozen=True)
class ShardInfo:
    """Which part of which tensor a stored one is."""

    fqn: str
    size: Offsets
    offsets: Offsets


@dataclass(frozen=True)
class CollectedState:
    """What this rank writes.

    Attributes:
        state: a tensor for each box, named after its entry and where it begins; objects are in the tree.
        shards: by stored name; without the tensors inside of objects.
        item_nbytes: every item, with its bytes.
    """

    state: FlatState
    shards: Mapping[str, ShardInfo] = field(repr=False)
    item_nbytes: Mapping[MetadataIndex, int] = field(repr=False)

    @property
    def is_on_cpu(self) -> bool:
        return all(x.device.type == "cpu" for x in self.state.tensors.values())


def collect_plan_items(plan: SavePlan, planner: SavePlanner) -> CollectedState:
    """Everything that the plan says is this rank's, in the caller's memory, on whatever device that is.

    Raises:
        StateError: something cannot be stored; `where` names its entry.
    """
    nest: dict[str, Any] = {}
    boxes: dict[str, ShardInfo] = {}
    tensors: dict[str, list[tuple[str, torch.Tensor]]] = {}
    written: dict[MetadataIndex, int] = {}
    for item in plan.items:
        fqn, data = item.index.fqn, planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            written[item.index] = _add_object(nest, fqn, data)
            continue
        box, name, x = _shard_info(item, data)
        if name == tensor_name((fqn,)):
            nest[fqn] = x
        else:
            nest.setdefault(fqn, {})[offsets_key(box.offsets)] = x
        boxes[name] = box
        tensors.setdefault(fqn, []).append((name, x))
        written[item.index] = x.numel() * x.element_size()
    return CollectedState(_flat_state(nest, boxes, tensors, planner), boxes, written)


def plan_signatures(plan: SavePlan) -> set[tuple[str, Offsets, str]]:
    """Name, shape and dtype of every whole tensor of which the plan has a box; "" for a dtype that is not stored."""
    found = ((item.index.fqn, item.tensor_data) for item in plan.items)
    return {(fqn, tuple(x.size), DTYPE_NAMES.get(x.properties.dtype, "")) for fqn, x in found if x is not None}


def _add_object(nest: dict[str, Any], fqn: str, data: Any) -> int:
    if not isinstance(data, io.BytesIO):
        found = f"a {type(data).__name__} where the planner promised bytes"
        raise StateError(f"state[{fqn!r}]", found=found, expected="a BytesIO", do="look at the planner")
    nest[fqn] = unpickle_plain(data, fqn)
    return data.getbuffer().nbytes


def _shard_info(item: WriteItem, data: Any) -> tuple[ShardInfo, str, torch.Tensor]:
    fqn, about = item.index.fqn, item.tensor_data
    if not isinstance(data, torch.Tensor) or about is None or data.shape != about.chunk.sizes:
        shape = tuple(data.shape) if isinstance(data, torch.Tensor) else type(data).__name__
        expected = None if about is None else tuple(about.chunk.sizes)
        raise StateError(f"state[{fqn!r}]", found=f"{shape}", expected=f"the planned shape {expected}")
    box = ShardInfo(fqn, tuple(about.size), tuple(about.chunk.offsets))
    return box, chunk_name(fqn, box.offsets, about.chunk.sizes, box.size), data.detach()


def _flat_state(
    nest: dict[str, Any],
    shards: Mapping[str, ShardInfo],
    tensors: Mapping[str, list[tuple[str, torch.Tensor]]],
    planner: SavePlanner,
) -> FlatState:
    """Every box is a tensor of its own, whatever shares memory: its name must not depend on others."""
    planter = TreeEncoder()
    tree = planter.encode(nest)
    names, stored = UniqueNames(), dict[str, torch.Tensor]()
    for leaf in planter.leaves:
        leaf.name = names.unique(wanted := tensor_name(leaf.path))
        leaf.reference[:] = [] if leaf.name == wanted else [leaf.name]
        stored[leaf.name] = leaf.tensor
    roles, optim = infer_shard_roles(tensors, planner)
    infos = {name: _tensor_info(name, x, shards.get(name), roles.get(name, Role.OTHER)) for name, x in stored.items()}
    return FlatState(tree, stored, infos, optim)


def _tensor_info(name: str, tensor: torch.Tensor, shard: ShardInfo | None, role: Role) -> TensorInfo:
    whole = shard is None or shard.size == tuple(tensor.shape)
    return TensorInfo(
        name, tuple(tensor.shape), dtype_name(tensor.dtype), role, None if whole or shard is None else shard.offsets
    )
