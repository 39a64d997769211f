"""Moments on the rank that writes their weight, where several ranks have both: there each serves the other.

Torch shares what replicas have (HSDP, DDP) among them by size, entry by entry, so that a weight and its moments may go
to different ranks, where they are no context for each other. Here moments follow their weight, of which torch decides.
All of it follows from the plans alone, so that it is the same for every save, and for plans that torch replays.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.names import StatePath
from shrinkpoint.train.dcp.collect import nest_path

_HASH_BYTES = 8
_Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets, sizes, and the size of the whole tensor."""
_ItemKey = tuple[int, int]
"""A rank, and which of the entries of its plan."""


@dataclass(frozen=True)
class RankSlots:
    """What a rank tells before torch shares out what several have.

    Attributes:
        slot_hashes: of what it has of optimizers' states: a short one of each entry, joined.
        scheme: how it is set up.
    """

    slot_hashes: bytes
    scheme: str


def rank_slots(plan: SavePlan, scheme: str = "") -> RankSlots:
    """What to tell of a rank's own plan."""
    return RankSlots(
        b"".join(sorted(_slot_hash(item.index) for item, _ in _optimizer_slots(plan, plan.planner_data))), scheme
    )


def colocate_moments(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, with every moment that can be on the rank of its weight.

    Args:
        plans: by rank, as the planner made them; `storage_data` is what `known` said there.

    Raises:
        PolicyError: ranks with different schemes, of which one would wait for the other; a planner that replays plans,
            and keeps them where nobody finds them.
    """
    schemes = sorted({plan.storage_data.scheme for plan in plans if isinstance(plan.storage_data, RankSlots)})
    if len(schemes) > 1:
        found = " and ".join(schemes)
        raise PolicyError("Writer", found=found, expected="the same on all ranks", do="set all ranks up alike")
    if not any(plan.usable for plan in plans):
        return plans  # all of them are replayed, as they were moved before
    plans = plans if all(plan.usable for plan in plans) else _restore_cached_plans(plans)
    paths = {fqn: path for plan in plans for fqn, path in _paths(plan.planner_data).items()}
    items = {(rank, at): item for rank, plan in enumerate(plans) for at, item in enumerate(plan.items)}
    homes = _target_ranks(items, paths, [_rank_slot_hashes(plan.storage_data) for plan in plans])
    out: list[list[WriteItem]] = [[] for _ in plans]
    for (rank, at), item in items.items():
        out[homes.get((rank, at), rank)].append(item)
    return [replace(plan, items=mine) for plan, mine in zip(plans, out, strict=True)]


def _target_ranks(
    items: Mapping[_ItemKey, WriteItem], paths: Mapping[str, Any], slot_hashes: Sequence[Collection[bytes]]
) -> dict[_ItemKey, int]:
    """Ranks of moments: that of their weight, which is known by its name; else all of a box's moments stay together."""
    weights, groups = _WeightOwners(), dict[tuple[StatePath, _Box], list[_ItemKey]]()
    for key, item in items.items():
        box, place = _item_box(item), nest_path(item.index.fqn, paths)
        if box is None or not math.prod(box[1]):
            continue
        if not _is_slot(place):
            weights.add(item.index.fqn, box, key[0])
        elif box[1]:
            groups.setdefault((place[:-1], box), []).append(key)
    homes: dict[_ItemKey, int] = {}
    for (place, box), keys in groups.items():
        home = weights.find_rank(str(place[-1]), box)
        if home is not None:
            homes |= {key: home for key in keys if _slot_hash(items[key].index) in slot_hashes[home]}
    return homes | _balance_unowned([keys for keys in groups.values() if len(keys) > 1], items, homes, slot_hashes)


def _balance_unowned(
    groups: Sequence[Sequence[_ItemKey]],
    items: Mapping[_ItemKey, WriteItem],
    targets: Mapping[_ItemKey, int],
    slot_hashes: Sequence[Collection[bytes]],
) -> dict[_ItemKey, int]:
    """As `_target_ranks`, of moments whose weight is not known: each box's go to the rank that has least to write."""
    left = [keys for keys in groups if not any(key in targets for key in keys)]
    loads, lone = [0] * len(slot_hashes), {key for keys in left for key in keys}
    for key, item in items.items():
        loads[targets.get(key, key[0])] += 0 if key in lone else item.tensor_storage_size() or 1
    found: dict[_ItemKey, int] = {}
    for keys in left:
        able = [
            rank for rank, had in enumerate(slot_hashes) if all(_slot_hash(items[key].index) in had for key in keys)
        ]
        home = min(able, key=loads.__getitem__) if able else None
        for key in keys:
            found[key] = key[0] if home is None else home
            loads[found[key]] += items[key].tensor_storage_size() or 1
    return found


class _WeightOwners:
    """Which rank writes which box of a weight."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, _Box], int] = {}
        self._names: dict[str, str] = {}

    def add(self, fqn: str, box: _Box, rank: int) -> None:
        self._ranks[fqn, box] = rank
        parts = fqn.split(".")
        for first in range(len(parts)):  # `first.weight` is `model.first.weight`; of several, the shortest name
            tail = ".".join(parts[first:])
            held = self._names.get(tail)
            self._names[tail] = fqn if held is None else min(held, fqn, key=lambda one: (len(one), one))

    def find_rank(self, name: str, box: _Box) -> int | None:
        weight = self._names.get(name)
        return None if weight is None else self._ranks.get((weight, box))


def _optimizer_slots(plan: SavePlan, paths: Any) -> Iterator[tuple[WriteItem, StatePath]]:
    """Tensors in the state of an optimizer, and where they stand."""
    paths = _paths(paths)
    for item in plan.items:
        place = nest_path(item.index.fqn, paths) if item.tensor_data is not None else ()
        if _is_slot(place):
            yield item, place


def _is_slot(path: StatePath) -> bool:
    return len(path) >= 3 and path[-3] == "state"


def _item_box(item: WriteItem) -> _Box | None:
    about = item.tensor_data
    return None if about is None else (tuple(about.chunk.offsets), tuple(about.chunk.sizes), tuple(about.size))


def _paths(planner_data: Any) -> Mapping[str, Any]:
    return planner_data if isinstance(planner_data, Mapping) else {}


def _slot_hash(index: MetadataIndex) -> bytes:
    text = f"{tuple(index.offset or ())} {index.fqn}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_HASH_BYTES).digest()


def _rank_slot_hashes(storage_data: Any) -> frozenset[bytes]:
    if not isinstance(storage_data, RankSlots):  # a planner that passes on nothing: nothing is moved
        return frozenset()
    return frozenset(
        storage_data.slot_hashes[at : at + _HASH_BYTES] for at in range(0, len(storage_data.slot_hashes), _HASH_BYTES)
    )


def _restore_cached_plans(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """All plans, where torch says only which have changed since it made them."""
    for cached in getattr(SavePlanner, "_cached_global_plan", {}).values():
        pairs = zip(plans, cached, strict=False)
        if len(cached) == len(plans) and all(plan is one for plan, one in pairs if plan.usable):
            return [*cached]
    found, do = "a planner that keeps its plans elsewhere than torch's", "leave enable_plan_caching out"
    raise PolicyError("planner", found=found, expected="DefaultSavePlanner", do=do)
