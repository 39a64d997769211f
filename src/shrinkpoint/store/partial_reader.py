"""Reads boxes of tensors from a chain of files without decoding the rest: what a rank needs of another rank's file."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint.codec.coder import Bytes, default_threads
from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError
from shrinkpoint.guard import read_guard
from shrinkpoint.store.decode_plan import Cache, DecodePlan, open_chain
from shrinkpoint.store.file_place import AnyPlace
from shrinkpoint.tensors.dtypes import empty, tensor_bytes, torch_dtype
from shrinkpoint.tensors.info import ITEMSIZE, TensorInfo

CACHE_BYTES = 1 << 27  # Default size of the cache of decoded chunks: small tensors share chunks


class PartialReader:
    """Reads boxes of the tensors in a chain of files; usable in a `with` statement.

    Several threads may call it; reads run one after another, each with `threads` native threads.

    A box that is a complete tensor is decoded with everything it shares a record with, and every digest is compared, as
    when the file is loaded. For a smaller box only the chunks that it covers are decoded, in the last file and in all
    files it depends on: the digests of the stored bytes are compared, and those of the headers when the chain is
    opened. So damage is found in both cases; only a writer that encoded wrong values is not noticed.

    Codebook records with exact values, and lattice records with escapes, are decoded completely where a box touches
    them: how many of these come before a chunk is known only after everything before it is decoded. The same holds for
    codes that form one stream.

    Args:
        chain: the files, paths or URLs, keyframe first, the payload last.
        threads: native threads; None: every core.
        max_bytes: how much memory the tensors of one file may take; None: as for `shrinkpoint.load`.
        cache: bytes of decoded chunks to keep.

    Attributes:
        infos: the tensors of the last file by name, in their order.
        numbers_decoded: numbers decoded so far, in all files; uncompressed values do not count.

    Raises:
        PolicyError: the chain is empty.
        NotFoundError: the payload does not exist.
        ChainError: a base is missing, or is not the one a delta was made against.
        FormatError: a header is damaged.
        StorageError: reading failed.
    """

    def __init__(
        self,
        chain: Sequence[AnyPlace],
        threads: int | None = None,
        *,
        cache: int = CACHE_BYTES,
        max_bytes: int | None = None,
    ) -> None:
        self._chain = open_chain(chain, max_bytes)
        self._threads, self._cache = default_threads(threads), Cache(cache)
        self._lock = threading.Lock()
        self._is_open = True
        self.infos: Mapping[str, TensorInfo] = self._chain[-1].infos
        self.numbers_decoded = 0

    def read(self, name: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Read a box of a tensor into new, contiguous memory of the shape `sizes`, aligned to 64 bytes.

        Args:
            starts, sizes: first index and length on each axis; () for a tensor without axes.

        Raises:
            NotFoundError: there is no such tensor.
            MismatchError: the box is not inside it.
            FormatError: bytes are at fault.
            ChainError: a base lacks a tensor that was encoded against it.
            PolicyError: the chain was closed.
            StorageError: reading failed.
        """
        info = self.infos.get(name)
        if info is None:
            where, expected = self._chain[-1].reader.where, f"one of {len(self.infos)}"
            raise NotFoundError(where, found=f"no tensor {name!r}", expected=expected, do="see `infos`")
        starts, sizes = tuple(starts), tuple(sizes)
        fits = len(starts) == len(sizes) == len(info.shape)
        if not fits or any(
            not 0 <= start <= start + size <= length
            for start, size, length in zip(starts, sizes, info.shape, strict=True)
        ):
            where = f"{self._chain[-1].reader.where}: tensor {info.name!r}"
            found, expected = f"a box of {list(sizes)} at {list(starts)}", f"one within {list(info.shape)}"
            raise MismatchError(where, found=found, expected=expected, do="pass a box within the tensor")
        tensor = empty(sizes, torch_dtype(info.dtype))
        out = tensor_bytes(tensor)
        if out.nbytes:
            offsets, size = contiguous_ranges(info, starts, sizes)
            with self._lock:
                if not self._is_open:
                    raise PolicyError(self._chain[-1].reader.where, found="a chain that was closed", do="open it again")
                plan = DecodePlan(self._chain, self._cache, self._threads)
                try:
                    with read_guard(self._chain[-1].reader.where):
                        decoded = plan.values(name, offsets, size, strict=sizes == info.shape)
                finally:
                    self.numbers_decoded += plan.numbers_decoded
            for start, data in decoded:
                _copy(offsets, size, start, data, out)
        return tensor

    def close(self) -> None:
        """Close the files and free the cache; later reads raise a PolicyError."""
        with self._lock:
            self._is_open = False
            self._cache.clear()
            for file in self._chain:
                file.close()

    def __enter__(self) -> PartialReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def contiguous_ranges(
    info: TensorInfo, starts: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[NDArray[np.int64], int]:
    """Offsets of the contiguous ranges of a box in its tensor, ascending, and the length of each, in bytes."""
    item = ITEMSIZE[info.dtype]
    steps = [item]
    for length in reversed(info.shape[1:]):
        steps.insert(0, steps[0] * length)
    inner = len(info.shape)
    size = item
    while inner and size == steps[inner - 1]:  # the box is complete on the axes from here on
        inner -= 1
        size *= sizes[inner]
    offsets = np.zeros(1, np.int64)
    for axis, step in enumerate(steps[: len(info.shape)]):
        count = sizes[axis] if axis < inner else 1
        offsets = (offsets[:, None] + (starts[axis] + np.arange(count, dtype=np.int64)) * step).reshape(-1)
    return offsets, size


def _copy(offsets: NDArray[np.int64], size: int, start: int, data: Bytes, out: Bytes) -> None:
    """Copy the ranges that are inside `data`, the tensor's bytes from `start` on, to `out`."""
    first, last = np.searchsorted(offsets, [start, start + data.nbytes - size + 1])
    rows = out.reshape(-1, size)
    begins = offsets[first:last] - start
    distances = np.diff(begins)
    if distances.size and bool((distances == distances[0]).all()):
        stride = int(distances[0])
        view = np.lib.stride_tricks.as_strided(data[begins[0] :], (begins.size, size), (stride, 1), writeable=False)
        rows[first:last] = view
        return
    for row, begin in zip(range(first, last), begins, strict=True):
        rows[row] = data[begin : begin + size]
