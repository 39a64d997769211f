"""A copy of a state in host memory, after which the caller may change the originals."""

from __future__ import annotations

from dataclasses import replace

import torch

from shrinkpoint.state.dtypes import empty, raw
from shrinkpoint.state.flat import FlatState


def snapshot(flat: FlatState, *, reuse: FlatState | None = None) -> FlatState:
    """The same state with every tensor in contiguous CPU memory of its own.

    Args:
        flat: tensors on any device.
        reuse: an earlier snapshot that nobody needs any more; its memory is overwritten where name, shape and dtype
            agree, which saves the page faults of fresh memory.
    """
    old = {} if reuse is None else reuse.tensors
    copies: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in flat.tensors.items():
            copies[name] = _copy(tensor, old.get(name))
    if any(tensor.is_cuda for tensor in flat.tensors.values()):
        torch.cuda.synchronize()  # copies to pinned memory are asynchronous
    return replace(flat, tensors=copies)


def _copy(tensor: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    shape = tuple(tensor.shape)
    if target is None or target.dtype != tensor.dtype or tuple(target.shape) != shape:
        target = empty(shape, tensor.dtype, pin=tensor.is_cuda)
    raw(target).copy_(raw(tensor), non_blocking=tensor.is_cuda)
    return target
