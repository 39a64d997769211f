"""Infers the role of each tensor, and which moments belong to which parameter.

Optimizer states number their parameters without names, so they are matched by order and shape. A wrong guess costs
bytes, never correctness: roles and matches only affect how tensors are coded.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from shrinkpoint.tensors.info import OptimizerInfo, Role
from shrinkpoint.tensors.names import StatePath, format_key
from shrinkpoint.tensors.optimizers import (
    CODES,
    FACTORS,
    FIRST_MOMENTS,
    QUANTIZED_STATE,
    SECOND_MOMENT_BLOCKS,
    SECOND_MOMENTS,
    SLOT_ROLES,
    SQUARE_MEANS,
    MomentKind,
    is_master_key,
    moment_kinds,
)
from shrinkpoint.tensors.tree import Leaf

_BUFFER = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked|inv_freq|mask|\w+_(ids|mask|cached|cache))$")
_CONSTANT = re.compile(r"(^|_)(freqs?|rope|rotary|sin|cos|anchors?|grid|mean|std|var|stats?|index|pe)($|_)")
"""Common names of buffers at the root of a module."""
_GRADIENT = re.compile("grads?|gradients?")
_AVERAGE = re.compile("ema|swa|avg|average|teacher", re.IGNORECASE)

Optimizers = Sequence[tuple[StatePath, dict[Any, Any]]]


class InferredRoles(NamedTuple):
    """Roles that are inferred from a state's tensors."""

    roles: dict[str, Role]  # by name of a stored tensor
    optimizer_info: dict[str, OptimizerInfo]  # by name of a parameter
    moment_kinds: dict[str, MomentKind]  # by name of a tensor that an optimizer keeps for a parameter


def infer_roles(leaves: Sequence[Leaf], optimizers: Optimizers) -> InferredRoles:
    """Infer what each tensor of a state is for, and what an optimizer keeps for which parameter.

    Args:
        leaves: the leaves of the whole state, after `deduplicate`.
        optimizers: path and `state_dict` of each optimizer in it.
    """
    leaves_by_path = {leaf.path: leaf for leaf in leaves}
    optimizer_paths = {path for path, _ in optimizers}
    optimizer_ids = {
        id(leaf) for depth in {*map(len, optimizer_paths)} for leaf in leaves if leaf.path[:depth] in optimizer_paths
    }
    module_leaves = [leaf for leaf in leaves if id(leaf) not in optimizer_ids]
    models = _parameter_sets(module_leaves)
    roles: dict[str, Role] = {}
    optimizer_info: dict[str, OptimizerInfo] = {}
    kinds: dict[str, MomentKind] = {}
    slot_lists = [_slots(path, state_dict, leaves_by_path) for path, state_dict in optimizers]
    for slot in (slot for slots in slot_lists for slot in slots):
        for key, leaf in slot.leaves.items():
            kind = slot.kinds.get(key)
            if kind is not None and not is_master_key(key):
                kinds.setdefault(_stored_name(leaf), kind)
            if key in SLOT_ROLES and leaf.tensor.is_floating_point():
                roles.setdefault(_stored_name(leaf), SLOT_ROLES[key])
    matched: set[int] = set()
    # Muon takes matrices inside of a model, and another optimizer the embeddings before them: where shapes are alike,
    # the other one's are the first.
    is_muon = {id(s): MomentKind.ORTHOGONALIZED in s.kinds.values() for slots in slot_lists for s in slots}
    others = [[slot for slot in slots if not is_muon[id(slot)]] for slots in slot_lists]
    muon = [[slot for slot in slots if is_muon[id(slot)]] for slots in slot_lists]
    for slots in (*others, *filter(None, muon)):
        match = _best_match(slots, models, matched)
        settings: dict[int, dict[str, Any]] = {}
        for slot, leaf in match.pairs:
            if slot.group not in settings:
                settings[slot.group] = _group_settings(slot.settings)
            optimizer_info.setdefault(leaf.name, _optimizer_info(slot, settings[slot.group]))
            matched.add(id(leaf))
        for leaf in _module_parameters(match, leaves):
            roles.setdefault(leaf.name, Role.PARAMETER)
    state_dict_paths = _state_dicts(module_leaves)
    for leaf in leaves:
        if id(leaf) not in optimizer_ids:
            role = _module_role(leaf, state_dict_paths)
        else:
            names_master = any(is_master_key(key) for key in leaf.path if isinstance(key, str))
            role = Role.MASTER if names_master and _is_weight(leaf) else Role.OTHER
        roles.setdefault(_stored_name(leaf), role)
    return InferredRoles(roles, optimizer_info, kinds)


