"""The flattened form of a state, and snapshots of it in CPU memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from shrinkpoint.tensors.dtypes import as_bits, empty
from shrinkpoint.tensors.info import JSON, TensorInfo


@dataclass(frozen=True)
class OptimizerInfo:
    """Optimizer settings and moments of one parameter; a hint for coders, never needed to decode.

    Attributes:
        moment1: name of the first moment (Adam's exp_avg, SGD's momentum_buffer) in the same `FlatState`.
        moment2: name of the second moment (exp_avg_sq).
        step: number of updates so far.
        lr: learning rate at the moment of the save.
        beta1: decay of the first moment per step.
        beta2: decay of the second moment per step.
        eps: the optimizer's epsilon.
        weight_decay: the coefficient; per step and lr if decoupled.
        decoupled: whether weight decay acts on the weights (AdamW) or through the gradient (Adam).
        factors: names of the row and column means of squared gradients, over the last two axes (Adafactor).
        blocks: names of the 8-bit second moment: codes, codebook, and the maximum of each block (bitsandbytes).
    """

    moment1: str | None
    moment2: str | None
    step: int | None
    lr: float | None
    beta1: float | None
    beta2: float | None
    eps: float | None
    weight_decay: float | None
    decoupled: bool
    factors: tuple[str, str] | None = None
    blocks: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class FlatState:
    """A state as a JSON tree without tensors, and the tensors by name, every storage once.

    Attributes:
        tree: the nest as JSON, tensors replaced by references (`docs/format.md`).
        tensors: by name, detached views of the caller's memory (after `snapshot`, copies); any device and strides.
        infos: name, shape, dtype and role of each tensor; the same keys in the same order.
        optimizer_info: by name of a parameter; empty if the state has no optimizer.
    """

    tree: JSON
    tensors: dict[str, torch.Tensor] = field(repr=False)
    infos: dict[str, TensorInfo] = field(repr=False)
    optimizer_info: dict[str, OptimizerInfo] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each storage once."""
        return sum(info.nbytes for info in self.infos.values())

    @property
    def is_on_cpu(self) -> bool:
        """Whether all tensors are in host memory."""
        return all(tensor.device.type == "cpu" for tensor in self.tensors.values())


def snapshot(state: FlatState, *, reuse: FlatState | None = None) -> FlatState:
    """Copy a state: every tensor gets contiguous CPU memory of its own.

    Args:
        state: tensors on any device.
        reuse: an earlier snapshot that is no longer needed; its memory is overwritten where name, shape and dtype
            agree, which saves the page faults of new memory.
    """
    old = {} if reuse is None else reuse.tensors
    copies: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in state.tensors.items():
            copies[name] = _copy(tensor, old.get(name))
    if any(tensor.is_cuda for tensor in state.tensors.values()):
        torch.cuda.synchronize()  # copies to pinned memory are asynchronous
    return replace(state, tensors=copies)


def _copy(tensor: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    shape = tuple(tensor.shape)
    if target is None or target.dtype != tensor.dtype or tuple(target.shape) != shape:
        target = empty(shape, tensor.dtype, pin=tensor.is_cuda)
    as_bits(target).copy_(as_bits(tensor), non_blocking=tensor.is_cuda)
    return target
