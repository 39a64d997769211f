"""Quantization to the best levels for a normal distribution, with one scale for each group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from shrinkpoint import _native, validate
from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext
from shrinkpoint.comm.compressors.bit_planes import pack_planes, packed_bytes, unpack_planes
from shrinkpoint.comm.compressors.layout import (
    bf16_from_bytes,
    bf16_to_bytes,
    fill_native,
    fill_tensor,
    flat_float32,
    is_power_of_two,
    native_threads,
    pairwise_sum,
    round_to_bf16,
    to_groups,
)
from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes

# Lloyd's fixed point for the positive half of the standard normal, iterated in float64 until no center moved, then
# rounded to float32: a center is the mean between two thresholds, a threshold is halfway between two centers.
CENTERS: dict[int, tuple[float, ...]] = {
    1: (0.7978846,),
    2: (0.45278004, 1.5104176),
    3: (0.24509418, 0.7560053, 1.3439093, 2.1519456),
    4: (0.12839504, 0.3880483, 0.65675914, 0.94234043, 1.2562312, 1.6180464, 2.0690172, 2.7325895),
}
"""Magnitudes that codes decode to, by the bits of a code; the sign is one of these bits."""
MIN_SCALE = 2.0**-120
"""A smaller scale is 0: its reciprocal would leave float32."""
SCALE_FRACTIONS = (0.25, 0.5)
"""Scales that are tried, as fractions of the way from the scale of the mean magnitude to that of the largest."""


@dataclass(frozen=True)
class NormalFloat(Compressor):
    """Sign and magnitude on the levels that are optimal for a normal distribution, times a scale for each group.

    The levels are those of Max (1960) and Lloyd (1982). The scale of a group is a bfloat16. Four are tried, and the one
    with the least sum of squared errors is sent, the earlier of two equal ones: the mean magnitude times sqrt(pi / 2),
    optimal for a normal distribution; two on the way to the next; and the largest magnitude over the largest level,
    optimal for an outlier. With one bit the first is the best, and the only one.

    The last group is padded with zeros. The first scale is a sum of magnitudes that were each multiplied by one float32
    before, sqrt(pi / 2) over the number of values in the group without padding; sums add the halves of a group until
    one number is left. A group with a value that is not finite, or whose scale exceeds float32, decodes to nan.

    Message: scales, 2 bytes each | bit planes of codes. A code is the index of its level, with the sign in the top bit.

    Attributes:
        bits: of a code, 1 to 4.
        group: consecutive values in row-major order that share a scale; a power of two, 16 to 4096.

    Raises:
        PolicyError: `bits` or `group` is out of range.
    """

    bits: int
    group: int = 64

    def __post_init__(self) -> None:
        validate.check_int("bits", self.bits, maximum=max(CENTERS), do="use Uniform for more")
        if not is_power_of_two(self.group, 16, 4096):
            raise PolicyError("group", found=repr(self.group), expected="a power of two, 16 to 4096", do="use 64")

    @property
    def spec(self) -> str:
        return f"n{self.bits}:{self.group}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        count = math.prod(shape)
        return 2 * self._num_groups(count) + packed_bytes(count, self.bits)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        return self._encode_native(tensor) if tensor.device.type == "cpu" else self._encode_torch(tensor, context)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire = self.check_message(wire, out, context)
        return self._decode_native(wire, out) if out.device.type == "cpu" else self._decode_torch(wire, out, context)

    def _num_groups(self, count: int) -> int:
        return -(-count // self.group)

    def _centers(self, device: torch.device) -> Tensor:
        return torch.tensor(CENTERS[self.bits], dtype=torch.float32, device=device)

    def _encode_native(self, tensor: Tensor) -> Tensor:
        wire = torch.empty(self.wire_bytes(tensor.shape, tensor.dtype), dtype=torch.uint8)
        values, centers = tensor_bytes(flat_float32(tensor)), tensor_bytes(self._centers(tensor.device))
        _native.normal_encode(
            values, centers, wire.numpy(), group=self.group, bits=self.bits, threads=native_threads(tensor.numel())
        )
        return wire

    def _decode_native(self, wire: Tensor, out: Tensor) -> Tensor:
        layout, centers = {"group": self.group, "bits": self.bits}, tensor_bytes(self._centers(out.device))
        threads = native_threads(out.numel())
        return fill_native(out, lambda to: _native.normal_decode(wire.numpy(), centers, to, **layout, threads=threads))

    def _encode_torch(self, tensor: Tensor, context: CompressorContext) -> Tensor:
        values, centers = to_groups(tensor, self.group), self._centers(tensor.device)
        scales, codes = _best_scale(values.abs(), _scale_candidates(values.abs(), tensor.numel(), centers), centers)
        codes = codes | (values < 0).to(torch.uint8) << (self.bits - 1)
        codes = codes.masked_fill_(~((scales >= MIN_SCALE) & scales.isfinite()), 0)
        return torch.cat([bf16_to_bytes(scales), pack_planes(codes.reshape(-1)[: tensor.numel()], self.bits)])

    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        count, centers = out.numel(), self._centers(out.device)
        head = 2 * self._num_groups(count)
        codes = torch.nn.functional.pad(unpack_planes(wire[head:], count, self.bits), (0, -count % self.group))
        values = torch.cat([centers, -centers])[codes.reshape(-1, self.group).long()] * bf16_from_bytes(wire[:head])
        return fill_tensor(out, values.reshape(-1)[:count])


def _scale_candidates(magnitudes: Tensor, count: int, centers: Tensor) -> list[Tensor]:
    """The scales to try, each of shape (groups, 1); all are 0, or not finite, where the first one is."""
    root = math.sqrt(math.pi / 2)
    factors = torch.full_like(magnitudes[:, :1], root / magnitudes.shape[1])
    if count % magnitudes.shape[1]:
        factors[-1] = root / (count % magnitudes.shape[1])
    mean = pairwise_sum(magnitudes * factors)
    if len(centers) == 1:
        scales = [mean]
    else:
        max_scale = magnitudes.amax(1, keepdim=True) * (1 / centers[-1])
        scales = [mean, *(mean + (max_scale - mean) * fraction for fraction in SCALE_FRACTIONS), max_scale]
    too_small = round_to_bf16(mean) < MIN_SCALE
    return [torch.where(too_small, 0.0, round_to_bf16(scale)) for scale in scales]


def _best_scale(magnitudes: Tensor, candidates: list[Tensor], centers: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the scale of each group with the least error; return it and the codes of the magnitudes."""
    first = candidates[0]
    inverse = 1 / first
    best, codes, min_error = first, *_quantize_with_scale(magnitudes, first, inverse, centers)
    for scale in candidates[1:]:
        scale_codes, error = _quantize_with_scale(magnitudes, scale, inverse, centers)
        better = error < min_error
        best, min_error = torch.where(better, scale, best), torch.where(better, error, min_error)
        codes = torch.where(better, scale_codes, codes)
    return best, codes


def _quantize_with_scale(magnitudes: Tensor, scale: Tensor, unit: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of magnitudes with one scale, and the sum of squared errors in a unit that all scales of a group share."""
    scaled = magnitudes * (1 / scale)
    codes, level = torch.zeros_like(scaled, dtype=torch.uint8), centers[0].expand_as(scaled)
    for low, high in pairwise(centers):
        above = scaled > (low + high) * 0.5
        codes, level = codes + above.to(torch.uint8), torch.where(above, high, level)
    ratio, errors = scale * unit, scaled - level
    return codes, pairwise_sum(errors * errors) * (ratio * ratio)
