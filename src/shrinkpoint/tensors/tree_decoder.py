"""Decodes the JSON tree of a state, which is not trusted, or leaves of it; `tree` says what its tags mean.

Leaves are selected by their paths, so that only their tensors need be decoded."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch

from shrinkpoint.errors import RESTORE_ADVICE, CorruptError
from shrinkpoint.tensors.dtypes import TORCH_DTYPES, as_bits, empty, numpy_dtype, numpy_to_torch_dtype
from shrinkpoint.tensors.info import JSON, is_nest_form
from shrinkpoint.tensors.memory import TENSOR_ALIGN
from shrinkpoint.tensors.names import StatePath, format_key, format_path, short_repr, tensor_name, unique_name
from shrinkpoint.tensors.plain_forms import form_items, from_form, has_colliding_keys
from shrinkpoint.tensors.tree import MAX_DEPTH, num_reached

MAX_COPY_BYTES = 1 << 30  # Default limit of the bytes that copies in a tree may take


class TreeDecoder:
    """Turns a tree into a nest.

    Args:
        tensors: the stored tensors by name, contiguous; the nest refers to them, or to copies at aligned addresses.
        tie: True if leaves that shared memory share it again; otherwise each gets its own.
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
            tag = next(iter(tree), "")
            if len(tree) != 1 or not tag.startswith("$"):
                return self._dict(tree, path)
            if tag not in _DECODERS:
                self._raise_corrupt(path, f"the tag {short_repr(tag)}", "one of " + " ".join(_DECODERS))
            return _DECODERS[tag](self, tree[tag], path)
        return self._raise_corrupt(path, f"{type(tree).__name__} {short_repr(tree)}", "plain JSON")

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
        if has_colliding_keys(keys):
            self._raise_corrupt(path, "keys made to collide", "keys of different hashes")
        items = {key: self.decode(item, (*path, key)) for key, (_, item) in zip(keys, body, strict=True)}
        if len(items) != len(body):
            self._raise_corrupt(path, "a key that occurs twice", "different keys")
        return items

    def decode_key(self, tree: JSON, path: StatePath, depth: int = 1) -> Any:
        """Return the key `tree` of the dict at `path`; raises as `decode` does."""
        if type(tree) is dict and list(tree) == ["$u"] and type(tree["$u"]) is list and len(path) + depth <= MAX_DEPTH:
            return tuple(self.decode_key(part, path, depth + 1) for part in tree["$u"])
        if type(tree) is not list and (type(tree) is not dict or list(tree) in (["$i"], ["$f"], ["$s"], ["$x"])):
            key = self.decode(tree, path)
            if type(key).__hash__ is not None and form_items(key) is None:
                return key
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

    def _form(self, body: JSON, path: StatePath) -> Any:
        if type(body) is not list or len(body) != 2 or type(body[0]) is not str:
            self._raise_corrupt(path, f"the form {short_repr(body)}", "a name and a value")
        name, plain = body[0], self.decode(body[1], path)
        try:
            return from_form(name, plain, lambda nbytes: self._spend(nbytes, path))
        except LookupError:
            self._raise_corrupt(path, f"a value of the form {short_repr(name)}", "a form that this release knows")
        except (TypeError, ValueError, AttributeError, OverflowError, RuntimeError):
            self._raise_corrupt(path, f"{short_repr(plain)} as a {short_repr(name)}", "what a save writes")

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
            found = f"copies of tensors that take {-self._remaining:,} bytes too many"
            do = "if you trust it, pass max_bytes="
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
            dtype = TORCH_DTYPES.get(rest[0]) if type(rest[0]) is str else None
            if dtype is None:
                self._raise_corrupt(path, f"the dtype {short_repr(rest[0])}", "one that this torch has")
            data = row.view(torch.uint8)
            row = data[: data.numel() - data.numel() % dtype.itemsize].view(dtype)
        if not all(map(_are_counts, ([offset], shape, strides))) or not len(shape) == len(strides) <= 64:
            self._raise_corrupt(path, f"a view {short_repr(reference, 80)}", "counts, as many strides as sizes")
        if math.prod(size for size in shape if size) >= 2**60:  # of an empty one, too: torch counts on its way to the 0
            self._raise_corrupt(path, f"a view of shape {short_repr(shape, 80)}", "fewer than 2^60 elements")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if last >= row.numel() if math.prod(shape) else offset > row.numel():
            expected = f"at most {row.numel() - 1} of {short_repr(reference[0], 80)}"
            self._raise_corrupt(path, f"a view up to element {last}", expected)
        return row.as_strided(shape, strides, row.storage_offset() + offset)

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
        raise CorruptError(f"{self._where}: {format_path(path)}", found=found, expected=expected, do=RESTORE_ADVICE)


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
    "$x": TreeDecoder._form,
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


