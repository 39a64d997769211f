"""The lossless quantizer: a tensor's codes are its bit patterns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.errors import CorruptError
from shrinkpoint.record import TensorInfo
from shrinkpoint.state import torch_dtype
from shrinkpoint.state.dtypes import empty, raw, resolve

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32,
          torch.float16: np.float16, torch.uint8: np.uint8}  # fmt: skip
"""The dtypes that numpy has as well."""


def bits_of(x: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The values of `x` in row-major order as bytes; shares memory when `x` is contiguous and on the CPU."""
    if x.dtype in _NUMPY and x.is_cpu and x.is_contiguous() and not x.is_conj() and not x.is_neg():  # nearly all
        return x.detach().numpy().reshape(-1).view(np.uint8)
    flat = raw(resolve(x.detach())).to("cpu").contiguous().reshape(-1)
    if flat.numel() == 0:
        return np.empty(0, np.uint8)
    if flat.stride() != (1,):  # a single element may have any
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8).numpy()


def from_bits(bits: np.ndarray[tuple[int], np.dtype[np.uint8]], info: TensorInfo) -> Tensor:
    """The tensor whose `bits_of` is `bits`; shares memory with them.

    Raises:
        CorruptError: the number of bytes is not that of `info`.
    """
    if bits.nbytes != info.nbytes:
        raise CorruptError(
            f"tensor {info.name!r}",
            found=f"{bits.nbytes} bytes",
            expected=f"{info.nbytes} for shape {list(info.shape)} of {info.dtype}",
            do="restore an older checkpoint",
        )
    dtype = torch_dtype(info.dtype)
    if info.numel == 0:
        return empty(info.shape, dtype)
    if (native := _NUMPY.get(dtype)) is not None:  # one step less, which counts where tensors are many
        return torch.from_numpy(bits.view(native).reshape(info.shape))
    return torch.from_numpy(bits).view(dtype).reshape(info.shape)
