"""Encodes a state as a JSON tree and a list of tensor leaves, and decodes such a tree, which is not trusted.

Plain values are stored unchanged; types that JSON lacks are an object with one key that begins with "$"::

    {"$t": ref}              tensor                        {"$i": "-1f.."}     integer beyond 64 bit, in hex
    {"$p": ref}              nn.Parameter                  {"$f": "7ff8.."}    nan or infinity, 8 bytes in hex
    {"$q": ref}              nn.Parameter, frozen          {"$s": "eda0.."}    text with lone surrogates, in hex
    {"$n": [dtype, ref]}     numpy array                   {"$b": "base64"}    bytes, short
    {"$g": [dtype, hex]}     numpy scalar                  {"$B": ref}         bytes, long
    {"$u": [..]}             tuple                         {"$d": [[k, v]..]}  dict with keys that are not plain text
    {"$z": [..]}             torch.Size                    {"$o": dict}        OrderedDict
    {"$c": dict}             Counter                       {"$m": [dict, meta]}  OrderedDict with `_metadata`

`ref` is described in `shared_storage`. The order of the keys of a dict is that of its JSON object.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any, NoReturn

import numpy as np
import torch

from shrinkpoint.errors import CorruptError, StateError
from shrinkpoint.tensors.dtypes import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    as_bits,
    empty,
    materialize,
    numpy_dtype,
    numpy_to_torch_dtype,
)
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.memory import TENSOR_ALIGN
from shrinkpoint.tensors.names import StatePath, format_path, short_repr, tensor_name
from shrinkpoint.tensors.shared_storage import Leaf, num_reached

MAX_DEPTH = 48
"""Largest nesting depth of dicts, lists and tuples. The JSON of one level has at most five levels, and the container
allows 248."""

MAX_INLINE_BYTES = 256
"""Longest bytes value stored in the tree; longer ones become U8 tensors."""

MAX_TREE_CHARS = 100_000_000
"""Largest number of characters of the plain values of a state as JSON, and of the names of its tensors: a file has no
more (`container.index`)."""
MIN_NEST_BYTES = 8
"""Fewest characters per list or dict in a state with more than `_MAX_NESTS` of them, as in `container.strict_json`."""
_MAX_NESTS = 1 << 21

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
        self._num_chars = self._num_nests = self._name_chars = 0  # as far as the state has been encoded
        self._byte_rows: dict[bytes, torch.Tensor] = {}
        self._array_copies: dict[int, tuple[np.ndarray[Any, Any], torch.Tensor]] = {}  # by id; the array must live on
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
        if type(value) in self._value_encoders:
            tree = self._value_encoders[type(value)](value, path)
            self._count(tree, path)
            return tree
        if isinstance(value, np.generic):
            self._num_chars += 2 * value.itemsize
            return _numpy_scalar(value, path)
        if type(value) not in self._nest_encoders:
            raise _type_error(value, path)
        if id(value) in self._open_ids:
            do = "break the circle: save what it refers to once"
            raise StateError(format_path(path), found="a nest that contains itself", expected=_STORABLE, do=do)
        if len(path) >= MAX_DEPTH:
            raise _depth_error(path)
        self._count([], path)
        self._open_ids.add(id(value))
        try:
            return self._nest_encoders[type(value)](value, path)
        finally:
            self._open_ids.remove(id(value))

    def _count(self, tree: JSON, path: StatePath) -> None:
        """Count the JSON of a value; it may be part of a state in many places, and is text in each of them.

        Raises:
            StateError: no file could hold what was counted.
        """
        text = next(iter(tree.values())) if type(tree) is dict else tree
        self._num_chars += len(encode_basestring_ascii(text)) if type(text) is str else 2
        self._num_nests += (type(tree) is dict) + (type(text) is list)
        max_nests = max(_MAX_NESTS, self._num_chars // MIN_NEST_BYTES)
        if self._num_chars <= MAX_TREE_CHARS and self._num_nests <= max_nests and self._name_chars <= MAX_TREE_CHARS:
            return
        found = f"more than {self._num_chars:,} characters and {self._num_nests:,} lists and dicts in plain values"
        found = f"names of {self._name_chars:,} characters" if self._name_chars > MAX_TREE_CHARS else found
        expected = f"at most {MAX_TREE_CHARS:,} characters and {max_nests:,} lists and dicts, repeated values included"
        do = "save long texts as bytes, many small values as one tensor, or the state in several files"
        raise StateError(format_path(path), found=found, expected=expected, do=do)

    def count_references(self) -> None:
        """Count the references, once they are filled in: each has the name of a tensor. Raises as `encode` does."""
        for leaf in self.leaves:
            self._count(leaf.reference[0] if leaf.reference else None, leaf.path)

    def _items(self, values: list[Any] | tuple[Any, ...], path: StatePath) -> JSON:
        return [self.encode(value, (*path, index)) for index, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: StatePath) -> JSON:
        if is_optimizer_state(value):
            self.optimizers.append((path, value))
        self._num_chars += sum(len(encode_basestring_ascii(key)) if type(key) is str else 8 for key in value)
        if _are_plain(value):
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
        expected = "str, int, float, bool, None or tuples of these"
        do = "use such keys, e.g. str(key)"
        raise StateError(
            format_path(path), found=f"a dict with a key of type {_type_name(key)}", expected=expected, do=do
        )

    def _bytes(self, value: bytes, path: StatePath) -> JSON:
        if len(value) <= MAX_INLINE_BYTES:
            return {"$b": base64.b64encode(value).decode()}
        if value not in self._byte_rows:
            self._byte_rows[value] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        return {"$B": self._add_leaf(self._byte_rows[value], path)}

    def _tensor(self, value: torch.Tensor, path: StatePath) -> JSON:
        return {"$t": self._add_leaf(_plain_tensor(value, path), path)}

    def _parameter(self, value: torch.nn.Parameter, path: StatePath) -> JSON:
        return {"$p" if value.requires_grad else "$q": self._add_leaf(_plain_tensor(value, path), path)}

    def _array(self, value: np.ndarray[Any, Any], path: StatePath) -> JSON:
        _check_numpy_dtype("array", value.dtype, path)
        if id(value) not in self._array_copies:
            self._array_copies[id(value)] = value, torch.from_numpy(self._native_array(value))
        return {"$n": [value.dtype.str, self._add_leaf(self._array_copies[id(value)][1], path)]}

    @staticmethod
    def _native_array(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The array if torch can share its memory, else a copy that it can share."""
        native = value.astype(value.dtype.newbyteorder("="), copy=False)
        flags, size = native.flags, native.itemsize
        ordered = flags.c_contiguous or flags.f_contiguous
        standard = all(stride >= 0 and stride % size == 0 for stride in native.strides)  # sizes of 1 may have any
        if not (ordered and standard and flags.writeable):  # torch would raise or warn
            native = native.copy(order="C")
        return native

    def _add_leaf(self, tensor: torch.Tensor, path: StatePath) -> list[JSON]:
        self._name_chars += sum(len(key) if type(key) is str else 1 for key in path)
        leaf = Leaf(path, tensor)
        self.leaves.append(leaf)
        return leaf.reference


