"""The metadata of a torch.distributed.checkpoint save, as JSON in the manifest: never a pickle.

::

    {"items": [[fqn, path, dtype, layout], [fqn, path, null, payload], ..], "layouts": [[size, chunks], ..]}
    chunks: [[offsets, sizes, payload], ..]

`payload` is an index into the manifest's payloads. Tensors that are sharded alike share a layout, which keeps this
small.
Also checks that chunks of a tensor do not overlap, and writes and recognizes our `.metadata` file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shrinkpoint.errors import CorruptError, MismatchError, StateError
from shrinkpoint.store.directory import MANIFEST
from shrinkpoint.tensors.dtypes import dtype_name, torch_dtype
from shrinkpoint.tensors.info import ITEMSIZE, JSON
from shrinkpoint.tensors.names import tensor_name

_MAX_PAIRWISE = 1 << 10
"""So many boxes are compared each with each, where no plane separates them; no layout of torch's comes near that."""
_MAX_SPLITS = 64


def check_disjoint(offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> None:
    """Raises ValueError where two boxes with something in them overlap, or are too entangled to tell.

    Boxes are parted where a plane separates them, again and again: those of shards always can be.

    Args:
        offsets, sizes: of each box, all of as many axes; below 2**62.
    """
    filled = [at for at, one in enumerate(sizes) if all(one)]
    if len(filled) < 2:
        return
    starts = np.array([offsets[at] for at in filled], np.int64)
    ends = starts + np.array([sizes[at] for at in filled], np.int64)
    left = [np.arange(len(filled))]
    for _ in range(_MAX_SPLITS):
        left = [part for one in left for part in _split_by_plane(starts, ends, one) if part.size > 1]
        if not left:
            return
    raise ValueError("boxes that no planes separate")


def _split_by_plane(
    starts: NDArray[np.int64], ends: NDArray[np.int64], boxes: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Boxes in groups with planes between them; none where it is known that they do not overlap."""
    for axis in range(starts.shape[1]):
        order = boxes[np.argsort(starts[boxes, axis], kind="stable")]
        reach = np.maximum.accumulate(ends[order, axis])
        cuts = np.flatnonzero(starts[order[1:], axis] >= reach[:-1]) + 1
        if cuts.size:
            return np.split(order, cuts)
    if boxes.size > _MAX_PAIRWISE:
        raise ValueError(f"{boxes.size} boxes that no plane separates")
    first, last = starts[boxes], ends[boxes]
    common = np.minimum(last[:, None], last[None]) > np.maximum(first[:, None], first[None])
    if int(common.all(2).sum()) > boxes.size:  # each is where it is
        raise ValueError("boxes that overlap")
    return []


DCP_KEY = "torch.distributed.checkpoint"
"""Where a manifest's `extra` has it."""

Offsets = tuple[int, ...]
_MAX_LIST_GAPS = 256


@dataclass(frozen=True)
class ChunkMetadata:
    """A box of a tensor, and which payload has it."""

    offsets: Offsets
    sizes: Offsets
    payload: int


@dataclass(frozen=True)
class EntryMetadata:
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
    chunks: tuple[ChunkMetadata, ...]

    @property
    def is_tensor(self) -> bool:
        return bool(self.dtype)

    def nbytes(self, sizes: Offsets) -> int:
        """Of a box of these sizes."""
        return math.prod(sizes) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class CheckpointMetadata:
    """All entries, in the order of the state dict."""

    entries: Mapping[str, EntryMetadata] = field(repr=False)

    def find_chunk(self, fqn: str, offsets: Sequence[int], where: str) -> ChunkMetadata:
        """The box that begins there.

        Raises:
            MismatchError: there is none.
        """
        item = self.entries.get(fqn)
        for chunk in () if item is None else item.chunks:
            if chunk.offsets == tuple(offsets):
                return chunk
        found = f"no part of {fqn!r} that begins at {tuple(offsets)}"
        raise MismatchError(where, found=found, expected="one that its manifest has", do="look at what was saved")

    def to_torch(self) -> Metadata:
        """As torch's planners want it."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        layouts: dict[int, list[ChunkStorageMetadata]] = {}
        for fqn, item in self.entries.items():
            if not item.is_tensor:
                entries[fqn] = BytesStorageMetadata()
                continue
            boxes = layouts.get(id(item.chunks))  # made once: many boxes of many items would fill the memory
            if boxes is None:
                boxes = layouts[id(item.chunks)] = _torch_chunks(item.chunks)
            properties = TensorProperties(dtype=torch_dtype(item.dtype))
            entries[fqn] = TensorStorageMetadata(properties, torch.Size(item.size), boxes)
        paths = {fqn: item.path for fqn, item in self.entries.items() if item.path is not None}
        return Metadata(entries, planner_data=paths if paths or not entries else None)


def chunk_name(fqn: str, offsets: Sequence[int], sizes: Sequence[int], size: Sequence[int]) -> str:
    """The name of a box in its payload: that of the tensor where it is all of it.

    >>> chunk_name("model.weight", (0, 0), (4, 2), (4, 2)), chunk_name("model.weight", (4, 0), (4, 2), (8, 2))
    ('model.weight', 'model.weight/4,0')
    """
    return tensor_name((fqn,)) if tuple(sizes) == tuple(size) else tensor_name((fqn, offsets_key(offsets)))


def offsets_key(offsets: Sequence[int]) -> str:
    return ",".join(map(str, offsets))


def metadata_to_json(metadata: Metadata, owners: Mapping[MetadataIndex, int]) -> JSON:
    """The description as JSON.

    Args:
        owners: which payload has what.

    Raises:
        StateError: a planner that keeps more than paths, or a dtype without a name.
    """
    paths = _planner_paths(metadata.planner_data)
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


def expected_indices(metadata: Metadata) -> Iterator[MetadataIndex]:
    """Everything that must have been written."""
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            yield MetadataIndex(fqn)
        else:
            yield from (MetadataIndex(fqn, chunk.offsets) for chunk in entry.chunks)


def metadata_from_json(document: JSON, num_payloads: int, where: str) -> CheckpointMetadata:
    """The description that `describe` made, or that somebody forged.

    Args:
        num_payloads: how many there are.

    Raises:
        CorruptError: no release writes this.
    """
    try:
        layouts = [_layout_from_json(row, num_payloads) for row in document["layouts"]]
        items = [_entry_from_json(row, layouts, num_payloads) for row in document["items"]]
        _check_paths([item.path for item in items if item.path is not None])
        if len({item.fqn for item in items}) < len(items):
            raise ValueError("an entry twice")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        found, do = f"no description of a state dict ({error})", "restore another checkpoint"
        raise CorruptError(where, found=found, expected="what `dcp.save` wrote", do=do) from error
    return CheckpointMetadata({item.fqn: item for item in items})


def _check_paths(paths: Sequence[Sequence[str | int]]) -> None:
    """All lists of a nest together have at most `_MAX_LIST_GAPS` places more than keys: planners take memory for
    all.
    """
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
    if sum(places.values()) > keys + _MAX_LIST_GAPS:
        raise ValueError(f"lists of {sum(places.values())} places, of which {keys} are filled at most")


def _torch_chunks(chunks: Sequence[ChunkMetadata]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in chunks]


def _planner_paths(planner_data: Any) -> Mapping[str, list[str | int]]:
    if planner_data is None:
        return {}
    try:
        paths = {fqn: [_check_type(key, str, int) for key in path] for fqn, path in planner_data.items()}
        _check_paths([*paths.values()])
        if all(isinstance(fqn, str) for fqn in paths):
            return paths
    except (AttributeError, TypeError, ValueError):
        pass
    found = f"planner_data of type {type(planner_data).__name__} that is not a path for each name"
    raise StateError("planner", found=found, expected="what DefaultSavePlanner keeps", do="use DefaultSavePlanner")


def _check_type(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise TypeError(f"{value!r:.40} where {types[0].__name__} should be")
    return value


def _shape_from_json(row: JSON) -> Offsets:
    counts = tuple(_check_type(value, int) for value in _check_type(row, list))
    if any(not 0 <= count < 2**62 for count in counts):
        raise ValueError(f"counts {counts}")
    return counts


def _payload_from_json(value: JSON, num_payloads: int) -> int:
    if not 0 <= _check_type(value, int) < num_payloads:
        raise ValueError(f"payload {value}")
    return int(value)


def _layout_from_json(row: JSON, num_payloads: int) -> tuple[Offsets, tuple[ChunkMetadata, ...]]:
    size, boxes = row
    whole, chunks = _shape_from_json(size), []
    for offsets, sizes, owner in _check_type(boxes, list):
        chunk = ChunkMetadata(
            _shape_from_json(offsets), _shape_from_json(sizes), _payload_from_json(owner, num_payloads)
        )
        ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > side for end, side in zip(ends, whole, strict=True)):
            raise ValueError(f"a box to {ends} of {whole}")
        chunks.append(chunk)
    check_disjoint([one.offsets for one in chunks], [one.sizes for one in chunks])
    return whole, tuple(chunks)


def _entry_from_json(
    row: JSON, layouts: Sequence[tuple[Offsets, tuple[ChunkMetadata, ...]]], num_payloads: int
) -> EntryMetadata:
    name, path, dtype, at = row
    fqn = str(_check_type(name, str))
    keys = None if path is None else tuple(_check_type(key, str, int) for key in _check_type(path, list))
    if dtype is None:
        return EntryMetadata(fqn, keys, "", (), (ChunkMetadata((), (), _payload_from_json(at, num_payloads)),))
    torch_dtype(_check_type(dtype, str))
    size, chunks = layouts[_payload_from_json(at, len(layouts))]
    return EntryMetadata(fqn, keys, dtype, size, chunks)


METADATA_FILE = ".metadata"
_PICKLE_ERROR_TEXT = (
    "shrinkpoint wrote this checkpoint: load it with shrinkpoint.train.dcp.Reader, or have it as torch writes it by "
    "the command shrinkpoint convert DIRECTORY OUT"
)
"""At most 200 letters, of which none is beyond ASCII: as much as the error quotes."""


def metadata_file_bytes(id: str) -> bytes:
    """What stands in ours: nothing that anybody reads back but who wants to know whose it is.

    It is no pickle. To who unpickles it, the first line is a whole number, which it is not: the error quotes it, and
    nothing was made or imported.
    """
    about = {"format": "shrinkpoint", "see": MANIFEST, "id": id, "read with": "shrinkpoint.train.dcp.Reader"}
    return f"L{_PICKLE_ERROR_TEXT}\n{json.dumps(about)}\n".encode()


def is_overwritten_by_torch(directory: str | Path) -> bool:
    """Whether torch's own writer has saved into this folder after ours."""
    path, manifest = Path(directory) / METADATA_FILE, Path(directory) / MANIFEST
    if not path.is_file():  # a pipe would be waited for
        return False
    try:
        with path.open("rb") as file:
            ours = file.read(1) in (b"L", b"{")  # "{": the line of JSON alone
        return not ours and path.stat().st_mtime_ns > manifest.stat().st_mtime_ns
    except FileNotFoundError:
        return False
