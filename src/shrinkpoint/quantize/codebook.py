"""Quantizes to the centers of a codebook; computes centers by weighted k-means (arXiv 2306.11800, "Quantization").

The histogram of a sketch is clustered, which has a few thousand cells however large the tensor. `kmeans_codebook`
computes centers and `quantize_to_codebook` codes, so that a search can share the centers.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES, CodebookTensor
from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.statistics import HistogramArray, to_float64

CPU_BLOCK = 1 << 15  # Values per block and thread on the CPU, so that temporaries stay in the cache
MAX_LINEAR_CENTERS = 16
"""Up to this many centers, the CPU compares with each in turn; measured twice as fast as a binary search."""
SIGMA = 0.2  # Weight of density against magnitude; the paper's choice for all its experiments
MIN_CENTER_MOVE = 0.01  # Previous centers are reused unchanged if none would move by more than this share
MAX_REUSED_ERROR = 12.0
"""Previous centers whose mean squared error exceeds this times the variance over `bins**2` are compared with new ones.
Optimal centers have 2.7 for Gaussian values (Panter and Dite, 1951), and 9 for Laplacian ones."""
_Array: TypeAlias = npt.NDArray[np.float64]


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
    if flat.device.type == "cpu":
        cells = _count_bounds_below(flat, bounds)
    else:
        cells = torch.bucketize(flat.float(), bounds.to(flat.device), out_int32=True).to(torch.uint8)
    if distinct.numel() < centers.numel():
        firsts = (counts.cumsum(0) - counts).to(device=flat.device, dtype=torch.uint8)
        cells = firsts.index_select(0, cells.to(torch.int32))
    return cells.add_(first_code).reshape(tensor.shape)


def check_bins(bins: int, first_code: int) -> None:
    """Raise PolicyError unless `bins` centers after `first_code` codes of fixed meaning fit into a byte."""
    max_bins = MAX_CODES - first_code
    if not 1 <= bins <= max_bins:
        raise PolicyError("bins", found=f"{bins}", expected=f"1 to {max_bins}", do="pass a number in that range")


def _midpoints(centers: Tensor) -> Tensor:
    """Midpoints of neighbouring centers, rounded down to float32."""
    wide = centers.double()
    exact = (wide[1:] + wide[:-1]) / 2
    nearest = exact.float()
    below = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf))
    return torch.where(nearest.double() > exact, below, nearest)


def _count_bounds_below(flat: Tensor, bounds: Tensor) -> Tensor:
    """Number of bounds that each value exceeds, uint8, block by block on the CPU."""
    counts = torch.zeros(flat.numel(), dtype=torch.uint8)
    size = CPU_BLOCK * torch.get_num_threads()
    for block, block_counts in zip(torch.split(flat, size), torch.split(counts, size), strict=True):
        values = block.float()
        if bounds.numel() >= MAX_LINEAR_CENTERS:
            block_counts.copy_(torch.bucketize(values, bounds, out_int32=True))
            continue
        above = torch.empty(values.shape, dtype=torch.bool)
        for bound in bounds.tolist():
            torch.gt(values, bound, out=above)
            block_counts.add_(above.view(torch.uint8))
    return counts


def sample_weights(values: HistogramArray, counts: HistogramArray, sigma: float = SIGMA) -> Tensor:
    """Return the weight of each cell: `sigma * share of counts + (1 - sigma) * share of magnitudes`.

    By density alone the centers crowd near zero; the magnitudes move some to the large weights. The paper's `Norm` is
    taken as division by the sum of counts or of magnitudes. Where all are zero, shares are equal.

    Args:
        values: the value of each cell of the histogram, 1-d, finite.
        counts: the count of each cell, not negative.
        sigma: weight of the density, 0 to 1; 1 is density alone, 0 magnitude alone.

    Returns:
        float64, on the CPU; sums to one.

    Raises:
        PolicyError: `sigma` is not from 0 to 1.
    """
    if not 0 <= sigma <= 1:
        raise PolicyError("sigma", found=f"{sigma}", expected="0 to 1", do="pass 0.2, the default")
    return sigma * _normalize(to_float64(counts)) + (1 - sigma) * _normalize(to_float64(values).abs())


def kmeans_codebook(
    values: HistogramArray,
    counts: HistogramArray,
    bins: int,
    *,
    sigma: float = SIGMA,
    seed: int = 0,
    init: Tensor | None = None,
    iterations: int = 300,
    tolerance: float = 1e-6,
    squared: bool = True,
) -> Tensor:
    """Compute centers for a histogram by weighted k-means++ and Lloyd's iteration; deterministic.

    With `init` there is no random start: the iteration begins at the centers of the previous checkpoint, so that codes
    keep their meaning, and few of them change between checkpoints. If no center then moves by `MIN_CENTER_MOVE` of its
    magnitude, or of the gap to its nearer neighbour if that is larger, the previous centers are returned unchanged.

    Args:
        values: the value of each cell of the histogram, 1-d, ascending, finite; cells without counts are ignored.
        counts: the count of each cell, not negative.
        bins: number of centers.
        sigma: weight of density against magnitude, as in `sample_weights`.
        seed: seed of the random start.
        init: `bins` ascending centers to start from; None: a random start.
        iterations, tolerance: Lloyd stops after `iterations`, or when the cost falls by less than the share
            `tolerance`. On a sketch's histogram, 20 to 100 iterations converge.
        squared: draw a start by squared distance, as k-means++ does; if False, by distance, as the paper prints.

    Returns:
        float32 of shape (bins,), ascending and finite, on the CPU. Where there are fewer distinct values than `bins`,
        the largest is repeated; without values all are zero.

    Raises:
        PolicyError: there are too many `bins` for a byte, or `init` has another number of centers.
    """
    check_bins(bins, RESERVED_CODES)
    if init is not None and init.numel() != bins:
        raise PolicyError("init", found=f"{init.numel()} centers", expected=f"{bins}", do="leave init out")
    previous = None if init is None else to_float64(init).reshape(-1)
    present = to_float64(counts) > 0
    cells, cell_counts = to_float64(values)[present], to_float64(counts)[present]
    points, sizes, weights = cells.numpy(), cell_counts.numpy(), sample_weights(cells, cell_counts, sigma).numpy()
    if not points.size:
        return torch.zeros(bins, dtype=torch.float32) if previous is None else previous.float()

    def random_start() -> _Array:
        return _native.kmeans_plus_plus(points, weights, bins, seed=seed, squared=squared)

    def iterate(start: _Array) -> Tensor:
        return to_float64(_native.kmeans(points, weights, start, iterations=iterations, tolerance=tolerance))

    centers = iterate(random_start() if previous is None else previous.numpy())
    if previous is not None and _is_poor_fit(points, sizes, centers):
        fresh = iterate(random_start())
        if 2 * _mean_squared_error(points, sizes, fresh) < _mean_squared_error(points, sizes, centers):
            previous, centers = None, fresh  # the previous centers are of other weights
    if previous is not None and _max_center_move(previous, centers) < MIN_CENTER_MOVE:
        return previous.float()
    limit = torch.finfo(torch.float32).max  # a center may lie above it, as the middle of the last bucket does
    return centers.clamp(-limit, limit).float()


def _normalize(values: Tensor) -> Tensor:
    total = values.sum()
    return values / total if total > 0 else torch.full_like(values, 1 / max(1, values.numel()))


def _mean_squared_error(points: _Array, counts: _Array, centers: Tensor) -> float:
    levels = centers.sort().values.numpy()
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, points)]
    return float((counts * (points - nearest) ** 2).sum() / counts.sum())


def _is_poor_fit(points: _Array, counts: _Array, centers: Tensor) -> bool:
    """True if the error is so large, for this number of centers, that others should be tried: `MAX_REUSED_ERROR`."""
    variance = _mean_squared_error(
        points, counts, torch.tensor([np.average(points, weights=counts)], dtype=torch.float32)
    )
    return _mean_squared_error(points, counts, centers) > MAX_REUSED_ERROR * variance / centers.numel() ** 2


def _max_center_move(previous: Tensor, centers: Tensor) -> float:
    """The largest move of a center, as a share of its magnitude or of the gap to its nearer neighbour."""
    no_gap = torch.tensor([torch.inf if previous.numel() > 1 else 0.0], dtype=torch.float64)
    gaps = previous.diff()
    scale = torch.maximum(previous.abs(), torch.minimum(torch.cat([no_gap, gaps]), torch.cat([gaps, no_gap])))
    moves = (centers - previous).abs()
    return float(torch.where(moves > 0, moves / scale, moves).max())


def quantize_to_codebook(
    tensor: Tensor,
    centers: Tensor,
    *,
    pruned: Tensor | None = None,
    protected: Tensor | None = None,
    noise: Tensor | None = None,
    zero: bool | None = None,
) -> CodebookTensor:
    """Quantize a tensor to the nearest centers, with pruned values as zero and protected ones in bfloat16.

    Protected values are rounded to the nearest bfloat16, ties to even, within 1/256 of their magnitude; those that
    would become infinite in `tensor`'s dtype become the largest bfloat16 below. Centers beyond the dtype's range are
    clamped.

    Args:
        tensor: bfloat16, float16 or float32; finite; any shape and strides.
        centers: ascending and finite, as from `kmeans_codebook`.
        pruned, protected: bool, of the shape of `tensor`, on its device. A value that is both is protected.
        noise: float32, of the shape of `tensor`, uniform in [0, 1): values are rounded to the center below or above at
            random, so that the expected center is the value, and `pruned` masks nothing; None: to the nearest.
        zero: with `noise`, whether zero is a level; None: if anything is pruned.

    Raises:
        PolicyError: a mask has another shape, or there are too many centers.
    """
    limit = torch.finfo(tensor.dtype).max
    centers = centers.detach().to("cpu", torch.float32).clamp(-limit, limit)
    exact = torch.empty(0, dtype=torch.bfloat16, device=tensor.device)
    if noise is not None:
        zero = (pruned is not None and bool(pruned.any())) if zero is None else zero
        codes = _assign_stochastic(tensor, centers, noise, zero=zero)
    else:
        codes = assign(tensor, centers, RESERVED_CODES)
        if pruned is not None:
            codes.masked_fill_(_check_mask("pruned", pruned, tensor), 0)
    if protected is not None:
        codes.masked_fill_(_check_mask("protected", protected, tensor), 1)
        max_exact = 65280.0 if tensor.dtype == torch.float16 else torch.finfo(torch.bfloat16).max
        exact = tensor.detach()[protected].to(torch.float32).clamp(-max_exact, max_exact).to(torch.bfloat16)
    return CodebookTensor(codes, centers, exact, RESERVED_CODES)


def _assign_stochastic(tensor: Tensor, centers: Tensor, noise: Tensor, *, zero: bool) -> Tensor:
    """Codes of the level below or above every value, at random; values beyond the ends get the end.

    This matters right after a restore, when all values lie on levels: rounding to the nearest would undo most updates
    of the training, whereas stochastic rounding keeps them on average.
    """
    codes = torch.arange(RESERVED_CODES, RESERVED_CODES + centers.numel(), dtype=torch.uint8)
    levels = centers
    if zero:
        levels, order = torch.cat([levels, levels.new_zeros(1)]).sort(stable=True)
        codes = torch.cat([codes, torch.zeros(1, dtype=torch.uint8)])[order]
    levels, flat = levels.to(tensor.device), tensor.detach().reshape(-1).to(torch.float32)
    below = torch.bucketize(flat, levels, right=True, out_int32=True).sub_(1).clamp_(0, max(levels.numel() - 2, 0))
    above = (below + 1).clamp_(max=levels.numel() - 1)
    low, high = levels.index_select(0, below), levels.index_select(0, above)
    up = noise.reshape(-1) * (high - low) < flat - low
    return codes.to(tensor.device).index_select(0, torch.where(up, above, below)).reshape(tensor.shape)


def _check_mask(name: str, mask: Tensor, tensor: Tensor) -> Tensor:
    if mask.shape == tensor.shape:
        return mask
    found, expected = f"a mask of shape {list(mask.shape)}", f"{list(tensor.shape)}, that of the tensor"
    raise PolicyError(name, found=found, expected=expected, do="pass one bool for each value")
