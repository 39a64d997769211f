"""AQ-SGD: messages are changes of a sample's activation since it was here before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.base import Compressor, CompressorContext, Identity, check_compressor
from shrinkpoint.comm.feedback.base import (
    ErrorFeedback,
    FeedbackState,
    MessageInfo,
    PackedMessage,
    decode_float32,
    work_dtype,
)
from shrinkpoint.comm.feedback.sample_cache import LRUIndex, SampleCache
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.storage import local_path

CacheDtype = Literal["fp16", "bf16", "fp32"]
_CACHE_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_IDENTITY = Identity()
_DEFAULT_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class AQSGD(ErrorFeedback):
    """AQ-SGD (arXiv 2206.01299): for each sample `m <- m + C(x - m)`; the other end uses m.

    Both ends remember m by the sample's id, on the host, rounded to `dtype`: the rounded value is what the next change
    is measured from, at both ends. Ids travel in the message, 8 bytes a sample. As in the paper a sample that was not
    seen before is sent exactly, whenever it comes first; so is one that was forgotten. So a message's size follows from
    the ids, which both ends must know before it: `compress_pipeline` tells them to all ranks at the start of a step.

    It pays where samples come back with nearly the same activation: several epochs over the same data without
    augmentation. Both ends must handle messages in the same order, as every pipeline schedule does.

    Args:
        compressor: what the change is sent with.
        warmup: so many first visits of each sample are sent exactly; 0: none, and a first message is a change from 0.
        dtype: of what is remembered: "fp16", "bf16" or "fp32".
        most_bytes: what each end remembers at most of one tensor of a boundary; the samples that were used longest ago
            are forgotten, the same at both ends.
        folder: where to keep it in a file instead of memory, removed when the process ends; either end's own choice.

    Raises:
        PolicyError: an argument out of range.
    """

    compressor: Compressor
    warmup: int = 1
    dtype: CacheDtype = "fp16"
    most_bytes: int = _DEFAULT_MAX_BYTES
    folder: str | None = None

    needs_ids: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_compressor("AQSGD", self.compressor)
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
    def __init__(self, feedback: AQSGD) -> None:
        self._feedback, self._compressor = feedback, feedback.compressor
        self._caches: dict[int, SampleCache] = {}
        self._last_exact: dict[tuple[int, int], list[bool]] = {}  # of the last message: which were exact
        self._expected_exact: dict[tuple[int, int], list[bool]] = {}  # of those that are not there yet
        self._expected_samples: dict[
            int, list[tuple[list[int], Sequence[int]]]
        ] = {}  # their samples and shapes, by tensor
        self._predicted: dict[int, LRUIndex] = {}  # what there will be when they are here

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return sum(shelf.restarts for shelf in self._caches.values())

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        """Without ids: of samples that are known."""
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
        for one in (self._expected_exact, self._expected_samples, self._predicted):
            one.clear()

    def pack(self, x: Tensor, info: MessageInfo) -> PackedMessage:
        ids, shelf = _require_ids(x.shape, info), self._cache(info.tensor)
        exact = self._start_message(ids, x.shape, info)
        if all(exact):
            shelf.put(ids, x)
            return PackedMessage(_IDENTITY.encode(x, info.context), x)
        known, at = shelf.get(ids, x), _RowSplit(exact, x.shape, x.device)
        context = at.delta_context(info.context)
        change = at.delta_rows(x.to(torch.float32) - known).to(work_dtype(x.dtype))
        wire = self._compressor.encode(change, context)
        moved = at.delta_rows(known) + decode_float32(self._compressor, wire, change, context)
        seen = at.merge(x.to(torch.float32), moved)
        shelf.put(ids, seen)
        whole = torch.cat((_IDENTITY.encode(at.exact_rows(x)), wire)) if any(exact) else wire
        return PackedMessage(whole, at.merge(x, moved.to(x.dtype)))

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        ids, shelf = _require_ids(out.shape, info), self._cache(info.tensor)
        exact = self._start_message(ids, out.shape, info)
        if all(exact):
            _IDENTITY.decode(wire, out, info.context)
            shelf.put(ids, out)
            return out
        known, at = shelf.get(ids, out), _RowSplit(exact, out.shape, out.device)
        new, old = self._split_message(wire, out.shape, out.dtype, exact, info)
        change = decode_float32(self._compressor, old, at.delta_rows(out), at.delta_context(info.context))
        moved = at.delta_rows(known) + change
        came = out
        if any(exact):
            came = torch.zeros_like(out)
            came[at.is_exact] = _IDENTITY.decode(new, at.exact_rows(out).contiguous())
        shelf.put(ids, at.merge(came.to(torch.float32), moved))
        return out.copy_(at.merge(came, moved.to(out.dtype)))

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        exact = self._last_exact.get(info.key, [])
        if exact and all(exact):  # everywhere, as positions for a way back that wants some
            return torch.arange(math.prod(shape), device=wire.device)
        at = _RowSplit(exact or [False] * shape[0], shape, wire.device)
        old = self._split_message(wire, shape, dtype, exact, info)[1]
        found = self._compressor.indices(old, at.delta_shape, at.delta_context(info.context))
        return None if found is None else at.global_indices(found)

    def _start_message(self, ids: Sequence[int], shape: Sequence[int], info: MessageInfo) -> list[bool]:
        """Which rows of the message of this turn are exact; it is expected no more."""
        self._last_exact[info.key] = exact = self._exact_rows(ids, shape, info)
        if self._expected_exact.pop(info.key, None) is not None:
            self._expected_samples[info.tensor].pop(0)
            if not self._expected_samples[info.tensor]:
                self._predicted.pop(info.tensor, None)
        return exact

    def _exact_rows(self, ids: Sequence[int], shape: Sequence[int], info: MessageInfo) -> list[bool]:
        if info.key in self._expected_exact:
            return self._expected_exact[info.key]
        order = self._cache(info.tensor).index
        waiting = self._expected_samples.get(info.tensor)
        if (
            waiting and info.tensor not in self._predicted
        ):  # only a schedule that posts several buffers at once pays for it
            self._predicted[info.tensor] = order.copy()
            for other, others in waiting:
                _record_visit(self._predicted[info.tensor], other, others)
        return self._predicted.get(info.tensor, order).exact_rows(ids, shape[1:])

    def _part_sizes(
        self, shape: Sequence[int], dtype: torch.dtype, exact: list[bool], info: MessageInfo
    ) -> tuple[int, int]:
        """Bytes of the rows that are exact, and of all others."""
        if not any(exact):
            return 0, self._compressor.wire_bytes(shape, work_dtype(dtype), info.context)
        new = _IDENTITY.wire_bytes((sum(exact), *shape[1:]), dtype)
        if all(exact):
            return new, 0
        at = _RowSplit(exact, shape, torch.device("cpu"))
        return new, self._compressor.wire_bytes(at.delta_shape, work_dtype(dtype), at.delta_context(info.context))

    def _split_message(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, exact: list[bool], info: MessageInfo
    ) -> tuple[Tensor, Tensor]:
        new, _ = self._part_sizes(shape, dtype, exact, info)
        return wire[:new], wire[new:].clone() if new else wire  # a message begins where its memory does

    def state_dict(self) -> dict[str, Any]:
        return {"samples": {str(tensor): shelf.state_dict() for tensor, shelf in self._caches.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._caches = {}
        self._last_exact.clear()
        self.forget_expected()
        for tensor, kept in state["samples"].items():
            self._cache(int(tensor)).load_state_dict(kept)

    def shared_tensors(self) -> list[Tensor]:
        return [one for tensor in sorted(self._caches) for one in self._caches[tensor].digest_rows()]

    def _cache(self, tensor: int) -> SampleCache:
        if tensor not in self._caches:
            how, dtype = self._feedback, _CACHE_DTYPES[self._feedback.dtype]
            shelf = SampleCache(dtype, max_bytes=how.most_bytes, cache_dir=how.folder, warmup=how.warmup)
            self._caches[tensor] = shelf
        return self._caches[tensor]


def _record_visit(order: LRUIndex, ids: Sequence[int], shape: Sequence[int]) -> None:
    """What an order is after a message."""
    order.set_row_shape(shape[1:])
    order.record_visit(ids)


class _RowSplit:
    """The rows of a message: those sent as they are (new) and those sent as changes (old)."""

    def __init__(self, exact: Sequence[bool], shape: Sequence[int], device: torch.device) -> None:
        self._all_deltas, self._shape = not any(exact), tuple(shape)
        self.is_exact = torch.tensor(exact, dtype=torch.bool, device=device)

    @property
    def delta_shape(self) -> tuple[int, ...]:
        return (self._shape[0] - int(self.is_exact.sum()), *self._shape[1:])

    def exact_rows(self, x: Tensor) -> Tensor:
        return x[self.is_exact]

    def delta_rows(self, x: Tensor) -> Tensor:
        return x if self._all_deltas else x[~self.is_exact]

    def merge(self, x: Tensor, updated: Tensor) -> Tensor:
        """x with its old rows as they moved."""
        if self._all_deltas:
            return updated
        out = x.clone()
        out[~self.is_exact] = updated
        return out

    def delta_context(self, context: CompressorContext) -> CompressorContext:
        """The context of the old rows alone: places are counted among them."""
        if self._all_deltas or context.indices is None:
            return context
        rows = context.indices.to(self.is_exact.device) // self._row_numel
        number = (~self.is_exact).cumsum(0) - 1
        left = ~self.is_exact[rows]
        places = number[rows[left]] * self._row_numel + context.indices.to(rows.device)[left] % self._row_numel
        return replace(context, indices=places.to(context.indices.device))

    def global_indices(self, delta_indices: Tensor) -> Tensor:
        """Flat positions of the whole tensor, ascending: those found among the old rows, and all of the new ones."""
        if self._all_deltas:
            return delta_indices
        old = torch.nonzero(~self.is_exact).view(-1).to(delta_indices.device)
        mapped = old[delta_indices // self._row_numel] * self._row_numel + delta_indices % self._row_numel
        inside = torch.arange(self._row_numel, device=delta_indices.device)
        new = torch.nonzero(self.is_exact).to(delta_indices.device) * self._row_numel + inside
        return torch.cat((mapped, new.view(-1))).sort().values

    @property
    def _row_numel(self) -> int:
        return math.prod(self._shape[1:])


def _require_ids(shape: Sequence[int], info: MessageInfo) -> list[int]:
    if info.ids is None:
        do = "give them with set_sample_ids before the step"
        raise PolicyError("AQSGD", found="no sample ids", expected=f"{shape[0] if shape else 1} of them", do=do)
    if not shape or info.ids.numel() != shape[0]:
        found, expected = f"{info.ids.numel()} sample ids for {tuple(shape)}", "one a row"
        raise MismatchError("AQSGD", found=found, expected=expected)
    ids: list[int] = info.ids.tolist()
    return ids
