"""The two verbs: a state to what is stored of it, and back."""

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
    """Take a nest apart. Nothing is copied, the caller's tensors are not changed.

    Raises:
        StateError: when something in it cannot be stored; `where` is its path.
    """
    with no_gc():
        planter = TreeEncoder()
        tree = planter.encode(state)
        tensors = deduplicate(planter.leaves)
        roles, optim = infer_roles(planter.leaves, planter.optimizers)
        infos = {
            name: TensorInfo(name, tuple(tensor.shape), dtype_name(tensor.dtype), roles.get(name, Role.OTHER))
            for name, tensor in tensors.items()
        }
        return FlatState(tree, tensors, infos, optim)


def unflatten(
    tree: JSON,
    tensors: Mapping[str, torch.Tensor],
    *,
    tie: bool = True,
    where: str = "state",
    max_bytes: int | None = None,
) -> Any:
    """Put a nest together again.

    The tensors of the result *are* those of `tensors`, or views of them; numpy arrays and bytes are copies.

    Args:
        tree: as `flatten` made it, or as anybody forged it.
        tensors: contiguous, by name; on any device.
        tie: what shared memory shares it again. Otherwise every tensor has its own (an expanded tensor still meets
            itself).
        where: the file, for messages.
        max_bytes: how much memory the copies may take; None: 1 GiB, or 8 times what the tensors do if that is more.

    Raises:
        CorruptError: when no release writes such a tree, the tensors do not fit it, or copies would take too much.
    """
    if max_bytes is None:
        max_bytes = max(MAX_COPY_BYTES, 8 * sum(tensor.nbytes for tensor in tensors.values()))
    with read_guard(where), no_gc():
        return TreeDecoder(tensors, tie=tie, where=where, max_bytes=max_bytes).decode(tree)
