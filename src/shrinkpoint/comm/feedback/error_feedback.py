"""Error feedback with one buffer for each micro-batch slot and tensor: EF, EF21 and EF-mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, ClassVar

import torch
from torch import Tensor

from shrinkpoint.comm.compressors.base import Compressor, CompressorContext, check_compressor
from shrinkpoint.comm.feedback.base import (
    ErrorFeedback,
    FeedbackState,
    MessageInfo,
    PackedMessage,
    decode_float32,
    work_dtype,
    zero_nonfinite_,
)
from shrinkpoint.errors import MismatchError, PolicyError

_RESIDUAL_KEY = 0x5BD1E995
"""Added to the key of a message for its second half in EF-mixed, so that the halves have different keys."""


class FeedbackBuffers:
    """Float32 buffers by micro-batch slot and tensor, created as zeros when they are first needed.

    Attributes:
        restarts: how many were replaced by new ones because the shape had changed.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def get(self, info: MessageInfo, like: Tensor) -> Tensor:
        """The buffer for a message, to be changed in place, of the shape and on the device of `like`.

        A batch with fewer rows than the buffer uses its first rows. Any other change of shape starts a new buffer.
        """
        buffer = self._buffers.get(info.key)
        if buffer is None or not _shape_fits(buffer.shape, like.shape):
            self.restarts += buffer is not None
            buffer = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        elif buffer.device != like.device:
            buffer = buffer.to(like.device)
        self._buffers[info.key] = buffer
        return buffer[: like.shape[0]] if like.dim() else buffer

    def state_dict(self) -> dict[str, Any]:
        return {f"{slot}.{index}": buffer for (slot, index), buffer in self._buffers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        buffers = {}
        for name, buffer in state.items():
            if not isinstance(buffer, Tensor) or buffer.dtype != torch.float32:
                raise MismatchError(f"feedback, buffer {name}", found=repr(buffer)[:80], expected="a float32 tensor")
            slot, _, index = name.partition(".")
            buffers[int(slot), int(index)] = buffer.detach().clone()
        self._buffers = buffers

    def shared_tensors(self) -> list[Tensor]:
        return [self._buffers[key].cpu() for key in sorted(self._buffers)]


def _shape_fits(buffer_shape: torch.Size, shape: torch.Size) -> bool:
    if buffer_shape == shape:
        return True
    return len(buffer_shape) == len(shape) > 0 and buffer_shape[1:] == shape[1:] and buffer_shape[0] > shape[0]


class BufferState(FeedbackState):
    """A compressor with one float32 buffer for each slot and tensor, which messages are compared with.

    Attributes:
        buffers_key: the key of the buffers in `state_dict`.
    """

    buffers_key: ClassVar[str]

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._buffers = FeedbackBuffers()

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return self._buffers.restarts

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        return self._compressor.wire_bytes(shape, work_dtype(dtype), info.context)

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        return self._compressor.indices(wire, shape, info.context)

    def state_dict(self) -> dict[str, Any]:
        return {self.buffers_key: self._buffers.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._buffers.load_state_dict(state[self.buffers_key])


@dataclass(frozen=True)
class EF(ErrorFeedback):
    """Error feedback (arXiv 1809.07599; arXiv 2401.07788, section on error feedback).

    Sends `c = C(x + e)`, and then `e <- x + e - c`, where c is what the other end has after rounding to the dtype of x.
    Only the sender has a memory: e, one for each micro-batch slot, so what a sample lost goes to the next sample there.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        check_compressor("EF", self.compressor)

    @property
    def spec(self) -> str:
        return f"ef({self.compressor.spec})"

    def new_state(self) -> FeedbackState:
        return EFState(self.compressor)


class EFState(BufferState):
    """Residuals at the sender; the receiver has no memory."""

    buffers_key = "residual"

    def pack(self, tensor: Tensor, info: MessageInfo) -> PackedMessage:
        residual = self._buffers.get(info, tensor)
        residual += tensor
        wire = self._compressor.encode(residual.to(work_dtype(tensor.dtype)), info.context)
        decoded = decode_float32(self._compressor, wire, tensor, info.context).to(tensor.dtype)
        zero_nonfinite_(residual.sub_(decoded))
        return PackedMessage(wire, decoded)

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        return out.copy_(decode_float32(self._compressor, wire, out, info.context))


@dataclass(frozen=True)
class EF21(ErrorFeedback):
    """EF21 (arXiv 2106.05203): `g <- g + C(x - g)`; the other end uses g.

    Both ends remember g, one for each micro-batch slot, and compute it from decoded messages alone.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        check_compressor("EF21", self.compressor)

    @property
    def spec(self) -> str:
        return f"ef21({self.compressor.spec})"

    def new_state(self) -> FeedbackState:
        return EF21State(self.compressor)


class EF21State(BufferState):
    """The reference g at either end."""

    buffers_key = "reference"

    def pack(self, tensor: Tensor, info: MessageInfo) -> PackedMessage:
        reference = self._buffers.get(info, tensor)
        wire = self._compressor.encode(
            (tensor.to(torch.float32) - reference).to(work_dtype(tensor.dtype)), info.context
        )
        return PackedMessage(wire, self._update_reference(reference, wire, tensor, info).to(tensor.dtype))

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        return out.copy_(self._update_reference(self._buffers.get(info, out), wire, out, info))

    def shared_tensors(self) -> list[Tensor]:
        return self._buffers.shared_tensors()

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

    compressor: Compressor
    share: float = 0.5

    def __post_init__(self) -> None:
        check_compressor("EFMixed", self.compressor)
        if not isinstance(getattr(self.compressor, "share", None), float):
            expected, advice = "a compressor that keeps a share of the entries", 'use TopK or RandomK, or "ef(...)"'
            raise PolicyError("EFMixed", found=self.compressor.spec, expected=expected, do=advice)
        if not 0 < self.share < 1:
            raise PolicyError("EFMixed, share", found=f"{self.share}", expected="a number between 0 and 1")

    @property
    def spec(self) -> str:
        options = "" if self.share == 0.5 else f", share={self.share!r}"
        return f"efmixed({self.compressor.spec}{options})"

    def new_state(self) -> FeedbackState:
        compressor: Any = self.compressor
        # in decimal numbers .2 x .75 is exactly .15
        total, share = (Decimal(repr(number)) for number in (compressor.share, self.share))
        fresh, old = float(total * share), float(total * (1 - share))
        return EFMixedState(replace(compressor, share=fresh), replace(compressor, share=old))


class EFMixedState(BufferState):
    """Residuals at the sender; the receiver has no memory."""

    buffers_key = "residual"

    def __init__(self, compressor: Compressor, residual_compressor: Compressor) -> None:
        super().__init__(compressor)
        self._residual_compressor = residual_compressor

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        old = self._residual_compressor.wire_bytes(shape, work_dtype(dtype), _residual_context(info.context))
        return self._compressor.wire_bytes(shape, work_dtype(dtype), info.context) + old

    def pack(self, tensor: Tensor, info: MessageInfo) -> PackedMessage:
        residual, dtype = self._buffers.get(info, tensor), work_dtype(tensor.dtype)
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
        return (
            None
            if fresh_indices is None or old_indices is None
            else torch.unique(torch.cat((fresh_indices, old_indices)))
        )

    def _decode_sum(self, wire: Tensor, like: Tensor, info: MessageInfo) -> Tensor:
        fresh, old = self._split_message(wire, like.shape, like.dtype, info)
        decoded = decode_float32(self._compressor, fresh, like, info.context)
        return decoded.add_(decode_float32(self._residual_compressor, old, like, _residual_context(info.context)))

    def _split_message(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo
    ) -> tuple[Tensor, Tensor]:
        size = self._compressor.wire_bytes(shape, work_dtype(dtype), info.context)
        return wire[:size], wire[
            size:
        ].clone()  # a copy starts at an aligned address: compressors may view it as wider values


def _residual_context(context: CompressorContext) -> CompressorContext:
    return replace(context, key=(context.key + _RESIDUAL_KEY) & 0xFFFFFFFF)
