"""The parts of messages: flat values, groups, bfloat16 scales, and planes of codes of 1 to 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.tensors.dtypes import tensor_bytes

MIN_PARALLEL_NUMEL = 1 << 18
"""The number of values from which native code uses several threads."""


def flat_float32(tensor: Tensor) -> Tensor:
    """The values in row-major order: float32, 1-d, contiguous. They may be a view: do not write to them."""
    return tensor.detach().to(torch.float32).reshape(-1)


def fill_tensor(out: Tensor, values: Tensor) -> Tensor:
    """Copy float32 values, 1-d, in row-major order, into `out`, and return it.

    Finite values stay finite in a narrower dtype: those beyond its range become its largest value.
    """
    target = out.detach()
    if target.dtype not in (torch.float32, torch.float64) and not _fits_range(values, torch.finfo(target.dtype).max):
        max_value = torch.finfo(target.dtype).max
        values = torch.where(values.abs() == torch.inf, values, values.clamp(-max_value, max_value))
    target.copy_(values.reshape(target.shape))
    return out


def _fits_range(values: Tensor, max_value: float) -> bool:
    """Whether all magnitudes are known to be at most `max_value`; on a GPU False, since looking would wait for it."""
    if values.device.type != "cpu" or not values.numel():
        return not values.numel()
    smallest, largest = values.aminmax()
    return -max_value <= float(smallest) and float(largest) <= max_value  # False where there is a nan


def is_native_writable(out: Tensor) -> bool:
    """Whether native code can write the values of `out` in place."""
    return out.dtype == torch.float32 and out.device.type == "cpu" and out.is_contiguous()


def view_dtype(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as values of another dtype, or copy them first if they are not aligned."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def native_threads(count: int) -> int:
    """How many threads native code should use for `count` values."""
    return torch.get_num_threads() if count >= MIN_PARALLEL_NUMEL else 1


BF16_NAN = 0x7FC0
"""Bits of the bfloat16 scale of a group that is not finite or too large to scale."""


def is_power_of_two(size: int, min_size: int, max_size: int) -> bool:
    """Whether `size` is a power of two from `min_size` to `max_size`."""
    return isinstance(size, int) and min_size <= size <= max_size and size & (size - 1) == 0


def to_groups(tensor: Tensor, size: int) -> Tensor:
    """The values in row-major order, float32, of shape (rows, size); the last row is padded with zeros."""
    values = flat_float32(tensor)
    short = -values.numel() % size
    return (torch.nn.functional.pad(values, (0, short)) if short else values).reshape(-1, size)


def pairwise_sum(tensor: Tensor) -> Tensor:
    """Sum rows whose length is a power of two, in a fixed order: shape (rows, 1)."""
    while tensor.shape[1] > 1:
        half = tensor.shape[1] // 2
        tensor = tensor[:, :half] + tensor[:, half:]
    return tensor


def round_to_bf16(tensor: Tensor) -> Tensor:
    """Round positive float32 to the nearest bfloat16, as float32; halves to even, infinite where that is nearer.

    Values that are not finite become nan.
    """
    word = tensor.contiguous().view(torch.int32)
    near = ((word + 0x7FFF + ((word >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(tensor < torch.inf, near, torch.nan)


def bf16_to_bytes(tensor: Tensor) -> Tensor:
    """The bytes of bfloat16 numbers given as float32: two each, low byte first; `BF16_NAN` for what is not finite."""
    word = (tensor.reshape(-1).contiguous().view(torch.int32) >> 16) & 0xFFFF
    word = torch.where(word & 0x7F80 == 0x7F80, BF16_NAN, word)
    return torch.stack([word & 0xFF, word >> 8], 1).to(torch.uint8).reshape(-1)


def bf16_from_bytes(data: Tensor) -> Tensor:
    """Inverse of `bf16_to_bytes`: float32, shape (count, 1)."""
    low, high = data.reshape(-1, 2).to(torch.int32).unbind(1)
    return (low << 16 | high << 24).view(torch.float32)[:, None]


def fill_native(out: Tensor, write: Callable[[np.ndarray[tuple[int], np.dtype[np.uint8]]], None]) -> Tensor:
    """Fill `out` with values that `write` puts into a buffer, float32 in row-major order, and return it."""
    if is_native_writable(out):
        write(tensor_bytes(out))
        return out
    values = torch.empty(out.numel(), dtype=torch.float32)
    write(tensor_bytes(values))
    return fill_tensor(out, values)


TILE = 64


def plane_widths(bits: int) -> tuple[int, ...]:
    """The bits of each plane that codes of `bits` bits are split into, from the low bits up."""
    return (8,) if bits == 8 else tuple(width for width in (4, 2, 1) if bits & width)


def packed_bytes(count: int, bits: int) -> int:
    """The size in bytes of `count` packed codes."""
    return -(-count // TILE) * (TILE // 8) * bits


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes as planes.

    Args:
        codes: uint8, 1-d, each below 2^bits.
        bits: 1 to 8.

    Returns:
        uint8, 1-d, of `packed_bytes(codes.numel(), bits)` bytes.
    """
    if codes.device.type != "cpu":
        return _pack_planes_torch(codes, bits)
    out = torch.empty(packed_bytes(codes.numel(), bits), dtype=torch.uint8, device="cpu")
    _native.pack_planes(codes.contiguous().numpy(), bits, out.numpy())
    return out


def unpack_planes(data: Tensor, count: int, bits: int) -> Tensor:
    """Unpack the first `count` codes of what `pack_planes` returned: uint8, 1-d."""
    if data.device.type != "cpu":
        return _unpack_planes_torch(data, count, bits)
    out = torch.empty(count, dtype=torch.uint8, device="cpu")
    _native.unpack_planes(data.contiguous().numpy(), bits, out.numpy())
    return out


def _pack_planes_torch(codes: Tensor, bits: int) -> Tensor:
    missing = -codes.numel() % TILE
    if missing:
        codes = torch.cat([codes, codes.new_zeros(missing)])
    planes, shift = [], 0
    for width in plane_widths(bits):
        planes.append(_codes_to_plane(codes >> shift, width))
        shift += width
    return torch.cat(planes)


def _unpack_planes_torch(data: Tensor, count: int, bits: int) -> Tensor:
    tiles = -(-count // TILE)
    out = data.new_zeros(tiles * TILE)
    start = shift = 0
    for width in plane_widths(bits):
        end = start + tiles * TILE // 8 * width
        out |= _plane_to_codes(data[start:end], width) << shift
        start, shift = end, shift + width
    return out[:count]


def _codes_to_plane(codes: Tensor, width: int) -> Tensor:
    if width == 8:
        return codes
    parts = (codes & ((1 << width) - 1)).view(-1, 8 // width, 8 * width)
    out = parts[:, 0].clone()
    for i in range(1, 8 // width):
        out |= parts[:, i] << (width * i)
    return out.view(-1)


def _plane_to_codes(plane: Tensor, width: int) -> Tensor:
    if width == 8:
        return plane
    whole = plane.view(-1, 8 * width)
    parts = [whole >> (width * i) & ((1 << width) - 1) for i in range(8 // width)]
    return torch.stack(parts, 1).view(-1)
