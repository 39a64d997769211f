"""The two verbs: a state to what is stored of it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shrinkpoint.collection import postponed
from shrinkpoint.guard import guarded
from shrinkpoint.record import JSON, Role, TensorInfo
from shrinkpoint.state.dtypes import dtype_name
from shrinkpoint.state.flat import FlatState
from shrinkpoint.state.grow import MAX_COPIES, Grower
from shrinkpoint.state.roles import infer
from shrinkpoint.state.ties import store_once
from shrinkpoint.state.tree import Planter


def flatten(state: Any) -> FlatState:
    """Take a nest apart. Nothing is copied, the caller's tensors are not changed.

    Raises:
        StateError: when something in it cannot be stored; `where` is its path.
    """
    with postponed():
        planter = Planter()
        tree = planter.plant(state)
        tensors = store_once(planter.leaves)
        roles, optim = infer(planter.leaves, planter.optimizers)
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
        max_bytes = max(MAX_COPIES, 8 * sum(tensor.nbytes for tensor in tensors.values()))
    with guarded(where), postponed():
        return Grower(tensors, tie=tie, where=where, max_bytes=max_bytes).grow(tree)
