"""An LRU cache of rows by sample id, in memory or in a file, bounded in bytes."""

from __future__ import annotations

import copy
import errno
import math
import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.comm.error_feedback import zero_nonfinite_
from shrinkpoint.errors import MismatchError, NoSpaceError, PolicyError, StorageError

_MIN_ROWS = 64
_DIGEST_ROWS = 64
"""Rows, about, that the digest of a cache covers."""


class LRUIndex:
    """The row and the number of visits of each cached sample, the least recently used first.

    It does not depend on values: an end that knows the ids of future messages can predict it.

    Attributes:
        shape: of a row; None before the first one.
        rows: the row of each sample id, in the order of last use.
        visits: of each sample id, counted up to `warmup`; so many are sent uncompressed.
    """

    def __init__(self, value_bytes: int, *, max_bytes: int, warmup: int = 1) -> None:
        self._value_bytes, self._max_bytes, self._warmup = value_bytes, max_bytes, warmup
        self.shape: tuple[int, ...] | None = None
        self.rows: OrderedDict[int, int] = OrderedDict()
        self.visits: dict[int, int] = {}

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape or ())

    @property
    def capacity(self) -> int:
        return self.capacity_for(self.row_numel)

    def capacity_for(self, row_numel: int) -> int:
        """The number of rows of so many values that fit."""
        return self._max_bytes // max(row_numel * self._value_bytes, 1)

    def copy(self) -> LRUIndex:
        other = copy.copy(self)
        other.rows, other.visits = self.rows.copy(), self.visits.copy()
        return other

    def set_row_shape(self, shape: Sequence[int]) -> bool:
        """Set the shape of rows, at least one of which must fit; return whether rows of another shape were dropped."""
        if tuple(shape) == self.shape:
            return False
        is_restart, self.shape = self.shape is not None, tuple(shape)
        self.clear()
        if self.capacity < 1:
            problem, expected = (
                f"{self._max_bytes}",
                f"at least the {self.row_numel * self._value_bytes} bytes of a row",
            )
            do = "allow more bytes, or choose a narrower dtype="
            raise PolicyError("AQSGD, most_bytes", found=problem, expected=expected, do=do)
        return is_restart

    def clear(self) -> None:
        self.rows.clear()
        self.visits.clear()

    def exact_rows(self, ids: Sequence[int], shape: Sequence[int]) -> list[bool]:
        """Which rows of a message with these samples are sent uncompressed; the index does not change."""
        if tuple(shape) != self.shape:
            return [self._warmup > 0] * len(ids)
        return [self.visits.get(sample, 0) < self._warmup for sample in ids]

    def record_visit(self, ids: Sequence[int]) -> dict[int, int]:
        """Count a visit of each sample; return, by row, the index of the id to store there, of equal ids the last."""
        visits = {sample: self.visits.get(sample, 0) for sample in ids}
        row_indices = {self._row_for(sample): index for index, sample in enumerate(ids)}
        for sample, count in visits.items():
            if sample in self.rows:
                self.visits[sample] = min(count + 1, self._warmup)
        return row_indices

    def _row_for(self, sample: int) -> int:
        """The row of a sample; if there is none, a new one, or that of the least recently used sample."""
        if sample in self.rows:
            self.rows.move_to_end(sample)
        elif len(self.rows) < self.capacity:
            self.rows[sample] = len(self.rows)
        else:
            old, row = self.rows.popitem(last=False)
            self.visits.pop(old, None)
            self.rows[sample] = row
        return self.rows[sample]


