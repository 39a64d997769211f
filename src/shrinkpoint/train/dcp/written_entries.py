"""Entries by the rank that wrote them: ten bytes an entry, and their union on the coordinator, in arrays.

R ranks that write shards of T tensors report R x T entries to one process. As objects of torch with their names, these
would be 80 bytes each on the wire and half a kilobyte in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from shrinkpoint.train.dcp.checkpoint_metadata import Offsets

Owners: TypeAlias = NDArray[np.int64]
"""The index of the payload with each chunk of an entry; -1 where no rank wrote it."""
_HASH_BYTES = 8


class WrittenEntries(NamedTuple):
    """The entries that one rank wrote.

    Attributes:
        name_hashes: a hash of 8 bytes of each entry's name, joined; that two of ten thousand names have the same one
            is as likely as 1 in 10^11.
        offsets: the different offsets of its chunks; None is that of an entry which is not a tensor.
        positions: of each entry, the position of its offsets in `offsets`; joined, each a little-endian number.
        width: bytes of a position.
    """

    name_hashes: bytes
    offsets: tuple[Offsets | None, ...]
    positions: bytes
    width: int


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
