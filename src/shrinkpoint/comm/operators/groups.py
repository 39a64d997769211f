"""Tensors as rows of one length, what is told of each row, and buffers for native code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.comm.operators.flat import fill, flattened, in_place

NAN = 0x7FC0
"""Bits of the one bfloat16 that stands for a row that holds something not finite, or too large to scale."""


def power_of_two(size: int, least: int, most: int) -> bool:
    """Whether rows may be so long."""
    return isinstance(size, int) and least <= size <= most and size & (size - 1) == 0


def grouped(x: Tensor, size: int) -> Tensor:
    """The values in row-major order, float32, of shape (rows, size); the last row is filled up with zeros."""
    values = flattened(x)
    short = -values.numel() % size
    return (torch.nn.functional.pad(values, (0, short)) if short else values).reshape(-1, size)


def halved(x: Tensor) -> Tensor:
    """Sums of rows whose length is a power of two, of shape (rows, 1): always in the same order."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x


def rounded(x: Tensor) -> Tensor:
    """Positive float32 to the nearest bfloat16, as float32; halves to even, infinite where that is nearer.

    What is not finite becomes nan.
    """
    word = x.contiguous().view(torch.int32)
    near = ((word + 0x7FFF + ((word >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(x < torch.inf, near, torch.nan)


def bf16_bytes(x: Tensor) -> Tensor:
    """bfloat16 numbers that are held as float32: two bytes each, the low one first; `NAN` for what is not finite."""
    word = (x.reshape(-1).contiguous().view(torch.int32) >> 16) & 0xFFFF
    word = torch.where(word & 0x7F80 == 0x7F80, NAN, word)
    return torch.stack([word & 0xFF, word >> 8], 1).to(torch.uint8).reshape(-1)


def bf16_values(data: Tensor) -> Tensor:
    """What `bf16_bytes` was made of, of shape (count, 1)."""
    low, high = data.reshape(-1, 2).to(torch.int32).unbind(1)
    return (low << 16 | high << 24).view(torch.float32)[:, None]


def filled(out: Tensor, make: Callable[[np.ndarray[tuple[int], np.dtype[np.uint8]]], None]) -> Tensor:
    """`out`, once native code has written its values, float32 in row-major order, into the buffer that it is given."""
    if in_place(out):
        make(bits_of(out))
        return out
    values = torch.empty(out.numel(), dtype=torch.float32)
    make(bits_of(values))
    return fill(out, values)
