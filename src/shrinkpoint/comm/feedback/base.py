"""The interface of error feedback: settings that both ends of a link share, and the state that each end keeps.

`NoFeedback` is a compressor alone."""

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
    """One message of a link, as its feedback sees it.

    Attributes:
        slot, tensor: the micro-batch, and which of its tensors.
        index: how many messages of that slot and tensor went before.
        context: what the operator knows besides.
        ids: int64, one a row; the sample of each row.
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
    """A message, and what the other end will make of it where that is known already: of x's shape and dtype."""

    wire: Tensor
    decoded: Tensor | None = None


class FeedbackState(ABC):
    """What one end of a link remembers, and how it packs or unpacks with that. Buffers lie where the tensors do.

    What is not finite reaches the other end and is then forgotten: where a buffer would not be finite it is 0, else
    one bad batch (a loss scale that was too large) would stay in it for good.

    Attributes:
        restarts: how often a buffer began anew because the shape had changed.
    """

    restarts: int = 0

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        """The size of the message of this turn; it changes nothing."""

    def expect(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        """The size of the message of this turn, which will be unpacked after all that were expected before it."""
        return self.wire_bytes(shape, dtype, info)

    def forget_expected(self) -> None:
        """What was expected and is not there yet will not come."""
        return

    @abstractmethod
    def pack(self, x: Tensor, info: MessageInfo) -> PackedMessage:
        """The message of this turn, after which this end is one turn further."""

    @abstractmethod
    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        """Fill `out` with what the sender meant, after which this end is one turn further."""

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        """The flat positions at which a message changes something; None: everywhere."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What it remembers: a nest of tensors, which are not copied, and plain values."""
        return {}

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; tensors are copied."""

    def shared_tensors(self) -> list[Tensor]:
        """What must be equal at both ends: tensors on the CPU, in an order that both ends have."""
        return []


class ErrorFeedback(ABC):
    """How one tensor after another crosses a wire, each with regard to those before. Subclasses are frozen dataclasses.

    Attributes:
        compressor: what makes messages small; in evaluation it is used alone.
        needs_ids: messages carry the ids of samples.
        is_stateless: nothing makes good later what a message loses.
    """

    compressor: Compressor
    needs_ids: ClassVar[bool] = False
    is_stateless: ClassVar[bool] = False

    @property
    @abstractmethod
    def spec(self) -> str:
        """The feedback as a word; `shrinkpoint.comm.parse` reads it back."""

    @property
    def shared_spec(self) -> str:
        """`spec` without what either end may choose for itself."""
        return self.spec

    @abstractmethod
    def new_state(self) -> FeedbackState:
        """One end that remembers nothing yet."""

    def __str__(self) -> str:
        return self.spec


def zero_nonfinite_(x: Tensor) -> Tensor:
    """x, with 0 where it was not finite; in place."""
    return x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What an operator is given for a tensor of this dtype: bfloat16 stays, so that chosen values take 2 bytes.

    All else is float32: x + e may be beyond the range of float16.
    """
    return dtype if dtype == torch.bfloat16 else torch.float32


def decode_float32(compressor: Compressor, wire: Tensor, like: Tensor, context: CompressorContext) -> Tensor:
    """What a message says that was made of `inner` of tensors like this one: float32, and the caller's own."""
    made = torch.empty(like.shape, dtype=work_dtype(like.dtype), device=wire.device)
    return compressor.decode(wire, made, context).to(torch.float32)


@dataclass(frozen=True)
class NoFeedback(ErrorFeedback):
    """An operator alone."""

    compressor: Compressor

    is_stateless: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return self.compressor.spec

    def new_state(self) -> FeedbackState:
        return NoFeedbackState(self.compressor)


class NoFeedbackState(FeedbackState):
    """It remembers nothing."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        return self._compressor.wire_bytes(shape, dtype, info.context)

    def pack(self, x: Tensor, info: MessageInfo) -> PackedMessage:
        return PackedMessage(self._compressor.encode(x, info.context))

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        return self._compressor.decode(wire, out, info.context)

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        return self._compressor.indices(wire, shape, info.context)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
