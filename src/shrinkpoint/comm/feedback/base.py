"""The interface of error feedback: settings that both ends of a link share, and the state that each end keeps.

`NoFeedback` is a compressor alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext


@dataclass(frozen=True)
class MessageInfo:
    """Describes one message of a link to its feedback.

    Attributes:
        slot, tensor: the micro-batch, and which of its tensors.
        index: the number of earlier messages of that slot and tensor.
        context: that of the compressor.
        ids: the sample of each row: int64, 1-d; None if unknown.
    """

    slot: int = 0
    tensor: int = 0
    index: int = 0
    context: CompressorContext = NO_CONTEXT
    ids: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> tuple[int, int]:
        return self.slot, self.tensor


@dataclass(frozen=True)
class PackedMessage:
    """A message, and what the other end will decode from it, of the shape and dtype of the tensor; None if unknown."""

    wire: Tensor
    decoded: Tensor | None = None


class FeedbackState(ABC):
    """The memory of one end of a link, which packs or unpacks messages with it. Buffers are on the tensors' device.

    Values that are not finite reach the other end and are then forgotten: a buffer is 0 where it would not be finite,
    else one bad batch (a loss scale that was too large) would remain in it for good.

    Attributes:
        restarts: how often a buffer was replaced by a new one because the shape had changed.
    """

    restarts: int = 0

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        """The size in bytes of the message; the state does not change."""

    def expect(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        """The size in bytes of a message that will be unpacked after all that were expected earlier."""
        return self.wire_bytes(shape, dtype, info)

    def forget_expected(self) -> None:
        """Drop messages that were expected and have not been unpacked."""
        return

    @abstractmethod
    def pack(self, tensor: Tensor, info: MessageInfo) -> PackedMessage:
        """Pack the tensor as the next message, and advance the state."""

    @abstractmethod
    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        """Unpack the next message into `out`, advance the state, and return `out`."""

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        """The flat indices at which a message changes something; None for all of them."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The memory as a nest of tensors, which are not copied, and plain values."""
        return {}

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; tensors are copied."""

    def shared_tensors(self) -> list[Tensor]:
        """The tensors that must be equal at both ends, on the CPU, in an order that both ends share."""
        return []


class ErrorFeedback(ABC):
    """A compressor with a memory of earlier messages. Subclasses are frozen dataclasses.

    Attributes:
        compressor: encodes the messages; in evaluation it is used alone.
        needs_ids: whether messages carry the ids of samples.
        is_stateless: whether nothing makes up later for what a message loses.
    """

    compressor: Compressor
    needs_ids: ClassVar[bool] = False
    is_stateless: ClassVar[bool] = False

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


@dataclass(frozen=True)
class NoFeedback(ErrorFeedback):
    """A compressor without feedback."""

    compressor: Compressor

    is_stateless: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return self.compressor.spec

    def new_state(self) -> FeedbackState:
        return NoFeedbackState(self.compressor)


class NoFeedbackState(FeedbackState):
    """Packs and unpacks without a memory."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        return self._compressor.wire_bytes(shape, dtype, info.context)

    def pack(self, tensor: Tensor, info: MessageInfo) -> PackedMessage:
        return PackedMessage(self._compressor.encode(tensor, info.context))

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        return self._compressor.decode(wire, out, info.context)

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        return self._compressor.indices(wire, shape, info.context)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
