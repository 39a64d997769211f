"""Gradients as 1-d tensors that share their memory, of whole parameters and of shards."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shrinkpoint.comm.gradient_layout import is_dense
from shrinkpoint.errors import MismatchError


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, which shares its memory; the tensor itself if it is not distributed."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
        return local


@torch.no_grad()
def flat_gradient(parameter: Tensor) -> Tensor:
    """The values of a gradient, or of this rank's shard of it, in memory order; it is created if there is none.

    Values are in the order in which DDP and FSDP lay them out. Complex values are pairs.

    Raises:
        MismatchError: the gradient has a layout of its own.
    """
    if parameter.grad is None:
        keeps_order = isinstance(parameter, DTensor) or is_dense(parameter)
        memory_format = torch.preserve_format if keeps_order else torch.contiguous_format
        parameter.grad = torch.empty_like(parameter, memory_format=memory_format)
    gradient, own = local_tensor(parameter.grad), local_tensor(parameter)
    if gradient.stride() != own.stride() and not gradient.is_contiguous():
        found, advice = f"a gradient with strides {gradient.stride()}", "zero gradients with set_to_none=True"
        raise MismatchError("journal", found=found, expected=f"{own.stride()}", do=advice)
    flat = gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
