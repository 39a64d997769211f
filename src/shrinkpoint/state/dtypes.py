"""Names of dtypes in our files, and the dtypes of torch and numpy they stand for."""

from __future__ import annotations

import numpy as np
import torch

from shrinkpoint.errors import CorruptError, StateError
from shrinkpoint.record import ITEMSIZE

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4_X2": "float4_e2m1fn_x2",
    "C32": "complex32", "C64": "complex64", "C128": "complex128",
}  # fmt: skip

TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in _TORCH_NAMES.items() if hasattr(torch, attribute)
}
"""The dtypes this torch has; the newest float8 and float4 may be missing."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH.items()}

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_NUMPY = {
    "b1": torch.bool, "i1": torch.int8, "u1": torch.uint8, "i2": torch.int16, "u2": torch.uint16, "i4": torch.int32,
    "u4": torch.uint32, "i8": torch.int64, "u8": torch.uint64, "f2": torch.float16, "f4": torch.float32,
    "f8": torch.float64, "c8": torch.complex64, "c16": torch.complex128,
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype, a key of `record.ITEMSIZE`.

    Raises:
        StateError: for quantized, sub-byte and untyped bit dtypes.
    """
    name = NAMES.get(dtype)
    if name is None:
        raise StateError("dtype", found=f"{dtype}", expected="one of " + ", ".join(map(str, NAMES)), do="convert it")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype a name stands for.

    Raises:
        CorruptError: when no release writes that name, or this torch lacks the dtype.
    """
    dtype = TORCH.get(name)
    if dtype is None:
        known = name in ITEMSIZE
        do = "install a newer torch" if known else ""
        raise CorruptError("dtype", found=repr(name), expected="a dtype this torch has", do=do)
    return dtype


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that copies and comparisons are bit by bit whatever the values mean.

    Complex128 comes back as it is: there is no integer as wide, and its copy is bit by bit anyway.
    """
    integer = _RAW.get(tensor.element_size())
    return tensor if integer is None else tensor.view(integer)


def empty(shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool = False) -> torch.Tensor:
    """Fresh contiguous CPU memory; by way of an integer dtype, as torch warns about new complex32 tensors."""
    integer = _RAW.get(dtype.itemsize)
    if integer is None:
        return torch.empty(shape, dtype=dtype, pin_memory=pin)
    return torch.empty(shape, dtype=integer, pin_memory=pin).view(dtype)


def resolve(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without lazy conjugation or negation; itself when it has none."""
    if tensor.dtype == torch.complex32 and tensor.is_conj():  # torch warns about new complex32 tensors
        bits = tensor.conj().view(torch.int32).contiguous().clone().unsqueeze(-1).view(torch.int16)
        bits[..., 1] ^= -0x8000
        return bits.view(torch.int32)[..., 0].view(torch.complex32)
    return tensor.resolve_conj().resolve_neg()


def numpy_storable(dtype: np.dtype[np.generic]) -> torch.dtype | None:
    """The torch dtype that holds a numpy dtype of either byte order; None for dates, strings, objects, longdouble."""
    return _NUMPY.get(dtype.str[1:])


def numpy_dtype(text: str) -> np.dtype[np.generic] | None:
    """The numpy dtype of a stored `dtype.str` such as ``"<f4"`` or ``">i8"``; None when no release writes it."""
    if text[:1] not in ("<", ">", "|") or text[1:] not in _NUMPY:
        return None
    dtype: np.dtype[np.generic] = np.dtype(text)
    return dtype
