"""Assigns the moments of a weight to the rank that writes the weight, so that they are coding context for each other.

Torch divides what replicas have (HSDP, DDP) among them by size, entry by entry, so that a weight and its moments may be
assigned to different ranks. Here moments follow the weight, whose rank torch decides. The result depends on the plans
alone, so that it is the same for every save, and for plans that torch replays.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.names import StatePath
from shrinkpoint.train.dcp.collect import nest_path

_HASH_BYTES = 8
_Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a shard, and the shape of its global tensor."""
_ItemKey = tuple[int, int]
"""A rank, and the index of an item in its plan."""


@dataclass(frozen=True)
class RankSlots:
    """What a rank reports before torch divides among the ranks what several of them have.

    Attributes:
        slot_hashes: a hash of `_HASH_BYTES` bytes for each optimizer slot that the rank has, sorted and joined.
        scheme: the class name of the writer's scheme.
    """

    slot_hashes: bytes
    scheme: str


def rank_slots(plan: SavePlan, scheme: str = "") -> RankSlots:
    """The report of a rank about its own plan."""
    paths = _paths(plan.planner_data)
    hashes = sorted(_slot_hash(item.index) for item in plan.items if _is_slot_tensor(item, paths))
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
        raise PolicyError("Writer", found=found, expected="the same on all ranks", do="set all ranks up alike")
    if not any(plan.usable for plan in plans):
        return plans  # all of them are replayed, with the moments where they were moved before
    plans = plans if all(plan.usable for plan in plans) else _restore_cached_plans(plans)
    paths = {fqn: path for plan in plans for fqn, path in _paths(plan.planner_data).items()}
    items = {(rank, index): item for rank, plan in enumerate(plans) for index, item in enumerate(plan.items)}
    targets = _target_ranks(items, paths, [_rank_slot_hashes(plan.storage_data) for plan in plans])
    items_by_rank: list[list[WriteItem]] = [[] for _ in plans]
    for key, item in items.items():
        items_by_rank[targets.get(key, key[0])].append(item)
    return [replace(plan, items=rank_items) for plan, rank_items in zip(plans, items_by_rank, strict=True)]


def _target_ranks(
    items: Mapping[_ItemKey, WriteItem], paths: Mapping[str, Any], slot_hashes: Sequence[frozenset[bytes]]
) -> dict[_ItemKey, int]:
    """The rank of each moment: that of its weight, found by name; without a weight, one rank for all of its shard."""
    weights, groups = _WeightOwners(), dict[tuple[StatePath, _Box], list[_ItemKey]]()
    for key, item in items.items():
        box, path = _item_box(item), nest_path(item.index.fqn, paths)
        if box is None or not math.prod(box[1]):
            continue
        if not _is_slot(path):
            weights.add(item.index.fqn, box, key[0])
        elif box[1]:
            groups.setdefault((path[:-1], box), []).append(key)
    targets: dict[_ItemKey, int] = {}
    for (path, box), keys in groups.items():
        rank = weights.find_rank(str(path[-1]), box)
        if rank is not None:
            targets |= {key: rank for key in keys if _slot_hash(items[key].index) in slot_hashes[rank]}
    return targets | _balance_unowned([keys for keys in groups.values() if len(keys) > 1], items, targets, slot_hashes)


def _balance_unowned(
    groups: Sequence[Sequence[_ItemKey]],
    items: Mapping[_ItemKey, WriteItem],
    targets: Mapping[_ItemKey, int],
    slot_hashes: Sequence[frozenset[bytes]],
) -> dict[_ItemKey, int]:
    """The rank of each moment without a known weight: those of one shard go to the rank with least to write."""
    unowned = [keys for keys in groups if not any(key in targets for key in keys)]
    loads, unowned_keys = [0] * len(slot_hashes), {key for keys in unowned for key in keys}
    for key, item in items.items():
        loads[targets.get(key, key[0])] += 0 if key in unowned_keys else item.tensor_storage_size() or 1
    balanced: dict[_ItemKey, int] = {}
    for keys in unowned:
        group_hashes = {_slot_hash(items[key].index) for key in keys}
        able = [rank for rank, hashes in enumerate(slot_hashes) if group_hashes <= hashes]
        target = min(able, key=loads.__getitem__) if able else None
        for key in keys:
            balanced[key] = key[0] if target is None else target
            loads[balanced[key]] += items[key].tensor_storage_size() or 1
    return balanced


class _WeightOwners:
    """The rank that writes each shard of each weight."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, _Box], int] = {}
        self._names: dict[str, str] = {}

    def add(self, fqn: str, box: _Box, rank: int) -> None:
        self._ranks[fqn, box] = rank
        parts = fqn.split(".")
        for first in range(len(parts)):  # `first.weight` finds `model.first.weight`; of several, the shortest name
            suffix = ".".join(parts[first:])
            names = [fqn, *([self._names[suffix]] if suffix in self._names else [])]
            self._names[suffix] = min(names, key=lambda name: (len(name), name))

    def find_rank(self, name: str, box: _Box) -> int | None:
        """The rank of a shard of the weight whose name ends so; None if there is none."""
        weight = self._names.get(name)
        return None if weight is None else self._ranks.get((weight, box))


def _is_slot_tensor(item: WriteItem, paths: Mapping[str, Any]) -> bool:
    """Whether an item is a tensor in the state of an optimizer."""
    return item.tensor_data is not None and _is_slot(nest_path(item.index.fqn, paths))


def _is_slot(path: StatePath) -> bool:
    return len(path) >= 3 and path[-3] == "state"


def _item_box(item: WriteItem) -> _Box | None:
    data = item.tensor_data
    return None if data is None else (tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size))


def _paths(planner_data: Any) -> Mapping[str, Any]:
    return planner_data if isinstance(planner_data, Mapping) else {}


def _slot_hash(index: MetadataIndex) -> bytes:
    text = f"{tuple(index.offset or ())} {index.fqn}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_HASH_BYTES).digest()


def _rank_slot_hashes(storage_data: Any) -> frozenset[bytes]:
    if not isinstance(storage_data, RankSlots):  # a planner that drops storage_data: nothing is moved
        return frozenset()
    joined = storage_data.slot_hashes
    return frozenset(joined[start : start + _HASH_BYTES] for start in range(0, len(joined), _HASH_BYTES))


def _restore_cached_plans(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """All plans, where torch passes only those that have changed and marks the others as unusable."""
    for cached_plans in getattr(SavePlanner, "_cached_global_plan", {}).values():
        pairs = zip(plans, cached_plans, strict=False)
        if len(cached_plans) == len(plans) and all(plan is cached for plan, cached in pairs if plan.usable):
            return [*cached_plans]
    found, do = "a planner that keeps its plans elsewhere than torch's", "leave enable_plan_caching out"
    raise PolicyError("planner", found=found, expected="DefaultSavePlanner", do=do)