def _are_plain(keys: Iterable[Any]) -> bool:
    """Whether all keys are texts that an object of JSON can have, and none is a tag."""
    return all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in keys)


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
    _check_numpy_dtype("scalar", value.dtype, path)
    little = value.dtype.newbyteorder("<")
    return {"$g": [little.str, np.asarray(value).astype(little).tobytes().hex()]}


def _plain_tensor(value: torch.Tensor, path: StatePath) -> torch.Tensor:
    """Return the detached strided tensor; copies only if it is lazily conjugated or negated."""
    feature = _unsupported_feature(value)
    if feature:
        raise StateError(format_path(path), found=feature, expected="a dense tensor with values", do="convert it first")
    value = value.detach()
    if not value.is_conj() and not value.is_neg():
        return value
    with torch.no_grad():
        return materialize(value)


def _unsupported_feature(value: torch.Tensor) -> str:
    if value.is_quantized:
        return "a quantized tensor"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}"
    if value.is_meta:
        return "a tensor on the meta device, which has no values"
    if value.is_nested:
        return "a nested tensor"
    return "" if value.dtype in DTYPE_NAMES else f"a tensor of dtype {value.dtype}"


def _check_numpy_dtype(kind: str, dtype: np.dtype[Any], path: StatePath) -> None:
    if numpy_to_torch_dtype(dtype) is None:
        expected = "a bool, integer, float or complex dtype of up to 64 bit"
        do = "convert it, e.g. with .astype()"
        raise StateError(format_path(path), found=f"a numpy {kind} of dtype {dtype}", expected=expected, do=do)


