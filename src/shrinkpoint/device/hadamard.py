"""Kernels that rotate blocks of values by Hadamard's matrix and fixed signs, and back."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shrinkpoint.device.arithmetic import NAN_WORD, as_float, ceil_div, load_values, row_offset, store_values
from shrinkpoint.device.rows import BLOCK, Rows, launch


@triton.jit
def _transform(values, STEPS: tl.constexpr, SCALE: tl.constexpr):
    """Multiply rows of 2^STEPS values by Hadamard's matrix: the exact scale, then sums at distances 1, 2, 4, ..."""
    shape: tl.constexpr = values.shape
    values = values * SCALE
    for step in tl.static_range(STEPS):
        pairs = tl.reshape(values, [values.numel // (2 << step), 2, 1 << step])
        low, high = tl.split(tl.permute(pairs, [0, 2, 1]))
        values = tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 2, 1]), shape)
    return tl.where(values != values, as_float(tl.full(values.shape, NAN_WORD, tl.int32)), values)


@triton.jit
def _rotate(
    x,
    signs,
    out,
    counter,
    stride,
    hole,
    out_stride,
    out_hole,
    numel,
    STEPS: tl.constexpr,
    NUM: tl.constexpr,
    SCALE: tl.constexpr,
    BACK: tl.constexpr,
):
    """Rotate NUM blocks of 2^STEPS values of a row, or with BACK rotate them back. Program (block, row).

    Rotated rows have whole blocks, the last one padded with zeros.
    """
    SIZE: tl.constexpr = 1 << STEPS
    block, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    positions = (block * NUM + tl.arange(0, NUM))[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask, whole = positions < numel, positions < ceil_div(numel, SIZE) * SIZE
    sign = tl.load(signs + tl.arange(0, SIZE))[None, :]
    x += row_offset(row, stride, hole)
    out += row_offset(row, out_stride, out_hole)
    if BACK:
        values = _transform(load_values(x, positions, whole, counter), STEPS, SCALE)
        store_values(out, positions, values * sign, mask)
    else:
        values = load_values(x, positions, mask, counter) * sign
        store_values(out, positions, _transform(values, STEPS, SCALE), whole)


def _start(rows: Rows, outs: Rows, signs: Tensor, numel: int, back: bool, counter: Tensor | None) -> None:
    size = signs.numel()
    at_once = BLOCK // size
    options = {"STEPS": size.bit_length() - 1, "NUM": at_once, "SCALE": 1 / math.isqrt(size), "BACK": back}
    places = rows.stride, rows.hole, outs.stride, outs.hole, numel
    grid = -(-numel // (size * at_once)), rows.count
    launch(_rotate, grid, rows.device, rows.first, signs, outs.first, counter, *places, **options)


def rotate(rows: Rows, signs: Tensor, counter: Tensor | None) -> Tensor:
    """Rotate rows in blocks of `signs.numel()` values, a power of four: float32, shape (rows, blocks, block)."""
    size = signs.numel()
    blocks = -(-rows.numel // size)
    rotated = torch.empty(rows.count, blocks, size, dtype=torch.float32, device=rows.device)
    outs = Rows(rotated[0].view(-1), rows.count, blocks * size, rows.count)
    _start(rows, outs, signs, rows.numel, False, counter)
    return rotated


def rotate_back(rotated: Tensor, outs: Rows, signs: Tensor) -> None:
    """Undo `rotate` into rows."""
    rows = Rows(rotated[0].view(-1), outs.count, rotated[0].numel(), outs.count)
    _start(rows, outs, signs, outs.numel, True, None)
