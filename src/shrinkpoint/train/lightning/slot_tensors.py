"""Keeps the dtypes of what optimizers keep for parameters while Lightning, which gets a plain dict, loads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.tensors.tree import is_optimizer_state


class SlotTensor(Tensor):
    """A tensor whose `to` changes its device alone, and returns a plain tensor, as every other operation does.

    `Optimizer.load_state_dict` casts what it loads by `to`, to the dtype of the parameter.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """A plain tensor on another device."""
        kwargs.pop("dtype", None)
        devices = [argument for argument in args if not isinstance(argument, torch.dtype)]
        plain = self.as_subclass(Tensor)
        return plain.to(*devices, **kwargs) if devices or kwargs else plain


def keep_slot_dtypes(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Make tensors of optimizers `SlotTensor`s, in place, where their dtype is not that of all weights."""
    weights = {tensor.dtype for tensor in _iter_weights(checkpoint) if tensor.is_floating_point()}
    for state in _iter_optimizer_states(checkpoint):
        for slots in state["state"].values():
            for key, value in slots.items() if isinstance(slots, dict) else ():
                if key != "step":  # torch does not cast it
                    slots[key] = _convert(value, weights)
    return checkpoint


def _convert(value: Any, weights: set[torch.dtype]) -> Any:
    if type(value) is Tensor:
        return value if weights == {value.dtype} and value.dim() else value.as_subclass(SlotTensor)
    if isinstance(value, dict):
        return {key: _convert(member, weights) for key, member in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_convert(member, weights) for member in value)
    return value


def _iter_optimizer_states(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and is_optimizer_state(value):
        yield value
    elif isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _iter_optimizer_states(member)


def _iter_weights(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list) and not (isinstance(value, dict) and is_optimizer_state(value)):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _iter_weights(member)
