"""Restores parts of a model: some of its tensors, or boxes, rows or single values of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.wrappers import match_state_keys
from shrinkpoint.train import state_alignment, state_dicts

TensorPart = EllipsisType | slice | Sequence[Any] | Tensor
"""A part of a tensor: `...`, all of it; a slice of its rows; a box, as a tuple of a slice or a (start, stop) for each
axis; row indices; a bool tensor of its shape."""
_Part = TensorPart | Callable[[str, Tensor], TensorPart | None]
RestoreSelection = Sequence[str] | Mapping[str, _Part]
"""Patterns of tensor names; or, by pattern, a part of the tensor, or a function of its name and value that returns
one."""
_TorchIndex = EllipsisType | tuple[slice, ...] | Tensor
_EXPECTED_PART = "..., a slice, a tuple of a slice for each axis, row indices, or a bool tensor of its shape"


@dataclass(frozen=True)
class RankShard:
    """The shard of one rank of parameters that `fully_shard` has split along an axis, as `torch.chunk` does.

    For `CheckpointManager.restore(only={"*": RankShard(2, 8)})`. Buffers have no shards: every rank holds all of them.

    Args:
        rank: number of the rank, from 0.
        world_size: number of ranks.
        axis: the axis that is split.

    Raises:
        PolicyError: there is no such rank or axis.
    """

    rank: int
    world_size: int
    axis: int = 0

    def __post_init__(self) -> None:
        world_size = validate.check_int("RankShard, world_size", self.world_size, do="pass the number of ranks")
        rank = validate.check_int(
            "RankShard, rank", self.rank, minimum=0, maximum=world_size - 1, do="count ranks from 0"
        )
        axis = validate.check_int("RankShard, axis", self.axis, minimum=0, do="count axes from 0, the first one")
        for name, value in (("rank", rank), ("world_size", world_size), ("axis", axis)):
            object.__setattr__(self, name, value)  # as int: one of numpy is no end of a slice

    def __call__(self, name: str, tensor: Tensor) -> TensorPart | None:
        if not isinstance(tensor, torch.nn.Parameter) or tensor.dim() <= self.axis:
            return None
        length = tensor.shape[self.axis]
        size = -(-length // self.world_size)
        start, stop = (min(length, rank * size) for rank in (self.rank, self.rank + 1))
        return None if start == stop else (*[slice(None)] * self.axis, slice(start, stop))


@dataclass(frozen=True)
class SelectedParts:
    """The parts of a model that are to be restored, checked against the live model."""

    live_state: Mapping[str, Any]  # the model's state dict
    indices: Mapping[str, _TorchIndex]  # by name, an index of the part that is restored; `...` is all of the tensor
    parameters: Mapping[str, Tensor]  # the parameters among these tensors, by name


def select_parts(targets: Mapping[str, Any], only: RestoreSelection) -> SelectedParts:
    """The parts that `only` selects of the objects that were passed to a restore.

    Args:
        targets: the live objects by name: "model", and perhaps "optimizer".

    Raises:
        PolicyError: other objects than a model and its optimizer; a pattern without a match; a part that the tensor
            does not have.
    """
    if not {"model"} <= set(targets) <= {"model", "optimizer"} or not hasattr(targets["model"], "state_dict"):
        found, expected = ", ".join(targets) or "nothing", "model= alone, or with its optimizer=; a module"
        raise PolicyError("only", found=found, expected=expected, do="restore other objects in another call")
    optimizer = targets.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        found = f"{validate.type_name(optimizer)} as optimizer"
        raise PolicyError("only", found=found, expected="one optimizer of the model", do="leave it out")
    model = targets["model"]
    live_state: dict[str, Any] = dict(model.state_dict())
    named_parameters = getattr(model, "named_parameters", None)
    parameters: dict[str, Tensor] = {} if named_parameters is None else dict(named_parameters(remove_duplicate=False))
    indices: dict[str, _TorchIndex] = {}
    for name, part in _match_names(only, live_state):
        if name in indices and isinstance(only, Mapping):
            do = "pass patterns that do not overlap"
            raise PolicyError(f"only, {name}", found="two patterns that match it", expected="one pattern", do=do)
        index = _index_of_part(name, parameters.get(name, live_state[name]), part)
        if index is not None:
            indices[name] = index
    selected = {name: parameters[name] for name in indices.keys() & parameters.keys()}
    return SelectedParts(live_state, indices, selected)


def _match_names(only: RestoreSelection, live_state: Mapping[str, Any]) -> list[tuple[str, _Part]]:
    expected = 'patterns of names in the model, such as ["layers.3.*"]'
    if not isinstance(only, Mapping) and (isinstance(only, str) or not isinstance(only, Sequence)):
        do = f"pass only=[{only!r}]" if isinstance(only, str) else "pass a list, or a dict of parts by pattern"
        raise PolicyError("only", found=f"{only!r:.200}", expected=expected, do=do)
    patterns = only if isinstance(only, Mapping) else dict.fromkeys(only, ...)
    strange = [pattern for pattern in patterns if not isinstance(pattern, str)]
    if strange:
        raise PolicyError("only", found=f"{strange[0]!r:.200}", expected=expected, do="pass names as strings")
    matches = {pattern: [name for name in live_state if fnmatchcase(name, pattern)] for pattern in patterns}
    unmatched = [pattern for pattern, names in matches.items() if not names]
    if unmatched or not matches:
        raise PolicyError("only", found=repr(unmatched or only), expected=expected, do="see model.state_dict()")
    return [(name, patterns[pattern]) for pattern, names in matches.items() for name in names]


def restore_parts(
    selection: SelectedParts, targets: Mapping[str, Any], state: Any, where: str, *, strict: bool
) -> None:
    """Restore the selected parts, and the optimizer's slots for them; all else keeps its bits.

    Args:
        state: the state of the checkpoint.
        where: the checkpoint's name, for messages.

    Raises:
        MismatchError: the checkpoint does not fit; nothing was changed.
        PolicyError: the optimizer has none of the selected parameters.
    """
    for name in targets:
        if not isinstance(state, dict) or not isinstance(state.get(name), dict):
            do = "save it with a CheckpointManager, under that name"
            raise MismatchError(where, found=f"no {name!r} in the checkpoint", expected="what is to be restored", do=do)
    # A selected parameter that has no saved slots begins afresh, and slots of others do not matter.
    aligned = state_alignment.align_state(targets, state, where, strict=False)
    state, dtypes = aligned.state, aligned.saved_dtypes
    model, optimizer = targets["model"], targets.get("optimizer")
    merged = _merge_model_state(selection, state["model"], f"{where}, model", strict=strict)
    state_dicts.check_state_dicts(model, merged, f"{where}, model", strict=strict)
    updates: list[tuple[dict[Any, Any], Mapping[Any, Any]]] = []
    if optimizer is not None:
        place = f"{where}, optimizer"
        state_dicts.check_state_dicts(optimizer, state["optimizer"], place, strict=strict, saved_dtypes=dtypes)
        updates = list(_slot_updates(selection, optimizer, state["optimizer"]))
    state_dicts.load_state_dicts(model, merged, f"{where}, model", strict=strict)
    for current, values in updates:
        _update_slots(current, values)


def _merge_model_state(
    selection: SelectedParts, saved: Mapping[str, Any], where: str, *, strict: bool
) -> dict[str, Any]:
    """The live state of the model, with the saved values in the selected parts."""
    saved = match_state_keys(saved, selection.live_state)
    merged = dict(selection.live_state)
    for name, index in selection.indices.items():
        if name not in saved:
            expected = "all tensors that are to be restored"
            do = "restore names that were saved, or another step"
            raise MismatchError(f"{where}, {name}", found="no such tensor in the checkpoint", expected=expected, do=do)
        merged[name] = saved[name]
        if not isinstance(index, EllipsisType):
            state_dicts.check_tensor_fits(selection.live_state[name], saved[name], f"{where}, {name}", strict=strict)
            merged[name] = _merge_part(selection.live_state[name], saved[name], index)
    return merged


@torch.no_grad()
def _update_slots(current: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    """Give an optimizer's slots for one parameter new values, by name."""
    for slot in current.keys() - values.keys():
        del current[slot]
    for slot, value in values.items():
        live = current.get(slot)
        if isinstance(live, Tensor) and isinstance(value, Tensor) and live.shape == value.shape:
            live.copy_(value)
        else:
            current[slot] = value


