"""One end of one direction of a boundary: tensors become messages, messages become tensors; and its statistics."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import _native, validate
from shrinkpoint.comm.aqsgd import AQSGD
from shrinkpoint.comm.compressors.base import Compressor, CompressorContext, check_wire_size
from shrinkpoint.comm.compressors.layout import count_nonfinite
from shrinkpoint.comm.compressors.sparse import SameIndices
from shrinkpoint.comm.error_feedback import ErrorFeedback, FeedbackState, MessageInfo, NoFeedback, PackedMessage
from shrinkpoint.comm.spec import as_compressor
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes

CompressorLike = Compressor | ErrorFeedback | str | None
"""A compressor, a feedback around one, or the spec of either; None for no compression."""
NonfinitePolicy = Literal["pass", "raise"]
"""The treatment of values that are not finite: they are sent as such, or are an error."""
_KEY_MASK = (1 << 32) - 1
_ID_BYTES = 8
FINITE_VALUES = "finite values"  # The `expected` part of errors about values that are not finite


def check_nonfinite(where: str, nonfinite: Any) -> NonfinitePolicy:
    """Return the policy; a PolicyError if it is none."""
    policy: NonfinitePolicy = validate.check_choice(f"{where}, nonfinite", nonfinite, get_args(NonfinitePolicy))
    return policy


@dataclass(frozen=True)
class MessageContext:
    """Identifies a message within a step.

    Attributes:
        slot: the index of the micro-batch.
        tensor: the index of the tensor among those that cross the boundary.
        training: if False, neither end remembers the message.
        ids: the sample of each row: int64, 1-d, on any device; None if unknown. A receiver reads them from the message,
            but needs them here to predict its size.
        indices: flat indices for `SameIndices`: int64, 1-d, ascending.
    """

    slot: int = 0
    tensor: int = 0
    training: bool = True
    ids: Tensor | None = field(default=None, repr=False, compare=False)
    indices: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> tuple[int, int]:
        return self.slot, self.tensor


@dataclass
class LinkStats:
    """Statistics of one end of a link. Only reading them may wait for a GPU, recording does not.

    Attributes:
        messages: the number of messages packed or unpacked.
        raw_bytes: size of the tensors.
        wire_bytes: size of the messages.
        restarts: how often a feedback replaced a buffer because the shape had changed.
        events: time work on a GPU by CUDA events; else its seconds are those of launching it on the host.
    """

    messages: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    restarts: int = 0
    events: bool = False
    _seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "decode": 0.0}, repr=False)
    _timed: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list, repr=False)
    _error: Tensor | float = field(default=0.0, repr=False)
    _samples: Tensor | int = field(default=0, repr=False)
    _nonfinite: Tensor | int = field(default=0, repr=False)

    @property
    def encode_seconds(self) -> float:
        """Seconds spent on packing, feedback included."""
        self._collect_events()
        return self._seconds["encode"]

    @property
    def decode_seconds(self) -> float:
        """Seconds spent on unpacking, feedback included."""
        self._collect_events()
        return self._seconds["decode"]

    @property
    def relative_error(self) -> float | None:
        """The mean of `|x - decoded| / |x|` (2-norms) over the sampled messages of the sender; None if there are none.

        Messages with a value that is not finite are left out.
        """
        samples = int(self._samples)
        return float(self._error) / samples if samples else None

    @property
    def nonfinite(self) -> int:
        """The number of nan and infinite values in all tensors that were sent.

        A receiver counts those that it received if they are an error. A tensor for several ranks counts once, and a
        rank's own share of an average, which is not sent, not at all.
        """
        return int(self._nonfinite)

    @property
    def ratio(self) -> float:
        """Size of the tensors, in their own dtype, over that of the messages; 1 without messages."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All statistics as plain values, for JSON."""
        names = ("messages", "raw_bytes", "wire_bytes", "ratio", "encode_seconds", "decode_seconds")
        return {name: getattr(self, name) for name in (*names, "relative_error", "nonfinite", "restarts")}

    def merged_with(self, receiver: LinkStats) -> LinkStats:
        """The statistics of both ends as one: those of this sender, with the decoding time of the receiver."""
        receiver._collect_events()
        merged = replace(self, _seconds=dict(self._seconds), _timed=list(self._timed))
        if isinstance(merged._nonfinite, Tensor):
            merged._nonfinite = merged._nonfinite.clone()  # kernels add to that of this sender in place
        merged._seconds["decode"] += receiver._seconds["decode"]
        return merged

    def add_message(self, raw_bytes: int, wire_bytes: int, nonfinite: Tensor | int = 0) -> None:
        """Count a message, and its values that are not finite; a tensor has no axes, and is not waited for."""
        self.messages += 1
        self.raw_bytes += raw_bytes
        self.wire_bytes += wire_bytes
        if isinstance(nonfinite, Tensor) or nonfinite:  # adding 0 to a tensor on a device would be a launch
            self._nonfinite = self._nonfinite + nonfinite

    def add_packed(
        self,
        tensor: Tensor,
        packed: PackedMessage,
        size: int,
        state: FeedbackState,
        info: MessageInfo,
        *,
        sample_every: int,
        copies: int = 1,
        nonfinite: int | None = None,
    ) -> Tensor | int:
        """Count a message that `state` packed and that is sent to some ranks; measure the error of some messages.

        Args:
            size: in bytes, of all that is sent.
            sample_every: the error is measured on one of this number of messages; 0 for none.
            nonfinite: the number of values that are not finite, to be added; None to count them.

        Returns:
            The number of values that are not finite.
        """
        is_sampled = sample_every and self.messages % sample_every == 0 and tensor.numel()
        self.add_message(copies * tensor.nbytes, copies * size)
        count = state.count_nonfinite(tensor, packed.wire, info) if nonfinite is None else nonfinite
        if isinstance(count, Tensor) or count:
            self._nonfinite = self._nonfinite + count
        if is_sampled:
            with torch.no_grad():
                decoded = packed.decoded
                if decoded is None:  # a message of unknown content is one without a memory
                    decoded = state.unpack(packed.wire, torch.empty_like(tensor), info)
                dtype = torch.complex64 if tensor.is_complex() else torch.float32
                wide = tensor.detach().to(dtype)
                error = torch.linalg.vector_norm(wide - decoded.to(dtype)) / torch.linalg.vector_norm(wide)
                is_known = torch.isfinite(error)
                self._error = self._error + torch.where(is_known, error, 0.0).to(torch.float64)
                self._samples = self._samples + is_known.to(torch.int64)
        return count

    def nonfinite_counter(self, device: torch.device) -> Tensor:
        """The number of nan and infinite values so far, to be added to in place: int64 without axes, on a device."""
        if not isinstance(self._nonfinite, Tensor):
            self._nonfinite = torch.full((), self._nonfinite, dtype=torch.int64, device=device)
        self._nonfinite = self._nonfinite.to(device)
        return self._nonfinite

    def add_uncompressed(self, tensor: Tensor) -> None:
        """Count a tensor that is sent or received uncompressed."""
        self.add_message(tensor.nbytes, tensor.nbytes)

    @contextmanager
    def timing(self, phase: str, device: torch.device) -> Iterator[None]:
        """Add the time of a block to "encode" or "decode"."""
        if self.events and device.type == "cuda":
            with torch.cuda.device(device):
                start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start_event.record()
                yield
                end_event.record()
            self._timed.append((phase, start_event, end_event))
            return
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start

    def _collect_events(self) -> None:
        for phase, began, ended in self._timed:
            ended.synchronize()
            self._seconds[phase] += began.elapsed_time(ended) / 1000
        self._timed.clear()


