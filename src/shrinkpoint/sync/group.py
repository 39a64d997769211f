"""Published files through a torch.distributed group: from the trainer's rank to all others at once."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.errors import PolicyError
from shrinkpoint.storage import MemoryStorage, Storage, resolve_storage
from shrinkpoint.sync.published import KEY, Published
from shrinkpoint.sync.ranks import check_group
from shrinkpoint.tensors.dtypes import tensor_bytes

_PUBLISHER, _CLOSED, _NOTHING = -2, -3, -1
"""Numbers that a rank sends instead of the version that it holds."""
_MAX_MESSAGE = 1 << 30  # bytes


class _Rank(NamedTuple):
    """The message of a rank before files are sent."""

    version: int  # That it holds; or `_PUBLISHER`, `_CLOSED`, `_NOTHING`
    id: int = 0  # Of the series, as a number; 0 without one


class GroupLink:
    """One end of the exchange. Every exchange is a collective operation: each rank of the group takes part once.

    Args:
        group: the group.

    Raises:
        PolicyError: it is no process group, or this process does not belong to it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        check_group("group", group)
        self._group = group
        self._device = torch.device("cpu")
        if "gloo" not in dist.get_backend(group) and torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        self.is_closed = False

    def describe(self) -> str:
        """Its name in messages."""
        return f"group of {dist.get_world_size(self._group)} ranks"

    def ask_versions(self, published: Published | None) -> bool:
        """The publisher's half of the first exchange: whether some other rank lacks the version published last."""
        ranks = self._gather(_Rank(_PUBLISHER))
        self._publisher_of(ranks)
        last = _Rank(_NOTHING) if published is None else _Rank(published.version, _series_number(published.id))
        return any(rank != last for rank in ranks if rank.version != _PUBLISHER)

    def send(self, published: Published, storage: Storage) -> None:
        """The publisher's half of the second exchange: the list of versions, and the files of the newest."""
        data = [published.to_bytes(), *(storage.get(key) for file in published.files for key in file.keys)]
        self._broadcast(b"".join(data), dist.get_rank(self._group), [len(part) for part in data])

    def close(self) -> None:
        """The publisher's last exchange: nothing more is published."""
        if not self.is_closed:
            self.is_closed = True
            self._gather(_Rank(_CLOSED))

    def receive(self, version: int | None, id: str) -> MemoryStorage | None:
        """A subscriber's half of both exchanges: what is published next; None if that is nothing more.

        Args:
            version, id: that this rank holds; None and "" without one.
        """
        if self.is_closed:
            return None
        own = _Rank(_NOTHING) if version is None else _Rank(version, _series_number(id))
        ranks = self._gather(own)
        if any(rank.version == _CLOSED for rank in ranks):
            self.is_closed = True
            return None
        sizes, data = self._broadcast(None, self._publisher_of(ranks), None)
        storage = MemoryStorage()
        storage.put(KEY, data[: sizes[0]])
        published, begin = Published.from_bytes(storage.get(KEY), self.describe()), sizes[0]
        for key, size in zip((key for file in published.files for key in file.keys), sizes[1:], strict=False):
            storage.put(key, data[begin : begin + size])
            begin += size
        return storage

    def _gather(self, own: _Rank) -> list[_Rank]:
        parts = [self._empty(2, torch.int64) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, torch.tensor(own, device=self._device), group=self._group)
        return [_Rank(*part.tolist()) for part in parts]

    def _publisher_of(self, ranks: list[_Rank]) -> int:
        publishers = [number for number, rank in enumerate(ranks) if rank.version == _PUBLISHER]
        if len(publishers) != 1:
            found, do = f"{len(publishers)} publishers", "publish on one rank, and update on every other"
            raise PolicyError(self.describe(), found=found, expected="one publisher", do=do)
        return publishers[0]

    def _broadcast(self, data: bytes | None, source: int, sizes: list[int] | None) -> tuple[list[int], memoryview]:
        """Send bytes in up to three parts to all ranks, or receive them."""
        header = torch.zeros(3, dtype=torch.int64)
        if sizes is not None:
            header[: len(sizes)] = torch.tensor(sizes)
        header = header.to(self._device)
        dist.broadcast(header, group=self._group, group_src=source)
        counts = [int(size) for size in header.tolist() if size]
        message = self._empty(sum(counts), torch.uint8)
        if data is not None:
            message.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        for begin in range(0, len(message), _MAX_MESSAGE):
            dist.broadcast(message[begin : begin + _MAX_MESSAGE], group=self._group, group_src=source)
        return counts, tensor_bytes(message).data

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)


def open_place(
    where: str | os.PathLike[str] | Storage | None, group: dist.ProcessGroup | None, ranks: dist.ProcessGroup | None
) -> tuple[Storage, GroupLink | None]:
    """The storage that is published in, and the link to a group: memory is published in then, and sent.

    Raises:
        PolicyError: neither a place nor a group, or both; a group for ranks of a sharded model.
    """
    if group is not None and ranks is not None:
        do = "publish sharded models in a place"
        raise PolicyError("group, ranks", found="both of them", expected="one of them", do=do)
    if (where is None) == (group is None):
        found = "neither" if where is None else "both of them"
        raise PolicyError("where, group", found=found, expected="one of them", do="pass a place, or group=")
    if group is None:
        assert where is not None
        return resolve_storage(where, "where"), None
    return MemoryStorage(), GroupLink(group)


def _series_number(id: str) -> int:
    """The id of a series, 16 hexadecimal digits, as a signed number of 64 bits."""
    return int(id, 16) - (1 << 63)
