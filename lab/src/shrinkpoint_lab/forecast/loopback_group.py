"""A group of ranks of which this process is the only one: its messages come back, so that its work can be measured."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class _Receive:
    """A receive that was posted: its buffer, and whether a message has filled it."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._is_filled = threading.Event()

    def fill(self, message: Tensor) -> None:
        self.buffer.copy_(message)
        self._is_filled.set()

    def wait(self) -> bool:
        return self._is_filled.wait()


class LoopbackGroup:
    """Rank 0 of a group on gloo: what it sends to a rank is what it receives from it, with the same tag.

    It has what threads that average gradients use of a group. Receives are posted before their messages are sent.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._receives: dict[tuple[int, int], _Receive] = {}

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._world_size

    def name(self) -> str:
        """Of the backend."""
        return "gloo"

    def _get_backend(self, device: torch.device) -> LoopbackGroup:
        return self

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> _Receive:
        """Post the receive of a message into the only tensor."""
        receive = self._receives[source, tag] = _Receive(tensors[0])
        return receive

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> _Receive:
        """Copy the only tensor to the receive that was posted for it."""
        receive = self._receives.pop((target, tag))
        receive.fill(tensors[0])
        return receive
