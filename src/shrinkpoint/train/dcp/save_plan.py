"""Save plans of torch.distributed.checkpoint: which rank writes which moments, and a rank's items as one flat state."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError, StateError
from shrinkpoint.sharding.global_tensors import ShardSpec
from shrinkpoint.tensors.dtypes import DTYPE_NAMES, dtype_name
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role, TensorInfo
from shrinkpoint.tensors.names import StatePath, tensor_name, unique_name
from shrinkpoint.tensors.roles import InferredRoles, infer_roles
from shrinkpoint.tensors.tree import Leaf, TreeEncoder
from shrinkpoint.train.dcp.checkpoint_metadata import Offsets, chunk_name, offsets_key
from shrinkpoint.train.dcp.payload import unpickle_plain

_FLAT_NAME = re.compile(r"(?:(?P<head>.+)\.)?(?P<kind>state|param_groups)\.(?P<name>.+)\.(?P<slot>[^.]+)")
_HASH_BYTES = 8
_Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a shard, and the shape of its global tensor."""
_ItemKey = tuple[int, int]  # A rank, and the index of an item in its plan


@dataclass(frozen=True)
class CollectedState:
    """Items that this rank writes."""

    state: FlatState  # a tensor for each shard, named after its entry and its offsets; objects are in the tree
    shards: Mapping[str, ShardSpec] = field(repr=False)  # by name in the state; without the tensors inside of objects
    indices: Sequence[MetadataIndex] = field(repr=False)  # of every item


def collect_plan_items(plan: SavePlan, planner: SavePlanner) -> CollectedState:
    """All that the plan assigns to this rank, in the caller's memory, on whatever device that is.

    Raises:
        StateError: something cannot be stored; `where` names its entry.
    """
    nest: dict[str, Any] = {}
    shards: dict[str, ShardSpec] = {}
    tensors: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for item in plan.items:
        fqn = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            nest[fqn] = _planned_object(item, planner)
            continue
        data, planned = planner.resolve_data(item), item.tensor_data
        if not isinstance(data, torch.Tensor) or planned is None or data.shape != planned.chunk.sizes:
            shape = tuple(data.shape) if isinstance(data, torch.Tensor) else type(data).__name__
            expected = None if planned is None else tuple(planned.chunk.sizes)
            do = "do not change the state until it is saved, nor replay the plan of another state"
            raise StateError(f"state[{fqn!r}]", found=f"{shape}", expected=f"the planned shape {expected}", do=do)
        shard, tensor = ShardSpec(fqn, tuple(planned.size), tuple(planned.chunk.offsets)), data.detach()
        name = chunk_name(fqn, shard.offsets, planned.chunk.sizes, shard.global_shape)
        if name == tensor_name((fqn,)):
            nest[fqn] = tensor
        else:
            nest.setdefault(fqn, {})[offsets_key(shard.offsets)] = tensor
        shards[name] = shard
        tensors.setdefault(fqn, []).append((name, tensor))
    indices = [*dict.fromkeys(item.index for item in plan.items)]
    return CollectedState(_flat_state(nest, shards, tensors, planner), shards, indices)


def _planned_object(item: WriteItem, planner: SavePlanner) -> Any:
    """An object that is no tensor: itself, or what a planner of the caller's makes of it."""
    kind, default = type(planner), DefaultSavePlanner
    names = ("resolve_data", "transform_object")
    if isinstance(planner, default) and all(getattr(kind, name) is getattr(default, name) for name in names):
        return planner.lookup_object(item.index)
    fqn, data = item.index.fqn, planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        found = f"{validate.type_name(data)} where the planner promised bytes"
        raise StateError(f"state[{fqn!r}]", found=found, expected="a BytesIO", do="check the planner's resolve_data")
    return unpickle_plain(data, fqn)


def plan_signatures(plan: SavePlan) -> set[tuple[str, Offsets, str]]:
    """Name, shape and dtype of every global tensor with a shard in the plan; "" for a dtype that is not stored."""
    return {
        (item.index.fqn, tuple(item.tensor_data.size), DTYPE_NAMES.get(item.tensor_data.properties.dtype, ""))
        for item in plan.items
        if item.tensor_data is not None
    }


