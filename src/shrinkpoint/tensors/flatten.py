"""Flattens states to a tree and tensors, and unflattens them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shrinkpoint.guard import no_gc, read_guard
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON, Role, TensorInfo
from shrinkpoint.tensors.roles import infer_roles
from shrinkpoint.tensors.shared_storage import deduplicate
from shrinkpoint.tensors.tree_decode import MAX_COPY_BYTES, TreeDecoder
from shrinkpoint.tensors.tree_encode import TreeEncoder


def flatten(state: Any) -> FlatState:
    """Split a state into a JSON tree and named tensors. Nothing is copied; the caller's tensors do not change.

    Raises:
        StateError: something in it cannot be stored; `where` is its path.
    """
    with no_gc():
        encoder = TreeEncoder()
        tree = encoder.encode(state)
        tensors = deduplicate(encoder.leaves)
        roles, optimizer_info = infer_roles(encoder.leaves, encoder.optimizers)
        infos = {
            name: TensorInfo(name, tuple(tensor.shape), dtype_name(tensor.dtype), roles.get(name, Role.OTHER))
            for name, tensor in tensors.items()
        }
        return FlatState(tree, tensors, infos, optimizer_info)


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
        tie: whether tensors that shared memory share it again; otherwise each gets its own (expanded dimensions stay).
        where: the file, for messages.
        max_bytes: memory limit of the copies; None: 1 GiB, or 8 times the bytes of the tensors if that is more.

    Raises:
        CorruptError: no release writes such a tree, the tensors do not fit it, or copies would exceed `max_bytes`.
    """
    if max_bytes is None:
        max_bytes = max(MAX_COPY_BYTES, 8 * sum(tensor.nbytes for tensor in tensors.values()))
    with read_guard(where), no_gc():
        return TreeDecoder(tensors, tie=tie, where=where, max_bytes=max_bytes).decode(tree)
