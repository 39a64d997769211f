"""Blocks of small floats: one exponent for each block, a signed mantissa of a few bits for each value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shrinkpoint import _native, arguments
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.comm.operators.base import PLAIN, Context, Operator
from shrinkpoint.comm.operators.flat import fill, flattened, threads
from shrinkpoint.comm.operators.groups import filled, grouped, halved, power_of_two
from shrinkpoint.comm.operators.planes import pack, packed_bytes, unpack
from shrinkpoint.errors import PolicyError

NAN = 255
"""The exponent of a block that holds something not finite."""
LEAST = 16
"""A smaller exponent, of a largest magnitude below 2^-111, becomes 0: it stands for a block of zeros."""
ROUNDER = 1.5 * 2**23
"""Added to a small float32 and taken away again, it leaves the nearest integer, halves to even."""


@dataclass(frozen=True)
class BlockFloat(Operator):
    """One power of two for each block, times integers: the layout of MXINT8 (OCP Microscaling Formats 1.0), any width.

    Values are `q 2^(E - 125 - bits)` with |q| < 2^(bits - 1), rounded to nearest, halves to even. E is the exponent of
    the largest magnitude as a float32's with its bias, or one less if the sum of squared errors is less then: the
    largest values are cut, all others have a step of half the size. What is on such a grid already crosses exactly.
    A block that holds something not finite comes back as nan.

    Message: exponents, 1 byte each | bit planes of q, two's complement.

    Attributes:
        bits: of a mantissa with its sign, 2 to 8.
        block: consecutive values in row-major order that share an exponent; a power of two, 16 to 4096.

    Raises:
        PolicyError: a number of bits or a block that there is not.
    """

    bits: int
    block: int = 32

    def __post_init__(self) -> None:
        arguments.whole("bits", self.bits, least=2, most=8, do="use Normal for one bit")
        if not power_of_two(self.block, 16, 4096):
            raise PolicyError("block", found=repr(self.block), expected="a power of two, 16 to 4096", do="use 32")

    @property
    def spec(self) -> str:
        return f"block{self.bits}:{self.block}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: Context = PLAIN) -> int:
        count = math.prod(shape)
        return self._blocks(count) + packed_bytes(count, self.bits)

    def encode(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        return self._encode_native(x) if x.device.type == "cpu" else self._encode_torch(x, context)

    def decode(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
        wire = self.checked(wire, out, context)
        return self._decode_native(wire, out) if out.device.type == "cpu" else self._decode_torch(wire, out, context)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _encode_native(self, x: Tensor) -> Tensor:
        wire, many = torch.empty(self.wire_bytes(x.shape, x.dtype), dtype=torch.uint8), threads(x.numel())
        values = bits_of(flattened(x))
        _native.blockfloat_encode(values, wire.numpy(), block=self.block, bits=self.bits, threads=many)
        return wire

    def _decode_native(self, wire: Tensor, out: Tensor) -> Tensor:
        how, many = {"block": self.block, "bits": self.bits}, threads(out.numel())
        return filled(out, lambda to: _native.blockfloat_decode(wire.numpy(), to, **how, threads=many))

    def _encode_torch(self, x: Tensor, context: Context) -> Tensor:
        values = grouped(x, self.block)
        exponents = _exponents(values)
        lives = (exponents >= LEAST) & (exponents < NAN)
        at = torch.where(lives, values, 0.0) * torch.where(lives, 1 / self._steps(exponents), 0.0)
        codes, error = self._tried(at)
        finer, other = self._tried(at * 2)
        better = other * 0.25 < error
        exponents = torch.where(lives, exponents - better.to(torch.int32), exponents)
        codes = torch.where(better, finer, codes).to(torch.int32) & ((1 << self.bits) - 1)
        packed = pack(codes.to(torch.uint8).reshape(-1)[: x.numel()], self.bits)
        return torch.cat([exponents.to(torch.uint8).reshape(-1), packed])

    def _tried(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Integers near values of a step of 1, as float32, and the sum of squared errors of each block."""
        most = (1 << (self.bits - 1)) - 1
        codes = (at.clamp(-most, most) + ROUNDER) - ROUNDER
        off = at - codes
        return codes, halved(off * off)

    def _steps(self, exponents: Tensor) -> Tensor:
        """What codes are multiples of: nan and 0 where blocks are."""
        steps = ((exponents - (self.bits - 2)) << 23).view(torch.float32)
        return torch.where(exponents == NAN, torch.nan, torch.where(exponents == 0, 0.0, steps))

    def _decode_torch(self, wire: Tensor, out: Tensor, context: Context) -> Tensor:
        count, high = out.numel(), 1 << (self.bits - 1)
        blocks = self._blocks(count)
        codes = torch.nn.functional.pad(unpack(wire[blocks:], count, self.bits), (0, -count % self.block))
        signed = ((codes.to(torch.int32) ^ high) - high).reshape(blocks, self.block)
        values = signed.to(torch.float32) * self._steps(wire[:blocks, None].to(torch.int32))
        return fill(out, values.reshape(-1)[:count])


def _exponents(values: Tensor) -> Tensor:
    """Of the largest magnitude of each block, biased: int32, of shape (blocks, 1). Below `LEAST`: 0."""
    if not len(values):
        return values.new_empty(0, 1, dtype=torch.int32)
    found = (values.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True) >> 23
    return torch.where(found < LEAST, 0, found)
