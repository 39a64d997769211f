"""Encodes a state as a JSON tree and a list of tensor leaves; `tree_decoder` decodes it.

Plain values are stored unchanged; types that JSON lacks are an object with one key that begins with "$"::

    {"$t": ref}              tensor                        {"$i": "-1f.."}     integer beyond 64 bit, in hex
    {"$p": ref}              nn.Parameter                  {"$f": "7ff8.."}    nan or infinity, 8 bytes in hex
    {"$q": ref}              nn.Parameter, frozen          {"$s": "eda0.."}    text with lone surrogates, in hex
    {"$n": [dtype, ref]}     numpy array                   {"$b": "base64"}    bytes, short
    {"$g": [dtype, hex]}     numpy scalar                  {"$B": ref}         bytes, long
    {"$u": [..]}             tuple                         {"$d": [[k, v]..]}  dict with keys that are not plain text
    {"$z": [..]}             torch.Size                    {"$o": dict}        OrderedDict
    {"$c": dict}             Counter                       {"$m": [dict, meta]}  OrderedDict with `_metadata`
    {"$x": [form, ..]}       what `plain_forms` knows: paths, sets, enums, namespaces

Tensors that share memory are stored once. `ref`, which stands for a tensor, is one of::

    []                                      the stored tensor named by the leaf's own path
    [name]                                  the stored tensor of that name
    [name, offset, shape, strides]          a view of the stored tensor as one contiguous row, in elements
    [name, offset, shape, strides, dtype]   the same with the bytes viewed as another dtype

The order of the keys of a dict is that of its JSON object.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np
import torch

from shrinkpoint.errors import StateError
from shrinkpoint.tensors.dtypes import DTYPE_NAMES, dtype_name, materialize, numpy_to_torch_dtype
from shrinkpoint.tensors.info import JSON, is_nest_form
from shrinkpoint.tensors.names import StatePath, format_path, tensor_name, unique_name
from shrinkpoint.tensors.plain_forms import PlainForm, nest_form, ordinary_value, plain_form

MAX_SHARING_OVERHEAD = 1024  # Bytes that a shared range may take beyond its members stored one by one


@dataclass
class Leaf:
    """One tensor of the nest: its path, its detached value, and the reference to be filled in."""

    path: StatePath
    tensor: torch.Tensor
    reference: list[JSON] = field(default_factory=list)
    name: str = ""  # of the stored tensor that holds this leaf whole, in its own shape; "" for a view into another

    @property
    def extent(self) -> int:
        """Bytes from the first to the end of the last element of this tensor."""
        tensor = self.tensor
        if tensor.is_contiguous():
            return tensor.nbytes
        if tensor.numel() == 0:
            return 0
        return num_reached(tensor) * tensor.element_size()

    @property
    def start(self) -> int:
        """Its first byte in its storage."""
        return int(self.tensor.storage_offset()) * self.tensor.element_size()

    @cached_property
    def view(self) -> tuple[object, ...]:
        """Start, dtype, shape and strides; equal for leaves that are the same view of a storage."""
        tensor = self.tensor
        strides = tuple(st for size, st in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
        return (self.start, tensor.dtype, tuple(tensor.shape), strides)


def num_reached(tensor: torch.Tensor) -> int:
    """Elements of memory from the first to behind the last of a tensor, however often it meets each of them."""
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(last + 1, 0)


def deduplicate(leaves: Iterable[Leaf]) -> dict[str, torch.Tensor]:
    """Return the tensors to store, in the order of the leaves, and fill in each leaf's `reference` and `name`."""
    ordered = list(leaves)
    groups = {id(group[0]): group for group in _overlap_groups(ordered)}  # every group under its earliest leaf
    for leaf in ordered:
        leaf.name = tensor_name(leaf.path)
    stored = dict[str, torch.Tensor]()
    for leaf in ordered:
        if (group := groups.get(id(leaf))) is not None:
            _store_group(group, stored)
    return stored


