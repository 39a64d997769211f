"""Tensors <-> one array of numbers, in the order in which they are coded, and the coding context of each tap.

Members stand one after the other, row-major. With taps, the positions of the trailing axes come outermost: tap 0 of
every member, then tap 1 of every member, ..., so that the previous tap is known when a tap is decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.coder import NUMBER_FORMATS, Bytes, CoderConfig, CodingContext, NumberFormat, Shapes
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.info import TensorInfo

_ITEMSIZES = {dtype: number.itemsize for dtype, number in NUMBER_FORMATS.items()}


def num_numbers(info: TensorInfo) -> int:
    """How many numbers a tensor holds."""
    return info.nbytes // _ITEMSIZES[info.dtype]


def num_taps(info: TensorInfo) -> int:
    """The positions of the axes after the second: 9 for a 3 x 3 convolution, 1 where there are no such axes."""
    return math.prod(info.shape[2:]) if len(info.shape) > 2 else 1


def pack_tensors(infos: Sequence[TensorInfo], source: Mapping[str, Tensor], taps: int) -> Bytes:
    """The members' numbers as bytes; shares memory with a single member without taps."""
    arrays = [tensor_bytes(source[info.name]) for info in infos]
    if taps == 1:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    words = [array.view(_word_dtype(info)).reshape(-1, taps).T for info, array in zip(infos, arrays, strict=True)]
    return np.ascontiguousarray(np.concatenate(words, axis=1)).reshape(-1).view(np.uint8)


def is_codable_float(tensor: Tensor) -> bool:
    """Whether `pack_float32` takes it: a float of any width but two in a byte."""
    return tensor.is_floating_point() and tensor.dtype is not getattr(torch, "float4_e2m1fn_x2", None)


def pack_float32(names: Sequence[str], source: Mapping[str, Tensor], taps: int) -> Bytes:
    """As `gather`, of float tensors of any width converted to float32 (which is exact for the narrower ones)."""
    floats = {name: source[name].to(torch.float32) for name in names}
    infos = [TensorInfo(name, tuple(floats[name].shape), "F32") for name in names]
    return pack_tensors(infos, floats, taps)


def unpack_tensors(values: Bytes, infos: Sequence[TensorInfo], taps: int) -> list[Bytes]:
    """The inverse of `gather`: each member's bytes, row-major. Without taps they share memory with `values`."""
    if taps == 1:
        ends = [*accumulate((info.nbytes for info in infos), initial=0)]
        return [values[begin:end] for begin, end in pairwise(ends)]
    grid = values.view(_word_dtype(infos[0])).reshape(taps, -1)
    columns = np.cumsum([num_numbers(info) // taps for info in infos])
    parts = np.split(grid, columns[:-1], axis=1)
    return [np.ascontiguousarray(part.T).reshape(-1).view(np.uint8) for part in parts]


def matrix_shapes(infos: Sequence[TensorInfo], taps: int) -> Shapes:
    """(rows, columns) of every member's numbers of one tap; a vector is one row."""
    out = []
    for info in infos:
        count = num_numbers(info) // taps
        rows = info.shape[0] if len(info.shape) > 1 and count else 1
        out.append((rows, count // rows))
    return out


def _word_dtype(info: TensorInfo) -> str:
    return f"u{NUMBER_FORMATS[info.dtype].itemsize}"


def tap(array: Bytes | None, index: int, taps: int) -> Bytes | None:
    """The `index`-th tap of an arranged array."""
    if array is None:
        return None
    size = array.nbytes // taps
    return array[index * size : (index + 1) * size]


def tap_context(
    number_format: NumberFormat, values: Bytes, context: CodingContext, config: CoderConfig, index: int, taps: int
) -> CodingContext:
    """What is known of one tap once those before it stand in `values`.

    The predictor "base" takes the parent's tap, under the move of the tap before from *its* parent; "tap" takes the
    tap before, under the move that that one made from its own predecessor. The first tap has no such hint.
    """
    if index == 0 and config.predictor == "tap":
        raise ValueError("the first tap cannot be predicted from a tap before it")
    if taps == 1:
        return context
    here = CodingContext(
        base=tap(context.base, index, taps),
        moment1=tap(context.moment1, index, taps),
        moment2=tap(context.moment2, index, taps),
        moment1_base=tap(context.moment1_base, index, taps),
        shapes=context.shapes,
    )
    if index == 0:
        return here
    before = tap(values, index - 1, taps)
    if config.predictor == "base":
        return replace(here, hint=_difference_classes(number_format, before, tap(context.base, index - 1, taps)))
    if config.predictor == "tap":
        return replace(
            here,
            base=before,
            hint=_difference_classes(number_format, before, tap(values, index - 2, taps)) if index > 1 else None,
        )
    return here


def _difference_classes(number_format: NumberFormat, values: Bytes | None, reference: Bytes | None) -> Bytes | None:
    if values is None or reference is None:
        return None
    model = _native.Model()
    model.width, model.mantissa = number_format.width, number_format.mantissa
    return _native.difference_classes(model, values, reference)
