"""What this rank sends to others point to point, as torch's process groups see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor


@contextmanager
def sent_messages() -> Iterator[list[tuple[int, int]]]:
    """A list that gets the rank that is sent to, in the default group, and the bytes, of each message.

    Several threads may send, so nothing is added up here.
    """
    # Taken from the class itself, what is put back would no longer be a method.
    messages, send = list[tuple[int, int]](), dist.ProcessGroup.__dict__["send"]

    def record(group: dist.ProcessGroup, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        messages.append((dist.get_global_rank(group, peer), sum(tensor.nbytes for tensor in tensors)))
        return send.__get__(group)(tensors, peer, tag)

    setattr(dist.ProcessGroup, "send", record)  # noqa: B010 — mypy lets no method be assigned
    try:
        yield messages
    finally:
        setattr(dist.ProcessGroup, "send", send)  # noqa: B010
