"""What `torch.distributed.checkpoint` must know of a checkpoint, as JSON: never a pickle.

::

    {"items": [[fqn, path, dtype, layout], [fqn, path, null, payload], ..], "layouts": [[size, chunks], ..]}
    chunks: [[offsets, sizes, payload], ..]

`payload` counts the manifest's payloads. Tensors that are cut alike share a layout, so that this stays small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shrinkpoint.errors import CorruptError, MismatchError, StateError
from shrinkpoint.record import ITEMSIZE, JSON
from shrinkpoint.state import dtype_name, torch_dtype
from shrinkpoint.state.path import name_of
from shrinkpoint.train.dcp.apart import check_apart

KEY = "torch.distributed.checkpoint"
"""Where a manifest's `extra` has it."""

Offsets = tuple[int, ...]
_GAPS = 256


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and which payload has it."""

    offsets: Offsets
    sizes: Offsets
    payload: int


@dataclass(frozen=True)
class Item:
    """One entry of a state dict.

    Attributes:
        fqn: its fully qualified name.
        path: where it stands in the nest; None where nobody flattened one.
        dtype: a key of `record.ITEMSIZE`; "" for what is no tensor.
        size: of the whole tensor.
        chunks: its boxes; of what is no tensor, the one payload that has it.
    """

    fqn: str
    path: tuple[str | int, ...] | None
    dtype: str
    size: Offsets
    chunks: tuple[Chunk, ...]

    @property
    def is_tensor(self) -> bool:
        return bool(self.dtype)

    def nbytes(self, sizes: Offsets) -> int:
        """Of a box of these sizes."""
        return math.prod(sizes) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Description:
    """All entries, in the order of the state dict."""

    items: Mapping[str, Item] = field(repr=False)

    def chunk(self, fqn: str, offsets: Sequence[int], where: str) -> Chunk:
        """The box that begins there.

        Raises:
            MismatchError: there is none.
        """
        item = self.items.get(fqn)
        for chunk in () if item is None else item.chunks:
            if chunk.offsets == tuple(offsets):
                return chunk
        found = f"no part of {fqn!r} that begins at {tuple(offsets)}"
        raise MismatchError(where, found=found, expected="one that its manifest has", do="look at what was saved")

    def metadata(self) -> Metadata:
        """As torch's planners want it."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        layouts: dict[int, list[ChunkStorageMetadata]] = {}
        for fqn, item in self.items.items():
            if not item.is_tensor:
                entries[fqn] = BytesStorageMetadata()
                continue
            boxes = layouts.get(id(item.chunks))  # made once: many boxes of many items would fill the memory
            if boxes is None:
                boxes = layouts[id(item.chunks)] = _boxes(item.chunks)
            properties = TensorProperties(dtype=torch_dtype(item.dtype))
            entries[fqn] = TensorStorageMetadata(properties, torch.Size(item.size), boxes)
        paths = {fqn: item.path for fqn, item in self.items.items() if item.path is not None}
        return Metadata(entries, planner_data=paths if paths or not entries else None)


def chunk_name(fqn: str, offsets: Sequence[int], sizes: Sequence[int], size: Sequence[int]) -> str:
    """The name of a box in its payload: that of the tensor where it is all of it.

    >>> chunk_name("model.weight", (0, 0), (4, 2), (4, 2)), chunk_name("model.weight", (4, 0), (4, 2), (8, 2))
    ('model.weight', 'model.weight/4,0')
    """
    return name_of((fqn,)) if tuple(sizes) == tuple(size) else name_of((fqn, offsets_key(offsets)))


def offsets_key(offsets: Sequence[int]) -> str:
    return ",".join(map(str, offsets))


def describe(metadata: Metadata, owners: Mapping[MetadataIndex, int]) -> JSON:
    """The description as JSON.

    Args:
        owners: which payload has what.

    Raises:
        StateError: a planner that keeps more than paths, or a dtype without a name.
    """
    paths = _paths(metadata.planner_data)
    layouts: dict[str, int] = {}
    items: list[JSON] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            items.append([fqn, paths.get(fqn), None, owners[MetadataIndex(fqn)]])
            continue
        chunks = [
            [list(chunk.offsets), list(chunk.sizes), owners[MetadataIndex(fqn, chunk.offsets)]]
            for chunk in entry.chunks
        ]
        layout = json.dumps([list(entry.size), chunks])
        items.append(
            [fqn, paths.get(fqn), dtype_name(entry.properties.dtype), layouts.setdefault(layout, len(layouts))]
        )
    return {"items": items, "layouts": [json.loads(layout) for layout in layouts]}


