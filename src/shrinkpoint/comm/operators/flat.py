"""A tensor of any dtype and strides as float32 in one row, and back into one."""

from __future__ import annotations

import torch
from torch import Tensor

LARGE = 1 << 18
"""Values from which on native code shares its work out among threads."""


def flattened(x: Tensor) -> Tensor:
    """The values in row-major order: float32, 1-d, contiguous. They may be x's own: not to be changed."""
    return x.detach().to(torch.float32).reshape(-1)


def fill(out: Tensor, values: Tensor) -> Tensor:
    """Put float32 values, 1-d, in row-major order, into `out`.

    Values that are finite stay so in narrower dtypes: they become the largest that there is.
    """
    target = out.detach()
    if target.dtype not in (torch.float32, torch.float64) and not _fit(values, torch.finfo(target.dtype).max):
        most = torch.finfo(target.dtype).max
        values = torch.where(values.abs() == torch.inf, values, values.clamp(-most, most))
    target.copy_(values.reshape(target.shape))
    return out


def _fit(values: Tensor, most: float) -> bool:
    """Whether it is known that nothing would become infinite; a GPU is not asked, since that would wait for it."""
    if values.device.type != "cpu" or not values.numel():
        return not values.numel()
    least, largest = values.aminmax()
    return -most <= float(least) and float(largest) <= most  # False where there is a nan


def in_place(out: Tensor) -> bool:
    """Whether native code can write the values of `out` where they lie."""
    return out.dtype == torch.float32 and out.device.type == "cpu" and out.is_contiguous()


def words(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as values of another dtype; where they are not aligned, a copy is."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def threads(count: int) -> int:
    """How many threads native code should use for so many values."""
    return torch.get_num_threads() if count >= LARGE else 1
