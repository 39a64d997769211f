"""The compressed average of a round, whose error feedback outlives a failed round and a change of ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce, as_feedback
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.comm.sparse_allreduce import SparseAllReduce, is_sparse
from shrinkpoint.comm.stats import LinkStats


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
        average_type = SparseAllReduce if is_sparse(self.feedback) else CompressedAllReduce
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
