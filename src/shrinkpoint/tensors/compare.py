"""Bitwise comparison of tensors, of nested states and of decoded checkpoints.

Equal means equal bits: nan equals itself, 0.0 differs from -0.0."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.progress import Task
from shrinkpoint.tensors.dtypes import as_bits, dtype_name, joined_bytes, tensor_bytes
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.names import as_tensor, child_items, is_array, named_leaves, tensor_name

_MISSING = object()
GROUP_BYTES = 1 << 27  # Bytes of two states that are compared at a time: what is read of both is in memory meanwhile
_HEAD_BYTES = 1 << 12  # Bytes of a tensor that are compared first
_CHUNK_VALUES = 1 << 20  # values compared at a time: 8 MiB of doubles a side


def describe_structure_difference(
    source: FlatState, tree: JSON, shapes: dict[str, torch.Size] | dict[str, tuple[int, ...]]
) -> str:
    """Return the first difference in plain values, names or shapes; "" if there is none."""
    if json.loads(json.dumps(source.tree)) != tree:
        return "other plain values or another nest"
    if source.tensors.keys() != shapes.keys():
        odd = sorted(source.tensors.keys() ^ shapes.keys())
        return f"other tensors: {', '.join(odd[:3])}"
    for name, tensor in source.tensors.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            return f"{name} has shape {list(shapes[name])} and had {list(tensor.shape)}"
    return ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have the same dtype, shape and bits; nan equals itself, and 0.0 differs from -0.0.

    The first bytes are compared first, since they usually differ if anything does.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    first, second = tensor_bytes(a), tensor_bytes(b)
    head = slice(0, _HEAD_BYTES)
    return bool((first[head] == second[head]).all()) and torch.equal(torch.from_numpy(first), torch.from_numpy(second))


def same_tensors(names: Iterable[str], left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors that have the same bits on both sides; small ones are compared together.

    Args:
        names: of tensors that have one shape and dtype on both sides.
    """
    out, small = set[str](), dict[torch.dtype, list[tuple[str, Tensor]]]()
    for name in names:
        tensor = left[name]
        if 0 < tensor.nbytes <= _HEAD_BYTES:
            small.setdefault(tensor.dtype, []).append((name, tensor))
        elif same_bits(tensor, right[name]):
            out.add(name)
    for members in small.values():
        differs = joined_bytes([tensor for _, tensor in members]) != joined_bytes([right[name] for name, _ in members])
        starts = [*accumulate((tensor.nbytes for _, tensor in members), initial=0)][:-1]
        have_changed = np.logical_or.reduceat(differs, starts)
        out.update(name for (name, _), has_changed in zip(members, have_changed, strict=True) if not has_changed)
    return out


