"""Functions that kernels share: values, bfloat16 scales, sums in a fixed order, dither, and bit planes of codes.

Every operation is one rounding of float32. No kernel has a fused multiply-add (`launch`), or a division by a
reciprocal (`div_rn`, `inverse_of`).
"""

from __future__ import annotations

import triton
import triton.language as tl

NAN_WORD = tl.constexpr(0x7FC00000)
"""The bits of the nan that native code writes. Arithmetic on a GPU makes 0x7FFFFFFF."""


@triton.jit
def ceil_div(count, size):
    """The number of groups, the last of which may be smaller: int64, so that offsets of bytes do not overflow."""
    return (tl.cast(count, tl.int64) + (size - 1)) // size


@triton.jit
def group_places(block, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The whole groups of a program's BLOCK values, and the positions of their values: [groups], [groups, GROUP]."""
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    return group, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def row_offset(row, stride, hole):
    """The distance of a row from the first one. Rows from `hole` on lie one stride further."""
    return (row + (row >= hole).to(tl.int64)) * stride


@triton.jit
def as_word(values):
    """The bits of float32 values: int32."""
    return values.to(tl.int32, bitcast=True)


@triton.jit
def as_float(words):
    """The float32 values of bits."""
    return words.to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(values, largest):
    """1 / x of positive float32 up to `largest`, rounded once.

    Above 2^126 it is denormal, which `div_rn` of Triton 3.2 to 3.5 flushes to 0. Only a program with such a value uses
    float64, which is slow on many GPUs.
    """
    if largest > 2.0**126:
        inverse = (1.0 / values.to(tl.float64)).to(tl.float32)
    else:
        inverse = tl.div_rn(tl.full(values.shape, 1.0, tl.float32), values)
    return inverse


@triton.jit
def load_values(x, offsets, mask, counter):
    """Load values as float32, 0 where the mask is False. Add the number of nan and infinities to a counter, if any.

    A value of float64 is counted before it is rounded, as it may exceed float32.
    """
    values = tl.load(x + offsets, mask=mask, other=0.0)
    if x.dtype.element_ty == tl.bfloat16:
        values = as_float(values.to(tl.int16, bitcast=True).to(tl.int32) << 16)  # the interpreter drops denormals else
    elif x.dtype.element_ty != tl.float64:
        values = values.to(tl.float32)
    if counter is not None:
        count = tl.sum(tl.where(tl.abs(values) < float("inf"), 0, 1))
        tl.atomic_add(counter, count.to(tl.int64), mask=count > 0)
    return values.to(tl.float32)


@triton.jit
def store_values(out, offsets, values, mask):
    """Store float32 values as the dtype of `out`, rounded to nearest, halves to even.

    Finite values stay finite: those beyond the range become its largest value. All nan have the bits of `NAN_WORD`.
    """
    is_nan = values != values
    if out.dtype.element_ty == tl.bfloat16:
        word = as_word(values)
        magnitude = word & 0x7FFFFFFF
        finite = tl.minimum(magnitude, 0x7F7F0000)
        brief = tl.where(magnitude == 0x7F800000, 0x7F80, (finite + 0x7FFF + ((finite >> 16) & 1)) >> 16)
        brief = tl.where(is_nan, 0x7FC0, brief | ((word >> 16) & 0x8000))
        tl.store(out + offsets, brief.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    elif out.dtype.element_ty == tl.float16:
        held = tl.minimum(tl.maximum(tl.where(is_nan, 0.0, values), -65504.0), 65504.0)
        half = tl.where(tl.abs(values) == float("inf"), values, held).to(tl.float16).to(tl.int16, bitcast=True)
        tl.store(out + offsets, tl.where(is_nan, 0x7E00, half).to(tl.int16).to(tl.float16, bitcast=True), mask=mask)
    else:
        word = tl.where(is_nan, NAN_WORD, as_word(values))
        tl.store(out + offsets, as_float(word).to(out.dtype.element_ty), mask=mask)


@triton.jit
def nearest_brief(values):
    """Round positive float32 to the nearest bfloat16, halves to even, as float32. No value is nan."""
    word = as_word(values)
    return as_float((word + 0x7FFF + ((word >> 16) & 1)) & -65536)


@triton.jit
def store_brief(data, places, words, mask):
    """Store the upper halves of float32 bits, low byte first: data may lie at any address."""
    tl.store(data + 2 * places, (words >> 16).to(tl.uint8), mask=mask)
    tl.store(data + 2 * places + 1, (words >> 24).to(tl.uint8), mask=mask)


@triton.jit
def load_brief(data, places, mask):
    """Load what `store_brief` stored, as float32."""
    low = tl.load(data + 2 * places, mask=mask, other=0).to(tl.int32)
    high = tl.load(data + 2 * places + 1, mask=mask, other=0).to(tl.int32)
    return as_float((low << 16) | (high << 24))


@triton.jit
def halved_sum(values, STEPS: tl.constexpr):
    """Sum rows of 2^STEPS values in the order of native code: add the halves of a row until one value is left."""
    for _ in tl.static_range(STEPS):
        values = tl.sum(tl.reshape(values, [values.shape[0], 2, values.shape[1] // 2]), axis=1)
    return tl.reshape(values, [values.shape[0]])


@triton.jit
def dither(positions, seed):
    """Hashes of positions: odd multiples of 1/512 in (-1/2, 1/2), as codec/lattice.py has them."""
    word = positions.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    word = (word ^ (word >> 16)) >> 24
    return word.to(tl.int32).to(tl.float32) * (1 / 256) + (1 / 512 - 0.5)


@triton.jit
def message_offset(row, size):
    """The distance of the message of a row from the first one: messages lie at multiples of 16 bytes."""
    return row * ((size + 15) // 16 * 16)


@triton.jit
def store_plane(codes, planes, first, tiles, WIDTH: tl.constexpr, START: tl.constexpr):
    """Store bits START to START + WIDTH of codes, shape (tiles, 64): byte j has codes j, j + 8 WIDTH, ... of a tile."""
    NUM: tl.constexpr = codes.shape[0]
    parts = tl.reshape((codes >> START) & ((1 << WIDTH) - 1), [NUM, 8 // WIDTH, 8 * WIDTH])
    packed = tl.sum(parts << (tl.arange(0, 8 // WIDTH) * WIDTH)[None, :, None], axis=1)
    tile = first + tl.arange(0, NUM)[:, None]
    places = tile * (8 * WIDTH) + tl.arange(0, 8 * WIDTH)[None, :]
    tl.store(planes + places, packed.to(tl.uint8), mask=tile < tiles)


@triton.jit
def store_codes(codes, wire, head, numel, block, BITS: tl.constexpr):
    """Pack codes of a block, int32, 0 beyond the last value, into the planes after the head of a message.

    The program of block 0 fills the message up with zeros to a multiple of 16 bytes.
    """
    NUM: tl.constexpr = codes.numel // 64
    codes, planes = tl.reshape(codes, [NUM, 64]), wire + head
    first, tiles = block * NUM, ceil_div(numel, 64)
    if BITS == 8:
        tile = first + tl.arange(0, NUM)[:, None]
        tl.store(planes + tile * 64 + tl.arange(0, 64)[None, :], codes.to(tl.uint8), mask=tile < tiles)
    if BITS & 4:
        store_plane(codes, planes, first, tiles, 4, 0)
    if BITS & 2:
        store_plane(codes, planes + (BITS & 4) * 8 * tiles, first, tiles, 2, BITS & 4)
    if BITS & 1:
        store_plane(codes, planes + (BITS & 6) * 8 * tiles, first, tiles, 1, BITS & 6)
    end = tiles * (8 * BITS)
    padded = message_offset(1, head + end) - head
    places = end + tl.arange(0, 16)
    tl.store(planes + places, tl.zeros([16], tl.uint8), mask=places < tl.where(block == 0, padded, 0))


@triton.jit
def load_plane(planes, places, mask, WIDTH: tl.constexpr, START: tl.constexpr):
    """Load bits START to START + WIDTH of the codes at these places; neighbours share a byte's load in the cache."""
    inside = places % 64
    byte = tl.load(planes + (places // 64) * (8 * WIDTH) + inside % (8 * WIDTH), mask=mask, other=0).to(tl.int32)
    shift = (inside // (8 * WIDTH) * WIDTH).to(tl.int32)
    return ((byte >> shift) & ((1 << WIDTH) - 1)) << START


@triton.jit
def load_codes(planes, places, mask, numel, BITS: tl.constexpr):
    """Unpack the codes at these places of a message of `numel` values: int32."""
    tiles = ceil_div(numel, 64)
    codes = tl.zeros(places.shape, tl.int32)
    if BITS == 8:
        codes += tl.load(planes + places, mask=mask, other=0).to(tl.int32)
    if BITS & 4:
        codes += load_plane(planes, places, mask, 4, 0)
    if BITS & 2:
        codes += load_plane(planes + (BITS & 4) * 8 * tiles, places, mask, 2, BITS & 4)
    if BITS & 1:
        codes += load_plane(planes + (BITS & 6) * 8 * tiles, places, mask, 1, BITS & 6)
    return codes
