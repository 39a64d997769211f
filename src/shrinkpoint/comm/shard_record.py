"""This rank's shards of a step's averaged gradients as bytes: as they are, or rounded to what a compressor keeps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shrinkpoint.comm.compressors.base import Compressor, CompressorContext, Identity
from shrinkpoint.comm.flat_gradient import flat_gradient, local_tensor
from shrinkpoint.comm.gradient_layout import SEGMENT_NUMEL, GradientLayout, Piece, Segment
from shrinkpoint.comm.gradient_record import GradientRecord
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.info import JSON


class ShardRecord(GradientRecord):
    """Takes the shards when they are asked for, after all backward passes of a step, whatever has added to them.

    What a rank received is no shorter: of n values on r ranks it adds up r - 1 messages of n / r values and its own
    values, which were never sent. A rounding of the sum has the bits of one message.

    Args:
        parameters: names, and parameters whose gradients these are.
        compressor: rounds what is kept, and the gradients with it.
        rank: of this process.
    """

    is_shared: ClassVar[bool] = False

    def __init__(self, parameters: Sequence[tuple[str, Tensor]], compressor: Compressor, rank: int) -> None:
        self._parameters = [parameter for _, parameter in parameters]
        self._compressor, self._rank = compressor, rank
        shards = [local_tensor(parameter) for parameter in self._parameters]
        named = [(name, shard) for (name, _), shard in zip(parameters, shards, strict=True)]
        layout = GradientLayout(named, 0, SEGMENT_NUMEL)
        self.layout_digest = layout.digest()
        self._segments = layout.segments
        self._members: dict[int, list[tuple[int, Piece]]] = {segment.index: [] for segment in layout.segments}
        self._dtypes: dict[int, torch.dtype] = {}
        for index, shard in enumerate(shards):
            for segment, piece in layout.pieces(shard):
                self._members[segment.index].append((index, piece))
                self._dtypes[segment.index] = shard.dtype.to_real()
        self._has_gradients = False
        self._messages: list[Tensor] | None = None
        self._hooks: list[Any] = []
        for parameter in self._parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._note))  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        sizes = (self._message_bytes(segment, self._context(segment, 0)) for segment in self._segments)
        return self._flag_bytes + sum(sizes)

    @property
    def is_empty(self) -> bool:
        return not self._has_gradients

    @torch.no_grad()
    def messages(self, step: int) -> Sequence[Tensor]:
        """Round the gradients, once, and return what they were rounded to, behind a bit for each that there is."""
        if not self._has_gradients:
            advice = "call backward() on every rank first"
            raise PolicyError("journal", found="no gradients", expected="those of one backward pass", do=advice)
        if self._messages is None:
            flats = [None if parameter.grad is None else flat_gradient(parameter) for parameter in self._parameters]
            flags = torch.zeros(self._flag_bytes, dtype=torch.uint8)
            for index, flat in enumerate(flats):
                flags[index // 8] += (flat is not None) << index % 8
            self._messages = [flags, *(self._encode(segment, flats, step) for segment in self._segments)]
        return self._messages

    def clear(self) -> None:
        self._has_gradients, self._messages = False, None

    @torch.no_grad()
    def fill_gradients(self, step: int, counts: JSON, data: memoryview) -> None:
        if data.nbytes != self.nbytes:
            found, advice = f"messages of {data.nbytes} bytes", "compress as when the journal was written"
            raise MismatchError("journal", found=found, expected=f"{self.nbytes}", do=advice)
        flags, offset = data[: self._flag_bytes], self._flag_bytes
        flats: list[Tensor | None] = []
        for index, parameter in enumerate(self._parameters):
            is_there = flags[index // 8] >> index % 8 & 1
            flats.append(flat_gradient(parameter) if is_there else None)
            if not is_there:
                parameter.grad = None
        for segment in self._segments:
            context = self._context(segment, step)
            size = self._message_bytes(segment, context)
            message = torch.frombuffer(bytearray(data[offset : offset + size]), dtype=torch.uint8)
            offset += size
            flat = torch.empty(segment.numel, dtype=self._dtypes[segment.index], device=segment.device)
            self._compressor.decode(message.to(segment.device), flat, context)
            self._scatter(segment, flat, flats)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.clear()

    @property
    def _flag_bytes(self) -> int:
        return -(-len(self._parameters) // 8)

    def _note(self, parameter: Tensor) -> None:
        self._has_gradients = True

    def _encode(self, segment: Segment, flats: Sequence[Tensor | None], step: int) -> Tensor:
        """The message of a segment; the gradients become what it decodes to."""
        context = self._context(segment, step)
        joined = torch.zeros(segment.numel, dtype=self._dtypes[segment.index], device=segment.device)
        for index, piece in self._members[segment.index]:
            flat = flats[index]
            if flat is not None:
                joined[piece.offset : piece.offset + piece.numel] = flat[piece.start : piece.start + piece.numel]
        if isinstance(self._compressor, Identity):
            return joined.view(torch.uint8)
        message = self._compressor.encode(joined, context)
        self._scatter(segment, self._compressor.decode(message, joined, context), flats)
        return message

    def _scatter(self, segment: Segment, joined: Tensor, flats: Sequence[Tensor | None]) -> None:
        for index, piece in self._members[segment.index]:
            flat = flats[index]
            if flat is not None:
                flat[piece.start : piece.start + piece.numel] = joined[piece.offset : piece.offset + piece.numel]

    def _message_bytes(self, segment: Segment, context: CompressorContext) -> int:
        return self._compressor.wire_bytes((segment.numel,), self._dtypes[segment.index], context)

    def _context(self, segment: Segment, step: int) -> CompressorContext:
        return CompressorContext(key=zlib.crc32(f"journal/{segment.name}/{step}/{self._rank}".encode()))
