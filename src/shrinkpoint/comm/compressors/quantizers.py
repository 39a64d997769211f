"""Quantization of groups of values to codes of a few bits: `Uniform`, `BlockFloat` and `NormalFloat`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from shrinkpoint import _native, device, validate
from shrinkpoint.codec.lattice import dither
from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext
from shrinkpoint.comm.compressors.layout import (
    bf16_from_bytes,
    bf16_to_bytes,
    check_group_size,
    fill_native,
    fill_tensor,
    flat_float32,
    flat_native,
    is_known_finite,
    native_threads,
    pack_planes,
    packed_bytes,
    pairwise_sum,
    round_to_bf16,
    to_groups,
    unpack_planes,
    view_dtype,
)
from shrinkpoint.device.rows import Rows, encode_rows, fill_rows, flat_rows
from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes

MIN_STEP = 2.0**-120  # A smaller step becomes 0: its reciprocal would exceed float32
_LOW_HALF = 0xFFFF
NAN_EXPONENT = 255  # The exponent of a block with a value that is not finite
MIN_EXPONENT = 16
"""A smaller exponent (a largest magnitude below 2^-111) is stored as 0, which decodes to a block of zeros."""
ROUND_MAGIC = 1.5 * 2**23
"""Added to a small float32 and subtracted again, it rounds to the nearest integer, halves to even."""
# Lloyd's fixed point for the positive half of the standard normal, iterated in float64 until no center moved, then
# rounded to float32: a center is the mean between two thresholds, a threshold is halfway between two centers.
CENTERS: dict[int, tuple[float, ...]] = {
    1: (0.7978846,),
    2: (0.45278004, 1.5104176),
    3: (0.24509418, 0.7560053, 1.3439093, 2.1519456),
    4: (0.12839504, 0.3880483, 0.65675914, 0.94234043, 1.2562312, 1.6180464, 2.0690172, 2.7325895),
}
"""Magnitudes that codes decode to, by the bits of a code; the sign is one of these bits."""
MIN_SCALE = 2.0**-120  # A smaller scale is 0: its reciprocal would leave float32
SCALE_FRACTIONS = (0.25, 0.5)
"""Scales that are tried, as fractions of the way from the scale of the mean magnitude to that of the largest."""


_KernelCoder: TypeAlias = tuple[Callable[[Rows, Any, Tensor | None], Tensor], Callable[[Rows, Rows, Any], None], Any]
"""The kernels that encode and decode one kind of message, and its layout."""


class _Quantizer(Compressor):
    """Ranges or scales of groups, then the bit planes of a code for each value: in native code on a CPU."""

    bits: int

    @property
    def has_kernels(self) -> bool:
        return True

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        return self._head_bytes(shape) + packed_bytes(math.prod(shape), self.bits)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        if tensor.device.type in device.DEVICE_TYPES:
            messages = self.encode_rows([tensor], [context])
            if messages is not None:
                return messages[0, : self.wire_bytes(tensor.shape, tensor.dtype)]
        if tensor.device.type != "cpu":
            return self._encode_torch(tensor, context)
        wire = torch.empty(self.wire_bytes(tensor.shape, tensor.dtype), dtype=torch.uint8, device="cpu")
        if wire.numel():
            self._encode_native(flat_native(tensor), wire, tensor.shape, context)
        return wire

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        wire = self.check_message(wire, out, context)
        if out.device.type in device.DEVICE_TYPES and self.decode_rows([wire], [out], [context]):
            return out
        if out.device.type != "cpu":
            return self._decode_torch(wire, out, context)
        if not wire.numel():
            return out
        return fill_native(out, lambda values: self._decode_native(wire, values, out.shape, context))

    def encode_rows(
        self, rows: Sequence[Tensor], contexts: Sequence[CompressorContext], nonfinite: Tensor | None = None
    ) -> Tensor | None:
        def encode(kernels: Any, places: Rows) -> Tensor:
            encode_kernel, _, form = self._kernel_coder(kernels, rows[0].shape, contexts)
            return encode_kernel(places, form, nonfinite)

        return encode_rows(rows, encode)

    def decode_rows(
        self, wires: Sequence[Tensor], outs: Sequence[Tensor], contexts: Sequence[CompressorContext]
    ) -> bool:
        def fill(kernels: Any, places: Rows) -> bool:
            _, decode_kernel, form = self._kernel_coder(kernels, outs[0].shape, contexts)
            decode_kernel(flat_rows(wires), places, form)
            return True

        return fill_rows(outs, fill)

    def proves_finite(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT
    ) -> bool:
        head = wire[: self._head_bytes(shape)]
        return not head.numel() or not self._marks_nonfinite(head)

    def _marks_nonfinite(self, head: Tensor) -> bool:
        """True if one of the bfloat16 scales is not finite."""
        return not is_known_finite(view_dtype(head, torch.bfloat16))

    @abstractmethod
    def _head_bytes(self, shape: Sequence[int]) -> int:
        """The size in bytes of the ranges or scales."""

    @abstractmethod
    def _encode_native(self, values: Tensor, wire: Tensor, shape: Sequence[int], context: CompressorContext) -> None:
        """Encode float32 or bfloat16 values, 1-d, of a tensor of this shape, into `wire`."""

    @abstractmethod
    def _decode_native(self, wire: Tensor, values: Tensor, shape: Sequence[int], context: CompressorContext) -> None:
        """Decode a message into float32 or bfloat16 values, 1-d, of a tensor of this shape."""

    @abstractmethod
    def _kernel_coder(self, kernels: Any, shape: Sequence[int], contexts: Sequence[CompressorContext]) -> _KernelCoder:
        """Return the coder of rows of this shape on a device; `kernels` is the module `shrinkpoint.device.kernels`."""

    @abstractmethod
    def _encode_torch(self, tensor: Tensor, context: CompressorContext) -> Tensor: ...

    @abstractmethod
    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor: ...


def _value_options(values: Tensor) -> dict[str, Any]:
    return {"bfloat16": values.dtype == torch.bfloat16, "threads": native_threads(values.numel())}


@dataclass(frozen=True)
class Uniform(_Quantizer):
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
        validate.check_int("bits", self.bits, maximum=8, do='for 16 bits, use "bf16"')
        is_size = isinstance(self.group, int) and not isinstance(self.group, bool) and self.group >= 1
        validate.check_bool("dither", self.dither)
        if not is_size and self.group not in (None, "row", "channel"):
            expected = 'a number of values, "row", "channel" or None'
            raise PolicyError("group", found=repr(self.group), expected=expected, do="pass 64")

    @property
    def spec(self) -> str:
        group = f":{self.group}" if self.group else ""
        return f"q{self.bits}{group}{':dither' if self.dither else ''}"

    def _group_size(self, shape: Sequence[int]) -> int:
        if self.group is None or isinstance(self.group, int):
            count = max(1, math.prod(shape))
            return count if self.group is None else min(count, self.group)
        return max(1, math.prod(shape[2:] if self.group == "channel" and len(shape) > 2 else shape[-1:]))

    def _head_bytes(self, shape: Sequence[int]) -> int:
        num_groups = -(-math.prod(shape) // self._group_size(shape))
        return num_groups * (8 if self.group is None else 4)

    def _marks_nonfinite(self, head: Tensor) -> bool:
        lo = head[: head.numel() // 2]
        return not is_known_finite(view_dtype(lo, torch.float32 if self.group is None else torch.bfloat16))

    def _native_options(self, values: Tensor, context: CompressorContext) -> dict[str, Any]:
        seed = context.key if self.dither else None
        return {"seed": seed, "brief": self.group is not None, **_value_options(values)}

    def _encode_native(self, values: Tensor, wire: Tensor, shape: Sequence[int], context: CompressorContext) -> None:
        size, options = self._group_size(shape), self._native_options(values, context)
        _native.uniform_encode(tensor_bytes(values), size, self.bits, wire.numpy(), **options)

    def _decode_native(self, wire: Tensor, values: Tensor, shape: Sequence[int], context: CompressorContext) -> None:
        size, options = self._group_size(shape), self._native_options(values, context)
        _native.uniform_decode(wire.numpy(), size, self.bits, tensor_bytes(values), **options)

    def _kernel_coder(self, kernels: Any, shape: Sequence[int], contexts: Sequence[CompressorContext]) -> _KernelCoder:
        seeds = [context.key for context in contexts] if self.dither else []
        form = kernels.UniformWire(math.prod(shape), self._group_size(shape), self.bits, self.group is not None, seeds)
        return kernels.encode_uniform, kernels.decode_uniform, form

    def _encode_torch(self, tensor: Tensor, context: CompressorContext) -> Tensor:
        values, is_float32 = flat_float32(tensor), self.group is None
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        groups = _split_groups(values, self._group_size(tensor.shape))
        lo, step = self._ranges(groups)
        inverse = torch.where(step > 0, 1 / step, 0.0)
        codes = (groups - lo[:, None]).mul_(inverse[:, None]).view(-1)[: values.numel()]
        codes = codes.add_(self._noise(context, values) + 0.5).floor_().clamp_(0, 2**self.bits - 1)
        # A value that is not finite has no code; its group decodes to nan whatever the codes are.
        packed = pack_planes(codes.nan_to_num_(0.0, 0.0, 0.0).to(torch.uint8), self.bits)
        return torch.cat([_ranges_to_bytes(lo, is_float32), _ranges_to_bytes(step, is_float32), packed])

    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        count, head = out.numel(), self._head_bytes(out.shape)
        if not count:
            return out
        dtype = torch.float32 if self.group is None else torch.bfloat16
        lo, step = (view_dtype(part, dtype).to(torch.float32) for part in wire[:head].chunk(2))
        codes = unpack_planes(wire[head:], count, self.bits).to(torch.float32)
        points = _split_groups(codes.sub_(self._noise(context, codes)), self._group_size(out.shape))
        return fill_tensor(out, (points * step[:, None]).add_(lo[:, None]).view(-1)[:count])

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
    words = values if is_float32 else (values.view(torch.int32) >> 16).to(torch.int16)
    return words.view(torch.uint8)


@dataclass(frozen=True)
class BlockFloat(_Quantizer):
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
        check_group_size("block", self.block, 32)

    @property
    def spec(self) -> str:
        return f"block{self.bits}:{self.block}"

    def _head_bytes(self, shape: Sequence[int]) -> int:
        return -(-math.prod(shape) // self.block)

    def _marks_nonfinite(self, head: Tensor) -> bool:
        return int(head.max()) == NAN_EXPONENT

    def _encode_native(self, values: Tensor, wire: Tensor, shape: Sequence[int], context: CompressorContext) -> None:
        data, options = tensor_bytes(values), _value_options(values)
        _native.blockfloat_encode(data, wire.numpy(), block=self.block, bits=self.bits, **options)

    def _decode_native(self, wire: Tensor, values: Tensor, shape: Sequence[int], context: CompressorContext) -> None:
        data, options = tensor_bytes(values), _value_options(values)
        _native.blockfloat_decode(wire.numpy(), data, block=self.block, bits=self.bits, **options)

    def _kernel_coder(self, kernels: Any, shape: Sequence[int], contexts: Sequence[CompressorContext]) -> _KernelCoder:
        form = kernels.GroupWire(math.prod(shape), self.block, self.bits, head_bytes=1)
        return kernels.encode_blocks, kernels.decode_blocks, form

    def _encode_torch(self, tensor: Tensor, context: CompressorContext) -> Tensor:
        values = to_groups(tensor, self.block)
        exponents = values.new_empty(0, 1, dtype=torch.int32)  # of the largest magnitude of each block
        if len(values):
            exponents = (values.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True) >> 23
            exponents = torch.where(exponents < MIN_EXPONENT, 0, exponents)
        is_coded = (exponents >= MIN_EXPONENT) & (exponents < NAN_EXPONENT)
        scaled = torch.where(is_coded, values, 0.0) * torch.where(is_coded, 1 / self._steps(exponents), 0.0)
        codes, error = self._round_codes(scaled)
        fine_codes, fine_error = self._round_codes(scaled * 2)
        use_fine = fine_error * 0.25 < error
        exponents = torch.where(is_coded, exponents - use_fine.to(torch.int32), exponents)
        codes = torch.where(use_fine, fine_codes, codes).to(torch.int32) & ((1 << self.bits) - 1)
        packed = pack_planes(codes.to(torch.uint8).reshape(-1)[: tensor.numel()], self.bits)
        return torch.cat([exponents.to(torch.uint8).reshape(-1), packed])

    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        count, high, blocks = out.numel(), 1 << (self.bits - 1), self._head_bytes(out.shape)
        codes = torch.nn.functional.pad(unpack_planes(wire[blocks:], count, self.bits), (0, -count % self.block))
        signed = ((codes.to(torch.int32) ^ high) - high).reshape(blocks, self.block)
        values = signed.to(torch.float32) * self._steps(wire[:blocks, None].to(torch.int32))
        return fill_tensor(out, values.reshape(-1)[:count])

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


@dataclass(frozen=True)
class NormalFloat(_Quantizer):
    """Sign and magnitude on the levels that are optimal for a normal distribution, times a scale for each group.

    The levels are those of Max (1960) and Lloyd (1982). The scale of a group is a bfloat16. Four are tried, and the one
    with the least sum of squared errors is sent, the earlier of two equal ones: the mean magnitude times sqrt(pi / 2),
    optimal for a normal distribution; two on the way to the next; and the largest magnitude over the largest level,
    optimal for an outlier. With one bit the first is the best, and the only one.

    The last group is padded with zeros. The first scale is a sum of magnitudes that were each multiplied by one float32
    before, sqrt(pi / 2) over the number of values in the group without padding; sums add the halves of a group until
    one number is left. A group with a value that is not finite, or whose scale exceeds float32, decodes to nan.

    Levels are symmetric around 0, and none is 0: the error is bounded relative to the root mean square of a group, not
    relative to the deviation from its mean. Use `Uniform` for values far from mean 0, and after ReLU.

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
        check_group_size("group", self.group, 64)

    @property
    def spec(self) -> str:
        return f"n{self.bits}:{self.group}"

    def _head_bytes(self, shape: Sequence[int]) -> int:
        return 2 * -(-math.prod(shape) // self.group)

    def _centers(self, device: torch.device) -> Tensor:
        return torch.tensor(CENTERS[self.bits], dtype=torch.float32, device=device)

    def _encode_native(self, values: Tensor, wire: Tensor, shape: Sequence[int], context: CompressorContext) -> None:
        data, centers = tensor_bytes(values), self._centers(values.device).numpy()
        _native.normal_encode(data, centers, wire.numpy(), group=self.group, bits=self.bits, **_value_options(values))

    def _decode_native(self, wire: Tensor, values: Tensor, shape: Sequence[int], context: CompressorContext) -> None:
        data, centers = tensor_bytes(values), self._centers(values.device).numpy()
        _native.normal_decode(wire.numpy(), centers, data, group=self.group, bits=self.bits, **_value_options(values))

    def _kernel_coder(self, kernels: Any, shape: Sequence[int], contexts: Sequence[CompressorContext]) -> _KernelCoder:
        form = kernels.GroupWire(math.prod(shape), self.group, self.bits, head_bytes=2, centers=CENTERS[self.bits])
        return kernels.encode_normal, kernels.decode_normal, form

    def _encode_torch(self, tensor: Tensor, context: CompressorContext) -> Tensor:
        values, centers = to_groups(tensor, self.group), self._centers(tensor.device)
        magnitudes = values.abs()
        scales, codes = _best_scale(magnitudes, _scale_candidates(magnitudes, tensor.numel(), centers), centers)
        codes = codes | (values < 0).to(torch.uint8) << (self.bits - 1)
        codes = codes.masked_fill_(~((scales >= MIN_SCALE) & scales.isfinite()), 0)
        return torch.cat([bf16_to_bytes(scales), pack_planes(codes.reshape(-1)[: tensor.numel()], self.bits)])

    def _decode_torch(self, wire: Tensor, out: Tensor, context: CompressorContext) -> Tensor:
        count, head, centers = out.numel(), self._head_bytes(out.shape), self._centers(out.device)
        codes = torch.nn.functional.pad(unpack_planes(wire[head:], count, self.bits), (0, -count % self.group))
        values = torch.cat([centers, -centers])[codes.reshape(-1, self.group).long()] * bf16_from_bytes(wire[:head])
        return fill_tensor(out, values.reshape(-1)[:count])


def _scale_candidates(magnitudes: Tensor, count: int, centers: Tensor) -> list[Tensor]:
    """The scales to try, each of shape (groups, 1); all are 0, or not finite, where the first one is."""
    group, root = magnitudes.shape[1], math.sqrt(math.pi / 2)
    factors = torch.full_like(magnitudes[:, :1], root / group)
    if count % group:
        factors[-1] = root / (count % group)
    mean = pairwise_sum(magnitudes * factors)
    scales = [mean]
    if len(centers) > 1:
        max_scale = magnitudes.amax(1, keepdim=True) * (1 / centers[-1])
        scales += [*(mean + (max_scale - mean) * fraction for fraction in SCALE_FRACTIONS), max_scale]
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
