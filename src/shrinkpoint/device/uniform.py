"""Kernels for messages of `Uniform`: ranges of groups, then bit planes of codes.

Groups of a power of two of values, up to 4096, are encoded in one launch: a program has whole groups and whole tiles of
64 codes. Groups of other sizes are encoded in two launches, or three if a group is larger than a program's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shrinkpoint.device.arithmetic import (
    NAN_WORD,
    as_float,
    as_word,
    ceil_div,
    dither,
    group_places,
    inverse_of,
    load_brief,
    load_codes,
    load_values,
    message_offset,
    row_offset,
    store_brief,
    store_codes,
    store_values,
)
from shrinkpoint.device.rows import BLOCK, Rows, launch, new_messages, seed_tensor, signed

MAX_GROUP = 4096
"""The largest group that a program encodes by itself."""
_LARGEST_KEY, _SMALLEST_KEY = tl.constexpr(0x7FFFFFFF), tl.constexpr(-0x80000000)


@dataclass(frozen=True)
class UniformWire:
    """The layout of a message."""

    numel: int  # The number of values
    group: int  # The number of values of a group, at least 1
    bits: int  # Of a code
    brief: bool  # Ranges are bfloat16, else float32
    seeds: Sequence[int] = ()  # Of the dither, one for each message; empty without dither

    @property
    def groups(self) -> int:
        return -(-self.numel // self.group)

    @property
    def size(self) -> int:
        return self.groups * (4 if self.brief else 8) + -(-self.numel // 64) * 8 * self.bits

    @property
    def has_even_groups(self) -> bool:
        """True if a program has whole groups."""
        return self.group <= MAX_GROUP and self.group & (self.group - 1) == 0

    def seed_argument(self, device: torch.device) -> Tensor | int:
        """One seed as a number, which needs no copy to the device; several as a tensor."""
        if len(self.seeds) > 1:
            return seed_tensor(self.seeds, device)
        return signed(self.seeds[0]) if self.seeds else 0

    @property
    def dither(self) -> int:
        """The argument DITHER of kernels: see `_seed_of`."""
        return min(2, len(self.seeds))

    def options(self) -> dict[str, int | bool]:
        return {"BITS": self.bits, "BRIEF": self.brief, "DITHER": self.dither}


@triton.jit
def _ordered(words):
    """Map float bits to integers in the order of the floats, nan beyond infinity of either sign. Its own inverse."""
    return words ^ ((words >> 31) & 0x7FFFFFFF)


@triton.jit
def _seed_of(seeds, row, DITHER: tl.constexpr):
    """The seed of a row's message: int32. DITHER is 0 without dither, 1 for one seed, 2 for a seed of each row."""
    seed = seeds
    if DITHER == 2:
        seed = tl.load(seeds + row)
    return seed


@triton.jit
def _range_words(least, most, BITS: tl.constexpr, BRIEF: tl.constexpr, DITHER: tl.constexpr):
    """Bits of lo and step of groups, from the keys of their smallest and largest values (`_ordered`)."""
    word = _ordered(least)
    word = tl.where(word == -0x80000000, 0, word)  # -0 becomes 0
    smallest, largest = as_float(word), as_float(_ordered(most))
    if BRIEF:
        word = (word & -65536) + tl.where((word < 0) & ((word & 0xFFFF) != 0), 65536, 0)
    lo = as_float(word)
    levels = tl.full(lo.shape, (1 << BITS) - 1, tl.float32)
    step = tl.div_rn(largest - lo, levels)
    if BRIEF:
        step = as_float((as_word(step) + 0xFFFF) & -65536)
    step = tl.where(step < 2.0**-120, 0.0, step)
    spare = 0.5 if DITHER else 0.0
    first, last = lo - step * spare, lo + step * (levels + spare)
    limit = float("inf")
    fits = (tl.abs(largest - smallest) < limit) & (tl.abs(first) < limit) & (tl.abs(last) < limit)
    return tl.where(fits, word, NAN_WORD), tl.where(fits, as_word(step), 0)


@triton.jit
def _codes_of(values, lo, step, positions, seed, BITS: tl.constexpr, DITHER: tl.constexpr):
    """Codes of values: int32; 0 in a group whose lo is nan."""
    has_step = step > 0
    inverse = tl.where(has_step, inverse_of(tl.where(has_step, step, 1.0), tl.max(step)), 0.0)
    half = 0.5
    if DITHER:
        half = dither(positions, seed) + 0.5
    place = tl.where(lo == lo, values - lo, 0.0) * inverse + half
    return tl.minimum(tl.where(lo == lo, place, 0.0).to(tl.int32), (1 << BITS) - 1)


