"""Low-rank gradients (PowerSGD, arXiv 1905.13727): the setting, and the arithmetic of factors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.base import Compressor, Identity, check_compressor
from shrinkpoint.comm.compressors.layout import fill_tensor
from shrinkpoint.comm.error_feedback import zero_nonfinite_

MAX_RANK = 1024  # The largest rank
MIN_SAVING = 2  # A matrix is sent as factors if these have at most one in this number of its values
_MAX_DEPENDENT = 1e-10
"""A row whose part that earlier rows do not span is shorter than this share of it depends on them."""
_BLOCK_NUMEL = 1 << 15  # Values of a matrix that are computed at a time on a CPU, so that they stay in the cache


@dataclass(frozen=True)
class LowRank:
    """Sends the gradient of a matrix as two factors of a low rank, for `compress_ddp`: PowerSGD with error feedback.

    With M the gradient of a rank plus what it has not sent yet, and Q the right factor of the last step, ranks average
    `P = M Q`, make its columns orthonormal, average `Q = M^T P`, and all take `P Q^T` for the average gradient; M less
    that is kept for the next step (Algorithms 1 and 2). Factors are sent through a compressor. What it loses in Q is in
    the next step's M as well, so that four or eight bits cost little.

    A convolution is a matrix with a row for each output channel. Vectors, and matrices whose factors have more than
    half as many values as they have, are sent through the compressor as they are.

    Attributes:
        rank: the number of columns of P and Q.
        compressor: for factors, and for what is not sent as factors.

    Raises:
        PolicyError: the rank is not from 1 to 1024, or the compressor is none.
    """

    rank: int = 4
    compressor: Compressor = field(default_factory=Identity)

    def __post_init__(self) -> None:
        validate.check_int("LowRank, rank", self.rank, maximum=MAX_RANK)
        check_compressor("LowRank", self.compressor)

    @property
    def spec(self) -> str:
        """The setting as text, which `shrinkpoint.comm.parse` reads back."""
        inner = "" if self.compressor == Identity() else f"({self.compressor.spec})"
        return f"lowrank{self.rank}{inner}"

    def fits(self, rows: int, columns: int) -> bool:
        """True if a matrix of this shape is sent as factors."""
        return 0 < MIN_SAVING * self.rank * (rows + columns) <= rows * columns

    def __str__(self) -> str:
        return self.spec


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Orthonormal rows that span, from the first on, what these span: float32 of the same shape, (rank, values).

    Gram-Schmidt, each row twice, in float64 and with sums in a fixed order, so that all processors get the same bits
    of the same rows. A row that depends on earlier ones becomes 0. Everything is nan from the first row on that has a
    value which is not finite.
    """
    wide = rows.to(torch.float64)
    basis = torch.empty_like(wide)
    for index, row in enumerate(wide):
        first_norm, earlier = _norm(row), basis[:index]
        for _ in range(2 if index else 0):
            projections = _sum_last(earlier * row).unsqueeze(1) * earlier
            row = row - _sum_last(projections.t())
        norm = _norm(row)
        unit = torch.where(norm <= _MAX_DEPENDENT * first_norm, 0.0, row / norm)
        basis[index] = torch.where(first_norm.isfinite(), unit, torch.nan)
    return basis.to(torch.float32)


def start_rows(rank: int, values: int, seed: int) -> Tensor:
    """Random rows of length 1, the same on all ranks up to rounding: float32, (rank, values), on the CPU."""
    random = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(1 << 20), 1 << 20, (rank, values), generator=random, device="cpu")
    return unit_rows((2 * integers + 1).to(torch.float32), None)


def unit_rows(rows: Tensor, spare_rows: Tensor | None) -> Tensor:
    """The rows at length 1, and the spare ones instead of rows that are 0 or not finite."""
    largest = rows.abs().amax(dim=1, keepdim=True)
    scaled = rows / largest
    units = scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return units if spare_rows is None else torch.where((largest > 0) & largest.isfinite(), units, spare_rows)


def subtract_product(left: Tensor, right: Tensor, residual: Tensor, out: Tensor) -> None:
    """Write `left^T right` to `out`, and subtract from `residual` what `out` holds then.

    Each value is a sum in a fixed order in which each operation is rounded once, so that all processors get the same
    bits. What is not finite is 0 in the residual.

    Args:
        left, right: float32, of shapes (rank, rows) and (rank, columns).
        residual: float32, (rows, columns).
        out: of that shape and any floating dtype.
    """
    rows, columns = residual.shape
    step = max(1, _BLOCK_NUMEL // columns) if residual.device.type == "cpu" else rows
    sums, products = (residual.new_empty(min(step, rows), columns) for _ in range(2))
    for begin in range(0, rows, step):
        block = slice(begin, min(begin + step, rows))
        size = block.stop - begin
        total, product = sums[:size], products[:size]
        for index, (column, row) in enumerate(zip(left[:, block, None], right, strict=True)):
            torch.mul(column, row, out=product if index else total)
            if index:
                total.add_(product)
        zero_nonfinite_(residual[block].sub_(fill_tensor(out[block], total)))


def _norm(row: Tensor) -> Tensor:
    return _sum_last(row * row).sqrt()


def _sum_last(values: Tensor) -> Tensor:
    """Sum over the last axis, which is not empty, by halves: the same order on every processor."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        if values.shape[-1] % 2:
            folded[..., 0] += values[..., -1]
        values = folded
    return values[..., 0]
