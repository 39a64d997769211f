"""Block floating point: one exponent for each block, a signed mantissa of a few bits for each value."""

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
"""The exponent of a block with a value that is not finite."""
MIN_EXPONENT = 16
"""A smaller exponent (a largest magnitude below 2^-111) is stored as 0, which decodes to a block of zeros."""
ROUND_MAGIC = 1.5 * 2**23
"""Added to a small float32 and subtracted again, it rounds to the nearest integer, halves to even."""


@dataclass(frozen=True)
class BlockFloat(Compressor):
    """Integers times a power of two for each block: the layout of MXINT8 (OCP Microscaling Formats 1.0), of any width.

    Values are `q 2^(E - 125 - bits)` with |q| < 2^(bits - 1), rounded to nearest, halves to even. E is the exponent of
    the largest magnitude as a biased float32 exponent, or one less if that makes the sum of squared errors smaller: the
    largest values are then clipped, and the step of all others is halved. Values that are on such a grid already are
    sent exactly. A block with a value that is not finite decodes to nan.

    Message: exponents, 1 byte each | bit planes of q, two's complement.

    Attributes:
        bits: of a mantissa with its sign, 2 to 8.
        block: consecutive values in row-major order that share an exponent; a power of two, 16 to 4096.

    Raises:
        PolicyError: `bits` or `block` is out of range.
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

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        return self._encode_native(tensor) if tensor.device.type == "cpu" else self._encode_torch(tensor, context)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire = self.check_message(wire, out, context)
        return self._decode_native(wire, out) if out.device.type == "cpu" else self._decode_torch(wire, out, context)

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _encode_native(self, tensor: Tensor) -> Tensor:
        wire, threads = (
            torch.empty(self.wire_bytes(tensor.shape, tensor.dtype), dtype=torch.uint8),
            native_threads(tensor.numel()),
        )
        values = tensor_bytes(flat_float32(tensor))
        _native.blockfloat_encode(values, wire.numpy(), block=self.block, bits=self.bits, threads=threads)
        return wire

    def _decode_native(self, wire: Tensor, out: Tensor) -> Tensor:
        layout, threads = {"block": self.block, "bits": self.bits}, native_threads(out.numel())
        return fill_native(out, lambda to: _native.blockfloat_decode(wire.numpy(), to, **layout, threads=threads))

    def _encode_torch(self, tensor: Tensor, context: CompressorContext) -> Tensor:
        values = to_groups(tensor, self.block)
        exponents = _block_exponents(values)
        is_coded = (exponents >= MIN_EXPONENT) & (exponents < NAN_EXPONENT)
        scaled = torch.where(is_coded, values, 0.0) * torch.where(is_coded, 1 / self._steps(exponents), 0.0)
        codes, error = self._round_codes(scaled)
        fine_codes, fine_error = self._round_codes(scaled * 2)
        use_fine = fine_error * 0.25 < error
        exponents = torch.where(is_coded, exponents - use_fine.to(torch.int32), exponents)
        codes = torch.where(use_fine, fine_codes, codes).to(torch.int32) & ((1 << self.bits) - 1)
        packed = pack_planes(codes.to(torch.uint8).reshape(-1)[: tensor.numel()], self.bits)
        return torch.cat([exponents.to(torch.uint8).reshape(-1), packed])

    def _round_codes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest integer codes, as float32, and the sum of squared errors of each block, shape (blocks, 1)."""
        max_code = (1 << (self.bits - 1)) - 1
        codes = (values.clamp(-max_code, max_code) + ROUND_MAGIC) - ROUND_MAGIC
        errors = values - codes
        return codes, pairwise_sum(errors * errors)

    def _steps(self, exponents: Tensor) -> Tensor:
        """The step of each block: nan for a block that is not finite, 0 for a block of zeros."""
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
    """The biased exponent of the largest magnitude of each block, 0 below `MIN_EXPONENT`: int32, shape (blocks, 1)."""
    if not len(values):
        return values.new_empty(0, 1, dtype=torch.int32)
    exponents = (values.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True) >> 23
    return torch.where(exponents < MIN_EXPONENT, 0, exponents)
