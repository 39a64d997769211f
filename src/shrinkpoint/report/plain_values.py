"""The plain values of a state's tree as text, for display only.

A malformed tree is shown unchanged; `unflatten` is what decodes a tree.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from shrinkpoint.tensors.info import JSON, is_nest_form

_TENSOR_TAGS = {"$t", "$p", "$q", "$n", "$B"}
_NEST_TAGS = {"$u", "$z", "$o", "$c"}
_MAX_DEPTH = 128
_STRUCT_CODES = {
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "b1": "?",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
}
"""Codes of `struct` by the dtype of a numpy scalar without its byte order."""


def list_plain_values(tree: JSON) -> tuple[tuple[str, str], ...]:
    """Lists (path, text) of every plain value of a state's tree, in its order; tensors and arrays are left out.

    >>> extra = {"epoch": 3, "betas": {"$u": [0.9, 0.95]}, "tags": []}
    >>> list_plain_values({"model": {"w": {"$t": ["model/w"]}}, "extra": extra})
    (('extra/epoch', '3'), ('extra/betas', '(0.9, 0.95)'), ('extra/tags', '[]'))
    """
    return tuple(_iter_values(tree, "", 0))


def _iter_values(tree: JSON, path: str, depth: int) -> Iterator[tuple[str, str]]:
    tag, inner = _split_tag(tree)
    if tag in _TENSOR_TAGS:
        return
    if not _has_tensor(tree, depth) and _is_small(tree):
        yield path or "state", _format(tree, depth)
        return
    for key, item in _child_items(tag, inner if tag else tree):
        yield from _iter_values(item, f"{path}/{key}" if path else key, depth + 1)


def _split_tag(tree: JSON) -> tuple[str, JSON]:
    """("$x", content) of a tagged value, else ("", None)."""
    if isinstance(tree, dict) and len(tree) == 1:
        ((key, inner),) = tree.items()
        if key.startswith("$"):
            return key, inner
    return "", None


def _child_items(tag: str, inner: JSON) -> Iterator[tuple[str, JSON]]:
    if tag in _NEST_TAGS and isinstance(inner, dict | list):
        yield from _child_items("", inner)
    elif tag == "$m" and isinstance(inner, list) and inner:
        yield from _child_items("", inner[0])
    elif tag == "$x" and isinstance(inner, list) and len(inner) == 2:
        tag, content = _split_tag(inner[1])
        yield from _child_items(tag, content if tag else inner[1])
    elif tag == "$d" and isinstance(inner, list):
        yield from ((_format(pair[0], 0), pair[1]) for pair in inner if isinstance(pair, list) and len(pair) == 2)
    elif isinstance(inner, dict):
        yield from inner.items()
    elif isinstance(inner, list):
        yield from ((str(index), item) for index, item in enumerate(inner))


def _has_tensor(tree: JSON, depth: int) -> bool:
    if depth > _MAX_DEPTH or not isinstance(tree, dict | list):
        return False
    items = tree.values() if isinstance(tree, dict) else tree
    return _split_tag(tree)[0] in _TENSOR_TAGS or any(_has_tensor(item, depth + 1) for item in items)


def _is_small(tree: JSON) -> bool:
    """True if a value is shown on one line: a scalar, or a sequence of at most 8; a dict gets a line for each value."""
    tag, inner = _split_tag(tree)
    content = inner if tag in ("$u", "$z") else tree
    if isinstance(content, list):
        return len(content) <= 8 and all(not isinstance(item, list) and _is_small(item) for item in content)
    is_nest = tag in ("", "$o", "$c", "$d", "$m") or (tag == "$x" and is_nest_form(inner))
    return not is_nest or not isinstance(tree, dict) or not tree


def _format(tree: JSON, depth: int) -> str:
    tag, inner = _split_tag(tree)
    if tag == "$f":  # nan or an infinity, as the bits of a double in hex
        return {"7ff0000000000000": "inf", "fff0000000000000": "-inf"}.get(str(inner), "nan")
    if tag == "$i":
        return f"0x{inner}"
    if tag == "$b":
        return f"bytes in base64: {inner}"
    if tag == "$g":
        return _format_numpy_scalar(inner)
    if tag == "$x" and isinstance(inner, list) and len(inner) == 2 and depth < _MAX_DEPTH:
        return f"{inner[0]} {_format(inner[1], depth + 1)}"
    if tag in ("$u", "$z") and isinstance(inner, list) and depth < _MAX_DEPTH:
        items = ", ".join(_format(item, depth + 1) for item in inner)
        return f"({items},)" if len(inner) == 1 else f"({items})"
    if isinstance(tree, list) and depth < _MAX_DEPTH:
        return "[" + ", ".join(_format(item, depth + 1) for item in tree) + "]"
    return repr(tree)


def _format_numpy_scalar(inner: Any) -> str:
    """Formats a numpy scalar, given as dtype and little-endian bytes in hex, by its value if `struct` has the type."""
    dtype, digits = inner if isinstance(inner, list) and len(inner) == 2 else ("?", inner)
    try:
        (value,) = struct.unpack("<" + _STRUCT_CODES[str(dtype)[1:]], bytes.fromhex(str(digits)))
        return f"{value!r} (numpy {dtype})"
    except (KeyError, ValueError, struct.error):
        return f"numpy {dtype} 0x{digits}"
