"""The parts of messages: flat values, groups of them, bfloat16 scales, and bit planes of codes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes

DTYPE_BY_NAME = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_EXPONENT_MASKS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""The bits that are all set in a value that is not finite."""
MIN_PARALLEL_NUMEL = 1 << 18  # The number of values from which native code uses several threads
BF16_NAN = 0x7FC0  # Bits of the bfloat16 scale of a group that is not finite or too large to scale
TILE = 64  # Codes are packed in tiles of this number


def flat_float32(tensor: Tensor) -> Tensor:
    """The values in row-major order: float32, 1-d, contiguous. They may be a view: do not write to them."""
    return tensor.detach().to(torch.float32).reshape(-1)


def flat_native(tensor: Tensor) -> Tensor:
    """As `flat_float32`, but bfloat16 values stay such: native code widens them while it reads them."""
    return tensor.detach().reshape(-1) if tensor.dtype == torch.bfloat16 else flat_float32(tensor)


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
    """True if all magnitudes are known to be at most `max_value`; on a GPU False, since looking would wait for it."""
    if values.device.type != "cpu" or not values.numel():
        return not values.numel()
    smallest, largest = values.aminmax()
    return -max_value <= float(smallest) and float(largest) <= max_value  # False where there is a nan


def count_nonfinite(tensor: Tensor) -> Tensor | int:
    """The number of nan and infinite values; on a GPU an int64 tensor without axes, which is not waited for."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.isfinite().logical_not_().sum()
    if tensor.dtype not in _EXPONENT_MASKS:
        return int(tensor.isfinite().logical_not_().sum())
    return _native.count_masked(tensor_bytes(tensor.contiguous()), tensor.itemsize, _EXPONENT_MASKS[tensor.dtype])


def is_known_finite(tensor: Tensor) -> bool:
    """True if all values are finite; on a GPU False, since looking would wait for it."""
    return tensor.device.type == "cpu" and not int(count_nonfinite(tensor))


def fill_native(out: Tensor, write: Callable[[Tensor], None]) -> Tensor:
    """Fill `out` with values that `write` puts into a tensor, 1-d and contiguous, and return `out`.

    That tensor is `out` itself where it is float32 or bfloat16, else one of float32.
    """
    if out.dtype in (torch.float32, torch.bfloat16) and out.device.type == "cpu" and out.is_contiguous():
        write(out.detach().view(-1))
        return out
    values = torch.empty(out.numel(), dtype=torch.float32, device="cpu")
    write(values)
    return fill_tensor(out, values)


def view_dtype(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as values of another dtype, or copy them first if they are not aligned."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def native_threads(count: int) -> int:
    """Number of threads that native code should use for `count` values."""
    return torch.get_num_threads() if count >= MIN_PARALLEL_NUMEL else 1


def check_group_size(where: str, size: int, default: int) -> None:
    """Raise a PolicyError if a number of values is not a power of two from 16 to 4096."""
    if not isinstance(size, int) or not 16 <= size <= 4096 or size & (size - 1):
        raise PolicyError(where, found=repr(size), expected="a power of two, 16 to 4096", do=f"pass {default}")


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


def plane_widths(bits: int) -> tuple[int, ...]:
    """The bits of each plane that codes of `bits` bits are split into, from the low bits up."""
    return (8,) if bits == 8 else tuple(width for width in (4, 2, 1) if bits & width)


def packed_bytes(count: int, bits: int) -> int:
    """The size in bytes of `count` packed codes."""
    return -(-count // TILE) * (TILE // 8) * bits


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 1 to 8 bits as planes of 4, 2 and 1 bits, without strided access.

    Codes are padded with zeros to tiles of 64. The planes lie one after another, from the low bits up: 7 bits are a
    plane of 4, one of 2 and one of 1; 8 bits are one plane of bytes. A plane of p bits has 8 p bytes of each tile:
    byte j holds the codes j, j + 8 p, j + 16 p, ... of the tile, from its low bits up.

    Args:
        codes: uint8, 1-d, each below 2^bits.

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
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % TILE))
    planes, start = [], 0
    for width in plane_widths(bits):
        parts = ((codes >> start) & ((1 << width) - 1)).view(-1, 8 // width, 8 * width)
        planes.append((parts << _part_shifts(width, codes.device)).sum(1, dtype=torch.uint8).view(-1))
        start += width
    return torch.cat(planes)


def _unpack_planes_torch(data: Tensor, count: int, bits: int) -> Tensor:
    tiles = -(-count // TILE)
    out = data.new_zeros(tiles * TILE)
    sizes = [tiles * (TILE // 8) * width for width in plane_widths(bits)]
    start = 0
    for width, plane in zip(plane_widths(bits), torch.split(data, sizes), strict=True):
        parts = plane.view(-1, 1, 8 * width) >> _part_shifts(width, data.device) & ((1 << width) - 1)
        out |= parts.view(-1) << start
        start += width
    return out[:count]


def _part_shifts(width: int, device: torch.device) -> Tensor:
    """The first bit of each code in a byte of a plane, from the low bits up: shape (8 / width, 1)."""
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)[:, None]
