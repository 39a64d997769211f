"""Kernels for messages of `NormalFloat`: bfloat16 scales of groups, then bit planes of codes. One launch each way."""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shrinkpoint.device.arithmetic import (
    NAN_WORD,
    as_float,
    as_word,
    ceil_div,
    group_places,
    halved_sum,
    inverse_of,
    load_brief,
    load_codes,
    load_values,
    message_offset,
    nearest_brief,
    row_offset,
    store_brief,
    store_codes,
    store_values,
)
from shrinkpoint.device.rows import GroupWire, Rows, launch, new_messages


@triton.jit
def _error_of(sizes, scale, max_scale, unit, table, LEVELS: tl.constexpr, STEPS: tl.constexpr):
    """The sum of squared errors of magnitudes with one scale for each group, in a unit that all scales share."""
    scaled = sizes * inverse_of(scale, max_scale)[:, None]
    level = tl.load(table) + tl.zeros(scaled.shape, tl.float32)
    for k in tl.static_range(1, LEVELS):
        level = tl.where(scaled > tl.load(table + LEVELS + k), tl.load(table + k), level)
    errors, ratio = scaled - level, scale * unit
    return halved_sum(errors * errors, STEPS) * (ratio * ratio)


@triton.jit
def _best_scale(sizes, mean, first, largest, max_scale, table, LEVELS: tl.constexpr, STEPS: tl.constexpr):
    """The scale of least error of each group: `first`, two on the way from the mean to the largest, or the largest."""
    best = first
    if LEVELS > 1:
        unit = inverse_of(first, max_scale)
        spread = largest - mean
        error = _error_of(sizes, first, max_scale, unit, table, LEVELS, STEPS)
        for k in tl.static_range(3):
            other = largest
            if k < 2:
                other = mean + spread * (0.25 if k == 0 else 0.5)
            scale = nearest_brief(other)
            other_error = _error_of(sizes, scale, max_scale, unit, table, LEVELS, STEPS)
            best = tl.where(other_error < error, scale, best)
            error = tl.where(other_error < error, other_error, error)
    return best


@triton.jit
def _encode_normal(
    x,
    wire,
    table,
    counter,
    stride,
    hole,
    numel,
    factor,
    last_factor,
    BITS: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode BLOCK values of a row: whole groups of 2^LOG_GROUP, the last padded with zeros. Program (block, row)."""
    GROUP: tl.constexpr = 1 << LOG_GROUP
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    block, row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), ceil_div(numel, GROUP)
    group, positions = group_places(block, GROUP, BLOCK)
    values = load_values(x + row_offset(row, stride, hole), positions, positions < numel, counter)
    factors = tl.where(group == groups - 1, last_factor, factor)
    mean = halved_sum(tl.abs(values) * factors[:, None], LOG_GROUP)
    # On a GPU nan is 0x7FFFFFFF, which would overflow when it is rounded as bits.
    first = tl.where(mean < float("inf"), nearest_brief(mean), float("inf"))
    is_scaled = (first >= 2.0**-120) & (first < float("inf"))
    unscaled = tl.where(first < 2.0**-120, 0, NAN_WORD)
    first, mean = tl.where(is_scaled, first, 1.0), tl.where(is_scaled, mean, 1.0)
    sizes = tl.where(is_scaled[:, None], tl.abs(values), 0.0)
    largest = tl.max(sizes, axis=1) * tl.load(table + LEVELS)
    max_scale = tl.max(tl.maximum(first, largest))
    scale = _best_scale(sizes, mean, first, largest, max_scale, table, LEVELS, LOG_GROUP)
    scaled = sizes * inverse_of(scale, max_scale)[:, None]
    codes = tl.where(values < 0, LEVELS, 0)
    for k in tl.static_range(1, LEVELS):
        codes += tl.where(scaled > tl.load(table + LEVELS + k), 1, 0)
    wire += message_offset(row, 2 * groups + ceil_div(numel, 64) * (8 * BITS))
    store_brief(wire, group, tl.where(is_scaled, as_word(scale), unscaled), group < groups)
    store_codes(tl.where(is_scaled[:, None], codes, 0), wire, 2 * groups, numel, block, BITS)


@triton.jit
def _decode_normal(
    wire,
    out,
    table,
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
    codes = load_codes(wire + 2 * groups, positions, mask, numel, BITS)
    level = tl.load(table + (codes & ((1 << (BITS - 1)) - 1)))
    sign = (codes >> (BITS - 1)) << 31
    values = as_float(as_word(level) | sign) * load_brief(wire, group, group < groups)
    store_values(out + row_offset(row, stride, hole), positions, values, mask)


@cache
def _make_table(centers: tuple[float, ...], device: torch.device) -> Tensor:
    """The centers, the largest scale over the largest magnitude, and the thresholds between centers: float32, 1-d."""
    numbers = torch.tensor(centers, dtype=torch.float32, device="cpu")
    return torch.cat([numbers, 1 / numbers[-1:], (numbers[:-1] + numbers[1:]) * 0.5]).to(device)


def encode_normal(rows: Rows, form: GroupWire, counter: Tensor | None) -> Tensor:
    """Encode rows as messages, and count values that are not finite, as `encode_uniform` does."""
    wires, root = new_messages(rows.first, rows.count, form.size), math.sqrt(math.pi / 2)
    factors = [root / size for size in (form.group, form.numel % form.group or form.group)]
    arguments = rows.first, wires, _make_table(form.centers, rows.device), counter, rows.stride, rows.hole, form.numel
    launch(_encode_normal, form.grid(rows), rows.device, *arguments, *factors, **form.options())
    return wires


def decode_normal(wires: Rows, outs: Rows, form: GroupWire) -> None:
    """Decode messages into rows."""
    first, out, *places = form.decode_arguments(wires, outs)
    table = _make_table(form.centers, outs.device)
    launch(_decode_normal, form.grid(outs), outs.device, first, out, table, *places, **form.options())
