"""Assigns the code of the nearest center to every value; the last step of codebook quantizers."""

from __future__ import annotations

import torch
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import MAX_CODES
from shrinkpoint.errors import PolicyError

CPU_BLOCK = 1 << 15
"""Values per block and thread on the CPU, so that temporaries stay in the cache."""
MAX_LINEAR_CENTERS = 16
"""Up to this many centers, the CPU compares with each in turn; measured twice as fast as a binary search."""


def assign(tensor: Tensor, centers: Tensor, first_code: int) -> Tensor:
    """Return the code of the nearest center, `first_code` plus its index; ties go to the lower center.

    The result is exact: values are compared with midpoints rounded down to float32, and a float32 lies above a midpoint
    exactly if it lies above the rounded one. Of equal centers the first is used.

    Args:
        tensor: bfloat16, float16 or float32; finite; any shape and strides.
        centers: ascending, finite; on any device.
        first_code: 0, 1 or 2, as in `CodebookTensor`.

    Returns:
        uint8, contiguous, of the shape of `tensor` and on its device.

    Raises:
        PolicyError: there is no center, or there are more than codes.
    """
    check_bins(centers.numel(), first_code)
    distinct, counts = torch.unique_consecutive(centers.to("cpu", torch.float32), return_counts=True)
    bounds, flat = _midpoints(distinct), tensor.detach().reshape(-1)
    cells = _assign_cpu(flat, bounds) if flat.device.type == "cpu" else _assign_gpu(flat, bounds.to(flat.device))
    if distinct.numel() < centers.numel():
        firsts = (counts.cumsum(0) - counts).to(device=flat.device, dtype=torch.uint8)
        cells = firsts.index_select(0, cells.to(torch.int32))
    return cells.add_(first_code).reshape(tensor.shape)


def check_bins(bins: int, first_code: int) -> None:
    """Check that `bins` centers after `first_code` codes of fixed meaning fit into a byte.

    Raises:
        PolicyError: they do not.
    """
    max_bins = MAX_CODES - first_code
    if not 1 <= bins <= max_bins:
        raise PolicyError("bins", found=f"{bins}", expected=f"1 to {max_bins}", do="ask for a number in that range")


def _midpoints(centers: Tensor) -> Tensor:
    """Return the midpoints of neighbouring centers, rounded down to float32."""
    wide = centers.double()
    exact = (wide[1:] + wide[:-1]) / 2
    nearest = exact.float()
    below = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf))
    return torch.where(nearest.double() > exact, below, nearest)


def _assign_cpu(flat: Tensor, bounds: Tensor) -> Tensor:
    out = torch.zeros(flat.numel(), dtype=torch.uint8)
    count = _assign_linear if bounds.numel() < MAX_LINEAR_CENTERS else _assign_searchsorted
    size = CPU_BLOCK * torch.get_num_threads()
    for values, cells in zip(torch.split(flat, size), torch.split(out, size), strict=True):
        count(values.float(), bounds, cells)
    return out


def _assign_linear(values: Tensor, bounds: Tensor, cells: Tensor) -> None:
    above = torch.empty(values.shape, dtype=torch.bool)
    for bound in bounds.tolist():
        torch.gt(values, bound, out=above)
        cells.add_(above.view(torch.uint8))


def _assign_searchsorted(values: Tensor, bounds: Tensor, cells: Tensor) -> None:
    cells.copy_(torch.bucketize(values, bounds, out_int32=True))


def _assign_gpu(flat: Tensor, bounds: Tensor) -> Tensor:
    return torch.bucketize(flat.float(), bounds, out_int32=True).to(torch.uint8)
