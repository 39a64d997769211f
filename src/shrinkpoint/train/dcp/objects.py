"""What is no tensor: objects of a state dict, which torch hands over and wants back as the bytes of `torch.save`."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shrinkpoint.errors import CorruptError, StateError

_NUMPY_GLOBALS = [np._core.multiarray._reconstruct, np._core.multiarray.scalar, np.ndarray, np.dtype]  # type: ignore[attr-defined]
_NUMPY_GLOBALS += [type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"]
_BUFFER_KEY = "shrinkpoint:buffer"
"""The one key of a dict that stands for a BytesIO; a dict that only looks like one gets a colon at its end."""
_MAX_DEPTH = 64
_LOCK = threading.Lock()  # `safe_globals` is one list for the whole process


def unpickle_plain(data: io.BytesIO, fqn: str) -> Any:
    """The object that `data` was made from, if it is made of plain values, tensors, numpy arrays and buffers.

    Raises:
        StateError: it is not.
    """
    data.seek(0)
    with _LOCK:
        known = set(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals(
            [kind for kind in [*_NUMPY_GLOBALS, bytes, io.BytesIO] if kind not in known]
        ):
            try:
                return encode_buffers(torch.load(data, map_location="cpu", weights_only=True))
            except Exception as error:
                raise StateError(
                    f"state[{fqn!r}]",
                    found=_describe_unsupported(data),
                    expected="tensors, numpy arrays, plain values and BytesIO, in dicts, lists and tuples",
                    do="convert it, or leave it out of the state dict",
                ) from (error if isinstance(error, StateError) else None)  # torch's own speaks of loading


def _describe_unsupported(data: io.BytesIO) -> str:
    """What it is that cannot be stored, in our words."""
    data.seek(0)
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(data))
    except Exception:  # of a value that torch reads in another way
        names = []
    return f"a value made with {', '.join(names)}" if names else "a value of a kind that is not stored"


def encode_buffers(value: Any, depth: int = 0) -> Any:
    """The same nest with a plain form for every `io.BytesIO`: its position and its bytes."""
    if type(value) is io.BytesIO:
        return {_BUFFER_KEY: [value.tell(), value.getvalue()]}
    return _map_container(value, encode_buffers, depth, lambda key: f"{key}:")


def decode_buffers(value: Any, depth: int = 0) -> Any:
    """The inverse of `stored`.

    Raises:
        CorruptError: a form that no release writes.
    """
    if type(value) is dict and [*value] == [_BUFFER_KEY]:
        return _decode_buffer(value[_BUFFER_KEY])
    return _map_container(value, decode_buffers, depth, lambda key: key[:-1])


def _map_container(value: Any, transform: Callable[[Any, int], Any], depth: int, rename: Callable[[str], str]) -> Any:
    """`transform` of the parts of a container; the same object where none of them changes.

    Args:
        rename: the key of a dict that only looks like a form.
    """
    if depth > _MAX_DEPTH:  # the state refuses it
        return value
    if type(value) in (list, tuple):
        parts = [transform(part, depth + 1) for part in value]
        return type(value)(parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    if type(value) in (dict, OrderedDict):
        alike = len(value) == 1 and _is_escaped_key(next(iter(value)))
        items = {rename(key) if alike else key: transform(part, depth + 1) for key, part in value.items()}
        same = all(key in items and items[key] is part for key, part in value.items())
        return value if same else type(value)(items)
    return value


def _is_escaped_key(key: Any) -> bool:
    return type(key) is str and key.startswith(_BUFFER_KEY) and not key[len(_BUFFER_KEY) :].strip(":")


def _decode_buffer(form: Any) -> io.BytesIO:
    if type(form) is list and [type(part) for part in form] == [int, bytes] and 0 <= form[0] < 2**62:
        buffer = io.BytesIO(form[1])
        buffer.seek(form[0])
        return buffer
    raise CorruptError("state", found=f"{form!r:.80} as a BytesIO", expected="a position and bytes")


def pickle_plain(value: Any) -> io.BytesIO:
    """The bytes from which a planner's `torch.load` makes this value; nobody but us has written them."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
