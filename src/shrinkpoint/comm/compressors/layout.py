"""Conversion of tensors of any dtype and strides to flat float32 values or groups of them, and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.tensors.dtypes import tensor_bytes

MIN_PARALLEL_NUMEL = 1 << 18
"""Values from which on native code shares its work out among threads."""


def flat_float32(x: Tensor) -> Tensor:
    """The values in row-major order: float32, 1-d, contiguous. They may be x's own: not to be changed."""
    return x.detach().to(torch.float32).reshape(-1)


def fill_tensor(out: Tensor, values: Tensor) -> Tensor:
    """Put float32 values, 1-d, in row-major order, into `out`.

    Values that are finite stay so in narrower dtypes: they become the largest that there is.
    """
    target = out.detach()
    if target.dtype not in (torch.float32, torch.float64) and not _fits_range(values, torch.finfo(target.dtype).max):
        most = torch.finfo(target.dtype).max
        values = torch.where(values.abs() == torch.inf, values, values.clamp(-most, most))
    target.copy_(values.reshape(target.shape))
    return out


def _fits_range(values: Tensor, max_value: float) -> bool:
    """Whether it is known that nothing would become infinite; a GPU is not asked, since that would wait for it."""
    if values.device.type != "cpu" or not values.numel():
        return not values.numel()
    least, largest = values.aminmax()
    return -max_value <= float(least) and float(largest) <= max_value  # False where there is a nan


def is_native_writable(out: Tensor) -> bool:
    """Whether native code can write the values of `out` where they lie."""
    return out.dtype == torch.float32 and out.device.type == "cpu" and out.is_contiguous()


def view_dtype(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as values of another dtype; where they are not aligned, a copy is."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def native_threads(count: int) -> int:
    """How many threads native code should use for so many values."""
    return torch.get_num_threads() if count >= MIN_PARALLEL_NUMEL else 1


BF16_NAN = 0x7FC0
"""Bits of the one bfloat16 that stands for a row that holds something not finite, or too large to scale."""


def is_power_of_two(size: int, min_size: int, max_size: int) -> bool:
    """Whether rows may be so long."""
    return isinstance(size, int) and min_size <= size <= max_size and size & (size - 1) == 0


def to_groups(x: Tensor, size: int) -> Tensor:
    """The values in row-major order, float32, of shape (rows, size); the last row is filled up with zeros."""
    values = flat_float32(x)
    short = -values.numel() % size
    return (torch.nn.functional.pad(values, (0, short)) if short else values).reshape(-1, size)


def pairwise_sum(x: Tensor) -> Tensor:
    """Sums of rows whose length is a power of two, of shape (rows, 1): always in the same order."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x


def round_to_bf16(x: Tensor) -> Tensor:
    """Positive float32 to the nearest bfloat16, as float32; halves to even, infinite where that is nearer.

    What is not finite becomes nan.
    """
    word = x.contiguous().view(torch.int32)
    near = ((word + 0x7FFF + ((word >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(x < torch.inf, near, torch.nan)


def bf16_to_bytes(x: Tensor) -> Tensor:
    """bfloat16 numbers that are held as float32: two bytes each, the low one first; `NAN` for what is not finite."""
    word = (x.reshape(-1).contiguous().view(torch.int32) >> 16) & 0xFFFF
    word = torch.where(word & 0x7F80 == 0x7F80, BF16_NAN, word)
    return torch.stack([word & 0xFF, word >> 8], 1).to(torch.uint8).reshape(-1)


def bf16_from_bytes(data: Tensor) -> Tensor:
    """What `bf16_to_bytes` was made of, of shape (count, 1)."""
    low, high = data.reshape(-1, 2).to(torch.int32).unbind(1)
    return (low << 16 | high << 24).view(torch.float32)[:, None]


def fill_native(out: Tensor, write: Callable[[np.ndarray[tuple[int], np.dtype[np.uint8]]], None]) -> Tensor:
    """`out`, once native code has written its values, float32 in row-major order, into the buffer that it is given."""
    if is_native_writable(out):
        write(tensor_bytes(out))
        return out
    values = torch.empty(out.numel(), dtype=torch.float32)
    write(tensor_bytes(values))
    return fill_tensor(out, values)