def _overlap_groups(leaves: list[Leaf]) -> Iterator[list[Leaf]]:
    """Groups of leaves whose memory overlaps, each in the order of the leaves."""
    order = {id(leaf): index for index, leaf in enumerate(leaves)}
    storages: dict[tuple[object, ...], list[Leaf]] = {}
    for leaf in leaves:
        extent = leaf.extent
        if extent == 0:
            yield [leaf]
            continue
        storage = leaf.tensor.untyped_storage()
        size, used = storage.nbytes(), leaf.start + extent
        if used > size:
            found, expected = f"a tensor whose storage has {size} bytes", f"at least {used}, as its shape says"
            do = "save it before its memory is freed"
            raise StateError(format_path(leaf.path), found=found, expected=expected, do=do)
        storages.setdefault((leaf.tensor.device, storage.data_ptr(), size), []).append(leaf)
    for members in storages.values():
        if len(members) == 1:
            yield members
            continue
        for run in _overlapping_runs(members):
            for group in _worth_sharing(run):
                yield sorted(group, key=lambda leaf: order[id(leaf)])


def _overlapping_runs(members: list[Leaf]) -> Iterator[list[Leaf]]:
    """Split the leaves of one storage where their ranges do not touch."""
    run: list[Leaf] = []
    end = 0
    for leaf in sorted(members, key=lambda leaf: leaf.start):
        if run and leaf.start >= end:
            yield run
            run = []
        run.append(leaf)
        end = max(end, leaf.start + leaf.extent)  # earlier runs end before this leaf
    yield run


def _worth_sharing(run: list[Leaf]) -> Iterator[list[Leaf]]:
    """The run as one group if one row over it is not much larger than its members; else groups of equal views."""
    start, end = _byte_range(run)
    by_view: dict[tuple[object, ...], list[Leaf]] = {}
    for leaf in run:
        by_view.setdefault(leaf.view, []).append(leaf)
    separate_bytes = sum(min(group[0].extent, group[0].tensor.nbytes) for group in by_view.values())
    aligned = all((leaf.start - start) % leaf.tensor.element_size() == 0 for leaf in run)
    if aligned and end - start <= separate_bytes + MAX_SHARING_OVERHEAD:
        yield run
    else:
        yield from by_view.values()


def _byte_range(run: list[Leaf]) -> tuple[int, int]:
    return min(leaf.start for leaf in run), max(leaf.start + leaf.extent for leaf in run)


def _store_group(group: list[Leaf], stored: dict[str, torch.Tensor]) -> None:
    if len(group) == 1 and group[0].tensor.is_contiguous():  # the common case
        leaf = group[0]
        if leaf.name in stored:
            leaf.name = unique_name(leaf.name, stored)
            leaf.reference[:] = [leaf.name]
        else:
            leaf.reference[:] = []
        stored[leaf.name] = _standard_strides(leaf.tensor)
        return
    start, end = _byte_range(group)
    owner = next((leaf for leaf in group if leaf.extent == end - start and leaf.tensor.is_contiguous()), None)
    first = group[0]
    is_single_view = all(leaf.view == first.view for leaf in group) and first.extent >= first.tensor.nbytes
    if owner is None and is_single_view:  # without overlapping elements, as expanded tensors have
        owner = first
    if owner is None:
        name, row = unique_name(f"{first.name}/%storage", stored), _storage_row(group, start, end)
    else:
        name, row = unique_name(owner.name, stored), _standard_strides(owner.tensor)
    stored[name] = row
    for leaf in group:
        if owner is not None and leaf.view == owner.view:
            leaf.reference[:] = [] if name == leaf.name else [name]
            leaf.name = name
            continue
        tensor, leaf.name = leaf.tensor, ""
        offset = (leaf.start - start) // tensor.element_size()
        leaf.reference[:] = [name, offset, list(tensor.shape), list(tensor.stride())]
        if tensor.dtype != row.dtype:
            leaf.reference.append(dtype_name(tensor.dtype))


