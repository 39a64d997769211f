"""The items of a rank's plan as one flat state."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from shrinkpoint.errors import StateError
from shrinkpoint.record import Role, TensorInfo
from shrinkpoint.state import FlatState, dtype_name
from shrinkpoint.state.dtypes import NAMES
from shrinkpoint.state.path import name_of
from shrinkpoint.state.ties import Names
from shrinkpoint.state.tree import Planter
from shrinkpoint.train.dcp.description import Offsets, chunk_name, offsets_key
from shrinkpoint.train.dcp.roles import roles_of
from shrinkpoint.train.dcp.values import plain


@dataclass(frozen=True)
class Box:
    """Which part of which tensor a stored one is."""

    fqn: str
    size: Offsets
    offsets: Offsets


@dataclass(frozen=True)
class Collected:
    """What this rank writes.

    Attributes:
        flat: a tensor for each box, named after its entry and where it begins; objects are in the tree.
        boxes: by stored name; without the tensors inside of objects.
        written: every item, with its bytes.
    """

    flat: FlatState
    boxes: Mapping[str, Box] = field(repr=False)
    written: Mapping[MetadataIndex, int] = field(repr=False)

    @property
    def is_on_cpu(self) -> bool:
        return all(x.device.type == "cpu" for x in self.flat.tensors.values())


def collect(plan: SavePlan, planner: SavePlanner) -> Collected:
    """Everything that the plan says is this rank's, in the caller's memory, on whatever device that is.

    Raises:
        StateError: something cannot be stored; `where` names its entry.
    """
    nest: dict[str, Any] = {}
    boxes: dict[str, Box] = {}
    tensors: dict[str, list[tuple[str, torch.Tensor]]] = {}
    written: dict[MetadataIndex, int] = {}
    for item in plan.items:
        fqn, data = item.index.fqn, planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            written[item.index] = _put_value(nest, fqn, data)
            continue
        box, name, x = _box(item, data)
        if name == name_of((fqn,)):
            nest[fqn] = x
        else:
            nest.setdefault(fqn, {})[offsets_key(box.offsets)] = x
        boxes[name] = box
        tensors.setdefault(fqn, []).append((name, x))
        written[item.index] = x.numel() * x.element_size()
    return Collected(_flat(nest, boxes, tensors, planner), boxes, written)


def kinds_of(plan: SavePlan) -> set[tuple[str, Offsets, str]]:
    """Name, shape and dtype of every whole tensor of which the plan has a box; "" for a dtype that is not stored."""
    found = ((item.index.fqn, item.tensor_data) for item in plan.items)
    return {(fqn, tuple(x.size), NAMES.get(x.properties.dtype, "")) for fqn, x in found if x is not None}


def _put_value(nest: dict[str, Any], fqn: str, data: Any) -> int:
    if not isinstance(data, io.BytesIO):
        found = f"a {type(data).__name__} where the planner promised bytes"
        raise StateError(f"state[{fqn!r}]", found=found, expected="a BytesIO", do="look at the planner")
    nest[fqn] = plain(data, fqn)
    return data.getbuffer().nbytes


def _box(item: WriteItem, data: Any) -> tuple[Box, str, torch.Tensor]:
    fqn, about = item.index.fqn, item.tensor_data
    if not isinstance(data, torch.Tensor) or about is None or data.shape != about.chunk.sizes:
        shape = tuple(data.shape) if isinstance(data, torch.Tensor) else type(data).__name__
        expected = None if about is None else tuple(about.chunk.sizes)
        raise StateError(f"state[{fqn!r}]", found=f"{shape}", expected=f"the planned shape {expected}")
    box = Box(fqn, tuple(about.size), tuple(about.chunk.offsets))
    return box, chunk_name(fqn, box.offsets, about.chunk.sizes, box.size), data.detach()


def _flat(
    nest: dict[str, Any],
    boxes: Mapping[str, Box],
    tensors: Mapping[str, list[tuple[str, torch.Tensor]]],
    planner: SavePlanner,
) -> FlatState:
    """Every box is a tensor of its own, whatever shares memory: its name must not depend on others."""
    planter = Planter()
    tree = planter.plant(nest)
    names, stored = Names(), dict[str, torch.Tensor]()
    for leaf in planter.leaves:
        leaf.name = names.take(wanted := name_of(leaf.path))
        leaf.reference[:] = [] if leaf.name == wanted else [leaf.name]
        stored[leaf.name] = leaf.tensor
    roles, optim = roles_of(tensors, planner)
    infos = {name: _info(name, x, boxes.get(name), roles.get(name, Role.OTHER)) for name, x in stored.items()}
    return FlatState(tree, stored, infos, optim)


def _info(name: str, x: torch.Tensor, box: Box | None, role: Role) -> TensorInfo:
    whole = box is None or box.size == tuple(x.shape)
    return TensorInfo(name, tuple(x.shape), dtype_name(x.dtype), role, None if whole or box is None else box.offsets)
