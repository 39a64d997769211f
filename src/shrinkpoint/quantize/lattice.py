"""Quantizes tensors to the nearest points of a lattice."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, Lattice, LatticeTensor, as_matrix, matrix_shape
from shrinkpoint.tensors.dtypes import tensor_bytes


def quantize_to_lattice(
    tensor: Tensor,
    lattice: Lattice,
    *,
    second_moments: Tensor | None = None,
    relative_to: str = "",
    previous_codes: Tensor | None = None,
    hysteresis: float = 0.5,
) -> LatticeTensor | None:
    """Quantize each value to its nearest point, or keep its previous code within `hysteresis` steps.

    Args:
        tensor: finite floats of 16 or 32 bits, any strides, on any device.
        lattice: of spacing "linear" or "relative".
        second_moments: with spacing "relative", the second moment, of the shape of `tensor`.
        relative_to: the name of that second moment.
        previous_codes: int8 or int16, the codes of the previous checkpoint on the same lattice; or None.
        hysteresis: at least 1/2.

    Returns:
        The quantized tensor; None if some value lies beyond all points.
    """
    quantize = _quantize_native if tensor.device.type == "cpu" else _quantize_torch
    codes = quantize(tensor, lattice, second_moments, previous_codes, hysteresis)
    return None if codes is None else LatticeTensor(codes.reshape(tensor.shape), lattice, relative_to)


def _quantize_native(
    tensor: Tensor, lattice: Lattice, second_moments: Tensor | None, previous_codes: Tensor | None, hysteresis: float
) -> Tensor | None:
    native = tensor if tensor.dtype in (torch.float32, torch.bfloat16) else tensor.to(torch.float32)
    codes = _native.empty(2 * tensor.numel())
    fits = _native.lattice_quantize(
        lattice.to_native(matrix_shape(tuple(tensor.shape))),
        tensor_bytes(native),
        codes,
        squares=None if second_moments is None else tensor_bytes(second_moments.to("cpu", torch.float32)),
        previous=None if previous_codes is None else tensor_bytes(previous_codes.cpu()),
        hysteresis=hysteresis,
        threads=torch.get_num_threads(),
    )
    return torch.from_numpy(codes.view(np.int16)) if fits else None


def _quantize_torch(
    tensor: Tensor, lattice: Lattice, second_moments: Tensor | None, previous_codes: Tensor | None, hysteresis: float
) -> Tensor | None:
    positions = lattice_positions(tensor, lattice, second_moments)
    codes = positions.round()
    if previous_codes is not None:
        previous = as_matrix(previous_codes).to(positions.device, torch.float32)
        codes = torch.where((positions - previous).abs() <= hysteresis, previous, codes)
    return codes.to(torch.int16) if bool((codes.abs() <= MAX_LATTICE_CODE).all()) else None


def lattice_positions(tensor: Tensor, lattice: Lattice, second_moments: Tensor | None = None) -> Tensor:
    """Return the fractional code of each value: float32, of the matrix's shape; -dither where the scale is 0."""
    values = as_matrix(tensor).to(torch.float32)
    squares = None if second_moments is None else as_matrix(second_moments).to(tensor.device, torch.float32)
    scales = lattice.scales(squares, tensor.device)
    positions = torch.where(scales > 0, values / scales, 0.0)
    return positions - lattice.dither((values.shape[0], values.shape[1]), tensor.device)
