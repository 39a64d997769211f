"""Averages over the ranks of a group in sparse messages: one all-gather, and the mean of what all ranks decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.compressed_allreduce import CompressedAllGather, as_feedback
from shrinkpoint.comm.compressors.sparse import RandomK, TopK
from shrinkpoint.comm.error_feedback import ErrorFeedback
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError


def is_sparse(feedback: ErrorFeedback) -> bool:
    """Whether messages carry a few values of each tensor."""
    return isinstance(feedback.compressor, TopK | RandomK)


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
            problem, advice = f"a state of {sorted(state)}", "give what state_dict() of the same rank gave"
            raise MismatchError("all-gather", found=problem, expected="one of an all-gather", do=advice)
        self._all_gather.load_state_dict(state["all-gather"])

    def residuals(self) -> dict[str, Tensor]:
        """What messages of this rank have lost and the next ones would make up for, as flat tensors by layout."""
        layouts = self._all_gather.residuals().items()
        return {layout: row for layout, rows in layouts for row in rows.values()}

    def restart(self, counts: Mapping[str, int]) -> None:
        """Begin without memories, as if so many averages of each layout had been made."""
        self._all_gather.restart(counts)
