"""What is no tensor: objects of a state dict, which torch hands over and wants back as the bytes of `torch.save`."""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
import torch

from shrinkpoint.errors import StateError

_NUMPY = [np._core.multiarray._reconstruct, np._core.multiarray.scalar, np.ndarray, np.dtype]  # type: ignore[attr-defined]
_NUMPY += [type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"]
_LOCK = threading.Lock()  # `safe_globals` is one list for the whole process


def plain(data: io.BytesIO, fqn: str) -> Any:
    """The object that `data` was made from, if it is made of plain values, tensors and numpy arrays.

    Raises:
        StateError: it is not.
    """
    data.seek(0)
    with _LOCK:
        known = set(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals([one for one in _NUMPY if one not in known]):
            try:
                return torch.load(data, map_location="cpu", weights_only=True)
            except Exception as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise StateError(
                    f"state[{fqn!r}]",
                    found=f"an object that torch.load(weights_only=True) refuses ({reason:.200})",
                    expected="tensors, numpy arrays and plain values, in dicts, lists and tuples",
                    do="convert it, or leave it out of the state dict",
                ) from error


def packed(value: Any) -> io.BytesIO:
    """The bytes from which a planner's `torch.load` makes this value; nobody but us has written them."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
