"""The flattened form of a state, and snapshots of it in CPU memory."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shrinkpoint._native import stream_copy
from shrinkpoint.guard import no_gc, read_guard
from shrinkpoint.tensors.dtypes import as_bits, dtype_name, empty, tensor_bytes
from shrinkpoint.tensors.info import JSON, OptimizerInfo, Role, TensorInfo, shared_info
from shrinkpoint.tensors.memory import Arena, wait_for_devices
from shrinkpoint.tensors.optimizers import MomentKind, drop_optimizer_state
from shrinkpoint.tensors.roles import infer_roles
from shrinkpoint.tensors.tree import TreeEncoder, deduplicate
from shrinkpoint.tensors.tree_decoder import MAX_COPY_BYTES, TreeDecoder

_MIN_STREAMED_BYTES = 1 << 16
"""Bytes of a tensor from which it is copied past the caches: its copy is read later than they hold it."""


@dataclass(frozen=True)
class FlatState:
    """A state as a JSON tree without tensors, and the tensors by name, every storage once."""

    tree: JSON  # the nest as JSON, tensors replaced by references (`docs/format.md`)
    # By name, detached views of the caller's memory (after `snapshot`, copies); any device and strides.
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    # Name, shape, dtype and role of each tensor; the same keys in the same order.
    infos: dict[str, TensorInfo] = field(repr=False)
    # By name of a parameter; empty if the state has no optimizer.
    optimizer_info: dict[str, OptimizerInfo] = field(repr=False)
    # By name of a tensor that an optimizer keeps for a parameter.
    moment_kinds: dict[str, MomentKind] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each storage once."""
        return sum(info.nbytes for info in self.infos.values())

    @property
    def is_on_cpu(self) -> bool:
        """True if all tensors are in host memory."""
        return all(tensor.device.type == "cpu" for tensor in self.tensors.values())


def snapshot(
    state: FlatState,
    *,
    reuse: Mapping[str, torch.Tensor] | None = None,
    without: Collection[str] = frozenset(),
    wait: bool = True,
) -> FlatState:
    """Copy a state: every tensor gets contiguous CPU memory of its own.

    Args:
        state: tensors on any device.
        reuse: tensors of earlier snapshots that are no longer needed; their memory is overwritten where name, shape
            and dtype agree, which saves the page faults of new memory.
        without: names of tensors whose values nobody needs; the copy has their shapes and dtypes only.
        wait: False: values from CUDA devices may arrive later, when this thread's streams there have got so far.
    """
    copies = copy_tensors({name: tensor for name, tensor in state.tensors.items() if name not in without}, reuse)
    copies = {
        name: copies[name] if name in copies else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in state.tensors.items()
    }
    if wait:
        wait_for_devices(state.tensors.values())  # copies to pinned memory are asynchronous
    return replace(state, tensors=copies)


def can_copy_on_devices(state: FlatState) -> bool:
    """True if there is memory for a copy of the state where it is.

    On a CUDA device the copy must leave as much memory free as it takes: what training allocates may vary.
    """
    sizes = Counter[torch.device]()
    for tensor in state.tensors.values():
        sizes[tensor.device] += tensor.nbytes
    return all(2 * size <= _free_bytes(device) for device, size in sizes.items())


def copy_on_devices(state: FlatState) -> FlatState | None:
    """Copy a state to where it is, contiguous; None if there is no memory for that."""
    if not can_copy_on_devices(state):
        return None
    try:
        copies = {
            name: as_bits(tensor).clone(memory_format=torch.contiguous_format).view(tensor.dtype)
            for name, tensor in state.tensors.items()
        }
    except torch.OutOfMemoryError:
        return None
    return replace(state, tensors=copies)


