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

from shrinkpoint.comm.feedback.base import finite_
from shrinkpoint.errors import MismatchError, NoSpaceError, PolicyError, StorageError

_FIRST = 64
_SHARED_ROWS = 64


class Shelf:
    """What both ends do with the same calls leads to the same rows: nothing depends on time or on addresses.

    Args:
        dtype: in which rows are kept.
        most_bytes: of all rows together.
        folder: keep them in a file here that has no name and is gone with the process.

    Attributes:
        restarts: how often all was forgotten because rows had another shape.
    """

    def __init__(self, dtype: torch.dtype, *, most_bytes: int, folder: str | None = None) -> None:
        self.restarts = 0
        self._dtype, self._most_bytes = dtype, most_bytes
        self._memory = _File(folder, dtype) if folder is not None else _Memory(dtype)
        self._shape: tuple[int, ...] | None = None
        self._order: OrderedDict[int, int] = OrderedDict()  # id -> row; what was used last is last

    def get(self, ids: Sequence[int], like: Tensor) -> Tensor:
        """Float32, of the shape and on the device of `like`: zeros for those that are not known."""
        self._accept(like)
        known = [(at, self._order[one]) for at, one in enumerate(ids) if one in self._order]
        if not known:
            return torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        at, rows = (torch.tensor(part) for part in zip(*known, strict=True))
        found = self._memory.rows.index_select(0, rows).to(like.device).to(torch.float32)
        if len(known) == len(ids):
            return found.reshape(like.shape)
        out = torch.zeros(len(ids), self._width, dtype=torch.float32, device=like.device)
        return out.index_copy_(0, at.to(like.device), found).reshape(like.shape)

    def put(self, ids: Sequence[int], x: Tensor) -> None:
        """Keep rows, rounded; of two of the same id the later one."""
        self._accept(x)
        taken: dict[int, int] = {}
        for at, one in enumerate(ids):
            taken[self._row(one)] = at
        if taken:
            self._memory.grow(max(taken) + 1, self._width, self._capacity)
            new = x.detach().reshape(len(ids), -1).to(self._dtype, copy=True)
            if len(taken) < len(ids):
                new = new.index_select(0, torch.tensor(list(taken.values()), device=x.device))
            self._memory.rows.index_copy_(0, torch.tensor(list(taken)), finite_(new).cpu())

    def state_dict(self) -> dict[str, Any]:
        """Ids from the least recently used on, the row of each, and all rows as they lie."""
        ids, rows = torch.tensor(list(self._order), dtype=torch.int64), torch.tensor(list(self._order.values()))
        kept = self._memory.rows[: len(self._order)] if self._order else torch.empty(0, 0, dtype=self._dtype)
        return {"ids": ids, "at": rows.to(torch.int64), "rows": kept, "shape": list(self._shape or ())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ids, at, rows = state["ids"], state["at"], state["rows"]
        if rows.dtype != self._dtype:
            raise MismatchError("AQSGD, samples", found=f"{rows.dtype} in the checkpoint", expected=f"{self._dtype}")
        self._order.clear()
        if not ids.numel():
            return
        self._shape = tuple(state["shape"])
        ids, at = ids[-self._capacity :], at[-self._capacity :]
        self._memory.grow(ids.numel(), self._width, self._capacity)
        self._memory.rows[: ids.numel()] = rows.index_select(0, at)
        self._order.update((one, row) for row, one in enumerate(ids.tolist()))

    def shared(self) -> list[Tensor]:
        """All ids in their order, and some of the rows; nothing if there are none."""
        some = list(self._order.values())[:: max(len(self._order) // _SHARED_ROWS, 1)]
        ids = torch.tensor(list(self._order), dtype=torch.int64)
        return [ids, self._memory.rows.index_select(0, torch.tensor(some))] if some else []

    @property
    def _width(self) -> int:
        return math.prod(self._shape or ())

    @property
    def _capacity(self) -> int:
        return self._most_bytes // max(self._width * self._dtype.itemsize, 1)

    def _accept(self, x: Tensor) -> None:
        shape = tuple(x.shape[1:])
        if shape == self._shape:
            return
        self.restarts += self._shape is not None
        self._shape = shape
        self._order.clear()
        if self._capacity < 1:
            found, expected = f"{self._most_bytes}", f"at least the {self._width * self._dtype.itemsize} bytes of a row"
            raise PolicyError("AQSGD, most_bytes", found=found, expected=expected)

    def _row(self, one: int) -> int:
        if one in self._order:
            self._order.move_to_end(one)
        elif len(self._order) < self._capacity:
            self._order[one] = len(self._order)
        else:
            _, row = self._order.popitem(last=False)
            self._order[one] = row
        return self._order[one]


class _Memory:
    """Rows in memory that grow by doubling."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows = torch.empty(0, 0, dtype=dtype)

    def grow(self, count: int, width: int, most: int) -> None:
        """Make room for `count` rows of `width` values; those there stay, if they have that width."""
        old = self.rows
        if width == old.shape[1] and count <= old.shape[0]:
            return
        kept = old.shape[0] if old.shape[1] == width else 0
        rows = min(max(count, 2 * kept, _FIRST), most)
        self.rows = self._resized(rows, width, kept)

    def _resized(self, rows: int, width: int, kept: int) -> Tensor:
        new = torch.empty(rows, width, dtype=self.rows.dtype)
        if kept:
            new[:kept] = self.rows[:kept]
        return new


class _File(_Memory):
    """Rows in a file, mapped into memory."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._folder = folder
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (it lives as long as the rows do)
        except OSError as error:
            raise StorageError(folder, found=str(error), expected="a folder to write to") from error
        weakref.finalize(self, self._file.close)

    def _resized(self, rows: int, width: int, kept: int) -> Tensor:
        size = rows * width * self.rows.dtype.itemsize
        try:  # space that is not there is found here, not when a page of it is written
            self._reserve(max(size, 1))
            mapped = mmap.mmap(self._file.fileno(), max(size, 1))
        except OSError as error:
            kind = NoSpaceError if error.errno == errno.ENOSPC else StorageError
            raise kind(self._folder, found=str(error), expected=f"{size} bytes for the samples of AQ-SGD") from error
        return torch.frombuffer(mapped, dtype=self.rows.dtype, count=rows * width).reshape(rows, width)

    def _reserve(self, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), 0, size)
        else:  # macOS
            self._file.truncate(size)
