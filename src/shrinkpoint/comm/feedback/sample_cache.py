"""Rows by the id of a sample, in memory or in a file, the least recently used ones forgotten beyond a bound."""

from __future__ import annotations

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

from shrinkpoint.comm.feedback.base import zero_nonfinite_
from shrinkpoint.errors import MismatchError, NoSpaceError, PolicyError, StorageError

_MIN_ROWS = 64
_DIGEST_ROWS = 64


class LRUIndex:
    """Which samples are known, how often each was here, and which row each has; the least recently used first.

    Nothing of it depends on values: an end that knows the ids of a message can say beforehand what follows from it.

    Args:
        value_bytes: of one value of a row.
        max_bytes: of all rows together.
        warmup: a row is exact so many times.
    """

    def __init__(self, value_bytes: int, *, max_bytes: int, warmup: int = 1) -> None:
        self._value_bytes, self._max_bytes, self._warmup = value_bytes, max_bytes, warmup
        self.shape: tuple[int, ...] | None = None
        self.rows: OrderedDict[int, int] = OrderedDict()  # id -> row; what was used last is last
        self.visits: dict[int, int] = {}  # up to `warmup`

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape or ())

    @property
    def capacity(self) -> int:
        return self._max_bytes // max(self.row_numel * self._value_bytes, 1)

    def copy(self) -> LRUIndex:
        other = LRUIndex(self._value_bytes, max_bytes=self._max_bytes, warmup=self._warmup)
        other.shape, other.rows, other.visits = self.shape, self.rows.copy(), self.visits.copy()
        return other

    def set_row_shape(self, shape: Sequence[int]) -> bool:
        """Take rows of this shape from now on; whether others were known, which then are forgotten.

        Raises:
            PolicyError: not one such row is within the bound.
        """
        if tuple(shape) == self.shape:
            return False
        restarts, self.shape = self.shape is not None, tuple(shape)
        self.clear()
        if self.capacity < 1:
            row = self.row_numel * self._value_bytes
            found, expected = f"{self._max_bytes}", f"at least the {row} bytes of a row"
            raise PolicyError("AQSGD, most_bytes", found=found, expected=expected)
        return restarts

    def clear(self) -> None:
        self.rows.clear()
        self.visits.clear()

    def exact_rows(self, ids: Sequence[int], shape: Sequence[int]) -> list[bool]:
        """Of a message with these samples, which rows are sent as they are; it changes nothing."""
        if tuple(shape) != self.shape:
            return [self._warmup > 0] * len(ids)
        return [self.visits.get(one, 0) < self._warmup for one in ids]

    def record_visit(self, ids: Sequence[int]) -> dict[int, int]:
        """Count a visit of each sample; by row, which of the ids is kept there, of equal ones the last."""
        taken, before = dict[int, int](), {one: self.visits.get(one, 0) for one in ids}
        for at, one in enumerate(ids):
            taken[self._slot_for(one)] = at
        for one, count in before.items():
            if one in self.rows:
                self.visits[one] = min(count + 1, self._warmup)
        return taken

    def _slot_for(self, sample: int) -> int:
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
    """What both ends do with the same calls leads to the same rows: nothing depends on time or on addresses.

    Args:
        dtype: in which rows are kept.
        max_bytes: of all rows together.
        cache_dir: keep them in a file here that has no name and is gone with the process.
        warmup: a row is exact so many times.

    Attributes:
        index: of the samples.
        restarts: how often all was forgotten because rows had another shape.
    """

    def __init__(self, dtype: torch.dtype, *, max_bytes: int, cache_dir: str | None = None, warmup: int = 1) -> None:
        self.restarts = 0
        self._dtype, self._warmup = dtype, warmup
        self._buffer = _FileRowBuffer(cache_dir, dtype) if cache_dir is not None else _RowBuffer(dtype)
        self.index = LRUIndex(dtype.itemsize, max_bytes=max_bytes, warmup=warmup)

    def get(self, ids: Sequence[int], like: Tensor) -> Tensor:
        """Float32, of the shape and on the device of `like`: zeros for those that are not known."""
        self._set_row_shape(like)
        known = [(at, self.index.rows[one]) for at, one in enumerate(ids) if one in self.index.rows]
        if not known:
            return torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        at, rows = (torch.tensor(part) for part in zip(*known, strict=True))
        found = self._buffer.rows.index_select(0, rows).to(like.device).to(torch.float32)
        if len(known) == len(ids):
            return found.reshape(like.shape)
        out = torch.zeros(len(ids), self.index.row_numel, dtype=torch.float32, device=like.device)
        return out.index_copy_(0, at.to(like.device), found).reshape(like.shape)

    def put(self, ids: Sequence[int], x: Tensor) -> None:
        """Keep rows, rounded, and count a visit of each; of two of the same id the later one is kept."""
        self._set_row_shape(x)
        taken = self.index.record_visit(ids)
        if taken:
            self._buffer.grow(max(taken) + 1, self.index.row_numel, self.index.capacity)
            new = x.detach().reshape(len(ids), -1).to(self._dtype, copy=True)
            if len(taken) < len(ids):
                new = new.index_select(0, torch.tensor(list(taken.values()), device=x.device))
            self._buffer.rows.index_copy_(0, torch.tensor(list(taken)), zero_nonfinite_(new).cpu())

    def state_dict(self) -> dict[str, Any]:
        """Ids from the least recently used on, the row and the visits of each, and all rows as they lie."""
        order = self.index
        ids, rows = torch.tensor(list(order.rows), dtype=torch.int64), torch.tensor(list(order.rows.values()))
        kept = self._buffer.rows[: len(order.rows)] if order.rows else torch.empty(0, 0, dtype=self._dtype)
        return {
            "ids": ids,
            "at": rows.to(torch.int64),
            "rows": kept,
            "shape": list(order.shape or ()),
            "visits": self._visit_counts(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ids, at, rows = state["ids"], state["at"], state["rows"]
        if rows.dtype != self._dtype:
            raise MismatchError("AQSGD, samples", found=f"{rows.dtype} in the checkpoint", expected=f"{self._dtype}")
        order = self.index
        order.clear()
        if not ids.numel():
            return
        order.shape = tuple(state["shape"])
        visits = state.get("visits", torch.full_like(ids, self._warmup))[-order.capacity :]
        ids, at = ids[-order.capacity :], at[-order.capacity :]
        self._buffer.grow(ids.numel(), order.row_numel, order.capacity)
        self._buffer.rows[: ids.numel()] = rows.index_select(0, at)
        order.rows.update((one, row) for row, one in enumerate(ids.tolist()))
        order.visits.update(zip(ids.tolist(), visits.tolist(), strict=True))

    def digest_rows(self) -> list[Tensor]:
        """All ids in their order, with their visits, and some of the rows; nothing if there are none."""
        known = self.index.rows
        some = list(known.values())[:: max(len(known) // _DIGEST_ROWS, 1)]
        ids = torch.tensor(list(known), dtype=torch.int64)
        return [ids, self._visit_counts(), self._buffer.rows.index_select(0, torch.tensor(some))] if some else []

    def _visit_counts(self) -> Tensor:
        return torch.tensor([self.index.visits.get(one, 0) for one in self.index.rows], dtype=torch.int64)

    def _set_row_shape(self, x: Tensor) -> None:
        self.restarts += self.index.set_row_shape(x.shape[1:])


class _RowBuffer:
    """Rows in memory that grow by doubling."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows = torch.empty(0, 0, dtype=dtype)

    def grow(self, count: int, width: int, max_rows: int) -> None:
        """Make room for `count` rows of `width` values; those there stay, if they have that width."""
        old = self.rows
        if width == old.shape[1] and count <= old.shape[0]:
            return
        kept = old.shape[0] if old.shape[1] == width else 0
        rows = min(max(count, 2 * kept, _MIN_ROWS), max_rows)
        self.rows = self._resize(rows, width, kept)

    def _resize(self, rows: int, width: int, num_copied: int) -> Tensor:
        new = torch.empty(rows, width, dtype=self.rows.dtype)
        if num_copied:
            new[:num_copied] = self.rows[:num_copied]
        return new


class _FileRowBuffer(_RowBuffer):
    """Rows in a file, mapped into memory."""

    def __init__(self, cache_dir: str, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._cache_dir = cache_dir
        try:
            Path(cache_dir).mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=cache_dir)  # noqa: SIM115  (it lives as long as the rows do)
        except OSError as error:
            raise StorageError(cache_dir, found=str(error), expected="a folder to write to") from error
        weakref.finalize(self, self._file.close)

    def _resize(self, rows: int, width: int, num_copied: int) -> Tensor:
        size = rows * width * self.rows.dtype.itemsize
        try:  # space that is not there is found here, not when a page of it is written
            self._reserve(max(size, 1))
            mapped = mmap.mmap(self._file.fileno(), max(size, 1))
        except OSError as error:
            kind = NoSpaceError if error.errno == errno.ENOSPC else StorageError
            raise kind(self._cache_dir, found=str(error), expected=f"{size} bytes for the samples of AQ-SGD") from error
        return torch.frombuffer(mapped, dtype=self.rows.dtype, count=rows * width).reshape(rows, width)

    def _reserve(self, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), 0, size)
        else:  # macOS
            self._file.truncate(size)
