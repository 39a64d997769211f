"""Non-uniform quantization: weighted k-means on a histogram (arXiv 2306.11800, "Quantization").

What is clustered is a sketch's histogram, a few thousand values however large the tensor. Stages, so that a search can
share the earlier ones: `kmeans_codebook` makes centers, `quantize` symbols.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.codebook_tensor import RESERVED_CODES, CodebookTensor
from shrinkpoint.errors import PolicyError
from shrinkpoint.quantize.assign import assign, check_bins
from shrinkpoint.quantize.sketch import HistogramArray, to_float64

SIGMA = 0.2
"""What density weighs against magnitude; the paper's choice for all its experiments."""
MIN_CENTER_MOVE = 0.01
"""Previous centers stay as they are when none would move by more than this share."""
MAX_REUSED_ERROR = 12.0
"""Of the variance, over the square of how many centers there are: an error above it makes previous centers doubtful.
The best ones leave 2.7 of it where values are Gaussian (Panter and Dite, 1951), and 9 where they are Laplacian."""


def sample_weights(values: HistogramArray, counts: HistogramArray, sigma: float = SIGMA) -> Tensor:
    """What each value of a histogram weighs: `sigma * share of counts + (1 - sigma) * share of magnitudes`.

    By density alone the centers crowd near zero; the magnitudes move some to the large weights. The paper's `Norm` is
    taken as a division by the sum, of the magnitudes where values have signs. Where all are zero, shares are equal.

    Args:
        values: one of each cell of the histogram, finite.
        counts: as many, not negative.
        sigma: 1 is density alone, 0 magnitude alone.

    Returns:
        float64, on the CPU; sums to one.

    Raises:
        PolicyError: `sigma` is not from 0 to 1.
    """
    if not 0 <= sigma <= 1:
        raise PolicyError("sigma", found=f"{sigma}", expected="0 to 1", do="take the default, 0.2")
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
    """Centers for a histogram, by weighted k-means++ and Lloyd's iteration; the same for the same arguments.

    With `init` there is no random start: the iteration goes on from the centers of the previous checkpoint, so that
    codes keep their meaning, and hardly any of them change between checkpoints. If no center then moves by `FROZEN` of
    its magnitude, or of the gap to its nearer neighbour where that is more, the previous ones are returned unchanged.

    Args:
        values: ascending, finite; those without counts take no part.
        counts: as many, not negative.
        bins: how many centers.
        sigma: see `weights_of`.
        seed: of the random start.
        init: ascending; `bins` of them.
        iterations, tolerance: Lloyd stops after so many, or when the cost falls by less than that share. On a sketch's
            histogram centers come to rest after 20 to 100; if they did not, a warm start would move them again.
        squared: draw a start by the squared distance, which the theory covers; if not, by the distance, as printed.

    Returns:
        float32 of shape (bins,), ascending and finite, on the CPU. Where there are fewer distinct values than `bins`,
        the largest is repeated; without values all are zero.

    Raises:
        PolicyError: `bins` do not fit into a byte beside the codes of fixed meaning, or `init` has another number.
    """
    check_bins(bins, RESERVED_CODES)
    previous = None if init is None else _check_init(init, bins)
    points, held, weights = _nonempty_cells(values, counts, sigma)
    if not points.size:
        return torch.zeros(bins) if previous is None else previous.float()
    if previous is None:
        begin = _native.kmeans_plus_plus(points, weights, bins, seed=seed, squared=squared)
    else:
        begin = previous.numpy()
    found = to_float64(_native.kmeans(points, weights, begin, iterations=iterations, tolerance=tolerance))
    if previous is not None and _cost(points, held, found) > MAX_REUSED_ERROR * _variance(points, held) / bins**2:
        begin = _native.kmeans_plus_plus(points, weights, bins, seed=seed, squared=squared)
        fresh = to_float64(_native.kmeans(points, weights, begin, iterations=iterations, tolerance=tolerance))
        if 2 * _cost(points, held, fresh) < _cost(points, held, found):  # those before were of other weights
            previous, found = None, fresh
    if previous is not None and _max_center_move(previous, found) < MIN_CENTER_MOVE:
        return previous.float()
    limit = torch.finfo(torch.float32).max  # a representative may lie above the largest value
    return found.clamp(-limit, limit).float()


