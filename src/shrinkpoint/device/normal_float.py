"""Kernels for messages of `NormalFloat`: bfloat16 scales of groups, then bit planes of codes. One launch each way."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from shrinkpoint.device.arithmetic import (
    NAN_WORD,
    as_float,
    as_word,
    ceil_div,
    halved_sum,
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
from shrinkpoint.device.groups import GroupWire
from shrinkpoint.device.launch import launch
from shrinkpoint.device.rows import Rows, new_messages


@triton.jit
def _error_of(sizes, scale, unit, CENTERS: tl.constexpr, THRESHOLDS: tl.constexpr, STEPS: tl.constexpr):
    """The sum of squared errors of magnitudes with one scale for each group, in a unit that all scales share."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    scaled = sizes * tl.div_rn(one, scale)[:, None]
    level = tl.full(scaled.shape, CENTERS[0], tl.float32)
    for k in tl.static_range(len(CENTERS) - 1):
        level = tl.where(scaled > THRESHOLDS[k], CENTERS[k + 1], level)
    errors, ratio = scaled - level, scale * unit
    return halved_sum(errors * errors, STEPS) * (ratio * ratio)


@triton.jit
def _best_scale(
    sizes,
    mean,
    first,
    CENTERS: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    STEPS: tl.constexpr,
    MAX_RATIO: tl.constexpr,
):
    """The scale of least error of each group: that of the mean magnitude, two on the way to the largest, or that."""
    best = first
    if len(CENTERS) > 1:
        unit = tl.div_rn(tl.full(first.shape, 1.0, tl.float32), first)
        largest = tl.max(sizes, axis=1) * MAX_RATIO
        spread = largest - mean
        error = _error_of(sizes, first, unit, CENTERS, THRESHOLDS, STEPS)
        for k in tl.static_range(3):
            other = largest
            if k < 2:
                other = mean + spread * (0.25 if k == 0 else 0.5)
            scale = nearest_brief(other)
            other_error = _error_of(sizes, scale, unit, CENTERS, THRESHOLDS, STEPS)
            best = tl.where(other_error < error, scale, best)
            error = tl.where(other_error < error, other_error, error)
    return best


@triton.jit
def _encode_normal(
    x,
    wire,
    counter,
    stride,
    hole,
    numel,
    factor,
    last_factor,
    BITS: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERS: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    MAX_RATIO: tl.constexpr,
):
    """Encode BLOCK values of a row: whole groups of 2^LOG_GROUP, the last padded with zeros. Program (block, row)."""
    GROUP: tl.constexpr = 1 << LOG_GROUP
    block, row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), ceil_div(numel, GROUP)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    positions = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = load_values(x + row_offset(row, stride, hole), positions, positions < numel, counter)
    factors = tl.where(group == groups - 1, last_factor, factor)
    mean = halved_sum(tl.abs(values) * factors[:, None], LOG_GROUP)
    # On a GPU nan is 0x7FFFFFFF, which would overflow when it is rounded as bits.
    first = tl.where(mean < float("inf"), nearest_brief(mean), float("inf"))
    is_scaled = (first >= 2.0**-120) & (first < float("inf"))
    unscaled = tl.where(first < 2.0**-120, 0, NAN_WORD)
    first, mean = tl.where(is_scaled, first, 1.0), tl.where(is_scaled, mean, 1.0)
    sizes = tl.where(is_scaled[:, None], tl.abs(values), 0.0)
    scale = _best_scale(sizes, mean, first, CENTERS, THRESHOLDS, LOG_GROUP, MAX_RATIO)
    scaled = sizes * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    codes = tl.where(values < 0, 1 << (BITS - 1), 0)
    for k in tl.static_range(len(CENTERS) - 1):
        codes += tl.where(scaled > THRESHOLDS[k], 1, 0)
    wire += message_offset(row, 2 * groups + ceil_div(numel, 64) * (8 * BITS))
    store_brief(wire, group, tl.where(is_scaled, as_word(scale), unscaled), group < groups)
    store_codes(tl.where(is_scaled[:, None], codes, 0), wire, 2 * groups, numel, block, BITS)


@triton.jit
def _decode_normal(
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
    CENTERS: tl.constexpr,
):
    """Decode BLOCK values of a row. Program (block, row)."""
    block, row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), ceil_div(numel, 1 << LOG_GROUP)
    positions = block * BLOCK + tl.arange(0, BLOCK)
    mask = positions < numel
    wire += row_offset(row, wire_stride, wire_hole)
    codes = load_codes(wire + 2 * groups, positions, mask, numel, BITS)
    level, magnitude = tl.full(codes.shape, CENTERS[0], tl.float32), codes & ((1 << (BITS - 1)) - 1)
    for k in tl.static_range(len(CENTERS) - 1):
        level = tl.where(magnitude == k + 1, CENTERS[k + 1], level)
    sign = (codes >> (BITS - 1)) << 31
    values = as_float(as_word(level) | sign) * load_brief(wire, positions >> LOG_GROUP, mask)
    store_values(out + row_offset(row, stride, hole), positions, values, mask)


@cache
def _numbers(centers: tuple[float, ...]) -> dict[str, Any]:
    """Centers, the thresholds between them, and the largest scale over the largest magnitude: rounded as float32."""
    numbers = np.array(centers, dtype=np.float32)
    thresholds = (numbers[:-1] + numbers[1:]) * np.float32(0.5)
    ratio = float(np.float32(1) / numbers[-1])
    return {"CENTERS": tuple(numbers.tolist()), "THRESHOLDS": (*thresholds.tolist(), 0.0), "MAX_RATIO": ratio}


def encode_normal(rows: Rows, form: GroupWire, counter: Tensor | None) -> Tensor:
    """Encode rows as messages, and count values that are not finite, as `encode_uniform` does."""
    wires, root = new_messages(rows.first, rows.count, form.size), math.sqrt(math.pi / 2)
    factors = [root / size for size in (form.group, form.numel % form.group or form.group)]
    arguments = rows.first, wires, counter, rows.stride, rows.hole, form.numel, *factors
    launch(_encode_normal, form.grid(rows), rows.device, *arguments, **form.options(), **_numbers(form.centers))
    return wires


def decode_normal(wires: Rows, outs: Rows, form: GroupWire) -> None:
    """Decode messages into rows."""
    options = form.options() | {"CENTERS": _numbers(form.centers)["CENTERS"]}
    launch(_decode_normal, form.grid(outs), outs.device, *form.decode_arguments(wires, outs), **options)
