"""Ranks of gloo that send to each other at the same time.

What tells a rank that another one is ready to receive shares a connection with what the other one sends. A receive that
is posted after a send waits for it, and two ranks that do so send one after the other: as in gloo's own collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TAG = 0x7370
"""Sets messages apart from those that others send in the same group."""


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors of a device cross by gloo in a group, without a copy to another device."""
    return device.type == "cpu" and bool(group._get_backend(device).name() == "gloo")


class P2PExchange:
    """Messages to and from the other ranks of a group, all on their way at once; receives are posted first.

    All ranks exchange in the same order.

    Args:
        sent, received: a contiguous tensor for each rank of the group; this rank's own ones are left alone.
    """

    def __init__(
        self, send_tensors: Sequence[Tensor], recv_tensors: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        peers = {rank: dist.get_global_rank(group, rank) for rank in others}
        self._tensors = send_tensors, recv_tensors
        works = [dist.irecv(recv_tensors[rank], peers[rank], group, TAG) for rank in others]
        works += [dist.isend(send_tensors[rank], peers[rank], group, TAG) for rank in others]
        self._works = [work for work in works if work is not None]

    def wait(self, *timeout: Any) -> None:
        """Until all messages have come and gone.

        Args:
            timeout: of each, a `timedelta`; none: as long as the group waits.
        """
        for work in self._works:
            work.wait(*timeout)
        self._works.clear()
