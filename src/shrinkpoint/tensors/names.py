"""Paths inside a state, the tensor names made from them, and the leaves under these names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from reprlib import Repr
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.tensors.plain_forms import form_items

StatePath: TypeAlias = tuple[Any, ...]  # Keys of dicts and indices of lists, outermost first

_DECIMAL = 10**4300  # Smallest whole number that is not written in decimal
_DIGITS = 600  # Digits per block; Python always converts at least 640, whatever its settings
_MAX_KEY_CHARS = 120  # Characters of a key in a message
_ESCAPED = re.compile("[%\x00-\x1f\x7f\ud800-\udfff]")
_UNSAFE = re.compile("[/%\x00-\x1f\x7f\ud800-\udfff]")


def tensor_name(path: StatePath) -> str:
    """Return the tensor name of a path: its keys joined with "/"; "/", "%" and unprintable characters are %-escaped.

    Names never begin with "~" and are never "__metadata__", which the container uses otherwise. Different paths may
    have the same name (keys 1 and "1"); the writer then chooses another and stores it.

    >>> tensor_name(("optimizer", "state", 0, "exp_avg"))
    'optimizer/state/0/exp_avg'
    >>> tensor_name(("a/b", "", "100%"))
    'a%2Fb/%/100%25'
    """
    parts = [key if type(key) is str else format_key(key) for key in path]
    name = "/".join(parts)
    if _ESCAPED.search(name) or name.count("/") >= len(parts) or not all(parts):
        name = "/".join([_UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", part) or "%" for part in parts]) or "state"
    if name.startswith("~") or name == "__metadata__":
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return name


def unique_name(base: str, used: Collection[str]) -> str:
    """Return `base`; with "%2", "%3" appended if it is in use, because two paths give one name."""
    name, count = base, 1
    while name in used:
        count += 1
        name = f"{base}%{count}"
    return name


def format_key(key: Any) -> str:
    """Like `str`, without Python's limit of digits; whole numbers of more than 4300 digits are shortened, in hex."""
    if isinstance(key, str):
        return key
    if isinstance(key, int) and key.bit_length() > 64:
        bits = key.bit_length()
        return _decimal(key) if -_DECIMAL < key < _DECIMAL else f"{hex(key >> (bits - 64))}~{bits}"
    if isinstance(key, tuple) and any(isinstance(part, int | tuple) for part in key):
        inner = ", ".join(format_key(part) if isinstance(part, int | tuple) else repr(part) for part in key)
        return f"({inner},)" if len(key) == 1 else f"({inner})"
    return str(key)


def _decimal(number: int) -> str:
    high, low = divmod(abs(number), 10**_DIGITS)
    text = f"{_decimal(high)}{low:0{_DIGITS}d}" if high else str(low)
    return f"-{text}" if number < 0 else text


def format_path(path: StatePath) -> str:
    """Return a path as error messages show it.

    >>> format_path(("optimizer", "state", 0, "exp_avg"))
    "state['optimizer']['state'][0]['exp_avg']"
    """
    return "state" + "".join(f"[{_show_key(key)}]" for key in path)


def _show_key(key: Any) -> str:
    if not isinstance(key, str):
        return format_key(key)
    return repr(key) if len(key) <= _MAX_KEY_CHARS else f"{key[:_MAX_KEY_CHARS]!r}..."


def short_repr(value: Any, max_chars: int = 40) -> str:
    """Return the first characters of `repr(value)`, at a cost bounded by what is shown."""
    return _bounded_repr.repr(value)[:max_chars]


class _BoundedRepr(Repr):
    def repr_int(self, x: int, level: int) -> str:
        return format_key(x)


_bounded_repr = _BoundedRepr()
_bounded_repr.maxstring = _bounded_repr.maxother = _bounded_repr.maxlong = 80


TensorOrArray: TypeAlias = "Tensor | np.ndarray[Any, Any]"


def named_leaves(state: Any) -> dict[str, Any]:
    """Return every tensor, array and plain value by name; equal names get a number, as in a file."""
    out = dict[str, Any]()
    for path, value in _iter_leaves(state, ()):
        out[unique_name(tensor_name(path), out)] = value
    return out


def child_items(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the (key, item) pairs of a dict, list, tuple, namespace, deque or buffer; None for a leaf."""
    if isinstance(value, dict):
        return iter(value.items())
    return enumerate(value) if isinstance(value, list | tuple) else form_items(value)


def _iter_leaves(value: Any, path: StatePath) -> Iterator[tuple[StatePath, Any]]:
    children = child_items(value)
    if children is None:
        yield path, value
    for key, item in children or ():
        yield from _iter_leaves(item, (*path, key))


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "US")


def as_tensor(leaf: TensorOrArray) -> Tensor:
    """Convert a tensor or an array to a detached tensor; shares memory if possible."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    return torch.from_numpy(np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")).reshape(leaf.shape))
