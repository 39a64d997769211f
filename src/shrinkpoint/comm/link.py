"""One end of one direction of a boundary: tensors become messages, messages become tensors."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import _native, validate
from shrinkpoint.comm.compressors.base import Compressor, CompressorContext
from shrinkpoint.comm.feedback.base import ErrorFeedback, MessageInfo, NoFeedback
from shrinkpoint.comm.spec import as_compressor
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes

CompressorLike = Compressor | ErrorFeedback | str | None
"""How tensors cross: None: as they are."""
NonfinitePolicy = Literal["pass", "raise"]
_KEY_MASK = (1 << 32) - 1
_ID_BYTES = 8
FINITE_VALUES = "finite values"
"""What an error expects whose cause is a value that is not finite."""


@dataclass(frozen=True)
class MessageContext:
    """Where a message stands.

    Attributes:
        slot: the micro-batch.
        tensor: which of the tensors that cross there.
        training: False: nothing is remembered of it, at either end.
        ids: int64, on any device, one a row: the samples. A receiver finds them in the message, and must be told them
            where it is to know the size before.
        indices: flat positions, for `SameIndices`.
    """

    slot: int = 0
    tensor: int = 0
    training: bool = True
    ids: Tensor | None = field(default=None, repr=False, compare=False)
    indices: Tensor | None = field(default=None, repr=False, compare=False)


class Link:
    """One end. Two that are made alike, one of which packs what the other one unpacks, in that order, stay in step.

    Messages of one slot and tensor are counted, and noise and random places follow from the count. In evaluation
    (`At.training` false) nothing is counted and the operator is used without its feedback.

    Args:
        feedback: an operator, a feedback, or the spec of one.
        name: of the boundary and direction; part of what noise follows from.
        nonfinite: "raise": nan and infinite values are an error, at the receiving end at once, at the sending end in
            the call after, so that the other end is not left waiting.
        sample_every: the relative error is taken of each message that is a multiple of this; 0: of none.
        min_numel: smaller tensors cross as they are.
        with_ids: messages carry sample ids, even if the feedback needs none: a later boundary may.

    Raises:
        PolicyError: an argument out of range, or no spec.
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
        validate.check_choice(f"link {name}, nonfinite", nonfinite, get_args(NonfinitePolicy))
        for what, value in (("sample_every", sample_every), ("min_numel", min_numel)):
            validate.check_int(f"link {name}, {what}", value, minimum=0)
        given = as_compressor(compressor)
        self.feedback: ErrorFeedback = given if isinstance(given, ErrorFeedback) else NoFeedback(given)
        self.name, self.stats = name, LinkStats()
        self._state, self._eval_state = self.feedback.new_state(), NoFeedback(self.feedback.compressor).new_state()
        self._with_ids = with_ids or self.feedback.needs_ids
        self._raise_nonfinite, self._sample_every, self._min_numel = nonfinite == "raise", sample_every, min_numel
        self._counts: dict[tuple[int, int], int] = {}
        self._last_messages: dict[tuple[int, int], tuple[bool, MessageInfo, Tensor, torch.Size, torch.dtype]] = {}
        self._ids: dict[tuple[int, int], Tensor] = {}
        self._is_sender: bool | None = None
        self._pending_counts: list[tuple[MessageContext, Tensor]] = []

    def __repr__(self) -> str:
        return f"Link({str(self.feedback)!r}, name={self.name!r})"

    @property
    def compressor(self) -> Compressor:
        return self.feedback.compressor

    @property
    def needs_ids(self) -> bool:
        """Whether messages of training carry sample ids, which the sender must be given."""
        return self._with_ids

    def is_compressible(self, x: Tensor) -> bool:
        """Whether a tensor (or meta tensor) crosses compressed; others cross as they are."""
        return x.is_floating_point() and x.numel() >= max(self._min_numel, 1)

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: MessageContext | None = None) -> int:
        """The size of the next message of a slot and tensor."""
        context = context or MessageContext()
        end = self._state if context.training else self._eval_state
        return self._id_header_bytes(shape, context) + end.wire_bytes(shape, dtype, self._message_info(context))

    def expect(self, shape: Sequence[int], dtype: torch.dtype, context: MessageContext | None = None) -> int:
        """The size of the next message of a slot and tensor, for a buffer that is posted before others are unpacked.

        Messages are unpacked in the order in which they were expected. Where samples are remembered the size follows
        from `At.ids`.
        """
        context = context or MessageContext()
        end = self._state if context.training else self._eval_state
        return self._id_header_bytes(shape, context) + end.expect(shape, dtype, self._message_info(context))

    def forget_expected(self) -> None:
        """A step begins: what was expected and has not come will not."""
        self._state.forget_expected()

    def pack(self, x: Tensor, context: MessageContext | None = None) -> Tensor:
        """The next message of a slot and tensor: uint8, 1-d, contiguous, on x's device.

        Raises:
            PolicyError: an earlier tensor was not finite and this link raises for that; or ids or places are missing.
            MismatchError: the ids do not fit the tensor.
        """
        context = context or MessageContext()
        self.check()
        self._check_direction(True, context)
        turn, end, head = (
            self._message_info(context),
            self._state if context.training else self._eval_state,
            self._id_header(x, context),
        )
        with torch.no_grad(), self.stats.timing("encode", x.device):
            packed = end.pack(x.detach(), turn)
            wire = packed.wire if head is None else torch.cat((head, packed.wire))
        self._remember(context, turn, packed.wire, x)
        self._record(x, packed.wire, packed.decoded, wire.numel(), context, turn)
        self._advance(context, end.restarts)
        return wire

    def unpack(self, wire: Tensor, out: Tensor, context: MessageContext | None = None) -> Tensor:
        """Fill `out`, of the shape and dtype of what was packed, from the next message of a slot and tensor.

        Args:
            wire: may be kept for `places` until the next message: do not write into it.

        Raises:
            PolicyError: what came was not finite and this link raises for that; `out` is filled.
            MismatchError: the message does not fit.
        """
        context = context or MessageContext()
        self._check_direction(False, context)
        head = self._id_header_bytes(out.shape, context)
        ids = self._read_ids(wire, head, context)
        self._check_message(wire, out, replace(context, ids=ids))
        turn, end = self._message_info(context, ids), self._state if context.training else self._eval_state
        with torch.no_grad(), self.stats.timing("decode", out.device):
            end.unpack(wire[head:], out, turn)
        if ids is not None:
            self._ids[turn.key] = ids
        self._remember(context, turn, wire[head:], out)
        self.stats.add_message(_nbytes(out), wire.numel())
        self._advance(context, end.restarts)
        self._check_finite(out, context)
        return out

    def count_uncompressed(self, x: Tensor) -> None:
        """Count a tensor that crossed as it is, at either end."""
        self.stats.add_message(_nbytes(x), _nbytes(x))

    def indices(self, context: MessageContext | None = None) -> Tensor | None:
        """The flat positions that the last message of a slot and tensor carried; None: all, or there was none."""
        context = context or MessageContext()
        last = self._last_messages.get((context.slot, context.tensor))
        if last is None:
            return None
        training, turn, wire, shape, dtype = last
        return (self._state if training else self._eval_state).indices(wire, shape, dtype, turn)

    def ids(self, context: MessageContext | None = None) -> Tensor | None:
        """The sample ids of the last message of a slot and tensor: int64, on the CPU; None: it had none."""
        context = context or MessageContext()
        return self._ids.get((context.slot, context.tensor))

    def check(self) -> None:
        """Raise what is still to be raised about tensors that were packed.

        Raises:
            PolicyError: one was not finite.
        """
        pending, self._pending_counts = self._pending_counts, []
        for at, count in pending:
            if int(count):
                raise self._nonfinite_error(int(count), at)

    def describe(self) -> dict[str, Any]:
        """What both ends must have in common, as JSON."""
        return {
            "name": self.name,
            "how": self.feedback.shared_spec,
            "min_numel": self._min_numel,
            "with_ids": self._with_ids,
        }

    def fingerprint(self) -> str:
        """A digest of what both ends must have in common of earlier messages: 32 hex digits.

        Of many samples (AQ-SGD) all ids and some rows are looked at; of all else everything.
        """
        parts = [repr(sorted(self._counts.items())).encode()]
        parts += [bytes.fromhex(_native.xxh3_128(tensor_bytes(one))) for one in self._state.shared_tensors()]
        return _native.xxh3_128(b"".join(parts))

    def state_dict(self) -> dict[str, Any]:
        """Counts and what the feedback remembers of this end; tensors are not copied. The ledger is no part of it."""
        counts = {f"{slot}.{tensor}": count for (slot, tensor), count in self._counts.items()}
        return {"how": self.feedback.shared_spec, "counts": counts, "feedback": self._state.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same end of the same link. Load both ends, or make both anew.

        Raises:
            MismatchError: it is that of another operator or feedback.
        """
        if state.get("how") != self.feedback.shared_spec:
            found, do = f"the state of {state.get('how')!r}", "make the link as it was saved"
            raise MismatchError(f"link {self.name}", found=found, expected=repr(self.feedback.shared_spec), do=do)
        pairs = ((key.partition("."), int(count)) for key, count in state["counts"].items())
        self._state.load_state_dict(state["feedback"])
        self._counts = {(int(key[0]), int(key[2])): count for key, count in pairs}
        self._last_messages.clear()
        self._ids.clear()
        self._pending_counts.clear()

    def _check_direction(self, is_sender: bool, context: MessageContext) -> None:
        if not context.training:
            return
        if self._is_sender is not None and self._is_sender != is_sender:
            words = {True: "packs", False: "unpacks"}
            do = "make two links alike, one for each end"
            raise PolicyError(
                f"link {self.name}",
                found=f"it {words[self._is_sender]}",
                expected=f"one that {words[is_sender]}",
                do=do,
            )
        self._is_sender = is_sender

    def _message_info(self, context: MessageContext, ids: Tensor | None = None) -> MessageInfo:
        index = self._counts.get((context.slot, context.tensor), 0)
        key = _message_key(self.name, context.slot, context.tensor, index + 1 if context.training else 0)
        return MessageInfo(
            context.slot,
            context.tensor,
            index,
            CompressorContext(key, context.indices),
            context.ids if ids is None else ids,
        )

    def _id_header_bytes(self, shape: Sequence[int], context: MessageContext) -> int:
        return _ID_BYTES * (shape[0] if len(shape) else 1) if self._with_ids and context.training else 0

    def _id_header(self, x: Tensor, context: MessageContext) -> Tensor | None:
        head = self._id_header_bytes(x.shape, context)
        if not head:
            return None
        if context.ids is None or context.ids.numel() * _ID_BYTES != head:
            found, do = "none" if context.ids is None else f"{context.ids.numel()}", "give them with set_sample_ids"
            error = PolicyError if context.ids is None else MismatchError
            raise error(f"link {self.name}, sample ids", found=found, expected=f"{head // _ID_BYTES}", do=do)
        self._ids[context.slot, context.tensor] = context.ids
        return context.ids.to(x.device, torch.int64).contiguous().view(torch.uint8)

    def _read_ids(self, wire: Tensor, header_bytes: int, context: MessageContext) -> Tensor | None:
        """The samples that a message names, which are those that this end was told, if it was."""
        if (
            not header_bytes or wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() < header_bytes
        ):  # the size says so
            return context.ids
        ids = wire[:header_bytes].clone().view(torch.int64).cpu()
        if context.ids is not None and not torch.equal(context.ids.cpu().to(torch.int64), ids):
            found, expected = f"the samples {ids.tolist()[:8]}", f"{context.ids.tolist()[:8]}, as this end was told"
            raise MismatchError(f"link {self.name}", found=found, expected=expected, do="tell both ends the same")
        return ids

    def _check_message(self, wire: Tensor, out: Tensor, context: MessageContext) -> None:
        size = self.wire_bytes(out.shape, out.dtype, context)
        if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != size:
            found, expected = f"a message of {wire.numel()} x {wire.dtype}", f"{size} bytes for {tuple(out.shape)}"
            raise MismatchError(f"link {self.name}", found=found, expected=expected, do="make both ends alike")

    def _remember(self, context: MessageContext, info: MessageInfo, wire: Tensor, x: Tensor) -> None:
        if type(self.compressor).indices is not Compressor.indices:  # else the message would be kept for nothing
            self._last_messages[info.key] = context.training, info, wire, x.shape, x.dtype

    def _advance(self, context: MessageContext, restarts: int) -> None:
        if context.training:
            self._counts[context.slot, context.tensor] = self._counts.get((context.slot, context.tensor), 0) + 1
            self.stats.restarts = restarts

    def _record(
        self, x: Tensor, wire: Tensor, decoded: Tensor | None, size: int, context: MessageContext, info: MessageInfo
    ) -> None:
        sampled = bool(self._sample_every) and self.stats.messages % self._sample_every == 0
        self.stats.add_message(_nbytes(x), size)
        if sampled and x.numel():
            with torch.no_grad():
                decoded = (
                    self.compressor.decode(wire, torch.empty_like(x), info.context) if decoded is None else decoded
                )
                self.stats.add_error(x, decoded)
        if sampled or self._raise_nonfinite:
            count = _count_nonfinite(x)
            self.stats.add_nonfinite(count)
            if self._raise_nonfinite:
                self._pending_counts.append((context, count))

    def _check_finite(self, out: Tensor, context: MessageContext) -> None:
        if self._raise_nonfinite:
            count = _count_nonfinite(out)
            self.stats.add_nonfinite(count)
            if int(count):
                raise self._nonfinite_error(int(count), context)

    def _nonfinite_error(self, count: int, context: MessageContext) -> PolicyError:
        where = f"link {self.name}, micro-batch {context.slot}, tensor {context.tensor}"
        do = 'look for what overflowed, or let such values pass: nonfinite="pass"'
        return PolicyError(where, found=f"{count} values that are not finite", expected=FINITE_VALUES, do=do)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _count_nonfinite(x: Tensor) -> Tensor:
    x = x.detach()
    if x.device.type == "cpu" and torch.isfinite(x.sum(dtype=torch.float32)):  # 20 times faster than looking at each
        return torch.zeros((), dtype=torch.int64)
    return torch.isfinite(x).logical_not_().sum()


def _message_key(name: str, slot: int, tensor: int, count: int) -> int:
    """Different for the first 2^24 messages of 64 slots of 4 tensors: each step is invertible modulo 2^32."""
    x = (zlib.crc32(name.encode()) + (count << 8 | (slot & 63) << 2 | tensor & 3)) & _KEY_MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift) * factor & _KEY_MASK
    return x ^ x >> 16
