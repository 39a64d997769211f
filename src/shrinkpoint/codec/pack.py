"""Packs the tensors of a record into one array of numbers in coding order, and computes the context of each tap.

The record's tensors (members) follow each other, each in row-major order. A tap is one position of the axes after the
second, such as one of the nine of a 3 x 3 convolution. With taps, the array is ordered tap by tap: tap 0 of every
member, then tap 1 of every member, and so on, so that a tap can be predicted from the previous one."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.coder import NUMBER_FORMATS, Bytes, CoderConfig, CodingContext, NumberFormat, Shapes
from shrinkpoint.tensors.dtypes import joined_bytes
from shrinkpoint.tensors.info import TensorInfo

TAP_SIZES = struct.Struct("<IQ")  # Bytes of a tap's side data and of its codes; stored before each tap's side data
_ITEMSIZES = {dtype: number.itemsize for dtype, number in NUMBER_FORMATS.items()}


def num_numbers(info: TensorInfo) -> int:
    """Return how many coded numbers a tensor has."""
    return info.nbytes // _ITEMSIZES[info.dtype]


def num_taps(info: TensorInfo) -> int:
    """Return the product of the sizes after the second axis: 9 for a 3 x 3 convolution, 1 for a matrix or vector."""
    return math.prod(info.shape[2:]) if len(info.shape) > 2 else 1


def pack_tensors(infos: Sequence[TensorInfo], source: Mapping[str, Tensor], taps: int) -> Bytes:
    """Return the numbers of all members as uint8, in coding order; shares memory with a single member without taps."""
    values = joined_bytes([source[info.name] for info in infos])
    return taps_outermost(values, _ITEMSIZES[infos[0].dtype], taps)


def taps_outermost(values: Bytes, itemsize: int, taps: int) -> Bytes:
    """Reorder row-major numbers of `itemsize` bytes tap by tap; returns the same array for one tap."""
    return _transpose(values, itemsize, (-1, taps)) if taps > 1 else values


def taps_innermost(values: Bytes, itemsize: int, taps: int) -> Bytes:
    """Invert `taps_outermost`."""
    return _transpose(values, itemsize, (taps, -1)) if taps > 1 else values


def _transpose(values: Bytes, itemsize: int, shape: tuple[int, int]) -> Bytes:
    return np.ascontiguousarray(values.view(f"u{itemsize}").reshape(shape).T).reshape(-1).view(np.uint8)


def pack_float32(names: Sequence[str], source: Mapping[str, Tensor], taps: int) -> Bytes:
    """Like `pack_tensors`, of float tensors converted to float32 (exact for the narrower dtypes)."""
    tensors = [source[name] for name in names]
    floats = [tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32) for tensor in tensors]
    return taps_outermost(joined_bytes(floats), torch.float32.itemsize, taps)


def matrix_shapes(infos: Sequence[TensorInfo], taps: int) -> Shapes:
    """Return (rows, columns) of every member's numbers within one tap; a vector is one row."""
    out = []
    for info in infos:
        count = num_numbers(info) // taps
        rows = info.shape[0] if len(info.shape) > 1 and count else 1
        out.append((rows, count // rows))
    return out


def digest_arrays(arrays: Iterable[Bytes]) -> str:
    """Return the xxh3-128 digest of arrays one after the other, in hex."""
    hasher = _native.Hasher()
    for array in arrays:
        hasher.update(array)
    return hasher.hexdigest()


def tap(array: Bytes | None, index: int, taps: int) -> Bytes | None:
    """Return the `index`-th tap of a packed array; None for None."""
    if array is None:
        return None
    size = array.nbytes // taps
    return array[index * size : (index + 1) * size]


def tap_context(
    number_format: NumberFormat, values: Bytes, context: CodingContext, config: CoderConfig, index: int, taps: int
) -> CodingContext:
    """Return the coding context of one tap, given the previous taps in `values`.

    The predictor "base" predicts from the parent's tap, and its hint is how the previous tap differs from *its*
    parent; "tap" predicts from the previous tap, and its hint is how that one differs from its own predecessor. The
    first tap has no hint.

    Raises:
        ValueError: the first tap has the predictor "tap".
    """
    if index == 0 and config.predictor == "tap":
        raise ValueError("the first tap cannot be predicted from a tap before it")
    if taps == 1:
        return context
    context_of_tap = CodingContext(
        base=tap(context.base, index, taps),
        moment1=tap(context.moment1, index, taps),
        moment2=tap(context.moment2, index, taps),
        moment1_base=tap(context.moment1_base, index, taps),
        shapes=context.shapes,
    )
    if index == 0:
        return context_of_tap
    previous = tap(values, index - 1, taps)
    if config.predictor == "base":
        return replace(
            context_of_tap, hint=_difference_classes(number_format, previous, tap(context.base, index - 1, taps))
        )
    if config.predictor == "tap":
        return replace(
            context_of_tap,
            base=previous,
            hint=_difference_classes(number_format, previous, tap(values, index - 2, taps)) if index > 1 else None,
        )
    return context_of_tap


def _difference_classes(number_format: NumberFormat, values: Bytes | None, reference: Bytes | None) -> Bytes | None:
    if values is None or reference is None:
        return None
    model = _native.Model()
    model.width, model.mantissa = number_format.width, number_format.mantissa
    return _native.difference_classes(model, values, reference)