def _module_parameters(match: SlotMatch, leaves: Sequence[Leaf]) -> Iterator[Leaf]:
    """The weights that an optimizer has, and frozen weights of the same modules.

    A nest of several modules may hold other tensors, too: only those of its children count that contain a weight of the
    optimizer.
    """
    depth = len(match.model.path)
    matched = {id(leaf) for _, leaf in match.pairs}
    nested = any(len(leaf.path) > depth + 1 for leaf in leaves if leaf.path[:depth] == match.model.path)
    parts = {leaf.path[depth] for _, leaf in match.pairs if len(leaf.path) > depth + 1}
    for leaf in match.model.leaves:
        within = len(leaf.path) > depth + 1 and leaf.path[depth] in parts
        if not nested or within or id(leaf) in matched:
            yield leaf


def _state_dicts(leaves: Sequence[Leaf]) -> set[StatePath]:
    """The paths of nests that look like a `Module.state_dict`: flat, with dotted names of weights."""
    deep = {leaf.path[:depth] for leaf in leaves for depth in range(len(leaf.path) - 1)}
    named = (leaf for leaf in leaves if leaf.path and "." in format_key(leaf.path[-1]) and leaf.path[:-1] not in deep)
    return {leaf.path[:-1] for leaf in named if _module_role(leaf) is Role.PARAMETER}


@dataclass
class OptimizerSlot:
    """The state that one optimizer keeps for one parameter."""

    name: str | None  # of the parameter, where the optimizer knows it
    group: int
    settings: dict[str, Any]
    values: dict[Any, Any]
    leaves: dict[str, Leaf] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> dict[str, MomentKind]:
        values = {key: value for key, value in self.values.items() if not (isinstance(key, str) and is_master_key(key))}
        return moment_kinds(values, self.settings)

    @property
    def factors(self) -> tuple[Leaf, Leaf] | None:
        """Row and column means that replace a second moment; None if there are none."""
        for row, column in FACTORS:
            if row in self.leaves and column in self.leaves:
                pair = self.leaves[row], self.leaves[column]
                if all(leaf.tensor.dim() for leaf in pair):
                    return pair
        return None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The parameter's shape, if the slot determines it."""
        if (factors := self.factors) is not None:
            row, column = factors
            rows = tuple(row.tensor.shape)
            leading = rows[:-1] if row.tensor.dim() == column.tensor.dim() and rows[-1:] == (1,) else rows
            return (*leading, column.tensor.shape[-1])
        for key in (*FIRST_MOMENTS, *SECOND_MOMENTS, *CODES, *self.leaves):
            if key in self.leaves and key != "step":
                return tuple(self.leaves[key].tensor.shape)
        return None


def _slots(path: StatePath, state_dict: dict[Any, Any], leaves_by_path: dict[StatePath, Leaf]) -> list[OptimizerSlot]:
    """One slot for each parameter, in the order of the groups."""
    slots = []
    for number, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            continue
        names = group.get("param_names")
        for order, key in enumerate(group["params"]):
            name = key if isinstance(key, str) else None
            if isinstance(names, list) and order < len(names) and isinstance(names[order], str):
                name = names[order]
            values = state_dict["state"].get(key) if isinstance(key, int | str) else None
            slot = OptimizerSlot(name, number, group, values if isinstance(values, dict) else {})
            paths = {slot_key: (*path, "state", key, slot_key) for slot_key in slot.values if isinstance(slot_key, str)}
            nested = slot.values.get(QUANTIZED_STATE)
            if isinstance(nested, dict):
                names_within = (name for name in nested if isinstance(name, str))
                paths |= {name: (*path, "state", key, QUANTIZED_STATE, name) for name in names_within}
            slot.leaves = {key: leaves_by_path[target] for key, target in paths.items() if target in leaves_by_path}
            slots.append(slot)
    return slots


