"""What crossed a link, what that took, and what it lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class LinkStats:
    """The account of one end of a link. Nothing here waits for a GPU, except reading what only the GPU knows.

    Attributes:
        messages: how many were packed or unpacked.
        raw_bytes: of the tensors.
        wire_bytes: of the messages.
        restarts: how often a buffer of a feedback began anew because the shape had changed.
        events: time work on a GPU by events; else its seconds are those in which the host gave orders.
    """

    messages: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    restarts: int = 0
    events: bool = False
    _seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "decode": 0.0}, repr=False)
    _timed: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list, repr=False)
    _error: Tensor | float = field(default=0.0, repr=False)
    _samples: Tensor | int = field(default=0, repr=False)
    _nonfinite: Tensor | int = field(default=0, repr=False)

    @property
    def encode_seconds(self) -> float:
        """Spent on making messages, what feedback does for that included."""
        self._collect_events()
        return self._seconds["encode"]

    @property
    def decode_seconds(self) -> float:
        """Spent on reading messages."""
        self._collect_events()
        return self._seconds["decode"]

    @property
    def relative_error(self) -> float | None:
        """The mean of `|x - decoded| / |x|` (2-norms) over the sampled messages of the packing end; None: none was.

        A message with a value that is not finite is not among them.
        """
        samples = int(self._samples)
        return float(self._error) / samples if samples else None

    @property
    def nonfinite(self) -> int:
        """Values that were nan or infinite, in the messages that were looked at."""
        return int(self._nonfinite)

    @property
    def ratio(self) -> float:
        """How many times smaller the messages are; 1 where there was none."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        names = ("messages", "raw_bytes", "wire_bytes", "ratio", "encode_seconds", "decode_seconds")
        return {name: getattr(self, name) for name in (*names, "relative_error", "nonfinite", "restarts")}

    def merged_with(self, receiver: LinkStats) -> LinkStats:
        """The account of both ends as one: the sender's, with the receiver's time and what it found."""
        receiver._collect_events()
        both = replace(self, _seconds=dict(self._seconds), _timed=list(self._timed))
        both._seconds["decode"] += receiver._seconds["decode"]
        return both

    def add_message(self, raw_bytes: int, wire_bytes: int) -> None:
        self.messages += 1
        self.raw_bytes += raw_bytes
        self.wire_bytes += wire_bytes

    @contextmanager
    def timing(self, phase: str, device: torch.device) -> Iterator[None]:
        """The time of a block is added to "encode" or "decode"."""
        if self.events and device.type == "cuda":
            with torch.cuda.device(device):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                began.record()
                yield
                ended.record()
            self._timed.append((phase, began, ended))
            return
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start

    def add_error(self, x: Tensor, decoded: Tensor) -> None:
        """Note what a message lost."""
        x = x.detach().to(torch.float32)
        size = torch.linalg.vector_norm(x)
        error = torch.linalg.vector_norm(x - decoded.to(torch.float32)) / size
        counts = torch.isfinite(error)
        self._error = self._error + torch.where(counts, error, 0.0).to(torch.float64)
        self._samples = self._samples + counts.to(torch.int64)

    def add_nonfinite(self, nonfinite: Tensor) -> None:
        """Note how many values of a message were not finite; a tensor of no axes, which is not waited for."""
        self._nonfinite = self._nonfinite + nonfinite

    def _collect_events(self) -> None:
        for what, began, ended in self._timed:
            ended.synchronize()
            self._seconds[what] += began.elapsed_time(ended) / 1000
        self._timed.clear()