def differing_paths(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Paths at which two nests differ in type, key (2 is not "2"), shape, dtype or any bit of a value.

    >>> list(differing_paths({"a": [1, 0.0]}, {"a": [1, -0.0]}))
    ['/a/1']
    """
    if _container_type(left) is not _container_type(right):
        yield path
    elif isinstance(left, dict):
        yield from (f"{path}/{key}" for key in left.keys() ^ right.keys())
        for key in left.keys() & right.keys():
            yield from differing_paths(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            yield path
        for index, (left_item, right_item) in enumerate(zip(left, right, strict=False)):
            yield from differing_paths(left_item, right_item, f"{path}/{index}")
    elif (items := child_items(left)) is not None:  # a namespace, a deque, a buffer
        yield from differing_paths(dict(items), dict(child_items(right) or ()), path)
    elif not _equal_leaves(left, right):
        yield path


def _container_type(value: Any) -> type:
    """Its type; an OrderedDict (`Module.state_dict`) is a dict like any other."""
    return dict if isinstance(value, dict) else type(value)


def _equal_leaves(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return same_bits(left, right)
    if isinstance(left, np.ndarray | np.generic):
        has_same_form = left.dtype == right.dtype and left.shape == right.shape
        return bool(has_same_form and left.tobytes() == right.tobytes())
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex):
        return struct.pack("2d", left.real, left.imag) == struct.pack("2d", right.real, right.imag)
    return bool(left == right)


@dataclass(frozen=True)
class TensorDifference:
    """The comparison of two tensors of one name."""

    name: str
    equal: bool  # True if dtype, shape and all bits are equal
    change: str = ""  # description of different dtypes or shapes; "" if they agree
    different: int | None = 0  # number of values that are not bit-identical; None if dtype or shape differ
    max_abs: float | None = 0.0  # largest |a - b|; nan if a nan or an infinity meets a number; None if undefined
    relative: float | None = 0.0  # L2 norm of a - b over that of a; None if undefined
    share: float | None = 0.0  # share of the values that are not bit-identical; None if dtype or shape differ


@dataclass(frozen=True)
class CheckpointDifference:
    """The comparison of two checkpoints."""

    tensors: tuple[TensorDifference, ...]  # comparisons of the tensors that both have, in the order of the first
    # `added`, `missing`: names of tensors that only the second or only the first has.
    added: tuple[str, ...]
    missing: tuple[str, ...]
    # (first, second) text of plain values that differ, by path; None for a missing one.
    values: Mapping[str, tuple[str | None, str | None]]
    structure: bool  # True if the nests differ otherwise (shared memory, parameters, types of containers)

    @property
    def equal(self) -> bool:
        quiet = not (self.added or self.missing or self.values or self.structure)
        return quiet and all(tensor.equal for tensor in self.tensors)


class LeafInfo(NamedTuple):
    """Description of a leaf before it is read."""

    nbytes: int  # memory that reading it takes
    is_array: bool  # it is a tensor or an array, and no plain value


class LeafSource(Protocol):
    """The leaves of a state, by the names of `named_leaves`; some are read at a time."""

    @property
    def leaves(self) -> Mapping[str, LeafInfo]:
        """Leaves in the order of the state."""
        ...

    @property
    def tree(self) -> JSON:
        """The state's structure; None: it is not compared."""
        ...

    def read(self, names: Sequence[str]) -> Mapping[str, Any]:
        """The values of some leaves."""
        ...


class SubtreeLeaves:
    """The leaves below a key at the top of a state, by their names in what is there; structure is not compared."""

    def __init__(self, state: LeafSource, key: str) -> None:
        self._state, self.tree = state, None
        below = {
            name.removeprefix(f"{key}/"): name for name in state.leaves if name == key or name.startswith(f"{key}/")
        }
        self._names = {tensor_name(()) if name == key else name: full for name, full in below.items()}
        self.leaves: Mapping[str, LeafInfo] = {name: state.leaves[full] for name, full in self._names.items()}

    def read(self, names: Sequence[str]) -> Mapping[str, Any]:
        values = self._state.read([self._names[name] for name in names])
        return {name: values[self._names[name]] for name in names}


class StateLeaves:
    """The leaves of a state that is in memory, or in mapped files.

    Args:
        tree: the state's structure, as a file records it; None: it is not compared.
    """

    def __init__(self, state: Any, tree: JSON = None) -> None:
        self._values, self.tree = named_leaves(state), tree
        self.leaves: Mapping[str, LeafInfo] = {
            name: LeafInfo(as_tensor(value).nbytes if is_array(value) else 0, is_array(value))
            for name, value in self._values.items()
        }

    def read(self, names: Sequence[str]) -> Mapping[str, Any]:
        return {name: self._values[name] for name in names}


def compare_states(first: LeafSource, second: LeafSource, *, group_bytes: int = GROUP_BYTES) -> CheckpointDifference:
    """Compare two states bitwise, leaf by leaf; sums are computed in float64.

    Args:
        group_bytes: how much of both is read at a time; a larger leaf is read alone.
    """
    names = {**first.leaves, **second.leaves}
    both = {name for name in names if name in first.leaves and name in second.leaves}
    tensors: list[TensorDifference] = []
    kinds = {name: [name in side.leaves and side.leaves[name].is_array for side in (first, second)] for name in names}
    values: dict[str, tuple[str | None, str | None]] = {}
    total = sum(_nbytes(side, name) for side in (first, second) for name in both)
    with Task("comparing", total, "bytes") as task:
        for group in _groups(names, both, first, second, group_bytes):
            a, b = (side.read([name for name in group if name in side.leaves]) for side in (first, second))
            for name in group:
                pair = a.get(name, _MISSING), b.get(name, _MISSING)
                if all(map(is_array, pair)):
                    tensors.append(compare_tensors(name, as_tensor(pair[0]), as_tensor(pair[1])))
                elif (texts := _plain_texts(*pair)) is not None:
                    values[name] = texts
            del a, b, pair  # before the next ones are read
            task.advance(sum(_nbytes(side, name) for side in (first, second) for name in group))
    added, missing = (tuple(name for name, kind in kinds.items() if kind[side] and not all(kind)) for side in (1, 0))
    difference = CheckpointDifference(tuple(tensors), added, missing, values, structure=False)
    trees = first.tree, second.tree
    return replace(difference, structure=difference.equal and None not in trees and trees[0] != trees[1])


def _groups(
    names: Iterable[str], both: Collection[str], first: LeafSource, second: LeafSource, group_bytes: int
) -> Iterator[list[str]]:
    """Names of leaves to read together; tensors that only one side has are left out."""
    group: list[str] = []
    group_size = 0
    for name in names:
        if name not in both and any(name in side.leaves and side.leaves[name].is_array for side in (first, second)):
            continue
        size = _nbytes(first, name) + _nbytes(second, name)
        if group and group_size + size > group_bytes:
            yield group
            group, group_size = [], 0
        group.append(name)
        group_size += size
    if group:
        yield group


def _nbytes(side: LeafSource, name: str) -> int:
    return side.leaves[name].nbytes if name in side.leaves else 0


def _plain_texts(x: Any, y: Any) -> tuple[str | None, str | None] | None:
    """Two plain values as text where they differ; None where they do not, or where neither is plain."""
    left, right = (None if value is _MISSING or is_array(value) else repr(value) for value in (x, y))
    return None if left == right else (_truncate(left), _truncate(right))


def _truncate(text: str | None) -> str | None:
    return text if text is None or len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def compare_tensors(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    """Compare two tensors on the CPU."""
    dtypes, shapes = [dtype_name(x.dtype) for x in (a, b)], ["x".join(map(str, x.shape)) or "scalar" for x in (a, b)]
    changes = [" -> ".join(pair) for pair in (dtypes, shapes) if pair[0] != pair[1]]
    if changes:
        return TensorDifference(name, False, ", ".join(changes), None, None, None, None)
    if same_bits(a, b):
        return TensorDifference(name, True)
    chunks = (torch.split(x.contiguous().reshape(-1), _CHUNK_VALUES) for x in (a, b))
    different, largest, squares, norm = 0, 0.0, 0.0, 0.0
    numeric = True
    for x, y in zip(*chunks, strict=True):
        count = _count_unequal(x, y)
        different += count
        left, right = _to_float64(x), _to_float64(y)
        if left is None or right is None:
            numeric = False
            continue
        norm += _sum_of_squares(left)
        if count:
            gap = (left - right).abs()
            if not math.isfinite(float(gap.sum())):  # perhaps of equal infinities alone
                gap.masked_fill_(left == right, 0.0)
            largest = float(np.maximum(largest, float(gap.max())))  # a nan stays
            squares += _sum_of_squares(gap)
    share = different / a.numel()
    if not numeric:
        return TensorDifference(name, False, "", different, None, None, share)
    relative = math.sqrt(squares / norm) if norm else (0.0 if not squares else math.inf)
    return TensorDifference(name, False, "", different, largest, relative, share)


def _count_unequal(x: Tensor, y: Tensor) -> int:
    if not x.numel():
        return 0
    bits = [as_bits(t.contiguous()) for t in (x, y)]
    if x.dtype == torch.complex128:
        bits = [torch.view_as_real(t).view(torch.int64) for t in (x, y)]
    unequal = bits[0] != bits[1]
    return int(torch.count_nonzero(unequal if unequal.dim() == 1 else unequal.any(dim=1)))


def _sum_of_squares(x: Tensor) -> float:
    magnitudes = x.abs() if x.is_complex() else x
    return float(torch.dot(magnitudes, magnitudes))


def _to_float64(x: Tensor) -> Tensor | None:
    """Values in double precision; None for a dtype that cannot be converted (packed 4-bit floats)."""
    try:
        return x.to(torch.complex128 if x.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError):
        return None