def _type_error(value: Any, path: StatePath) -> StateError:
    advice = "convert it to one of these before saving"
    if isinstance(value, torch.Tensor):
        advice = "save its values as plain tensors (a DTensor: its local shard)"
    elif callable(getattr(value, "state_dict", None)):
        advice = "save its state_dict()"
    elif isinstance(value, dict | list | tuple):
        advice = "convert it to a plain dict, list or tuple"
    return StateError(format_path(path), found=f"a value of type {_type_name(value)}", expected=_STORABLE, do=advice)


def _depth_error(path: StatePath) -> StateError:
    found, do = f"a nest more than {MAX_DEPTH} levels deep", "flatten it before saving"
    return StateError(format_path(path[:3]) + "...", found=found, expected="a flatter one", do=do)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


MAX_COPY_BYTES = 1 << 30
"""Default limit of the bytes that copies in a tree may take."""
MAX_SAME_HASH = 64
"""Largest number of keys of one dict with equal hashes; each is compared with all others."""


class TreeDecoder:
    """Turns a tree into a nest.

    Args:
        tensors: the stored tensors by name, contiguous; the nest refers to them, or to copies at aligned addresses.
        tie: whether leaves that shared memory share it again; otherwise each gets its own.
        where: the file, for messages.
        max_bytes: memory limit of copies: numpy arrays, bytes, tensors that are no longer shared.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, tie: bool, where: str, max_bytes: int = MAX_COPY_BYTES
    ) -> None:
        self._tensors, self._tie, self._where = tensors, tie, where
        self._remaining = max_bytes
        self._copies: dict[str, Any] = {}
        self._used_names: set[str] = set()
        self._moved: dict[str, torch.Tensor] = {}

    def decode(self, tree: JSON, path: StatePath = ()) -> Any:
        """Return the value of `tree`, which is at `path` of the state.

        Raises:
            CorruptError: no release writes such a tree, or a tensor that it names is missing or does not fit.
        """
        if len(path) > MAX_DEPTH:
            self._raise_corrupt(path[:3], "a nest that is too deep", f"at most {MAX_DEPTH} levels")
        if tree is None or type(tree) in (bool, str, int) or (type(tree) is float and math.isfinite(tree)):
            return tree
        if type(tree) is list:
            return self._items(tree, path)
        if type(tree) is dict:
            return self._object(tree, path)
        return self._raise_corrupt(path, f"{type(tree).__name__} {short_repr(tree)}", "plain JSON")

    def _object(self, tree: dict[str, JSON], path: StatePath) -> Any:
        tag = next(iter(tree), "")
        if len(tree) != 1 or not tag.startswith("$"):
            return self._dict(tree, path)
        if tag not in _DECODERS:
            self._raise_corrupt(path, f"the tag {short_repr(tag)}", "one of " + " ".join(_DECODERS))
        return _DECODERS[tag](self, tree[tag], path)

    def _items(self, body: JSON, path: StatePath) -> list[Any]:
        if type(body) is not list:
            self._raise_corrupt(path, short_repr(body), "a list")
        return [self.decode(item, (*path, index)) for index, item in enumerate(body)]

    def _dict(self, tree: JSON, path: StatePath) -> dict[Any, Any]:
        if type(tree) is not dict:
            self._raise_corrupt(path, f"{short_repr(tree)}", "an object")
        if len(tree) == 1 and "$d" in tree:
            return self._pairs(tree["$d"], path)
        if any(key.startswith("$") for key in tree):
            self._raise_corrupt(path, "a key that begins with '$'", "a tag alone in its object")
        return {key: self.decode(item, (*path, key)) for key, item in tree.items()}

    def _pairs(self, body: JSON, path: StatePath) -> dict[Any, Any]:
        if type(body) is not list or not all(type(pair) is list and len(pair) == 2 for pair in body):
            self._raise_corrupt(path, "keys and values", "a list of pairs")
        keys = [self.decode_key(key, path) for key, _ in body]
        if max(Counter(map(hash, keys)).values(), default=0) > MAX_SAME_HASH:
            self._raise_corrupt(path, "keys made to collide", f"at most {MAX_SAME_HASH} of one hash")
        items = {key: self.decode(item, (*path, key)) for key, (_, item) in zip(keys, body, strict=True)}
        if len(items) != len(body):
            self._raise_corrupt(path, "a key that occurs twice", "different keys")
        return items

    def decode_key(self, tree: JSON, path: StatePath, depth: int = 1) -> Any:
        """Return the key `tree` of the dict at `path`; raises as `decode` does."""
        if type(tree) is dict and list(tree) == ["$u"] and type(tree["$u"]) is list and len(path) + depth <= MAX_DEPTH:
            return tuple(self.decode_key(part, path, depth + 1) for part in tree["$u"])
        if type(tree) is not list and (type(tree) is not dict or list(tree) in (["$i"], ["$f"], ["$s"])):
            return self.decode(tree, path)
        return self._raise_corrupt(path, f"the key {short_repr(tree)}", "a plain value or a tuple of them")

    def _with_metadata(self, body: JSON, path: StatePath) -> OrderedDict[Any, Any]:
        if type(body) is not list or len(body) != 2:
            self._raise_corrupt(path, "an OrderedDict", "a dict and its metadata")
        value = OrderedDict(self._dict(body[0], path))
        value._metadata = self._dict(body[1], (*path, "_metadata"))  # type: ignore[attr-defined]
        return value

    def _size(self, body: JSON, path: StatePath) -> torch.Size:
        items = self._items(body, path)
        if not _are_counts(items):
            self._raise_corrupt(path, f"a torch.Size of {short_repr(items)}", "counts")
        return torch.Size(items)

    def _integer(self, body: JSON, path: StatePath) -> int:
        try:
            return int(self._string(body, path), 16)
        except ValueError:
            self._raise_corrupt(path, f"the integer {short_repr(body)}", "hex digits")

    def _float(self, body: JSON, path: StatePath) -> float:
        return float(struct.unpack(">d", self._hex(body, path, 8))[0])

    def _text(self, body: JSON, path: StatePath) -> str:
        try:
            return self._hex(body, path).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            self._raise_corrupt(path, "text that is not UTF-8", "UTF-8 with surrogates")

    def _short_bytes(self, body: JSON, path: StatePath) -> bytes:
        try:
            return base64.b64decode(self._string(body, path).encode(), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            self._raise_corrupt(path, f"bytes as {short_repr(body)}", "base64")

    def _long_bytes(self, body: JSON, path: StatePath) -> bytes:
        tensor = self._stored_tensor(body, path)
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            self._raise_corrupt(path, f"bytes kept as {tensor.dtype} of shape {list(tensor.shape)}", "a row of uint8")
        key = ["bytes", *(body or [tensor_name(path)])]
        value: bytes = self._share(key, lambda: tensor.cpu().numpy().tobytes(), tensor, path)
        return value

    def _numpy_scalar(self, body: JSON, path: StatePath) -> np.generic:
        dtype, digits = self._numpy_pair(body, path)
        value: np.generic = np.frombuffer(self._hex(digits, path, dtype.itemsize), dtype)[0]
        return value

    def _array(self, body: JSON, path: StatePath) -> np.ndarray[Any, Any]:
        dtype, reference = self._numpy_pair(body, path)
        tensor = self._stored_tensor(reference, path)
        expected = numpy_to_torch_dtype(dtype)
        if tensor.dtype != expected:
            self._raise_corrupt(path, f"a numpy array of {dtype.str} kept as {tensor.dtype}", f"{expected}")

        def copy() -> np.ndarray[Any, Any]:
            native: np.ndarray[Any, Any] = tensor.cpu().contiguous().numpy()
            return native.astype(dtype)  # a copy: an array's memory is its own

        key = [dtype.str, *(reference or [tensor_name(path)])] if self._tie else [len(self._copies)]
        array: np.ndarray[Any, Any] = self._share(key, copy, tensor, path)
        return array

    def _share(self, key: JSON, copy: Callable[[], Any], tensor: torch.Tensor, path: StatePath) -> Any:
        """The copy of a stored tensor under `key`, made now if there is none: a state may repeat a value."""
        text = json.dumps(key)
        if text not in self._copies:
            self._spend(tensor.nbytes, path)
            self._copies[text] = copy()
        return self._copies[text]

    def _numpy_pair(self, body: JSON, path: StatePath) -> tuple[np.dtype[np.generic], JSON]:
        is_pair = type(body) is list and len(body) == 2 and type(body[0]) is str
        dtype = numpy_dtype(body[0]) if is_pair else None
        if dtype is None:
            self._raise_corrupt(path, f"the numpy value {short_repr(body)}", "a known dtype and a value")
        return dtype, body[1]

    def _parameter(self, body: JSON, path: StatePath, *, grad: bool) -> torch.nn.Parameter:
        tensor = self._tensor(body, path)
        if grad and not (tensor.is_floating_point() or tensor.is_complex()):
            self._raise_corrupt(path, f"a trainable parameter of {tensor.dtype}", "a float or complex dtype")
        return torch.nn.Parameter(tensor, requires_grad=grad)

    def _tensor(self, body: JSON, path: StatePath) -> torch.Tensor:
        tensor = self._stored_tensor(body, path)
        if self._tie:
            return tensor
        name = body[0] if body else tensor_name(path)
        if name not in self._used_names and len(body) < 4:
            self._used_names.add(name)
            return tensor
        self._spend(min(tensor.nbytes, num_reached(tensor) * tensor.element_size()), path)
        return _clone(tensor)

    def _spend(self, nbytes: int, path: StatePath) -> None:
        """Count memory that is about to be taken."""
        self._remaining -= nbytes
        if self._remaining < 0:
            found = f"copies of tensors that take {-self._remaining} bytes too many"
            do = "pass max_bytes= if you trust it"
            raise CorruptError(f"{self._where}: {format_path(path)}", found=found, expected="fewer", do=do)

    def _stored_tensor(self, reference: JSON, path: StatePath) -> torch.Tensor:
        """The tensor a reference stands for, as a view of the stored one."""
        if type(reference) is not list or len(reference) not in (0, 1, 4, 5):
            expected = "[], [name] or [name, offset, shape, strides]"
            self._raise_corrupt(path, f"the reference {short_repr(reference, 60)}", expected)
        name = reference[0] if reference else tensor_name(path)
        stored = None
        if type(name) is str:
            stored = self._moved[name] if name in self._moved else self._tensors.get(name)
        if stored is None:
            self._raise_corrupt(path, f"a reference to {short_repr(name, 80)}", "the name of a tensor in this file")
        if stored.is_cpu and stored.data_ptr() % TENSOR_ALIGN:  # a neighbour of others in its record
            # kernels choose their vectors by the address, and sums depend on that: torch itself aligns what it loads
            stored = self._moved[name] = as_bits(stored).clone().view(stored.dtype)
        return self._view(stored, reference, path) if len(reference) >= 4 else stored

    def _view(self, stored: torch.Tensor, reference: list[JSON], path: StatePath) -> torch.Tensor:
        _, offset, shape, strides, *rest = reference
        row = stored.as_strided((stored.numel(),), (1,)) if stored.is_contiguous() else stored.reshape(-1)
        if rest:
            row = self._as_dtype(row, rest[0], path)
        if not all(map(_are_counts, ([offset], shape, strides))) or not len(shape) == len(strides) <= 64:
            self._raise_corrupt(path, f"a view {short_repr(reference, 80)}", "counts, as many strides as sizes")
        if math.prod(size for size in shape if size) >= 2**60:  # of an empty one, too: torch counts on its way to the 0
            self._raise_corrupt(path, f"a view of shape {short_repr(shape, 80)}", "fewer than 2^60 elements")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if last >= row.numel() if math.prod(shape) else offset > row.numel():
            expected = f"at most {row.numel() - 1} of {short_repr(reference[0], 80)}"
            self._raise_corrupt(path, f"a view up to element {last}", expected)
        return row.as_strided(shape, strides, row.storage_offset() + offset)

    def _as_dtype(self, row: torch.Tensor, name: JSON, path: StatePath) -> torch.Tensor:
        dtype = TORCH_DTYPES.get(name) if type(name) is str else None
        if dtype is None:
            self._raise_corrupt(path, f"the dtype {short_repr(name)}", "one that this torch has")
        data = row.view(torch.uint8)
        return data[: data.numel() - data.numel() % dtype.itemsize].view(dtype)

    def _hex(self, body: JSON, path: StatePath, length: int | None = None) -> bytes:
        try:
            data = bytes.fromhex(self._string(body, path))
        except ValueError:
            self._raise_corrupt(path, f"{short_repr(body)}", "hex digits")
        if length is not None and len(data) != length:
            self._raise_corrupt(path, f"{len(data)} bytes", f"{length}")
        return data

    def _string(self, body: JSON, path: StatePath) -> str:
        if type(body) is not str:
            self._raise_corrupt(path, f"{short_repr(body)}", "a string")
        return body

    def _raise_corrupt(self, path: StatePath, found: str, expected: str) -> NoReturn:
        do = "restore another checkpoint, or fetch an intact copy of this file"
        raise CorruptError(f"{self._where}: {format_path(path)}", found=found, expected=expected, do=do)


_DECODERS: dict[str, Callable[[TreeDecoder, JSON, StatePath], Any]] = {
    "$t": TreeDecoder._tensor,
    "$p": lambda self, body, path: self._parameter(body, path, grad=True),
    "$q": lambda self, body, path: self._parameter(body, path, grad=False),
    "$n": TreeDecoder._array,
    "$g": TreeDecoder._numpy_scalar,
    "$u": lambda self, body, path: tuple(self._items(body, path)),
    "$z": TreeDecoder._size,
    "$i": TreeDecoder._integer,
    "$f": TreeDecoder._float,
    "$s": TreeDecoder._text,
    "$b": TreeDecoder._short_bytes,
    "$B": TreeDecoder._long_bytes,
    "$d": TreeDecoder._pairs,
    "$o": lambda self, body, path: OrderedDict(self._dict(body, path)),
    "$m": TreeDecoder._with_metadata,
    "$c": lambda self, body, path: Counter(self._dict(body, path)),
}
"""By the tag of an object. No methods bound to a decoder: as a cycle with it they would hold the tensors of a state."""


def _are_counts(values: JSON) -> bool:
    return type(values) is list and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own: dense, or with its strides where it meets itself (expanded tensors)."""
    reach = num_reached(tensor)
    if tensor.numel() > reach:
        row = tensor.as_strided((reach,), (1,), tensor.storage_offset())
        return _clone(row).as_strided(tensor.shape, tensor.stride(), 0)
    if tensor.device.type != "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    fresh = empty(tuple(tensor.shape), tensor.dtype)
    as_bits(fresh).copy_(as_bits(tensor))
    return fresh


def map_nest(value: Any, convert: Callable[[Any, int], Any], depth: int = 0) -> Any:
    """A nest with converted values, innermost first; containers in which nothing changes are not copied.

    Args:
        convert: is called with every dict, once its values are converted, with every value that is no container, and
            with its depth; not with lists and tuples.
        depth: of `value`; what is nested too deeply to be stored, such as a cycle, is returned unchanged.
    """
    if depth > MAX_DEPTH:
        return value
    if type(value) in (list, tuple):
        items = [map_nest(item, convert, depth + 1) for item in value]
        return type(value)(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if type(value) not in (dict, OrderedDict):
        return convert(value, depth)
    mapped = {key: map_nest(item, convert, depth + 1) for key, item in value.items()}
    if any(mapped[key] is not item for key, item in value.items()):
        original, value = value, type(value)(mapped)
        if hasattr(original, "_metadata"):  # of a module's state_dict
            value._metadata = original._metadata
    return convert(value, depth)