@triton.jit(do_not_specialize=["seeds"])
def _encode_groups(
    x,
    wire,
    seeds,
    counter,
    stride,
    hole,
    numel,
    BITS: tl.constexpr,
    DITHER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode BLOCK values of a row: BLOCK / GROUP whole groups. Program (block, row)."""
    block, row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), ceil_div(numel, GROUP)
    group, positions = group_places(block, GROUP, BLOCK)
    mask = positions < numel
    values = load_values(x + row_offset(row, stride, hole), positions, mask, counter)
    keys = _ordered(as_word(values))
    least = tl.min(tl.where(mask, keys, _LARGEST_KEY), axis=1)
    most = tl.max(tl.where(mask, keys, _SMALLEST_KEY), axis=1)
    lo, step = _range_words(least, most, BITS, True, DITHER)
    wire += message_offset(row, 4 * groups + ceil_div(numel, 64) * (8 * BITS))
    store_brief(wire, group, lo, group < groups)
    store_brief(wire + 2 * groups, group, step, group < groups)
    lo, step, seed = as_float(lo)[:, None], as_float(step)[:, None], _seed_of(seeds, row, DITHER)
    codes = tl.where(mask, _codes_of(values, lo, step, positions, seed, BITS, DITHER), 0)
    store_codes(codes, wire, 4 * groups, numel, block, BITS)


@triton.jit
def _extents(x, extents, counter, stride, hole, numel, size, pieces, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Store the keys of the smallest and largest values of GROUPS groups, of WIDTH values of each.

    Program (block, row). A group of more than WIDTH values has `pieces` programs; then GROUPS is 1.
    """
    block, row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), ceil_div(numel, size)
    group, piece = block // pieces * GROUPS + tl.arange(0, GROUPS), block % pieces
    inside = piece * WIDTH + tl.arange(0, WIDTH)
    positions = group[:, None] * size + inside[None, :]
    mask = (inside[None, :] < size) & (positions < numel)
    values = load_values(x + row_offset(row, stride, hole), positions, mask, counter)
    keys = _ordered(as_word(values))
    places = extents + (row * groups + group) * (2 * pieces) + piece
    tl.store(places, tl.min(tl.where(mask, keys, _LARGEST_KEY), axis=1), mask=group < groups)
    tl.store(places + pieces, tl.max(tl.where(mask, keys, _SMALLEST_KEY), axis=1), mask=group < groups)


@triton.jit
def _merge_extents(extents, merged, pieces, BLOCK: tl.constexpr):
    """Merge the extents of the pieces of a group. Program (group of all rows, 0)."""
    group = tl.program_id(0).to(tl.int64)
    places = extents + group * 2 * pieces
    least = tl.full([BLOCK], _LARGEST_KEY, tl.int32)
    most = tl.full([BLOCK], _SMALLEST_KEY, tl.int32)
    for start in range(0, pieces, BLOCK):
        piece = start + tl.arange(0, BLOCK)
        least = tl.minimum(least, tl.load(places + piece, mask=piece < pieces, other=_LARGEST_KEY))
        most = tl.maximum(most, tl.load(places + pieces + piece, mask=piece < pieces, other=_SMALLEST_KEY))
    tl.store(merged + 2 * group, tl.min(least, axis=0))
    tl.store(merged + 2 * group + 1, tl.max(most, axis=0))


@triton.jit
def _store_range(wire, group, words, mask, BRIEF: tl.constexpr):
    """Store numbers of ranges as bfloat16 or float32."""
    if BRIEF:
        store_brief(wire, group, words, mask)
    else:
        tl.store(wire.to(tl.pointer_type(tl.int32)) + group, words, mask=mask)


