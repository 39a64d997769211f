"""What differs between two decoded checkpoints, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.foreign.leaves import named, tensor_of, valued
from shrinkpoint.state import dtype_name, unflatten
from shrinkpoint.store.file import Decoded

_NOTHING = object()
_CHUNK = 1 << 22  # values compared at a time: 32 MiB of doubles a side


@dataclass(frozen=True)
class TensorDifference:
    """Two tensors of one name.

    Attributes:
        equal: bit for bit, dtype and shape included.
        change: what dtypes or shapes differ, in words; "" when they agree.
        different: how many values are not bit-identical; None when dtype or shape differ.
        max_abs: largest |a - b|; nan where a nan or an infinity meets a number; None when it cannot be said.
        relative: |a - b| / |a| in L2; None when it cannot be said.
    """

    name: str
    equal: bool
    change: str = ""
    different: int | None = 0
    max_abs: float | None = 0.0
    relative: float | None = 0.0


@dataclass(frozen=True)
class Difference:
    """Two checkpoints.

    Attributes:
        tensors: those of both, in the first one's order.
        added, missing: names of tensors only in the second, only in the first.
        values: path -> (first, second) of plain values that differ; None where there is none.
        structure: the nests differ although no tensor and no plain value does (ties, parameters, kinds of containers).
    """

    tensors: tuple[TensorDifference, ...]
    added: tuple[str, ...]
    missing: tuple[str, ...]
    values: Mapping[str, tuple[str | None, str | None]]
    structure: bool

    @property
    def equal(self) -> bool:
        quiet = not (self.added or self.missing or self.values or self.structure)
        return quiet and all(one.equal for one in self.tensors)


def difference(first: Decoded, second: Decoded) -> Difference:
    """Compare bit for bit, leaf by leaf; sums are taken in double precision."""
    a, b = (named(unflatten(one.tree, one.reference.tensors, max_bytes=one.left)) for one in (first, second))
    pairs = {name: (a.get(name, _NOTHING), b.get(name, _NOTHING)) for name in {**a, **b}}
    both = {name: pair for name, pair in pairs.items() if all(map(valued, pair))}
    found = Difference(
        tensors=tuple(tensor_difference(name, tensor_of(x), tensor_of(y)) for name, (x, y) in both.items()),
        added=tuple(name for name, (_, y) in pairs.items() if valued(y) and name not in both),
        missing=tuple(name for name, (x, _) in pairs.items() if valued(x) and name not in both),
        values={name: texts for name, pair in pairs.items() if (texts := _texts(*pair)) is not None},
        structure=False,
    )
    return replace(found, structure=found.equal and first.tree != second.tree)


def _texts(x: Any, y: Any) -> tuple[str | None, str | None] | None:
    """Two plain values as text where they differ; None where they do not, or where neither is one."""
    plain = [None if one is _NOTHING or valued(one) else repr(one) for one in (x, y)]
    if plain[0] == plain[1]:
        return None
    return _short(plain[0]), _short(plain[1])


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def tensor_difference(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    """Compare two tensors on the CPU."""
    changes = []
    if a.dtype != b.dtype:
        changes.append(f"{dtype_name(a.dtype)} -> {dtype_name(b.dtype)}")
    if a.shape != b.shape:
        changes.append(f"{_shape(a)} -> {_shape(b)}")
    if changes:
        return TensorDifference(name, False, ", ".join(changes), None, None, None)
    left, right = (x.contiguous().reshape(-1) for x in (a, b))
    different, largest, squares, norm = 0, 0.0, 0.0, 0.0
    numeric = True
    for x, y in zip(torch.split(left, _CHUNK), torch.split(right, _CHUNK), strict=True):
        count = _unlike(x, y)
        different += count
        pair = _doubles(x), _doubles(y)
        if pair[0] is None or pair[1] is None:
            numeric = False
            continue
        norm += float(pair[0].abs().square().sum())
        if count:
            gap = torch.where(pair[0] == pair[1], 0.0, (pair[0] - pair[1]).abs())
            largest, squares = _max(largest, float(gap.max())), squares + float(gap.square().sum())
    if not different:
        return TensorDifference(name, True)
    if not numeric:
        return TensorDifference(name, False, "", different, None, None)
    relative = math.sqrt(squares / norm) if norm else (0.0 if not squares else math.inf)
    return TensorDifference(name, False, "", different, largest, relative)


def _max(a: float, b: float) -> float:
    """As max, but a nan stays."""
    return a if math.isnan(a) or a > b else b


def _unlike(x: Tensor, y: Tensor) -> int:
    """How many values are not bit-identical."""
    if not x.numel():
        return 0
    bytes_x, bytes_y = (t.contiguous().view(torch.uint8).reshape(x.numel(), -1) for t in (x, y))
    return int((bytes_x != bytes_y).any(dim=1).sum())


def _doubles(x: Tensor) -> Tensor | None:
    """Values in double precision; None for a dtype that cannot be converted (packed 4-bit floats)."""
    try:
        return x.to(torch.complex128 if x.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError):
        return None


def _shape(x: Tensor) -> str:
    return "x".join(map(str, x.shape)) or "scalar"
