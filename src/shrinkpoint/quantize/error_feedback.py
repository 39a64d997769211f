"""Quantizes matrices to a lattice column by column, feeding the error of each column back to those after it.

For inputs x of a linear layer with the second moments H = E[x x'], an error E of its weights adds E H E' to the
outputs. With H = (U + I) D (U + I)', U strictly upper triangular, that is the sum over columns k of D[k] times the
squared rounding error of column k, if each is rounded after U[:k, k] of the errors before it was added (LDLQ: QuIP,
arXiv 2307.13304, section 3, which is the same as GPTQ, arXiv 2210.17323).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import Lattice, LatticeTensor, as_matrix, matrix_shape
from shrinkpoint.tensors.dtypes import as_native_float, tensor_bytes

DAMPING = 0.03
"""What is added to the diagonal of the second moments, in means of it: less fits their noise, more feeds back less."""
_MAX_DAMPING = 1.0


def feedback_factor(second_moments: Tensor) -> Tensor | None:
    """The upper Cholesky factor R of damped second moments whose columns are in reverse order: R' R is these.

    Row i, divided by its diagonal, is what column n - 1 - i gets of the errors of the columns before it. The
    damping grows tenfold, up to the mean of the diagonal, where rounding makes the moments indefinite.

    Args:
        second_moments: [columns, columns], symmetric, in any unit, on any device, where it is factored in float32.

    Returns:
        float32 [columns, columns] on the CPU, arbitrary below the diagonal; None if the moments have no such factor:
        they are zero, not finite, or far from positive definite.
    """
    mean = float(second_moments.diagonal().to(torch.float64).mean()) if second_moments.numel() else 0.0
    if not 0 < mean < float("inf"):
        return None
    reversed_moments, damping = second_moments.to(torch.float32).flip(0, 1), 0.0
    while damping < _MAX_DAMPING:
        added = max(DAMPING, 10 * damping)
        reversed_moments.diagonal().add_((added - damping) * mean)
        damping = added
        lower, info = torch.linalg.cholesky_ex(reversed_moments)
        if int(info) == 0:
            factor = lower.mT.cpu().contiguous()  # no copy: LAPACK has columns in memory
            return factor if bool(factor.sum().isfinite()) else None
    return None


def quantize_with_feedback(
    tensor: Tensor, lattice: Lattice, factor: Tensor, *, threads: int | None = None
) -> LatticeTensor | None:
    """Quantize a tensor, seen as a matrix, to points whose errors cancel in the outputs of its layer.

    Args:
        tensor: finite floats of 16 or 32 bits, any strides, on any device; of at least two columns.
        lattice: of spacing "linear".
        factor: of `feedback_factor`, for as many columns, float32 and contiguous.
        threads: native threads; None: as many as torch uses.

    Returns:
        The quantized tensor, with codes on the CPU; None if some value lies beyond all points.
    """
    rows, columns = matrix_shape(tuple(tensor.shape))
    if factor.shape != (columns, columns):
        raise ValueError(f"factor: {tuple(factor.shape)} for a matrix of {columns} columns")
    codes = torch.from_numpy(_native.empty(2 * tensor.numel())).view(torch.int16)
    values = as_native_float(as_matrix(tensor)).cpu().contiguous()
    fits = _native.quantize_with_feedback(
        lattice.to_native((rows, columns)),
        tensor_bytes(values),
        tensor_bytes(factor),
        tensor_bytes(codes),
        threads=threads or torch.get_num_threads(),
    )
    return LatticeTensor(codes.reshape(tensor.shape), lattice).narrow() if fits else None
