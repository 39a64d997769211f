"""The metadata of a torch.distributed.checkpoint save, as JSON in the manifest: never a pickle.

::

    {"items": [[fqn, path, dtype, layout], [fqn, path, null, payload], ..], "layouts": [[size, chunks], ..]}
    chunks: [[offsets, sizes, payload], ..]

`payload` is an index into the manifest's payloads. Tensors that are sharded alike share a layout, which keeps this
small. Reading it checks that the chunks of a tensor do not overlap. Also writes and recognizes our `.metadata` file.

R ranks that write shards of T tensors report R x T entries to one process: ten bytes each (`WrittenEntries`). As
objects of torch with their names, these would be 80 bytes each on the wire and half a kilobyte in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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

from shrinkpoint.errors import VERIFY_ADVICE, CorruptError, MismatchError, StateError
from shrinkpoint.sharding.global_tensors import check_disjoint
from shrinkpoint.store.directory_rewrite import MomentFilter
from shrinkpoint.store.identify import MANIFEST
from shrinkpoint.store.manifest import DCP_KEY
from shrinkpoint.tensors.dtypes import dtype_name, torch_dtype
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import ITEMSIZE, JSON
from shrinkpoint.tensors.names import tensor_name
from shrinkpoint.tensors.optimizers import is_master_key

METADATA_FILE = ".metadata"
_PICKLE_ERROR_TEXT = (
    "shrinkpoint wrote this checkpoint: load it with shrinkpoint.train.dcp.Reader, or have it as torch writes it by "
    "the command shrinkpoint convert DIRECTORY OUT"
)
"""At most 200 ASCII characters, as the unpickler's error quotes no more."""
_MAX_LIST_GAPS = 256
Offsets = tuple[int, ...]


@dataclass(frozen=True)
class ChunkMetadata:
    """A box of a global tensor that one payload stores."""

    offsets: Offsets  # of its first value, one for each axis
    sizes: Offsets  # its shape
    payload: int  # index of the payload in the manifest


