"""A kernel that adds up the rows of all ranks in their order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shrinkpoint.device.launch import BLOCK, launch
from shrinkpoint.device.rows import Rows


@triton.jit
def _load_row(own, others, positions, mask, row, rank, stride, hole, out):
    """Load the values of one rank in the dtype of the sum."""
    if row == rank:
        values = tl.load(own + positions, mask=mask, other=0.0).to(out.dtype.element_ty)
    else:
        index = row - (row > rank).to(tl.int32)
        place = (index + (index >= hole).to(tl.int32)).to(tl.int64) * stride
        values = tl.load(others + place + positions, mask=mask, other=0.0).to(out.dtype.element_ty)
    return values


@triton.jit(do_not_specialize=["rank", "hole"])
def _sum_rows(own, others, out, rank, count, stride, hole, numel, BLOCK: tl.constexpr):
    """Add BLOCK values of `count` rows, of which the one of `rank` is `own`. Program (block, 0)."""
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = positions < numel
    total = _load_row(own, others, positions, mask, 0, rank, stride, hole, out)
    for row in range(1, count):
        total += _load_row(own, others, positions, mask, row, rank, stride, hole, out)
    tl.store(out + positions, total, mask=mask)


def sum_rows(own: Tensor, others: Rows, rank: int, dtype: torch.dtype) -> Tensor:
    """Add a row of this rank, 1-d and contiguous, and the rows of all other ranks, from rank 0 on.

    Returns:
        The sum, of the shape of `own` and the dtype float32 or float64.
    """
    out = torch.empty(own.numel(), dtype=dtype, device=own.device)
    grid = -(-own.numel() // BLOCK), 1
    places = rank, others.count + 1, others.stride, others.hole, own.numel()
    launch(_sum_rows, grid, own.device, own, others.first, out, *places, BLOCK=BLOCK)
    return out