MatchPath: TypeAlias = Callable[[StatePath], bool]
_REFERENCE_TAGS = ("$t", "$p", "$q", "$B")
_ARRAY_TAGS = ("$t", "$p", "$q", "$n")
_DICT_TAGS, _ITEM_TAGS = ("$o", "$c"), ("$u", "$z")
_ABSENT: Any = object()


class SelectedLeaves(NamedTuple):
    """The leaves of a tree that were selected."""

    tree: JSON  # the tree without all others. Containers that lose all their leaves are gone; items of lists move up.
    tensors: frozenset[str]  # names of the stored tensors that the leaves refer to
    names: tuple[str, ...]  # of every leaf of the whole tree, selected or not, as `tensor_name` gives them
    is_empty: bool  # nothing was selected


def match_patterns(patterns: Sequence[str]) -> MatchPath:
    """A function that says whether a path matches one of several patterns, as of `fnmatch`.

    A pattern is compared with the keys joined by "." and with the tensor's name, in which they are joined by "/".

    >>> matches = match_patterns(["model.*.bias", "optimizer/state/0"])
    >>> [matches(path) for path in (("model", "head.bias"), ("optimizer", "state", 0), ("model",))]
    [True, True, False]
    """
    regex = re.compile("|".join(translate(pattern) for pattern in patterns))

    def matches(path: StatePath) -> bool:
        return bool(regex.match(".".join(map(format_key, path))) or regex.match(tensor_name(path)))

    return matches


def is_selected(path: StatePath, matches: MatchPath) -> bool:
    """True if a path, or that of a container that it is in, is selected."""
    return any(matches(path[:length]) for length in range(1, len(path) + 1))


def select_leaves(tree: JSON, matches: MatchPath, where: str) -> SelectedLeaves:
    """Select leaves of a tree, which need not be trusted.

    Args:
        matches: True if a path is selected; that of a dict, list or tuple selects everything in it.
        where: the file, for messages.

    Raises:
        CorruptError: a key is invalid. (What else is wrong, decoding the result says.)
    """
    selector = _Selector(matches, where)
    selected = selector.select(tree, (), False)
    is_empty = selected is _ABSENT
    return SelectedLeaves({} if is_empty else selected, frozenset(selector.tensors), tuple(selector.names), is_empty)


class TreeLeaf(NamedTuple):
    """One leaf of a tree."""

    tree: JSON  # of the leaf alone; a reference in it has the name of its tensor
    tensor: str  # the name of the stored tensor that it refers to; "" for a plain value
    is_array: bool  # it is a tensor or an array, and no plain value


def list_leaves(tree: JSON, where: str) -> dict[str, TreeLeaf]:
    """The leaves of a tree, which need not be trusted, by the names that `named_leaves` gives to its state's.

    Raises:
        CorruptError: a key is invalid. (What else is wrong, decoding says.)
    """
    lister = _LeafLister(lambda path: True, where)
    lister.select(tree, (), True)
    return lister.leaves


