"""Averages of local steps: in one hop of sparse messages or in two hops, with feedback that outlives a failed round."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.compressed_allreduce import CompressedAllGather, CompressedAllReduce, as_feedback
from shrinkpoint.comm.compressors.sparse import RandomK, TopK
from shrinkpoint.comm.link import CompressorLike, LinkStats
from shrinkpoint.comm.state_check import STATE_ADVICE
from shrinkpoint.errors import MismatchError


class SparseAllReduce:
    """Averages tensors over the ranks of a group, to the same bits on every rank: all decode the same bytes.

    Every rank sends its message to all others. The mean of sparse tensors has more values than each of them: to send it
    in messages of the same size, as a second hop would, loses most of it at first, and without feedback for good.

    Args:
        compressor: for the tensors.
        name: of the tensors; part of the seed of noise and random indices.

    Attributes:
        link_stats: statistics of "all-gather".
    """

    def __init__(self, compressor: CompressorLike, *, name: str) -> None:
        self.link_stats = {"all-gather": LinkStats()}
        self._all_gather = CompressedAllGather(as_feedback(compressor), self.link_stats["all-gather"], name=name)

    def average_(self, tensor: Tensor, group: dist.ProcessGroup, layout: str = "") -> Tensor:
        """Average a tensor over ranks in place, and return it.

        Args:
            tensor: float32 or float64, 1-d, contiguous; of the same length on every rank.
            layout: the name of its layout.
        """
        if group.size() == 1 or not tensor.numel():
            return tensor
        rows = torch.empty(group.size(), tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        self._all_gather(tensor, rows, group, layout)
        total = tensor.copy_(rows[0])
        for row in rows[1:]:  # in the order of ranks, one after the other: a sum has one value
            total.add_(row)
        return total.div_(group.size())

    def state_dict(self) -> dict[str, Any]:
        """The feedback state of this rank; each rank has its own."""
        return {"all-gather": self._all_gather.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of the same rank returned; a MismatchError if it is another kind of state."""
        if set(state) != {"all-gather"}:
            problem = f"a state of {sorted(state)}"
            raise MismatchError("all-gather", found=problem, expected="one of an all-gather", do=STATE_ADVICE)
        self._all_gather.load_state_dict(state["all-gather"])

    def residuals(self) -> dict[str, Tensor]:
        """The losses of this rank's messages that the next ones would make up for, as flat tensors by layout."""
        layouts = self._all_gather.residuals().items()
        return {layout: row for layout, rows in layouts for row in rows.values()}

    def restart(self, counts: Mapping[str, int]) -> None:
        """Begin without memories, as if so many averages of each layout had been made."""
        self._all_gather.restart(counts)


class RoundAverage:
    """Averages tensors over the ranks of a group: in one hop with TopK and RandomK, else in two.

    Call `begin` before the tensors of a round and `end` after them. Feedback has the size of the tensors; between
    `begin` and `end` there is a copy of it.

    Attributes:
        feedback: the compressor, with its memory of earlier messages.
        link_stats: statistics of "all-gather", or of "first hop" and "second hop".
        residuals: values by layout that messages to an earlier group have lost. The next average sends them.
    """

    def __init__(self, compressor: CompressorLike, name: str) -> None:
        self.feedback = as_feedback(compressor)
        is_sparse = isinstance(self.feedback.compressor, TopK | RandomK)
        average_type = SparseAllReduce if is_sparse else CompressedAllReduce
        self._average: SparseAllReduce | CompressedAllReduce = average_type(self.feedback, name=name)
        self.link_stats: dict[str, LinkStats] = self._average.link_stats
        self.residuals: dict[str, Tensor] = {}
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        """Remember the feedback."""
        self._before = copy.deepcopy(self._average.state_dict())

    def average_(self, tensor: Tensor, group: dist.ProcessGroup, layout: str) -> Tensor:
        """Average a flat tensor of a layout over the ranks in place."""
        residual = self.residuals.get(layout, tensor[:0])[: tensor.numel()]
        tensor[: residual.numel()].add_(residual)  # the padding of two hops may make it longer
        return self._average.average_(tensor, group, layout)

    def end(self, is_committed: bool) -> None:
        """Keep the feedback of a round, or go back to that of `begin` if the round failed."""
        if is_committed:
            self.residuals = {}
        else:
            self._average.load_state_dict(self._before)
        self._before = {}

    def change_group(self, *, keep: bool) -> None:
        """Begin anew with other ranks.

        In two hops a residual belongs to a pair of ranks, and EF21 needs the same reference at both ends. So all ranks
        drop their feedback, and what this rank's messages have lost is added to its next tensors.

        Args:
            keep: False for a rank that takes over the state of another one; its residuals belong to other weights.
        """
        self.residuals = (self.residuals or self._average.residuals()) if keep else {}
        self._average.restart({})

    def state_dict(self) -> dict[str, Any]:
        """The feedback of this rank. Tensors are not copied."""
        return self._average.state_dict()

    def load_state_dict(self, state: Any, residuals: dict[str, Tensor]) -> None:
        """Restore `state_dict` and `residuals` of the same rank; a MismatchError if they are of another kind."""
        self._average.load_state_dict(state)
        self.residuals = {layout: residual.clone() for layout, residual in residuals.items()}
