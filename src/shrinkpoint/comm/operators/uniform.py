"""Uniform quantization between the least and the largest value of each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from torch import Tensor

from shrinkpoint import _native, arguments
from shrinkpoint.codec.lattice import dither
from shrinkpoint.comm.operators.base import PLAIN, Context, Operator
from shrinkpoint.comm.operators.flat import fill, flattened, in_place, threads, words
from shrinkpoint.comm.operators.planes import pack, packed_bytes, unpack
from shrinkpoint.errors import PolicyError

MOST_BITS = 8
LEAST_STEP = 2.0**-120
"""A smaller step is 0: its reciprocal would leave float32."""
_LOW = 0xFFFF


class _How(TypedDict):
    seed: int | None
    brief: bool
    threads: int


@dataclass(frozen=True)
class Uniform(Operator):
    """k-bit min-max quantization: one range as in arXiv 2401.07788, or one for each run of values.

    A tensor is cut into runs in row-major order. With lo and step of its run, x is sent as the code
    `q = floor((x - lo) / step + 1/2)`, which stands for `lo + q step`. One range has both as float32; more of them have
    both as bfloat16, lo rounded down and step rounded up, so that every value lies between the first and the last code.
    A run with a value that is not finite, or whose range is beyond float32, comes back as nan.

    Attributes:
        bits: of a code, 1 to 8.
        group: values of a run. None: all; "row": the last axis; "channel": all axes from the third on, or as "row"
            for tensors of fewer.
        dither: add noise to what is rounded that the receiver takes away again: the error is then evenly distributed
            whatever the values are, and 0 on average. The noise follows from the message's key.

    Raises:
        PolicyError: a number of bits or a group that there is not.
    """

    bits: int
    group: int | Literal["row", "channel"] | None = None
    dither: bool = False

    def __post_init__(self) -> None:
        arguments.whole("bits", self.bits, most=MOST_BITS, do='for 16 bits, use "bf16"')
        whole = isinstance(self.group, int) and not isinstance(self.group, bool) and self.group >= 1
        arguments.flag("dither", self.dither)
        if not whole and self.group not in (None, "row", "channel"):
            expected = 'a number of values, "row", "channel" or None'
            raise PolicyError("group", found=repr(self.group), expected=expected, do="use 64")

    @property
    def spec(self) -> str:
        parts = [f"q{self.bits}", *([str(self.group)] if self.group else []), *(["dither"] if self.dither else [])]
        return ":".join(parts)

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: Context = PLAIN) -> int:
        count = math.prod(shape)
        return self._head(-(-count // self._size(shape))) + packed_bytes(count, self.bits)

    def encode(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        if x.device.type != "cpu":
            return self._encode_torch(x, context)
        wire = torch.empty(self.wire_bytes(x.shape, x.dtype), dtype=torch.uint8, device="cpu")
        if wire.numel():
            size = self._size(x.shape)
            _native.uniform_encode(flattened(x).numpy(), size, self.bits, wire.numpy(), **self._how(x, context))
        return wire

    def decode(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
        if out.device.type != "cpu":
            return self._decode_torch(wire, out, context)
        wire, size = self.checked(wire, out, context), self._size(out.shape)
        if not wire.numel():
            return out
        target = out.detach() if in_place(out) else torch.empty(out.numel(), dtype=torch.float32, device="cpu")
        _native.uniform_decode(wire.numpy(), size, self.bits, target.numpy(), **self._how(out, context))
        return out if in_place(out) else fill(out, target)

    def _how(self, x: Tensor, context: Context) -> _How:
        seed = context.key if self.dither else None
        return {"seed": seed, "brief": self.group is not None, "threads": threads(x.numel())}

    def _encode_torch(self, x: Tensor, context: Context) -> Tensor:
        values, size = flattened(x), self._size(x.shape)
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        runs = _runs(values, size)
        lo, step = self._ranges(runs)
        inverse = torch.where(step > 0, 1 / step, 0.0)
        codes = (runs - lo[:, None]).mul_(inverse[:, None]).view(-1)[: values.numel()]
        codes = codes.add_(self._noise(context, values) + 0.5).floor_().clamp_(0, 2**self.bits - 1)
        # What is not finite has no code; what its run holds is nan whatever the codes are.
        packed = pack(codes.nan_to_num_(0.0, 0.0, 0.0).to(torch.uint8), self.bits)
        return torch.cat([_bytes(lo, self.group is None), _bytes(step, self.group is None), packed])

    def _decode_torch(self, wire: Tensor, out: Tensor, context: Context) -> Tensor:
        wire, count, size = self.checked(wire, out, context), out.numel(), self._size(out.shape)
        if not count:
            return out
        runs = -(-count // size)
        lo, step = (_floats(part, self.group is None) for part in wire[: self._head(runs)].chunk(2))
        codes = unpack(wire[self._head(runs) :], count, self.bits).to(torch.float32)
        points = _runs(codes.sub_(self._noise(context, codes)), size)
        return fill(out, (points * step[:, None]).add_(lo[:, None]).view(-1)[:count])

    def _size(self, shape: Sequence[int]) -> int:
        """Values of a run, at least 1."""
        if self.group is None or isinstance(self.group, int):
            count = max(1, math.prod(shape))
            return count if self.group is None else min(count, self.group)
        return max(1, math.prod(shape[2:] if self.group == "channel" and len(shape) > 2 else shape[-1:]))

    def _head(self, runs: int) -> int:
        """Bytes of the ranges of so many runs."""
        return runs * (8 if self.group is None else 4)

    def _noise(self, context: Context, values: Tensor) -> Tensor | float:
        return dither(context.key, (1, values.numel()), values.device)[0] if self.dither else 0.0

    def _ranges(self, runs: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row, lo and step."""
        least, most = runs.amin(1) + 0.0, runs.amax(1)  # -0 becomes 0: which one is less depends on the order
        width, lo, levels = most - least, least, 2**self.bits - 1
        if self.group is not None:
            lo = _rounded_down(least)
        # Divided by a tensor: where it is a number, GPUs multiply by a reciprocal, which rounds otherwise.
        step = (most - lo) / torch.full_like(lo, levels)
        if self.group is not None:
            step = _rounded_up(step)
        step = torch.where(step < LEAST_STEP, 0.0, step)
        spare = 0.5 if self.dither else 0.0
        first, last = lo - step * spare, lo + step * (levels + spare)
        fits = width.isfinite() & first.isfinite() & last.isfinite()
        return torch.where(fits, lo, torch.nan), torch.where(fits, step, 0.0)


def _runs(values: Tensor, size: int) -> Tensor:
    """Rows of `size` values; the last is filled up with the last value, which changes no range."""
    missing = -values.numel() % size
    if missing:
        values = torch.cat([values, values[-1:].expand(missing)])
    return values.view(-1, size)


def _rounded_down(values: Tensor) -> Tensor:
    """To bfloat16, towards minus infinity; still float32."""
    bits = values.view(torch.int32)
    away = (bits < 0) & (bits & _LOW != 0)
    return ((bits & ~_LOW) + (away.to(torch.int32) << 16)).view(torch.float32)


def _rounded_up(values: Tensor) -> Tensor:
    """To bfloat16, away from zero, values not below it; still float32."""
    return ((values.view(torch.int32) + _LOW) & ~_LOW).view(torch.float32)


def _bytes(values: Tensor, whole: bool) -> Tensor:
    """The bytes of float32 values, or of their upper halves: a conversion to bfloat16 may change what a nan is."""
    return values.view(torch.uint8) if whole else (values.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)


def _floats(data: Tensor, whole: bool) -> Tensor:
    return words(data, torch.float32) if whole else words(data, torch.bfloat16).to(torch.float32)
