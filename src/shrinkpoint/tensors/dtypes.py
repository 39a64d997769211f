"""Maps dtype names in files to dtypes of torch and numpy, and tensors to their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.errors import CorruptError, StateError
from shrinkpoint.guard import no_gc
from shrinkpoint.tensors.info import DTYPES, TensorInfo

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items() if hasattr(torch, dtype.torch_name)
}
"""The dtypes of the installed torch by name; the newest float8 and float4 may be missing."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_NUMPY_CODES = "b1 i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16"
_TORCH_OF_NUMPY = {code: torch.from_numpy(np.empty(0, code)).dtype for code in _NUMPY_CODES.split()}
_NUMPY_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("float32", "float64", "int64", "int32", "int16", "int8", "float16", "uint8")
}
"""Common dtypes that numpy has as well."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype, a key of `tensors.info.DTYPES`.

    Raises:
        StateError: the dtype is quantized, sub-byte or an untyped bit dtype.
    """
    if dtype not in DTYPE_NAMES:
        expected = "one of " + ", ".join(map(str, DTYPE_NAMES))
        raise StateError("dtype", found=f"{dtype}", expected=expected, do="convert the tensor first")
    return DTYPE_NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name; raises CorruptError if no release writes that name, or this torch lacks the dtype."""
    if name not in TORCH_DTYPES:
        do = "install a newer torch" if name in DTYPES else "restore another checkpoint"
        raise CorruptError("dtype", found=repr(name), expected="a dtype this torch has", do=do)
    return TORCH_DTYPES[name]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers, so that copies and comparisons are bitwise.

    complex128 is returned unchanged: no integer is as wide, and copying it is bitwise anyway.
    """
    integer = _INTEGER_DTYPES.get(tensor.element_size())
    return tensor if integer is None else tensor.view(integer)


def as_native_float(tensor: torch.Tensor) -> torch.Tensor:
    """Cast to float32 unless the native core reads the dtype (float32, bfloat16); on its device, without gradient."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.dtype in (torch.float32, torch.bfloat16) else tensor.to(torch.float32)


def empty(shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool = False) -> torch.Tensor:
    """Allocate a contiguous CPU tensor; as an integer dtype first, because torch warns about new complex32 tensors."""
    integer = _INTEGER_DTYPES.get(dtype.itemsize)
    if integer is None:
        return torch.empty(shape, dtype=dtype, pin_memory=pin, device="cpu")
    return torch.empty(shape, dtype=integer, pin_memory=pin, device="cpu").view(dtype)


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without lazy conjugation or negation; itself if it has none."""
    if tensor.dtype == torch.complex32 and tensor.is_conj():  # torch warns about new complex32 tensors
        bits = tensor.conj().view(torch.int32).contiguous().clone().unsqueeze(-1).view(torch.int16)
        bits[..., 1] ^= -0x8000
        return bits.view(torch.int32)[..., 0].view(torch.complex32)
    return tensor.resolve_conj().resolve_neg()


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a sample to new, contiguous host memory, without gradient.

    A sample in host memory is copied by this thread alone: torch would share it out among its own threads, which costs
    more than it gains, the most where they are busy with something else, such as the training beside a save.
    """
    tensor = tensor.detach()
    if not tensor.is_cpu:
        return tensor.to("cpu", copy=True).contiguous()
    return torch.from_numpy(as_bits(materialize(tensor)).numpy().copy()).view(tensor.dtype)


def numpy_to_torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype | None:
    """Return the torch dtype of a numpy dtype of either byte order; None for dates, strings, objects, longdouble."""
    return _TORCH_OF_NUMPY.get(dtype.str[1:])


def numpy_dtype(text: str) -> np.dtype[np.generic] | None:
    """Return the numpy dtype of a stored `dtype.str` such as ``"<f4"``; None if no release writes it."""
    if text[:1] not in ("<", ">", "|") or text[1:] not in _TORCH_OF_NUMPY:
        return None
    return np.dtype(text)


def tensor_bytes(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the row-major values as uint8, 1-d; shares memory if the tensor is contiguous and on the CPU."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype in _NUMPY_DTYPES and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.numpy().reshape(-1).view(np.uint8)  # the fast path; a real tensor is never conjugated lazily
    flat = as_bits(materialize(tensor)).to("cpu").contiguous().reshape(-1)
    if flat.numel() == 0:
        return np.empty(0, np.uint8)
    if flat.stride() != (1,):  # a single element may have any
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8).numpy()


_JOINED_DTYPES = {*_NUMPY_DTYPES, torch.bfloat16}
_MAX_JOINED_NUMEL = 1 << 15
"""Values of a tensor up to which torch joins it with others; it would share the copy of a larger one among threads."""


def joined_bytes(tensors: Sequence[Tensor]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the row-major values of tensors one after the other, as uint8; a single one as `tensor_bytes` does."""
    if len(tensors) == 1:
        return tensor_bytes(tensors[0])
    dtypes = {tensor.dtype if tensor.is_cpu else None for tensor in tensors}
    numels = [tensor.numel() for tensor in tensors]
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    with no_gc():
        if dtype is not None and dtype in _JOINED_DTYPES and 0 < max(numels) <= _MAX_JOINED_NUMEL:
            out = _native.empty(sum(numels) * dtype.itemsize)  # from the pool, since each save asks for it again
            with torch.no_grad():  # one call of torch instead of three of numpy for each tensor
                flat = torch.from_numpy(out).view(dtype)
                torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors], out=flat)
            return out
        parts = [tensor_bytes(tensor) for tensor in tensors]
        return np.concatenate(parts, out=_native.empty(sum(part.nbytes for part in parts)))


def tensor_from_bytes(data: np.ndarray[tuple[int], np.dtype[np.uint8]], info: TensorInfo) -> Tensor:
    """Invert `tensor_bytes`: return the tensor of these bytes, with which it shares memory.

    Raises:
        CorruptError: the number of bytes is not that of `info`.
    """
    if data.nbytes != info.nbytes:
        expected, do = f"{info.nbytes} for shape {list(info.shape)} of {info.dtype}", "restore another checkpoint"
        raise CorruptError(f"tensor {info.name!r}", found=f"{data.nbytes} bytes", expected=expected, do=do)
    dtype = torch_dtype(info.dtype)
    if info.numel == 0:
        return empty(info.shape, dtype)
    if (native := _NUMPY_DTYPES.get(dtype)) is not None:  # faster for many small tensors
        return torch.from_numpy(data.view(native).reshape(info.shape))
    return torch.from_numpy(data).view(dtype).reshape(info.shape)
