"""Objects of a state dict that are not tensors, which torch passes and expects as the bytes of `torch.save`."""

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
"""The only key of a dict that represents a BytesIO; a user's dict with this key gets a colon at its end."""
_MAX_DEPTH = 64
_LOCK = threading.Lock()  # `safe_globals` is one list for the whole process


def unpickle_plain(data: io.BytesIO, fqn: str) -> Any:
    """Unpickle an object that consists of plain values, tensors, numpy arrays and buffers.

    Args:
        data: the bytes of `torch.save`.
        fqn: the object's name, for messages.

    Raises:
        StateError: it consists of anything else.
    """
    data.seek(0)
    with _LOCK:
        allowed = set(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals(
            [obj for obj in [*_NUMPY_GLOBALS, bytes, io.BytesIO] if obj not in allowed]
        ):
            try:
                return encode_buffers(torch.load(data, map_location="cpu", weights_only=True))
            except Exception as error:
                raise StateError(
                    f"state[{fqn!r}]",
                    found=_describe_unsupported(data),
                    expected="tensors, numpy arrays, plain values and BytesIO, in dicts, lists and tuples",
                    do="convert it, or leave it out of the state dict",
                ) from (error if isinstance(error, StateError) else None)  # torch's own message is about loading


def _describe_unsupported(data: io.BytesIO) -> str:
    """The kind of the value that cannot be stored."""
    data.seek(0)
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(data))
    except Exception:  # torch reads such a value in another way
        names = []
    return f"a value made with {', '.join(names)}" if names else "a value of a kind that is not stored"


def encode_buffers(value: Any, depth: int = 0) -> Any:
    """The same nest with a plain value for every `io.BytesIO`: its position and its bytes."""
    if type(value) is io.BytesIO:
        return {_BUFFER_KEY: [value.tell(), value.getvalue()]}
    return _map_container(value, encode_buffers, depth, lambda key: f"{key}:")


def decode_buffers(value: Any, depth: int = 0) -> Any:
    """The inverse of `encode_buffers`.

    Raises:
        CorruptError: a plain value that no release writes.
    """
    if type(value) is dict and [*value] == [_BUFFER_KEY]:
        return _decode_buffer(value[_BUFFER_KEY])
    return _map_container(value, decode_buffers, depth, lambda key: key[:-1])


def _map_container(value: Any, transform: Callable[[Any, int], Any], depth: int, rename: Callable[[str], str]) -> Any:
    """A container with transformed parts; the same object if none of them changes.

    Args:
        transform: is called with a part and its depth.
        rename: escapes or unescapes the key of a dict that could be taken for a buffer.
    """
    if depth > _MAX_DEPTH:  # flattening refuses it later
        return value
    if type(value) in (list, tuple):
        parts = [transform(part, depth + 1) for part in value]
        return type(value)(parts) if any(new is not old for new, old in zip(parts, value, strict=True)) else value
    if type(value) in (dict, OrderedDict):
        is_escaped = len(value) == 1 and _is_escaped_key(next(iter(value)))
        items = {rename(key) if is_escaped else key: transform(part, depth + 1) for key, part in value.items()}
        is_same = all(key in items and items[key] is part for key, part in value.items())
        return value if is_same else type(value)(items)
    return value


def _is_escaped_key(key: Any) -> bool:
    return type(key) is str and key.startswith(_BUFFER_KEY) and not key[len(_BUFFER_KEY) :].strip(":")


def _decode_buffer(value: Any) -> io.BytesIO:
    if type(value) is list and [type(part) for part in value] == [int, bytes] and 0 <= value[0] < 2**62:
        buffer = io.BytesIO(value[1])
        buffer.seek(value[0])
        return buffer
    raise CorruptError("state", found=f"{value!r:.80} as a BytesIO", expected="a position and bytes")


def pickle_plain(value: Any) -> io.BytesIO:
    """The bytes of `torch.save`, which a planner passes to `torch.load`; they are never stored."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
