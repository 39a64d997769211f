"""Error feedback: what the ends of a link remember of earlier messages, to make up for what these lost."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, ClassVar

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext, check_compressor
from shrinkpoint.comm.compressors.layout import count_nonfinite
from shrinkpoint.comm.state_check import STATE_ADVICE
from shrinkpoint.device.rows import Rows, encode_rows, fill_rows, flat_rows
from shrinkpoint.errors import MismatchError, PolicyError

_RESIDUAL_KEY = 0x5BD1E995
"""Added to the key of a message for its second half in EF-mixed, so that the halves have different keys."""
_BUFFER_NAME = re.compile(r"[0-9]{1,18}\.[0-9]{1,18}")  # The name of a buffer in a state: slot and index


@dataclass(frozen=True)
class MessageInfo:
    """Describes one message of a link to its feedback."""

    # `slot`, `tensor`: the micro-batch, and which of its tensors.
    slot: int = 0
    tensor: int = 0
    index: int = 0  # the number of earlier messages of that slot and tensor
    context: CompressorContext = NO_CONTEXT  # that of the compressor
    # The sample of each row: int64, 1-d; None if unknown.
    ids: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> tuple[int, int]:
        return self.slot, self.tensor


@dataclass(frozen=True)
class PackedMessage:
    """A message, and what the other end will decode from it, of the shape and dtype of the tensor; None if unknown."""

    wire: Tensor
    decoded: Tensor | None = None


class FeedbackState:
    """One end of a link, which packs or unpacks messages: without a memory here, with one in subclasses.

    Buffers are on the tensors' device. Values that are not finite reach the other end and are then forgotten: a buffer
    is 0 where it would not be finite, else one bad batch (a loss scale that was too large) would remain in it for good.
    """

    restarts: int = 0  # how often a buffer was replaced by a new one because the shape had changed

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        """The size in bytes of the message; the state does not change."""
        return self._compressor.wire_bytes(shape, dtype, info.context)

    def expect(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        """The size in bytes of a message that will be unpacked after all that were expected earlier."""
        return self.wire_bytes(shape, dtype, info)

    def forget_expected(self) -> None:
        """Drop messages that were expected and have not been unpacked."""
        return

    def pack(self, tensor: Tensor, info: MessageInfo) -> PackedMessage:
        """Pack the tensor as the next message, and advance the state."""
        return PackedMessage(self._compressor.encode(tensor, info.context))

    def pack_rows(
        self, rows: Sequence[Tensor], infos: Sequence[MessageInfo], nonfinite: Tensor
    ) -> list[PackedMessage] | None:
        """Pack tensors of one shape and dtype in a few launches, if their device has kernels for it.

        Args:
            nonfinite: int64 without axes; the number of values that are not finite is added to it.

        Returns:
            The messages, padded to multiples of 16 bytes. None if the tensors must be packed one by one; then the state
            has not changed.
        """
        if type(self) is not FeedbackState:  # a subclass has a memory
            return None
        wires = self._compressor.encode_rows(rows, [info.context for info in infos], nonfinite)
        return None if wires is None else [PackedMessage(wire) for wire in wires.unbind()]

    def unpack_rows(self, wires: Sequence[Tensor], outs: Sequence[Tensor], infos: Sequence[MessageInfo]) -> bool:
        """Unpack messages into tensors of one shape and dtype in a few launches; False if nothing was unpacked."""
        if type(self) is not FeedbackState:
            return False
        return self._compressor.decode_rows(wires, outs, [info.context for info in infos])

    def count_nonfinite(self, tensor: Tensor, wire: Tensor, info: MessageInfo) -> Tensor | int:
        """The number of values of a tensor that are not finite, from its message alone where that shows none."""
        if tensor.device.type == "cpu" and self._proves_finite(wire, tensor, info):
            return 0
        return count_nonfinite(tensor)

    def _proves_finite(self, wire: Tensor, tensor: Tensor, info: MessageInfo) -> bool:
        return self._compressor.proves_finite(wire, tensor.shape, tensor.dtype, info.context)

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        """Unpack the next message into `out`, advance the state, and return `out`."""
        return self._compressor.decode(wire, out, info.context)

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        """The flat indices at which a message changes something; None for all of them."""
        return self._compressor.indices(wire, shape, info.context)

    def state_dict(self) -> dict[str, Any]:
        """The memory as a nest of tensors, which are not copied, and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; tensors are copied."""
        return

    def shared_tensors(self) -> list[Tensor]:
        """The tensors that must be equal at both ends, on the CPU, in an order that both ends share."""
        return []


@dataclass(frozen=True)
class ErrorFeedback(ABC):
    """A compressor with a memory of earlier messages. Subclasses are frozen dataclasses.

    Attributes:
        compressor: encodes the messages; in evaluation it is used alone.
        needs_ids: True if messages carry the ids of samples.
        is_stateless: True if nothing makes up later for what a message loses.
        has_stateless_receiver: True if a message decodes to the same values without the messages before it.
    """

    compressor: Compressor

    needs_ids: ClassVar[bool] = False
    is_stateless: ClassVar[bool] = False
    has_stateless_receiver: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_compressor(type(self).__name__, self.compressor)
        if not self.is_stateless and getattr(self.compressor, "scaled", False):
            # scaled values exceed those sent, so that the residual grows with each message
            where, problem = type(self).__name__, f"{self.compressor.spec}, with which the residual grows without bound"
            advice = "leave scaled out: feedback sends later what a message leaves out"
            raise PolicyError(where, found=problem, expected="a compressor that scales nothing", do=advice)

    @property
    @abstractmethod
    def spec(self) -> str:
        """The feedback as text, which `shrinkpoint.comm.parse` reads back."""

    @property
    def shared_spec(self) -> str:
        """`spec` without the options that each end may choose for itself."""
        return self.spec

    @abstractmethod
    def new_state(self) -> FeedbackState:
        """Create the empty memory of one end."""

    def __str__(self) -> str:
        return self.spec


class NoFeedback(ErrorFeedback):
    """A compressor without feedback."""

    is_stateless: ClassVar[bool] = True
    has_stateless_receiver: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return self.compressor.spec

    def new_state(self) -> FeedbackState:
        return FeedbackState(self.compressor)


def zero_nonfinite_(tensor: Tensor) -> Tensor:
    """Replace values that are not finite by 0, in place, and return the tensor."""
    return tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a compressor is given for a tensor of this dtype: bfloat16 stays, so that values take 2 bytes.

    All others become float32: x + e may exceed the range of float16.
    """
    return dtype if dtype == torch.bfloat16 else torch.float32


