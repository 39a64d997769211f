"""Encodes a state as a JSON tree and a list of tensor leaves.

Plain values are stored unchanged; types that JSON lacks are an object with one key that begins with "$"::

    {"$t": ref}              tensor                        {"$i": "-1f.."}     integer beyond 64 bit, in hex
    {"$p": ref}              nn.Parameter                  {"$f": "7ff8.."}    nan or infinity, 8 bytes in hex
    {"$q": ref}              nn.Parameter, frozen          {"$s": "eda0.."}    text with lone surrogates, in hex
    {"$n": [dtype, ref]}     numpy array                   {"$b": "base64"}    bytes, short
    {"$g": [dtype, hex]}     numpy scalar                  {"$B": ref}         bytes, long
    {"$u": [..]}             tuple                         {"$d": [[k, v]..]}  dict with keys that are not plain text
    {"$z": [..]}             torch.Size                    {"$o": dict}        OrderedDict
    {"$c": dict}             Counter                       {"$m": [dict, meta]}  OrderedDict with `_metadata`

`ref` is described in `shared_storage.py`. The order of the keys of a dict is that of its JSON object.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shrinkpoint.errors import StateError
from shrinkpoint.tensors.dtypes import DTYPE_NAMES, materialize, numpy_to_torch_dtype
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.names import StatePath, format_path
from shrinkpoint.tensors.shared_storage import Leaf

MAX_DEPTH = 48
"""Largest nesting depth of dicts, lists and tuples. The JSON of one level has at most five levels, and the container
allows 248."""

MAX_INLINE_BYTES = 256
"""Longest bytes value stored in the tree; longer ones become U8 tensors."""

_STORABLE = "tensors, numpy values, None, bool, int, float, str, bytes, or dicts, lists and tuples of these"
_DEFAULT_META = {"version": 1}


class TreeEncoder:
    """Turns a nest into a tree and collects the tensor leaves on the way.

    Attributes:
        leaves: in the order of the nest; their references are still empty lists inside the tree.
        optimizers: paths of the dicts that look like the `state_dict` of an optimizer.
    """

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.optimizers: list[tuple[StatePath, dict[Any, Any]]] = []
        self._open_ids: set[int] = set()
        self._value_encoders: dict[type, Callable[[Any, StatePath], JSON]] = {
            type(None): _unchanged,
            bool: _unchanged,
            int: _integer,
            float: _float,
            str: _text,
            bytes: self._bytes,
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._parameter,
            np.ndarray: self._array,
        }
        self._nest_encoders: dict[type, Callable[[Any, StatePath], JSON]] = {
            dict: self._dict,
            OrderedDict: self._ordered,
            Counter: lambda value, path: {"$c": self._dict(value, path)},
            list: self._items,
            tuple: lambda value, path: {"$u": self._items(value, path)},
            torch.Size: lambda value, path: {"$z": self._items(tuple(value), path)},
        }

    def encode(self, value: Any, path: StatePath = ()) -> JSON:
        """Return the tree of `value`, which is at `path` of the state.

        Raises:
            StateError: a value cannot be stored; `where` is its path.
        """
        plain = self._value_encoders.get(type(value))
        if plain is not None:
            return plain(value, path)
        nest = self._nest_encoders.get(type(value))
        if nest is not None:
            return self._encode_nest(nest, value, path)
        if isinstance(value, np.generic):
            return _numpy_scalar(value, path)
        raise _type_error(value, path)

    def _encode_nest(self, nest: Callable[[Any, StatePath], JSON], value: Any, path: StatePath) -> JSON:
        if id(value) in self._open_ids:
            raise StateError(format_path(path), found="a nest that contains itself", expected=_STORABLE)
        if len(path) >= MAX_DEPTH:
            raise _depth_error(path)
        self._open_ids.add(id(value))
        try:
            return nest(value, path)
        finally:
            self._open_ids.remove(id(value))

    def _items(self, values: list[Any] | tuple[Any, ...], path: StatePath) -> JSON:
        return [self.encode(value, (*path, index)) for index, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: StatePath) -> JSON:
        if is_optimizer_state(value):
            self.optimizers.append((path, value))
        if all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        return {"$d": [[self._key(key, path), self.encode(item, (*path, key))] for key, item in value.items()]}

    def _ordered(self, value: OrderedDict[Any, Any], path: StatePath) -> JSON:
        tree = self._dict(value, path)
        meta = getattr(value, "_metadata", None)  # versions of the modules, which load_state_dict uses
        if not isinstance(meta, dict):
            return {"$o": tree}
        unusual = {key: item for key, item in meta.items() if item != _DEFAULT_META}
        return {"$m": [tree, self.encode(unusual, (*path, "_metadata"))]} if unusual else {"$o": tree}

    def _key(self, key: Any, path: StatePath, depth: int = 1) -> JSON:
        if len(path) + depth > MAX_DEPTH:
            raise _depth_error(path)
        if type(key) is tuple:
            return {"$u": [self._key(part, path, depth + 1) for part in key]}
        if type(key) in (type(None), bool, int, float, str):
            return self._value_encoders[type(key)](key, path)
        raise StateError(
            format_path(path),
            found=f"a dict with a key of type {_type_name(key)}",
            expected="str, int, float, bool, None or tuples of these",
        )

    def _bytes(self, value: bytes, path: StatePath) -> JSON:
        if len(value) <= MAX_INLINE_BYTES:
            return {"$b": base64.b64encode(value).decode()}
        return {"$B": self._add_leaf(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)}

    def _tensor(self, value: torch.Tensor, path: StatePath) -> JSON:
        return {"$t": self._add_leaf(_plain_tensor(value, path), path)}

    def _parameter(self, value: torch.nn.Parameter, path: StatePath) -> JSON:
        return {"$p" if value.requires_grad else "$q": self._add_leaf(_plain_tensor(value, path), path)}

    def _array(self, value: np.ndarray[Any, Any], path: StatePath) -> JSON:
        if numpy_to_torch_dtype(value.dtype) is None:
            raise _numpy_error(f"a numpy array of dtype {value.dtype}", path)
        native = value.astype(value.dtype.newbyteorder("="), copy=False)
        flags, size = native.flags, native.itemsize
        ordered = flags.c_contiguous or flags.f_contiguous
        standard = all(stride >= 0 and stride % size == 0 for stride in native.strides)  # sizes of 1 may have any
        if not (ordered and standard and flags.writeable):  # torch would raise or warn
            native = native.copy(order="C")
        return {"$n": [value.dtype.str, self._add_leaf(torch.from_numpy(native), path)]}

    def _add_leaf(self, tensor: torch.Tensor, path: StatePath) -> list[JSON]:
        leaf = Leaf(path, tensor)
        self.leaves.append(leaf)
        return leaf.reference


def is_optimizer_state(value: dict[Any, Any]) -> bool:
    """Whether a dict has the shape of `torch.optim.Optimizer.state_dict()`."""
    return isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)


def _unchanged(value: Any, path: StatePath) -> JSON:
    return value


def _integer(value: int, path: StatePath) -> JSON:
    return value if -(2**63) <= value < 2**63 else {"$i": f"{value:x}"}


def _float(value: float, path: StatePath) -> JSON:
    return value if math.isfinite(value) else {"$f": struct.pack(">d", value).hex()}


def _text(value: str, path: StatePath) -> JSON:
    return value if _is_unicode(value) else {"$s": value.encode("utf-8", "surrogatepass").hex()}


def _is_unicode(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _numpy_scalar(value: np.generic, path: StatePath) -> JSON:
    if numpy_to_torch_dtype(value.dtype) is None:
        raise _numpy_error(f"a numpy scalar of dtype {value.dtype}", path)
    little = value.dtype.newbyteorder("<")
    return {"$g": [little.str, np.asarray(value).astype(little).tobytes().hex()]}


def _plain_tensor(value: torch.Tensor, path: StatePath) -> torch.Tensor:
    """Return the detached strided tensor; copies only if it is lazily conjugated or negated."""
    plain = value.layout is torch.strided and value.dtype in DTYPE_NAMES and not value.is_meta
    if not plain or value.is_nested or value.is_quantized:
        feature = next(feature for feature, present in _unsupported_features(value) if present)
        raise StateError(format_path(path), found=feature, expected="a dense tensor with values", do="convert it first")
    value = value.detach()
    if not value.is_conj() and not value.is_neg():
        return value
    with torch.no_grad():
        return materialize(value)


def _unsupported_features(value: torch.Tensor) -> Iterator[tuple[str, bool]]:
    yield "a quantized tensor", value.is_quantized
    yield f"a tensor of layout {value.layout}", value.layout is not torch.strided
    yield "a tensor on the meta device, which has no values", value.is_meta
    yield "a nested tensor", value.is_nested
    yield f"a tensor of dtype {value.dtype}", value.dtype not in DTYPE_NAMES


def _numpy_error(found: str, path: StatePath) -> StateError:
    return StateError(
        format_path(path), found=found, expected="a bool, integer, float or complex dtype of up to 64 bit"
    )


def _type_error(value: Any, path: StatePath) -> StateError:
    advice = "convert it to one of these before saving"
    if isinstance(value, torch.Tensor):
        advice = "save its values as plain tensors (a DTensor: its local shard)"
    elif isinstance(value, dict | list | tuple):
        advice = "convert it to a plain dict, list or tuple"
    return StateError(format_path(path), found=f"a value of type {_type_name(value)}", expected=_STORABLE, do=advice)


def _depth_error(path: StatePath) -> StateError:
    return StateError(
        format_path(path[:3]) + "...",
        found=f"a nest more than {MAX_DEPTH} levels deep",
        expected="a flatter one",
        do="flatten it before saving",
    )


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
