"""Numbers that are about normally distributed: the best few levels for those, one scale for each group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from shrinkpoint import _native, arguments
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.comm.operators.base import PLAIN, Context, Operator
from shrinkpoint.comm.operators.flat import fill, flattened, threads
from shrinkpoint.comm.operators.groups import bf16_bytes, bf16_values, filled, grouped, halved, power_of_two, rounded
from shrinkpoint.comm.operators.planes import pack, packed_bytes, unpack
from shrinkpoint.errors import PolicyError

# Lloyd's fixed point for the positive half of the standard normal, iterated in float64 until no center moved, then
# rounded to float32: a center is the mean between two thresholds, a threshold is halfway between two centers.
CENTERS: dict[int, tuple[float, ...]] = {
    1: (0.7978846,),
    2: (0.45278004, 1.5104176),
    3: (0.24509418, 0.7560053, 1.3439093, 2.1519456),
    4: (0.12839504, 0.3880483, 0.65675914, 0.94234043, 1.2562312, 1.6180464, 2.0690172, 2.7325895),
}
"""Magnitudes that codes stand for, by bits; the sign is one more bit."""
LEAST = 2.0**-120
"""A smaller scale is 0: its reciprocal would leave float32."""
BETWEEN = (0.25, 0.5)
"""Scales that are tried, as parts of the way from that of the mean magnitude to that of the largest one."""


@dataclass(frozen=True)
class Normal(Operator):
    """Sign and magnitude on the levels that suit a normal distribution best, times a scale for each group.

    The levels are those of Max (1960) and Lloyd (1982). The scale of a group is a bfloat16. Four are tried, and the one
    with the least sum of squared errors is sent, the earlier of two that are alike: the mean magnitude times
    sqrt(pi / 2), right for a normal distribution; two on the way to the next; and the largest magnitude over the
    largest level, right for an outlier. With one bit the first is the best.

    The last group is filled up with zeros. The first scale is a sum of magnitudes that were multiplied by one float32
    before, sqrt(pi / 2) over the number of values that there are; sums are made by adding the halves of a group until
    one number is left. A group that holds something not finite, or whose scale is beyond float32, comes back as nan.

    Message: scales, 2 bytes each | bit planes of codes. A code is the place of its level, and the sign above.

    Attributes:
        bits: of a code, 1 to 4.
        group: consecutive values in row-major order that share a scale; a power of two, 16 to 4096.

    Raises:
        PolicyError: a number of bits or a group that there is not.
    """

    bits: int
    group: int = 64

    def __post_init__(self) -> None:
        arguments.whole("bits", self.bits, most=max(CENTERS), do="use Uniform for more")
        if not power_of_two(self.group, 16, 4096):
            raise PolicyError("group", found=repr(self.group), expected="a power of two, 16 to 4096", do="use 64")

    @property
    def spec(self) -> str:
        return f"n{self.bits}:{self.group}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: Context = PLAIN) -> int:
        count = math.prod(shape)
        return 2 * self._groups(count) + packed_bytes(count, self.bits)

    def encode(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        return self._encode_native(x) if x.device.type == "cpu" else self._encode_torch(x, context)

    def decode(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
        wire = self.checked(wire, out, context)
        return self._decode_native(wire, out) if out.device.type == "cpu" else self._decode_torch(wire, out, context)

    def _groups(self, count: int) -> int:
        return -(-count // self.group)

    def _centers(self, device: torch.device) -> Tensor:
        return torch.tensor(CENTERS[self.bits], dtype=torch.float32, device=device)

    def _encode_native(self, x: Tensor) -> Tensor:
        wire = torch.empty(self.wire_bytes(x.shape, x.dtype), dtype=torch.uint8)
        values, centers = bits_of(flattened(x)), bits_of(self._centers(x.device))
        _native.normal_encode(
            values, centers, wire.numpy(), group=self.group, bits=self.bits, threads=threads(x.numel())
        )
        return wire

    def _decode_native(self, wire: Tensor, out: Tensor) -> Tensor:
        how, centers = {"group": self.group, "bits": self.bits}, bits_of(self._centers(out.device))
        many = threads(out.numel())
        return filled(out, lambda to: _native.normal_decode(wire.numpy(), centers, to, **how, threads=many))

    def _encode_torch(self, x: Tensor, context: Context) -> Tensor:
        values, centers = grouped(x, self.group), self._centers(x.device)
        scales, codes = _best(values.abs(), _candidates(values.abs(), x.numel(), centers), centers)
        codes = codes | (values < 0).to(torch.uint8) << (self.bits - 1)
        codes = codes.masked_fill_(~((scales >= LEAST) & scales.isfinite()), 0)
        return torch.cat([bf16_bytes(scales), pack(codes.reshape(-1)[: x.numel()], self.bits)])

    def _decode_torch(self, wire: Tensor, out: Tensor, context: Context) -> Tensor:
        count, centers = out.numel(), self._centers(out.device)
        head = 2 * self._groups(count)
        codes = torch.nn.functional.pad(unpack(wire[head:], count, self.bits), (0, -count % self.group))
        values = torch.cat([centers, -centers])[codes.reshape(-1, self.group).long()] * bf16_values(wire[:head])
        return fill(out, values.reshape(-1)[:count])


def _candidates(sizes: Tensor, count: int, centers: Tensor) -> list[Tensor]:
    """Scales to try, of shape (groups, 1); all of them 0, or not finite, where the first one is."""
    root = math.sqrt(math.pi / 2)
    factors = torch.full_like(sizes[:, :1], root / sizes.shape[1])
    if count % sizes.shape[1]:
        factors[-1] = root / (count % sizes.shape[1])
    mean = halved(sizes * factors)
    if len(centers) == 1:
        found = [mean]
    else:
        most = sizes.amax(1, keepdim=True) * (1 / centers[-1])
        found = [mean, *(mean + (most - mean) * part for part in BETWEEN), most]
    too_small = rounded(mean) < LEAST
    return [torch.where(too_small, 0.0, rounded(one)) for one in found]


def _best(sizes: Tensor, candidates: list[Tensor], centers: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each group with the least error, and the codes of its magnitudes."""
    first = candidates[0]
    inverse = 1 / first
    best, codes, least = first, *_tried(sizes, first, inverse, centers)
    for scale in candidates[1:]:
        tried, error = _tried(sizes, scale, inverse, centers)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
        codes = torch.where(better, tried, codes)
    return best, codes


def _tried(sizes: Tensor, scale: Tensor, unit: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of magnitudes on one scale, and the sum of squared errors in a unit that all scales of a group share."""
    at = sizes * (1 / scale)
    codes, level = torch.zeros_like(at, dtype=torch.uint8), centers[0].expand_as(at)
    for low, high in pairwise(centers):
        above = at > (low + high) * 0.5
        codes, level = codes + above.to(torch.uint8), torch.where(above, high, level)
    ratio, off = scale * unit, at - level
    return codes, halved(off * off) * (ratio * ratio)