class SampleCache:
    """Rows by sample id. Two caches with the same calls have the same rows: nothing depends on time or addresses.

    Args:
        dtype: of the stored rows, whose size together is at most `max_bytes`.
        cache_dir: store rows in an unnamed file in this directory, which is removed when the process ends; None for
            memory.
        warmup: the number of visits of a sample that are sent uncompressed.

    Attributes:
        restarts: how often all rows were dropped because their shape had changed.
    """

    def __init__(self, dtype: torch.dtype, *, max_bytes: int, cache_dir: str | None = None, warmup: int = 1) -> None:
        self.restarts = 0
        self._dtype, self._warmup = dtype, warmup
        self._buffer = _RowBuffer(dtype) if cache_dir is None else _FileRowBuffer(cache_dir, dtype)
        self.index = LRUIndex(dtype.itemsize, max_bytes=max_bytes, warmup=warmup)

    def get(self, ids: Sequence[int], like: Tensor) -> Tensor:
        """The rows of samples: float32, of the shape and on the device of `like`; zeros if a sample is not cached."""
        self.restarts += self.index.set_row_shape(like.shape[1:])
        rows = self.index.rows
        matches = [(position, rows[sample]) for position, sample in enumerate(ids) if sample in rows]
        if not matches:
            return torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        positions, row_numbers = (torch.tensor(part) for part in zip(*matches, strict=True))
        cached = self._buffer.rows.index_select(0, row_numbers).to(like.device).to(torch.float32)
        if len(matches) == len(ids):
            return cached.reshape(like.shape)
        out = torch.zeros(len(ids), self.index.row_numel, dtype=torch.float32, device=like.device)
        return out.index_copy_(0, positions.to(like.device), cached).reshape(like.shape)

    def put(self, ids: Sequence[int], tensor: Tensor) -> None:
        """Store rows, rounded, and count a visit of each; of two rows of the same id the later one is stored."""
        self.restarts += self.index.set_row_shape(tensor.shape[1:])
        row_indices = self.index.record_visit(ids)
        if row_indices:
            self._buffer.grow(max(row_indices) + 1, self.index.row_numel, self.index.capacity)
            rounded = tensor.detach().reshape(len(ids), -1).to(self._dtype, copy=True)
            if len(row_indices) < len(ids):
                rounded = rounded.index_select(0, torch.tensor(list(row_indices.values()), device=tensor.device))
            self._buffer.rows.index_copy_(0, torch.tensor(list(row_indices)), zero_nonfinite_(rounded).cpu())

    def state_dict(self) -> dict[str, Any]:
        """Ids, the least recently used first, the row and the visits of each, and the buffer of rows."""
        rows, shape = self.index.rows, list(self.index.shape or ())
        values = self._buffer.rows[: len(rows)] if rows else torch.empty(0, 0, dtype=self._dtype)
        ids, numbers = (torch.tensor(list(part), dtype=torch.int64) for part in (rows, rows.values()))
        return {"ids": ids, "at": numbers, "rows": values, "shape": shape, "visits": self._visit_counts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            MismatchError: it is of another dtype, or of more rows than fit here; then nothing has changed.
        """
        ids, positions, rows, shape = state["ids"], state["at"], state["rows"], tuple(state["shape"])
        if rows.dtype != self._dtype:
            do = "make it with the dtype= that it had"
            raise MismatchError(
                "AQSGD, samples", found=f"{rows.dtype} in the checkpoint", expected=f"{self._dtype}", do=do
            )
        index, capacity = self.index, self.index.capacity_for(math.prod(shape))
        if ids.numel() > capacity:
            found, do = f"{ids.numel()} samples in the checkpoint", "make it with the most_bytes= that it had"
            raise MismatchError("AQSGD, samples", found=found, expected=f"at most {capacity}", do=do)
        index.clear()
        if not ids.numel():
            return
        index.shape = shape
        visits = state.get("visits", torch.full_like(ids, self._warmup))
        self._buffer.grow(ids.numel(), index.row_numel, capacity)
        self._buffer.rows[: ids.numel()] = rows.index_select(0, positions)
        index.rows.update((sample, row) for row, sample in enumerate(ids.tolist()))
        index.visits.update(zip(ids.tolist(), visits.tolist(), strict=True))

    def digest_rows(self) -> list[Tensor]:
        """All ids in their order, their visits, and some of the rows; an empty list if there are none."""
        rows = self.index.rows
        if not rows:
            return []
        sampled_rows = torch.tensor(list(rows.values())[:: max(len(rows) // _DIGEST_ROWS, 1)])
        ids = torch.tensor(list(rows), dtype=torch.int64)
        return [ids, self._visit_counts(), self._buffer.rows.index_select(0, sampled_rows)]

    def _visit_counts(self) -> Tensor:
        return torch.tensor([self.index.visits.get(sample, 0) for sample in self.index.rows], dtype=torch.int64)


class _RowBuffer:
    """A buffer of rows in memory, which grows by doubling."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows = torch.empty(0, 0, dtype=dtype)

    def grow(self, count: int, width: int, max_rows: int) -> None:
        """Grow to at least `count` rows of `width` values; existing rows are copied if they have that width."""
        old = self.rows
        if width == old.shape[1] and count <= old.shape[0]:
            return
        num_copied = old.shape[0] if old.shape[1] == width else 0
        rows = min(max(count, 2 * num_copied, _MIN_ROWS), max_rows)
        self.rows = self._resize(rows, width, num_copied)

    def _resize(self, rows: int, width: int, num_copied: int) -> Tensor:
        new = torch.empty(rows, width, dtype=self.rows.dtype)
        if num_copied:
            new[:num_copied] = self.rows[:num_copied]
        return new


class _FileRowBuffer(_RowBuffer):
    """A buffer of rows in a file, mapped into memory."""

    def __init__(self, cache_dir: str, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._cache_dir = cache_dir
        try:
            Path(cache_dir).mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=cache_dir)  # noqa: SIM115  (it is open as long as the rows are used)
        except OSError as error:
            do = "name another folder, or free space there"
            raise StorageError(cache_dir, found=str(error), expected="a directory to write to", do=do) from error
        weakref.finalize(self, self._file.close)

    def _resize(self, rows: int, width: int, num_copied: int) -> Tensor:
        size = rows * width * self.rows.dtype.itemsize
        try:  # a full disk is found here, not when a page is written
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, max(size, 1))
            else:  # macOS
                self._file.truncate(max(size, 1))
            mapped = mmap.mmap(self._file.fileno(), max(size, 1))
        except OSError as error:
            kind = NoSpaceError if error.errno == errno.ENOSPC else StorageError
            expected, do = f"{size} bytes for the samples of AQ-SGD", "free space there, or set most_bytes="
            raise kind(self._cache_dir, found=str(error), expected=expected, do=do) from error
        return torch.frombuffer(mapped, dtype=self.rows.dtype, count=rows * width).reshape(rows, width)