def _flat_state(
    nest: dict[str, Any],
    shards: Mapping[str, ShardSpec],
    tensors: Mapping[str, list[tuple[str, torch.Tensor]]],
    planner: SavePlanner,
) -> FlatState:
    """The nest as a flat state. Tensors that share memory are stored separately: no name may depend on others."""
    encoder = TreeEncoder()
    tree = encoder.encode(nest)
    stored = dict[str, torch.Tensor]()
    for leaf in encoder.leaves:
        default = tensor_name(leaf.path)
        leaf.name = unique_name(default, stored)
        leaf.reference[:] = [] if leaf.name == default else [leaf.name]
        stored[leaf.name] = leaf.tensor
    roles, optimizer_info, moment_kinds = _infer_shard_roles(tensors, planner)
    infos: dict[str, TensorInfo] = {}
    for name, tensor in stored.items():
        shard, shape = shards.get(name), tuple(tensor.shape)
        offsets = None if shard is None or shard.global_shape == shape else shard.offsets
        infos[name] = TensorInfo(name, shape, dtype_name(tensor.dtype), roles.get(name, Role.OTHER), offsets)
    return FlatState(tree, stored, infos, optimizer_info, moment_kinds)


def _infer_shard_roles(
    tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]], planner: SavePlanner
) -> InferredRoles:
    """The role of each shard, and what the optimizer knows about each parameter, by name in the state."""
    mappings = _paths(getattr(planner, "mappings", None))
    paths = {fqn: nest_path(fqn, mappings) for fqn in tensors}
    leaves = [Leaf(paths[fqn], shards[0][1], name=shards[0][0]) for fqn, shards in tensors.items()]
    optimizers: dict[StatePath, _OptimizerState] = {}
    for fqn, path in paths.items():
        if _is_slot(path):
            slots = optimizers.setdefault(path[:-3], _OptimizerState()).state.setdefault(str(path[-2]), {})
            slots[str(path[-1])] = tensors[fqn][0][1]
    state_dict = getattr(planner, "state_dict", None)
    for fqn, value in state_dict.items() if isinstance(state_dict, Mapping) else ():
        _add_hyperparameter(optimizers, nest_path(fqn, mappings), value)
    inferred = infer_roles(leaves, [(path, optimizer.state_dict()) for path, optimizer in optimizers.items()])
    for shards in tensors.values():  # several shards of one tensor on one rank are rare; moments go with the first
        first = shards[0][0]
        for name, _ in shards[1:]:
            inferred.roles[name] = inferred.roles.get(first, Role.OTHER)
            if first in inferred.moment_kinds:
                inferred.moment_kinds[name] = inferred.moment_kinds[first]
    return inferred


def nest_path(fqn: str, mappings: Mapping[str, Any]) -> StatePath:
    """The path of an entry in the nest, by the planner's paths; slots of an optimizer are levels of their own."""
    path = tuple(mappings.get(fqn, (fqn,)))
    match = _FLAT_NAME.fullmatch(str(path[-1])) if path else None
    if match is None:
        return path
    head = (match["head"],) if match["head"] else ()
    return (*path[:-1], *head, match["kind"], match["name"], match["slot"])


@dataclass
class _OptimizerState:
    """The `state_dict` of one optimizer, as far as this rank knows it."""

    state: dict[str, dict[str, Any]] = field(default_factory=dict)  # slots by parameter and name
    # Settings by index of the group, as the optimizer has them.
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    # Settings by parameter, as `get_state_dict` flattens them.
    parameter_settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        groups = [self.groups[index] for index in sorted(self.groups)]
        named = [{**group, "params": [str(key) for key in group.get("params", ())]} for group in groups]
        if not any(group["params"] for group in named):
            named = [{**self.parameter_settings.get(name, {}), "params": [name]} for name in self.state]
        return {"state": self.state, "param_groups": named}


def _add_hyperparameter(optimizers: Mapping[StatePath, _OptimizerState], path: StatePath, value: Any) -> None:
    """Add a hyperparameter, or what is kept for a parameter, to its optimizer, whichever rank stores it."""
    if len(path) > 3 and path[-4] == "state" and path[:-4] in optimizers:
        path, value = path[:-1], [value]  # an item of a list of tensors
    if len(path) < 3:
        return
    head, kind, key, slot = path[:-3], path[-3], path[-2], str(path[-1])
    optimizer = optimizers.get(head)
    is_plain = not isinstance(value, torch.Tensor) or (value.numel() == 1 and type(value) is torch.Tensor)
    if optimizer is None or not (is_plain or kind == "state"):
        return
    if kind == "state" and str(key) in optimizer.state:
        optimizer.state[str(key)].setdefault(slot, value)
    elif kind == "param_groups" and isinstance(key, int):
        optimizer.groups.setdefault(key, {})[slot] = value
    elif kind == "param_groups":
        optimizer.parameter_settings.setdefault(str(key), {})[slot] = value


