"""The tensors of a model that are published and followed, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, StateError
from shrinkpoint.tensors.dtypes import dtype_name, empty
from shrinkpoint.tensors.flat_state import FlatState, copy_tensors, flatten
from shrinkpoint.tensors.memory import wait_for_devices
from shrinkpoint.tensors.wrappers import unwrapped

AnyModel: TypeAlias = nn.Module | Mapping[str, Tensor]
"""A module, or its `state_dict()`."""
_CAST_FROM = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def model_tensors(model: AnyModel, where: str = "model") -> dict[str, Tensor]:
    """The tensors of a module's `state_dict()` by name, which share the module's memory.

    What DistributedDataParallel, DataParallel and torch.compile put around a module is taken off.

    Raises:
        PolicyError: neither a module nor a mapping.
        StateError: a value is not a plain tensor, such as a DTensor or the extra state of a module.
    """
    expected, do = "a module, or its state_dict()", "pass the model"
    validate.check_instance(where, model, (nn.Module, Mapping), expected=expected, do=do)
    tensors = unwrapped(model).state_dict() if isinstance(model, nn.Module) else model
    for name, tensor in tensors.items():
        if not isinstance(name, str) or type(tensor) not in (Tensor, nn.Parameter):
            do = "publish plain tensors: of a sharded model, its full state dict on one rank"
            raise StateError(f"{where}[{name!r}]", found=validate.type_name(tensor), expected="a torch.Tensor", do=do)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def check_own_memory(model: AnyModel, tensors: Mapping[str, Tensor]) -> None:
    """Make sure that writing to the tensors of a module changes the module.

    Raises:
        MismatchError: its `state_dict()` has copies, as that of a quantized module or of one with hooks may.
    """
    if not isinstance(model, nn.Module):
        return
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in own:
            found, expected = f"a copy of {name!r} in the model's state_dict()", "its parameters and buffers themselves"
            do = "pass a dict of the tensors that are to be written, by their published names"
            raise MismatchError("model", found=found, expected=expected, do=do)


def capture(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, reuse: Mapping[str, Tensor] | None = None
) -> FlatState:
    """A copy of tensors in CPU memory of its own, tied ones once.

    Args:
        dtype: what floating-point tensors of 16 bits and more are cast to; None: nothing is cast.
        reuse: tensors that are no longer needed, whose memory is overwritten where it fits.

    Raises:
        StateError: a tensor cannot be stored.
    """
    state, old = flatten(dict(tensors)), reuse or {}
    casts = {
        name
        for name, tensor in state.tensors.items()
        if dtype not in (None, tensor.dtype) and tensor.dtype in _CAST_FROM
    }
    copies = copy_tensors({name: tensor for name, tensor in state.tensors.items() if name not in casts}, old)
    infos = dict(state.infos)
    with torch.no_grad():
        for name in casts:
            assert dtype is not None
            source, target = state.tensors[name], old.get(name)
            if target is None or target.dtype != dtype or target.shape != source.shape:
                target = empty(tuple(source.shape), dtype, pin=source.is_cuda)
            copies[name] = target.copy_(source)
            infos[name] = replace(infos[name], dtype=dtype_name(dtype))
    wait_for_devices(state.tensors.values())
    return replace(state, tensors={name: copies[name] for name in state.tensors}, infos=infos)
