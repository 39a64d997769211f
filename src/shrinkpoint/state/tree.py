"""A state as a JSON tree and tensors, and back.

Plain values stand for themselves; what JSON lacks is an object with one key that begins with "$"::

    {"$t": ref}              tensor                        {"$i": "-1f.."}     integer beyond 64 bit, in hex
    {"$p": ref}              nn.Parameter                  {"$f": "7ff8.."}    nan or infinity, 8 bytes in hex
    {"$q": ref}              nn.Parameter, frozen          {"$s": "eda0.."}    text with lone surrogates, in hex
    {"$n": [dtype, ref]}     numpy array                   {"$b": "base64"}    bytes, short
    {"$g": [dtype, hex]}     numpy scalar                  {"$B": ref}         bytes, long
    {"$u": [..]}             tuple                         {"$d": [[k, v]..]}  dict with keys that are not plain text
    {"$z": [..]}             torch.Size                    {"$o": dict}        OrderedDict
    {"$c": dict}             Counter                       {"$m": [dict, meta]}  OrderedDict with `_metadata`

`ref` is described in `ties.py`. The order of the keys of a dict is that of its JSON object.
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
from shrinkpoint.record import JSON
from shrinkpoint.state.dtypes import NAMES, numpy_storable, resolve
from shrinkpoint.state.path import Path, where_of
from shrinkpoint.state.ties import Leaf

MAX_DEPTH = 48
"""How deep dicts, lists and tuples may nest. The JSON of one level is at most five levels deep, and a container takes
no more than 248."""

SHORT_BYTES = 256
"""Bytes values up to this length are kept in the tree; longer ones become U8 tensors."""

_STORABLE = "tensors, numpy values, None, bool, int, float, str, bytes, or dicts, lists and tuples of these"
_DEFAULT_META = {"version": 1}


class Planter:
    """Turns a nest into a tree and collects the tensor leaves on the way.

    Attributes:
        leaves: in the order of the nest; their references are still empty lists inside the tree.
        optimizers: paths of the dicts that look like the `state_dict` of an optimizer.
    """

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.optimizers: list[tuple[Path, dict[Any, Any]]] = []
        self._open: set[int] = set()
        self._plain: dict[type, Callable[[Any, Path], JSON]] = {
            type(None): _itself,
            bool: _itself,
            int: _integer,
            float: _float,
            str: _text,
            bytes: self._bytes,
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._parameter,
            np.ndarray: self._array,
        }
        self._nests: dict[type, Callable[[Any, Path], JSON]] = {
            dict: self._dict,
            OrderedDict: self._ordered,
            Counter: lambda value, path: {"$c": self._dict(value, path)},
            list: self._items,
            tuple: lambda value, path: {"$u": self._items(value, path)},
            torch.Size: lambda value, path: {"$z": self._items(tuple(value), path)},
        }

    def plant(self, value: Any, path: Path = ()) -> JSON:
        """The tree of `value`, which stands at `path` of the state.

        Raises:
            StateError: at the first thing that cannot be stored; `where` is its path.
        """
        plain = self._plain.get(type(value))
        if plain is not None:
            return plain(value, path)
        nest = self._nests.get(type(value))
        if nest is not None:
            return self._inside(nest, value, path)
        if isinstance(value, np.generic):
            return _numpy_scalar(value, path)
        raise _unstorable(value, path)

    def _inside(self, nest: Callable[[Any, Path], JSON], value: Any, path: Path) -> JSON:
        if id(value) in self._open:
            raise StateError(where_of(path), found="a nest that contains itself", expected=_STORABLE)
        if len(path) >= MAX_DEPTH:
            raise _too_deep(path)
        self._open.add(id(value))
        try:
            return nest(value, path)
        finally:
            self._open.remove(id(value))

    def _items(self, values: list[Any] | tuple[Any, ...], path: Path) -> JSON:
        return [self.plant(value, (*path, index)) for index, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: Path) -> JSON:
        if is_optimizer(value):
            self.optimizers.append((path, value))
        if all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in value):
            return {key: self.plant(item, (*path, key)) for key, item in value.items()}
        return {"$d": [[self._key(key, path), self.plant(item, (*path, key))] for key, item in value.items()]}

    def _ordered(self, value: OrderedDict[Any, Any], path: Path) -> JSON:
        tree = self._dict(value, path)
        meta = getattr(value, "_metadata", None)  # versions of the modules, which load_state_dict looks at
        if not isinstance(meta, dict):
            return {"$o": tree}
        unusual = {key: item for key, item in meta.items() if item != _DEFAULT_META}
        return {"$m": [tree, self.plant(unusual, (*path, "_metadata"))]} if unusual else {"$o": tree}

    def _key(self, key: Any, path: Path, depth: int = 1) -> JSON:
        if len(path) + depth > MAX_DEPTH:
            raise _too_deep(path)
        if type(key) is tuple:
            return {"$u": [self._key(part, path, depth + 1) for part in key]}
        if type(key) in (type(None), bool, int, float, str):
            return self._plain[type(key)](key, path)
        found = f"a dict with a key of type {_type_name(key)}"
        raise StateError(where_of(path), found=found, expected="str, int, float, bool, None or tuples of these")

    def _bytes(self, value: bytes, path: Path) -> JSON:
        if len(value) <= SHORT_BYTES:
            return {"$b": base64.b64encode(value).decode()}
        return {"$B": self._leaf(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)}

    def _tensor(self, value: torch.Tensor, path: Path) -> JSON:
        return {"$t": self._leaf(_checked(value, path), path)}

    def _parameter(self, value: torch.nn.Parameter, path: Path) -> JSON:
        return {"$p" if value.requires_grad else "$q": self._leaf(_checked(value, path), path)}

    def _array(self, value: np.ndarray[Any, Any], path: Path) -> JSON:
        if numpy_storable(value.dtype) is None:
            raise _bad_numpy(f"a numpy array of dtype {value.dtype}", path)
        native = value.astype(value.dtype.newbyteorder("="), copy=False)
        flags, size = native.flags, native.itemsize
        ordered = flags.c_contiguous or flags.f_contiguous
        usual = all(stride >= 0 and stride % size == 0 for stride in native.strides)  # of a side of 1 it may be any
        if not (ordered and usual and flags.writeable):  # else torch refuses or warns
            native = native.copy(order="C")
        return {"$n": [value.dtype.str, self._leaf(torch.from_numpy(native), path)]}

    def _leaf(self, tensor: torch.Tensor, path: Path) -> list[JSON]:
        leaf = Leaf(path, tensor)
        self.leaves.append(leaf)
        return leaf.reference


def is_optimizer(value: dict[Any, Any]) -> bool:
    """Whether a dict has the shape of `torch.optim.Optimizer.state_dict()`."""
    return isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)


def _itself(value: Any, path: Path) -> JSON:
    return value


def _integer(value: int, path: Path) -> JSON:
    return value if -(2**63) <= value < 2**63 else {"$i": f"{value:x}"}


def _float(value: float, path: Path) -> JSON:
    return value if math.isfinite(value) else {"$f": struct.pack(">d", value).hex()}


def _text(value: str, path: Path) -> JSON:
    return value if _is_unicode(value) else {"$s": value.encode("utf-8", "surrogatepass").hex()}


def _is_unicode(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _numpy_scalar(value: np.generic, path: Path) -> JSON:
    if numpy_storable(value.dtype) is None:
        raise _bad_numpy(f"a numpy scalar of dtype {value.dtype}", path)
    little = value.dtype.newbyteorder("<")
    return {"$g": [little.str, np.asarray(value).astype(little).tobytes().hex()]}


def _checked(value: torch.Tensor, path: Path) -> torch.Tensor:
    """The tensor's values as a plain strided tensor on its device, detached; no copy unless it is lazily conjugated."""
    plain = value.layout is torch.strided and value.dtype in NAMES and not value.is_meta
    if not plain or value.is_nested or value.is_quantized:
        what = next(what for what, wrong in _oddities(value) if wrong)
        raise StateError(where_of(path), found=what, expected="a dense tensor with values", do="convert it first")
    value = value.detach()
    if not value.is_conj() and not value.is_neg():
        return value
    with torch.no_grad():
        return resolve(value)


def _oddities(value: torch.Tensor) -> Iterator[tuple[str, bool]]:
    yield "a quantized tensor", value.is_quantized
    yield f"a tensor of layout {value.layout}", value.layout is not torch.strided
    yield "a tensor on the meta device, which has no values", value.is_meta
    yield "a nested tensor", value.is_nested
    yield f"a tensor of dtype {value.dtype}", value.dtype not in NAMES


def _bad_numpy(found: str, path: Path) -> StateError:
    return StateError(where_of(path), found=found, expected="a bool, integer, float or complex dtype of up to 64 bit")


def _unstorable(value: Any, path: Path) -> StateError:
    do = "convert it to one of these before saving"
    if isinstance(value, torch.Tensor):
        do = "save what it holds as plain tensors (a DTensor: its local shard)"
    elif isinstance(value, dict | list | tuple):
        do = "convert it to a plain dict, list or tuple"
    return StateError(where_of(path), found=f"a value of type {_type_name(value)}", expected=_STORABLE, do=do)


def _too_deep(path: Path) -> StateError:
    found, expected = f"a nest more than {MAX_DEPTH} levels deep", "a flatter one"
    return StateError(where_of(path[:3]) + "...", found=found, expected=expected, do="flatten it before saving")


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
