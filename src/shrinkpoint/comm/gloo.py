"""Point-to-point exchange on gloo, with all messages in flight at the same time.

On gloo the notice that a rank is ready to receive shares a connection with what that rank sends. A receive that is
posted after a send waits for it, and two ranks that do so send one after the other, as in gloo's own collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TAG = 0x7370
"""The tag of these messages, which tells them from others in the same group."""


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group sends tensors of this device by gloo, without a copy to another device."""
    return device.type == "cpu" and bool(group._get_backend(device).name() == "gloo")


class P2PExchange:
    """Starts sends to and receives from all other ranks of a group; receives are posted first.

    All ranks must make their exchanges in the same order.

    Args:
        send_tensors, recv_tensors: a contiguous tensor for each rank of the group; this rank's own are not used.
    """

    def __init__(
        self, send_tensors: Sequence[Tensor], recv_tensors: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        other_ranks = [rank for rank in range(group.size()) if rank != group.rank()]
        peers = {rank: dist.get_global_rank(group, rank) for rank in other_ranks}
        self._tensors = send_tensors, recv_tensors
        works = [dist.irecv(recv_tensors[rank], peers[rank], group, TAG) for rank in other_ranks]
        works += [dist.isend(send_tensors[rank], peers[rank], group, TAG) for rank in other_ranks]
        self._works = [work for work in works if work is not None]

    def wait(self, *timeout: Any) -> None:
        """Wait until all messages are sent and received.

        Args:
            timeout: for each message, a `timedelta`; without it, the timeout of the group.
        """
        for work in self._works:
            work.wait(*timeout)
        self._works.clear()