def _stored_name(leaf: Leaf) -> str:
    return leaf.name or str(leaf.reference[0])


@lru_cache(maxsize=1024)
def _is_gradient_key(key: str) -> bool:
    return _GRADIENT.fullmatch(key) is not None


def _module_role(leaf: Leaf, state_dicts: Collection[StatePath] = ()) -> Role:
    """The role of a tensor outside all optimizers.

    In a module's state dict a tensor of two axes is a parameter whatever its name (`pos_embed`, `cls_token`), unless
    that is a common name of buffers.
    """
    keys = [key for key in leaf.path if isinstance(key, str)]
    last = keys.pop() if keys else ""
    if _GRADIENT.fullmatch(last) or (keys and any(map(_is_gradient_key, keys))):
        return Role.GRADIENT
    if _BUFFER.search(last):
        return Role.BUFFER
    if keys and any(map(is_master_key, keys)) and _is_weight(leaf):
        return Role.MASTER
    looks_like_a_name = "." in last or last in ("weight", "bias")
    if not looks_like_a_name and leaf.path[:-1] in state_dicts:
        looks_like_a_name = leaf.tensor.dim() >= 2 and not _CONSTANT.search(last.lower())
    return Role.PARAMETER if looks_like_a_name and _is_weight(leaf) else Role.OTHER


def _is_weight(leaf: Leaf) -> bool:
    return leaf.tensor.dim() >= 1 and (leaf.tensor.is_floating_point() or leaf.tensor.is_complex())


@dataclass
class ParameterSet:
    """A dict outside all optimizers with the tensors below it that may be parameters, each once, in order."""

    path: StatePath
    leaves: list[Leaf] = field(default_factory=list)
    position: int = 0  # of the first leaf in the state
    is_average: bool = False  # it is named like a moving average, which has no optimizer

    @cached_property
    def _leaves_by_name(self) -> dict[str, Leaf]:
        return {".".join(map(format_key, leaf.path[len(self.path) :])): leaf for leaf in self.leaves}

    def find(self, name: str) -> Leaf | None:
        """The leaf of a name; dots and levels of the nest are equivalent."""
        names = (prefix + name for prefix in ("", "module.", "_orig_mod."))
        return next((self._leaves_by_name[name] for name in names if name in self._leaves_by_name), None)


def _parameter_sets(leaves: Sequence[Leaf]) -> list[ParameterSet]:
    """Every nest that may be the model of an optimizer; moving averages last."""
    models: dict[StatePath, ParameterSet] = {}
    names: dict[StatePath, set[str]] = {}
    for position, leaf in enumerate(leaves):
        if not leaf.name or not _is_weight(leaf) or _BUFFER.search(format_key(leaf.path[-1] if leaf.path else "")):
            continue
        for depth in range(len(leaf.path)):
            path = leaf.path[:depth]
            model = models.get(path)
            if model is None:
                is_average = any(_AVERAGE.search(format_key(key)) for key in path)
                model = models[path] = ParameterSet(path, position=position, is_average=is_average)
                names[path] = set()
            if leaf.name not in names[path]:  # tied parameters count once
                names[path].add(leaf.name)
                model.leaves.append(leaf)
    return sorted(models.values(), key=lambda model: model.is_average)


@dataclass
class SlotMatch:
    """A matching of an optimizer's slots to the leaves of a model."""

    model: ParameterSet
    pairs: list[tuple[OptimizerSlot, Leaf]] = field(default_factory=list)
    num_named: int = 0  # pairs whose names agree

    @property
    def score(self) -> tuple[int, int, bool, int, int, int]:
        """Sort key: many pairs, many equal names, no moving average, few other leaves, the first one, the innermost."""
        model = self.model
        fits = len(self.pairs), self.num_named, not model.is_average, -len(model.leaves)
        return (*fits, -model.position, len(model.path))


