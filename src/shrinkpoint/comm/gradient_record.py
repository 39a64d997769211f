"""What a journal keeps of a training step's gradients, and of what averaged them: the parts that DDP and FSDP share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.info import JSON


class GradientRecord(ABC):
    """Keeps the gradients of a step as bytes, and makes the same gradients from such bytes.

    Attributes:
        is_shared: whether the bytes of the first rank of the group are those of all, so that it alone has to keep them.
    """

    is_shared: ClassVar[bool]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes of all messages of a step."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there was no backward pass since `clear`."""

    @abstractmethod
    def messages(self, step: int) -> Sequence[Tensor]:
        """The gradients of the last backward pass as messages: uint8, 1-d; they are kept until `clear`.

        Args:
            step: number of the training step.

        Raises:
            PolicyError: there was no whole backward pass since `clear`.
        """

    @abstractmethod
    def clear(self) -> None:
        """Keep nothing any more: the next backward pass is another step's."""

    @abstractmethod
    def fill_gradients(self, step: int, counts: JSON, data: memoryview) -> None:
        """Write the gradients that messages decode to into `.grad` of all parameters.

        Args:
            step: of the messages.
            counts: what `GradientAveraging.counts` was then.
            data: the messages, one behind the other.

        Raises:
            MismatchError: they are those of other gradients.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the model."""


RecordT = TypeVar("RecordT", bound=GradientRecord)


class RecordHolder(Generic[RecordT]):
    """Holds the record of gradients that a journal has asked for."""

    _record: RecordT | None = None

    def stop_recording(self) -> None:
        """Keep nothing any more."""
        if self._record is not None:
            self._record.close()
        self._record = None


class GradientAveraging(Protocol):
    """What `compress_ddp` and `compress_fsdp` return, as a journal uses it."""

    @property
    def module(self) -> nn.Module:
        """The model, with its buffers."""

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks that train it."""

    @property
    def has_feedback(self) -> bool:
        """Whether ranks remember what their messages to each other have lost."""

    def parameters(self) -> list[Tensor]:
        """This rank's parameters, or its shards of them."""

    def config(self) -> dict[str, Any]:
        """What a run that is resumed must have in common with this one."""

    def counts(self) -> JSON:
        """The numbers of messages so far, which noise follows from."""

    def restart(self, counts: JSON) -> None:
        """Go on as if so many messages had been sent, without feedback of earlier ones; on all ranks alike."""

    def record_gradients(self, compressor: CompressorLike = None) -> GradientRecord:
        """Keep the gradients of each step from now on.

        Args:
            compressor: of shards of gradients, which are rounded by it; None: they are kept as they are.

        Raises:
            PolicyError: they do not follow from what is kept alone, or they are kept for another journal.
        """

    def stop_recording(self) -> None:
        """Keep nothing any more."""


def check_single_record(where: str, record: GradientRecord | None) -> None:
    """Raises PolicyError if gradients are kept for a journal already."""
    if record is not None:
        advice = "close the other journal first"
        raise PolicyError(where, found="a second journal of one model", expected="one", do=advice)


def check_refusal(problem: str, advice: str) -> None:
    """Raises PolicyError if there is a problem that keeps gradients from being replayed."""
    if problem:
        raise PolicyError("journal", found=problem, expected="gradients that follow from what is kept alone", do=advice)
