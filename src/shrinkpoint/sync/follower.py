"""The newest version of a place, decoded for an engine that loads weights by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.errors import NotFoundError
from shrinkpoint.storage import Storage, resolve_storage
from shrinkpoint.sync.live_writes import VersionTensor
from shrinkpoint.sync.reader import HeldVersion, VersionReader
from shrinkpoint.tensors.dtypes import as_bits


class Follower:
    """Reads the newest version that a `Publisher` has written, and holds its tensors on the CPU.

    Args:
        where: as the publisher's.
        poll: seconds between two looks while `read` waits.
        threads: native threads for decoding; None: every core.
        max_bytes: limit on the bytes of a version's tensors; None: as of `shrinkpoint.load`.

    Attributes:
        version: the version that is held; None before the first `read`.
        tensors: its tensors by published name.

    Raises:
        PolicyError: an invalid argument.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Storage,
        *,
        poll: float = 0.05,
        threads: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._poll = validate.check_float("poll", poll)
        storage = resolve_storage(where, "where")
        self._where = storage.describe()
        self._reader = VersionReader(storage, threads=threads, max_bytes=max_bytes)
        self._held: HeldVersion | None = None
        self.tensors: dict[str, Tensor] = {}

    @property
    def version(self) -> int | None:
        return None if self._held is None else self._held.version

    def read(self, minimum: int = 0, *, wait: float = 0.0) -> int:
        """Read the newest version, verified as `Subscriber.update` verifies it.

        Args:
            minimum: the lowest version that will do.
            wait: seconds to wait for that version.

        Returns:
            the number of the version that is held now.

        Raises:
            NotFoundError: no such version is published in time.
            ChainError, FormatError: files are damaged or gone; the version before is still held.
            StorageError: the place cannot be read.
        """
        deadline = time.monotonic() + wait
        while (published := self._reader.published()) is None or published.version < minimum:
            if time.monotonic() >= deadline:
                found = "nothing published" if published is None else f"version {published.version}"
                do = "publish first, or pass the version that Publisher.publish returned"
                raise NotFoundError(self._where, found=found, expected=f"version {minimum} or a newer one", do=do)
            time.sleep(self._poll)
        held = self._reader.read_newest(published, self._held)
        if held is not self._held:
            tensors = {name: _whole(tensor) for name, tensor in held.tensors(self._where).items()}
            self._held, self.tensors = held, tensors
        return held.version


def _whole(tensor: VersionTensor) -> Tensor:
    """The tensor in one piece: a view of a piece that is whole, else a copy of all pieces."""
    if len(tensor.pieces) == 1 and tensor.pieces[0].sizes == tensor.shape:
        return tensor.pieces[0].tensor
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for piece in tensor.pieces:
        box = zip(piece.offsets, piece.sizes, strict=True)
        whole[tuple(slice(begin, begin + size) for begin, size in box)] = piece.tensor
    return whole


def changed_names(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that differ from the old ones in shape, dtype or any bit."""
    return [name for name, tensor in new.items() if name not in old or not _is_same(tensor, old[name])]


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and dtype of each tensor."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _is_same(new: Tensor, old: Tensor) -> bool:
    if new.shape != old.shape or new.dtype != old.dtype:
        return False
    return new.data_ptr() == old.data_ptr() or torch.equal(as_bits(new), as_bits(old))
