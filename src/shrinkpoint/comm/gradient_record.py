"""The bytes that a journal keeps of a training step's gradients: averages as they were sent, or this rank's shards."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shrinkpoint.comm.compressed_allreduce import CompressedAllGather, share_numel
from shrinkpoint.comm.compressors.base import Compressor, CompressorContext, Identity
from shrinkpoint.comm.gradient_layout import SEGMENT_NUMEL, FilledSegment, GradientLayout, Piece, Segment, is_dense
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.dtypes import as_bits
from shrinkpoint.tensors.info import JSON


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, which shares its memory; the tensor itself if it is not distributed."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
        return local


@torch.no_grad()
def flat_gradient(parameter: Tensor) -> Tensor:
    """The values of a gradient, or of this rank's shard of it, in memory order; it is created if there is none.

    Values are in the order in which DDP and FSDP lay them out. Complex values are pairs.

    Raises:
        MismatchError: the gradient has a layout of its own.
    """
    if parameter.grad is None:
        keeps_order = isinstance(parameter, DTensor) or is_dense(parameter)
        memory_format = torch.preserve_format if keeps_order else torch.contiguous_format
        parameter.grad = torch.empty_like(parameter, memory_format=memory_format)
    gradient, own = local_tensor(parameter.grad), local_tensor(parameter)
    if gradient.stride() != own.stride() and not gradient.is_contiguous():
        found, advice = f"a gradient with strides {gradient.stride()}", "zero gradients with set_to_none=True"
        raise MismatchError("journal", found=found, expected=f"{own.stride()}", do=advice)
    flat = gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


class GradientRecord(ABC):
    """Keeps the gradients of a step as bytes, and makes the same gradients from such bytes.

    Args:
        parameters: the parameters, whose gradients are kept.
        shards: the tensors that the layout was made of: this rank's shard of each parameter.
    """

    # True if the bytes of the first rank of the group are those of all, so that it alone has to keep them.
    is_shared: ClassVar[bool]

    def __init__(self, parameters: Sequence[Tensor], shards: Sequence[Tensor], layout: GradientLayout) -> None:
        self._parameters, self._segments = list(parameters), layout.segments
        self._members: dict[int, list[tuple[int, Piece]]] = {segment.index: [] for segment in layout.segments}
        self._dtypes: dict[int, torch.dtype] = {}
        for index, shard in enumerate(shards):
            for segment, piece in layout.pieces(shard):
                self._members[segment.index].append((index, piece))
                self._dtypes[segment.index] = shard.dtype.to_real()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes of all messages of a step."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """True if there was no backward pass since `clear`."""

    @abstractmethod
    def messages(self, step: int) -> Sequence[Tensor]:
        """The gradients of the last backward pass as messages: uint8, 1-d; they are kept until `clear`.

        Args:
            step: number of the training step.

        Raises:
            PolicyError: there was no whole backward pass since `clear`.
        """

    @abstractmethod
    def check(self, counts: JSON) -> None:
        """Raise PolicyError if gradients have changed since they were kept; `counts` are as of `fill_gradients`."""

    def others(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The parameters whose gradients are not kept."""
        kept = set(map(id, self._parameters))
        return [parameter for parameter in parameters if id(parameter) not in kept]

    @abstractmethod
    def clear(self) -> None:
        """Keep nothing any more: the next backward pass is another step's."""

    @abstractmethod
    def fill_gradients(self, step: int, counts: JSON, data: memoryview) -> None:
        """Write the gradients that messages decode to into `.grad` of all parameters.

        Args:
            step: of the messages.
            counts: what `GradientAveraging.counts` was then.
            data: the messages, one behind the other.

        Raises:
            MismatchError: they are those of other gradients.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the model."""

    def _check_size(self, data: memoryview) -> None:
        if data.nbytes != self.nbytes:
            found, advice = f"messages of {data.nbytes} bytes", "compress as when the journal was written"
            raise MismatchError("journal", found=found, expected=f"{self.nbytes}", do=advice)

    def _scatter(self, segment: Segment, values: Tensor, flats: Sequence[Tensor | None]) -> None:
        """Copy the values of a segment into flat gradients; None for a parameter without a gradient."""
        for index, piece in self._members[segment.index]:
            flat = flats[index]
            if flat is not None:
                flat[piece.start : piece.start + piece.numel] = values[piece.offset : piece.offset + piece.numel]