def _storage_row(group: list[Leaf], start: int, end: int) -> torch.Tensor:
    """The covered range as one contiguous row; as bytes if the dtypes of the members differ."""
    first = group[0].tensor
    if len({leaf.tensor.dtype for leaf in group}) > 1:
        return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())[start:end]
    size = first.element_size()
    return first.as_strided(((end - start) // size,), (1,), start // size)


def _standard_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Give a contiguous tensor its standard strides; dimensions of size 1 may have others."""
    if 1 not in tensor.shape or not tensor.is_contiguous():
        return tensor
    strides = torch.empty(tuple(tensor.shape), device="meta").stride()
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


MAX_DEPTH = 48
"""Largest nesting depth of dicts, lists and tuples. The JSON of one level has at most five levels, and the container
allows 248."""

MAX_INLINE_BYTES = 256  # Longest bytes value stored in the tree; longer ones become U8 tensors

MAX_TREE_CHARS = 100_000_000
"""Largest number of characters of the plain values of a state as JSON, and of the names of its tensors: a file has no
more (`container.index`)."""
MIN_NEST_BYTES = 8
"""Fewest characters per list or dict in a state with more than `_MAX_NESTS` of them, as in `container.strict_json`."""
_MAX_NESTS = 1 << 21

_STORABLE = (
    "tensors, numpy values, None, bool, int, float, str, bytes, or dicts, lists and tuples of these, or a value of"
)
_STORABLE += " pathlib, datetime, enum, set, deque, Namespace, dataclass, BytesIO, torch.device or torch.dtype"
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
        self._open_sets = 0
        self._byte_rows: dict[bytes, torch.Tensor] = {}
        self._array_copies: dict[int, tuple[np.ndarray[Any, Any], torch.Tensor]] = {}  # by id; the array must live on
        self._value_encoders: dict[type, Callable[[Any, StatePath], JSON]] = {
            type(None): lambda value, path: value,
            bool: lambda value, path: value,
            int: lambda value, path: value if -(2**63) <= value < 2**63 else {"$i": f"{value:x}"},
            float: lambda value, path: value if math.isfinite(value) else {"$f": struct.pack(">d", value).hex()},
            str: lambda value, path: (
                value if is_unicode(value) else {"$s": value.encode("utf-8", "surrogatepass").hex()}
            ),
            bytes: self._bytes,
            torch.Tensor: lambda value, path: {"$t": self._add_leaf(_plain_tensor(value, path), path)},
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
        if isinstance(value, np.generic) and value.dtype.kind not in "US":
            self._num_chars += 2 * value.itemsize
            _check_numpy_dtype("scalar", value.dtype, path)
            little = value.dtype.newbyteorder("<")
            return {"$g": [little.str, np.asarray(value).astype(little).tobytes().hex()]}
        if type(value) not in self._nest_encoders:
            return self._other(value, path)
        if id(value) in self._open_ids:
            do = "break the circle: refer to it once"
            raise StateError(format_path(path), found="a nest that contains itself", expected=_STORABLE, do=do)
        if len(path) >= MAX_DEPTH:
            raise _depth_error(path)
        self._count([], path)
        self._open_ids.add(id(value))
        try:
            return self._nest_encoders[type(value)](value, path)
        finally:
            self._open_ids.remove(id(value))

    def _other(self, value: Any, path: StatePath) -> JSON:
        """The tree of a value that has a form, or in place of which an ordinary value is stored."""
        form = nest_form(value) or plain_form(value)
        if form is None:
            ordinary = ordinary_value(value)
            if ordinary is value:
                advice = "convert it to one of these before saving"
                if torch.nn.parameter.is_lazy(value):
                    advice = "run a batch through the model first, which gives a lazy parameter its shape"
                elif isinstance(value, torch.Tensor):
                    advice = "save its values as plain tensors (a DTensor: its local shard)"
                elif callable(getattr(value, "state_dict", None)):
                    advice = "save its state_dict()"
                elif isinstance(value, dict | list | tuple):
                    advice = "convert it to a plain dict, list or tuple"
                found = f"a value of type {_type_name(value)}"
                raise StateError(format_path(path), found=found, expected=_STORABLE, do=advice)
            if self._open_sets and isinstance(ordinary, dict | list):
                found = f"a set with a {_type_name(value)} in it, which is stored as a {type(ordinary).__name__}"
                expected, do = "items that a set can hold after a load", "make the set a list"
                raise StateError(format_path(path), found=found, expected=expected, do=do)
            return self.encode(ordinary, path)
        return self._form(form, path)

    def _form(self, form: PlainForm, path: StatePath) -> JSON:
        (name, plain), num_leaves = form, len(self.leaves)
        self._count([], path)
        is_set = name in ("set", "frozenset")
        self._open_sets += is_set
        tree: JSON = {"$x": [name, self.encode(plain, path)]}
        self._open_sets -= is_set
        if len(self.leaves) > num_leaves and not is_nest_form(tree["$x"]):
            found, do = f"a {name} with tensors, arrays or long bytes in it", "make it a list or a tuple"
            raise StateError(format_path(path), found=found, expected=f"a {name} of plain values", do=do)
        return tree

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
        if all(type(key) is str and not key.startswith("$") and is_unicode(key) for key in value):
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
        if (form := plain_form(key)) is not None:
            return self._form(form, path)
        if (ordinary := ordinary_value(key)) is not key:
            return self._key(ordinary, path, depth)
        expected = "str, int, float, bool, None, paths, enums, dates, or tuples of these"
        found, do = f"a dict with a key of type {_type_name(key)}", "use such keys, e.g. str(key)"
        raise StateError(format_path(path), found=found, expected=expected, do=do)

    def _bytes(self, value: bytes, path: StatePath) -> JSON:
        if len(value) <= MAX_INLINE_BYTES:
            return {"$b": base64.b64encode(value).decode()}
        if value not in self._byte_rows:
            self._byte_rows[value] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        return {"$B": self._add_leaf(self._byte_rows[value], path)}

    def _parameter(self, value: torch.nn.Parameter, path: StatePath) -> JSON:
        return {"$p" if value.requires_grad else "$q": self._add_leaf(_plain_tensor(value, path), path)}

    def _array(self, value: np.ndarray[Any, Any], path: StatePath) -> JSON:
        if value.dtype.kind in "US":
            return self._other(value, path)
        _check_numpy_dtype("array", value.dtype, path)
        if id(value) not in self._array_copies:
            native = value.astype(value.dtype.newbyteorder("="), copy=False)
            flags, size = native.flags, native.itemsize
            ordered = flags.c_contiguous or flags.f_contiguous
            standard = all(stride >= 0 and stride % size == 0 for stride in native.strides)  # sizes of 1 may have any
            if not (ordered and standard and flags.writeable):  # torch would raise or warn
                native = native.copy(order="C")
            self._array_copies[id(value)] = value, torch.from_numpy(native)
        return {"$n": [value.dtype.str, self._add_leaf(self._array_copies[id(value)][1], path)]}

    def _add_leaf(self, tensor: torch.Tensor, path: StatePath) -> list[JSON]:
        self._name_chars += sum(len(key) if type(key) is str else 1 for key in path)
        leaf = Leaf(path, tensor)
        self.leaves.append(leaf)
        return leaf.reference


def is_optimizer_state(value: dict[Any, Any]) -> bool:
    """True if a dict has the shape of `torch.optim.Optimizer.state_dict()`."""
    return isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)


def is_unicode(value: str) -> bool:
    """True if a text has no lone surrogates, as those of file names that are not valid UTF-8."""
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _plain_tensor(value: torch.Tensor, path: StatePath) -> torch.Tensor:
    """Return the detached strided tensor; copies only if it is lazily conjugated or negated."""
    feature = unsupported_feature(value)
    if feature:
        raise StateError(format_path(path), found=feature, expected="a dense tensor with values", do="convert it first")
    value = value.detach()
    if not value.is_conj() and not value.is_neg():
        return value
    with torch.no_grad():
        return materialize(value)


def unsupported_feature(value: torch.Tensor) -> str:
    """Why a tensor cannot be stored, such as "a quantized tensor"; "" if it can."""
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
        expected = "a bool, integer, float or complex dtype of up to 64 bits"
        do = "convert it, e.g. with .astype()"
        raise StateError(format_path(path), found=f"a numpy {kind} of dtype {dtype}", expected=expected, do=do)


def _depth_error(path: StatePath) -> StateError:
    found, do = f"a nest more than {MAX_DEPTH} levels deep", "flatten it before saving"
    return StateError(format_path(path[:3]) + "...", found=found, expected="a flatter one", do=do)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
