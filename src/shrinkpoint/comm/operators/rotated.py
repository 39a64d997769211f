"""Blocks turned by a fixed Hadamard matrix before another operator sees them: outliers are shared out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native, arguments
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.comm.operators.base import PLAIN, Context, Operator, check_operator
from shrinkpoint.comm.operators.flat import fill, flattened, threads
from shrinkpoint.comm.operators.groups import filled, grouped, halved
from shrinkpoint.comm.operators.planes import pack, packed_bytes, unpack
from shrinkpoint.errors import PolicyError

BLOCKS = (16, 64, 256)
"""Lengths of which 1 / sqrt(n) is a power of two, so that scaling is exact."""


@dataclass(frozen=True)
class Rotated(Operator):
    """What another operator makes of blocks x -> H D x / sqrt(n), H being Hadamard's matrix and D fixed random signs.

    A large value is spread over its block: the range of a group shrinks, and its values come closer to a normal
    distribution. Errors keep their size, as the turn is orthogonal. The other operator sees float32 of shape
    (blocks, block), the last block being filled up with zeros.

    Whatever is not finite takes its block along. Which positions the other operator's message carries says nothing
    about positions of the tensor: `places` is None.

    Message: where `above` is given, one bit for each block that says whether it was turned | the other's message.

    Attributes:
        operator: any.
        block: 16, 64 or 256.
        above: turn only blocks whose largest magnitude is more than so many times their mean magnitude; a block that
            is not finite stays as it is then.

    Raises:
        PolicyError: a block or a limit that there is not.
    """

    operator: Operator
    block: int = 64
    above: float | None = None

    def __post_init__(self) -> None:
        check_operator("Rotated", self.operator)
        if type(self.block) is not int or self.block not in BLOCKS:
            raise PolicyError("block", found=repr(self.block), expected="16, 64 or 256", do="use 64")
        if self.above is not None:
            arguments.number("above", self.above, above=False, do="use 5, or None")

    @property
    def spec(self) -> str:
        limit = "" if self.above is None else f">{float(self.above)!r}".removesuffix(".0")
        return f"h{self.block}{limit}({self.operator.spec})"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: Context = PLAIN) -> int:
        blocks = self._blocks(math.prod(shape))
        return self._head(blocks) + self.operator.wire_bytes((blocks, self.block), torch.float32, context)

    def encode(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        return self._encode_native(x, context) if x.device.type == "cpu" else self._encode_torch(x, context)

    def decode(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
        decode = self._decode_native if out.device.type == "cpu" else self._decode_torch
        return decode(self.checked(wire, out, context), out, context)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _head(self, blocks: int) -> int:
        return 0 if self.above is None else packed_bytes(blocks, 1)

    def _room(self, blocks: int) -> Tensor:
        """Memory that is used again: where it is much, asking the system for it each time costs more than the turn."""
        room = _native.empty(4 * blocks * self.block)
        return torch.from_numpy(room.view(np.float32)).reshape(blocks, self.block)

    def _encode_native(self, x: Tensor, context: Context) -> Tensor:
        blocks, values = self._blocks(x.numel()), bits_of(flattened(x))
        turned, signs = self._room(blocks), bits_of(_signs(self.block, x.device))
        flags = None if self.above is None else torch.empty(blocks, dtype=torch.uint8)
        limit, told = (self.above or 0.0) / self.block, None if flags is None else flags.numpy()
        _native.rotate(values, signs, bits_of(turned), flags=told, limit=limit, threads=threads(x.numel()))
        message = self.operator.encode(turned, context)
        return message if flags is None else torch.cat([pack(flags, 1), message])

    def _decode_native(self, wire: Tensor, out: Tensor, context: Context) -> Tensor:
        blocks, many = self._blocks(out.numel()), threads(out.numel())
        head = self._head(blocks)
        turned, signs = self._room(blocks), bits_of(_signs(self.block, out.device))
        self.operator.decode(wire[head:], turned, context)
        told, values = None if self.above is None else unpack(wire[:head], blocks, 1).numpy(), bits_of(turned)
        return filled(out, lambda to: _native.rotate_back(values, signs, to, flags=told, threads=many))

    def _encode_torch(self, x: Tensor, context: Context) -> Tensor:
        values = grouped(x, self.block)
        turned = butterfly(values * _signs(self.block, x.device))
        if self.above is None:
            return self.operator.encode(turned, context)
        flags = self._outlying(values)
        message = self.operator.encode(torch.where(flags, turned, values), context)
        return torch.cat([pack(flags.reshape(-1).to(torch.uint8), 1), message])

    def _outlying(self, values: Tensor) -> Tensor:
        """Which blocks to turn, of shape (blocks, 1)."""
        sizes = values.abs()
        if not len(sizes) or self.above is None:
            return sizes.new_empty(0, 1, dtype=torch.bool)
        return sizes.amax(1, keepdim=True) > halved(sizes) * torch.full_like(sizes[:, :1], self.above / self.block)

    def _decode_torch(self, wire: Tensor, out: Tensor, context: Context) -> Tensor:
        blocks = self._blocks(out.numel())
        head = self._head(blocks)
        values = torch.empty(blocks, self.block, dtype=torch.float32, device=out.device)
        self.operator.decode(wire[head:], values, context)
        turned = butterfly(values) * _signs(self.block, out.device)
        if self.above is not None:
            turned = torch.where(unpack(wire[:head], blocks, 1)[:, None] > 0, turned, values)
        return fill(out, turned.reshape(-1)[: out.numel()])


def butterfly(x: Tensor) -> Tensor:
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
