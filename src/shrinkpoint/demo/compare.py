"""Compare two nests bit for bit, with nothing of ours in between."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Section:
    """What one part of two states has in common.

    Attributes:
        name: its key at the top of the state.
        tensors, values: how many were compared.
        nbytes: of the tensors.
        differences: paths at which they differ; empty when every bit is equal.
    """

    name: str
    tensors: int
    values: int
    nbytes: int
    differences: tuple[str, ...]


def compare(left: dict[str, Any], right: dict[str, Any]) -> list[Section]:
    """Compare two states section by section; a key that only one of them has is a difference of its section."""
    names = list(left) + [name for name in right if name not in left]
    return [_section(name, left.get(name), right.get(name)) for name in names]


def _section(name: str, left: Any, right: Any) -> Section:
    tensors = [leaf for _, leaf in _leaves(left, name) if isinstance(leaf, Tensor)]
    values = sum(1 for _ in _leaves(left, name)) - len(tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return Section(name, len(tensors), values, nbytes, tuple(differences(left, right, name)))


def _leaves(nest: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, dict):
        for key, value in nest.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(nest, (list, tuple)):
        for index, value in enumerate(nest):
            yield from _leaves(value, f"{path}/{index}")
    else:
        yield path, nest


def differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Paths at which two nests differ in type, key (2 is not "2"), shape, dtype or any bit of a value.

    >>> list(differences({"a": [1, 0.0]}, {"a": [1, -0.0]}))
    ['/a/1']
    """
    if _kind(left) is not _kind(right):
        yield path
    elif isinstance(left, dict):
        yield from (f"{path}/{key}" for key in left.keys() ^ right.keys())
        for key in left.keys() & right.keys():
            yield from differences(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            yield path
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            yield from differences(one, other, f"{path}/{index}")
    elif not _same(left, right):
        yield path


def _kind(value: Any) -> type:
    """Its type; an OrderedDict (`Module.state_dict`) is a dict like any other."""
    return dict if isinstance(value, dict) else type(value)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(_bits(left), _bits(right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return bool(left == right)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