def quantize_to_codebook(
    tensor: Tensor,
    centers: Tensor,
    *,
    pruned: Tensor | None = None,
    protected: Tensor | None = None,
    noise: Tensor | None = None,
    zero: bool | None = None,
) -> CodebookTensor:
    """The nearest center for every value, except where it is pruned (zero) or protected (kept in bfloat16).

    Protected values are rounded to the nearest, ties to even, within 1/256 of their magnitude; those that would round
    to an infinity of `tensor`'s dtype become the largest bfloat16 below it. Centers beyond the dtype's range are
    clamped.

    Args:
        tensor: bfloat16, float16 or float32; finite; any shape and strides.
        centers: ascending and finite, as from `kmeans_codebook`.
        pruned, protected: bool, of the shape of `tensor`, on its device. What is both is protected.
        noise: float32, of the shape of `tensor`, evenly distributed in [0, 1): round up or down at random, so that
            the mean
            is the value itself (see `dithered`); None: to the nearest.
        zero: whether zero is a level then; None: where anything is pruned.

    Raises:
        PolicyError: a mask has another shape, or there are too many centers.
    """
    limit = torch.finfo(tensor.dtype).max
    centers = centers.detach().to("cpu", torch.float32).clamp(-limit, limit)
    exact = torch.empty(0, dtype=torch.bfloat16, device=tensor.device)
    if noise is None:
        codes = assign(tensor, centers, RESERVED_CODES)
    else:
        zero = (pruned is not None and bool(pruned.any())) if zero is None else zero
        codes = assign_stochastic(tensor, centers, RESERVED_CODES, noise, zero=zero)
    if pruned is not None and noise is None:
        codes.masked_fill_(_check_mask("pruned", pruned, tensor), 0)
    if protected is not None:
        codes.masked_fill_(_check_mask("protected", protected, tensor), 1)
        exact = _to_bfloat16(tensor.detach()[protected])
    return CodebookTensor(codes, centers, exact, RESERVED_CODES)


def assign_stochastic(tensor: Tensor, centers: Tensor, first_code: int, noise: Tensor, *, zero: bool) -> Tensor:
    """The code of the level below or above every value, at random, so that the mean is the value.

    What matters right after a restore, when all values lie on levels: rounding to the nearest would take most of them
    back to where they were, and with that what training has done to them; rounded at random, the same share of the way
    is kept on average. Values on a level stay there, those beyond the ends get the end.

    Args:
        zero: zero is a level, too; its code is 0.

    Returns:
        uint8, contiguous, of the shape of `tensor` and on its device.
    """
    levels = centers.to(torch.float32)
    codes = torch.arange(first_code, first_code + levels.numel(), dtype=torch.uint8)
    if zero:
        levels, order = torch.cat([levels, torch.zeros(1)]).sort(stable=True)
        codes = torch.cat([codes, torch.zeros(1, dtype=torch.uint8)])[order]
    levels, flat = levels.to(tensor.device), tensor.detach().reshape(-1).to(torch.float32)
    below = torch.bucketize(flat, levels, right=True, out_int32=True).sub_(1).clamp_(0, max(levels.numel() - 2, 0))
    above = (below + 1).clamp_(max=levels.numel() - 1)
    low, high = levels.index_select(0, below), levels.index_select(0, above)
    up = noise.reshape(-1) * (high - low) < flat - low
    return codes.to(tensor.device).index_select(0, torch.where(up, above, below)).reshape(tensor.shape)


def _normalize(x: Tensor) -> Tensor:
    total = x.sum()
    return x / total if total > 0 else torch.full_like(x, 1 / max(1, x.numel()))


def _nonempty_cells(
    values: HistogramArray, counts: HistogramArray, sigma: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Of the cells that are not empty: their values, counts and weights."""
    present = to_float64(counts) > 0
    points, held = to_float64(values)[present], to_float64(counts)[present]
    return points.numpy(), held.numpy(), sample_weights(points, held, sigma).numpy()


def _cost(points: npt.NDArray[np.float64], counts: npt.NDArray[np.float64], centers: Tensor) -> float:
    """The mean square of how far the nearest center is from a value."""
    levels = centers.sort().values.numpy()
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, points)]
    return float((counts * (points - nearest) ** 2).sum() / counts.sum())


def _variance(points: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> float:
    mean = (counts * points).sum() / counts.sum()
    return float((counts * (points - mean) ** 2).sum() / counts.sum())


def _check_init(init: Tensor, bins: int) -> Tensor:
    if init.numel() == bins:
        return to_float64(init).reshape(-1)
    raise PolicyError("start", found=f"{init.numel()} centers", expected=f"{bins}", do="start without them")


def _max_center_move(previous: Tensor, centers: Tensor) -> float:
    """The largest move of a center, as a share of its magnitude or of the gap to its nearer neighbour."""
    none = torch.tensor([torch.inf if previous.numel() > 1 else 0.0], dtype=torch.float64)
    gaps = previous.diff()
    scale = torch.maximum(previous.abs(), torch.minimum(torch.cat([none, gaps]), torch.cat([gaps, none])))
    moves = (centers - previous).abs()
    return float(torch.where(moves > 0, moves / scale, moves).max())


def _check_mask(name: str, mask: Tensor, x: Tensor) -> Tensor:
    if mask.shape == x.shape:
        return mask
    found, expected = f"a mask of shape {list(mask.shape)}", f"{list(x.shape)}, that of the tensor"
    raise PolicyError(name, found=found, expected=expected, do="give one bool for every value")


def _to_bfloat16(x: Tensor) -> Tensor:
    """To bfloat16, and no further than the largest one that is finite in the dtype of `x`."""
    most = torch.finfo(torch.bfloat16).max
    limit = 65280.0 if x.dtype == torch.float16 else most
    return x.to(torch.float32).clamp(-limit, limit).to(torch.bfloat16)
