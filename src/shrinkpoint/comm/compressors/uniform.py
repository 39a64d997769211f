"""Uniform quantization between the smallest and the largest value of each group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from torch import Tensor

from shrinkpoint import _native, validate
from shrinkpoint.codec.lattice import dither
from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext
from shrinkpoint.comm.compressors.bit_planes import pack_planes, packed_bytes, unpack_planes
from shrinkpoint.comm.compressors.layout import (
    fill_tensor,
    flat_float32,
    is_native_writable,
    native_threads,
    view_dtype,
)
from shrinkpoint.errors import PolicyError

MAX_BITS = 8
MIN_STEP = 2.0**-120
"""A smaller step becomes 0: its reciprocal would exceed float32."""
_LOW_HALF = 0xFFFF


class _NativeOptions(TypedDict):
    seed: int | None
    brief: bool
    threads: int


@dataclass(frozen=True)
class Uniform(Compressor):
    """k-bit min-max quantization: one range as in arXiv 2401.07788, or one for each group of values.

    A tensor is cut into groups in row-major order. With lo and step of its group, x is sent as the code
    `q = floor((x - lo) / step + 1/2)`, which decodes to `lo + q step`. A single range is stored as float32; ranges of
    groups as bfloat16, lo rounded down and step rounded up, so that all values lie between the first and the last code.
    A group with a value that is not finite, or whose range exceeds float32, decodes to nan.

    Attributes:
        bits: of a code, 1 to 8.
        group: the number of values of a group; None for all; "row" for the last axis; "channel" for all axes from the
            third on, or as "row" for tensors with fewer axes.
        dither: add noise before rounding that the receiver subtracts again (subtractive dither): the error is then
            uniformly distributed whatever the values are, and 0 on average. The seed is the key of the message.

    Raises:
        PolicyError: `bits` or `group` is out of range.
    """

    bits: int
    group: int | Literal["row", "channel"] | None = None
    dither: bool = False

    def __post_init__(self) -> None:
        validate.check_int("bits", self.bits, maximum=MAX_BITS, do='for 16 bits, use "bf16"')
        is_size = isinstance(self.group, int) and not isinstance(self.group, bool) and self.group >= 1
        validate.check_bool("dither", self.dither)
        if not is_size and self.group not in (None, "row", "channel"):
            expected = 'a number of values, "row", "channel" or None'
            raise PolicyError("group", found=repr(self.group), expected=expected, do="use 64")

    @property
    def spec(self) -> str:
        parts = [f"q{self.bits}", *([str(self.group)] if self.group else []), *(["dither"] if self.dither else [])]
        return ":".join(parts)

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        count = math.prod(shape)
        return self._range_bytes(-(-count // self._group_size(shape))) + packed_bytes(count, self.bits)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        if tensor.device.type != "cpu":
            return self._encode_torch(tensor, context)
        wire = torch.empty(self.wire_bytes(tensor.shape, tensor.dtype), dtype=torch.uint8, device="cpu")
        if wire.numel():
            size = self._group_size(tensor.shape)
            _native.uniform_encode(
                flat_float32(tensor).numpy(), size, self.bits, wire.numpy(), **self._native_options(tensor, context)
            )
        return wire

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        if out.device.type != "cpu":
            return self._decode_torch(wire, out, context)
        wire, size = self.check_message(wire, out, context), self._group_size(out.shape)
        if not wire.numel():
            return out
        target = (
            out.detach() if is_native_writable(out) else torch.empty(out.numel(), dtype=torch.float32, device="cpu")
        )
        _native.uniform_decode(wire.numpy(), size, self.bits, target.numpy(), **self._native_options(out, context))
        return out if is_native_writable(out) else fill_tensor(out, target)

    def _native_options(self, tensor: Tensor, context: CompressorContext) -> _NativeOptions:
        seed = context.key if self.dither else None
        return {"seed": seed, "brief": self.group is not None, "threads": native_threads(tensor.numel())}

    def _encode_torch(self, tensor: Tensor, context: CompressorContext) -> Tensor:
        values, size = flat_float32(tensor), self._group_size(tensor.shape)
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        groups = _split_groups(values, size)
        lo, step = self._ranges(groups)
        inverse = torch.where(step > 0, 1 / step, 0.0)
        codes = (groups - lo[:, None]).mul_(inverse[:, None]).view(-1)[: values.numel()]
        codes = codes.add_(self._noise(context, values) + 0.5).floor_().clamp_(0, 2**self.bits - 1)
        # A value that is not finite has no code; its group decodes to nan whatever the codes are.
        packed = pack_planes(codes.nan_to_num_(0.0, 0.0, 0.0).to(torch.uint8), self.bits)
        return torch.cat([_ranges_to_bytes(lo, self.group is None), _ranges_to_bytes(step, self.group is None), packed])

    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        wire, count, size = self.check_message(wire, out, context), out.numel(), self._group_size(out.shape)
        if not count:
            return out
        num_groups = -(-count // size)
        lo, step = (
            _ranges_from_bytes(part, self.group is None) for part in wire[: self._range_bytes(num_groups)].chunk(2)
        )
        codes = unpack_planes(wire[self._range_bytes(num_groups) :], count, self.bits).to(torch.float32)
        points = _split_groups(codes.sub_(self._noise(context, codes)), size)
        return fill_tensor(out, (points * step[:, None]).add_(lo[:, None]).view(-1)[:count])

    def _group_size(self, shape: Sequence[int]) -> int:
        """The number of values of a group, at least 1."""
        if self.group is None or isinstance(self.group, int):
            count = max(1, math.prod(shape))
            return count if self.group is None else min(count, self.group)
        return max(1, math.prod(shape[2:] if self.group == "channel" and len(shape) > 2 else shape[-1:]))

    def _range_bytes(self, num_groups: int) -> int:
        """The size in bytes of the ranges of `num_groups` groups."""
        return num_groups * (8 if self.group is None else 4)

    def _noise(self, context: CompressorContext, values: Tensor) -> Tensor | float:
        return dither(context.key, (1, values.numel()), values.device)[0] if self.dither else 0.0

    def _ranges(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """lo and step of each row, both of shape (groups,)."""
        smallest, largest = groups.amin(1) + 0.0, groups.amax(1)  # -0 becomes 0: which one is less depends on the order
        width, lo, levels = largest - smallest, smallest, 2**self.bits - 1
        if self.group is not None:
            lo = _round_down_bf16(smallest)
        # Divided by a tensor: where it is a number, GPUs multiply by a reciprocal, which rounds otherwise.
        step = (largest - lo) / torch.full_like(lo, levels)
        if self.group is not None:
            step = _round_up_bf16(step)
        step = torch.where(step < MIN_STEP, 0.0, step)
        spare = 0.5 if self.dither else 0.0
        first, last = lo - step * spare, lo + step * (levels + spare)
        fits = width.isfinite() & first.isfinite() & last.isfinite()
        return torch.where(fits, lo, torch.nan), torch.where(fits, step, 0.0)


def _split_groups(values: Tensor, size: int) -> Tensor:
    """Rows of `size` values; the last row is padded with the last value, which changes no range."""
    missing = -values.numel() % size
    if missing:
        values = torch.cat([values, values[-1:].expand(missing)])
    return values.view(-1, size)


def _round_down_bf16(values: Tensor) -> Tensor:
    """Round float32 to bfloat16 towards minus infinity, as float32."""
    bits = values.view(torch.int32)
    away = (bits < 0) & (bits & _LOW_HALF != 0)
    return ((bits & ~_LOW_HALF) + (away.to(torch.int32) << 16)).view(torch.float32)


def _round_up_bf16(values: Tensor) -> Tensor:
    """Round nonnegative float32 to bfloat16 away from zero, as float32."""
    return ((values.view(torch.int32) + _LOW_HALF) & ~_LOW_HALF).view(torch.float32)


def _ranges_to_bytes(values: Tensor, is_float32: bool) -> Tensor:
    """The bytes of float32 values, or of their upper halves: a conversion to bfloat16 may change the bits of a nan."""
    return (
        values.view(torch.uint8) if is_float32 else (values.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)
    )


def _ranges_from_bytes(data: Tensor, is_float32: bool) -> Tensor:
    return view_dtype(data, torch.float32) if is_float32 else view_dtype(data, torch.bfloat16).to(torch.float32)