@dataclass(frozen=True)
class EntryMetadata:
    """One entry of a state dict."""

    fqn: str  # its fully qualified name
    # Keys and indices in the nested state dict; None if the state dict was not nested.
    path: tuple[str | int, ...] | None
    dtype: str  # a key of `DTYPES`; "" if the entry is not a tensor
    size: Offsets  # shape of the global tensor
    chunks: tuple[ChunkMetadata, ...]  # its chunks; if the entry is not a tensor, one that names its payload

    @property
    def is_tensor(self) -> bool:
        return bool(self.dtype)

    def nbytes(self, sizes: Offsets) -> int:
        """Bytes of a box of these sizes."""
        return math.prod(sizes) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class CheckpointMetadata:
    """The metadata of a state dict."""

    entries: Mapping[str, EntryMetadata] = field(repr=False)  # by fully qualified name, in the order of the state dict
    _chunks_by_offsets: dict[int, dict[Offsets, ChunkMetadata]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # by id of a tuple of chunks, which all tensors of one layout share

    def find_chunk(self, fqn: str, offsets: Sequence[int], where: str) -> ChunkMetadata:
        """The chunk of an entry at these offsets; the first one, where several are empty.

        Raises:
            MismatchError: there is none.
        """
        entry = self.entries.get(fqn)
        if entry is not None:
            by_offsets = self._chunks_by_offsets.get(id(entry.chunks))
            if by_offsets is None:
                by_offsets = {chunk.offsets: chunk for chunk in reversed(entry.chunks)}
                self._chunks_by_offsets[id(entry.chunks)] = by_offsets
            if (chunk := by_offsets.get(tuple(offsets))) is not None:
                return chunk
        found = f"no part of {fqn!r} that begins at {tuple(offsets)}"
        raise MismatchError(where, found=found, expected="a part that its manifest has", do="check the offsets")

    def to_torch(self) -> Metadata:
        """The metadata for torch's planners."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        layouts: dict[int, list[ChunkStorageMetadata]] = {}
        for fqn, entry in self.entries.items():
            if not entry.is_tensor:
                entries[fqn] = BytesStorageMetadata()
                continue
            chunks = layouts.get(id(entry.chunks))  # shared, as many chunks of many entries would fill the memory
            if chunks is None:
                chunks = layouts[id(entry.chunks)] = [
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks
                ]
            properties = TensorProperties(dtype=torch_dtype(entry.dtype))
            entries[fqn] = TensorStorageMetadata(properties, torch.Size(entry.size), chunks)
        paths = {fqn: entry.path for fqn, entry in self.entries.items() if entry.path is not None}
        return Metadata(entries, planner_data=paths if paths or not entries else None)


def chunk_name(fqn: str, offsets: Sequence[int], sizes: Sequence[int], size: Sequence[int]) -> str:
    """The name of a chunk in its payload: that of the tensor if the chunk is all of it.

    >>> chunk_name("model.weight", (0, 0), (4, 2), (4, 2)), chunk_name("model.weight", (4, 0), (4, 2), (8, 2))
    ('model.weight', 'model.weight/4,0')
    """
    return tensor_name((fqn,)) if tuple(sizes) == tuple(size) else tensor_name((fqn, offsets_key(offsets)))


def offsets_key(offsets: Sequence[int]) -> str:
    """The offsets as a key of the tree, such as "4,0"."""
    return ",".join(map(str, offsets))


def box_slices(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The slices of a box, one for each axis."""
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def share_chunks(metadata: Metadata) -> None:
    """Make tensors with the same chunks share one list of them.

    Torch sends the metadata of a save from one rank to all: what is shared is pickled once. A model of hundreds of
    tensors has a dozen layouts, so that each of R ranks receives those, and not R chunks of every tensor.
    """
    lists: dict[tuple[torch.Size, ...], list[ChunkStorageMetadata]] = {}
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            key = tuple(box for chunk in entry.chunks for box in (chunk.offsets, chunk.sizes))
            entry.chunks = lists.setdefault(key, entry.chunks)


# To JSON and back


def metadata_to_json(metadata: Metadata, owners: Mapping[str, NDArray[np.int64]]) -> JSON:
    """Torch's metadata of a save as JSON.

    Args:
        metadata: tensors of one layout share their list of chunks, as `share_chunks` makes them do.
        owners: by entry, the index of the payload with each of its chunks.

    Raises:
        StateError: a planner that keeps other data than paths, or a dtype that is not stored.
    """
    paths = _planner_paths(metadata.planner_data)
    indices: dict[tuple[Offsets, int, bytes], int] = {}
    layouts: list[JSON] = []
    items: list[JSON] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        payloads = owners[fqn]
        if isinstance(entry, BytesStorageMetadata):
            items.append([fqn, paths.get(fqn), None, int(payloads[0])])
            continue
        key = tuple(entry.size), id(entry.chunks), payloads.tobytes()
        if key not in indices:
            indices[key] = len(layouts)
            pairs = zip(entry.chunks, payloads.tolist(), strict=True)
            rows: list[JSON] = [[list(chunk.offsets), list(chunk.sizes), payload] for chunk, payload in pairs]
            layouts.append([list(entry.size), rows])
        items.append([fqn, paths.get(fqn), dtype_name(entry.properties.dtype), indices[key]])
    return {"items": items, "layouts": layouts}


def _names_of_moments(extra: JSON) -> set[str]:
    """The entries that an optimizer, which has `state` and `param_groups`, keeps for a parameter; no master weights."""
    rows: Any = extra[DCP_KEY]["items"] if isinstance(extra, dict) else []
    paths = {row[0]: tuple(row[1] or ()) for row in rows}
    optimizers = {path[: path.index("param_groups")] for path in paths.values() if "param_groups" in path}
    slots = {(*optimizer, "state") for optimizer in optimizers}
    return {
        fqn
        for fqn, path in paths.items()
        if any(path[: len(slot)] == slot for slot in slots) and not is_master_key(str(path[-1]))
    }


def _flatten_without_moments(state: dict[str, Any], extra: JSON) -> FlatState:
    names = _names_of_moments(extra)
    return flatten({fqn: value for fqn, value in state.items() if fqn not in names})


def _drop_moments(extra: Any) -> JSON:
    names, document = _names_of_moments(extra), extra[DCP_KEY]
    return {**extra, DCP_KEY: {**document, "items": [row for row in document["items"] if row[0] not in names]}}


MOMENTS = MomentFilter(_flatten_without_moments, _drop_moments)
"""Removes the moments of a checkpoint of ours that `dcp.save` wrote."""


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
    raise StateError("planner", found=found, expected="that of DefaultSavePlanner", do="use DefaultSavePlanner")


def metadata_from_json(document: JSON, num_payloads: int, where: str) -> CheckpointMetadata:
    """The metadata in a manifest, which may be damaged or forged.

    Args:
        document: what `metadata_to_json` returned.
        num_payloads: number of payloads in the manifest.
        where: the manifest's file, for messages.

    Raises:
        CorruptError: no release writes this.
    """
    try:
        layouts = [_layout_from_json(row, num_payloads) for row in document["layouts"]]
        entries = [_entry_from_json(row, layouts, num_payloads) for row in document["items"]]
        _check_paths([entry.path for entry in entries if entry.path is not None])
        if len({entry.fqn for entry in entries}) < len(entries):
            raise ValueError("an entry twice")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        found, do = f"no description of a state dict ({error})", VERIFY_ADVICE
        raise CorruptError(where, found=found, expected="what `dcp.save` wrote", do=do) from error
    return CheckpointMetadata({entry.fqn: entry for entry in entries})


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
    size, chunk_rows = row
    shape, chunks = _shape_from_json(size), []
    for offsets, sizes, payload in _check_type(chunk_rows, list):
        chunk = ChunkMetadata(
            _shape_from_json(offsets), _shape_from_json(sizes), _payload_from_json(payload, num_payloads)
        )
        ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > side for end, side in zip(ends, shape, strict=True)):
            raise ValueError(f"a box to {ends} of {shape}")
        chunks.append(chunk)
    check_disjoint([chunk.offsets for chunk in chunks], [chunk.sizes for chunk in chunks])
    return shape, tuple(chunks)


