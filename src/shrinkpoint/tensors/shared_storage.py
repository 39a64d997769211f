"""Stores tensors that share memory once.

A reference (the JSON that stands for a tensor in the tree) is one of::

    []                                      the stored tensor named by the leaf's own path
    [name]                                  the stored tensor of that name
    [name, offset, shape, strides]          a view of the stored tensor as one contiguous row, in elements
    [name, offset, shape, strides, dtype]   the same with the bytes viewed as another dtype
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from shrinkpoint.errors import StateError
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.names import StatePath, format_path, tensor_name, unique_name

MAX_SHARING_OVERHEAD = 1024  # Bytes that a shared range may take beyond its members stored one by one


@dataclass
class Leaf:
    """One tensor of the nest: its path, its detached value, and the reference to be filled in."""

    path: StatePath
    tensor: torch.Tensor
    reference: list[JSON] = field(default_factory=list)
    name: str = ""  # of the stored tensor that holds this leaf whole, in its own shape; "" for a view into another

    @property
    def extent(self) -> int:
        """Bytes from the first to the end of the last element of this tensor."""
        tensor = self.tensor
        if tensor.is_contiguous():
            return tensor.nbytes
        if tensor.numel() == 0:
            return 0
        return num_reached(tensor) * tensor.element_size()

    @property
    def start(self) -> int:
        """Its first byte in its storage."""
        return int(self.tensor.storage_offset()) * self.tensor.element_size()

    @cached_property
    def view(self) -> tuple[object, ...]:
        """Start, dtype, shape and strides; equal for leaves that are the same view of a storage."""
        tensor = self.tensor
        strides = tuple(st for size, st in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
        return (self.start, tensor.dtype, tuple(tensor.shape), strides)


def num_reached(tensor: torch.Tensor) -> int:
    """Elements of memory from the first to behind the last of a tensor, however often it meets each of them."""
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(last + 1, 0)


def deduplicate(leaves: Iterable[Leaf]) -> dict[str, torch.Tensor]:
    """Return the tensors to store, in the order of the leaves, and fill in each leaf's `reference` and `name`."""
    ordered = list(leaves)
    groups = {id(group[0]): group for group in _overlap_groups(ordered)}  # every group under its earliest leaf
    for leaf in ordered:
        leaf.name = tensor_name(leaf.path)
    stored = dict[str, torch.Tensor]()
    for leaf in ordered:
        if (group := groups.get(id(leaf))) is not None:
            _store_group(group, stored)
    return stored


def _overlap_groups(leaves: list[Leaf]) -> Iterator[list[Leaf]]:
    """Groups of leaves whose memory overlaps, each in the order of the leaves."""
    order = {id(leaf): index for index, leaf in enumerate(leaves)}
    storages: dict[tuple[object, ...], list[Leaf]] = {}
    for leaf in leaves:
        extent = leaf.extent
        if extent == 0:
            yield [leaf]
            continue
        storage = leaf.tensor.untyped_storage()
        size, used = storage.nbytes(), leaf.start + extent
        if used > size:
            found, expected = f"a tensor whose storage has {size} bytes", f"its {extent} from {leaf.start} on"
            do = "save it before its memory is freed"
            raise StateError(format_path(leaf.path), found=found, expected=expected, do=do)
        storages.setdefault((leaf.tensor.device, storage.data_ptr(), size), []).append(leaf)
    for members in storages.values():
        if len(members) == 1:
            yield members
            continue
        for run in _overlapping_runs(members):
            for group in _worth_sharing(run):
                yield sorted(group, key=lambda leaf: order[id(leaf)])


def _overlapping_runs(members: list[Leaf]) -> Iterator[list[Leaf]]:
    """Split the leaves of one storage where their ranges do not touch."""
    run: list[Leaf] = []
    end = 0
    for leaf in sorted(members, key=lambda leaf: leaf.start):
        if run and leaf.start >= end:
            yield run
            run = []
        run.append(leaf)
        end = max(end, leaf.start + leaf.extent)  # earlier runs end before this leaf
    yield run


def _worth_sharing(run: list[Leaf]) -> Iterator[list[Leaf]]:
    """The run as one group if one row over it is not much larger than its members; else groups of equal views."""
    start, end = _byte_range(run)
    by_view: dict[tuple[object, ...], list[Leaf]] = {}
    for leaf in run:
        by_view.setdefault(leaf.view, []).append(leaf)
    separate_bytes = sum(min(group[0].extent, group[0].tensor.nbytes) for group in by_view.values())
    aligned = all((leaf.start - start) % leaf.tensor.element_size() == 0 for leaf in run)
    if aligned and end - start <= separate_bytes + MAX_SHARING_OVERHEAD:
        yield run
    else:
        yield from by_view.values()


def _byte_range(run: list[Leaf]) -> tuple[int, int]:
    return min(leaf.start for leaf in run), max(leaf.start + leaf.extent for leaf in run)


def _store_group(group: list[Leaf], stored: dict[str, torch.Tensor]) -> None:
    if len(group) == 1 and group[0].tensor.is_contiguous():  # the common case
        leaf = group[0]
        if leaf.name in stored:
            leaf.name = unique_name(leaf.name, stored)
            leaf.reference[:] = [leaf.name]
        else:
            leaf.reference[:] = []
        stored[leaf.name] = _standard_strides(leaf.tensor)
        return
    start, end = _byte_range(group)
    owner = next((leaf for leaf in group if leaf.extent == end - start and leaf.tensor.is_contiguous()), None)
    first = group[0]
    is_single_view = all(leaf.view == first.view for leaf in group) and first.extent >= first.tensor.nbytes
    if owner is None and is_single_view:  # without overlapping elements, as expanded tensors have
        owner = first
    if owner is None:
        name, row = unique_name(f"{first.name}/%storage", stored), _storage_row(group, start, end)
    else:
        name, row = unique_name(owner.name, stored), _standard_strides(owner.tensor)
    stored[name] = row
    for leaf in group:
        _write_reference(leaf, name, row, owner, start)


def _storage_row(group: list[Leaf], start: int, end: int) -> torch.Tensor:
    """The covered range as one contiguous row; as bytes if the dtypes of the members differ."""
    first = group[0].tensor
    if len({leaf.tensor.dtype for leaf in group}) > 1:
        return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())[start:end]
    size = first.element_size()
    return first.as_strided(((end - start) // size,), (1,), start // size)


def _standard_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Give a contiguous tensor its standard strides; dimensions of size 1 may have others."""
    if 1 not in tensor.shape or not tensor.is_contiguous():
        return tensor
    strides = torch.empty(tuple(tensor.shape), device="meta").stride()
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def _write_reference(leaf: Leaf, name: str, row: torch.Tensor, owner: Leaf | None, start: int) -> None:
    if owner is not None and leaf.view == owner.view:
        leaf.reference[:] = [] if name == leaf.name else [name]
        leaf.name = name
        return
    tensor, leaf.name = leaf.tensor, ""
    offset = (leaf.start - start) // tensor.element_size()
    leaf.reference[:] = [name, offset, list(tensor.shape), list(tensor.stride())]
    if tensor.dtype != row.dtype:
        leaf.reference.append(dtype_name(tensor.dtype))
