"""The averaged gradients of a step as the bytes that all ranks have decoded, and the same gradients from such bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.compressed_allreduce import CompressedAllGather, share_numel
from shrinkpoint.comm.flat_gradient import flat_gradient
from shrinkpoint.comm.gradient_layout import FilledSegment, GradientLayout, Piece, Segment
from shrinkpoint.comm.gradient_record import GradientRecord
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.info import JSON


class AverageRecord(GradientRecord):
    """Keeps the encoded averages of the last backward pass, which take no encoding: they are what was sent.

    A group of one rank sends nothing. There the gradients are kept as they are.

    Args:
        layout: of the gradients.
        parameters: whose gradients these are.
        group: of the ranks.
        all_gather, exact_all_gather: the second hops of segments, and of those that are sent uncompressed.
    """

    is_shared: ClassVar[bool] = True

    def __init__(
        self,
        layout: GradientLayout,
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup,
        all_gather: CompressedAllGather,
        exact_all_gather: CompressedAllGather,
    ) -> None:
        self._segments, self._world_size = layout.segments, group.size()
        self._hops = all_gather, exact_all_gather
        for hop in self._hops:
            hop.on_decode = self.add
        self._parameters = list(parameters)
        self._members: dict[int, list[tuple[Tensor, Piece]]] = {segment.index: [] for segment in layout.segments}
        for parameter in parameters:
            for segment, piece in layout.pieces(parameter):
                self._members[segment.index].append((parameter, piece))
        self._messages: dict[str, list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(self._message_bytes(segment) * self._world_size for segment in self._segments)

    @property
    def is_empty(self) -> bool:
        return not self._messages

    def begin(self) -> None:
        """Drop what is kept: a backward pass begins, whose gradients contain those of the ones before it."""
        self._messages = {}

    def add(self, layout: str, count: int, messages: Sequence[Tensor]) -> None:
        """Keep the messages of all ranks for a segment, which nobody writes to any more."""
        self._messages[layout] = list(messages)

    def add_own(self, filled: FilledSegment) -> None:
        """Keep a segment of the only rank."""
        first = filled.runs[0][0]
        flat = torch.empty(filled.segment.numel, dtype=first.dtype, device=first.device)
        filled.copy_to(flat)
        self.add(filled.segment.name, 0, [flat.view(torch.uint8)])

    def messages(self, step: int) -> Sequence[Tensor]:
        """The messages by segment and rank."""
        if len(self._messages) != len(self._segments):
            found = f"{len(self._messages)} of {len(self._segments)} segments"
            advice = "call backward(), and use all parameters"
            raise PolicyError("journal", found=found, expected="the gradients of one backward pass", do=advice)
        missing = [parameter.shape for parameter in self._parameters if parameter.grad is None]
        if missing:
            found, advice = f"a parameter of shape {tuple(missing[0])} without a gradient", "use all parameters"
            raise PolicyError("journal", found=found, expected="a gradient of each", do=advice)
        return [message for segment in self._segments for message in self._messages[segment.name]]

    def clear(self) -> None:
        self._messages = {}

    def close(self) -> None:
        self.clear()
        for hop in self._hops:
            hop.on_decode = None

    def fill_gradients(self, step: int, counts: JSON, data: memoryview) -> None:
        if type(counts) is not int:
            expected, advice = "a number of messages", "compress as when the journal was written"
            raise MismatchError("journal", found=f"{counts!r:.60}", expected=expected, do=advice)
        if data.nbytes != self.nbytes:
            found, advice = f"messages of {data.nbytes} bytes", "compress as when the journal was written"
            raise MismatchError("journal", found=found, expected=f"{self.nbytes}", do=advice)
        flats: dict[int, Tensor] = {}
        for segment in self._segments:
            size, device = self._message_bytes(segment), segment.device
            # copied: messages start at aligned addresses, and torch writes to no memory that is read-only
            parts = [bytearray(data[rank * size : (rank + 1) * size]) for rank in range(self._world_size)]
            messages = [torch.frombuffer(part, dtype=torch.uint8).to(device) for part in parts]
            data = data[self._world_size * size :]
            flat = self._decode(segment, counts, messages)
            for parameter, piece in self._members[segment.index]:
                if id(parameter) not in flats:
                    flats[id(parameter)] = flat_gradient(parameter)
                target = flats[id(parameter)][piece.start : piece.start + piece.numel]
                target.copy_(flat[piece.offset : piece.offset + piece.numel])
        for parameter in self._parameters:
            if not parameter.numel():  # in no segment, and DDP gives it a gradient all the same
                flat_gradient(parameter)

    def _decode(self, segment: Segment, count: int, messages: list[Tensor]) -> Tensor:
        dtype = self._dtype(segment)
        if self._world_size == 1:
            return messages[0].view(dtype)
        share = share_numel(segment.numel, self._world_size)
        rows = torch.empty(self._world_size, share, dtype=dtype, device=segment.device)
        self._hop(segment).decode_again(segment.name, count, messages, rows)
        return rows.view(-1)

    def _message_bytes(self, segment: Segment) -> int:
        """The size of each of a segment's messages."""
        dtype = self._dtype(segment)
        if self._world_size == 1:
            return segment.numel * dtype.itemsize
        return self._hop(segment).message_bytes(share_numel(segment.numel, self._world_size), dtype)

    def _hop(self, segment: Segment) -> CompressedAllGather:
        return self._hops[segment.is_exact]

    def _dtype(self, segment: Segment) -> torch.dtype:
        return self._members[segment.index][0][0].dtype.to_real()
