"""Collects the items of a rank's save plan as one flat state, and infers the role of each shard from its name.

The inferred roles affect only the size of the file.
"""

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
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import OptimizerInfo, Role, TensorInfo
from shrinkpoint.tensors.names import StatePath, tensor_name
from shrinkpoint.tensors.roles import infer_roles
from shrinkpoint.tensors.shared_storage import Leaf, UniqueNames
from shrinkpoint.tensors.tree import TreeEncoder
from shrinkpoint.train.dcp.checkpoint_metadata import Offsets, chunk_name, offsets_key
from shrinkpoint.train.dcp.objects import unpickle_plain

_FLAT_NAME = re.compile(r"(?:(?P<head>.+)\.)?(?P<kind>state|param_groups)\.(?P<name>.+)\.(?P<slot>[^.]+)")


@dataclass(frozen=True)
class ShardInfo:
    """The global tensor of a shard, and where in it the shard lies.

    Attributes:
        fqn: fully qualified name of the global tensor.
        size: shape of the global tensor.
        offsets: of the shard's first value, one for each axis.
    """

    fqn: str
    size: Offsets
    offsets: Offsets


@dataclass(frozen=True)
class CollectedState:
    """What this rank writes.

    Attributes:
        state: a tensor for each shard, named after its entry and its offsets; objects are in the tree.
        shards: by name in the state; without the tensors inside of objects.
        item_nbytes: the size of every item in bytes.
    """

    state: FlatState
    shards: Mapping[str, ShardInfo] = field(repr=False)
    item_nbytes: Mapping[MetadataIndex, int] = field(repr=False)


def collect_plan_items(plan: SavePlan, planner: SavePlanner) -> CollectedState:
    """All that the plan assigns to this rank, in the caller's memory, on whatever device that is.

    Raises:
        StateError: something cannot be stored; `where` names its entry.
    """
    nest: dict[str, Any] = {}
    shards: dict[str, ShardInfo] = {}
    tensors: dict[str, list[tuple[str, torch.Tensor]]] = {}
    item_nbytes: dict[MetadataIndex, int] = {}
    for item in plan.items:
        fqn, data = item.index.fqn, planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            item_nbytes[item.index] = _add_object(nest, fqn, data)
            continue
        shard, name, tensor = _shard_info(item, data)
        if name == tensor_name((fqn,)):
            nest[fqn] = tensor
        else:
            nest.setdefault(fqn, {})[offsets_key(shard.offsets)] = tensor
        shards[name] = shard
        tensors.setdefault(fqn, []).append((name, tensor))
        item_nbytes[item.index] = tensor.numel() * tensor.element_size()
    return CollectedState(_flat_state(nest, shards, tensors, planner), shards, item_nbytes)


def plan_signatures(plan: SavePlan) -> set[tuple[str, Offsets, str]]:
    """Name, shape and dtype of every global tensor with a shard in the plan; "" for a dtype that is not stored."""
    return {
        (item.index.fqn, tuple(item.tensor_data.size), DTYPE_NAMES.get(item.tensor_data.properties.dtype, ""))
        for item in plan.items
        if item.tensor_data is not None
    }


def _add_object(nest: dict[str, Any], fqn: str, data: Any) -> int:
    """Add an object to the nest; its size in bytes."""
    if not isinstance(data, io.BytesIO):
        found = f"a {type(data).__name__} where the planner promised bytes"
        raise StateError(f"state[{fqn!r}]", found=found, expected="a BytesIO", do="look at the planner")
    nest[fqn] = unpickle_plain(data, fqn)
    return data.getbuffer().nbytes


def _shard_info(item: WriteItem, data: Any) -> tuple[ShardInfo, str, torch.Tensor]:
    """A shard, its name in the state, and its tensor."""
    fqn, planned = item.index.fqn, item.tensor_data
    if not isinstance(data, torch.Tensor) or planned is None or data.shape != planned.chunk.sizes:
        shape = tuple(data.shape) if isinstance(data, torch.Tensor) else type(data).__name__
        expected = None if planned is None else tuple(planned.chunk.sizes)
        raise StateError(f"state[{fqn!r}]", found=f"{shape}", expected=f"the planned shape {expected}")
    shard = ShardInfo(fqn, tuple(planned.size), tuple(planned.chunk.offsets))
    return shard, chunk_name(fqn, shard.offsets, planned.chunk.sizes, shard.size), data.detach()


def _flat_state(
    nest: dict[str, Any],
    shards: Mapping[str, ShardInfo],
    tensors: Mapping[str, list[tuple[str, torch.Tensor]]],
    planner: SavePlanner,
) -> FlatState:
    """The nest as a flat state. Tensors that share memory are stored separately: no name may depend on others."""
    encoder = TreeEncoder()
    tree = encoder.encode(nest)
    names, stored = UniqueNames(), dict[str, torch.Tensor]()
    for leaf in encoder.leaves:
        default = tensor_name(leaf.path)
        leaf.name = names.unique(default)
        leaf.reference[:] = [] if leaf.name == default else [leaf.name]
        stored[leaf.name] = leaf.tensor
    roles, optimizer_info = infer_shard_roles(tensors, planner)
    infos = {
        name: _tensor_info(name, tensor, shards.get(name), roles.get(name, Role.OTHER))
        for name, tensor in stored.items()
    }
    return FlatState(tree, stored, infos, optimizer_info)


