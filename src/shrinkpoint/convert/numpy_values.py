"""numpy values in a torch file, rebuilt without numpy's own unpickling.

`torch.load(weights_only=True)` refuses numpy. This module has what it calls instead of numpy's functions: each of them
checks its arguments, so that no state of an array or a dtype from a file reaches numpy unchecked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shrinkpoint.tensors.dtypes import numpy_to_torch_dtype


class TooManyValuesError(ValueError):
    """Raised for a nest of too many values."""


class NumpyDtypeStub:
    """Stands for `numpy.dtype`, as a pickle calls it: a code such as "f8", then a byte order by way of its state."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        self._code, self._order = str(code), "="

    def __setstate__(self, state: Any) -> None:
        _, self._order, *rest = state
        if self._order not in ("<", ">", "|", "=") or any(item is not None for item in rest[:3]):
            raise ValueError(f"a numpy dtype of state {state!r:.80}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype.

        Raises:
            ValueError: it cannot be stored: objects, text, dates, records.
        """
        dtype = np.dtype(self._code)
        if numpy_to_torch_dtype(dtype) is None:
            raise ValueError(f"a numpy dtype {self._code!r:.40}; known are bool, integers, floats and complex numbers")
        return dtype if self._order in ("|", "=") else dtype.newbyteorder(self._order)  # type: ignore[arg-type]


class NumpyArrayStub:
    """Stands for `numpy.ndarray` until the file has been read.

    Attributes:
        value: the array.
    """

    def __init__(self) -> None:
        self.value: np.ndarray[Any, Any] = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        numpy_dtype = dtype.dtype
        if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * numpy_dtype.itemsize != len(
            data
        ):
            raise ValueError(f"a numpy array of shape {shape!r:.80} in {len(data)} bytes")
        self.value = np.frombuffer(bytearray(data), numpy_dtype).reshape(shape, order="F" if fortran else "C")


def reconstruct_array(array_type: Any, shape: Any, code: Any) -> NumpyArrayStub:
    """Stands for `numpy.core.multiarray._reconstruct`."""
    if array_type is not NumpyArrayStub:
        raise ValueError("a numpy array of a class of its own")
    return NumpyArrayStub()


def reconstruct_scalar(dtype: Any, data: Any) -> np.generic:
    """Stands for `numpy.core.multiarray.scalar`."""
    numpy_dtype = dtype.dtype
    if not isinstance(data, bytes) or len(data) != numpy_dtype.itemsize:
        raise ValueError(f"a numpy scalar of {numpy_dtype} in {data!r:.40}")
    value: np.generic = np.frombuffer(data, numpy_dtype)[0]
    return value


def empty_bytes(*args: Any) -> bytes:
    """Stands for `bytes`, which old pickles call for an empty one, such as that of an array without values."""
    if args:
        raise ValueError("bytes made of something else")
    return b""


_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_STUBS: list[Any] = [
    (NumpyDtypeStub, "numpy.dtype"),
    (NumpyArrayStub, "numpy.ndarray"),
    (empty_bytes, "builtins.bytes"),
    (empty_bytes, "__builtin__.bytes"),
    *((reconstruct_array, f"{home}._reconstruct") for home in _NUMPY_MODULES),
    *((reconstruct_scalar, f"{home}.scalar") for home in _NUMPY_MODULES),
]


@contextmanager
def allow_numpy_stubs() -> Iterator[None]:
    """Lets `torch.load(weights_only=True)` make stubs inside the block; `replace_stubs` turns them into arrays."""
    with torch.serialization.safe_globals(_STUBS):
        yield


def replace_stubs(value: Any, max_values: int) -> Any:
    """Replaces the stubs in a nest by their arrays; a container without stubs stays the same object.

    Args:
        max_values: values that the nest may have. A list of references to one list, nested several times, is small in a
            file and takes exponential time to walk through.

    Raises:
        TooManyValuesError: the nest has more values.
    """
    return _StubReplacer(max_values).replace(value, frozenset())


class _StubReplacer:
    def __init__(self, max_values: int) -> None:
        self._remaining = max_values

    def replace(self, value: Any, ancestor_ids: frozenset[int]) -> Any:
        self._remaining -= 1
        if self._remaining < 0:
            raise TooManyValuesError("a nest of more values than its file has bytes")
        if isinstance(value, NumpyArrayStub):
            return value.value
        if id(value) in ancestor_ids:  # a nest that contains itself: `flatten` refuses it with a message
            return value
        if isinstance(value, dict | list):
            pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
            for key, item in pairs:
                new = self.replace(item, ancestor_ids | {id(value)})
                if new is not item:
                    value[key] = new
        elif type(value) in (tuple, torch.Size):
            items = [self.replace(item, ancestor_ids | {id(value)}) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return tuple(items)
        return value