@triton.jit(do_not_specialize=["seeds"])
def _encode_with_extents(
    x,
    extents,
    wire,
    seeds,
    stride,
    hole,
    numel,
    size,
    BITS: tl.constexpr,
    BRIEF: tl.constexpr,
    DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode BLOCK values of a row whose groups have extents; store the ranges of groups that begin in the block.

    Program (block, row).
    """
    block, row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), ceil_div(numel, size)
    positions = block * BLOCK + tl.arange(0, BLOCK)
    mask, group = positions < numel, positions // size
    values = load_values(x + row_offset(row, stride, hole), positions, mask, None)
    places = extents + (row * groups + group) * 2
    least, most = tl.load(places, mask=mask, other=0), tl.load(places + 1, mask=mask, other=0)
    lo, step = _range_words(least, most, BITS, BRIEF, DITHER)
    head, begins = groups * (4 if BRIEF else 8), mask & (positions % size == 0)
    wire += message_offset(row, head + ceil_div(numel, 64) * (8 * BITS))
    _store_range(wire, group, lo, begins, BRIEF)
    _store_range(wire + head // 2, group, step, begins, BRIEF)
    seed = _seed_of(seeds, row, DITHER)
    codes = tl.where(mask, _codes_of(values, as_float(lo), as_float(step), positions, seed, BITS, DITHER), 0)
    store_codes(codes, wire, head, numel, block, BITS)


@triton.jit
def _load_range(wire, group, mask, BRIEF: tl.constexpr):
    """Load what `_store_range` stored, from any address."""
    if BRIEF:
        numbers = load_brief(wire, group, mask)
    else:
        word = tl.zeros(group.shape, tl.int32)
        for i in tl.static_range(4):
            word |= tl.load(wire + 4 * group + i, mask=mask, other=0).to(tl.int32) << (8 * i)
        numbers = as_float(word)
    return numbers


@triton.jit(do_not_specialize=["seeds"])
def _decode(
    wire,
    out,
    seeds,
    wire_stride,
    wire_hole,
    stride,
    hole,
    numel,
    size,
    BITS: tl.constexpr,
    BRIEF: tl.constexpr,
    DITHER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode BLOCK values of a row: with GROUP, BLOCK / GROUP whole groups of that size. Program (block, row)."""
    block, row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), ceil_div(numel, size)
    if GROUP > 0:  # a range is loaded once for its group
        group, positions = group_places(block, GROUP, BLOCK)
        group = group[:, None]
    else:
        positions = block * BLOCK + tl.arange(0, BLOCK)
        group = positions // size
    mask, heads = positions < numel, group < groups
    wire += row_offset(row, wire_stride, wire_hole)
    head = groups * (4 if BRIEF else 8)
    lo, step = _load_range(wire, group, heads, BRIEF), _load_range(wire + head // 2, group, heads, BRIEF)
    places = load_codes(wire + head, positions, mask, numel, BITS).to(tl.float32)
    if DITHER:
        places -= dither(positions, _seed_of(seeds, row, DITHER))
    store_values(out + row_offset(row, stride, hole), positions, places * step + lo, mask)


def encode_uniform(rows: Rows, form: UniformWire, counter: Tensor | None) -> Tensor:
    """Encode rows as messages.

    Args:
        counter: int64 without axes; the number of values that are not finite is added to it. None: nothing is counted.

    Returns:
        The messages, padded to 16 bytes: uint8, shape (rows, padded size).
    """
    wires, seeds = new_messages(rows.first, rows.count, form.size), form.seed_argument(rows.device)
    places = rows.stride, rows.hole, form.numel
    if form.brief and form.has_even_groups:
        block = max(form.group, BLOCK)
        options = {"BITS": form.bits, "DITHER": form.dither, "GROUP": form.group, "BLOCK": block}
        grid = -(-form.numel // block), rows.count
        launch(_encode_groups, grid, rows.device, rows.first, wires, seeds, counter, *places, **options)
        return wires
    extents, grid = _find_extents(rows, form, counter), (-(-form.numel // BLOCK), rows.count)
    arguments = rows.first, extents, wires, seeds, *places, form.group
    launch(_encode_with_extents, grid, rows.device, *arguments, **form.options(), BLOCK=BLOCK)
    return wires


def _find_extents(rows: Rows, form: UniformWire, counter: Tensor | None) -> Tensor:
    """The keys of the smallest and the largest value of each group: int32, shape (rows, groups, 2, 1)."""
    width = min(max(16, triton.next_power_of_2(form.group)), MAX_GROUP)
    pieces, groups = -(-form.group // width), form.groups
    at_once = 1 if pieces > 1 else max(1, BLOCK // width)
    extents = torch.empty(rows.count, groups, 2, pieces, dtype=torch.int32, device=rows.device)
    arguments = rows.first, extents, counter, rows.stride, rows.hole, form.numel, form.group, pieces
    grid = -(-groups // at_once) * pieces, rows.count
    launch(_extents, grid, rows.device, *arguments, GROUPS=at_once, WIDTH=width)
    if pieces == 1:
        return extents
    merged = torch.empty(rows.count, groups, 2, 1, dtype=torch.int32, device=rows.device)
    block = min(1024, triton.next_power_of_2(pieces))
    launch(_merge_extents, (rows.count * groups, 1), rows.device, extents, merged, pieces, BLOCK=block)
    return merged


def decode_uniform(wires: Rows, outs: Rows, form: UniformWire) -> None:
    """Decode messages into rows."""
    group = form.group if form.has_even_groups else 0
    block = max(group, BLOCK)
    grid = -(-form.numel // block), outs.count
    places = wires.stride, wires.hole, outs.stride, outs.hole, form.numel, form.group
    arguments = wires.first, outs.first, form.seed_argument(outs.device), *places
    launch(_decode, grid, outs.device, *arguments, **form.options(), GROUP=group, BLOCK=block)
