"""Kernels for the codes of ascending indices that `TopK` sends: fields of bits, and bitmaps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shrinkpoint.device.rows import BLOCK, launch

MAX_INDEX = 1 << 31
"""Kernels code indices below this number."""


@triton.jit
def _encode_indices(
    indices,
    words,
    k,
    width,
    start,
    FIELDS: tl.constexpr,
    BITMAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set the bits of BLOCK of k indices in a code of zeros, seen as int32. Program (block, 0).

    FIELDS: the lower `width` bits of index i lie at bit i * width. BITMAP: from bit `start` on, a bit is set for the
    index; with fields, for its upper bits plus i.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < k
    index = tl.load(indices + i, mask=mask, other=0)
    if FIELDS:
        place = i * width
        field = (index & ((tl.full(index.shape, 1, tl.int64) << width) - 1)) << (place % 32)
        tl.atomic_or(words + place // 32, field.to(tl.int32), mask=mask)
        tl.atomic_or(words + place // 32 + 1, (field >> 32).to(tl.int32), mask=mask & (field >> 32 != 0))
    if BITMAP:
        place = start + ((index >> width) + i if FIELDS else index)
        bit = tl.full(index.shape, 1, tl.int64) << (place % 32)
        tl.atomic_or(words + place // 32, bit.to(tl.int32), mask=mask)


@triton.jit
def _load_field(code, i, width, mask):
    """Load the field i of a code: up to 31 bits, from five bytes."""
    field = tl.zeros(i.shape, tl.int64)
    place = i * width
    for byte in tl.static_range(5):
        inside = mask & (place // 8 + byte < (place + width + 7) // 8)
        field |= tl.load(code + place // 8 + byte, mask=inside, other=0).to(tl.int64) << (8 * byte)
    return (field >> (place % 8)) & ((tl.full(i.shape, 1, tl.int64) << width) - 1)


@triton.jit
def _unpack_fields(code, indices, k, width, BLOCK: tl.constexpr):
    """Decode BLOCK of k fields of `width` bits. Program (block, 0)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(indices + i, _load_field(code, i, width, i < k), mask=i < k)


@triton.jit
def _unpack_bits(bitmap, bits, count, BLOCK: tl.constexpr):
    """Store BLOCK bits of a bitmap as bytes. Program (block, 0)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(bitmap + place // 8, mask=place < count, other=0).to(tl.int32)
    tl.store(bits + place, ((byte >> (place % 8).to(tl.int32)) & 1).to(tl.uint8), mask=place < count)


@triton.jit
def _place_indices(code, bits, ranks, indices, k, width, count, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the indices of those of BLOCK bits that are set, in the order of their ranks, if k of all bits are set.

    Program (block, 0).
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < tl.where(tl.load(ranks + count - 1) == k, count, 0)
    i = tl.load(ranks + place, mask=mask, other=1).to(tl.int64) - 1
    is_set = mask & (tl.load(bits + place, mask=mask, other=0) != 0)
    index = place
    if FIELDS:
        index = ((place - i) << width) | _load_field(code, i, width, is_set)
    tl.store(indices + i, index, mask=is_set)


def encode_indices(indices: Tensor, size: int, width: int, fields: bool, start: int | None) -> Tensor:
    """Encode ascending indices below `MAX_INDEX` as `size` bytes.

    Args:
        indices: int64, 1-d, contiguous.
        fields: the lower `width` bits of each index are sent.
        start: the first bit of a bitmap of the indices or, with fields, of their upper bits; None for no bitmap.
    """
    words = torch.zeros(size // 4 + 2, dtype=torch.int32, device=indices.device)
    options = {"FIELDS": fields, "BITMAP": start is not None, "BLOCK": BLOCK}
    grid = -(-indices.numel() // BLOCK), 1
    launch(_encode_indices, grid, indices.device, indices, words, indices.numel(), width, start or 0, **options)
    return words.view(torch.uint8)[:size]


def decode_fields(code: Tensor, k: int, width: int) -> Tensor:
    """Decode k fields of `width` bits: int64."""
    indices = torch.empty(k, dtype=torch.int64, device=code.device)
    launch(_unpack_fields, (-(-k // BLOCK), 1), code.device, code, indices, k, width, BLOCK=BLOCK)
    return indices


def decode_bitmap(code: Tensor, k: int, width: int, fields: bool, start: int) -> Tensor:
    """Decode k indices from a bitmap that begins at byte `start`: int64; all are `MAX_INDEX` if other bits are set."""
    count = 8 * (code.numel() - start)
    bits = torch.empty(count, dtype=torch.uint8, device=code.device)
    grid = -(-count // BLOCK), 1
    launch(_unpack_bits, grid, code.device, code[start:], bits, count, BLOCK=BLOCK)
    ranks = bits.cumsum(0, dtype=torch.int32)
    indices = torch.full((k,), MAX_INDEX, dtype=torch.int64, device=code.device)
    arguments = code, bits, ranks, indices, k, width, count
    launch(_place_indices, grid, code.device, *arguments, FIELDS=fields, BLOCK=BLOCK)
    return indices