_LastMessage = tuple[FeedbackState, MessageInfo, Tensor, torch.Size, torch.dtype]
"""The end and the description of a message, the message, and the shape and dtype of its tensor."""


class Link:
    """One end of a link.

    Two ends created with the same arguments stay synchronised if messages are unpacked in the order they were packed.
    Messages of one slot and tensor are counted, and the count is part of the seed of noise and random indices. In
    evaluation (`MessageContext.training` is False) nothing is counted, and the compressor is used without its feedback.

    Args:
        compressor: a compressor, a feedback, or the spec of either.
        name: of the boundary and direction; part of the seed of noise.
        nonfinite: "raise" makes nan and infinite values an error, at the receiving end at once, at the sending end in
            the next call, so that the receiver does not wait for a message in vain.
        sample_every: the relative error is measured on every message whose index is a multiple of this; 0 for none.
        min_numel: smaller tensors are sent uncompressed.
        with_ids: messages contain sample ids even if the feedback needs none, because a later boundary does.

    Attributes:
        feedback: the feedback around the compressor.
        name: of the boundary and direction.
        stats: bytes, times and errors of this end.

    Raises:
        PolicyError: an argument out of range, or an invalid spec.
    """

    def __init__(
        self,
        compressor: Compressor | ErrorFeedback | str,
        *,
        name: str = "0 forward",
        nonfinite: NonfinitePolicy = "pass",
        sample_every: int = 16,
        min_numel: int = 0,
        with_ids: bool = False,
    ) -> None:
        check_nonfinite(f"link {name}", nonfinite)
        for what, value in (("sample_every", sample_every), ("min_numel", min_numel)):
            validate.check_int(f"link {name}, {what}", value, minimum=0)
        parsed = as_compressor(compressor)
        self.feedback: ErrorFeedback = parsed if isinstance(parsed, ErrorFeedback) else NoFeedback(parsed)
        self.name, self.stats = name, LinkStats()
        self._state, self._eval_state = self.feedback.new_state(), NoFeedback(self.feedback.compressor).new_state()
        self._with_ids = with_ids or self.feedback.needs_ids
        self._raise_nonfinite, self._sample_every, self._min_numel = nonfinite == "raise", sample_every, min_numel
        self._counts: dict[tuple[int, int], int] = {}
        self._last_messages: dict[tuple[int, int], _LastMessage] = {}
        self._ids: dict[tuple[int, int], Tensor] = {}
        self._is_sender: bool | None = None
        self._pending_counts: list[tuple[MessageContext, Tensor | int]] = []

    def __repr__(self) -> str:
        return f"Link({str(self.feedback)!r}, name={self.name!r})"

    @property
    def compressor(self) -> Compressor:
        return self.feedback.compressor

    @property
    def is_size_fixed(self) -> bool:
        """True if the size of a message follows from the shape alone, and not from earlier messages or sample ids."""
        return not isinstance(self.feedback, AQSGD) and not isinstance(self.compressor, SameIndices)

    def is_compressible(self, tensor: Tensor) -> bool:
        """True if a tensor (or meta tensor) is compressed; others are sent uncompressed."""
        return tensor.is_floating_point() and tensor.numel() >= max(self._min_numel, 1)

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: MessageContext | None = None) -> int:
        """The size in bytes of the next message of a slot and tensor."""
        context = context or MessageContext()
        body_bytes = self._state_for(context).wire_bytes(shape, dtype, self._message_info(context))
        return self._id_header_bytes(shape, context) + body_bytes

    def expect(self, shape: Sequence[int], dtype: torch.dtype, context: MessageContext | None = None) -> int:
        """The size in bytes of a message whose buffer is posted before earlier messages are unpacked.

        Messages must be unpacked in the order in which they were expected. With AQ-SGD the size follows from
        `MessageContext.ids`.
        """
        context = context or MessageContext()
        body_bytes = self._state_for(context).expect(shape, dtype, self._message_info(context))
        return self._id_header_bytes(shape, context) + body_bytes

    def forget_expected(self) -> None:
        """Drop messages that were expected and not received, at the start of a step."""
        self._state.forget_expected()

    def pack(self, tensor: Tensor, context: MessageContext | None = None) -> Tensor:
        """Pack the tensor as the next message of a slot: uint8, 1-d, contiguous, on the device of the tensor.

        Raises:
            PolicyError: an earlier tensor was not finite and `nonfinite` is "raise"; or ids or indices are missing.
            MismatchError: the ids do not fit the tensor.
        """
        context = context or MessageContext()
        self.check()
        self._check_direction(True, context)
        info, state = self._message_info(context), self._state_for(context)
        header = self._id_header(tensor, context)
        with torch.no_grad(), self.stats.timing("encode", tensor.device):
            packed = state.pack(tensor.detach(), info)
            wire = packed.wire if header is None else torch.cat((header, packed.wire))
        self._remember(context, info, packed.wire, tensor)
        size, every = wire.numel(), self._sample_every
        nonfinite = self.stats.add_packed(tensor, packed, size, state, info, sample_every=every)
        if self._raise_nonfinite:
            self._pending_counts.append((context, nonfinite))
        self._advance(context, state.restarts)
        return wire

    def unpack(self, wire: Tensor, out: Tensor, context: MessageContext | None = None) -> Tensor:
        """Unpack the next message of a slot and tensor into `out`, and return `out`.

        Args:
            wire: the message; it may be referenced by `indices` until the next message: do not write to it.
            out: of the shape and dtype of the packed tensor.

        Raises:
            PolicyError: the values are not finite and `nonfinite` is "raise"; `out` is filled.
            MismatchError: the message has another size, or other sample ids.
        """
        context = context or MessageContext()
        self._check_direction(False, context)
        header_bytes = self._id_header_bytes(out.shape, context)
        ids = _read_ids(f"link {self.name}", wire, header_bytes, context.ids)
        size = self.wire_bytes(out.shape, out.dtype, replace(context, ids=ids))
        check_wire_size(f"link {self.name}", wire, out, size, "make both ends alike")
        info, state, body = self._message_info(context, ids), self._state_for(context), wire[header_bytes:]
        with torch.no_grad(), self.stats.timing("decode", out.device):
            state.unpack(body, out, info)
        if ids is not None:
            self._ids[info.key] = ids
        self._remember(context, info, body, out)
        count = count_nonfinite(out) if self._raise_nonfinite else 0
        self.stats.add_message(out.nbytes, wire.numel(), count)
        self._advance(context, state.restarts)
        _raise_if_nonfinite(self.name, count, context)
        return out

    def indices(self, context: MessageContext | None = None) -> Tensor | None:
        """The flat indices that the last message of a slot and tensor carried; None for all, or if there was none."""
        last = self._last_messages.get((context or MessageContext()).key)
        if last is None:
            return None
        state, info, wire, shape, dtype = last
        return state.indices(wire, shape, dtype, info)

    def ids(self, context: MessageContext | None = None) -> Tensor | None:
        """The sample ids of the last message of a slot and tensor: int64, 1-d; None if it had none."""
        return self._ids.get((context or MessageContext()).key)

    def check(self) -> None:
        """Raise the pending error about packed tensors, if there is one.

        Raises:
            PolicyError: a packed tensor was not finite and `nonfinite` is "raise".
        """
        pending, self._pending_counts = self._pending_counts, []
        for context, count in pending:
            _raise_if_nonfinite(self.name, count, context)

    def describe(self) -> dict[str, Any]:
        """The configuration that both ends must have in common, as plain values."""
        shared = {"name": self.name, "how": self.feedback.shared_spec}
        return {**shared, "min_numel": self._min_numel, "with_ids": self._with_ids}

    def fingerprint(self) -> str:
        """A digest of the state that both ends must have in common: 32 hex digits.

        It covers everything but, with AQ-SGD and many samples, all ids and only some of the rows.
        """
        parts = [repr(sorted(self._counts.items())).encode()]
        parts += [bytes.fromhex(_native.xxh3_128(tensor_bytes(tensor))) for tensor in self._state.shared_tensors()]
        return _native.xxh3_128(b"".join(parts))

    def state_dict(self) -> dict[str, Any]:
        """The counts and the feedback state of this end, without `stats`; tensors are not copied."""
        counts = {f"{slot}.{tensor}": count for (slot, tensor), count in self._counts.items()}
        return {"how": self.feedback.shared_spec, "counts": counts, "feedback": self._state.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same end of the same link. Load the states of both ends, or of neither.

        Raises:
            MismatchError: it is the state of another compressor or feedback.
        """
        if state.get("how") != self.feedback.shared_spec:
            problem, advice = f"the state of {state.get('how')!r}", "make the link as it was saved"
            raise MismatchError(f"link {self.name}", found=problem, expected=repr(self.feedback.shared_spec), do=advice)
        pairs = ((key.partition("."), int(count)) for key, count in state["counts"].items())
        self._state.load_state_dict(state["feedback"])
        self._counts = {(int(slot), int(tensor)): count for (slot, _, tensor), count in pairs}
        self._last_messages.clear()
        self._ids.clear()
        self._pending_counts.clear()

    def _state_for(self, context: MessageContext) -> FeedbackState:
        return self._state if context.training else self._eval_state

    def _check_direction(self, is_sender: bool, context: MessageContext) -> None:
        if not context.training:
            return
        if self._is_sender is not None and self._is_sender != is_sender:
            verbs = {True: "packs", False: "unpacks"}
            problem, expected = f"it {verbs[self._is_sender]}", f"one that {verbs[is_sender]}"
            advice = "make two links alike, one for each end"
            raise PolicyError(f"link {self.name}", found=problem, expected=expected, do=advice)
        self._is_sender = is_sender

    def _message_info(self, context: MessageContext, ids: Tensor | None = None) -> MessageInfo:
        index = self._counts.get(context.key, 0)
        key = _message_key(self.name, context.slot, context.tensor, index + 1 if context.training else 0)
        ids = context.ids if ids is None else ids
        return MessageInfo(context.slot, context.tensor, index, CompressorContext(key, context.indices), ids)

    def _id_header_bytes(self, shape: Sequence[int], context: MessageContext) -> int:
        return _ID_BYTES * (shape[0] if len(shape) else 1) if self._with_ids and context.training else 0

    def _id_header(self, tensor: Tensor, context: MessageContext) -> Tensor | None:
        header_bytes = self._id_header_bytes(tensor.shape, context)
        if not header_bytes:
            return None
        ids, count = context.ids, header_bytes // _ID_BYTES
        where, advice = f"link {self.name}, sample ids", "pass an id for each row to set_sample_ids"
        if ids is None:
            raise PolicyError(where, found="none", expected=f"{count}, one for each row", do=advice)
        if ids.numel() != count:
            raise MismatchError(where, found=f"{ids.numel()}", expected=f"{count}, one for each row", do=advice)
        self._ids[context.key] = ids
        return ids.to(tensor.device, torch.int64).contiguous().view(torch.uint8)

    def _remember(self, context: MessageContext, info: MessageInfo, wire: Tensor, tensor: Tensor) -> None:
        if type(self.compressor).indices is not Compressor.indices:  # others do not read the message
            self._last_messages[info.key] = self._state_for(context), info, wire, tensor.shape, tensor.dtype

    def _advance(self, context: MessageContext, restarts: int) -> None:
        if context.training:
            self._counts[context.key] = self._counts.get(context.key, 0) + 1
            self.stats.restarts = restarts


def _read_ids(where: str, wire: Tensor, header_bytes: int, expected_ids: Tensor | None) -> Tensor | None:
    """The sample ids in a message, checked against those that are expected, if any are."""
    if not header_bytes or wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() < header_bytes:
        return expected_ids  # a message of the wrong size is refused by its size
    ids = wire[:header_bytes].clone().view(torch.int64).cpu()
    if expected_ids is not None and not torch.equal(expected_ids.cpu().to(torch.int64), ids):
        problem, expected = f"the samples {ids.tolist()[:8]}", f"{expected_ids.tolist()[:8]}, as this end was told"
        raise MismatchError(where, found=problem, expected=expected, do="pass the same ids to both ends")
    return ids


def nonfinite_error(where: str, found: str = "values that are not finite") -> PolicyError:
    """The error for such values with `nonfinite="raise"`."""
    advice = 'find out what overflowed, or pass nonfinite="pass" to send such values'
    return PolicyError(where, found=found, expected=FINITE_VALUES, do=advice)


def _raise_if_nonfinite(name: str, count: Tensor | int, context: MessageContext) -> None:
    if int(count):
        where = f"link {name}, micro-batch {context.slot}, tensor {context.tensor}"
        raise nonfinite_error(where, f"{int(count)} values that are not finite")


def _message_key(name: str, slot: int, tensor: int, count: int) -> int:
    """A key below 2^32, different for the first 2^24 messages of 64 slots of 4 tensors: each step is invertible."""
    key = (zlib.crc32(name.encode()) + (count << 8 | (slot & 63) << 2 | tensor & 3)) & _KEY_MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        key = (key ^ key >> shift) * factor & _KEY_MASK
    return key ^ key >> 16