def _best_match(slots: Sequence[OptimizerSlot], models: Sequence[ParameterSet], matched: Collection[int]) -> SlotMatch:
    """The best match among leaves that no optimizer before has; if that leaves slots without one, among all."""
    shaped = [slot for slot in slots if slot.shape is not None]
    matches: dict[int, SlotMatch] = {}
    pairs = 0
    for index in sorted(range(len(models)), key=lambda index: -len(models[index].leaves)) if shaped else ():
        if len(models[index].leaves) < max(pairs, 1):
            break  # all remaining nests have too few leaves
        matches[index] = _align(shaped, models[index], matched)
        pairs = max(pairs, len(matches[index].pairs))
    no_match = SlotMatch(ParameterSet(()))
    best = max((matches[index] for index in sorted(matches)), key=lambda match: match.score, default=no_match)
    best = best if best.pairs else no_match
    if not matched or len(best.pairs) == len(shaped):
        return best
    return max(best, _best_match(slots, models, ()), key=lambda match: len(match.pairs))


def _align(slots: Sequence[OptimizerSlot], model: ParameterSet, excluded: Collection[int]) -> SlotMatch:
    """Pair slots and leaves of equal shape: by name if the optimizer has names, else in order within each group.

    Args:
        excluded: ids of leaves that are paired by name alone.
    """
    match = SlotMatch(model)
    free: dict[tuple[int, ...], deque[int]] = {}
    for position, leaf in enumerate(model.leaves):
        if id(leaf) not in excluded:
            free.setdefault(tuple(leaf.tensor.shape), deque()).append(position)
    group, after = -1, 0
    for slot in slots:
        group, after = slot.group, after if slot.group == group else 0
        named = model.find(slot.name) if slot.name else None
        if named is not None and tuple(named.tensor.shape) == slot.shape:
            match.pairs.append((slot, named))
            match.num_named += 1
        elif positions := free.get(slot.shape or ()):
            if positions[0] >= after:  # the common case
                position = after = positions.popleft()
            elif (index := bisect_left(positions, after)) < len(positions):
                position = after = positions[index]
                del positions[index]
            else:  # out of order: take any
                position = positions.popleft()
            match.pairs.append((slot, model.leaves[position]))
    return match


def _group_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The fields of `OptimizerInfo` that all parameters of a group share."""
    betas = settings.get("betas")
    decays = settings.get("momentum"), settings.get("alpha", settings.get("rho"))
    beta1, beta2 = betas if isinstance(betas, tuple | list) and len(betas) == 2 else decays
    rates = [rate for key in ("lr", "initial_lr", "max_lr") if (rate := _number(settings.get(key))) is not None]
    return {
        "lr": _number(settings.get("lr")),
        "peak_lr": max(rates, default=None),
        "beta1": _number(beta1),
        "beta2": _number(beta2),
        "eps": _number(settings.get("eps")),
        "weight_decay": _number(settings.get("weight_decay")),
        "decoupled": bool(settings.get("decoupled_weight_decay", True)),
    }


def _optimizer_info(slot: OptimizerSlot, settings: dict[str, Any]) -> OptimizerInfo:
    step = _number(slot.values.get("step", slot.settings.get("step")))
    factors = [leaf.name for leaf in slot.factors or ()]
    blocks = [slot.leaves[key] for key in SECOND_MOMENT_BLOCKS if key in slot.leaves and slot.leaves[key].name]
    has_blocks = len(blocks) == len(SECOND_MOMENT_BLOCKS) and blocks[0].tensor.dtype == torch.uint8
    unknown = MomentKind.UNKNOWN
    squares = [key for key in SQUARE_MEANS if slot.kinds.get(key, unknown) is not unknown]
    return OptimizerInfo(
        moment1=_moment(slot, *FIRST_MOMENTS),
        moment2=_moment(slot, *SECOND_MOMENTS),
        step=None if step is None else int(step),
        factors=(factors[0], factors[1]) if factors and all(factors) else None,
        blocks=(blocks[0].name, blocks[1].name, blocks[2].name) if has_blocks else None,
        squares=_moment(slot, *squares),
        **settings,
    )


def _moment(slot: OptimizerSlot, *keys: str) -> str | None:
    for key in keys:
        if key in slot.leaves and slot.leaves[key].name:
            return slot.leaves[key].name
    return None


def _number(value: Any) -> float | None:
    """A finite number as float, also from a tensor of one element; else None."""
    if isinstance(value, torch.Tensor):
        try:
            value = value.item() if value.numel() == 1 and not value.is_complex() else None
        except NotImplementedError:  # torch has no numbers of some narrow dtypes
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < float("inf") else None