def _entry_from_json(
    row: JSON, layouts: Sequence[tuple[Offsets, tuple[ChunkMetadata, ...]]], num_payloads: int
) -> EntryMetadata:
    name, path, dtype, index = row
    fqn = str(_check_type(name, str))
    keys = None if path is None else tuple(_check_type(key, str, int) for key in _check_type(path, list))
    if dtype is None:
        return EntryMetadata(fqn, keys, "", (), (ChunkMetadata((), (), _payload_from_json(index, num_payloads)),))
    torch_dtype(_check_type(dtype, str))
    size, chunks = layouts[_payload_from_json(index, len(layouts))]
    return EntryMetadata(fqn, keys, dtype, size, chunks)


def _check_paths(paths: Sequence[Sequence[str | int]]) -> None:
    """Raise ValueError if the lists of a nest have many more elements than there are keys."""
    lengths: dict[int, int] = {}
    levels: dict[tuple[int, str | int], int] = {}
    num_keys = 0
    for path in paths:
        if not path or any(isinstance(key, int) and key < 0 for key in path):
            raise ValueError(f"the path {path}")
        num_keys += len(path)
        level = 0
        for key in path:
            if isinstance(key, int):
                lengths[level] = max(lengths.get(level, 0), key + 1)
            level = levels.setdefault((level, key), len(levels) + 1)
    # Planners allocate memory for every element, so a forged index may not be large.
    if sum(lengths.values()) > num_keys + _MAX_LIST_GAPS:
        raise ValueError(f"lists of {sum(lengths.values())} elements, of which at most {num_keys} have a value")


# The .metadata file


def metadata_file_bytes(id: str) -> bytes:
    """The bytes of our `.metadata` file, which tells people and other tools what wrote the checkpoint.

    It is not a pickle: an unpickler takes the first line for an integer, and its error quotes that line before it has
    imported or created anything.

    Args:
        id: of the manifest.
    """
    description = {"format": "shrinkpoint", "see": MANIFEST, "id": id, "read with": "shrinkpoint.train.dcp.Reader"}
    return f"L{_PICKLE_ERROR_TEXT}\n{json.dumps(description)}\n".encode()


def is_overwritten_by_torch(directory: str | Path) -> bool:
    """True if torch's own writer has saved into this directory after ours."""
    path, manifest = Path(directory) / METADATA_FILE, Path(directory) / MANIFEST
    if not path.is_file():  # opening a pipe would block
        return False
    try:
        with path.open("rb") as file:
            is_ours = file.read(1) in (b"L", b"{")  # "{": the line of JSON alone
        return not is_ours and path.stat().st_mtime_ns > manifest.stat().st_mtime_ns
    except FileNotFoundError:
        return False