def decode_float32(compressor: Compressor, wire: Tensor, like: Tensor, context: CompressorContext) -> Tensor:
    """Decode a message of a tensor of `work_dtype(like.dtype)` and the shape of `like`, as new float32."""
    decoded = torch.empty(like.shape, dtype=work_dtype(like.dtype), device=wire.device)
    return compressor.decode(wire, decoded, context).to(torch.float32)


class BufferState(FeedbackState):
    """One end with a float32 buffer for each slot and tensor, saved under `buffers_key`; zeros when first needed."""

    buffers_key: ClassVar[str]

    def __init__(self, compressor: Compressor) -> None:
        super().__init__(compressor)
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def buffer(self, info: MessageInfo, like: Tensor) -> Tensor:
        """The buffer for a message, to be changed in place, of the shape and on the device of `like`.

        A batch with fewer rows than the buffer uses its first rows. Any other change of shape starts a new buffer.
        """
        buffer = self._buffers.get(info.key)
        fits = buffer is not None and (
            buffer.shape == like.shape
            or (buffer.dim() == like.dim() > 0 and buffer.shape[1:] == like.shape[1:] and len(buffer) > len(like))
        )
        if buffer is None or not fits:
            self.restarts += buffer is not None
            buffer = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        elif buffer.device != like.device:
            buffer = buffer.to(like.device)
        self._buffers[info.key] = buffer
        return buffer[: like.shape[0]] if like.dim() else buffer

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        return self._compressor.wire_bytes(shape, work_dtype(dtype), info.context)

    def _proves_finite(self, wire: Tensor, tensor: Tensor, info: MessageInfo) -> bool:
        return self._compressor.proves_finite(wire, tensor.shape, work_dtype(tensor.dtype), info.context)

    def state_dict(self) -> dict[str, Any]:
        return {self.buffers_key: {f"{slot}.{index}": buffer for (slot, index), buffer in self._buffers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        buffers, do = {}, STATE_ADVICE
        saved_buffers = state.get(self.buffers_key)
        if not isinstance(saved_buffers, Mapping):
            found, expected = f"no {self.buffers_key}", f"a state with {self.buffers_key}, of the same type of feedback"
            raise MismatchError("feedback", found=found, expected=expected, do=do)
        for name, buffer in saved_buffers.items():
            if not isinstance(name, str) or not _BUFFER_NAME.fullmatch(name):
                raise MismatchError("feedback", found=f"a buffer {name!r:.60}", expected="slot.index", do=do)
            if not isinstance(buffer, Tensor) or buffer.dtype != torch.float32:
                found = repr(buffer)[:80]
                raise MismatchError(f"feedback, buffer {name}", found=found, expected="a float32 tensor", do=do)
            slot, _, index = name.partition(".")
            buffers[int(slot), int(index)] = buffer.detach().clone()
        self._buffers = buffers


@dataclass(frozen=True)
class EF(ErrorFeedback):
    """Error feedback (arXiv 1809.07599; arXiv 2401.07788, section on error feedback).

    Sends `c = C(x + e)`, and then `e <- x + e - c`, where c is what the other end has after rounding to the dtype of x.
    Only the sender has a memory: e, one for each micro-batch slot, so what a sample lost goes to the next sample there.
    With a decay `x + decay e` takes the place of `x + e` (arXiv 2508.15706, algorithm 1, with 0.95): what was lost long
    ago, of weights that have moved since, fades.

    Attributes:
        decay: from 0, without a memory, to 1, where nothing is lost for good.

    Raises:
        PolicyError: a decay out of range.
    """

    decay: float = 1.0

    has_stateless_receiver: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.check_float("EF, decay", self.decay, maximum=1.0, exclusive=False, do="pass 1, or e.g. 0.95")

    @property
    def spec(self) -> str:
        options = "" if self.decay == 1 else f", decay={float(self.decay)!r}"
        return f"ef({self.compressor.spec}{options})"

    def new_state(self) -> FeedbackState:
        return _EFState(self.compressor, self.decay)


class _EFState(BufferState):
    """Residuals at the sender; the receiver has no memory."""

    buffers_key = "residual"

    def __init__(self, compressor: Compressor, decay: float) -> None:
        super().__init__(compressor)
        self._decay = decay

    def pack(self, tensor: Tensor, info: MessageInfo) -> PackedMessage:
        residual = self.buffer(info, tensor)
        residual.mul_(self._decay).add_(tensor)
        wire = self._compressor.encode(residual.to(work_dtype(tensor.dtype)), info.context)
        decoded = decode_float32(self._compressor, wire, tensor, info.context).to(tensor.dtype)
        zero_nonfinite_(residual.sub_(decoded))
        return PackedMessage(wire, decoded)

    def pack_rows(
        self, rows: Sequence[Tensor], infos: Sequence[MessageInfo], nonfinite: Tensor
    ) -> list[PackedMessage] | None:
        shape, dtype, contexts = rows[0].shape, rows[0].dtype, [info.context for info in infos]
        if work_dtype(dtype) != dtype or not self._compressor.has_kernels:
            return None
        residuals = [self.buffer(info, row) for info, row in zip(infos, rows, strict=True)]
        previous = flat_rows(residuals)
        sums = encode_rows(
            rows, lambda kernels, places: kernels.add_residuals(places, previous, self._decay, nonfinite)
        )
        if sums is None:
            return None
        wires = self._compressor.encode_rows(sums.to(dtype).view(len(rows), *shape).unbind(), contexts)
        decoded, size = torch.empty_like(sums, dtype=dtype), self._compressor.wire_bytes(shape, dtype, contexts[0])
        outs = decoded.view(len(rows), *shape).unbind()
        if wires is None or not self._compressor.decode_rows([wire[:size] for wire in wires.unbind()], outs, contexts):
            return None

        def store(kernels: Any, places: Rows) -> bool:
            kernels.store_residuals(sums, decoded, places)
            return True

        if not fill_rows(residuals, store):
            return None
        return [PackedMessage(wire, out) for wire, out in zip(wires.unbind(), outs, strict=True)]

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        return out.copy_(decode_float32(self._compressor, wire, out, info.context))

    def unpack_rows(self, wires: Sequence[Tensor], outs: Sequence[Tensor], infos: Sequence[MessageInfo]) -> bool:
        if work_dtype(outs[0].dtype) != outs[0].dtype:
            return False
        return self._compressor.decode_rows(wires, outs, [info.context for info in infos])


@dataclass(frozen=True)
class EF21(ErrorFeedback):
    """EF21 (arXiv 2106.05203): `g <- g + C(x - g)`; the other end uses g.

    Both ends remember g, one for each micro-batch slot, and compute it from decoded messages alone.
    """

    @property
    def spec(self) -> str:
        return f"ef21({self.compressor.spec})"

    def new_state(self) -> FeedbackState:
        return _EF21State(self.compressor)


class _EF21State(BufferState):
    """The reference g at either end."""

    buffers_key = "reference"

    def pack(self, tensor: Tensor, info: MessageInfo) -> PackedMessage:
        reference = self.buffer(info, tensor)
        delta = (tensor.to(torch.float32) - reference).to(work_dtype(tensor.dtype))
        wire = self._compressor.encode(delta, info.context)
        return PackedMessage(wire, self._update_reference(reference, wire, tensor, info).to(tensor.dtype))

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        return out.copy_(self._update_reference(self.buffer(info, out), wire, out, info))

    def shared_tensors(self) -> list[Tensor]:
        return [self._buffers[key].cpu() for key in sorted(self._buffers)]

    def _update_reference(self, reference: Tensor, wire: Tensor, like: Tensor, info: MessageInfo) -> Tensor:
        updated = decode_float32(self._compressor, wire, like, info.context).add_(reference)
        zero_nonfinite_(reference.copy_(updated))
        return updated


@dataclass(frozen=True)
class EFMixed(ErrorFeedback):
    """Sends entries of the tensor and entries of the residual (arXiv 2401.07788 names EF-mixed and does not define it).

    Sends `a = C1(x)` and `b = C2(e)`; the other end uses `a + b`, and then `e <- (x - a) + (e - b)`. C1 selects `share`
    of the compressor's entries and C2 the others, so that a message has about the size of one without feedback, and old
    losses cannot crowd out what is large now. Only the sender has a memory.

    Args:
        compressor: one that sends a share of the entries: TopK or RandomK. For others no half of a message is defined.
        share: the fraction of the entries that are taken from the tensor, between 0 and 1.

    Raises:
        PolicyError: another compressor, or a share out of range.
    """

    share: float = 0.5

    has_stateless_receiver: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(getattr(self.compressor, "share", None), float):
            expected, advice = "a compressor that keeps a share of the entries", 'use TopK or RandomK, or "ef(...)"'
            raise PolicyError("EFMixed", found=self.compressor.spec, expected=expected, do=advice)
        if not 0 < self.share < 1:
            expected = "a number between 0 and 1"
            raise PolicyError("EFMixed, share", found=f"{self.share}", expected=expected, do="pass e.g. 0.5")

    @property
    def spec(self) -> str:
        options = "" if self.share == 0.5 else f", share={self.share!r}"
        return f"efmixed({self.compressor.spec}{options})"

    def new_state(self) -> FeedbackState:
        compressor: Any = self.compressor
        # in decimal numbers 0.2 x 0.75 is exactly 0.15
        total, share = (Decimal(repr(number)) for number in (compressor.share, self.share))
        fresh, old = float(total * share), float(total * (1 - share))
        return _EFMixedState(replace(compressor, share=fresh), replace(compressor, share=old))


class _EFMixedState(BufferState):
    """Residuals at the sender; a message is that of entries of the tensor, then that of entries of the residual."""

    buffers_key = "residual"

    def __init__(self, compressor: Compressor, residual_compressor: Compressor) -> None:
        super().__init__(compressor)
        self._residual_compressor = residual_compressor

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        old = self._residual_compressor.wire_bytes(shape, work_dtype(dtype), _residual_context(info.context))
        return super().wire_bytes(shape, dtype, info) + old

    def pack(self, tensor: Tensor, info: MessageInfo) -> PackedMessage:
        residual, dtype = self.buffer(info, tensor), work_dtype(tensor.dtype)
        fresh = self._compressor.encode(tensor.to(dtype), info.context)
        wire = torch.cat((fresh, self._residual_compressor.encode(residual.to(dtype), _residual_context(info.context))))
        decoded = self._decode_sum(wire, tensor, info).to(tensor.dtype)
        zero_nonfinite_(residual.add_(tensor).sub_(decoded))
        return PackedMessage(wire, decoded)

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        return out.copy_(self._decode_sum(wire, out, info))

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        fresh, old = self._split_message(wire, shape, dtype, info)
        fresh_indices = self._compressor.indices(fresh, shape, info.context)
        old_indices = self._residual_compressor.indices(old, shape, _residual_context(info.context))
        if fresh_indices is None or old_indices is None:
            return None
        combined: Tensor = torch.unique(torch.cat((fresh_indices, old_indices)))
        return combined

    def _proves_finite(self, wire: Tensor, tensor: Tensor, info: MessageInfo) -> bool:
        return super()._proves_finite(self._split_message(wire, tensor.shape, tensor.dtype, info)[0], tensor, info)

    def _decode_sum(self, wire: Tensor, like: Tensor, info: MessageInfo) -> Tensor:
        fresh, old = self._split_message(wire, like.shape, like.dtype, info)
        decoded = decode_float32(self._compressor, fresh, like, info.context)
        return decoded.add_(decode_float32(self._residual_compressor, old, like, _residual_context(info.context)))

    def _split_message(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo
    ) -> tuple[Tensor, Tensor]:
        size = super().wire_bytes(shape, dtype, info)
        return wire[:size], wire[size:].clone()  # a copy is aligned: compressors may view it as wider values


def _residual_context(context: CompressorContext) -> CompressorContext:
    return replace(context, key=(context.key + _RESIDUAL_KEY) & 0xFFFFFFFF)