def _tensor_info(name: str, tensor: torch.Tensor, shard: ShardInfo | None, role: Role) -> TensorInfo:
    shape = tuple(tensor.shape)
    offsets = None if shard is None or shard.size == shape else shard.offsets
    return TensorInfo(name, shape, dtype_name(tensor.dtype), role, offsets)


def infer_shard_roles(
    tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]], planner: SavePlanner
) -> tuple[dict[str, Role], dict[str, OptimizerInfo]]:
    """The role of each shard, and what the optimizer knows about each parameter, both by name in the state.

    Args:
        tensors: by fully qualified name, the name in the state and the values of each of its shards on this rank.
        planner: the planner of this save; less is inferred if it keeps no paths or no state dict.
    """
    mappings = getattr(planner, "mappings", None)
    mappings = mappings if isinstance(mappings, Mapping) else {}
    paths = {fqn: nest_path(fqn, mappings) for fqn in tensors}
    leaves = [Leaf(paths[fqn], shards[0][1], name=shards[0][0]) for fqn, shards in tensors.items()]
    roles, optimizer_info = infer_roles(leaves, _collect_optimizers(paths, tensors, planner, mappings))
    for shards in tensors.values():  # several shards of one tensor on one rank are rare; moments go with the first
        for name, _ in shards[1:]:
            roles[name] = roles.get(shards[0][0], Role.OTHER)
    return roles, optimizer_info


def nest_path(fqn: str, mappings: Mapping[str, Any]) -> StatePath:
    """The path of an entry in the nest, with the slots of an optimizer as levels of their own.

    Args:
        mappings: the planner's paths by fully qualified name.
    """
    path = tuple(mappings.get(fqn, (fqn,)))
    match = _FLAT_NAME.fullmatch(str(path[-1])) if path else None
    if match is None:
        return path
    head = (match["head"],) if match["head"] else ()
    return (*path[:-1], *head, match["kind"], match["name"], match["slot"])


class _OptimizerState:
    """The `state_dict` of one optimizer, as far as this rank knows it.

    Attributes:
        state: slots by parameter and name.
        groups: settings by index of the group, as the optimizer has them.
        parameter_settings: settings by parameter, as `get_state_dict` flattens them.
    """

    def __init__(self) -> None:
        self.state: dict[str, dict[str, Any]] = {}
        self.groups: dict[int, dict[str, Any]] = {}
        self.parameter_settings: dict[str, dict[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        groups = [self.groups[index] for index in sorted(self.groups)]
        named = [{**group, "params": [str(key) for key in group.get("params", ())]} for group in groups]
        if not any(group["params"] for group in named):
            settings = named[0] if len(named) == 1 else {}
            named = [{**settings, **self.parameter_settings.get(name, {}), "params": [name]} for name in self.state]
        return {"state": self.state, "param_groups": named}


def _collect_optimizers(
    paths: Mapping[str, StatePath],
    tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]],
    planner: SavePlanner,
    mappings: Mapping[str, Any],
) -> list[tuple[StatePath, dict[Any, Any]]]:
    """The path and the state dict of each optimizer."""
    optimizers: dict[StatePath, _OptimizerState] = {}
    for fqn, path in paths.items():
        if len(path) >= 3 and path[-3] == "state":
            slots = optimizers.setdefault(path[:-3], _OptimizerState()).state.setdefault(str(path[-2]), {})
            slots[str(path[-1])] = tensors[fqn][0][1]
    state_dict = getattr(planner, "state_dict", None)
    for fqn, value in state_dict.items() if isinstance(state_dict, Mapping) else ():
        _add_hyperparameter(optimizers, nest_path(fqn, mappings), value)
    return [(path, optimizer.state_dict()) for path, optimizer in optimizers.items()]


def _add_hyperparameter(optimizers: Mapping[StatePath, _OptimizerState], path: StatePath, value: Any) -> None:
    """Add a hyperparameter or a step count to its optimizer, whichever rank stores it."""
    if len(path) < 3 or (isinstance(value, torch.Tensor) and (value.numel() != 1 or type(value) is not torch.Tensor)):
        return
    head, kind, key, slot = path[:-3], path[-3], path[-2], str(path[-1])
    optimizer = optimizers.get(head)
    if optimizer is None:
        return
    if kind == "state" and str(key) in optimizer.state:
        optimizer.state[str(key)].setdefault(slot, value)
    elif kind == "param_groups" and isinstance(key, int):
        optimizer.groups.setdefault(key, {})[slot] = value
    elif kind == "param_groups":
        optimizer.parameter_settings.setdefault(str(key), {})[slot] = value
