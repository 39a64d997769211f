"""The leaves of a loaded state, by the names that `show` and a file give them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.state.path import Path as Keys
from shrinkpoint.state.path import name_of

Valued: TypeAlias = "Tensor | np.ndarray[Any, Any]"


def named(state: Any) -> dict[str, Any]:
    """Every tensor, array and plain value; where two paths give one name, the later gets a number, as in a file."""
    leaves: dict[str, Any] = {}
    for path, value in _walk(state, ()):
        name, again = name_of(path), 2
        while name in leaves:
            name, again = f"{name_of(path)}%{again}", again + 1
        leaves[name] = value
    return leaves


def items(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """(key, item) of a dict, list or tuple; None for a leaf."""
    if isinstance(value, dict):
        return iter(value.items())
    return enumerate(value) if isinstance(value, list | tuple) else None


def valued(leaf: Any) -> bool:
    """Whether a leaf is a tensor or an array, and not a plain value."""
    return isinstance(leaf, Tensor | np.ndarray)


def tensor_of(leaf: Valued) -> Tensor:
    """A tensor or an array as a tensor, without a gradient; shares memory where it can."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    return torch.from_numpy(np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")).reshape(leaf.shape))


def _walk(value: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    inside = items(value)
    if inside is None:
        yield path, value
        return
    for key, item in inside:
        yield from _walk(item, (*path, key))
