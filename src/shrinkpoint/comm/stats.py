"""Statistics of a link: bytes, times and errors of its messages."""

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
    """Statistics of one end of a link. Only reading them may wait for a GPU, recording does not.

    Attributes:
        messages: the number of messages packed or unpacked.
        raw_bytes: size of the tensors.
        wire_bytes: size of the messages.
        restarts: how often a feedback replaced a buffer because the shape had changed.
        events: whether to time work on a GPU by CUDA events; else its seconds are those of launching it on the host.
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
        """Seconds spent on packing, feedback included."""
        self._collect_events()
        return self._seconds["encode"]

    @property
    def decode_seconds(self) -> float:
        """Seconds spent on unpacking, feedback included."""
        self._collect_events()
        return self._seconds["decode"]

    @property
    def relative_error(self) -> float | None:
        """The mean of `|x - decoded| / |x|` (2-norms) over the sampled messages of the sender; None if there are none.

        Messages with a value that is not finite are left out.
        """
        samples = int(self._samples)
        return float(self._error) / samples if samples else None

    @property
    def nonfinite(self) -> int:
        """The number of nan and infinite values in all tensors that were sent.

        A receiver counts those that it received if they are an error. A tensor for several ranks counts once, and a
        rank's own share of an average, which is not sent, not at all.
        """
        return int(self._nonfinite)

    @property
    def ratio(self) -> float:
        """Size of the tensors, in their own dtype, over that of the messages; 1 without messages."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All statistics as plain values, for JSON."""
        names = ("messages", "raw_bytes", "wire_bytes", "ratio", "encode_seconds", "decode_seconds")
        return {name: getattr(self, name) for name in (*names, "relative_error", "nonfinite", "restarts")}

    def merged_with(self, receiver: LinkStats) -> LinkStats:
        """The statistics of both ends as one: those of this sender, with the decoding time of the receiver."""
        receiver._collect_events()
        merged = replace(self, _seconds=dict(self._seconds), _timed=list(self._timed))
        merged._seconds["decode"] += receiver._seconds["decode"]
        return merged

    def add_message(self, raw_bytes: int, wire_bytes: int) -> None:
        self.messages += 1
        self.raw_bytes += raw_bytes
        self.wire_bytes += wire_bytes

    def add_uncompressed(self, tensor: Tensor) -> None:
        """Count a tensor that is sent or received uncompressed."""
        self.add_message(tensor.nbytes, tensor.nbytes)

    @contextmanager
    def timing(self, phase: str, device: torch.device) -> Iterator[None]:
        """Add the time of a block to "encode" or "decode"."""
        if self.events and device.type == "cuda":
            with torch.cuda.device(device):
                start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start_event.record()
                yield
                end_event.record()
            self._timed.append((phase, start_event, end_event))
            return
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start

    def add_error(self, tensor: Tensor, decoded: Tensor) -> None:
        """Record the relative error of a message."""
        dtype = torch.complex64 if tensor.is_complex() else torch.float32
        tensor = tensor.detach().to(dtype)
        size = torch.linalg.vector_norm(tensor)
        error = torch.linalg.vector_norm(tensor - decoded.to(dtype)) / size
        counts = torch.isfinite(error)
        self._error = self._error + torch.where(counts, error, 0.0).to(torch.float64)
        self._samples = self._samples + counts.to(torch.int64)

    def add_nonfinite(self, nonfinite: Tensor | int) -> None:
        """Record how many values of a message were not finite; a tensor has no axes, and is not waited for."""
        self._nonfinite = self._nonfinite + nonfinite

    def _collect_events(self) -> None:
        for phase, began, ended in self._timed:
            ended.synchronize()
            self._seconds[phase] += began.elapsed_time(ended) / 1000
        self._timed.clear()
