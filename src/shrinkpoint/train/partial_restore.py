"""Parts of a model that come back while the rest stays: tensors, and boxes, rows or single values of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.train import state_dicts

TensorPart = EllipsisType | slice | Sequence[Any] | Tensor
"""Of one tensor: `...`, all of it; a slice of its rows, or a tuple of a slice or a (start, stop) for each axis, a box;
numbers of rows; a bool tensor of its shape."""
RestoreSelection = Sequence[str] | Mapping[str, TensorPart | Callable[[str, Tensor], TensorPart | None]]
"""Patterns of names; or, by pattern, which part of a tensor, or a function of its name and itself that says so."""
_TorchIndex = EllipsisType | tuple[slice, ...] | Tensor
_EXPECTED_PART = "..., a slice, a tuple of a slice for each axis, numbers of rows, or a bool tensor of its shape"


@dataclass(frozen=True)
class RankShard:
    """What a rank holds of parameters that `fully_shard` has split: a run of rows, split as `torch.chunk` splits.

    For `Manager.restore(only={"*": RankShard(2, 8)})`. Buffers are held by every rank: nothing of them is lost.

    Args:
        rank: from 0.
        world_size: among which parameters are split.
        axis: along which.

    Raises:
        PolicyError: there is no such rank.
    """

    rank: int
    world_size: int
    axis: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            found, expected = f"rank {self.rank} of {self.world_size}", "a rank from 0 to one less than there are"
            raise PolicyError("RankShard", found=found, expected=expected)

    def __call__(self, name: str, tensor: Tensor) -> TensorPart | None:
        if not isinstance(tensor, torch.nn.Parameter) or tensor.dim() <= self.axis:
            return None
        length = tensor.shape[self.axis]
        size = -(-length // self.world_size)
        start, stop = (min(length, rank * size) for rank in (self.rank, self.rank + 1))
        return None if start == stop else (*[slice(None)] * self.axis, slice(start, stop))


@dataclass(frozen=True)
class SelectedParts:
    """What is to come back, checked against the live model.

    Attributes:
        live_state: the model's state.
        indices: by name, where; `...` is everywhere.
        parameters: those among them, by name.
    """

    live_state: Mapping[str, Any]
    indices: Mapping[str, _TorchIndex]
    parameters: Mapping[str, Tensor]


def select_parts(targets: Mapping[str, Any], only: RestoreSelection) -> SelectedParts:
    """What `only` says, of the live objects that were passed to a restore.

    Raises:
        PolicyError: something else than a model and its optimizer; a pattern that fits nothing; a part that no tensor
            has.
    """
    model, optimizer = targets.get("model"), targets.get("optimizer")
    if not {"model"} <= set(targets) <= {"model", "optimizer"} or not hasattr(model, "state_dict"):
        found, expected = ", ".join(targets) or "nothing", "model= alone, or with its optimizer=; a module"
        raise PolicyError("only", found=found, expected=expected, do="restore the rest in a call of its own")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        found = f"a {type(optimizer).__name__} as optimizer"
        raise PolicyError("only", found=found, expected="one optimizer of the model", do="leave it out")
    assert model is not None
    live: dict[str, Any] = dict(model.state_dict())
    named = getattr(model, "named_parameters", None)
    parameters: dict[str, Tensor] = {} if named is None else dict(named(remove_duplicate=False))
    patterns = only if isinstance(only, Mapping) else dict.fromkeys([] if isinstance(only, str) else only, ...)
    fits = {pattern: [name for name in live if fnmatchcase(name, pattern)] for pattern in patterns}
    empty = [pattern for pattern, names in fits.items() if not names and isinstance(only, Mapping)]
    if empty or not any(fits.values()):
        expected = 'patterns of names in the model, such as ["layers.3.*"]'
        raise PolicyError("only", found=repr(empty or only), expected=expected, do="look at model.state_dict()")
    index: dict[str, _TorchIndex] = {}
    for pattern, name in ((pattern, name) for pattern, names in fits.items() for name in names):
        if name in index and isinstance(only, Mapping):
            raise PolicyError(f"only, {name}", found="two patterns that fit it", expected="one part of a tensor")
        found_index = _index_of_part(name, parameters.get(name, live[name]), patterns[pattern])
        if found_index is not None:
            index[name] = found_index
    return SelectedParts(live, index, {name: parameters[name] for name in index.keys() & parameters.keys()})


def restore_parts(
    selection: SelectedParts, targets: Mapping[str, Any], state: Any, where: str, *, strict: bool
) -> None:
    """Bring back what was chosen, and of the optimizer what belongs to it; all else stays bit for bit as it is.

    Raises:
        MismatchError: the checkpoint does not fit; nothing was changed.
        PolicyError: the optimizer has none of the parameters that were chosen.
    """
    for name in targets:
        if not isinstance(state, dict) or not isinstance(state.get(name), dict):
            do = "save it with a Manager, under that name"
            raise MismatchError(where, found=f"no {name!r} in the checkpoint", expected="what is to come back", do=do)
    model, optimizer = targets["model"], targets.get("optimizer")
    mixed = _merge_model_state(selection, state["model"], f"{where}, model", strict=strict)
    state_dicts.check_state_dicts(model, mixed, f"{where}, model", strict=strict)
    slots: list[_SlotUpdate] = []
    if optimizer is not None:
        state_dicts.check_state_dicts(optimizer, state["optimizer"], f"{where}, optimizer", strict=strict)
        slots = list(_slot_updates(selection, optimizer, state["optimizer"]))
    state_dicts.load_state_dicts(model, mixed, f"{where}, model", strict=strict)
    for one in slots:
        one.apply()


def _merge_model_state(
    selection: SelectedParts, saved: Mapping[str, Any], where: str, *, strict: bool
) -> dict[str, Any]:
    """The state of the model as it is to be."""
    mixed = dict(selection.live_state)
    for name, index in selection.indices.items():
        if name not in saved:
            expected = "the tensors that are to come back"
            raise MismatchError(f"{where}, {name}", found="nothing of it in the checkpoint", expected=expected)
        mixed[name] = saved[name]
        if not isinstance(index, EllipsisType):
            state_dicts.check_tensor_fits(selection.live_state[name], saved[name], f"{where}, {name}", strict=strict)
            mixed[name] = _merge_part(selection.live_state[name], saved[name], index)
    return mixed


@dataclass(frozen=True)
class _SlotUpdate:
    """What an optimizer keeps of one parameter, as it is to be.

    Attributes:
        current: what it keeps now, to be changed.
        values: all of it, by name.
    """

    current: dict[Any, Any]
    values: Mapping[Any, Any]

    @torch.no_grad()
    def apply(self) -> None:
        for slot in self.current.keys() - self.values.keys():
            del self.current[slot]
        for slot, value in self.values.items():
            own = self.current.get(slot)
            if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
                own.copy_(value)
            else:
                self.current[slot] = value


def _slot_updates(
    selection: SelectedParts, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> Iterator[_SlotUpdate]:
    places = {id(parameter): selection.indices[name] for name, parameter in selection.parameters.items()}
    found = [pair for pair in state_dicts.iter_slot_states(optimizer, saved) if id(pair[0]) in places]
    if not found:
        do = "pass the optimizer of these parameters, or none"
        raise PolicyError("only", found="an optimizer that has none of what is to come back", do=do)
    for parameter, state in found:
        index, own = places[id(parameter)], optimizer.state[parameter]
        if isinstance(index, EllipsisType):
            made = {slot: _copy_to_device(value, own.get(slot), parameter) for slot, value in state.items()}
        else:
            made = {slot: _merge_slot(own.get(slot), state.get(slot), parameter, index) for slot in {**own, **state}}
        yield _SlotUpdate(own, made)


def _merge_slot(current: Any, saved: Any, parameter: Tensor, index: _TorchIndex) -> Any:
    """A slot whose part is as saved: its other values, and one that has no such part, stay, or are what a start has."""
    shaped = [isinstance(one, Tensor) and one.shape == parameter.shape for one in (current, saved)]
    if not any(shaped):
        return _copy_to_device(saved, None, parameter) if current is None else current
    kept = current if shaped[0] else torch.zeros_like(_copy_to_device(saved, None, parameter))
    return _merge_part(kept, saved if shaped[1] else torch.zeros_like(kept), index)


def _copy_to_device(value: Any, current: Any, parameter: Tensor) -> Any:
    """A copy where the optimizer would have it: what has axes, where the parameter is."""
    if not isinstance(value, Tensor):
        return value
    device = current.device if isinstance(current, Tensor) else parameter.device if value.dim() else value.device
    return value.to(device, copy=True)


@torch.no_grad()
def _merge_part(live: Tensor, saved: Tensor, index: _TorchIndex) -> Tensor:
    """A copy of `live` whose part is that of `saved`."""
    out = live.detach().clone()
    here, there = (index.to(x.device) if isinstance(index, Tensor) else index for x in (live, saved))
    out[here] = saved[there].to(out.device, out.dtype)
    return out


def _index_of_part(
    name: str, tensor: Any, part: TensorPart | Callable[[str, Tensor], TensorPart | None]
) -> _TorchIndex | None:
    """A part as what torch indexes by; None: nothing of it.

    Raises:
        PolicyError: the tensor has no such part.
    """
    where = f"only, {name}"
    if callable(part):
        said = part(name, tensor)
        return None if said is None else _index_of_part(name, tensor, said)
    if isinstance(part, EllipsisType):
        return part
    if not isinstance(tensor, Tensor) or not tensor.dim():
        raise PolicyError(where, found="a value without axes", expected="a tensor that has parts", do="say ... for it")
    if isinstance(part, slice):
        return (_check_slice(part, tensor.shape[0], where),)
    if isinstance(part, tuple) and part and all(isinstance(one, slice | tuple | list) for one in part):
        return _box_slices(part, tensor, where)
    try:
        chosen = torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise PolicyError(where, found=repr(part)[:200], expected=_EXPECTED_PART) from error
    if chosen.dtype == torch.bool and chosen.shape == tensor.shape:
        return chosen
    is_whole = not (chosen.is_floating_point() or chosen.is_complex() or chosen.dtype == torch.bool)
    if not is_whole or chosen.dim() != 1 or not chosen.numel():
        found = f"{chosen.dtype} of shape {list(chosen.shape)} for a tensor of {list(tensor.shape)}"
        raise PolicyError(where, found=found, expected=_EXPECTED_PART)
    if int(chosen.min()) < 0 or int(chosen.max()) >= tensor.shape[0]:
        found = f"rows {int(chosen.min())} to {int(chosen.max())}"
        raise PolicyError(where, found=found, expected=f"rows from 0 to {tensor.shape[0] - 1}")
    return chosen.to(torch.int64)


def _box_slices(part: tuple[Any, ...], tensor: Tensor, where: str) -> tuple[slice, ...]:
    if any(not isinstance(one, slice) and len(one) != 2 for one in part):
        raise PolicyError(where, found=repr(part)[:200], expected=_EXPECTED_PART)
    if len(part) > tensor.dim():
        raise PolicyError(
            where, found=f"a box of {len(part)} axes", expected=f"at most the {tensor.dim()} of the tensor"
        )
    return tuple(
        _check_slice(one if isinstance(one, slice) else slice(*one), length, f"{where}, axis {axis}")
        for axis, (one, length) in enumerate(zip(part, tensor.shape, strict=False))
    )


def _check_slice(rows: slice, length: int, where: str) -> slice:
    ends = [end for end in (rows.start, rows.stop) if end is not None]
    is_whole = all(type(end) is int for end in ends) and (rows.step is None or type(rows.step) is int)
    if not is_whole or (rows.step or 1) < 1 or any(not -length <= end <= length for end in ends):
        raise PolicyError(where, found=repr(rows), expected=f"a slice within {length}, of a step of 1 or more")
    if not range(*rows.indices(length)):
        raise PolicyError(where, found=f"{rows!r}, which is nothing of {length}", expected="some of it")
    return slice(*rows.indices(length))
