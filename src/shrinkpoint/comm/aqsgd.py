"""AQ-SGD: messages are changes of a sample's activation since its last visit, which both ends have in a cache.

The cache is an LRU cache of rows by sample id, in memory or in a file, bounded in bytes.
"""

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.base import CompressorContext, Identity
from shrinkpoint.comm.compressors.layout import DTYPE_BY_NAME
from shrinkpoint.comm.error_feedback import (
    ErrorFeedback,
    FeedbackState,
    MessageInfo,
    PackedMessage,
    decode_float32,
    work_dtype,
    zero_nonfinite_,
)
from shrinkpoint.errors import MismatchError, NoSpaceError, PolicyError, StorageError
from shrinkpoint.storage import local_path

CacheDtype = Literal["fp16", "bf16", "fp32"]
_IDENTITY = Identity()
_DEFAULT_MAX_BYTES = 1 << 30
_MIN_ROWS = 64
_DIGEST_ROWS = 64  # Rows, about, that the digest of a cache covers


@dataclass(frozen=True)
class AQSGD(ErrorFeedback):
    """AQ-SGD (arXiv 2206.01299): for each sample `m <- m + C(x - m)`; the other end uses m.

    Both ends cache m by sample id, on the host, rounded to `dtype`: the next change is relative to the rounded value,
    at both ends. Messages contain the ids, 8 bytes a sample. As in the paper the first visit of a sample is sent
    uncompressed, and so is the next one after a sample was evicted. So the size of a message follows from the ids,
    which both ends must know before it: `compress_pipeline` broadcasts them to all ranks at the start of a step.

    It pays where samples come back with nearly the same activation: several epochs over the same data without
    augmentation. Both ends must handle messages in the same order, as every pipeline schedule does.

    Args:
        compressor: encodes the changes.
        warmup: the number of first visits of each sample that are sent uncompressed; with 0 a first message is a change
            from 0.
        dtype: of the cached rows: "fp16", "bf16" or "fp32".
        most_bytes: the maximum size of the cache of one tensor of a boundary, at each end; the least recently used
            samples are evicted, the same at both ends.
        folder: a directory for caches in files instead of memory, removed when the process ends; each end may choose
            its own.

    Raises:
        PolicyError: an argument out of range.
    """

    warmup: int = 1
    dtype: CacheDtype = "fp16"
    most_bytes: int = _DEFAULT_MAX_BYTES
    folder: str | None = None

    needs_ids: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.check_int("AQSGD, warmup", self.warmup, minimum=0, do="pass a number of visits")
        validate.check_choice("AQSGD, dtype", self.dtype, get_args(CacheDtype))
        validate.check_int("AQSGD, most_bytes", self.most_bytes, do="pass at least the bytes of a row")
        if self.folder is not None:
            object.__setattr__(self, "folder", str(local_path(self.folder, "folder")))

    @property
    def spec(self) -> str:
        options = [f"warmup={self.warmup}"] if self.warmup != 1 else []
        options += [f"dtype={self.dtype}"] if self.dtype != "fp16" else []
        options += [f"most_bytes={self.most_bytes}"] if self.most_bytes != _DEFAULT_MAX_BYTES else []
        options += [f"folder={self.folder}"] if self.folder is not None else []
        return f"aq({', '.join([self.compressor.spec, *options])})"

    @property
    def shared_spec(self) -> str:
        return replace(self, folder=None).spec

    def new_state(self) -> FeedbackState:
        return AQSGDState(self)


