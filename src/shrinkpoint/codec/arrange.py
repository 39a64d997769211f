"""Tensors <-> one array of numbers, in the order in which they are coded.

Members stand one after the other, row-major. With taps, the positions of the trailing axes come outermost: tap 0 of
every member, then tap 1 of every member, ..., so that the tap before is known when a tap is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec.number import NUMBERS
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.codec.run import Bytes, Shapes
from shrinkpoint.record import TensorInfo

_BYTES = {dtype: number.bytes for dtype, number in NUMBERS.items()}


def numbers(info: TensorInfo) -> int:
    """How many numbers a tensor holds."""
    return info.nbytes // _BYTES[info.dtype]


def taps_of(info: TensorInfo) -> int:
    """The positions of the axes after the second: 9 for a 3 x 3 convolution, 1 where there are no such axes."""
    return math.prod(info.shape[2:]) if len(info.shape) > 2 else 1


def gather(infos: Sequence[TensorInfo], source: Mapping[str, Tensor], taps: int) -> Bytes:
    """The members' numbers as bytes; shares memory with a single member without taps."""
    arrays = [bits_of(source[info.name]) for info in infos]
    if taps == 1:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    words = [array.view(_word(info)).reshape(-1, taps).T for info, array in zip(infos, arrays, strict=True)]
    return np.ascontiguousarray(np.concatenate(words, axis=1)).reshape(-1).view(np.uint8)


def has_floats(tensor: Tensor) -> bool:
    """Whether `gather_floats` takes it: a float of any width but two in a byte."""
    return tensor.is_floating_point() and tensor.dtype is not getattr(torch, "float4_e2m1fn_x2", None)


def gather_floats(names: Sequence[str], source: Mapping[str, Tensor], taps: int) -> Bytes:
    """As `gather`, of float tensors of any width converted to float32 (which is exact for the narrower ones)."""
    floats = {name: source[name].to(torch.float32) for name in names}
    infos = [TensorInfo(name, tuple(floats[name].shape), "F32") for name in names]
    return gather(infos, floats, taps)


def scatter(values: Bytes, infos: Sequence[TensorInfo], taps: int) -> list[Bytes]:
    """The inverse of `gather`: each member's bytes, row-major. Without taps they share memory with `values`."""
    if taps == 1:
        ends = [*accumulate((info.nbytes for info in infos), initial=0)]
        return [values[begin:end] for begin, end in pairwise(ends)]
    grid = values.view(_word(infos[0])).reshape(taps, -1)
    columns = np.cumsum([numbers(info) // taps for info in infos])
    parts = np.split(grid, columns[:-1], axis=1)
    return [np.ascontiguousarray(part.T).reshape(-1).view(np.uint8) for part in parts]


def matrices(infos: Sequence[TensorInfo], taps: int) -> Shapes:
    """(rows, columns) of every member's numbers of one tap; a vector is one row."""
    out = []
    for info in infos:
        count = numbers(info) // taps
        rows = info.shape[0] if len(info.shape) > 1 and count else 1
        out.append((rows, count // rows))
    return out


def _word(info: TensorInfo) -> str:
    return f"u{NUMBERS[info.dtype].bytes}"