def _slot_updates(
    selection: SelectedParts, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> Iterator[tuple[dict[Any, Any], Mapping[Any, Any]]]:
    """The slots in the optimizer, and the new ones, of each selected parameter."""
    indices = {id(parameter): selection.indices[name] for name, parameter in selection.parameters.items()}
    selected = [pair for pair in state_dicts.iter_slot_states(optimizer, saved) if id(pair[0]) in indices]
    if not selected:
        do = "pass the optimizer of these parameters, or none"
        raise PolicyError("only", found="an optimizer that has none of the selected parameters", do=do)
    for parameter, slots in selected:
        index, live = indices[id(parameter)], optimizer.state[parameter]
        if isinstance(index, EllipsisType):
            values = {slot: _copy_to_device(value, live.get(slot), parameter) for slot, value in slots.items()}
        else:
            values = {
                slot: _merge_slot(live.get(slot), slots.get(slot), parameter, index) for slot in {**live, **slots}
            }
        yield live, values


def _merge_slot(current: Any, saved: Any, parameter: Tensor, index: _TorchIndex) -> Any:
    """A slot with the saved values in the selected part, and the current ones elsewhere; missing values are zero."""
    has_part, saved_has_part = (isinstance(slot, Tensor) and slot.shape == parameter.shape for slot in (current, saved))
    if not (has_part or saved_has_part):  # one value for the whole parameter
        return _copy_to_device(saved, None, parameter) if current is None else current
    live = current if has_part else torch.zeros_like(_copy_to_device(saved, None, parameter))
    return _merge_part(live, saved if saved_has_part else torch.zeros_like(live), index)


def _copy_to_device(value: Any, current: Any, parameter: Tensor) -> Any:
    """A copy on the device of the current value; without one, tensors with axes go where the parameter is."""
    if not isinstance(value, Tensor):
        return value
    device = current.device if isinstance(current, Tensor) else parameter.device if value.dim() else value.device
    return state_dicts.strided_as(parameter, value.to(device, copy=True))


@torch.no_grad()
def _merge_part(live: Tensor, saved: Tensor, index: _TorchIndex) -> Tensor:
    merged = live.detach().clone()
    live_index, saved_index = (
        index.to(tensor.device) if isinstance(index, Tensor) else index for tensor in (live, saved)
    )
    merged[live_index] = saved[saved_index].to(merged.device, merged.dtype)
    return merged


def _index_of_part(name: str, tensor: Any, part: _Part) -> _TorchIndex | None:
    """The torch index of a part of a tensor; None if the part is empty."""
    where = f"only, {name}"
    if callable(part):
        result = part(name, tensor)
        return None if result is None else _index_of_part(name, tensor, result)
    if isinstance(part, EllipsisType):
        return part
    if not isinstance(tensor, Tensor) or not tensor.dim():
        raise PolicyError(where, found="a value without axes", expected="a tensor with axes", do="pass ... for it")
    if isinstance(part, slice):
        return (_check_slice(part, tensor.shape[0], where),)
    if isinstance(part, tuple) and part and all(isinstance(side, slice | tuple | list) for side in part):
        return _box_slices(part, tensor, where)
    # The index of a bool tensor, or of row indices
    try:
        indices = torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        found, do = repr(part)[:200], "pass e.g. slice(0, 512)"
        raise PolicyError(where, found=found, expected=_EXPECTED_PART, do=do) from error
    if indices.dtype == torch.bool and indices.shape == tensor.shape:
        return indices
    is_integer = not (indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool)
    if not is_integer or indices.dim() != 1 or not indices.numel():
        found = f"{indices.dtype} of shape {list(indices.shape)} for a tensor of {list(tensor.shape)}"
        raise PolicyError(where, found=found, expected=_EXPECTED_PART, do="pass e.g. slice(0, 512)")
    if int(indices.min()) < 0 or int(indices.max()) >= tensor.shape[0]:
        found = f"rows {int(indices.min())} to {int(indices.max())}"
        expected = f"rows from 0 to {tensor.shape[0] - 1}"
        raise PolicyError(where, found=found, expected=expected, do="pass rows of the tensor")
    return indices.to(torch.int64)


def _box_slices(part: tuple[Any, ...], tensor: Tensor, where: str) -> tuple[slice, ...]:
    if any(not isinstance(side, slice) and len(side) != 2 for side in part):
        do = "pass e.g. (slice(0, 512), (0, 64))"
        raise PolicyError(where, found=repr(part)[:200], expected=_EXPECTED_PART, do=do)
    if len(part) > tensor.dim():
        found, expected = f"a box of {len(part)} axes", f"at most the {tensor.dim()} of the tensor"
        raise PolicyError(where, found=found, expected=expected, do="leave the other axes out")
    return tuple(
        _check_slice(side if isinstance(side, slice) else slice(*side), length, f"{where}, axis {axis}")
        for axis, (side, length) in enumerate(zip(part, tensor.shape, strict=False))
    )


def _check_slice(rows: slice, length: int, where: str) -> slice:
    ends = [end for end in (rows.start, rows.stop) if end is not None]
    is_integer = all(type(end) is int for end in ends) and (rows.step is None or type(rows.step) is int)
    if not is_integer or (rows.step or 1) < 1 or any(not -length <= end <= length for end in ends):
        do = "pass e.g. slice(0, 512)"
        raise PolicyError(where, found=repr(rows), expected=f"a slice within {length}, of a step of 1 or more", do=do)
    if not range(*rows.indices(length)):
        do = "leave this tensor out, or pass some of its rows"
        raise PolicyError(where, found=f"{rows!r}, which is empty within {length}", expected="some rows", do=do)
    return slice(*rows.indices(length))
