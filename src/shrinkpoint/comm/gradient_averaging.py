"""The parts that the handles of `compress_ddp` and `compress_fsdp` have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from shrinkpoint import validate
from shrinkpoint.comm.error_feedback import ErrorFeedback
from shrinkpoint.comm.gradient_record import GradientRecord
from shrinkpoint.comm.link import CompressorLike, NonfinitePolicy, check_nonfinite
from shrinkpoint.comm.state_check import STATE_ADVICE
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.info import JSON

RecordT = TypeVar("RecordT", bound=GradientRecord)


class GradientAveraging(ABC, Generic[RecordT]):
    """The averaging of a model's gradients over ranks, as a training loop saves it and a journal records it.

    Args:
        where: the function that returns the handle, for messages.

    Raises:
        PolicyError: an option is out of range.
    """

    def __init__(self, where: str, min_numel: int, nonfinite: NonfinitePolicy, timeout: float) -> None:
        self._nonfinite = check_nonfinite(where, nonfinite)
        self._min_numel = validate.check_int(f"{where}, min_numel", min_numel, minimum=0)
        self._timeout = validate.check_float(f"{where}, timeout", timeout)
        self._where = where
        self._record: RecordT | None = None

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The model, with its buffers."""

    @property
    @abstractmethod
    def group(self) -> dist.ProcessGroup:
        """All ranks that train the model."""

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """This rank's parameters, or its shards of them."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The configuration that a run which is resumed must have in common with this one."""

    @abstractmethod
    def counts(self) -> JSON:
        """The numbers of messages so far, which noise follows from."""

    @abstractmethod
    def restart(self, counts: JSON) -> None:
        """Go on as if so many messages had been sent, without feedback of earlier ones; on all ranks alike."""

    @abstractmethod
    def record_gradients(self, compressor: CompressorLike = None) -> RecordT:
        """Keep the gradients of each step from now on, for a journal.

        Args:
            compressor: of shards of gradients, which are rounded by it; None: they are kept as they are.

        Raises:
            PolicyError: they do not follow from what is kept alone, or they are kept for another journal.
        """

    @abstractmethod
    def _feedbacks(self) -> Iterable[ErrorFeedback]:
        """The feedbacks of all messages."""

    @property
    def has_feedback(self) -> bool:
        """True if ranks remember what their messages to each other have lost."""
        return not all(feedback.is_stateless for feedback in self._feedbacks())

    def stop_recording(self) -> None:
        """Keep no gradients any more."""
        if self._record is not None:
            self._record.close()
        self._record = None

    def _rank_state(self) -> dict[str, str]:
        """The rank that a state belongs to, if ranks remember what they lost."""
        return {"rank": f"rank {self.group.rank()} of {self.group.size()}"} if self.has_feedback else {}

    def _check_common_state(self, state: object, own: Mapping[str, Any]) -> None:
        """Check the parts of a state that the handles of replicas and of shards have in common.

        The feedback of another rank makes up for what other messages have lost. `own` is what `state_dict` returns now.
        """
        expected = "what state_dict() returned"
        saved = validate.check_instance(f"{self._where}, state", state, Mapping, expected=expected, do=STATE_ADVICE)
        if saved.get("words") != own["words"]:
            problem, advice = f"a state of {saved.get('words')}", "compress with the settings of the saved run"
            raise MismatchError(self._where, found=problem, expected=f"{own['words']}", do=advice)
        if missing := sorted(own.keys() - saved.keys()):
            raise MismatchError(self._where, found=f"a state without {', '.join(missing)}", do=STATE_ADVICE)
        if "rank" in own and saved["rank"] != own["rank"]:
            found = f"the feedback of {saved['rank']!r:.60}"
            advice = f"{STATE_ADVICE}; or load nothing on any rank, and feedback starts empty"
            raise MismatchError(self._where, found=found, expected=own["rank"], do=advice)

    def _check_not_recorded(self) -> None:
        if self._record is not None:
            advice = "close the other journal first"
            raise PolicyError(self._where, found="a second journal of one model", expected="one journal", do=advice)


def not_replayable(problem: str, advice: str) -> PolicyError:
    """The error about gradients that a journal could not make again."""
    return PolicyError("journal", found=problem, expected="gradients that follow from the recorded bytes", do=advice)
