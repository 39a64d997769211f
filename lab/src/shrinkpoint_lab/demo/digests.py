"""Digests of every tensor and plain value of a state, and comparisons of two states.

Digests are small enough to log at every step of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from shrinkpoint._native import xxh3_128
from shrinkpoint.tensors.compare import differing_paths
from shrinkpoint.tensors.dtypes import dtype_name, tensor_bytes
from shrinkpoint.tensors.names import as_tensor, is_array, named_leaves

StateDigests: TypeAlias = Mapping[str, str]
DIGEST_LENGTH = 16


def state_digests(state: Any) -> dict[str, str]:
    """Digests of the leaves of a state by their names; equal only if dtype, shape and every bit are.

    >>> state_digests({"step": 3}) == state_digests({"step": 3}) != state_digests({"step": 3.0})
    True
    """
    return {name: _leaf_digest(leaf) for name, leaf in named_leaves(state).items()}


def _leaf_digest(leaf: Any) -> str:
    if not is_array(leaf):
        return xxh3_128(f"{type(leaf).__name__} {leaf!r}".encode())[:DIGEST_LENGTH]
    tensor = as_tensor(leaf)
    digest = xxh3_128(tensor_bytes(tensor))
    return xxh3_128(f"{dtype_name(tensor.dtype)} {list(tensor.shape)} {digest}".encode())[:DIGEST_LENGTH]


def differing_names(left: StateDigests, right: StateDigests) -> tuple[str, ...]:
    """Names at which two states differ, or that only one of them has, in their order.

    >>> differing_names({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"})
    ('b', 'c')
    """
    return tuple(name for name in {**left, **right} if left.get(name) != right.get(name))


@dataclass(frozen=True)
class SectionComparison:
    """The comparison of one section, a top-level key, of two states."""

    name: str  # the key
    # `tensors`, `values`: numbers of compared tensors and plain values.
    tensors: int
    values: int
    nbytes: int  # bytes of the tensors
    differences: tuple[str, ...]  # paths at which they differ; empty when every bit is equal


def compare_sections(left: dict[str, Any], right: dict[str, Any]) -> list[SectionComparison]:
    """Compare two states section by section; a key that only one of them has is a difference of its section."""
    out = []
    for name in {**left, **right}:
        leaves = [*named_leaves(left.get(name)).values()]
        nbytes = [leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)]
        differences = tuple(differing_paths(left.get(name), right.get(name), name))
        out.append(SectionComparison(name, len(nbytes), len(leaves) - len(nbytes), sum(nbytes), differences))
    return out
