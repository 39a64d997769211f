"""Reports the tensors of a file from its header, as plain data, and plain values as text; no torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from shrinkpoint.container import FileReader, RecordHead
from shrinkpoint.storage import Storage
from shrinkpoint.tensors.info import JSON, Role, is_nest_form


class TensorRow(NamedTuple):
    """One tensor of a file."""

    name: str  # its name in the state
    dtype: str
    shape: tuple[int, ...]
    role: str  # its role ("parameter", "moment1", ...)
    raw_bytes: int  # bytes of its values
    stored_bytes: int  # bytes in the file; in a record of several tensors, a share in proportion to raw bytes
    how: str  # the kind of its recipe ("plain", "same", ...)
    record: str  # name of its record
    shared: bool  # the record holds other tensors too
    needs_base: bool  # decoding needs the parent
    coding: str  # what was done to it, in words


class RoleRow(NamedTuple):
    """Totals of all tensors of one role."""

    role: str
    tensors: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class FileReport:
    """One file."""

    where: str  # its path
    size: int  # bytes of the whole file
    digest: str  # digest of its header, which has the digests of all other bytes
    scheme: str  # which scheme wrote it
    parent: JSON  # how it names the file it depends on; None for a keyframe
    tensors: tuple[TensorRow, ...] = field(repr=False)  # in the order of the file
    values: tuple[tuple[str, str], ...] = field(repr=False)  # (path, text) of the plain values of the state

    @property
    def raw_bytes(self) -> int:
        return sum(row.raw_bytes for row in self.tensors)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of the header: names, shapes, digests, plain values."""
        return self.size - sum(row.stored_bytes for row in self.tensors)

    @property
    def roles(self) -> list[RoleRow]:
        """The totals of each role that the file has."""
        rows_by_role = {role.value: [row for row in self.tensors if row.role == role.value] for role in Role}
        return [
            RoleRow(name, len(rows), sum(row.raw_bytes for row in rows), sum(row.stored_bytes for row in rows))
            for name, rows in rows_by_role.items()
            if rows
        ]

    def to_json(self, *, tensors: bool) -> dict[str, Any]:
        """The report as a JSON object; `tensors`: with one entry for each tensor."""
        document = {
            "where": self.where,
            "bytes": self.size,
            "digest": self.digest,
            "scheme": self.scheme,
            "parent": self.parent,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.size,
            "ratio": self.raw_bytes / self.size if self.raw_bytes else None,
            "header_bytes": self.overhead_bytes,
            "roles": [row._asdict() for row in self.roles],
            "values": dict(self.values),
        }
        return {**document, "tensors": [row._asdict() for row in self.tensors]} if tensors else document


def file_report(reader: FileReader, where: str) -> FileReport:
    """Reports what the header of an open file says, without reading its payload."""
    rows = tuple(row for head in reader.records for row in _tensor_rows(head))
    values = list_plain_values(reader.tree)
    return FileReport(where, reader.size, reader.digest, reader.scheme, reader.parent, rows, values)


def read_file_report(storage: Storage, key: str, where: str = "") -> FileReport:
    """Reports a file of a storage.

    Args:
        where: how messages call it; by default as the storage does.
    """
    with closing(storage.open(key)) as source:
        return file_report(FileReader(source, where or storage.describe(key)), where or storage.describe(key))


def _tensor_rows(head: RecordHead) -> Iterator[TensorRow]:
    stored = sum(entry.size for entry in head.parts.values())
    for info, share in zip(head.infos, _split_bytes([info.nbytes for info in head.infos], stored), strict=True):
        yield TensorRow(
            name=info.name,
            dtype=info.dtype,
            shape=info.shape,
            role=info.role.value,
            raw_bytes=info.nbytes,
            stored_bytes=share,
            how=str(head.recipe.get("kind", "?")) if isinstance(head.recipe, dict) else "?",
            record=head.name,
            shared=len(head.infos) > 1,
            needs_base=head.base is not None,
            coding=describe_recipe(head.recipe),
        )


def describe_recipe(recipe: JSON) -> str:
    """Coding of the tensors of a record, in words; "unknown" for a recipe that no writer of ours makes.

    >>> describe_recipe({"kind": "quantized", "bins": 16, "residual": True})
    'differences on 16 levels'
    """
    recipe = recipe if isinstance(recipe, dict) else {}
    kind, bins = recipe.get("kind"), recipe.get("bins")
    if kind == "gridded":
        return _LATTICES.get(str(recipe.get("law")), "unknown")
    if kind == "quantized":
        return f"{'differences' if recipe.get('residual') else 'values'} on {bins if type(bins) is int else '?'} levels"
    if kind == "coded":
        runs = recipe.get("runs")
        first = runs[0] if isinstance(runs, list) and runs and isinstance(runs[0], dict) else {}
        return f"exact, {_PREDICTORS.get(str(first.get('predictor')), 'coded alone')}"
    return _UNCODED.get(str(kind), "unknown")


_UNCODED = {
    "plain": "exact, as it is",
    "same": "as in the base",
    "copy": "as another tensor",
    "twister": "exact, as refills of the generator in the base",
}
_PREDICTORS = {
    "adam": "from the base by Adam's step",
    "square": "from the base by Adam's average",
    "base": "as a difference to the base",
}
_LATTICES = {
    "linear": "multiples of a step",
    "relative": "multiples of a step, in units of the second moment's root",
    "log": "powers",
}


def _split_bytes(weights: list[int], total: int) -> list[int]:
    """Splits `total` in proportion to the weights, so that the shares add up to it."""
    total_weight = sum(weights)
    if not total_weight:
        return [total, *[0] * (len(weights) - 1)] if weights else []
    ends = [total * cumulative // total_weight for cumulative in accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


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