# Which rank writes which moments.
#
# Torch divides what replicas have (HSDP, DDP) among them by size, entry by entry, so that a weight and its moments may
# be assigned to different ranks. Here moments follow the weight, whose rank torch decides, as they are coding context
# for each other. The result depends on the plans alone, so that it is the same for every save, and for plans that torch
# replays.


@dataclass(frozen=True)
class RankSlots:
    """Report of a rank before torch divides replicated entries among the ranks."""

    slot_hashes: bytes  # a hash of `_HASH_BYTES` bytes for each moment that the rank has, sorted and joined
    scheme: str  # the class name of the writer's scheme


def rank_slots(plan: SavePlan, scheme: str = "") -> RankSlots:
    """The report of a rank about its own plan."""
    paths = _Paths(_paths(plan.planner_data))
    hashes = sorted(_slot_hash(item.index) for item in plan.items if paths.is_moment(item))
    return RankSlots(b"".join(hashes), scheme)


def colocate_moments(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, with every moment on the rank of its weight if that rank has the moment.

    Args:
        plans: by rank, as the planner made them, with the `RankSlots` of each rank as `storage_data`.

    Raises:
        PolicyError: ranks with different schemes, of which one would wait for the other; a planner that replays plans
            and does not keep them where torch's own planner does.
    """
    schemes = sorted({plan.storage_data.scheme for plan in plans if isinstance(plan.storage_data, RankSlots)})
    if len(schemes) > 1:
        found = " and ".join(schemes)
        raise PolicyError("Writer", found=found, expected="the same on all ranks", do="pass one scheme on all ranks")
    if not any(plan.usable for plan in plans):
        return plans  # all of them are replayed, with the moments where they were moved before
    plans = plans if all(plan.usable for plan in plans) else _restore_cached_plans(plans)
    paths = _Paths({fqn: path for plan in plans for fqn, path in _paths(plan.planner_data).items()})
    ranks = _RanksOfSlots([plan.storage_data for plan in plans])
    if ranks.num_reported == sum(paths.is_moment(item) for plan in plans for item in plan.items):
        return plans  # no moment is on two ranks: there is nothing to choose, and of N ranks nothing to remember
    targets = _target_ranks(plans, paths, ranks)
    items_by_rank: list[list[WriteItem]] = [[] for _ in plans]
    for rank, plan in enumerate(plans):
        for index, item in enumerate(plan.items):
            items_by_rank[targets.get((rank, index), rank)].append(item)
    return [replace(plan, items=items) for plan, items in zip(plans, items_by_rank, strict=True)]


def _target_ranks(plans: Sequence[SavePlan], paths: _Paths, ranks: _RanksOfSlots) -> dict[_ItemKey, int]:
    """The rank of each moment that is moved: that of its weight, found by name; else one rank for all of its shard."""
    weights = _WeightOwners()
    moments: list[tuple[_ItemKey, _Box]] = []
    for rank, plan in enumerate(plans):
        for index, item in enumerate(plan.items):
            if item.tensor_data is None or not math.prod(item.tensor_data.chunk.sizes):
                continue
            data = item.tensor_data
            box = tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size)
            if not paths.is_slot(item.index.fqn):
                weights.add(item.index.fqn, box, rank)
            elif box[1]:
                moments.append(((rank, index), box))
    targets, owned = dict[_ItemKey, int](), set[_ItemKey]()
    shards: dict[tuple[StatePath, _Box], list[_ItemKey]] = {}
    for (rank, index), box in moments:
        item_index = plans[rank].items[index].index
        path = paths.of(item_index.fqn)[:-1]
        target = weights.find_rank(str(path[-1]), box)
        if target is not None and (target == rank or ranks.has(target, item_index)):
            owned.add((rank, index))
            if target != rank:
                targets[rank, index] = target
        shards.setdefault((path, box), []).append((rank, index))
    groups = [keys for keys in shards.values() if len(keys) > 1 and owned.isdisjoint(keys)]
    return targets | _balance_unowned(groups, plans, targets, ranks)


def _balance_unowned(
    groups: Sequence[Sequence[_ItemKey]],
    plans: Sequence[SavePlan],
    targets: Mapping[_ItemKey, int],
    ranks: _RanksOfSlots,
) -> dict[_ItemKey, int]:
    """The rank of each moment without a known weight: those of one shard go to the rank with least to write."""

    def weight_of(key: _ItemKey) -> int:
        return plans[key[0]].items[key[1]].tensor_storage_size() or 1

    loads, unowned_keys = [0] * len(plans), {key for keys in groups for key in keys}
    for rank, plan in enumerate(plans):
        for index in range(len(plan.items)):
            if (rank, index) not in unowned_keys:
                loads[targets.get((rank, index), rank)] += weight_of((rank, index))
    balanced: dict[_ItemKey, int] = {}
    for keys in groups:
        able = ranks.with_all([plans[rank].items[index].index for rank, index in keys])
        target = min(able, key=lambda rank: (loads[rank], rank), default=None)
        for key in keys:
            balanced[key] = key[0] if target is None else target
            loads[balanced[key]] += weight_of(key)
    return balanced


class _Paths:
    """The path of each entry in the nest, found once for each name: all ranks have the same names."""

    def __init__(self, mappings: Mapping[str, Any]) -> None:
        # No lambda holds `self`: a loop may have turned garbage collection off, and a cycle would stay in memory
        self.of = cache(lambda fqn: nest_path(fqn, mappings))

    def is_slot(self, fqn: str) -> bool:
        """True if an entry is what an optimizer keeps for a parameter."""
        return _is_slot(self.of(fqn))

    def is_moment(self, item: WriteItem) -> bool:
        """True if an item is a shard of such an entry that has axes and values: only these are moved."""
        data = item.tensor_data
        return data is not None and len(data.size) > 0 and self.is_slot(item.index.fqn) and 0 not in data.chunk.sizes


class _RanksOfSlots:
    """Owners of slots, by the hashes that ranks report; nothing is unpacked before it is asked for."""

    def __init__(self, reports: Sequence[Any]) -> None:
        # A planner that drops storage_data: nothing is moved.
        joined = [report.slot_hashes if isinstance(report, RankSlots) else b"" for report in reports]
        self._joined = joined
        self._hashes = cache(lambda rank: frozenset(_split_hashes(joined[rank])))
        self._ranks: dict[bytes, set[int]] | None = None

    @property
    def num_reported(self) -> int:
        """The number of slots of all ranks, each as often as ranks have it."""
        return sum(len(joined) // _HASH_BYTES for joined in self._joined)

    def has(self, rank: int, index: MetadataIndex) -> bool:
        """True if a rank has a slot."""
        return _slot_hash(index) in self._hashes(rank)

    def with_all(self, indices: Sequence[MetadataIndex]) -> set[int]:
        """The ranks that have all of several slots; found without a look at every rank."""
        if self._ranks is None:
            self._ranks = {}
            for rank, joined in enumerate(self._joined):
                for slot_hash in _split_hashes(joined):
                    self._ranks.setdefault(slot_hash, set()).add(rank)
        return set.intersection(*(self._ranks.get(_slot_hash(index), set()) for index in indices))


def _split_hashes(joined: bytes) -> Iterator[bytes]:
    return (joined[start : start + _HASH_BYTES] for start in range(0, len(joined), _HASH_BYTES))


class _WeightOwners:
    """The rank that writes each shard of each weight."""

    def __init__(self) -> None:
        self._ranks: dict[str, dict[_Box, int]] = {}
        self._names: dict[str, str] = {}

    def add(self, fqn: str, box: _Box, rank: int) -> None:
        ranks = self._ranks.get(fqn)
        if ranks is None:
            ranks = self._ranks[fqn] = {}
            parts = fqn.split(".")
            for first in range(len(parts)):  # `first.weight` finds `model.first.weight`; of several, the shortest name
                suffix = ".".join(parts[first:])
                names = [fqn, *([self._names[suffix]] if suffix in self._names else [])]
                self._names[suffix] = min(names, key=lambda name: (len(name), name))
        ranks[box] = rank

    def find_rank(self, name: str, box: _Box) -> int | None:
        """The rank of a shard of the weight whose name ends so; None if there is none."""
        weight = self._names.get(name)
        return None if weight is None else self._ranks[weight].get(box)


def _is_slot(path: StatePath) -> bool:
    return len(path) >= 3 and path[-3] == "state"


def _paths(planner_data: Any) -> Mapping[str, Any]:
    return planner_data if isinstance(planner_data, Mapping) else {}


def _slot_hash(index: MetadataIndex) -> bytes:
    text = f"{tuple(index.offset or ())} {index.fqn}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_HASH_BYTES).digest()


def _restore_cached_plans(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """All plans, where torch passes only those that have changed and marks the others as unusable."""
    for cached_plans in getattr(SavePlanner, "_cached_global_plan", {}).values():
        pairs = zip(plans, cached_plans, strict=False)
        if len(cached_plans) == len(plans) and all(plan is cached for plan, cached in pairs if plan.usable):
            return [*cached_plans]
    found, do = "a planner that keeps its plans elsewhere than torch's", "leave enable_plan_caching out"
    raise PolicyError("planner", found=found, expected="DefaultSavePlanner", do=do)
