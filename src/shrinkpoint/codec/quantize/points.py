"""Values to points of a lattice. (Not in the room's `__init__`: lattices need what is there.)"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import MOST_CODE, Lattice, Points, matrix, sides
from shrinkpoint.codec.quantize.exact import bits_of

_NATIVE = (torch.float32, torch.bfloat16)


def nearest(
    x: Tensor, lattice: Lattice, *, other: Tensor | None = None, name: str = "", before: Tensor | None = None,
    hold: float = 0.5,
) -> Points | None:  # fmt: skip
    """The point nearest to each value; the one before where the value is not further than `hold` steps from it.

    Args:
        x: finite; of 16 or 32 bits, any strides, on any device.
        lattice: linear or relative.
        other, name: of the law "relative": the tensor that steps are relative to, and its name.
        before: codes of the checkpoint before, on the same lattice.
        hold: from 1/2 on.

    Returns:
        None where some value lies beyond all points.
    """
    if x.device.type == "cpu":
        made = _on_the_host(x if x.dtype in _NATIVE else x.to(torch.float32), lattice, other, before, hold)
    else:
        made = _anywhere(x, lattice, other, before, hold)
    return None if made is None else Points(made.reshape(x.shape), lattice, name)


def _on_the_host(
    x: Tensor, lattice: Lattice, other: Tensor | None, before: Tensor | None, hold: float
) -> Tensor | None:
    codes = _native.empty(2 * x.numel())
    fits = _native.lattice_quantize(
        lattice.native(sides(tuple(x.shape))), bits_of(x), codes,
        squares=None if other is None else bits_of(other.to("cpu", torch.float32)),
        before=None if before is None else bits_of(before.cpu()), hold=hold, threads=torch.get_num_threads(),
    )  # fmt: skip
    return torch.from_numpy(codes.view(np.int16)) if fits else None


def _anywhere(x: Tensor, lattice: Lattice, other: Tensor | None, before: Tensor | None, hold: float) -> Tensor | None:
    at = positions(x, lattice, other)
    codes = at.round()
    if before is not None:
        old = matrix(before).to(at.device, torch.float32)
        codes = torch.where((at - old).abs() <= hold, old, codes)
    return codes.to(torch.int16) if bool((codes.abs() <= MOST_CODE).all()) else None


def positions(x: Tensor, lattice: Lattice, other: Tensor | None = None) -> Tensor:
    """Where values lie between points: float32, of the matrix's shape; 0 where there is no step."""
    values = matrix(x).to(torch.float32)
    beside = None if other is None else matrix(other).to(x.device, torch.float32)
    scales = lattice.scales(beside, x.device)
    away = torch.where(scales > 0, values / scales, 0.0)
    return away - lattice.dither((values.shape[0], values.shape[1]), x.device)
