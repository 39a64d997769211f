"""AQ-SGD: messages are changes of a sample's activation since its last visit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
)
from shrinkpoint.comm.sample_cache import LRUIndex, SampleCache
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.storage import local_path

CacheDtype = Literal["fp16", "bf16", "fp32"]
_IDENTITY = Identity()
_DEFAULT_MAX_BYTES = 1 << 30


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
        validate.check_int("AQSGD, warmup", self.warmup, minimum=0, do="give a number of visits")
        validate.check_choice("AQSGD, dtype", self.dtype, get_args(CacheDtype))
        validate.check_int("AQSGD, most_bytes", self.most_bytes, do="give the bytes of a row at least")
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
            _record_visit(self._predicted[info.tensor], ids, shape)
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
                _record_visit(self._predicted[info.tensor], sample_ids, sample_shape)
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


def _record_visit(index: LRUIndex, ids: Sequence[int], shape: Sequence[int]) -> None:
    """Update the index of a cache for a message."""
    index.set_row_shape(shape[1:])
    index.record_visit(ids)


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
        advice = "give them with set_sample_ids before the step"
        raise PolicyError("AQSGD", found="no sample ids", expected=f"{shape[0] if shape else 1} of them", do=advice)
    if not shape or info.ids.numel() != shape[0]:
        problem = f"{info.ids.numel()} sample ids for {tuple(shape)}"
        raise MismatchError("AQSGD", found=problem, expected="one a row", do="give an id for each sample of the batch")
    ids: list[int] = info.ids.tolist()
    return ids
