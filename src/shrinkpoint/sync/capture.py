"""Copies of a model's tensors in CPU memory, as they are published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from shrinkpoint.tensors.dtypes import dtype_name, empty
from shrinkpoint.tensors.flat_state import FlatState, copy_tensors
from shrinkpoint.tensors.memory import wait_for_devices

_CAST_FROM = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def published_dtype(dtype: torch.dtype, cast: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is published: the floating-point ones of 16 bits and more are cast."""
    return dtype if cast is None or dtype not in _CAST_FROM else cast


def capture(state: FlatState, cast: torch.dtype | None, reuse: Mapping[str, Tensor] | None = None) -> FlatState:
    """A copy of a state in CPU memory of its own.

    Args:
        cast: as for `published_dtype`.
        reuse: tensors that are no longer needed, whose memory is overwritten where it fits.
    """
    old, infos = reuse or {}, dict(state.infos)
    casts = {name for name, x in state.tensors.items() if published_dtype(x.dtype, cast) != x.dtype}
    copies = copy_tensors({name: tensor for name, tensor in state.tensors.items() if name not in casts}, old)
    with torch.no_grad():
        for name in casts:
            assert cast is not None
            source, target = state.tensors[name], old.get(name)
            if target is None or target.dtype != cast or target.shape != source.shape:
                target = empty(tuple(source.shape), cast, pin=source.is_cuda)
            copies[name] = target.copy_(source)
            infos[name] = replace(infos[name], dtype=dtype_name(cast))
    wait_for_devices(state.tensors.values())
    return replace(state, tensors={name: copies[name] for name in state.tensors}, infos=infos)