def planned(metadata: Metadata) -> Iterator[MetadataIndex]:
    """Everything that must have been written."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            yield MetadataIndex(fqn)
        else:
            yield from (MetadataIndex(fqn, chunk.offsets) for chunk in entry.chunks)


def understand(document: JSON, payloads: int, where: str) -> Description:
    """The description that `describe` made, or that somebody forged.

    Args:
        payloads: how many there are.

    Raises:
        CorruptError: no release writes this.
    """
    try:
        layouts = [_layout(row, payloads) for row in document["layouts"]]
        items = [_item(row, layouts, payloads) for row in document["items"]]
        _check_paths([item.path for item in items if item.path is not None])
        if len({item.fqn for item in items}) < len(items):
            raise ValueError("an entry twice")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        found, do = f"no description of a state dict ({error})", "restore another checkpoint"
        raise CorruptError(where, found=found, expected="what `dcp.save` wrote", do=do) from error
    return Description({item.fqn: item for item in items})


def _check_paths(paths: Sequence[Sequence[str | int]]) -> None:
    """All lists of a nest together have at most `_GAPS` places more than keys: planners take memory for all."""
    places: dict[int, int] = {}
    levels: dict[tuple[int, str | int], int] = {}
    keys = 0
    for path in paths:
        if not path or any(isinstance(key, int) and key < 0 for key in path):
            raise ValueError(f"the path {path}")
        keys += len(path)
        level = 0
        for key in path:
            if isinstance(key, int):
                places[level] = max(places.get(level, 0), key + 1)
            level = levels.setdefault((level, key), len(levels) + 1)
    if sum(places.values()) > keys + _GAPS:
        raise ValueError(f"lists of {sum(places.values())} places, of which {keys} are filled at most")


def _boxes(chunks: Sequence[Chunk]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in chunks]


def _paths(planner_data: Any) -> Mapping[str, list[str | int]]:
    if planner_data is None:
        return {}
    try:
        paths = {fqn: [_checked(key, str, int) for key in path] for fqn, path in planner_data.items()}
        _check_paths([*paths.values()])
        if all(isinstance(fqn, str) for fqn in paths):
            return paths
    except (AttributeError, TypeError, ValueError):
        pass
    found = f"planner_data of type {type(planner_data).__name__} that is not a path for each name"
    raise StateError("planner", found=found, expected="what DefaultSavePlanner keeps", do="use DefaultSavePlanner")


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"{value!r:.40} where {kinds[0].__name__} should be")
    return value


def _counts(row: JSON) -> Offsets:
    counts = tuple(_checked(value, int) for value in _checked(row, list))
    if any(not 0 <= count < 2**62 for count in counts):
        raise ValueError(f"counts {counts}")
    return counts


def _owner(value: JSON, payloads: int) -> int:
    if not 0 <= _checked(value, int) < payloads:
        raise ValueError(f"payload {value}")
    return int(value)


def _layout(row: JSON, payloads: int) -> tuple[Offsets, tuple[Chunk, ...]]:
    size, boxes = row
    whole, chunks = _counts(size), []
    for offsets, sizes, owner in _checked(boxes, list):
        chunk = Chunk(_counts(offsets), _counts(sizes), _owner(owner, payloads))
        ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > side for end, side in zip(ends, whole, strict=True)):
            raise ValueError(f"a box to {ends} of {whole}")
        chunks.append(chunk)
    check_apart([one.offsets for one in chunks], [one.sizes for one in chunks])
    return whole, tuple(chunks)


def _item(row: JSON, layouts: Sequence[tuple[Offsets, tuple[Chunk, ...]]], payloads: int) -> Item:
    name, path, dtype, at = row
    fqn = str(_checked(name, str))
    keys = None if path is None else tuple(_checked(key, str, int) for key in _checked(path, list))
    if dtype is None:
        return Item(fqn, keys, "", (), (Chunk((), (), _owner(at, payloads)),))
    torch_dtype(_checked(dtype, str))
    size, chunks = layouts[_owner(at, len(layouts))]
    return Item(fqn, keys, dtype, size, chunks)
