"""Kernels that add rows: residuals before a message and after it, and the rows of all ranks in their order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shrinkpoint.device.arithmetic import load_values, row_offset
from shrinkpoint.device.rows import BLOCK, Rows, launch


@triton.jit
def _add_residuals(
    x,
    residuals,
    out,
    counter,
    stride,
    hole,
    residual_stride,
    residual_hole,
    numel,
    decay,
    BLOCK: tl.constexpr,
):
    """Store BLOCK values of decay times the residual plus the row. Program (block, row)."""
    block, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    positions = block * BLOCK + tl.arange(0, BLOCK)
    mask = positions < numel
    residual = tl.load(residuals + row_offset(row, residual_stride, residual_hole) + positions, mask=mask, other=0.0)
    values = load_values(x + row_offset(row, stride, hole), positions, mask, counter)
    tl.store(out + row * numel + positions, residual * decay + values, mask=mask)


@triton.jit
def _store_residuals(sums, decoded, residuals, stride, hole, numel, BLOCK: tl.constexpr):
    """Store BLOCK values of what a message lost, 0 where that is not finite. Program (block, row)."""
    block, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    positions = block * BLOCK + tl.arange(0, BLOCK)
    mask, inside = positions < numel, row * numel
    lost = tl.load(sums + inside + positions, mask=mask, other=0.0)
    lost -= load_values(decoded + inside, positions, mask, None)
    lost = tl.where(tl.abs(lost) < float("inf"), lost, 0.0)
    tl.store(residuals + row_offset(row, stride, hole) + positions, lost, mask=mask)


def add_residuals(rows: Rows, residuals: Rows, decay: float, counter: Tensor | None) -> Tensor:
    """Add rows and their decayed residuals: float32, shape (rows, values). Count values that are not finite."""
    out = torch.empty(rows.count, rows.numel, dtype=torch.float32, device=rows.device)
    places = rows.stride, rows.hole, residuals.stride, residuals.hole, rows.numel
    arguments = rows.first, residuals.first, out, counter, *places, decay
    launch(_add_residuals, (-(-rows.numel // BLOCK), rows.count), rows.device, *arguments, BLOCK=BLOCK)
    return out


def store_residuals(sums: Tensor, decoded: Tensor, residuals: Rows) -> None:
    """Store `sums - decoded`, both of shape (rows, values), as residuals, which are float32."""
    grid = -(-residuals.numel // BLOCK), residuals.count
    arguments = sums, decoded, residuals.first, residuals.stride, residuals.hole, residuals.numel
    launch(_store_residuals, grid, residuals.device, *arguments, BLOCK=BLOCK)


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
