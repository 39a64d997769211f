"""A decoded state as a safetensors or a torch file."""

from __future__ import annotations

import os
import secrets
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

from shrinkpoint.cli.decoded import decode
from shrinkpoint.cli.target import Target
from shrinkpoint.container.header import NATIVE
from shrinkpoint.errors import NotFoundError, PolicyError, StorageError
from shrinkpoint.foreign.leaves import Valued, items, named, tensor_of, valued
from shrinkpoint.state import dtype_name, unflatten
from shrinkpoint.state.path import Path as Keys
from shrinkpoint.state.path import name_of
from shrinkpoint.storage import storage_error

_ABSENT = object()


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        tensors: how many, each name counted.
        bytes: of the file.
        left_out: plain values that the format cannot hold.
        converted: numpy values that became tensors and numbers.
    """

    tensors: int
    bytes: int
    left_out: int
    converted: int


def write(where: Target, out: Path, *, torch_file: bool, only: Sequence[str]) -> Exported:
    """Decode `where` and write `out`, all or nothing.

    Args:
        only: patterns; what no pattern matches by its name is left out.

    Raises:
        NotFoundError: nothing matches.
        PolicyError: safetensors has no such dtype.
        StorageError: writing failed.
    """
    decoded = decode(where)
    state = unflatten(decoded.tree, decoded.reference.tensors, where=str(where), max_bytes=decoded.left)
    if only:
        state = _selected(state, only, ())
    leaves = named(state) if state is not _ABSENT else {}
    if only and not leaves:
        found = f"nothing named like {' or '.join(only)}"
        raise NotFoundError(str(where), found=found, do=f"see `shrinkpoint show {where.path} --tensors --values`")
    arrays = sum(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves.values())
    tensors = {name: leaf for name, leaf in leaves.items() if valued(leaf)}
    if torch_file:
        plain = _plain(state)
        _replace(out, lambda path: torch.save(plain, path))
        return Exported(len(tensors), out.stat().st_size, 0, arrays)
    rows = _separate(tensors)
    _replace(out, lambda path: save_file(rows, path, {"format": "pt"}))
    return Exported(len(tensors), out.stat().st_size, len(leaves) - len(tensors), 0)


def _selected(value: Any, only: Sequence[str], path: Keys) -> Any:
    """The nest without the leaves that no pattern matches, and without what is empty then."""
    inside = items(value)
    if inside is None:
        return value if any(fnmatchcase(name_of(path), pattern) for pattern in only) else _ABSENT
    pairs = [(key, _selected(item, only, (*path, key))) for key, item in inside]
    left = [(key, item) for key, item in pairs if item is not _ABSENT]
    if not left:
        return _ABSENT
    return type(value)(left) if isinstance(value, OrderedDict) else _like(value, left)


def _like(value: Any, pairs: list[tuple[Any, Any]]) -> Any:
    if isinstance(value, dict):
        return dict(pairs)
    return tuple(item for _, item in pairs) if isinstance(value, tuple) else [item for _, item in pairs]


def _plain(value: Any) -> Any:
    """The nest with numpy values as tensors and numbers: `torch.load(weights_only=True)` knows no numpy."""
    if isinstance(value, np.ndarray):
        return tensor_of(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Size | Counter):
        return value
    inside = items(value)
    if inside is None:
        return value
    pairs = [(key, _plain(item)) for key, item in inside]
    if not isinstance(value, OrderedDict):
        return _like(value, pairs)
    ordered = OrderedDict(pairs)
    vars(ordered).update(vars(value))  # `_metadata`, which load_state_dict looks at
    return ordered


def _separate(tensors: dict[str, Valued]) -> dict[str, Tensor]:
    """Contiguous, each in memory of its own: safetensors does not share."""
    rows: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        tensor = tensor_of(value)
        if dtype_name(tensor.dtype) not in NATIVE:
            found, do = f"dtype {dtype_name(tensor.dtype)}", "export --to torch, or leave it out with --only"
            raise PolicyError(name, found=found, expected="a dtype that safetensors has", do=do)
        storage = tensor.untyped_storage()
        whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        rows[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
    return rows


def _replace(out: Path, save: Callable[[Path], None]) -> None:
    """Write under a temporary name, flush, rename: `out` is whole or as it was."""
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        save(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(out)
    except OSError as error:
        raise storage_error(str(out), "writing", error) from error
    except (SafetensorError, RuntimeError) as error:  # what safetensors and torch make of a failing disk
        raise StorageError(
            str(out), found=f"writing failed ({error})", do="look at the disk and at the permissions"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