class AverageRecord(GradientRecord):
    """Keeps the encoded averages of the last backward pass, which take no encoding: they are what was sent.

    A group of one rank sends nothing. There the gradients are kept as they are.

    Args:
        hops: the second hops of compressed segments, and of those that are sent uncompressed.
    """

    is_shared: ClassVar[bool] = True

    def __init__(
        self,
        parameters: Sequence[Tensor],
        layout: GradientLayout,
        group: dist.ProcessGroup,
        hops: tuple[CompressedAllGather, CompressedAllGather],
    ) -> None:
        super().__init__(parameters, parameters, layout)
        self._world_size, self._hops = group.size(), hops
        for hop in hops:
            hop.on_decode = self.add
        self._messages: dict[str, list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(self._message_bytes(segment) * self._world_size for segment in self._segments)

    @property
    def is_empty(self) -> bool:
        return not self._messages

    def add(self, layout: str, count: int, messages: Sequence[Tensor]) -> None:
        """Keep the messages of all ranks for a segment, which nobody writes to any more."""
        self._messages[layout] = list(messages)

    def add_own(self, filled: FilledSegment) -> None:
        """Keep a segment of the only rank."""
        flat = torch.empty(filled.segment.numel, dtype=filled.dtype, device=filled.runs[0][0].device)
        filled.copy_to(flat)
        self._messages[filled.segment.name] = [flat.view(torch.uint8)]

    def messages(self, step: int) -> Sequence[Tensor]:
        """The messages by segment and rank."""
        if len(self._messages) != len(self._segments):
            found = f"{len(self._messages)} of {len(self._segments)} segments"
            advice = "call backward(), and use all parameters"
            raise PolicyError("journal", found=found, expected="the gradients of one backward pass", do=advice)
        missing = [parameter.shape for parameter in self._parameters if parameter.grad is None]
        if missing:
            found, advice = f"a parameter of shape {tuple(missing[0])} without a gradient", "use all parameters"
            raise PolicyError("journal", found=found, expected="a gradient of each parameter", do=advice)
        return [message for segment in self._segments for message in self._messages[segment.name]]

    @torch.no_grad()
    def check(self, counts: JSON) -> None:
        flats = [as_bits(flat_gradient(parameter)) for parameter in self._parameters]
        for segment in self._segments:
            values = as_bits(self._decode(segment, counts, self._messages[segment.name]))
            for index, piece in self._members[segment.index]:
                own = flats[index][piece.start : piece.start + piece.numel]
                if not torch.equal(own, values[piece.offset : piece.offset + piece.numel]):
                    found = f"a gradient of shape {tuple(self._parameters[index].shape)} that was changed"
                    advice = "clip, unscale and add noise in `update`, and use no_sync() before the last pass only"
                    raise PolicyError("journal", found=found, expected="what the backward pass has left", do=advice)

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
        self._check_size(data)
        flats = [flat_gradient(parameter) for parameter in self._parameters]
        for segment in self._segments:
            size = self._message_bytes(segment)
            # copied: messages start at aligned addresses, and torch writes to no memory that is read-only
            parts = [bytearray(data[rank * size : (rank + 1) * size]) for rank in range(self._world_size)]
            messages = [torch.frombuffer(part, dtype=torch.uint8).to(segment.device) for part in parts]
            data = data[self._world_size * size :]
            self._scatter(segment, self._decode(segment, counts, messages), flats)

    def _decode(self, segment: Segment, counts: Any, messages: Sequence[Tensor]) -> Tensor:
        dtype = self._dtypes[segment.index]
        if self._world_size == 1:
            return messages[0].view(dtype)
        share = share_numel(segment.numel, self._world_size)
        rows = torch.empty(self._world_size, share, dtype=dtype, device=segment.device)
        self._hops[segment.is_exact].decode_again(segment.name, counts, messages, rows)
        return rows.view(-1)

    def _message_bytes(self, segment: Segment) -> int:
        dtype = self._dtypes[segment.index]
        if self._world_size == 1:
            return segment.numel * dtype.itemsize
        return self._hops[segment.is_exact].message_bytes(share_numel(segment.numel, self._world_size), dtype)


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
        named = [(name, local_tensor(parameter)) for name, parameter in parameters]
        layout = GradientLayout(named, 0, SEGMENT_NUMEL)
        super().__init__([parameter for _, parameter in parameters], [shard for _, shard in named], layout)
        self.layout_digest = layout.digest()
        self._compressor, self._rank = compressor, rank
        self._flag_bytes = -(-len(self._parameters) // 8)
        self._has_gradients = False
        self._messages: list[Tensor] | None = None
        self._hooks: list[Any] = []
        for parameter in self._parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._note))

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
            advice = "call backward() on all ranks first"
            raise PolicyError("journal", found="no gradients", expected="those of one backward pass", do=advice)
        if self._messages is None:
            flats = [None if parameter.grad is None else flat_gradient(parameter) for parameter in self._parameters]
            flags = torch.zeros(self._flag_bytes, dtype=torch.uint8, device="cpu")
            for index, flat in enumerate(flats):
                flags[index // 8] += (flat is not None) << index % 8
            self._messages = [flags, *(self._encode(segment, flats, step) for segment in self._segments)]
        return self._messages

    def check(self, counts: JSON) -> None:
        """Nothing: `messages` takes the gradients as they are."""

    def clear(self) -> None:
        self._has_gradients, self._messages = False, None

    @torch.no_grad()
    def fill_gradients(self, step: int, counts: JSON, data: memoryview) -> None:
        self._check_size(data)
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
            values = torch.empty(segment.numel, dtype=self._dtypes[segment.index], device=segment.device)
            self._compressor.decode(message.to(segment.device), values, context)
            self._scatter(segment, values, flats)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.clear()

    def _note(self, parameter: Tensor) -> None:
        self._has_gradients = True

    def _encode(self, segment: Segment, flats: Sequence[Tensor | None], step: int) -> Tensor:
        """The message of a segment; the gradients become what it decodes to."""
        context = self._context(segment, step)
        values = torch.zeros(segment.numel, dtype=self._dtypes[segment.index], device=segment.device)
        for index, piece in self._members[segment.index]:
            flat = flats[index]
            if flat is not None:
                values[piece.offset : piece.offset + piece.numel] = flat[piece.start : piece.start + piece.numel]
        if isinstance(self._compressor, Identity):
            return values.view(torch.uint8)
        message = self._compressor.encode(values, context)
        self._scatter(segment, self._compressor.decode(message, values, context), flats)
        return message

    def _message_bytes(self, segment: Segment, context: CompressorContext) -> int:
        return self._compressor.wire_bytes((segment.numel,), self._dtypes[segment.index], context)

    def _context(self, segment: Segment, step: int) -> CompressorContext:
        return CompressorContext(key=zlib.crc32(f"journal/{segment.name}/{step}/{self._rank}".encode()))
