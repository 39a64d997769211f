"""Blocks turned by a fixed Hadamard matrix before another operator sees them: outliers are shared out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native, validate
from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext, check_compressor
from shrinkpoint.comm.compressors.bit_planes import pack_planes, packed_bytes, unpack_planes
from shrinkpoint.comm.compressors.layout import (
    fill_native,
    fill_tensor,
    flat_float32,
    native_threads,
    pairwise_sum,
    to_groups,
)
from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes

BLOCK_SIZES = (16, 64, 256)
"""Lengths of which 1 / sqrt(n) is a power of two, so that scaling is exact."""


@dataclass(frozen=True)
class Hadamard(Compressor):
    """What another operator makes of blocks x -> H D x / sqrt(n), H being Hadamard's matrix and D fixed random signs.

    A large value is spread over its block: the range of a group shrinks, and its values come closer to a normal
    distribution. Errors keep their size, as the turn is orthogonal. The other operator sees float32 of shape
    (blocks, block), the last block being filled up with zeros.

    Whatever is not finite takes its block along. Which positions the other operator's message carries says nothing
    about positions of the tensor: `places` is None.

    Message: where `outlier_threshold` is given, one bit for each block that says whether it was turned | the other's
        message.

    Attributes:
        compressor: any.
        block: 16, 64 or 256.
        outlier_threshold: turn only blocks whose largest magnitude is more than so many times their mean magnitude; a
            block that
            is not finite stays as it is then.

    Raises:
        PolicyError: a block or a limit that there is not.
    """

    compressor: Compressor
    block: int = 64
    outlier_threshold: float | None = None

    def __post_init__(self) -> None:
        check_compressor("Rotated", self.compressor)
        if type(self.block) is not int or self.block not in BLOCK_SIZES:
            raise PolicyError("block", found=repr(self.block), expected="16, 64 or 256", do="use 64")
        if self.outlier_threshold is not None:
            validate.check_float("above", self.outlier_threshold, exclusive=False, do="use 5, or None")

    @property
    def spec(self) -> str:
        limit = "" if self.outlier_threshold is None else f">{float(self.outlier_threshold)!r}".removesuffix(".0")
        return f"h{self.block}{limit}({self.compressor.spec})"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        blocks = self._num_blocks(math.prod(shape))
        return self._flag_bytes(blocks) + self.compressor.wire_bytes((blocks, self.block), torch.float32, context)

    def encode(self, x: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        return self._encode_native(x, context) if x.device.type == "cpu" else self._encode_torch(x, context)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        decode = self._decode_native if out.device.type == "cpu" else self._decode_torch
        return decode(self.check_message(wire, out, context), out, context)

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _flag_bytes(self, blocks: int) -> int:
        return 0 if self.outlier_threshold is None else packed_bytes(blocks, 1)

    def _scratch(self, blocks: int) -> Tensor:
        """Memory that is used again: where it is much, asking the system for it each time costs more than the turn."""
        room = _native.empty(4 * blocks * self.block)
        return torch.from_numpy(room.view(np.float32)).reshape(blocks, self.block)

    def _encode_native(self, x: Tensor, context: CompressorContext) -> Tensor:
        blocks, values = self._num_blocks(x.numel()), tensor_bytes(flat_float32(x))
        turned, signs = self._scratch(blocks), tensor_bytes(_signs(self.block, x.device))
        flags = None if self.outlier_threshold is None else torch.empty(blocks, dtype=torch.uint8)
        limit, told = (self.outlier_threshold or 0.0) / self.block, None if flags is None else flags.numpy()
        _native.rotate(values, signs, tensor_bytes(turned), flags=told, limit=limit, threads=native_threads(x.numel()))
        message = self.compressor.encode(turned, context)
        return message if flags is None else torch.cat([pack_planes(flags, 1), message])

    def _decode_native(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        blocks, many = self._num_blocks(out.numel()), native_threads(out.numel())
        head = self._flag_bytes(blocks)
        turned, signs = self._scratch(blocks), tensor_bytes(_signs(self.block, out.device))
        self.compressor.decode(wire[head:], turned, context)
        told, values = (
            None if self.outlier_threshold is None else unpack_planes(wire[:head], blocks, 1).numpy(),
            tensor_bytes(turned),
        )
        return fill_native(out, lambda to: _native.rotate_back(values, signs, to, flags=told, threads=many))

    def _encode_torch(self, x: Tensor, context: CompressorContext) -> Tensor:
        values = to_groups(x, self.block)
        turned = hadamard_transform(values * _signs(self.block, x.device))
        if self.outlier_threshold is None:
            return self.compressor.encode(turned, context)
        flags = self._has_outliers(values)
        message = self.compressor.encode(torch.where(flags, turned, values), context)
        return torch.cat([pack_planes(flags.reshape(-1).to(torch.uint8), 1), message])

    def _has_outliers(self, values: Tensor) -> Tensor:
        """Which blocks to turn, of shape (blocks, 1)."""
        sizes = values.abs()
        if not len(sizes) or self.outlier_threshold is None:
            return sizes.new_empty(0, 1, dtype=torch.bool)
        return sizes.amax(1, keepdim=True) > pairwise_sum(sizes) * torch.full_like(
            sizes[:, :1], self.outlier_threshold / self.block
        )

    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        blocks = self._num_blocks(out.numel())
        head = self._flag_bytes(blocks)
        values = torch.empty(blocks, self.block, dtype=torch.float32, device=out.device)
        self.compressor.decode(wire[head:], values, context)
        turned = hadamard_transform(values) * _signs(self.block, out.device)
        if self.outlier_threshold is not None:
            turned = torch.where(unpack_planes(wire[:head], blocks, 1)[:, None] > 0, turned, values)
        return fill_tensor(out, turned.reshape(-1)[: out.numel()])


def hadamard_transform(x: Tensor) -> Tensor:
    """Rows times Hadamard's matrix over sqrt(n): its own inverse, but for rounding.

    An exact scale first, so that few sums are beyond float32; then sums and differences of numbers 1, 2, 4, ... places
    apart. All nan are one nan.
    """
    size, apart = x.shape[1], 1
    x = x * (1 / math.isqrt(size))
    while apart < size:
        low, high = x.reshape(-1, size // (2 * apart), 2, apart).unbind(2)
        x, apart = torch.stack([low + high, low - high], 2), 2 * apart
    x = x.reshape(-1, size)
    return x.masked_fill(x.isnan(), torch.nan)


@cache
def _sign_bits(size: int) -> tuple[float, ...]:
    return tuple(-1.0 if (i + 1) * 0x9E3779B1 * (i * 0x85EBCA6B + 1) >> 31 & 1 else 1.0 for i in range(size))


def _signs(size: int, device: torch.device) -> Tensor:
    """Of D, fixed for ever: float32."""
    return torch.tensor(_sign_bits(size), dtype=torch.float32, device=device)
