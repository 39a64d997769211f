"""Writes a decoded state as a safetensors or a torch file."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shrinkpoint.cli.arguments import Location, decode_location
from shrinkpoint.container.header import SAFETENSORS_DTYPES
from shrinkpoint.convert.safetensors_file import copy_if_shared
from shrinkpoint.errors import NotFoundError, PolicyError, StorageError
from shrinkpoint.storage import atomic_replace
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.flat_state import unflatten
from shrinkpoint.tensors.names import (
    StatePath,
    TensorOrArray,
    as_tensor,
    child_items,
    is_array,
    named_leaves,
    tensor_name,
)

_ABSENT = object()


@dataclass(frozen=True)
class ExportResult:
    """What was written.

    Attributes:
        tensors: how many, each name counted.
        nbytes: of the file.
        num_omitted: plain values that the format cannot hold.
        num_converted: numpy values that became tensors and numbers.
    """

    tensors: int
    nbytes: int
    num_omitted: int
    num_converted: int


def write_export(location: Location, out: Path, *, as_torch: bool, patterns: Sequence[str]) -> ExportResult:
    """Decodes the checkpoint at a location and writes it atomically.

    Args:
        location: the checkpoint.
        out: the file to write.
        as_torch: write a torch file instead of a safetensors file.
        patterns: names to write, as of `fnmatch`; empty: all.

    Raises:
        NotFoundError: nothing matches.
        PolicyError: safetensors has no such dtype.
        StorageError: writing failed.
    """
    decoded = decode_location(location)
    state = unflatten(decoded.tree, decoded.reference.tensors, where=str(location), max_bytes=decoded.max_copy_bytes)
    if patterns:
        state = _select(state, patterns, ())
    leaves = named_leaves(state) if state is not _ABSENT else {}
    if patterns and not leaves:
        found = f"nothing named like {' or '.join(patterns)}"
        raise NotFoundError(str(location), found=found, do=f"see `shrinkpoint show {location.path} --tensors --values`")
    arrays = sum(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves.values())
    tensors = {name: leaf for name, leaf in leaves.items() if is_array(leaf)}
    if as_torch:
        plain = _numpy_to_torch(state)
        _write(out, lambda path: torch.save(plain, path))
        return ExportResult(len(tensors), out.stat().st_size, 0, arrays)
    rows = _to_unshared(tensors)
    _write(out, lambda path: save_file(rows, path, {"format": "pt"}))
    return ExportResult(len(tensors), out.stat().st_size, len(leaves) - len(tensors), 0)


def _select(value: Any, patterns: Sequence[str], path: StatePath) -> Any:
    """Removes the leaves that no pattern matches, and containers that become empty."""
    items = child_items(value)
    if items is None:
        return value if any(fnmatchcase(tensor_name(path), pattern) for pattern in patterns) else _ABSENT
    pairs = [(key, _select(item, patterns, (*path, key))) for key, item in items]
    selected = [(key, item) for key, item in pairs if item is not _ABSENT]
    if not selected:
        return _ABSENT
    return type(value)(selected) if isinstance(value, OrderedDict) else _rebuild(value, selected)


def _rebuild(value: Any, pairs: list[tuple[Any, Any]]) -> Any:
    if isinstance(value, dict):
        return dict(pairs)
    return tuple(item for _, item in pairs) if isinstance(value, tuple) else [item for _, item in pairs]


def _numpy_to_torch(value: Any) -> Any:
    """Replaces numpy values by tensors and numbers, which `torch.load(weights_only=True)` accepts."""
    if isinstance(value, np.ndarray):
        return as_tensor(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Size | Counter):
        return value
    items = child_items(value)
    if items is None:
        return value
    pairs = [(key, _numpy_to_torch(item)) for key, item in items]
    if not isinstance(value, OrderedDict):
        return _rebuild(value, pairs)
    ordered = OrderedDict(pairs)
    vars(ordered).update(vars(value))  # `_metadata`, which load_state_dict reads
    return ordered


def _to_unshared(tensors: dict[str, TensorOrArray]) -> dict[str, Tensor]:
    """Makes tensors contiguous and copies those that share memory, which safetensors cannot store."""
    rows: dict[str, Tensor] = {}
    storage_pointers: set[int] = set()
    for name, value in tensors.items():
        tensor = as_tensor(value)
        if dtype_name(tensor.dtype) not in SAFETENSORS_DTYPES:
            found, do = f"dtype {dtype_name(tensor.dtype)}", "export --to torch, or leave it out with --only"
            raise PolicyError(name, found=found, expected="a dtype that safetensors has", do=do)
        rows[name] = copy_if_shared(tensor, storage_pointers)
    return rows


def _write(out: Path, save: Callable[[Path], None]) -> None:
    """Call `save` with a temporary path, which then takes the place of `out`."""
    with atomic_replace(out) as temporary:
        try:
            save(temporary)
        except (SafetensorError, RuntimeError) as error:  # what safetensors and torch make of a failing disk
            raise StorageError(
                str(out), found=f"writing failed ({error})", do="look at the disk and at the permissions"
            ) from error
