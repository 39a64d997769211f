"""Averages in two levels beside the backward pass: exact within a node, compressed between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.background_allreduce import AllReduceFor, BackgroundAllReduce
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce, share_numel
from shrinkpoint.comm.gradient_layout import Segment, SegmentValues
from shrinkpoint.comm.rendezvous import group_timeout
from shrinkpoint.errors import PolicyError


def check_ranks_per_node(where: str, ranks_per_node: int, group: dist.ProcessGroup) -> None:
    """Raise PolicyError if the ranks of a group cannot be nodes of so many ranks each."""
    validate.check_int(f"{where}, ranks_per_node", ranks_per_node)
    if group.size() % ranks_per_node:
        problem, expected = f"{ranks_per_node} of {group.size()} ranks", "a divisor of the number of ranks"
        advice = "give every node as many ranks, or leave it out"
        raise PolicyError(f"{where}, ranks_per_node", found=problem, expected=expected, do=advice)


class NodeGroups:
    """The ranks of this node, and those of other nodes that have the same place there, as groups of their own.

    Ranks of a node follow each other in the group. The node has a group for each direction, in which threads of
    their own make collectives. All ranks of the group create them alike.
    """

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int) -> None:
        members = dist.get_process_group_ranks(group)
        first, place = group.rank() - group.rank() % ranks_per_node, group.rank() % ranks_per_node
        node_members = members[first : first + ranks_per_node]
        self.reduce, self.gather = (_new_group(node_members, group) for _ in range(2))
        self.across = _new_group(members[place::ranks_per_node], group)


def _new_group(members: list[int], parent: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of members that they alone create, with the backend and the timeout of another group."""
    timeout = timedelta(seconds=group_timeout(parent))
    backend = dist.get_backend_config(parent)
    made: dist.ProcessGroup = dist.new_group(members, timeout, backend, use_local_synchronization=True)
    return made


class _NodeShare(SegmentValues):
    """This rank's share of the average of its node: reading and writing it are collectives within the node."""

    def __init__(
        self, values: SegmentValues, segment: Segment, all_reduce: CompressedAllReduce, groups: NodeGroups
    ) -> None:
        self.segment, self._values, self._all_reduce, self._groups = segment, values, all_reduce, groups

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self._values.dtype, torch.float32)

    def copy_to(self, flat: Tensor) -> None:
        rows = self._new_rows(flat)
        self._values.copy_to(rows.view(-1))
        total = self._all_reduce.reduce_scatter(rows, self._groups.reduce, self.segment.name)
        flat[: self.segment.numel] = total.div_(len(rows))
        flat[self.segment.numel :] = 0

    def copy_from(self, flat: Tensor) -> None:
        rows = self._new_rows(flat)
        share = flat[: self.segment.numel].to(rows.dtype)
        self._all_reduce.all_gather(share, rows, self._groups.gather, self.segment.name)
        self._values.copy_from(rows.view(-1))

    def _new_rows(self, flat: Tensor) -> Tensor:
        shape = self._groups.reduce.size(), self.segment.numel
        return torch.empty(shape, dtype=self._values.dtype, device=flat.device)


class HierarchicalAllReduce(BackgroundAllReduce):
    """Averages segments within a node first, of which each rank then averages a share with the other nodes.

    A rank sends to other nodes the messages of its share alone, and all shares of a node together are one model's.

    Args:
        node_all_reduce: within the node; exact, so that all ranks of it get the same bits.
        all_reduce_for: between nodes.
    """

    def __init__(
        self,
        groups: NodeGroups,
        device: torch.device,
        node_all_reduce: CompressedAllReduce,
        all_reduce_for: AllReduceFor,
    ) -> None:
        self._groups, self._node_all_reduce = groups, node_all_reduce
        self._across = BackgroundAllReduce.create(groups.across, device, all_reduce_for)

    def begin(self, segments: Sequence[Segment]) -> None:
        self._across.begin([self._share(segment) for segment in segments])

    def submit(self, values: SegmentValues) -> None:
        self._across.submit(_NodeShare(values, self._share(values.segment), self._node_all_reduce, self._groups))

    def wait(self) -> None:
        self._across.wait()

    def close(self) -> None:
        self._across.close()

    def _share(self, segment: Segment) -> Segment:
        return replace(segment, numel=share_numel(segment.numel, self._groups.reduce.size()))