class AQSGDState(FeedbackState):
    """The caches of one end, by tensor, and predictions of them for messages that are expected."""

    def __init__(self, feedback: AQSGD) -> None:
        super().__init__(feedback.compressor)
        self._feedback = feedback
        self._caches: dict[int, SampleCache] = {}
        # by message key: which rows are uncompressed, of the last message and of one that is expected
        self._last_exact: dict[tuple[int, int], list[bool]] = {}
        self._expected_exact: dict[tuple[int, int], list[bool]] = {}
        # by tensor: samples and shapes of expected messages, and the index of the cache after these
        self._expected_samples: dict[int, list[tuple[list[int], Sequence[int]]]] = {}
        self._predicted: dict[int, LRUIndex] = {}

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return sum(cache.restarts for cache in self._caches.values())

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        """The size of the message; without ids, that of a message of cached samples."""
        exact = [] if info.ids is None else self._exact_rows(_require_ids(shape, info), shape, info)
        return sum(self._part_sizes(shape, dtype, exact, info))

    def expect(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        ids = _require_ids(shape, info)
        self._expected_exact[info.key] = exact = self._exact_rows(ids, shape, info)
        self._expected_samples.setdefault(info.tensor, []).append((ids, shape))
        if info.tensor in self._predicted:
            self._predicted[info.tensor].record_visit(ids, shape[1:])
        return sum(self._part_sizes(shape, dtype, exact, info))

    def forget_expected(self) -> None:
        for expected in (self._expected_exact, self._expected_samples, self._predicted):
            expected.clear()

    def pack(self, tensor: Tensor, info: MessageInfo) -> PackedMessage:
        ids, cache = _require_ids(tensor.shape, info), self._cache(info.tensor)
        exact = self._start_message(ids, tensor.shape, info)
        if all(exact):
            cache.put(ids, tensor)
            return PackedMessage(_IDENTITY.encode(tensor, info.context), tensor)
        references, split = cache.get(ids, tensor), _RowSplit(exact, tensor.shape, tensor.device)
        context = split.delta_context(info.context)
        delta = split.delta_rows(tensor.to(torch.float32) - references).to(work_dtype(tensor.dtype))
        wire = self._compressor.encode(delta, context)
        updated = split.delta_rows(references) + decode_float32(self._compressor, wire, delta, context)
        decoded = split.merge(tensor.to(torch.float32), updated)
        cache.put(ids, decoded)
        message = torch.cat((_IDENTITY.encode(split.exact_rows(tensor)), wire)) if any(exact) else wire
        return PackedMessage(message, split.merge(tensor, updated.to(tensor.dtype)))

    def _proves_finite(self, wire: Tensor, tensor: Tensor, info: MessageInfo) -> bool:
        return False  # rows may be uncompressed

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        ids, cache = _require_ids(out.shape, info), self._cache(info.tensor)
        exact = self._start_message(ids, out.shape, info)
        if all(exact):
            _IDENTITY.decode(wire, out, info.context)
            cache.put(ids, out)
            return out
        references, split = cache.get(ids, out), _RowSplit(exact, out.shape, out.device)
        exact_part, delta_part = self._split_message(wire, out.shape, out.dtype, exact, info)
        delta = decode_float32(self._compressor, delta_part, split.delta_rows(out), split.delta_context(info.context))
        updated = split.delta_rows(references) + delta
        uncompressed = out
        if any(exact):
            uncompressed = torch.zeros_like(out)
            uncompressed[split.is_exact] = _IDENTITY.decode(exact_part, split.exact_rows(out).contiguous())
        cache.put(ids, split.merge(uncompressed.to(torch.float32), updated))
        return out.copy_(split.merge(uncompressed, updated.to(out.dtype)))

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        exact = self._last_exact.get(info.key, [])
        if exact and all(exact):  # as indices, since the message of the other direction may need some
            return torch.arange(math.prod(shape), device=wire.device)
        split = _RowSplit(exact or [False] * shape[0], shape, wire.device)
        delta_part = self._split_message(wire, shape, dtype, exact, info)[1]
        delta_indices = self._compressor.indices(delta_part, split.delta_shape, split.delta_context(info.context))
        return None if delta_indices is None else split.global_indices(delta_indices)

    def _start_message(self, ids: Sequence[int], shape: Sequence[int], info: MessageInfo) -> list[bool]:
        """Return which rows of the message are uncompressed, and remove it from the expected ones."""
        self._last_exact[info.key] = exact = self._exact_rows(ids, shape, info)
        if self._expected_exact.pop(info.key, None) is not None:
            self._expected_samples[info.tensor].pop(0)
            if not self._expected_samples[info.tensor]:
                self._predicted.pop(info.tensor, None)
        return exact

    def _exact_rows(self, ids: Sequence[int], shape: Sequence[int], info: MessageInfo) -> list[bool]:
        if info.key in self._expected_exact:
            return self._expected_exact[info.key]
        index = self._cache(info.tensor).index
        expected = self._expected_samples.get(info.tensor)
        if expected and info.tensor not in self._predicted:  # only in schedules that post several buffers at once
            self._predicted[info.tensor] = index.copy()
            for sample_ids, sample_shape in expected:
                self._predicted[info.tensor].record_visit(sample_ids, sample_shape[1:])
        return self._predicted.get(info.tensor, index).exact_rows(ids, shape[1:])

    def _part_sizes(
        self, shape: Sequence[int], dtype: torch.dtype, exact: list[bool], info: MessageInfo
    ) -> tuple[int, int]:
        """The size in bytes of the uncompressed rows, and of the message of all others."""
        if not any(exact):
            return 0, self._compressor.wire_bytes(shape, work_dtype(dtype), info.context)
        exact_bytes = _IDENTITY.wire_bytes((sum(exact), *shape[1:]), dtype)
        if all(exact):
            return exact_bytes, 0
        split = _RowSplit(exact, shape, torch.device("cpu"))
        context = split.delta_context(info.context)
        return exact_bytes, self._compressor.wire_bytes(split.delta_shape, work_dtype(dtype), context)

    def _split_message(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, exact: list[bool], info: MessageInfo
    ) -> tuple[Tensor, Tensor]:
        exact_bytes, _ = self._part_sizes(shape, dtype, exact, info)
        delta_part = wire[exact_bytes:].clone() if exact_bytes else wire  # a copy starts at an aligned address
        return wire[:exact_bytes], delta_part

    def state_dict(self) -> dict[str, Any]:
        return {"samples": {str(tensor): cache.state_dict() for tensor, cache in self._caches.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._caches = {}
        self._last_exact.clear()
        self.forget_expected()
        for tensor, cache_state in state["samples"].items():
            self._cache(int(tensor)).load_state_dict(cache_state)

    def shared_tensors(self) -> list[Tensor]:
        return [rows for tensor in sorted(self._caches) for rows in self._caches[tensor].digest_rows()]

    def _cache(self, tensor: int) -> SampleCache:
        if tensor not in self._caches:
            feedback, dtype = self._feedback, DTYPE_BY_NAME[self._feedback.dtype]
            cache = SampleCache(dtype, max_bytes=feedback.most_bytes, cache_dir=feedback.folder, warmup=feedback.warmup)
            self._caches[tensor] = cache
        return self._caches[tensor]


class _RowSplit:
    """Splits the rows of a message into uncompressed rows (`is_exact`: bool, 1-d) and deltas."""

    def __init__(self, exact: Sequence[bool], shape: Sequence[int], device: torch.device) -> None:
        self._all_deltas, self._row_shape = not any(exact), tuple(shape[1:])
        self.is_exact = torch.tensor(exact, dtype=torch.bool, device=device)
        self.delta_shape = (len(exact) - sum(exact), *self._row_shape)

    def exact_rows(self, tensor: Tensor) -> Tensor:
        return tensor[self.is_exact]

    def delta_rows(self, tensor: Tensor) -> Tensor:
        return tensor if self._all_deltas else tensor[~self.is_exact]

    def merge(self, tensor: Tensor, updated: Tensor) -> Tensor:
        """The tensor with its delta rows replaced by updated ones."""
        if self._all_deltas:
            return updated
        out = tensor.clone()
        out[~self.is_exact] = updated
        return out

    def delta_context(self, context: CompressorContext) -> CompressorContext:
        """The context of the delta rows alone: indices are relative to them."""
        if self._all_deltas or context.indices is None:
            return context
        numel, indices = math.prod(self._row_shape), context.indices.to(self.is_exact.device)
        indices = indices[~self.is_exact[indices // numel]]
        delta_numbers = (~self.is_exact).cumsum(0) - 1
        indices = delta_numbers[indices // numel] * numel + indices % numel
        return replace(context, indices=indices.to(context.indices.device))

    def global_indices(self, delta_indices: Tensor) -> Tensor:
        """Flat indices in the whole tensor, ascending: those of the delta rows, and all of the uncompressed rows."""
        if self._all_deltas:
            return delta_indices
        numel, device = math.prod(self._row_shape), delta_indices.device
        delta_rows = torch.nonzero(~self.is_exact).view(-1).to(device)
        mapped = delta_rows[delta_indices // numel] * numel + delta_indices % numel
        exact_indices = torch.nonzero(self.is_exact).to(device) * numel + torch.arange(numel, device=device)
        return torch.cat((mapped, exact_indices.view(-1))).sort().values


def _require_ids(shape: Sequence[int], info: MessageInfo) -> list[int]:
    if info.ids is None:
        advice = "pass an id for each row to set_sample_ids before the step"
        raise PolicyError("AQSGD", found="no sample ids", expected=f"{shape[0] if shape else 1} of them", do=advice)
    if not shape or info.ids.numel() != shape[0]:
        problem = f"{info.ids.numel()} sample ids for {tuple(shape)}"
        raise MismatchError("AQSGD", found=problem, expected="one for each row", do="pass an id for each row")
    ids: list[int] = info.ids.tolist()
    return ids


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
            expected = f"at least the {self.row_numel * self._value_bytes} bytes of a row"
            do = "allow more bytes, or choose a narrower dtype="
            raise PolicyError("AQSGD, most_bytes", found=f"{self._max_bytes}", expected=expected, do=do)
        return is_restart

    def clear(self) -> None:
        self.rows.clear()
        self.visits.clear()

    def exact_rows(self, ids: Sequence[int], shape: Sequence[int]) -> list[bool]:
        """Rows of a message with these samples that are sent uncompressed; the index does not change."""
        if tuple(shape) != self.shape:
            return [self._warmup > 0] * len(ids)
        return [self.visits.get(sample, 0) < self._warmup for sample in ids]

    def record_visit(self, ids: Sequence[int], shape: Sequence[int]) -> dict[int, int]:
        """Count a visit of each sample; return, by row, the index of the id to store there, of equal ids the last."""
        self.set_row_shape(shape)
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
    """

    def __init__(self, dtype: torch.dtype, *, max_bytes: int, cache_dir: str | None = None, warmup: int = 1) -> None:
        self.restarts = 0  # how often all rows were dropped because their shape had changed
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
        positions, row_numbers = (torch.tensor(part, device="cpu") for part in zip(*matches, strict=True))
        cached = self._buffer.rows.index_select(0, row_numbers).to(like.device).to(torch.float32)
        if len(matches) == len(ids):
            return cached.reshape(like.shape)
        out = torch.zeros(len(ids), self.index.row_numel, dtype=torch.float32, device=like.device)
        return out.index_copy_(0, positions.to(like.device), cached).reshape(like.shape)

    def put(self, ids: Sequence[int], tensor: Tensor) -> None:
        """Store rows, rounded, and count a visit of each; of two rows of the same id the later one is stored."""
        self.restarts += self.index.set_row_shape(tensor.shape[1:])
        row_indices = self.index.record_visit(ids, tensor.shape[1:])
        if row_indices:
            self._buffer.grow(max(row_indices) + 1, self.index.row_numel, self.index.capacity)
            rounded = tensor.detach().reshape(len(ids), -1).to(self._dtype, copy=True)
            if len(row_indices) < len(ids):
                rounded = rounded.index_select(0, torch.tensor(list(row_indices.values()), device=tensor.device))
            self._buffer.rows.index_copy_(
                0, torch.tensor(list(row_indices), device="cpu"), zero_nonfinite_(rounded).cpu()
            )

    def state_dict(self) -> dict[str, Any]:
        """Ids, the least recently used first, the row and the visits of each, and the buffer of rows."""
        rows, shape = self.index.rows, list(self.index.shape or ())
        values = self._buffer.rows[: len(rows)] if rows else torch.empty(0, 0, dtype=self._dtype, device="cpu")
        ids, numbers = (torch.tensor(list(part), dtype=torch.int64, device="cpu") for part in (rows, rows.values()))
        return {"ids": ids, "at": numbers, "rows": values, "shape": shape, "visits": self._visit_counts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            MismatchError: it is of another dtype, or of more rows than fit here; then nothing has changed.
        """
        ids, positions, rows, shape = state["ids"], state["at"], state["rows"], tuple(state["shape"])
        if rows.dtype != self._dtype:
            found, do = f"{rows.dtype} in the checkpoint", "make it with the dtype= that it had"
            raise MismatchError("AQSGD, samples", found=found, expected=f"{self._dtype}", do=do)
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
        sampled_rows = torch.tensor(list(rows.values())[:: max(len(rows) // _DIGEST_ROWS, 1)], device="cpu")
        ids = torch.tensor(list(rows), dtype=torch.int64, device="cpu")
        return [ids, self._visit_counts(), self._buffer.rows.index_select(0, sampled_rows)]

    def _visit_counts(self) -> Tensor:
        return torch.tensor(
            [self.index.visits.get(sample, 0) for sample in self.index.rows], dtype=torch.int64, device="cpu"
        )


class _RowBuffer:
    """A buffer of rows in memory, which grows by doubling."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows = torch.empty(0, 0, dtype=dtype, device="cpu")

    def grow(self, count: int, width: int, max_rows: int) -> None:
        """Grow to at least `count` rows of `width` values; existing rows are copied if they have that width."""
        old = self.rows
        if width == old.shape[1] and count <= old.shape[0]:
            return
        num_copied = old.shape[0] if old.shape[1] == width else 0
        rows = min(max(count, 2 * num_copied, _MIN_ROWS), max_rows)
        self.rows = self._resize(rows, width, num_copied)

    def _resize(self, rows: int, width: int, num_copied: int) -> Tensor:
        new = torch.empty(rows, width, dtype=self.rows.dtype, device="cpu")
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
            do = "choose another folder, or free space there"
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
