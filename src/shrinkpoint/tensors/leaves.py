"""The leaves of a nested state: tensors, arrays and plain values, under the names that `show` and a file give them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.tensors.names import StatePath as Keys
from shrinkpoint.tensors.names import tensor_name

TensorOrArray: TypeAlias = "Tensor | np.ndarray[Any, Any]"


def named_leaves(state: Any) -> dict[str, Any]:
    """Return every tensor, array and plain value by name; equal names get a number, as in a file."""
    leaves: dict[str, Any] = {}
    for path, value in _iter_leaves(state, ()):
        name, number = tensor_name(path), 2
        while name in leaves:
            name, number = f"{tensor_name(path)}%{number}", number + 1
        leaves[name] = value
    return leaves


def child_items(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the (key, item) pairs of a dict, list or tuple; None for a leaf."""
    if isinstance(value, dict):
        return iter(value.items())
    return enumerate(value) if isinstance(value, list | tuple) else None


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a tensor or an array."""
    return isinstance(leaf, Tensor | np.ndarray)


def as_tensor(leaf: TensorOrArray) -> Tensor:
    """Convert a tensor or an array to a detached tensor; shares memory if possible."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    return torch.from_numpy(np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")).reshape(leaf.shape))


def _iter_leaves(value: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    inside = child_items(value)
    if inside is None:
        yield path, value
        return
    for key, item in inside:
        yield from _iter_leaves(item, (*path, key))
