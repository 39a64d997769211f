"""Values to points of a lattice. (Not in the room's `__init__`: lattices need what is there.)"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, Lattice, LatticeTensor, as_matrix, matrix_shape
from shrinkpoint.tensors.dtypes import tensor_bytes

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def quantize_to_lattice(
    tensor: Tensor,
    lattice: Lattice,
    *,
    second_moments: Tensor | None = None,
    relative_to: str = "",
    previous_codes: Tensor | None = None,
    hysteresis: float = 0.5,
) -> LatticeTensor | None:
    """The point nearest to each value; the one before where the value is not further than `hysteresis` steps from it.

    Args:
        tensor: finite; of 16 or 32 bits, any strides, on any device.
        lattice: linear or relative.
        other, name: of the law "relative": the tensor that steps are relative to, and its name.
        previous_codes: codes of the checkpoint before, on the same lattice.
        hysteresis: from 1/2 on.

    Returns:
        None where some value lies beyond all points.
    """
    if tensor.device.type == "cpu":
        made = _quantize_native(
            tensor if tensor.dtype in _NATIVE_DTYPES else tensor.to(torch.float32),
            lattice,
            second_moments,
            previous_codes,
            hysteresis,
        )
    else:
        made = _quantize_torch(tensor, lattice, second_moments, previous_codes, hysteresis)
    return None if made is None else LatticeTensor(made.reshape(tensor.shape), lattice, relative_to)


def _quantize_native(
    tensor: Tensor, lattice: Lattice, second_moments: Tensor | None, previous_codes: Tensor | None, hysteresis: float
) -> Tensor | None:
    codes = _native.empty(2 * tensor.numel())
    fits = _native.lattice_quantize(
        lattice.to_native(matrix_shape(tuple(tensor.shape))),
        tensor_bytes(tensor),
        codes,
        squares=None if second_moments is None else tensor_bytes(second_moments.to("cpu", torch.float32)),
        before=None if previous_codes is None else tensor_bytes(previous_codes.cpu()),
        hold=hysteresis,
        threads=torch.get_num_threads(),
    )
    return torch.from_numpy(codes.view(np.int16)) if fits else None


def _quantize_torch(
    tensor: Tensor, lattice: Lattice, second_moments: Tensor | None, previous_codes: Tensor | None, hysteresis: float
) -> Tensor | None:
    at = lattice_positions(tensor, lattice, second_moments)
    codes = at.round()
    if previous_codes is not None:
        old = as_matrix(previous_codes).to(at.device, torch.float32)
        codes = torch.where((at - old).abs() <= hysteresis, old, codes)
    return codes.to(torch.int16) if bool((codes.abs() <= MAX_LATTICE_CODE).all()) else None


def lattice_positions(tensor: Tensor, lattice: Lattice, second_moments: Tensor | None = None) -> Tensor:
    """Where values lie between points: float32, of the matrix's shape; 0 where there is no step."""
    values = as_matrix(tensor).to(torch.float32)
    beside = None if second_moments is None else as_matrix(second_moments).to(tensor.device, torch.float32)
    scales = lattice.scales(beside, tensor.device)
    away = torch.where(scales > 0, values / scales, 0.0)
    return away - lattice.dither((values.shape[0], values.shape[1]), tensor.device)
