"""Blocks of small floats: one exponent for each block, a signed mantissa of a few bits for each value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shrinkpoint import _native, validate
from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext
from shrinkpoint.comm.compressors.bit_planes import pack_planes, packed_bytes, unpack_planes
from shrinkpoint.comm.compressors.layout import (
    fill_native,
    fill_tensor,
    flat_float32,
    is_power_of_two,
    native_threads,
    pairwise_sum,
    to_groups,
)
from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes

NAN_EXPONENT = 255
"""The exponent of a block that holds something not finite."""
MIN_EXPONENT = 16
"""A smaller exponent, of a largest magnitude below 2^-111, becomes 0: it stands for a block of zeros."""
ROUND_MAGIC = 1.5 * 2**23
"""Added to a small float32 and taken away again, it leaves the nearest integer, halves to even."""


@dataclass(frozen=True)
class BlockFloat(Compressor):
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
        validate.check_int("bits", self.bits, minimum=2, maximum=8, do="use Normal for one bit")
        if not is_power_of_two(self.block, 16, 4096):
            raise PolicyError("block", found=repr(self.block), expected="a power of two, 16 to 4096", do="use 32")

    @property
    def spec(self) -> str:
        return f"block{self.bits}:{self.block}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        count = math.prod(shape)
        return self._num_blocks(count) + packed_bytes(count, self.bits)

    def encode(self, x: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        return self._encode_native(x) if x.device.type == "cpu" else self._encode_torch(x, context)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire = self.check_message(wire, out, context)
        return self._decode_native(wire, out) if out.device.type == "cpu" else self._decode_torch(wire, out, context)

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _encode_native(self, x: Tensor) -> Tensor:
        wire, many = torch.empty(self.wire_bytes(x.shape, x.dtype), dtype=torch.uint8), native_threads(x.numel())
        values = tensor_bytes(flat_float32(x))
        _native.blockfloat_encode(values, wire.numpy(), block=self.block, bits=self.bits, threads=many)
        return wire

    def _decode_native(self, wire: Tensor, out: Tensor) -> Tensor:
        how, many = {"block": self.block, "bits": self.bits}, native_threads(out.numel())
        return fill_native(out, lambda to: _native.blockfloat_decode(wire.numpy(), to, **how, threads=many))

    def _encode_torch(self, x: Tensor, context: CompressorContext) -> Tensor:
        values = to_groups(x, self.block)
        exponents = _block_exponents(values)
        lives = (exponents >= MIN_EXPONENT) & (exponents < NAN_EXPONENT)
        at = torch.where(lives, values, 0.0) * torch.where(lives, 1 / self._steps(exponents), 0.0)
        codes, error = self._round_codes(at)
        finer, other = self._round_codes(at * 2)
        better = other * 0.25 < error
        exponents = torch.where(lives, exponents - better.to(torch.int32), exponents)
        codes = torch.where(better, finer, codes).to(torch.int32) & ((1 << self.bits) - 1)
        packed = pack_planes(codes.to(torch.uint8).reshape(-1)[: x.numel()], self.bits)
        return torch.cat([exponents.to(torch.uint8).reshape(-1), packed])

    def _round_codes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Integers near values of a step of 1, as float32, and the sum of squared errors of each block."""
        most = (1 << (self.bits - 1)) - 1
        codes = (values.clamp(-most, most) + ROUND_MAGIC) - ROUND_MAGIC
        off = values - codes
        return codes, pairwise_sum(off * off)

    def _steps(self, exponents: Tensor) -> Tensor:
        """What codes are multiples of: nan and 0 where blocks are."""
        steps = ((exponents - (self.bits - 2)) << 23).view(torch.float32)
        return torch.where(exponents == NAN_EXPONENT, torch.nan, torch.where(exponents == 0, 0.0, steps))

    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        count, high = out.numel(), 1 << (self.bits - 1)
        blocks = self._num_blocks(count)
        codes = torch.nn.functional.pad(unpack_planes(wire[blocks:], count, self.bits), (0, -count % self.block))
        signed = ((codes.to(torch.int32) ^ high) - high).reshape(blocks, self.block)
        values = signed.to(torch.float32) * self._steps(wire[:blocks, None].to(torch.int32))
        return fill_tensor(out, values.reshape(-1)[:count])


def _block_exponents(values: Tensor) -> Tensor:
    """Of the largest magnitude of each block, biased: int32, of shape (blocks, 1). Below `LEAST`: 0."""
    if not len(values):
        return values.new_empty(0, 1, dtype=torch.int32)
    found = (values.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True) >> 23
    return torch.where(found < MIN_EXPONENT, 0, found)