Owners: TypeAlias = NDArray[np.int64]  # The index of the payload with each chunk of an entry; -1 where no rank wrote it
_HASH_BYTES = 8


class WrittenEntries(NamedTuple):
    """The entries that one rank wrote."""

    # A hash of 8 bytes of each entry's name, joined; that two of ten thousand names have the same one is as likely as 1
    # in 10^11.
    name_hashes: bytes
    # The different offsets of its chunks; None is that of an entry which is not a tensor.
    offsets: tuple[Offsets | None, ...]
    positions: bytes  # of each entry, the position of its offsets in `offsets`; joined, each a little-endian number
    width: int  # bytes of a position


def report_entries(indices: Iterable[MetadataIndex]) -> WrittenEntries:
    """The report of what this rank wrote."""
    offsets: dict[Offsets | None, int] = {}
    hashes, positions = [], []
    for index in indices:
        hashes.append(_name_hash(index.fqn))
        key = None if index.offset is None else tuple(index.offset)
        positions.append(offsets.setdefault(key, len(offsets)))
    dtype = np.min_scalar_type(max(len(offsets) - 1, 0)).newbyteorder("<")
    return WrittenEntries(b"".join(hashes), (*offsets,), np.array(positions, dtype).tobytes(), dtype.itemsize)


def find_owners(metadata: Metadata, reports: Sequence[WrittenEntries]) -> dict[str, Owners]:
    """The owners of each entry of the metadata, in the order of its chunks; of several ranks, the last counts.

    Args:
        reports: by index of the payload.
    """
    union = _Union(reports)
    positions: dict[int, Owners] = {}  # of the offsets of a list of chunks, which tensors of one layout may share
    owners: dict[str, Owners] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            owners[fqn] = union.find(fqn, union.positions([None]))
            continue
        if id(entry.chunks) not in positions:
            positions[id(entry.chunks)] = union.positions([chunk.offsets for chunk in entry.chunks])
        owners[fqn] = union.find(fqn, positions[id(entry.chunks)])
    return owners


class _Union:
    """The reports of all ranks, sorted by name, then by offsets, then by payload."""

    def __init__(self, reports: Sequence[WrittenEntries]) -> None:
        self._offsets: dict[Offsets | None, int] = {}
        hashes, positions, payloads = [np.empty(0, "<u8")], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for payload, report in enumerate(reports):
            known = [self._offsets.setdefault(offsets, len(self._offsets)) for offsets in report.offsets]
            local = np.frombuffer(report.positions, f"<u{report.width}")
            hashes.append(np.frombuffer(report.name_hashes, "<u8"))
            positions.append(np.array(known, np.int64)[local] if local.size else np.empty(0, np.int64))
            payloads.append(np.full(local.size, payload, np.int64))
        names, places, owners = np.concatenate(hashes), np.concatenate(positions), np.concatenate(payloads)
        order = np.lexsort((places, names))  # stable, so that payloads stay in their order
        self._names, self._positions, self._payloads = names[order], places[order], owners[order]

    def positions(self, offsets: Iterable[Sequence[int] | None]) -> Owners:
        """The positions of offsets among all that were reported; -1 for others."""
        keys = (None if each is None else tuple(each) for each in offsets)
        return np.array([self._offsets.get(key, -1) for key in keys], np.int64)

    def find(self, fqn: str, positions: Owners) -> Owners:
        """The payloads with the chunks of an entry at these positions."""
        name = np.frombuffer(_name_hash(fqn), "<u8")
        start, stop = (int(np.searchsorted(self._names, name, side)[0]) for side in ("left", "right"))
        known = self._positions[start:stop]
        last = np.searchsorted(known, positions, "right") - 1
        is_written = (last >= 0) & (positions >= 0)
        is_written[is_written] = known[last[is_written]] == positions[is_written]
        owners = np.full(positions.size, -1, np.int64)
        owners[is_written] = self._payloads[start:stop][last[is_written]]
        return owners


def _name_hash(fqn: str) -> bytes:
    return hashlib.blake2b(fqn.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