def _free_bytes(device: torch.device) -> float:
    """Memory of a device that neither this process nor another has taken; of the host, whatever is asked for."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return math.inf if device.type == "cpu" else 0


@torch.no_grad()
def copy_tensors(
    tensors: Mapping[str, torch.Tensor], reuse: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Copy tensors to contiguous CPU memory; values from CUDA devices may arrive later.

    Args:
        reuse: tensors whose memory is overwritten where name, shape and dtype agree.
    """
    old, arena = reuse or {}, Arena()
    copies: dict[str, torch.Tensor] = {}
    streamed, small = list[str](), list[str]()
    for name, tensor in tensors.items():
        target = copies[name] = _usable_target(tensor, old.get(name), arena)
        is_plain = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if is_plain and target.is_contiguous():
            (streamed if tensor.nbytes >= _MIN_STREAMED_BYTES else small).append(name)
        else:
            as_bits(target).copy_(as_bits(tensor), non_blocking=tensor.is_cuda)
    sources, targets = ([group[name] for name in streamed] for group in (tensors, copies))
    stream_copy(sources, targets, torch.get_num_threads())
    if small:
        torch._foreach_copy_([copies[name] for name in small], [tensors[name] for name in small])
    return copies


def _usable_target(tensor: torch.Tensor, target: torch.Tensor | None, arena: Arena) -> torch.Tensor:
    """`target` if its memory, shape and dtype are usable for a copy of a tensor; else new memory."""
    shape = tuple(tensor.shape)
    if target is not None and not target.is_meta and target.dtype == tensor.dtype and tuple(target.shape) == shape:
        return target
    if tensor.is_cuda or tensor.numel() == 0:
        return empty(shape, tensor.dtype, pin=tensor.is_cuda)
    return torch.from_numpy(arena.allocate(tensor.nbytes)).view(tensor.dtype).reshape(shape)


def allocate_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Allocate CPU tensors of these shapes and dtypes, every page of which has been touched.

    Raises:
        MemoryError: there is not enough.
    """
    arena = Arena()
    copies = {name: _usable_target(tensor, None, arena) for name, tensor in tensors.items()}
    for copy in copies.values():
        tensor_bytes(copy)[:: mmap.PAGESIZE] = 0
    return copies


def flatten(state: Any) -> FlatState:
    """Split a state into a JSON tree and named tensors. Nothing is copied; the caller's tensors do not change.

    Raises:
        StateError: something in it cannot be stored; `where` is its path.
    """
    with no_gc():
        encoder = TreeEncoder()
        tree = encoder.encode(state)
        tensors = deduplicate(encoder.leaves)
        encoder.count_references()
        inferred = infer_roles(encoder.leaves, encoder.optimizers)
        infos = {
            name: shared_info(name, tuple(tensor.shape), dtype_name(tensor.dtype), inferred.roles.get(name, Role.OTHER))
            for name, tensor in tensors.items()
        }
        return FlatState(tree, tensors, infos, inferred.optimizer_info, inferred.moment_kinds)


def without_optimizer_state(state: Any) -> FlatState:
    """Flattens a state without what its optimizers keep for each parameter, except master weights.

    Args:
        state: dicts in it are changed.
    """
    roles = {name: info.role for name, info in flatten(state).infos.items()}  # moments tell parameters from others
    drop_optimizer_state(state)
    flat = flatten(state)
    infos = {name: replace(info, role=roles.get(name, info.role)) for name, info in flat.infos.items()}
    return replace(flat, infos=infos)


def unflatten(
    tree: JSON,
    tensors: Mapping[str, torch.Tensor],
    *,
    tie: bool = True,
    where: str = "state",
    max_bytes: int | None = None,
) -> Any:
    """Rebuild a state from its tree and tensors.

    The tensors of the result are those of `tensors`, or views of them; numpy arrays and bytes are copies.

    Args:
        tree: the tree; need not be trusted.
        tensors: by name, contiguous; on any device.
        tie: True if tensors that shared memory share it again; otherwise each gets its own (expanded dimensions stay).
        where: the file, for messages.
        max_bytes: memory limit of the copies; None: 1 GiB, or 8 times the bytes of the tensors if that is more.

    Raises:
        CorruptError: no release writes such a tree, the tensors do not fit it, or copies would exceed `max_bytes`.
    """
    if max_bytes is None:
        max_bytes = max(MAX_COPY_BYTES, 8 * sum(tensor.nbytes for tensor in tensors.values()))
    with read_guard(where), no_gc():
        return TreeDecoder(tensors, tie=tie, where=where, max_bytes=max_bytes).decode(tree)
