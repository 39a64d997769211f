"""The state of an outer optimizer in messages: a text of plain values, and tensors."""

from __future__ import annotations

import ast
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shrinkpoint.errors import PolicyError

_TENSOR = "tensor of the outer optimizer"
"""The key of what stands for a tensor in the text."""


def describe_state(optimizer: Optimizer) -> tuple[str, list[Tensor]]:
    """The state of an optimizer as a Python literal, and the tensors that belong into it, in their order.

    Raises:
        PolicyError: it holds something that is neither a tensor nor plain values.
    """
    tensors: list[Tensor] = []
    text = repr(_without_tensors(optimizer.state_dict(), tensors))
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        found, expected = f"a state that is not plain: {text[:80]}", "tensors, numbers, texts, lists and dicts"
        do = "take OuterSGD, or an optimizer of torch"
        raise PolicyError("LocalSteps, outer", found=found, expected=expected, do=do) from error
    return text, tensors


def broadcast_tensors(
    text: str, tensors: list[Tensor], device: torch.device, source: int, group: dist.ProcessGroup
) -> dict[str, Any]:
    """The state of the optimizer that a rank of the group has described.

    Args:
        text: that of the source, on all ranks.
        tensors: those of the source; on other ranks they are not used.
        device: where all ranks have what they send.
    """
    remaining, is_source = iter(tensors), group.rank() == source

    def receive(dtype: str, shape: tuple[int, ...], device_type: str) -> Tensor:
        if is_source:
            tensor = next(remaining).to(device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        dist.broadcast(tensor, dist.get_global_rank(group, source), group)
        return tensor.cpu() if device_type == "cpu" else tensor

    state: dict[str, Any] = _with_tensors(ast.literal_eval(text), receive)
    return state


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TENSOR: (str(value.dtype).removeprefix("torch."), tuple(value.shape), value.device.type)}
    if isinstance(value, dict):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(item, tensors) for item in value)
    return value


def _with_tensors(value: Any, receive: Any) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return receive(*value[_TENSOR])
        return {key: _with_tensors(item, receive) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(item, receive) for item in value)
    return value
