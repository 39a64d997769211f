"""Kernels for messages of `BlockFloat`: exponents of blocks, then bit planes of mantissas. One launch each way."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shrinkpoint.device.arithmetic import (
    as_float,
    as_word,
    ceil_div,
    group_places,
    halved_sum,
    load_codes,
    load_values,
    message_offset,
    row_offset,
    store_codes,
    store_values,
)
from shrinkpoint.device.rows import GroupWire, Rows, launch, new_messages

_MAGIC = tl.constexpr(1.5 * 2**23)
"""Added to a small float32, it leaves the nearest integer, halves to even, in the low bits of the sum."""


@triton.jit
def _near(values, BITS: tl.constexpr):
    """The nearest mantissas plus `_MAGIC`."""
    most = (1 << (BITS - 1)) - 1
    return tl.minimum(tl.maximum(values, -most * 1.0), most * 1.0) + _MAGIC


@triton.jit
def _encode_blocks(
    x,
    wire,
    counter,
    stride,
    hole,
    numel,
    BITS: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode BLOCK values of a row: whole blocks of 2^LOG_GROUP, the last padded with zeros. Program (block, row)."""
    GROUP: tl.constexpr = 1 << LOG_GROUP
    block, row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), ceil_div(numel, GROUP)
    group, positions = group_places(block, GROUP, BLOCK)
    values = load_values(x + row_offset(row, stride, hole), positions, positions < numel, counter)
    exponent = tl.max(as_word(values) & 0x7FFFFFFF, axis=1) >> 23
    exponent = tl.where(exponent < 16, 0, exponent)
    is_coded = (exponent > 0) & (exponent < 255)
    power = 254 - tl.where(is_coded, exponent - (BITS - 2), 127)
    inverse = as_float(tl.where(power == 0, 0x00400000, power << 23))  # 2^-127 is denormal
    scaled = tl.where(is_coded[:, None], values, 0.0) * inverse[:, None]
    near, fine_near = _near(scaled, BITS), _near(scaled * 2, BITS)
    error, fine_error = scaled - (near - _MAGIC), scaled * 2 - (fine_near - _MAGIC)
    is_fine = halved_sum(fine_error * fine_error, LOG_GROUP) * 0.25 < halved_sum(error * error, LOG_GROUP)
    exponent = tl.where(is_coded & is_fine, exponent - 1, exponent)
    codes = as_word(tl.where(is_fine[:, None], fine_near, near)) & ((1 << BITS) - 1)
    wire += message_offset(row, groups + ceil_div(numel, 64) * (8 * BITS))
    tl.store(wire + group, exponent.to(tl.uint8), mask=group < groups)
    store_codes(codes, wire, groups, numel, block, BITS)


@triton.jit
def _decode_blocks(
    wire,
    out,
    wire_stride,
    wire_hole,
    stride,
    hole,
    numel,
    BITS: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode BLOCK values of a row, which are whole groups of 2^LOG_GROUP. Program (block, row)."""
    GROUP: tl.constexpr = 1 << LOG_GROUP
    block, row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), ceil_div(numel, GROUP)
    group, positions = group_places(block, GROUP, BLOCK)
    group = group[:, None]
    mask = positions < numel
    wire += row_offset(row, wire_stride, wire_hole)
    exponent = tl.load(wire + group, mask=group < groups, other=0).to(tl.int32)
    step = as_float((exponent - (BITS - 2)) << 23)
    step = tl.where(exponent == 255, float("nan"), tl.where(exponent == 0, 0.0, step))
    high: tl.constexpr = 1 << (BITS - 1)
    codes = (load_codes(wire + groups, positions, mask, numel, BITS) ^ high) - high
    store_values(out + row_offset(row, stride, hole), positions, codes.to(tl.float32) * step, mask)


def encode_blocks(rows: Rows, form: GroupWire, counter: Tensor | None) -> Tensor:
    """Encode rows as messages, and count values that are not finite, as `encode_uniform` does."""
    wires = new_messages(rows.first, rows.count, form.size)
    arguments = rows.first, wires, counter, rows.stride, rows.hole, form.numel
    launch(_encode_blocks, form.grid(rows), rows.device, *arguments, **form.options())
    return wires


def decode_blocks(wires: Rows, outs: Rows, form: GroupWire) -> None:
    """Decode messages into rows."""
    launch(_decode_blocks, form.grid(outs), outs.device, *form.decode_arguments(wires, outs), **form.options())
