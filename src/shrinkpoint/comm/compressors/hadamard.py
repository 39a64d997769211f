"""A fixed random Hadamard rotation of blocks before another compressor: it spreads outliers over their block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native, device, validate
from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext, check_compressor
from shrinkpoint.comm.compressors.layout import (
    fill_native,
    fill_tensor,
    flat_native,
    native_threads,
    pack_planes,
    packed_bytes,
    pairwise_sum,
    to_groups,
    unpack_planes,
)
from shrinkpoint.device.rows import Rows, encode_rows, fill_rows
from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes

BLOCK_SIZES = (16, 64, 256)  # Block lengths n for which 1 / sqrt(n) is a power of two, so that scaling is exact


@dataclass(frozen=True)
class Hadamard(Compressor):
    """Rotates blocks, x -> H D x / sqrt(n), before another compressor: H is Hadamard's matrix, D fixed random signs.

    A large value is spread over its block: the range of a group shrinks, and its values come closer to a normal
    distribution. Errors keep their size, as the rotation is orthogonal. The inner compressor is given float32 of shape
    (blocks, block), the last block padded with zeros.

    A value that is not finite makes its block not finite. The indices that the inner message carries are those of
    rotated values, not of the tensor: `indices` returns None.

    Message: with `outlier_threshold`, one bit a block for whether it is rotated | the message of `compressor`.

    Attributes:
        compressor: the inner compressor.
        block: 16, 64 or 256.
        outlier_threshold: rotate only blocks whose largest magnitude exceeds their mean magnitude by more than this
            factor; a block that is not finite is not rotated then. None to rotate all blocks.

    Raises:
        PolicyError: `block` or `outlier_threshold` is out of range.
    """

    compressor: Compressor
    block: int = 64
    outlier_threshold: float | None = None

    def __post_init__(self) -> None:
        check_compressor("Hadamard", self.compressor)
        if type(self.block) is not int or self.block not in BLOCK_SIZES:
            raise PolicyError("block", found=repr(self.block), expected="16, 64 or 256", do="pass 64")
        if self.outlier_threshold is not None:
            validate.check_float("outlier_threshold", self.outlier_threshold, exclusive=False, do="pass 5, or None")

    @property
    def spec(self) -> str:
        limit = "" if self.outlier_threshold is None else f">{float(self.outlier_threshold)!r}".removesuffix(".0")
        return f"h{self.block}{limit}({self.compressor.spec})"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        blocks = self._num_blocks(math.prod(shape))
        return self._flag_bytes(blocks) + self.compressor.wire_bytes((blocks, self.block), torch.float32, context)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        if tensor.device.type in device.DEVICE_TYPES:
            messages = self.encode_rows([tensor], [context])
            if messages is not None:
                return messages[0, : self.wire_bytes(tensor.shape, tensor.dtype, context)]
        encode = self._encode_native if tensor.device.type == "cpu" else self._encode_torch
        return encode(tensor, context)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire = self.check_message(wire, out, context)
        if out.device.type in device.DEVICE_TYPES and self.decode_rows([wire], [out], [context]):
            return out
        decode = self._decode_native if out.device.type == "cpu" else self._decode_torch
        return decode(wire, out, context)

    @property
    def has_kernels(self) -> bool:
        return self.outlier_threshold is None and self.compressor.has_kernels

    def encode_rows(
        self, rows: Sequence[Tensor], contexts: Sequence[CompressorContext], nonfinite: Tensor | None = None
    ) -> Tensor | None:
        if not self.has_kernels:
            return None

        def rotate(kernels: Any, places: Rows) -> Tensor:
            rotated: Tensor = kernels.rotate(places, _signs(self.block, rows[0].device), nonfinite)
            return rotated

        rotated = encode_rows(rows, rotate)
        return None if rotated is None else self.compressor.encode_rows(rotated.unbind(), contexts)

    def decode_rows(
        self, wires: Sequence[Tensor], outs: Sequence[Tensor], contexts: Sequence[CompressorContext]
    ) -> bool:
        if not self.has_kernels:
            return False

        def fill(kernels: Any, places: Rows) -> bool:
            shape = places.count, self._num_blocks(places.numel), self.block
            rotated = torch.empty(shape, dtype=torch.float32, device=places.device)
            if not self.compressor.decode_rows(wires, rotated.unbind(), contexts):
                return False
            kernels.rotate_back(rotated, places, _signs(self.block, places.device))
            return True

        return fill_rows(outs, fill)

    def proves_finite(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT
    ) -> bool:
        blocks = self._num_blocks(math.prod(shape))
        message, shape = wire[self._flag_bytes(blocks) :], (blocks, self.block)
        return self.compressor.proves_finite(message, shape, torch.float32, context)

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _flag_bytes(self, blocks: int) -> int:
        return 0 if self.outlier_threshold is None else packed_bytes(blocks, 1)

    def _scratch(self, blocks: int) -> Tensor:
        """A pooled float32 buffer of shape (blocks, block): allocating a large one costs more than the rotation."""
        memory = _native.empty(4 * blocks * self.block)
        return torch.from_numpy(memory.view(np.float32)).reshape(blocks, self.block)

    def _encode_native(self, tensor: Tensor, context: CompressorContext) -> Tensor:
        blocks, threads = self._num_blocks(tensor.numel()), native_threads(tensor.numel())
        flat, rotated = flat_native(tensor), self._scratch(blocks)
        flags = None if self.outlier_threshold is None else torch.empty(blocks, dtype=torch.uint8, device="cpu")
        _native.rotate(
            tensor_bytes(flat),
            tensor_bytes(_signs(self.block, tensor.device)),
            tensor_bytes(rotated),
            flags=None if flags is None else flags.numpy(),
            limit=(self.outlier_threshold or 0.0) / self.block,
            bfloat16=flat.dtype == torch.bfloat16,
            threads=threads,
        )
        message = self.compressor.encode(rotated, context)
        return message if flags is None else torch.cat([pack_planes(flags, 1), message])

    def _decode_native(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        blocks, threads = self._num_blocks(out.numel()), native_threads(out.numel())
        head, rotated, signs = self._flag_bytes(blocks), self._scratch(blocks), _signs(self.block, out.device).numpy()
        self.compressor.decode(wire[head:], rotated, context)
        flags = None if self.outlier_threshold is None else unpack_planes(wire[:head], blocks, 1).numpy()
        data = tensor_bytes(rotated)

        def rotate_back(values: Tensor) -> None:
            is_bfloat16 = values.dtype == torch.bfloat16
            _native.rotate_back(data, signs, tensor_bytes(values), flags=flags, bfloat16=is_bfloat16, threads=threads)

        return fill_native(out, rotate_back)

    def _encode_torch(self, tensor: Tensor, context: CompressorContext) -> Tensor:
        values = to_groups(tensor, self.block)
        rotated = hadamard_transform(values * _signs(self.block, tensor.device))
        if self.outlier_threshold is None:
            return self.compressor.encode(rotated, context)
        magnitudes = values.abs()
        flags = magnitudes.new_empty(0, 1, dtype=torch.bool)  # of the blocks to rotate
        if len(magnitudes):
            limit = torch.full_like(magnitudes[:, :1], self.outlier_threshold / self.block)
            flags = magnitudes.amax(1, keepdim=True) > pairwise_sum(magnitudes) * limit
        message = self.compressor.encode(torch.where(flags, rotated, values), context)
        return torch.cat([pack_planes(flags.reshape(-1).to(torch.uint8), 1), message])

    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        blocks = self._num_blocks(out.numel())
        head = self._flag_bytes(blocks)
        values = torch.empty(blocks, self.block, dtype=torch.float32, device=out.device)
        self.compressor.decode(wire[head:], values, context)
        rotated = hadamard_transform(values) * _signs(self.block, out.device)
        if self.outlier_threshold is not None:
            rotated = torch.where(unpack_planes(wire[:head], blocks, 1)[:, None] > 0, rotated, values)
        return fill_tensor(out, rotated.reshape(-1)[: out.numel()])


def hadamard_transform(tensor: Tensor) -> Tensor:
    """Multiply rows by Hadamard's matrix over sqrt(n): its own inverse, up to rounding.

    The exact scale comes first, so that few sums exceed float32; then sums and differences of values at distances 1, 2,
    4, ... All nan have the same bits.
    """
    size, distance = tensor.shape[1], 1
    tensor = tensor * (1 / math.isqrt(size))
    while distance < size:
        low, high = tensor.reshape(-1, size // (2 * distance), 2, distance).unbind(2)
        tensor, distance = torch.stack([low + high, low - high], 2), 2 * distance
    tensor = tensor.reshape(-1, size)
    return tensor.masked_fill(tensor.isnan(), torch.nan)


@cache
def _signs(size: int, device: torch.device) -> Tensor:
    """The diagonal of D, which is part of the message format: float32. Do not write to it."""
    bits = ((i + 1) * 0x9E3779B1 * (i * 0x85EBCA6B + 1) >> 31 & 1 for i in range(size))
    return torch.tensor([-1.0 if bit else 1.0 for bit in bits], dtype=torch.float32, device=device)