class _Selector:
    def __init__(self, matches: MatchPath, where: str) -> None:
        self._matches, self._decoder = matches, TreeDecoder({}, tie=False, where=where)
        self.tensors: set[str] = set()
        self.names: list[str] = []

    def select(self, tree: JSON, path: StatePath, is_chosen: bool) -> Any:
        """The selected part of a subtree; `_ABSENT` if it has none."""
        is_chosen = is_chosen or (bool(path) and self._matches(path))
        if len(path) > MAX_DEPTH:
            return tree  # decoding it raises
        if type(tree) is list:
            return self._items(tree, path, is_chosen)
        if type(tree) is not dict:
            return self._leaf(tree, path, is_chosen)
        tag = next(iter(tree), "")
        body = tree[tag] if len(tree) == 1 and tag.startswith("$") else None
        if body is None or tag == "$d":
            return self._dict(tree, path, is_chosen)
        if tag in _DICT_TAGS and type(body) is dict:
            return _tagged(tag, self._dict(body, path, is_chosen))
        if tag == "$m" and type(body) is list and len(body) == 2 and type(body[0]) is dict:
            ordered = self._dict(body[0], path, is_chosen)
            return _ABSENT if ordered is _ABSENT else {tag: [ordered, body[1]]}
        if tag in _ITEM_TAGS and type(body) is list:
            return _tagged(tag, self._items(body, path, is_chosen))
        if tag == "$x" and is_nest_form(body):
            if body[0] == "buffer":  # all of it, or nothing
                is_chosen = is_chosen or any(self._matches((*path, index)) for index in (0, 1))
            selected = self.select(body[1], path, is_chosen)
            return _ABSENT if selected is _ABSENT else {tag: [body[0], selected]}
        return self._leaf(tree, path, is_chosen, tag, body)

    def _leaf(self, tree: JSON, path: StatePath, is_chosen: bool, tag: str = "", body: JSON = None) -> Any:
        self.names.append(tensor_name(path))
        if not is_chosen and (path or not self._matches(path)):
            return _ABSENT
        if tag in _REFERENCE_TAGS:
            return {tag: self._reference(body, path)}
        if tag == "$n" and type(body) is list and len(body) == 2:
            return {tag: [body[0], self._reference(body[1], path)]}
        return tree

    def _reference(self, reference: JSON, path: StatePath) -> JSON:
        """A reference with the name of its tensor, which the path no longer tells where items of lists move up."""
        if type(reference) is not list:
            return reference
        name = reference[0] if reference else tensor_name(path)
        if type(name) is str:
            self.tensors.add(name)
        return reference or [name]

    def _items(self, items: list[JSON], path: StatePath, is_chosen: bool) -> Any:
        selected = [self.select(item, (*path, index), is_chosen) for index, item in enumerate(items)]
        selected = [item for item in selected if item is not _ABSENT]
        return selected if selected or is_chosen else _ABSENT

    def _dict(self, tree: dict[str, JSON], path: StatePath, is_chosen: bool) -> Any:
        if list(tree) == ["$d"]:
            return self._pairs(tree["$d"], path, is_chosen)
        selected = {key: self.select(item, (*path, key), is_chosen) for key, item in tree.items()}
        selected = {key: item for key, item in selected.items() if item is not _ABSENT}
        return selected if selected or is_chosen else _ABSENT

    def _pairs(self, pairs: JSON, path: StatePath, is_chosen: bool) -> Any:
        if type(pairs) is not list or not all(type(pair) is list and len(pair) == 2 for pair in pairs):
            return {"$d": pairs}  # decoding it raises
        selected = [
            [key, self.select(item, (*path, self._decoder.decode_key(key, path)), is_chosen)] for key, item in pairs
        ]
        selected = [pair for pair in selected if pair[1] is not _ABSENT]
        return {"$d": selected} if selected or is_chosen else _ABSENT


class _LeafLister(_Selector):
    def __init__(self, matches: MatchPath, where: str) -> None:
        super().__init__(matches, where)
        self.leaves: dict[str, TreeLeaf] = {}

    def _leaf(self, tree: JSON, path: StatePath, is_chosen: bool, tag: str = "", body: JSON = None) -> Any:
        selected = super()._leaf(tree, path, True, tag, body)
        reference = selected[tag] if tag in _REFERENCE_TAGS else None
        if tag == "$n" and type(selected[tag]) is list and len(selected[tag]) == 2:
            reference = selected[tag][1]
        name = reference[0] if type(reference) is list and reference else ""
        leaf = TreeLeaf(selected, name if type(name) is str else "", bool(tag) and tag in _ARRAY_TAGS)
        self.leaves[unique_name(tensor_name(path), self.leaves)] = leaf
        return selected


def _tagged(tag: str, selected: Any) -> Any:
    return _ABSENT if selected is _ABSENT else {tag: selected}
