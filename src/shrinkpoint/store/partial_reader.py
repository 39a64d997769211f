"""Boxes of tensors out of a chain of files: what one rank needs of what other ranks saved."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint.codec.coder import Bytes, default_threads
from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError
from shrinkpoint.guard import read_guard
from shrinkpoint.store.decode_plan import Cache, DecodePlan
from shrinkpoint.store.partial_file import close_chain, open_chain
from shrinkpoint.tensors.dtypes import tensor_from_bytes
from shrinkpoint.tensors.info import ITEMSIZE, TensorInfo

CACHE_BYTES = 1 << 27
"""Bytes of what was decoded that are kept for the next box: small tensors share chunks."""


class PartialReader:
    """A chain of files, open to be read in part; usable in a `with` statement.

    Several threads may read at once; they take turns, and each read uses all threads it may.

    A box that is a whole tensor is decoded with everything it shares a record with, and every digest is compared, as
    when the file is loaded. For a smaller box only the chunks are decoded that it covers, in the last file and in all
    it stands on: the digests of the stored bytes are compared, and those of the headers when the chain is opened. So
    damage is found all the same; what is not found is a writer that coded other values than it was given.

    Quantized records with exact values, and points with escapes, are decoded as a whole where a box touches them: how
    many of these come before a chunk is known only when all before it is decoded. So are codes that are one stream.

    Args:
        chain: the files, keyframe first, the payload last.
        threads: native threads; None: every core.
        cache: bytes that are kept of what was decoded.

    Attributes:
        infos: the tensors of the last file by name, in their order.
        numbers_decoded: numbers decoded so far, in all files; what is stored as it is does not count.

    Raises:
        PolicyError: an empty chain.
        NotFoundError: the payload is not there.
        ChainError: a base is not there, or is not the one a delta was made against.
        FormatError: a header is damaged.
        StorageError: reading failed.
    """

    def __init__(self, chain: Sequence[Path], threads: int | None = None, *, cache: int = CACHE_BYTES) -> None:
        self._chain = open_chain([Path(path) for path in chain])
        self._threads, self._cache = default_threads(threads), Cache(cache)
        self._lock = threading.Lock()
        self._is_open = True
        self.infos: Mapping[str, TensorInfo] = self._chain[-1].infos
        self.numbers_decoded = 0

    def read(self, name: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A box of a tensor: contiguous, of the shape `sizes`, private to the caller.

        Args:
            starts, sizes: for each axis; () for a tensor without axes.

        Raises:
            NotFoundError: there is no such tensor.
            MismatchError: the box is not inside it.
            FormatError: bytes are at fault.
            ChainError: a base lacks what was made against it.
            PolicyError: the chain was closed.
            StorageError: reading failed.
        """
        info = self._find(name)
        starts, sizes = tuple(starts), tuple(sizes)
        self._check(info, starts, sizes)
        box = TensorInfo(name, sizes, info.dtype)
        out = np.empty(box.nbytes, np.uint8)
        if box.nbytes:
            places, size = contiguous_ranges(info, starts, sizes)
            with self._lock:
                self._check_open()
                plan = DecodePlan(self._chain, self._cache, self._threads)
                try:
                    with read_guard(self._chain[-1].reader.where):
                        found = plan.values(name, places, size, strict=sizes == info.shape)
                finally:
                    self.numbers_decoded += plan.numbers_decoded
            for start, data in found:
                _copy(places, size, start, data, out)
        return tensor_from_bytes(out, box)

    def close(self) -> None:
        """Give back files and memory; nothing can be read any more."""
        with self._lock:
            self._is_open = False
            self._cache.clear()
            close_chain(self._chain)

    def __enter__(self) -> PartialReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, name: str) -> TensorInfo:
        info = self.infos.get(name)
        if info is None:
            where, expected = self._chain[-1].reader.where, f"one of {len(self.infos)}"
            raise NotFoundError(where, found=f"no tensor {name!r}", expected=expected, do="look at `infos`")
        return info

    def _check_open(self) -> None:
        if not self._is_open:
            raise PolicyError(self._chain[-1].reader.where, found="a chain that was closed", do="open it again")

    def _check(self, info: TensorInfo, starts: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        fits = len(starts) == len(sizes) == len(info.shape)
        if not fits or any(
            not 0 <= start <= start + size <= length
            for start, size, length in zip(starts, sizes, info.shape, strict=True)
        ):
            where = f"{self._chain[-1].reader.where}: tensor {info.name!r}"
            found, expected = f"a box of {list(sizes)} at {list(starts)}", f"one inside of {list(info.shape)}"
            raise MismatchError(where, found=found, expected=expected, do="ask for a part of the tensor")


def contiguous_ranges(
    info: TensorInfo, starts: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[NDArray[np.int64], int]:
    """Where the contiguous stretches of a box begin in its tensor, ascending, and how long each is; in bytes."""
    item = ITEMSIZE[info.dtype]
    steps = [item]
    for length in reversed(info.shape[1:]):
        steps.insert(0, steps[0] * length)
    inner = len(info.shape)
    size = item
    while inner and size == steps[inner - 1]:  # axes from here on are whole
        inner -= 1
        size *= sizes[inner]
    places = np.zeros(1, np.int64)
    for axis, step in enumerate(steps[: len(info.shape)]):
        count = sizes[axis] if axis < inner else 1
        places = (places[:, None] + (starts[axis] + np.arange(count, dtype=np.int64)) * step).reshape(-1)
    return places, size


def _copy(offsets: NDArray[np.int64], size: int, start: int, data: Bytes, out: Bytes) -> None:
    """Fill in the stretches that lie in `data`, which has the tensor's bytes from `start` on."""
    first, last = np.searchsorted(offsets, [start, start + data.nbytes - size + 1])
    rows = out.reshape(-1, size)
    here = offsets[first:last] - start
    apart = np.diff(here)
    if apart.size and bool((apart == apart[0]).all()):
        step = int(apart[0])
        view = np.lib.stride_tricks.as_strided(data[here[0] :], (here.size, size), (step, 1), writeable=False)
        rows[first:last] = view
        return
    for row, place in zip(range(first, last), here, strict=True):
        rows[row] = data[place : place + size]
